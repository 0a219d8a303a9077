"""The queue of waiting sequences, ordered by priority with ageing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tiny_vllm.engine.sequence import Sequence


def queue_key(
    priority: int, arrival_time: float, sequence_id: int, ageing_seconds: float
) -> tuple[float, int]:
    """Order in the queue: smaller first.

    Waiting `ageing_seconds` is worth one level of priority. As everybody ages at the same pace, the order of
    two sequences never changes, so a fixed key is enough: a request of priority p is overtaken only by more
    urgent requests that arrive within (difference in priority) x ageing_seconds after it.
    """
    return (priority * ageing_seconds + arrival_time, sequence_id)


class WaitingQueue:
    """Sequences sorted by `queue_key`. A preempted sequence comes back to its old place."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; a snapshot, so the queue may change while it is walked."""
        return (sequence for _, sequence in self._entries[:])

    def push(self, sequence: Sequence) -> None:
        insort(self._entries, (sequence.queue_key, sequence))

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._entries, sequence.queue_key, key=lambda entry: entry[0])
        assert self._entries[position][1] is sequence, "the sequence is not waiting"
        del self._entries[position]
