"""Joins the planning half and the device half: a step is planned, computed and committed.

With look-ahead, `step` plans and submits a step before it waits for the one before, so that the host works
while the device does. The engine speaks token ids. It is driven from one thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.available_memory import is_out_of_memory
from tiny_vllm.engine.plan import StepPlan, StepResult
from tiny_vllm.engine.prefix_cache import root_hash
from tiny_vllm.engine.scheduler import Scheduler
from tiny_vllm.engine.seeds import mix
from tiny_vllm.engine.sequence import Sequence, SequenceState
from tiny_vllm.engine.waiting import queue_key
from tiny_vllm.errors import CapacityError, EngineDead, PromptTooLong, RequestError
from tiny_vllm.types import FinishReason, Request, TokenEvent

logger = logging.getLogger(__name__)


class SubmittedStep(Protocol):
    """A step on its way through the device half."""

    @property
    def is_synchronous(self) -> bool:
        """Whether the host had to wait for the step while it was submitted, so that planning ahead of its
        result gains nothing."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. May be called again."""
        ...


class Executor(Protocol):
    """The device half, as the engine sees it."""

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Start computing one step, after all those submitted before."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Pages by state, sequences by state, and totals since the start."""

    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_used_pages: int
    num_shared_pages: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """Where a running choice is.

    known_len: prompt and generated tokens read so far. computed_len: tokens whose keys and values exist or
    are under way; with look-ahead it may exceed known_len.
    """

    slot: int
    request_id: str
    index: int
    state: SequenceState
    prompt_len: int
    known_len: int
    computed_len: int


