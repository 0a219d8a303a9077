"""What one token contributes to a text, as bytes.

Byte-level BPE and SentencePiece pieces are bytes that depend on nothing else, so decoding a sequence is
joining them. Bytes are the right unit: a token may hold half a character.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend


class Pieces(Protocol):
    """Bytes of a token. strips_leading_space: a text that starts with a space loses that one space."""

    strips_leading_space: bool

    def bytes_of(self, token_id: int, previous_id: int | None) -> bytes:
        """Bytes that token_id appends after previous_id (None: nothing before); b"" for unknown ids."""

    def text_of(self, token_id: int) -> str | None:
        """The same as text, where that is whole characters, at least one, whatever is around; else None."""


def pieces_of(backend: Backend) -> Pieces:
    """Choose by the tokenizer's decoder."""
    rule = _byte_rule(_decoder_steps(backend))
    return ContextPieces(backend) if rule is None else BytePieces(backend, rule)


def keeps_all_bytes(backend: Backend) -> bool:
    """Whether tokens stand for bytes of the normalised text, all of which have one."""
    rule = _byte_rule(_decoder_steps(backend))
    splits = _steps_of(backend.pre_tokenizer, "pretokenizers")
    kinds, behaviours = {step["type"] for step in splits}, {step.get("behavior") for step in splits}
    drops_nothing = kinds <= {"ByteLevel", "Split", "Digits"} and "Removed" not in behaviours
    return rule is not None and rule.byte_level and drops_nothing


@dataclass(frozen=True, slots=True)
class ByteRule:
    """How a decoder turns one piece into bytes.

    byte_level: each character stands for a byte. byte_fallback: "<0x0A>" stands for byte 10.
    replacements: (old, new) in order.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strips_leading_space: bool = False


class BytePieces:
    """Pieces of byte-level BPE and of SentencePiece. Each token is worked out once, when first met."""

    def __init__(self, backend: Backend, rule: ByteRule) -> None:
        self.strips_leading_space = rule.strips_leading_space
        self._backend = backend
        self._rule = rule
        self._added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def bytes_of(self, token_id: int, previous_id: int | None) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def text_of(self, token_id: int) -> str | None:
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = _whole_text(self.bytes_of(token_id, None))
            return text

    def _work_out(self, token_id: int) -> bytes:
        piece = _piece(self._backend, token_id)
        if self._rule.byte_level:
            # An added token is plain text: its characters do not stand for bytes.
            return piece.encode() if token_id in self._added else _byte_level_bytes(piece)
        if self._rule.byte_fallback and (byte := _fallback_byte(piece)) is not None:
            return byte
        for old, new in self._rule.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


class ContextPieces:
    """Pieces of any other decoder: what a token adds behind the one before it."""

    strips_leading_space = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def bytes_of(self, token_id: int, previous_id: int | None) -> bytes:
        if not _piece(self._backend, token_id):
            return b""
        alone = self._backend.decode([token_id], skip_special_tokens=False)
        if previous_id is None:
            return alone.encode()
        before = self._backend.decode([previous_id], skip_special_tokens=False)
        both = self._backend.decode([previous_id, token_id], skip_special_tokens=False)
        return (both[len(before) :] if both.startswith(before) else alone).encode()

    def text_of(self, token_id: int) -> str | None:
        return None


def byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level piece stands for.

    Printable Latin-1 characters stand for themselves; the remaining bytes, in order, are the characters from
    U+0100 on (GPT-2's choice, which every byte-level BPE shares).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_ALPHABET = byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[character] for character in piece)
    except KeyError:
        return piece.encode()


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode() or None
    except UnicodeDecodeError:
        return None


def _fallback_byte(piece: str) -> bytes | None:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            return None
    return None


def _piece(backend: Backend, token_id: int) -> str:
    return (backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None) or ""


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    return _steps_of(backend.decoder, "decoders")


def _steps_of(part: Any, name: str) -> list[dict[str, Any]]:
    """Of a decoder or pre-tokenizer, what it was made of. name: that of its steps where it is a sequence."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state[name] if state["type"] == "Sequence" else [state]


def _byte_rule(steps: list[dict[str, Any]]) -> ByteRule | None:
    """The rule for these decoder steps, or None if a token's bytes depend on more than the token."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteRule(byte_level=True)
    if not kinds:
        return None
    byte_fallback = strips = fused = False
    replacements = []
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old} if not fused:
                replacements.append((old, " "))
                strips = step.get("prepend_scheme") != "never"
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused and start <= 1:
                strips = strips or start == 1
            case _:
                return None
    return ByteRule(
        byte_fallback=byte_fallback, replacements=tuple(replacements), strips_leading_space=strips
    )
