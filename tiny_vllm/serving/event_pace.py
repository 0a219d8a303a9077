"""How often streams get an event when many run: seldom enough for those who write and read them.

An event costs the API process some 10 us and a client in Python 30, however many tokens are in it. Beyond
some tens of thousands a second they only queue, at the client and unseen, and streams lag behind the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tiny_vllm.types import TokenEvent

EVENT_SECONDS = 20e-6
"""Between two rounds of events, for each stream of the earlier one."""


class EventPace:
    """Passes on what the engine brings, in order; soon, but not at once while many streams move.

    deliver: takes events, and returns how many streams moved. Belongs to the event loop's thread.
    """

    def __init__(self, deliver: Callable[[Sequence[TokenEvent]], int]) -> None:
        self._deliver = deliver
        self._held: list[TokenEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next_time = 0.0

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Events of one or several steps."""
        self._held += events
        if self._timer is not None or not self._held:
            return
        wait = self._next_time - time.monotonic()
        if wait > 0:
            self._timer = asyncio.get_running_loop().call_later(wait, self.flush)
        else:
            self.flush()

    def flush(self) -> None:
        """Pass on at once what is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        if held:
            start = time.monotonic()
            self._next_time = start + EVENT_SECONDS * self._deliver(held)
