"""The live picture: compact snapshots of the engine as server-sent events, for the page at /.

Snapshots are made in the API process from what it knows anyway. Of the engine process they only ask for the
page map, which its loop sends within its share for reports (engine_loop.REPORT_SHARE).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiny_vllm.config import kv_bytes
from tiny_vllm.engine.engine import SequenceStatus
from tiny_vllm.engine.sequence import SequenceState
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.serving.generation_response import SSE_HEADERS, wait_for_disconnect
from tiny_vllm.serving.service import Service
from tiny_vllm.types import Request

SNAPSHOT_SECONDS = 0.25
MAX_VIEWERS = 32
MAX_SEQUENCES = 512
MAX_CELLS = 4096
"""A larger pool is sent as cells of several pages each: nobody sees more, and the text would be megabytes."""


def snapshot(service: Service) -> dict[str, Any]:
    """Everything the page shows, now.

    pages: runs of equal cells, as letter (page_pool.PAGE_STATES) and count; a cell is pages_per_cell pages,
    without the null page, and has the state that most of them have. sequences: see _sequences. Totals only
    grow; the page makes rates of them. time: seconds on the monotonic clock.
    """
    engine, metrics = service.engine, service.metrics
    stats, progress = engine.stats, engine.load_progress
    times = list(metrics.recent_first_token_seconds)
    options = engine.ready.options if engine.ready is not None else {}
    page_map = None if engine.report is None else engine.report.page_map
    pages_per_cell, cells = _cells(page_map or "")
    unfinished = engine.unfinished()
    return {
        "time": time.monotonic(),
        "model": service.model.name,
        "state": "draining" if service.is_draining else engine.state.value,
        "loaded": progress.num_done / progress.num_total
        if progress is not None and progress.num_total
        else None,
        "num_restarts": engine.num_restarts,
        "options": {
            name: options.get(name) for name in ("max_num_seqs", "page_size", "max_model_len", "device")
        },
        "stats": None if stats is None else asdict(stats),
        "page_bytes": _page_bytes(service),
        "pages": cells,
        "pages_per_cell": pages_per_cell,
        "sequences": _sequences(unfinished, [] if engine.report is None else engine.report.slots),
        "prompt_tokens": metrics.num_prompt_tokens,
        "generated_tokens": metrics.num_generated_tokens,
        "first_token_seconds": statistics.median(times) if times else None,
        "engine_memory": _memory_of(engine.process_id),
        "api_memory": _memory_of(os.getpid()),
    }


def _sequences(
    unfinished: Sequence[tuple[Request, RequestOutput]], slots: Sequence[SequenceStatus]
) -> list[list[Any]]:
    """[name, state, prompt tokens, of them cached, generated tokens, limit, priority] of each choice."""
    states = {(status.request_id, status.index): status.state.value for status in slots}
    rows: list[list[Any]] = []
    for request, output in unfinished:
        for choice in output.outputs:
            if not choice.finished:
                # A report may be older than the last tokens.
                seen = SequenceState.DECODE if choice.token_ids else SequenceState.WAITING
                state = states.get((request.request_id, choice.index), seen.value)
                name = f"{request.request_id[-10:]}.{choice.index}"
                lens = [len(output.prompt_token_ids), output.num_cached_tokens, len(choice.token_ids)]
                rows.append([name, state, *lens, request.sampling.max_tokens, request.priority])
    return rows[:MAX_SEQUENCES]


@functools.lru_cache(maxsize=1)
def _cells(page_map: str) -> tuple[int, str]:
    """Pages per cell, and the runs of cells. Kept for other viewers of the same map."""
    pages = page_map[1:]
    size = max(-(-len(pages) // MAX_CELLS), 1)
    if size > 1:
        parts = (pages[start : start + size] for start in range(0, len(pages), size))
        pages = "".join(map(_state_of_most, parts))
    return size, "".join([f"{letter}{len(list(group))}" for letter, group in itertools.groupby(pages)])


def _state_of_most(pages: str) -> str:
    """u and h are both pages of one sequence: the letter of most of those, where most of all are."""
    state = max("usfc", key=pages.replace("h", "u").count)
    return "h" if state == "u" and pages.count("h") > pages.count("u") else state


def _page_bytes(service: Service) -> int | None:
    if service.engine.ready is None:
        return None
    options = service.engine.ready.options
    return kv_bytes(
        service.model.kv_values_per_token * options["page_size"],
        service.model.head_dim,
        dtype=options["dtype"],
        kv_cache_dtype=options["kv_cache_dtype"],
    )


def _memory_of(process_id: int | None) -> int | None:
    """Bytes of main memory a process holds, where the system tells."""
    try:
        with open(f"/proc/{process_id}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


class LiveResponse(Response):
    """Snapshots until the viewer goes away or the server stops."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(wait_for_disconnect(receive))
        end_watch = self._service.engine.watch()
        self._service.num_viewers += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            while not gone.done() and not self._service.is_draining:
                data = msgspec.json.encode(snapshot(self._service))
                await send(
                    {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
                )
                await asyncio.wait({gone}, timeout=SNAPSHOT_SECONDS)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._service.num_viewers -= 1
            end_watch()
            gone.cancel()
