from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.stub_engine import EOS, EXIT, FAIL
from tests.serving.support import STUB_COMMAND, Hold, eventually
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import CapacityError, ConfigError, EngineDead, RequestError
from tiny_vllm.serving import engine_client
from tiny_vllm.serving.engine_client import EngineClient, EngineState
from tiny_vllm.text.request_builder import PreparedRequest
from tiny_vllm.types import Request, SamplingParams


@asynccontextmanager
async def running(
    restart: bool = True, command: Sequence[str] = STUB_COMMAND, **options: Any
) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(**options), None, command=command, restart=restart)
    supervisor = asyncio.create_task(client.run())
    try:
        await eventually(lambda: client.state is not EngineState.LOADING)
        yield client
    finally:
        await client.close()
        await supervisor


def request(name: str, prompt: list[int], **sampling: Any) -> PreparedRequest:
    params = SamplingParams(**{"max_tokens": 5, "detokenize": False, **sampling})
    return PreparedRequest(Request(name, tuple(prompt), params, 0.0), None)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))  # type: ignore[arg-type]


def test_tokens_come_back_in_order_and_each_prompt_ends_once() -> None:
    async def test() -> None:
        async with running() as client:
            prepared = [request("a", [5, 6, 7]), request("b", [9, EOS, 9], n=2)]
            with await client.submit(prepared, is_streamed=True) as generation:
                seen: list[tuple[int, int, int]] = []
                ends = []
                while updates := await generation.updates():
                    for place, update in updates:
                        ends += [place] if update.finished else []
                        seen += [(place, d.index, t) for d in update.deltas for t in d.token_ids]
            assert [t for place, _, t in seen if place == 0] == [5, 6, 7, 5, 6]
            assert [t for place, index, t in seen if (place, index) == (1, 0)] == [9, EOS]
            assert [t for place, index, t in seen if (place, index) == (1, 1)] == [EOS]
            assert sorted(ends) == [0, 1]
            assert client.num_requests == 0

    run(test)


def test_a_refused_batch_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with running(num_pages=4, max_queue_len=10) as client:
            with pytest.raises(RequestError, match="never fit"):
                await client.submit([request("a", [5]), request("b", [5] * 100)], is_streamed=False)
            with pytest.raises(CapacityError, match="queue is full"):
                await client.submit([request("a", [5], n=8 + 11)], is_streamed=False)
            assert client.num_requests == 0
            # The refused batch's first request is free again.
            with await client.submit([request("a", [5])], is_streamed=False) as generation:
                await generation.finished()
            assert generation.outputs[0].outputs[0].token_ids == [5] * 5

    run(test)


def test_closing_a_generation_frees_its_slot_and_pages() -> None:
    async def test() -> None:
        async with running() as client:
            with await client.submit([request("a", [5], max_tokens=10**6)], is_streamed=True) as generation:
                await generation.updates()
                await eventually(lambda: client.stats is not None and client.stats.num_running == 1)
            await eventually(lambda: client.stats is not None and client.stats.num_running == 0)
            assert client.stats is not None and client.stats.num_free_pages == client.stats.num_pages

    run(test)


@pytest.mark.parametrize("action", [EXIT, FAIL])
def test_a_dead_process_fails_its_requests_and_is_replaced(tmp_path: Path, action: int) -> None:
    hold = Hold(tmp_path / "hold")

    async def test() -> None:
        async with running(command=hold.command()) as client:
            first = client.process_id
            innocent = await client.submit([request("a", [5], max_tokens=10**6)], is_streamed=False)
            with hold:
                # Its end may be noticed before it is noticed that the request was accepted.
                with pytest.raises(EngineDead):
                    guilty = await client.submit([request("b", [action, action])], is_streamed=False)
                    await guilty.finished()
                with pytest.raises(EngineDead):
                    await innocent.finished()
                with pytest.raises(EngineDead, match="loaded"):
                    client.check_ready()
            await eventually(lambda: client.state is EngineState.READY)
            assert client.process_id != first and client.num_restarts == 1
            with await client.submit([request("b", [5])], is_streamed=False) as generation:
                await generation.finished()

    run(test)


def test_without_restart_a_killed_process_stays_dead_and_says_why() -> None:
    async def test() -> None:
        async with running(restart=False) as client:
            assert client.process_id is not None
            os.kill(client.process_id, signal.SIGKILL)
            await eventually(lambda: client.state is EngineState.DEAD)
            with pytest.raises(EngineDead, match="signal 9"):
                client.check_ready()

    run(test)


def test_an_engine_that_cannot_start_is_not_tried_again() -> None:
    async def test() -> None:
        async with running(seed=666) as client:
            assert client.state is EngineState.DEAD
            assert isinstance(client.failure, ConfigError) and "cursed" in str(client.failure)

    run(test)


def test_signals_to_the_whole_group_do_not_end_the_engine() -> None:
    async def test() -> None:
        async with running() as client:
            assert client.process_id is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.process_id, number)
            with await client.submit([request("a", [5])], is_streamed=False) as generation:
                await generation.finished()
            assert client.num_restarts == 0

    run(test)


def test_page_maps_come_only_while_somebody_watches() -> None:
    async def test() -> None:
        async with running(num_pages=4) as client:
            await eventually(lambda: client.report is not None)
            assert client.report is not None and client.report.page_map is None
            end = client.watch()
            await eventually(lambda: client.report is not None and client.report.page_map == "nffff")
            end()
            await eventually(lambda: client.report is not None and client.report.page_map is None)

    run(test)


def test_closing_waits_neither_for_a_restart_nor_for_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MIN_RESTART_DELAY", 1000.0)
    hold = Hold(tmp_path / "hold")

    async def test() -> None:
        for moment in ("before", "starting", "delay"):
            client = EngineClient(EngineConfig(), None, command=hold.command())
            with hold:
                supervisor = asyncio.create_task(client.run())
                if moment != "before":
                    await eventually(lambda client=client: client.process_id is not None)
                if moment == "delay":
                    hold.release()
                    await eventually(lambda client=client: client.state is EngineState.READY)
                    os.kill(client.process_id or 0, signal.SIGKILL)
                    await eventually(lambda client=client: client.process_id is None)
                async with asyncio.timeout(60):
                    await client.close()
                    await supervisor
            assert client.process_id is None and client.state is EngineState.CLOSED

    run(test)
