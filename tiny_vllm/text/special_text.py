"""Text that reads like control tokens, told apart by who wrote it: the client, or the chat template.

A conversation is rendered with a mark before everything of the client's that reads like a control token; what
has no mark in the rendered text is the template's own. Where the client wrote nothing of the kind, nothing is
marked and nothing is done here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from tiny_vllm.errors import MAX_REASON_LEN, RequestError, printable

MARKS = range(0x1D800, 0x1DA00)
"""Symbols of Sutton SignWriting: normalisers leave them alone, no chat template has one, they belong to no
word, and Python does not escape them where a template writes a whole message or tool as Python would."""

ORDINARY_ID = 0
"""What the finder makes of text between control tokens."""


def encoded_ids(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids. Raises RequestError for text that the vocabulary has no tokens for."""
    try:
        # Works out no offsets, and lets other threads run meanwhile: `encode` does neither.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except Exception as error:  # the library raises bare Exception
        reason = printable(str(error), MAX_REASON_LEN)
        raise RequestError(
            f"the tokenizer cannot encode this text: {reason}",
            hint="the reason is the tokenizer's own; send other text, or token ids",
        ) from None


class SpecialText:
    """Finds a tokenizer's control tokens in text, and encodes text of which only some count as such.

    backend: finished; what is found is what it would find. Its vocabulary is shared, not copied.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        special = [token for token in self._added.values() if token.special]
        self._finder = Backend(models.WordLevel({"": ORDINARY_ID}, unk_token=""))
        self._finder.normalizer = backend.normalizer
        self._finder.add_special_tokens(special)
        self._beginnings = frozenset(
            token.content[:length] for token in special for length in range(1, len(token.content))
        )
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._last_encoder: tuple[str, Backend, dict[int, int]] | None = None

    def is_in(self, text: str) -> bool:
        """Whether the text has a control token."""
        (found,) = self._finder.encode_batch_fast([text], add_special_tokens=False)
        return any(token_id != ORDINARY_ID for token_id in found.ids)

    def encode(self, text: str, mark: str | None = None) -> list[int]:
        """Token ids of a text in which control tokens with the mark before them are plain text; without a
        mark all are. Nothing is added around the text."""
        if mark is None:
            prepared, mark = text, unused_mark([text])
        else:
            prepared = self._prepare(text, mark)
        encoder, real_ids = self._encoder(mark)
        found = encoded_ids(encoder, prepared, add_special_tokens=False)
        return [real_ids.get(token_id, token_id) for token_id in found]

    def marking(self, texts: Sequence[str]) -> tuple[str, Callable[[str], str]] | None:
        """A mark that is in none of the texts, and what puts it into one of them; None if none needs it.

        It is put before each control token, and before the beginning of one at the end of a text: whatever
        the template puts behind that must not complete the token unseen.
        """
        if not any(self._open_ends(text) or self.is_in(text) for text in texts):
            return None
        mark = unused_mark(texts)

        def put(text: str) -> str:
            starts = self._open_ends(text)
            position = 0
            for part, token in self._parts(text):
                if token is not None:
                    starts.add(position)
                position += len(part)
            edges = [0, *sorted(starts), len(text)]
            return mark.join([text[start:end] for start, end in pairwise(edges)])

        return mark, put

    def _open_ends(self, text: str) -> set[int]:
        """Where beginnings of control tokens start that reach to the end of the text."""
        starts = range(max(len(text) - self._longest_beginning, 0), len(text))
        # A mark before white space would keep templates from trimming it.
        return {start for start in starts if text[start:] in self._beginnings and not text[start:].isspace()}

    def _parts(self, text: str) -> Iterator[tuple[str, str | None]]:
        """The text in parts: control tokens with their content, and what lies between them with None."""
        if not self.is_in(text):
            yield text, None
            return
        found = self._finder.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            part = text[start:end]
            if token_id == ORDINARY_ID:
                yield part, None
                continue
            # Some tokens take in the white space around them.
            body = part.strip() or part
            before, _, after = part.partition(body)
            if before:
                yield before, None
            yield body, self._finder.id_to_token(token_id)
            if after:
                yield after, None

    def _prepare(self, text: str, mark: str) -> str:
        """The text for an encoder of this mark: control tokens that count have it, and nothing else has."""
        prepared: list[str] = []
        previous = ""
        for part, token in self._parts(text):
            if token is None or previous.endswith(mark):
                prepared.append(part.replace(mark, ""))
            else:
                prepared.append(mark + token)
            previous = part
        return "".join(prepared)

    def _encoder(self, mark: str) -> tuple[Backend, dict[int, int]]:
        """The backend, but with the mark as a part of each control token; and the ids it should have given,
        where it gives others."""
        last = self._last_encoder
        if last is None or last[0] != mark:
            encoder = Backend(self._backend.model)
            encoder.normalizer = self._backend.normalizer
            encoder.pre_tokenizer = self._backend.pre_tokenizer
            tokens = {id_: _marked(token, mark) for id_, token in sorted(self._added.items())}
            encoder.add_special_tokens([token for token in tokens.values() if token.special])
            encoder.add_tokens([token for token in tokens.values() if not token.special])
            new_ids = {encoder.token_to_id(token.content): id_ for id_, token in tokens.items()}
            real_ids = {new_id: id_ for new_id, id_ in new_ids.items() if new_id is not None}
            last = mark, encoder, real_ids
            self._last_encoder = last
        return last[1], last[2]


def unused_mark(texts: Sequence[str]) -> str:
    """The first mark that is in none of the texts, as an escape neither. Raises RequestError if all are."""
    seen = set().union(*texts)
    for mark in map(chr, MARKS):
        if mark not in seen and not any(is_escaped_in(text, mark) for text in texts):
            return mark
    raise RequestError(
        f"the texts have every mark for control tokens (U+{MARKS[0]:X} to U+{MARKS[-1]:X})",
        hint="leave one out",
    )


def is_escaped_in(text: str, mark: str) -> bool:
    """Whether the text has the mark as an escape of JSON, of Python's ASCII or of its bytes."""
    as_bytes = repr(mark.encode())[2:-1]
    return any(escape in text for escape in (json.dumps(mark)[1:-1], ascii(mark)[1:-1], as_bytes))


def strings_in(value: Any) -> Iterator[str]:
    """The strings of nested mappings and sequences, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings_in(key)
            yield from strings_in(inner)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for inner in value:
            yield from strings_in(inner)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [map_strings(inner, change) for inner in value]
    return value


def _marked(token: AddedToken, mark: str) -> AddedToken:
    if not token.special:
        return token
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(mark + token.content, special=True, **flags)
