"""A Tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tiny_vllm.errors import MAX_REASON_LEN, ModelError, printable, shown
from tiny_vllm.text.chat_template import ChatTemplate
from tiny_vllm.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from tiny_vllm.text.gguf_vocabulary import (
    DEFAULT_BOS_ID,
    DEFAULT_EOS_ID,
    DEFAULT_UNK_ID,
    GGUFTokenType,
    GGUFVocabulary,
)
from tiny_vllm.text.tokenizer import Tokenizer

SPACE = "▁"
"""SentencePiece writes a space as U+2581."""

NO_TOKEN = 2**32 - 1
"""What files hold for an id of -1, which says that there is no such token."""

DAMAGED = "download the file again, or use another tokenizer: pass tokenizer="
"""The hint for a vocabulary that cannot be used."""


def tokenizer_from_gguf(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Build the tokenizer that the file describes.

    Raises ModelError for a model or pre-tokenizer that is not supported, and for damaged vocabularies.
    """
    _check(vocabulary)
    match vocabulary.model:
        case "gpt2":
            return _byte_level_tokenizer(vocabulary)
        case "llama":
            return _sentencepiece_tokenizer(vocabulary)
        case other:
            raise ModelError(
                f"tokenizer.ggml.model is {shown(other)}, but must be one of 'gpt2', 'llama'",
                hint="use another tokenizer: pass tokenizer=",
            )


def _byte_level_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    name = vocabulary.pre or "default"
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {shown(name)}, which is not supported",
            hint="supported are " + ", ".join(sorted(PRE_TOKENIZERS)),
        )
    if vocabulary.merges is None:
        raise ModelError("tokenizer.ggml.merges is missing, but tokenizer.ggml.model is 'gpt2'", hint=DAMAGED)
    model = _bpe(vocabulary, merges=_read_merges(vocabulary.merges), ignore_merges=rule.ignore_merges)
    backend = Backend(model)
    backend.normalizer = normalizers.NFC() if rule.composes else None
    backend.pre_tokenizer = _splitter(rule)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, vocabulary, vocabulary.bos_token_id, vocabulary.eos_token_id, rule.adds_bos)


def _sentencepiece_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    if vocabulary.scores is None or len(vocabulary.scores) != len(vocabulary.tokens):
        num_scores = 0 if vocabulary.scores is None else len(vocabulary.scores)
        raise ModelError(
            f"tokenizer.ggml.scores has {num_scores} of {len(vocabulary.tokens)} scores", hint=DAMAGED
        )
    unk_id = DEFAULT_UNK_ID if vocabulary.unk_token_id is None else vocabulary.unk_token_id
    if not 0 <= unk_id < len(vocabulary.tokens):
        raise ModelError(
            f"the unk token id is {unk_id}, but the vocabulary has {len(vocabulary.tokens)} tokens",
            hint=DAMAGED,
        )
    model = _bpe(
        vocabulary,
        merges=_merges_from_scores(vocabulary),
        unk_token=vocabulary.tokens[unk_id],
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Backend(model)
    adds_space = vocabulary.add_space_prefix is not False
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if adds_space else replace
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    bos_id = DEFAULT_BOS_ID if vocabulary.bos_token_id is None else vocabulary.bos_token_id
    eos_id = DEFAULT_EOS_ID if vocabulary.eos_token_id is None else vocabulary.eos_token_id
    return _finish(backend, vocabulary, bos_id, eos_id, adds_bos=True)


def _finish(
    backend: Backend, vocabulary: GGUFVocabulary, bos_id: int | None, eos_id: int | None, adds_bos: bool
) -> Tokenizer:
    """Add the special tokens, the rule for BOS and EOS, and the chat template."""
    control, user_defined = [], []
    for token, token_type in zip(vocabulary.tokens, vocabulary.token_types or (), strict=False):
        if token_type in (GGUFTokenType.CONTROL, GGUFTokenType.UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif token_type == GGUFTokenType.USER_DEFINED:
            user_defined.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)
    adds_bos = adds_bos if vocabulary.add_bos_token is None else vocabulary.add_bos_token
    roles = {
        "bos_token": bos_id,
        "eos_token": eos_id,
        "unk_token": vocabulary.unk_token_id,
        "pad_token": vocabulary.pad_token_id,
    }
    # Any of them may be none of the vocabulary. It is missed if it belongs around a text.
    known = range(len(vocabulary.tokens))
    special_tokens = {
        role: vocabulary.tokens[id_] for role, id_ in roles.items() if id_ is not None and id_ in known
    }
    added = {"bos_token": adds_bos, "eos_token": vocabulary.add_eos_token}
    around = {role: special_tokens.get(role) for role, is_added in added.items() if is_added}
    missing = {
        role: id_
        for role, token in around.items()
        if token is None and (id_ := roles[role]) is not None and id_ >= 0 and id_ != NO_TOKEN
    }
    _set_bos_and_eos(backend, bos_token=around.get("bos_token"), eos_token=around.get("eos_token"))
    template = vocabulary.chat_template
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=ChatTemplate(template, special_tokens=special_tokens) if template else None,
        missing=missing,
    )


