"""Signals, threads and forks: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any

import pytest

from tests.helpers.llm_checks import assert_pool_is_whole, greedy
from tests.helpers.oracle import greedy_tokens
from tiny_vllm import LLM, RequestError


def test_a_signal_waits_for_the_end_of_the_step(model: Any, llm: LLM) -> None:
    """Ctrl-C in the middle of a step is raised after it, so that neither pages nor tokens are lost."""
    stream = llm.stream([5, 6, 7], greedy(12, ignore_eos=True))
    interrupted = 0
    engine = llm._live_engine()
    commit = engine.scheduler.commit

    def interrupt_and_commit(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        commit(*arguments)

    tokens: list[int] = []
    engine.scheduler.commit = interrupt_and_commit  # type: ignore[method-assign]
    try:
        while True:
            try:
                update = next(stream)
            except KeyboardInterrupt:
                interrupted += 1
                continue
            except StopIteration:
                break
            tokens += update.deltas[0].token_ids
    finally:
        engine.scheduler.commit = commit  # type: ignore[method-assign]
    assert interrupted == 12
    assert tokens == greedy_tokens(model, [5, 6, 7], 12)
    assert_pool_is_whole(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_batch_interrupted_in_its_first_step_leaves_nothing_behind(model: Any, llm: LLM) -> None:
    engine: Any = llm._live_engine()
    submit = engine._executor.submit

    def interrupt_and_submit(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return submit(plan)

    engine._executor.submit = interrupt_and_submit
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7], [8, 9]], greedy(12, ignore_eos=True))
    finally:
        engine._executor.submit = submit
    assert_pool_is_whole(llm)
    assert len(llm._processor) == 0
    (output,) = llm.generate([[5, 6, 7]], greedy(4, ignore_eos=True))
    assert output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 4)


def test_outputs_are_made_once_the_first_step_is_submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = llm._live_engine()
    submit, add = engine._executor.submit, llm._processor.add
    calls: list[str] = []
    monkeypatch.setattr(engine._executor, "submit", lambda plan: calls.append("submit") or submit(plan))
    monkeypatch.setattr(llm._processor, "add", lambda *given: calls.append("add") or add(*given))
    llm.generate([[5, 6, 7], [8, 9]], greedy(2, ignore_eos=True))
    assert calls[:3] == ["submit", "add", "add"]


def test_two_threads_at_once_are_told_so(llm: LLM) -> None:
    results: list[object] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        try:
            for _ in range(20):
                results.append(len(llm.generate([[5, 6, 7]], greedy(20, ignore_eos=True))))
        except RequestError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    refused = [result for result in results if isinstance(result, RequestError)]
    assert len(refused) <= 1 and all("another thread" in str(error) for error in refused)
    assert_pool_is_whole(llm)


def test_a_forked_child_is_refused_instead_of_hanging(llm: LLM) -> None:
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            llm.generate([[5]], greedy(1))
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    message = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.close(write_end)
    assert message.startswith("EngineDead") and "another process" in message
