"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import NFC

from tiny_vllm.errors import PromptTooLong, RequestError
from tiny_vllm.text.chat_template import ChatTemplate, Message
from tiny_vllm.text.detokenizer import Detokenizer
from tiny_vllm.text.pieces import keeps_all_bytes, pieces_of
from tiny_vllm.text.special_text import SpecialText, encoded_ids, is_escaped_in, map_strings, strings_in

NFC_SHRINKS = 3
"""NFC makes a text at most so many times shorter, in bytes (Unicode Standard Annex 15)."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library with the facts a model needs beside it.

    special_tokens: role -> text, for example {"bos_token": "<s>"}. vocab_size: one more than the highest id
    that stands for something; a model may have more rows than that. special_token_ids: control tokens, left
    out of text when special tokens are skipped. adds_bos: encoding starts with the BOS token. missing: role
    -> id of tokens that belong around a prompt, but that the vocabulary does not have: texts that get one are
    refused.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        missing: Mapping[str, int] | None = None,
    ) -> None:
        # Checkpoints carry the limits of their training; a prompt is never cut or padded silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = pieces_of(backend)
        self._token_texts: dict[int, str] = {}
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._missing = dict(missing or {})
        self.bos_token_id = self._id_of_role("bos_token")
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._added_around = _added_around(backend)
        start = self._added_around[0][:1]
        letter = backend.encode("a", add_special_tokens=False).ids
        self._adds_space = bool(letter) and self.token_bytes(letter[0]).startswith(b" ")
        self.adds_bos = self.bos_token_id is not None and start == [self.bos_token_id]

    @property
    def drops_leading_space(self) -> bool:
        """Whether decoding drops the space at the very start of a text, as SentencePiece does."""
        return self._pieces.strips_leading_space

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        context_len: int | None = None,
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens: add what the tokenizer adds to a prompt, usually BOS. A text that already begins
        with the BOS token does not get a second one, so a rendered conversation may be passed as it is.
        parse_special_tokens: take control tokens that are written out in the text as such, as Hugging Face
        and vLLM do; otherwise they are plain text. context_len: see `fewest_tokens`; a text that has as many
        is refused. Raises RequestError for anything that is not Unicode text, and PromptTooLong.
        """
        _check_text(text)
        self._check_len(text, context_len)
        if add_special_tokens:
            self._check_added("bos_token", "eos_token")
        if not parse_special_tokens and self._special_text.is_in(text):
            before, after = self._added_around if add_special_tokens else ([], [])
            return [*before, *self._special_text.encode(text), *after]
        ids = self._ids(text, add_special_tokens)
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        parse_special_tokens: bool = False,
        context_len: int | None = None,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and as token ids.

        Control tokens are those that the chat template writes. One that a client writes into a message, a
        tool or a variable is plain text, unless parse_special_tokens. context_len: as for `encode`. options:
        see ChatTemplate.render. Raises RequestError if there is no template, and for what cannot be rendered.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template", hint="send a prompt as text")
        try:
            return self._encode_messages(
                self.chat_template, messages, parse_special_tokens, context_len, options
            )
        except RecursionError:
            raise RequestError(
                "the messages, tools or template variables are nested too deeply",
                hint="nest fewer lists and objects",
            ) from None

    def _encode_messages(
        self,
        chat_template: ChatTemplate,
        messages: Sequence[Message],
        parse_special_tokens: bool,
        context_len: int | None,
        options: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        # Before its control tokens are looked for: JSON may spell them with escapes.
        messages = chat_template.read_arguments(messages)
        given = [messages, options.get("tools"), options.get("variables")]
        texts = list(strings_in(given))
        for text in texts:
            _check_text(text)
        marking = None if parse_special_tokens else self._special_text.marking(texts)
        if marking is None:
            text = chat_template.render(messages, **options)
            self._check_len(text, context_len)
            return text, self.encode_chat(text)
        mark, put = marking
        put_into = [map_strings(value, put) for value in given]
        try:
            marked = chat_template.render(
                put_into[0], **{**options, "tools": put_into[1], "variables": put_into[2]}
            )
        except RequestError:
            chat_template.render(messages, **options)  # Refused in the client's own words.
            raise
        if is_escaped_in(marked, mark):
            raise RequestError(
                "this model's chat template writes messages, tools or variables with escapes, where the "
                "client's control tokens cannot be told from its own",
                hint="leave control tokens out of them, or set parse_special_tokens",
            )
        text = marked.replace(mark, "")
        self._check_len(text, context_len)
        return text, self._with_bos(self._special_text.encode(marked, mark))

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation: one BOS if the tokenizer adds BOS, whoever writes it.

        Only BOS is added: an end-of-sequence token after the prompt would end the reply before it starts.
        """
        _check_text(rendered)
        return self._with_bos(self._ids(rendered, False))

    def encode_word(self, word: str) -> list[list[int]]:
        """Token ids of a word in both its forms: after a space, and joined to what is before it.

        word: without a leading space. No special tokens.
        """
        if not self._adds_space:
            return [
                self.encode(f" {word}", add_special_tokens=False),
                self.encode(word, add_special_tokens=False),
            ]
        # The tokenizer puts a space before the word itself, unless something else is there already.
        anchor = self.encode("\n", add_special_tokens=False)
        joined = self.encode(f"\n{word}", add_special_tokens=False)
        after_space = self.encode(word, add_special_tokens=False)
        if joined[: len(anchor)] != anchor:
            return [after_space]
        return [after_space, joined[len(anchor) :]]

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, 0 where that is unknown. Encoding a text takes over
        a hundred times its size in memory, which is lost on one that no context holds."""
        if not self._most_bytes_of_a_token:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._most_bytes_of_a_token)

    def decode(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = True, continues: bool = False
    ) -> str:
        """Text of token ids: their bytes, joined and read as UTF-8, U+FFFD for bytes that are no character.

        Ids without a token leave nothing. For well-formed text this is what the `tokenizers` library gives.
        continues: see Detokenizer.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens, continues=continues)
        text = "".join([detokenizer.add(token_id) for token_id in token_ids])
        return text + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """An incremental `decode`."""
        skipped_ids = self.special_token_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._pieces, skipped_ids=skipped_ids, continues=continues)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, leading space included; empty for an id without a token."""
        return self._pieces.bytes_of(token_id, None)

    def token_text(self, token_id: int) -> str:
        """One token as text, U+FFFD for the bytes of a part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token given as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self._backend)

    def _check_len(self, text: str, context_len: int | None) -> None:
        # A byte of a text is a token at most.
        if context_len is None or len(text) < context_len:
            return
        if (fewest := self.fewest_tokens(text)) >= context_len:
            raise PromptTooLong.for_context(f"{fewest} tokens or more", context_len)

    @cached_property
    def _most_bytes_of_a_token(self) -> int:
        """Of a text, before it is normalised. 0: any number."""
        backend = self._backend
        added = backend.get_added_tokens_decoder().values()
        shrinks = {type(None): 1, NFC: NFC_SHRINKS}.get(type(backend.normalizer))
        if shrinks is None or not keeps_all_bytes(backend) or any(t.lstrip or t.rstrip for t in added):
            return 0
        vocabulary = backend.get_vocab(with_added_tokens=False)
        longest = max(map(len, vocabulary), default=0)  # a character for each byte
        return shrinks * max([longest, *(len(token.content.encode()) for token in added)])

    def _check_added(self, *roles: str) -> None:
        for role in self._missing.keys() & roles:
            raise RequestError(
                f"the prompt gets the {role[:3].upper()} token {self._missing[role]}, but this tokenizer's "
                f"ids are 0 to {self.vocab_size - 1}",
                hint="send token ids, or use another tokenizer",
            )

    def _with_bos(self, ids: list[int]) -> list[int]:
        self._check_added("bos_token")
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return encoded_ids(self._backend, text, add_special_tokens=add_special_tokens)

    def _id_of_role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


def _added_around(backend: Backend) -> tuple[list[int], list[int]]:
    """What encoding puts before and after the ids of a text."""
    encoded = backend.encode("")
    masks = backend.encode("a").special_tokens_mask
    num_before = next((place for place, is_added in enumerate(masks) if not is_added), len(masks))
    return encoded.ids[:num_before], encoded.ids[num_before:]


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(
            f"text is of type {type(text).__name__}, but must be a string", hint="decode bytes to text first"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text is not valid Unicode: U+{ord(text[error.start]):04X} at position {error.start} "
            "is a lone surrogate",
            hint="it stands for a byte that is not UTF-8, or is half of a \\u escape pair; send UTF-8",
        ) from None
