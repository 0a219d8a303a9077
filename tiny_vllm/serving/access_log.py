"""One line in the log for every request when it has ended: what, its end, how long it took, its tokens."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiny_vllm.serving.formats import usage

logger = logging.getLogger(__name__)

MAX_PATH_LEN = 200
CLIENT_HAS_LEFT = 499
FAULT = 500


class AccessLog:
    """ASGI middleware around all others. Reads "request_id" and "outputs" of the request's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        # Whoever leaves before the answer has begun gets none.
        status = CLIENT_HAS_LEFT

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            status = FAULT  # what the framework answers outside of all middleware
            raise
        finally:
            logger.info("%s", _line(scope, status, time.monotonic() - start))


def _line(scope: Scope, status: int, seconds: float) -> str:
    # As the client sent it: percent signs keep it on one line. Queries are left out, they may hold secrets.
    path = scope["raw_path"].decode("ascii", "backslashreplace")[:MAX_PATH_LEN]
    line = f"{scope['method']} {path} {status} {seconds * 1000:.0f} ms"
    state: dict[str, Any] = scope.get("state", {})
    if "outputs" in state:
        tokens = usage(state["outputs"])
        line += f", {tokens['prompt_tokens']} prompt + {tokens['completion_tokens']} completion tokens"
    # Last, because a client may have made it up.
    return f"{line}, id {state['request_id']}" if "request_id" in state else line