def _set_bos_and_eos(backend: Backend, *, bos_token: str | None, eos_token: str | None) -> None:
    """Make encoding start with bos_token and end with eos_token; None adds nothing there."""
    around = [token for token in (bos_token, eos_token) if token is not None]
    if not around:
        backend.post_processor = None
        return
    template = [bos_token] * (bos_token is not None) + ["$A"] + [eos_token] * (eos_token is not None)
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=ids)


def _splitter(rule: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _bpe(vocabulary: GGUFVocabulary, *, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        reason = printable(str(error), MAX_REASON_LEN)
        raise ModelError(f"the tokenizer in the file is damaged: {reason}", hint=DAMAGED) from None


def _read_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for rank, merge in enumerate(merges):
        # A piece may itself start with a space, so the separator is looked for behind its first character.
        split = merge.find(" ", 1)
        if split < 0:
            raise ModelError(
                f"tokenizer.ggml.merges[{rank}] is {shown(merge)}, but must be two pieces and a space",
                hint=DAMAGED,
            )
        pairs.append((merge[:split], merge[split + 1 :]))
    return pairs


def _merges_from_scores(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored result first.

    SentencePiece merges the neighbours whose joined piece scores highest; a table of ranked pairs does the
    same.
    """
    assert vocabulary.scores is not None
    types = vocabulary.token_types or [GGUFTokenType.NORMAL] * len(vocabulary.tokens)
    pieces = {
        token: score
        for token, score, token_type in zip(vocabulary.tokens, vocabulary.scores, types, strict=True)
        if token_type in (GGUFTokenType.NORMAL, GGUFTokenType.USER_DEFINED)
    }
    merges = []
    for piece, score in pieces.items():
        for split in range(1, len(piece)):
            if piece[:split] in pieces and piece[split:] in pieces:
                merges.append((-score, piece[:split], piece[split:]))
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _check(vocabulary: GGUFVocabulary) -> None:
    num_tokens = len(vocabulary.tokens)
    if num_tokens <= DEFAULT_EOS_ID:
        raise ModelError(
            f"tokenizer.ggml.tokens has only {num_tokens} tokens, but needs {DEFAULT_EOS_ID + 1}",
            hint=DAMAGED,
        )
    types = vocabulary.token_types
    if types is not None and len(types) != num_tokens:
        raise ModelError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} tokens", hint=DAMAGED
        )
    seen: dict[str, int] = {}
    for token_id, token in enumerate(vocabulary.tokens):
        if token and seen.setdefault(token, token_id) != token_id:
            raise ModelError(
                f"token {shown(token)} appears twice: as {seen[token]} and as {token_id}", hint=DAMAGED
            )
