"""Has a CPU engine pad small steps as one on a GPU does, with replays that run the step again."""

from __future__ import annotations

from collections.abc import Callable

from tiny_vllm import LLM
from tiny_vllm.engine.forward_graphs import ForwardGraphs
from tiny_vllm.engine.runner import Runner


class CountingRecorder:
    """A recorder without graphs. num_recorded: shapes; num_replays: of all of them."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


def runner_of(llm: LLM) -> Runner:
    runner = llm._live_engine()._executor
    assert isinstance(runner, Runner)
    return runner


def take_graphs(llm: LLM, record: Callable[[Callable[[], None]], Callable[[], None]]) -> ForwardGraphs:
    """Recording shapes when they come for the second time."""
    runner = runner_of(llm)
    graphs = ForwardGraphs(runner._decoder, runner._kv_cache, runner._table, record, record_at=2)
    runner._graphs = graphs
    return graphs
