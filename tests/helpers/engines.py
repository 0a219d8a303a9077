"""Engines over the fake model, for tests of scheduling that take milliseconds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.fake_model import FakeExecutor, expected_tokens
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.engine import Engine
from tiny_vllm.engine.seeds import mix
from tiny_vllm.types import FinishReason, Request, SamplingParams, TokenEvent


@dataclass
class Clock:
    """Time that moves only when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None


class FakeEngine:
    """An engine, its fake model, its clock, and everything it has said so far."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        eos_token_ids: tuple[int, ...] = (),
        num_steps_ahead: int = 0,
        window: int | None = None,
        **options: Any,
    ) -> None:
        defaults = dict(
            max_num_seqs=4,
            num_pages=64,
            max_num_batched_tokens=64,
            max_model_len=200,
            prefill_policy="mixed",
            dtype="float32",
            device="cpu",
        )
        self.clock = Clock()
        self.executor = FakeExecutor(page_size, window)
        config = EngineConfig(page_size=page_size, **{**defaults, **options})
        self.engine = Engine(
            config, self.executor, eos_token_ids=eos_token_ids, clock=self.clock, window=window
        )
        self.engine.num_steps_ahead = num_steps_ahead
        self.eos_token_ids = frozenset(eos_token_ids)
        self.outcomes: dict[tuple[str, int], Outcome] = defaultdict(Outcome)
        self.requests: dict[str, Request] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Request:
        params = SamplingParams(**{"seed": 7, **sampling})
        request = Request(request_id, tuple(prompt), params, self.clock(), priority, cache_salt)
        self.engine.add(request)
        self.requests[request_id] = request
        return request

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        self.engine.scheduler.check()
        for event in events:
            outcome = self.outcomes[event.request_id, event.index]
            assert outcome.finish_reason is None, "an event after the last one"
            if event.token_id is not None:
                outcome.tokens.append(event.token_id)
            if event.prompt is not None:
                outcome.num_cached_tokens = event.prompt.num_cached_tokens
            outcome.finish_reason = event.finish_reason
        self.clock.now += 0.01
        return events

    def run(self, max_steps: int = 2000) -> None:
        """Step until idle; then every page must be back."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine makes no progress"
        stats = self.engine.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    def expected(self, request_id: str, index: int = 0, count: int | None = None) -> list[int]:
        """The solo output of a choice of this request, cut to `count` tokens if given."""
        request = self.requests[request_id]
        limit = self.engine.config.max_model_len - len(request.prompt_token_ids)
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        ending = frozenset() if request.sampling.ignore_eos else self.eos_token_ids
        ending |= frozenset(request.sampling.stop_token_ids or ())
        tokens = expected_tokens(request.prompt_token_ids, mix(request.sampling.seed, index), limit, ending)
        return tokens if count is None else tokens[:count]

    def assert_correct(self, request_id: str, index: int = 0) -> None:
        outcome = self.outcomes[request_id, index]
        assert outcome.tokens == self.expected(request_id, index), (
            f"{request_id}[{index}] differs from its solo run"
        )
        assert outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
