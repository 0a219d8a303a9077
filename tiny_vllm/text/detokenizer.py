"""Token ids to text, one token at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection

from tiny_vllm.text.pieces import Pieces


class Detokenizer:
    """Turns a growing sequence of token ids into text; constant work per token.

    The joined results of `add`, then `flush`, are `Tokenizer.decode` of the whole sequence, whatever it is:
    the tokens' bytes, joined and read as UTF-8. An unfinished character is held back until its bytes are
    complete. U+FFFD stands only for bytes that are no part of a character.

    skipped_ids: tokens that leave no text. continues: the text goes on from earlier text, so that a leading
    space belongs to it; SentencePiece otherwise drops the one it puts before the first word.
    """

    __slots__ = ("_pending", "_pieces", "_previous_id", "_skipped_ids", "_strip")

    def __init__(self, pieces: Pieces, *, skipped_ids: Collection[int] = (), continues: bool = False) -> None:
        self._pieces = pieces
        self._skipped_ids = skipped_ids
        self._strip = pieces.strips_leading_space and not continues
        self._pending = b""
        self._previous_id: int | None = None

    def add(self, token_id: int) -> str:
        """The text that this token completes; often all of its own, sometimes none."""
        if token_id in self._skipped_ids:
            return ""
        if not (self._pending or self._strip):
            text = self._pieces.text_of(token_id)
            if text is not None:
                self._previous_id = token_id
                return text
        data = self._pieces.bytes_of(token_id, self._previous_id)
        if not data:
            return ""
        self._previous_id = token_id
        if self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, num_read = utf_8_decode(data, "replace", False)
        self._pending = data[num_read:]
        return text

    def flush(self) -> str:
        """The text of what is still held back: the sequence has ended."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")
