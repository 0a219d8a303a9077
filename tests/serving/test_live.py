"""The live page and what feeds it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.serving.support import Hold, RunningServer, running_server, wait_until
from tiny_vllm.serving import live


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("live") / "hold")


@pytest.fixture(scope="module")
def server(hold: Hold) -> Iterator[RunningServer]:
    with running_server(hold.command(), {"max_num_seqs": 2, "num_pages": 50}) as server:
        yield server


@contextmanager
def watching(server: RunningServer, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("GET", "/live", headers=headers)
        response = connection.getresponse()
        assert response.status == 200
        yield (json.loads(line[6:]) for line in response if line.startswith(b"data: "))
    finally:
        connection.close()


def test_snapshots_show_pages_and_sequences_come_and_go(server: RunningServer, hold: Hold) -> None:
    with watching(server) as snapshots, ThreadPoolExecutor(1) as pool:
        idle = next(s for s in snapshots if s["pages"])
        assert (idle["state"], idle["pages"], idle["sequences"]) == ("ready", "f50", [])
        assert idle["options"]["max_num_seqs"] == 2 and idle["page_bytes"] > 0
        with hold:
            running = pool.submit(server.complete, [28, 29, 30] * 6, n=3, max_tokens=100)
            busy = next(s for s in snapshots if s["stats"]["num_running"] == 2 and "u" in s["pages"])
        assert re.fullmatch(r"u\d+f\d+", busy["pages"])
        states = [row[1] for row in busy["sequences"]]
        assert sorted(states) in (["decode", "decode", "waiting"], ["prefill", "prefill", "waiting"])
        assert all(row[2] == 18 and row[5] == 100 for row in busy["sequences"])
        num_tokens = running.result().json()["usage"]["completion_tokens"]
        assert num_tokens >= 300
        done = next(s for s in snapshots if not s["sequences"] and s["pages"] == "f50")
        assert done["generated_tokens"] - idle["generated_tokens"] == num_tokens
        assert done["first_token_seconds"] > 0


def test_a_large_pool_is_shown_in_cells_of_several_pages() -> None:
    pages = "u" * 100_000 + "s" * 60_000 + "fffc" * 20_000
    size, cells = live._cells("n" + pages)
    assert size == 59
    runs = re.findall(r"([a-z])(\d+)", cells)
    assert [letter for letter, _ in runs] == ["u", "s", "f"]
    assert sum(int(count) for _, count in runs) == -(-len(pages) // size) <= live.MAX_CELLS
    assert live._cells("nfuc") == (1, "f1u1c1") and live._cells("") == (1, "")


def test_pages_in_use_are_counted_together_whoever_wrote_them() -> None:
    """Nine to a cell: most are in use, and most of those were found."""
    assert live._cells("n" + "uuhhhcccc" * live.MAX_CELLS) == (9, f"h{live.MAX_CELLS}")
    assert live._cells("n" + "uuuhhcccc" * live.MAX_CELLS) == (9, f"u{live.MAX_CELLS}")


def test_nothing_is_watched_once_the_viewer_is_gone(server: RunningServer) -> None:
    with watching(server) as snapshots:
        next(snapshots)
        assert server.service.num_viewers == 1
    wait_until(lambda: server.service.num_viewers == 0)
    wait_until(
        lambda: server.service.engine.report is not None and server.service.engine.report.page_map is None
    )


def test_the_page_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    answer = server.get("/")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    text = answer.data.decode()
    assert not re.search(r"""(?:src|href)=["'](?!data:)|https?://|@import|url\(""", text)
    assert "innerHTML" not in text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_page_is_open_but_what_it_shows_needs_the_key() -> None:
    with running_server(api_key=("k",)) as server:
        assert (server.get("/").status, server.get("/live").status) == (200, 401)
        with watching(server, authorization="Bearer k") as snapshots:
            assert next(snapshots)["state"] == "ready"


def test_the_page_can_be_left_out() -> None:
    with running_server(live_page=False) as server:
        assert (server.get("/").status, server.get("/live").status) == (404, 404)


def test_a_viewer_does_not_hold_up_the_end_of_the_server() -> None:
    with ExitStack() as stack:
        with running_server(drain_timeout=600.0) as server:  # which waits for its end, but not as long
            snapshots = stack.enter_context(watching(server))
            next(snapshots)
        assert all(snapshot["model"] for snapshot in snapshots), "the stream ends as it should"
