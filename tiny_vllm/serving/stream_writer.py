"""Chunks of a stream on their way out: encoded once as far as they are alike, and written without waiting.

News of a stream usually find a client that keeps up, and then nothing has to wake up: the handler of the
engine's message writes the chunk. For everything else (the end, a client that reads slowly, a server without
a BodyWriter) `StreamWriter.push` declines, and the task of the request sends it as ASGI has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tiny_vllm.outputs import ChoiceDelta, RequestOutput, RequestUpdate
from tiny_vllm.serving.formats import StreamFormat
from tiny_vllm.serving.generation import PromptUpdate
from tiny_vllm.serving.protocol import BodyWriter

MARK = "\U000f0000text\U000f0000"
"""Stands for the text in a chunk that others are made from."""

Frame = tuple[bytes, bytes]
"""What stands before and after the text in an event."""


class StreamWriter:
    """The events of one answer. writer: None if the server has none."""

    def __init__(
        self, form: StreamFormat, outputs: Sequence[RequestOutput], writer: BodyWriter | None
    ) -> None:
        self._form = form
        self._outputs = outputs
        self._writer = writer
        self._frames: dict[tuple[int, int], Frame | None] = {}
        self._encode = msgspec.json.Encoder().encode

    def push(self, news: PromptUpdate) -> bool:
        """Write the events of an update, if it is no choice's last and nobody need wait; whether it did."""
        writer = self._writer
        if writer is None or not writer.is_ready:
            return False
        place, update = news
        for delta in update.deltas:
            if delta.finish_reason is not None:
                return False
        parts: list[bytes] = []
        for delta in update.deltas:
            frame = self._frame(place, delta.index)
            if frame is None:
                parts = [encoded_events(self._form.chunks(self._outputs, [news]))]
                break
            if delta.text:
                parts += (frame[0], self._encode(delta.text), frame[1])
        if body := b"".join(parts):
            writer.write(body)
        return True

    def _frame(self, place: int, index: int) -> Frame | None:
        """None if chunks of this choice differ in more than the text."""
        key = (place, index)
        try:
            return self._frames[key]
        except KeyError:
            frame = self._frames[key] = self._new_frame(place, index)
            return frame

    def _new_frame(self, place: int, index: int) -> Frame | None:
        if not self._form.is_plain:
            return None
        update = RequestUpdate(self._outputs[place], [ChoiceDelta(index, MARK)])
        event = encoded_events(self._form.chunks(self._outputs, [(place, update)]))
        # Ids that clients choose are only parts of strings: no other whole one is the mark.
        before, mark, after = event.partition(self._encode(MARK))
        assert mark
        return before, after


def encoded_events(chunks: Sequence[dict[str, Any]]) -> bytes:
    """Server-sent events."""
    encode = msgspec.json.encode
    return b"".join([b"data: " + encode(chunk) + b"\n\n" for chunk in chunks])
