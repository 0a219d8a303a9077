from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tiny_vllm.errors import ModelError, RequestError
from tiny_vllm.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
from tiny_vllm.text.gguf_vocabulary import GGUFVocabulary
from tiny_vllm.text.tokenizer import Tokenizer

SAME_RULES = {
    "gpt-2": ("phi-2",),
    "smollm": ("starcoder", "refact", "codeshell"),
    "llama-bpe": ("llama3", "llama-v3", "dbrx", "smaug-bpe"),
    "qwen2": ("deepseek-r1-qwen", "stablelm2"),
    "gpt-4o": ("llama4",),
}
RECORDED = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o")


def is_comparable(pre: str, text: str) -> bool:
    """Whether the recorded ids are the model's own for this text.

    llama.cpp does not compose characters before qwen2's rule, and tells upper from lower case only in ASCII.
    """
    if pre == "qwen2":
        return unicodedata.is_normalized("NFC", text)
    if pre in ("tekken", "gpt-4o"):
        marks = any(unicodedata.category(character).startswith("M") for character in text)
        cased = any(character.upper() != character.lower() and not character.isascii() for character in text)
        return not marks and not cased
    return True


def test_bundled_model_gets_known_ids(bundled_tokenizer: Tokenizer, bundled_data: dict[str, Any]) -> None:
    for text, ids in zip(bundled_data["texts"], bundled_data["ids"], strict=True):
        assert bundled_tokenizer.encode(text) == ids, text
        assert bundled_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("\n\n1.", ["\n\n", "1", "."]),
        ("x =   3", ["x", " =", "   ", "3"]),
        ("2024", ["2", "0", "2", "4"]),
    ],
)
def test_bundled_model_splits_digits(bundled_tokenizer: Tokenizer, text: str, pieces: list[str]) -> None:
    assert [bundled_tokenizer.token_text(token_id) for token_id in bundled_tokenizer.encode(text)] == pieces


@pytest.mark.parametrize("pre", RECORDED)
def test_each_pre_tokenizer_gives_known_ids(
    byte_level_vocabulary: GGUFVocabulary, byte_level_data: dict[str, Any], pre: str
) -> None:
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, pre=pre))
    cases = zip(byte_level_data["texts"], byte_level_data[f"ids:{pre}"], strict=True)
    compared = [(text, ids) for text, ids in cases if is_comparable(pre, text)]
    assert len(compared) > 100
    for text, ids in compared:
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize(("known", "name"), [(k, n) for k, names in SAME_RULES.items() for n in names])
def test_names_of_one_rule_agree(known: str, name: str) -> None:
    assert PRE_TOKENIZERS[name].patterns == PRE_TOKENIZERS[known].patterns


def test_recorded_rules_differ(byte_level_data: dict[str, Any]) -> None:
    seen = [str(byte_level_data[f"ids:{pre}"]) for pre in RECORDED]
    assert len(set(seen)) == len(RECORDED)


def test_qwen2_composes_characters_first(byte_level_vocabulary: GGUFVocabulary) -> None:
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_upper_case_is_told_from_lower_in_every_script(byte_level_vocabulary: GGUFVocabulary) -> None:
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, pre="tekken"))
    pieces = [tokenizer.encode(text) for text in ("ж", "Ж", "ж")]
    assert tokenizer.encode("жЖж") == pieces[0] + tokenizer.encode("Жж")


def test_a_word_of_the_vocabulary_is_taken_whole_where_merges_are_ignored(
    byte_level_vocabulary: GGUFVocabulary,
) -> None:
    tokens = [*byte_level_vocabulary.tokens, "qzqzq"]  # no merge leads to it
    types = [*(byte_level_vocabulary.token_types or ()), 1]
    extended = replace(byte_level_vocabulary, tokens=tokens, token_types=types)
    assert tokenizer_from_gguf(replace(extended, pre="llama-bpe")).encode("qzqzq") == [len(tokens) - 1]
    assert len(tokenizer_from_gguf(replace(extended, pre="smollm")).encode("qzqzq")) > 1


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_model_gets_known_ids(
    sentencepiece_vocabulary: GGUFVocabulary, sentencepiece_data: dict[str, Any], space_prefix: bool
) -> None:
    tokenizer = tokenizer_from_gguf(
        replace(sentencepiece_vocabulary, add_space_prefix=space_prefix, add_bos_token=False)
    )
    recorded = sentencepiece_data[f"ids_with{'' if space_prefix else 'out'}_space_prefix"]
    for text, ids in zip(sentencepiece_data["texts"], recorded, strict=True):
        assert tokenizer.encode(text) == ids, text


def test_sentencepiece_text_survives_the_round_trip(
    sentencepiece_tokenizer: Tokenizer, sentencepiece_data: dict[str, Any]
) -> None:
    for text in sentencepiece_data["texts"]:
        if "<s>" in text or "</s>" in text or "<unk>" in text:
            continue
        assert sentencepiece_tokenizer.decode(sentencepiece_tokenizer.encode(text)) == text


def test_bos_and_eos_follow_the_file(sentencepiece_vocabulary: GGUFVocabulary) -> None:
    word = tokenizer_from_gguf(replace(sentencepiece_vocabulary, add_bos_token=False)).encode("is")
    assert tokenizer_from_gguf(sentencepiece_vocabulary).encode("is") == [1, *word]
    both = replace(sentencepiece_vocabulary, add_bos_token=True, add_eos_token=True)
    assert tokenizer_from_gguf(both).encode("is") == [1, *word, 2]
    assert tokenizer_from_gguf(both).encode("is", add_special_tokens=False) == word