class Engine:
    """Continuous batching over fixed slots.

    config: resolved. eos_token_ids: the model's end-of-sequence tokens.
    clock: seconds, monotonic; arrival times of requests are on the same clock.
    window: see Scheduler.
    num_steps_ahead: steps that are submitted before an earlier one's tokens are read.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
        window: int | None = None,
    ) -> None:
        assert config.max_num_seqs and config.num_pages and config.max_num_batched_tokens
        assert config.max_model_len is not None
        self.config = config
        self.clock = clock
        self.scheduler = Scheduler(
            num_slots=config.max_num_seqs,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_policy=config.prefill_policy,
            max_prefill_tokens_per_decode=config.max_prefill_tokens_per_decode,
            window=window,
        )
        self._max_model_len = config.max_model_len
        self.num_steps_ahead = 1 if config.async_scheduling else 0
        self._executor = executor
        self._under_way: deque[tuple[StepPlan, SubmittedStep]] = deque()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, list[Sequence]] = {}
        self._num_requests = 0
        self._num_sequences = 0
        self._num_steps = 0
        self._failure: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._failure is None and self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError if it can never run here, CapacityError if the queue is full, EngineDead after a
        failed step. On an error nothing is queued.
        """
        self._check_alive()
        self._check_request(request)
        sampling = request.sampling
        prompt_len = len(request.prompt_token_ids)
        budget = self._max_model_len if sampling.max_tokens is None else sampling.max_tokens
        seed = mix(self.config.seed, self._num_requests) if sampling.seed is None else sampling.seed
        salt = request.cache_salt
        if not self.config.enable_prefix_caching:
            # The choices of one request still share its prompt; nobody else can.
            salt = f"request {self._num_requests}"
        self._num_requests += 1
        ending = frozenset(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            ending |= self._eos_token_ids
        sequences = []
        for index in range(sampling.n):
            sequence = Sequence(
                self._num_sequences,
                request,
                index,
                seed=mix(seed, index),
                end_len=min(prompt_len + budget, self._max_model_len),
                ending_token_ids=ending,
                queue_key=queue_key(
                    request.priority, request.arrival_time, self._num_sequences, self.config.ageing_seconds
                ),
                root_hash=root_hash(salt),
            )
            self._num_sequences += 1
            sequences.append(sequence)
            self.scheduler.add(sequence)
        self._requests[request.request_id] = sequences

    def abort(self, request_id: str) -> None:
        """End every unfinished choice with reason `abort`. Unknown and finished ids are ignored."""
        for sequence in self._requests.get(request_id, ()):
            if sequence.finish_reason is None:
                self.scheduler.stop(sequence, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        """End one choice with reason `stop`, because its text is complete. Ignored if it has ended."""
        for sequence in self._requests.get(request_id, ()):
            if sequence.index == index and sequence.finish_reason is None:
                self.scheduler.stop(sequence, FinishReason.STOP)

    def step(self) -> list[TokenEvent]:
        """Submit one step and return the events of those that are read after it: with look-ahead, the events
        of an earlier step.

        Raises EngineDead if the computation fails; every unfinished request is then lost. An interruption
        (such as Ctrl-C) during the computation leaves the engine whole: the step counts as not done.
        """
        self._check_alive()
        plan = self.scheduler.schedule(self.clock())
        while plan is None:
            self._read_oldest()
            plan = self.scheduler.schedule(self.clock())
        num_ahead = 0 if plan.is_empty else self._submit(plan)
        while len(self._under_way) > num_ahead:
            self._read_oldest()
        events = self.scheduler.take_events()
        for event in events:
            if event.finish_reason is not None:
                self._forget_finished(event.request_id)
        return events

    def _submit(self, plan: StepPlan) -> int:
        """Start a step. Returns how many steps may stay under way."""
        try:
            submitted = self._executor.submit(plan)
        except Exception as error:
            raise self._fail(error) from error
        except BaseException:
            self._under_way.clear()
            self.scheduler.roll_back(plan)
            raise
        self._under_way.append((plan, submitted))
        self._num_steps += 1
        return 0 if submitted.is_synchronous else self.num_steps_ahead

    def _read_oldest(self) -> None:
        plan, submitted = self._under_way[0]
        try:
            result = submitted.result()
        except Exception as error:
            raise self._fail(error) from error
        self._under_way.popleft()
        self.scheduler.commit(plan, result)

    def _fail(self, error: Exception) -> EngineDead:
        self._failure = error
        self._under_way.clear()
        hint = "the cause is shown with it"
        if is_out_of_memory(error):
            hint = "lower num_pages, max_num_batched_tokens or max_num_seqs, or free memory"
        return EngineDead(f"a step failed: {error}", hint=hint)

    def stats(self) -> EngineStats:
        usage = self.scheduler.pool.usage()
        return EngineStats(
            num_pages=usage.num_pages,
            num_free_pages=usage.num_free,
            num_cached_pages=usage.num_cached,
            num_used_pages=usage.num_used,
            num_shared_pages=usage.num_shared,
            num_running=self.scheduler.num_running,
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            prefix_query_tokens=self.scheduler.num_prefix_query_tokens,
            prefix_hit_tokens=self.scheduler.num_prefix_hit_tokens,
            num_steps=self._num_steps,
        )

    def slots(self) -> list[SequenceStatus]:
        """The sequences in slots, by slot."""
        statuses = [
            SequenceStatus(
                slot=sequence.slot,
                request_id=sequence.request_id,
                index=sequence.index,
                state=sequence.state,
                prompt_len=sequence.prompt_len,
                known_len=sequence.known_len,
                computed_len=sequence.computed_len,
            )
            for sequence in self.scheduler.running()
            if sequence.slot is not None
        ]
        return sorted(statuses, key=lambda status: status.slot)

    def page_map(self) -> str:
        """The state of every page by number, as a letter of PAGE_STATES; page 0 is the null page."""
        return self.scheduler.pool.states()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDead(
                f"the engine has stopped: {self._failure}",
                hint="create a new one; after a CUDA error, in a new process",
            )

    def _check_request(self, request: Request) -> None:
        prompt_len = len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use", hint="choose another")
        if prompt_len == 0:
            raise RequestError("the prompt has no tokens", hint="send at least one")
        if prompt_len >= self._max_model_len:
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens, but prompt plus output may have "
                f"{self._max_model_len}, so at most {self._max_model_len - 1} for the prompt",
                hint="shorten the prompt or raise max_model_len",
            )
        if not self.scheduler.can_ever_fit(prompt_len):
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens, but the page pool holds "
                f"{self.scheduler.pool.num_pages * self.config.page_size}",
                hint="shorten the prompt or raise num_pages",
            )
        limit = self.config.max_queue_len
        # Sequences that find a free slot in the next step do not count as a queue.
        num_waiting = len(self.scheduler.waiting) - self.scheduler.num_free_slots
        if limit is not None and num_waiting + request.sampling.n > limit:
            raise CapacityError(
                f"{max(num_waiting, 0)} sequences wait for a slot, and {request.sampling.n} more would "
                f"exceed max_queue_len ({limit})",
                hint="try again later or raise max_queue_len",
            )

    def _forget_finished(self, request_id: str) -> None:
        sequences = self._requests.get(request_id, ())
        if all(sequence.finish_reason is not None for sequence in sequences):
            self._requests.pop(request_id, None)
