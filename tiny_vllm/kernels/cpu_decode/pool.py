"""A few threads that run one function together, and sleep in between.

Thread 0 is the caller. The others wait in a queue's `get`, which costs nothing while no step runs. They are
daemons and know only their queue, so that neither the interpreter nor the pool's owner is kept alive by them.

The function meets its other copies at barriers, spinning: were one copy not started, or did it fail, the
others would spin for ever. So every way out of `run` that is not a complete step raises the abort flag, which
ends all waiting, and the next `run` begins only when each thread is back at its queue.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

ARRIVALS, ABORTED, CONTROL_LEN = 0, 16, 32
"""Places in the control array, in cache lines of their own: threads that arrived at barriers; the flag."""

Job = Callable[[], object]


class Pool:
    """Runs `function(index, num_threads, arrivals, control, *args)` on several threads at once.

    index: of the copy. arrivals: the count of arrivals at the first barrier's opening. control: int64, see
    above; the function adds its arrivals, stops when the flag is raised, and returns True when complete.
    """

    def __init__(self) -> None:
        self.control = np.zeros(CONTROL_LEN, dtype=np.int64)
        self._queues: list[SimpleQueue[Job | None]] = []
        self._failures: list[BaseException] = []
        self._is_clean = True
        self._finalizer = weakref.finalize(self, _stop, self._queues)

    def run(self, num_threads: int, function: Callable[..., bool], *args: Any) -> None:
        """Run the copies to the end. Raises RuntimeError if one of them fails."""
        if not self._is_clean:
            self._recover()
        self._start_threads(num_threads - 1)
        arrivals = int(self.control[ARRIVALS])
        self._is_clean = False
        try:
            for index in range(1, num_threads):
                job = _Copy(self._failures, self.control, function, index, num_threads, arrivals, args)
                self._queues[index - 1].put(job)
            complete = function(0, num_threads, arrivals, self.control, *args)
        except BaseException:
            self.control[ABORTED] = 1
            raise
        if not complete:
            self._recover()
            raise RuntimeError("a thread of the decode step failed") from self._last_failure()
        self._is_clean = True

    def close(self) -> None:
        """End the threads. The pool starts new ones if it is used again."""
        self.control[ABORTED] = 1
        self._is_clean = False
        _stop(self._queues)

    def _start_threads(self, count: int) -> None:
        while len(self._queues) < count:
            queue: SimpleQueue[Job | None] = SimpleQueue()
            name = f"cpu-decode-{len(self._queues) + 1}"
            threading.Thread(target=_serve, args=(queue,), name=name, daemon=True).start()
            self._queues.append(queue)

    def _recover(self) -> None:
        """Wait until no copy runs any more, then forget the interrupted run."""
        self.control[ABORTED] = 1
        for queue in self._queues:
            is_back = threading.Event()
            queue.put(is_back.set)
            is_back.wait()
        self.control[:] = 0
        self._is_clean = True

    def _last_failure(self) -> BaseException | None:
        return self._failures.pop() if self._failures else None


class _Copy:
    """One thread's share of a run."""

    __slots__ = ("failures", "control", "function", "args")

    def __init__(
        self,
        failures: list[BaseException],
        control: np.ndarray,
        function: Callable[..., bool],
        index: int,
        num_threads: int,
        arrivals: int,
        args: tuple,
    ) -> None:
        self.failures = failures
        self.control = control
        self.function = function
        self.args = (index, num_threads, arrivals, control, *args)

    def __call__(self) -> None:
        try:
            self.function(*self.args)
        except BaseException as failure:
            self.failures.append(failure)
            self.control[ABORTED] = 1


def _serve(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # its arrays may be the last hold on the weights


def _stop(queues: list[SimpleQueue[Job | None]]) -> None:
    while queues:
        queues.pop().put(None)
