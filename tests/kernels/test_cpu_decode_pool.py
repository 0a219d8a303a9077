"""The pool's threads: they run together, sleep, and end; nothing that goes wrong leaves one spinning."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tiny_vllm.kernels.cpu_decode.pool import ABORTED, ARRIVALS, Pool

ROOT = Path(__file__).parents[2]


def num_pool_threads() -> int:
    return sum(thread.name.startswith("cpu-decode") for thread in threading.enumerate())


def wait_until_no_pool_threads() -> None:
    deadline = time.monotonic() + 60
    while num_pool_threads():
        assert time.monotonic() < deadline, "a thread of the pool is still there"
        time.sleep(0.001)


class Meeting:
    """A step in Python: adds its arrivals one by one, waits for the others, notes that it was there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.indices: list[int] = []

    def __call__(self, index: int, num_threads: int, arrivals: int, control: np.ndarray) -> bool:
        for target in (arrivals + num_threads, arrivals + 2 * num_threads):
            with self.lock:
                control[ARRIVALS] += 1
            while control[ARRIVALS] < target:
                if control[ABORTED]:
                    return False
                time.sleep(0.0001)
        self.indices.append(index)
        return True


def test_all_threads_meet_run_after_run() -> None:
    pool = Pool()
    for num_threads in (3, 1, 2, 3):
        meeting = Meeting()
        pool.run(num_threads, meeting)
        while len(meeting.indices) < num_threads:
            time.sleep(0.0001)
        assert sorted(meeting.indices) == list(range(num_threads))
    pool.close()
    wait_until_no_pool_threads()


def test_threads_end_with_the_pool() -> None:
    pool = Pool()
    pool.run(3, Meeting())
    assert num_pool_threads() == 2
    del pool
    gc.collect()
    wait_until_no_pool_threads()


def test_a_closed_pool_starts_anew() -> None:
    pool = Pool()
    pool.run(2, Meeting())
    pool.close()
    wait_until_no_pool_threads()
    pool.run(2, Meeting())
    pool.close()


@pytest.mark.parametrize("failing_index", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_after_a_failure_no_thread_waits_and_the_pool_works(
    failing_index: int, error: type[BaseException]
) -> None:
    pool = Pool()
    meeting = Meeting()

    def step(index: int, num_threads: int, arrivals: int, control: np.ndarray) -> bool:
        if index == failing_index:
            raise error
        return meeting(index, num_threads, arrivals, control)

    with pytest.raises(error if failing_index == 0 else RuntimeError):
        pool.run(3, step)
    pool.run(3, meeting)
    pool.close()
    wait_until_no_pool_threads()


def test_an_interrupt_between_starting_and_joining_a_step_is_survived() -> None:
    """The caller never enters the step: the others must not wait for it."""
    pool = Pool()
    pool.run(2, Meeting())
    real_queue = pool._queues[0]

    class InterruptedQueue:
        def put(self, job: object) -> None:
            real_queue.put(job)
            raise KeyboardInterrupt

    pool._queues[0] = InterruptedQueue()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        pool.run(2, Meeting())
    pool._queues[0] = real_queue
    pool.run(2, Meeting())
    pool.close()
    wait_until_no_pool_threads()


def test_sleeping_threads_do_not_keep_the_interpreter_alive() -> None:
    code = (
        "from tests.kernels.test_cpu_decode_pool import Meeting, Pool\n"
        "pool = Pool(); pool.run(3, Meeting()); print('done')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert run.stdout == "done\n" and not run.stderr
