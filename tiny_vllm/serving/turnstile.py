"""Lets calls in one after another, so that a thousand that arrive at once do not hold up running streams.

Without it the event loop takes the first step of every call that is there before it hears the engine again,
and the last step of the first call comes after the first one of the last.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_PER_TURN = 2
"""Calls let in between two looks at sockets and the engine: some 1.5 ms of work."""


class Turnstile:
    """ASGI application around all others. Only calls that bring work wait: POST."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_in_turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._enter()
        await self._app(scope, receive, send)

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._num_in_turn:
            loop.call_soon(self._begin_turn)
        if self._num_in_turn < MAX_PER_TURN:
            self._num_in_turn += 1
            return
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        await future

    def _begin_turn(self) -> None:
        self._num_in_turn = 0
        while self._waiting and self._num_in_turn < MAX_PER_TURN:
            future = self._waiting.popleft()
            if not future.done():  # else its call was cancelled
                future.set_result(None)
                self._num_in_turn += 1
        if self._num_in_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)