@pytest.mark.parametrize(("pre", "adds_bos"), [("llama-bpe", True), ("tekken", True), ("smollm", False)])
def test_bos_default_follows_the_pre_tokenizer(
    byte_level_vocabulary: GGUFVocabulary, pre: str, adds_bos: bool
) -> None:
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, pre=pre, add_bos_token=None))
    assert tokenizer.adds_bos is adds_bos


def test_user_defined_tokens_are_matched_but_stay_in_the_text(byte_level_vocabulary: GGUFVocabulary) -> None:
    tokens = [*byte_level_vocabulary.tokens, "<tool>", "<end>"]
    types = [*(byte_level_vocabulary.token_types or ()), 4, 3]
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, tokens=tokens, token_types=types))
    ids = tokenizer.encode("<tool><end>")
    assert ids == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids) == "<tool>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "martian"}, "'martian'.*\nhint: supported are .*smollm"),
        ({"model": "bert"}, "'bert'.*'gpt2', 'llama'"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"merges": ["never seen"]}, "damaged"),
        ({"token_types": [1]}, "token_type has 1 entries"),
        ({"tokens": ["a", "b", "a"], "token_types": None}, "'a' appears twice: as 0 and as 2"),
        ({"tokens": [], "token_types": None}, "has only 0 tokens"),
        ({"model": "llama"}, "scores has 0 of"),
    ],
)
def test_damaged_vocabularies_are_refused(
    byte_level_vocabulary: GGUFVocabulary, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(replace(byte_level_vocabulary, **change))


@pytest.mark.parametrize("pad", [-1, 2**32 - 1])
def test_a_padding_token_that_is_none_is_passed_over(byte_level_vocabulary: GGUFVocabulary, pad: int) -> None:
    """Files of models with a pad_token_id of -1 hold it so; nothing is padded here."""
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, pad_token_id=pad))
    assert "pad_token" not in tokenizer.special_tokens


BEYOND = 10**6


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
@pytest.mark.parametrize("role", ["bos", "eos"])
def test_an_id_that_says_there_is_no_such_token_is_passed_over(
    sentencepiece_vocabulary: GGUFVocabulary, role: str, none: int
) -> None:
    vocabulary = replace(
        sentencepiece_vocabulary, add_bos_token=True, add_eos_token=True, **{f"{role}_token_id": none}
    )
    tokenizer = tokenizer_from_gguf(vocabulary)
    word = tokenizer.encode("is", add_special_tokens=False)
    around = {"bos": [*word, 2], "eos": [1, *word]}
    assert tokenizer.encode("is") == around[role]
    assert f"{role}_token" not in tokenizer.special_tokens


@pytest.mark.parametrize("role", ["eos", "bos", "unk"])
def test_ids_beyond_the_vocabulary_that_no_text_needs_are_passed_over(
    byte_level_vocabulary: GGUFVocabulary, role: str
) -> None:
    plain = tokenizer_from_gguf(replace(byte_level_vocabulary, add_bos_token=False))
    vocabulary = replace(byte_level_vocabulary, add_bos_token=False, **{f"{role}_token_id": BEYOND})
    tokenizer = tokenizer_from_gguf(vocabulary)
    assert tokenizer.encode("hello") == plain.encode("hello")
    assert tokenizer.special_tokens == {
        name: text for name, text in plain.special_tokens.items() if name != f"{role}_token"
    }


def test_a_bos_token_beyond_the_vocabulary_fails_each_text_that_begins_with_it(
    byte_level_vocabulary: GGUFVocabulary,
) -> None:
    vocabulary = replace(
        byte_level_vocabulary,
        add_bos_token=True,
        bos_token_id=BEYOND,
        chat_template="{{ messages[0].content }}",
    )
    tokenizer = tokenizer_from_gguf(vocabulary)
    plain = tokenizer_from_gguf(replace(byte_level_vocabulary, add_bos_token=False))
    assert tokenizer.encode("hello", add_special_tokens=False) == plain.encode("hello")
    assert tokenizer.encode_word("hello") == plain.encode_word("hello")
    control = byte_level_vocabulary.tokens[1]
    attempts: list[Callable[[], object]] = [
        lambda: tokenizer.encode("hello"),
        lambda: tokenizer.encode(f"hello {control}", parse_special_tokens=False),
        lambda: tokenizer.encode_messages([{"role": "user", "content": "hello"}]),
        lambda: tokenizer.encode_messages([{"role": "user", "content": f"hello {control}"}]),
        lambda: tokenizer.encode_chat("hello"),
    ]
    for attempt in attempts:
        with pytest.raises(RequestError) as error:
            attempt()
        size = len(byte_level_vocabulary.tokens)
        assert error.value.message == (
            f"the prompt gets the BOS token {BEYOND}, but this tokenizer's ids are 0 to {size - 1}"
        )
        assert error.value.hint == "send token ids, or use another tokenizer"


def test_an_eos_token_beyond_the_vocabulary_fails_prompts_that_end_with_it(
    byte_level_vocabulary: GGUFVocabulary,
) -> None:
    vocabulary = replace(
        byte_level_vocabulary,
        add_bos_token=False,
        add_eos_token=True,
        eos_token_id=BEYOND,
        chat_template="{{ messages[0].content }}",
    )
    tokenizer = tokenizer_from_gguf(vocabulary)
    with pytest.raises(RequestError, match=f"the prompt gets the EOS token {BEYOND}, but this tokenizer's"):
        tokenizer.encode("hello")
    # Nothing but BOS is put around conversations.
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.encode_messages(messages)[1] == tokenizer.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize("unk", [-1, BEYOND])
def test_sentencepiece_needs_its_unknown_token(sentencepiece_vocabulary: GGUFVocabulary, unk: int) -> None:
    message = f"the unk token id is {unk}, but the vocabulary has .* tokens\nhint: download the file again"
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(replace(sentencepiece_vocabulary, unk_token_id=unk))
