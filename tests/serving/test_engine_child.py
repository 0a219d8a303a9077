"""The API process's ear on its engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any, cast

import zmq

from tests.serving.support import STUB_COMMAND, has_ended, wait_until
from tiny_vllm.serving.engine_child import MAX_TAKEN_TOGETHER, EngineChild
from tiny_vllm.serving.messages import Loading, encode


def test_messages_that_have_queued_up_are_taken_in_order_and_leave_others_a_turn() -> None:
    asyncio.run(_send_many(3 * MAX_TAKEN_TOGETHER))


async def _send_many(count: int) -> None:
    turn = 0
    heard: list[tuple[int, Any]] = []
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind("inproc://ear")
        push.connect("inproc://ear")
        for number in range(count):
            push.send(encode(Loading(number, count)))
        child = EngineChild(
            (), cast(Any, None), lambda messages: heard.extend((turn, message) for message in messages)
        )
        child.listen(pull)
        async with asyncio.timeout(120):
            while len(heard) < count:
                turn += 1
                await asyncio.sleep(0)
            # One that comes later is heard as well, and after what cannot be read.
            push.send(b"nonsense")
            push.send(encode(Loading(count, count)))
            while len(heard) == count:
                await asyncio.sleep(0.01)
        asyncio.get_running_loop().remove_reader(pull.fileno())
    assert [message for _, message in heard] == [Loading(number, count) for number in range(count + 1)]
    assert len({turn for turn, _ in heard[:count]}) == 3


# Starts an engine and ends before that has read its arguments.
SHORT_LIVED = """
import os, subprocess, sys
import msgspec
from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.messages import Start
start = msgspec.json.encode(Start(EngineConfig(), 30, os.getpid())).decode()
command = [*sys.argv[1:], "ipc:///tmp/nobody-listens-here", start]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid)
"""


def test_an_engine_whose_parent_died_before_it_had_started_ends() -> None:
    command = [sys.executable, "-c", SHORT_LIVED, *STUB_COMMAND]
    parent = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    wait_until(lambda: has_ended(int(parent.stdout)))
