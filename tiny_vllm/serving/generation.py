"""One HTTP call's requests while the engine works on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tiny_vllm.errors import TinyVLLMError
from tiny_vllm.outputs import RequestOutput, RequestUpdate
from tiny_vllm.types import Request

logger = logging.getLogger(__name__)

PromptUpdate = tuple[int, RequestUpdate]
"""The place of a prompt in its call, and news of it."""


class Aborter(Protocol):
    def abort(self, request_ids: Sequence[str]) -> None: ...


class Generation:
    """The prompts of one call, in order. For one consumer; a context manager that aborts what is unfinished.

    requests: as the engine got them. outputs: what is known of each; they grow in place.
    is_streamed: whether the consumer wants to wake up for every update. push: may deal with an update while
    the consumer waits, so that it need not wake up; returns whether it has.
    """

    def __init__(
        self,
        owner: Aborter,
        requests: Sequence[Request],
        outputs: Sequence[RequestOutput],
        *,
        is_streamed: bool,
    ) -> None:
        self.requests = requests
        self.outputs = outputs
        self._owner = owner
        self._places = {output.request_id: place for place, output in enumerate(outputs)}
        self._unfinished = set(self._places)
        self.push: Callable[[PromptUpdate], bool] = lambda update: False
        self._is_streamed = is_streamed
        self._is_awaited = False
        self._pending: list[PromptUpdate] = []
        self._failure: TinyVLLMError | None = None
        self._news = asyncio.Event()
        self._accepted = asyncio.Event()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether every prompt has finished, and the consumer has all news of it."""
        return not (self._unfinished or self._pending)

    def output_of(self, request_id: str) -> RequestOutput:
        return self.outputs[self._places[request_id]]

    def request_of(self, request_id: str) -> Request:
        return self.requests[self._places[request_id]]

    async def accepted(self) -> None:
        """Wait until the engine has queued the requests. Raises what it refuses them with."""
        await self._accepted.wait()
        if self._failure is not None:
            raise self._failure

    async def updates(self) -> list[PromptUpdate]:
        """What has come since the last call, in order; empty at the end. Raises EngineDead."""
        while not self._pending and self._unfinished:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            self._is_awaited = True
            try:
                await self._news.wait()
            finally:
                self._is_awaited = False
        pending, self._pending = self._pending, []
        return pending

    async def finished(self) -> None:
        """Wait for the end of every prompt. Raises EngineDead."""
        while self._unfinished:
            await self.updates()

    def close(self) -> None:
        """Abort whatever has not finished. May be called again."""
        unfinished, self._unfinished = self._unfinished, set()
        if unfinished:
            self._owner.abort(sorted(unfinished))

    def accept(self) -> None:
        """The engine has queued the requests."""
        self._accepted.set()

    def fail(self, error: TinyVLLMError) -> None:
        """The engine has refused the requests or is dead: nothing more will come."""
        self._failure = error
        self._accepted.set()
        self._news.set()

    def take(self, update: RequestUpdate) -> None:
        """News of one of the prompts."""
        request_id = update.output.request_id
        if update.finished:
            self._unfinished.discard(request_id)
        if self._is_streamed:
            news = (self._places[request_id], update)
            if self._is_awaited and not self._news.is_set() and self._has_pushed(news):
                return
            self._pending.append(news)
        elif self._unfinished:
            return
        self._news.set()

    def _has_pushed(self, news: PromptUpdate) -> bool:
        try:
            return self.push(news)
        except Exception:
            # The same will happen to the consumer, whose business it is.
            logger.debug("an update could not be pushed", exc_info=True)
            return False
