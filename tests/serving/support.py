"""What the server's tests share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

STUB_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_engine.py")))


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is true, and fail if it takes too long."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
