"""Random work on a tiny pool: after every step the page invariant holds, and every completed choice equals
its solo, unpressured output."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.engines import FakeEngine
from tiny_vllm.errors import RequestError
from tiny_vllm.types import FinishReason

PREFIXES = [[3] * 40, list(range(40)), [3] * 9 + list(range(31))]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8, 16]),
        num_tokens=st.integers(24, 160),
        num_slots=st.integers(1, 5),
        budget=st.integers(5, 40),
        policy=st.sampled_from(["exclusive", "mixed"]),
        max_prefill=st.sampled_from([None, 1, 3, 20]),
        caching=st.booleans(),
        num_steps_ahead=st.integers(0, 3),
    )
    def start(
        self,
        page_size: int,
        num_tokens: int,
        num_slots: int,
        budget: int,
        policy: str,
        max_prefill: int | None,
        caching: bool,
        num_steps_ahead: int,
    ) -> None:
        self.fake = FakeEngine(
            page_size=page_size,
            num_pages=max(1, num_tokens // page_size),
            max_num_seqs=num_slots,
            max_num_batched_tokens=budget,
            prefill_policy=policy,
            max_prefill_tokens_per_decode=max_prefill,
            enable_prefix_caching=caching,
            eos_token_ids=(0, 1),
            max_model_len=120,
            ageing_seconds=0.05,
            num_steps_ahead=num_steps_ahead,
        )
        self.count = 0
        self.aborted: set[str] = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        prefix_len=st.integers(0, 40),
        tail=st.lists(st.integers(0, 49), max_size=12),
        n=st.integers(1, 3),
        max_tokens=st.integers(0, 30),
        priority=st.integers(0, 3),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 3),
    )
    def add(
        self,
        prefix: list[int],
        prefix_len: int,
        tail: list[int],
        n: int,
        max_tokens: int,
        priority: int,
        ignore_eos: bool,
        seed: int,
    ) -> None:
        prompt = prefix[:prefix_len] + tail
        self.count += 1
        fits = (
            len(prompt) > 0
            and len(prompt) <= self.fake.engine.scheduler.pool.num_pages * self.fake.engine.config.page_size
        )
        try:
            self.fake.add(
                str(self.count),
                prompt,
                n=n,
                max_tokens=max_tokens,
                priority=priority,
                ignore_eos=ignore_eos,
                seed=seed,
            )
            assert fits
        except RequestError:
            assert not fits

    @rule(number=st.integers(1, 50))
    def abort(self, number: int) -> None:
        self.aborted.add(str(number))
        self.fake.engine.abort(str(number))

    @rule(number=st.integers(1, 50), index=st.integers(0, 2))
    def stop(self, number: int, index: int) -> None:
        self.aborted.add(str(number))
        self.fake.engine.stop(str(number), index)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.fake.step()

    @rule()
    def interrupt(self) -> None:
        self.fake.executor.failure = KeyboardInterrupt()
        try:
            self.fake.step()
        except KeyboardInterrupt:
            self.fake.engine.scheduler.check()
        self.fake.executor.failure = None

    @rule()
    def interrupt_reading(self) -> None:
        self.fake.executor.late_failure = KeyboardInterrupt()
        try:
            self.fake.step()
        except KeyboardInterrupt:
            self.fake.engine.scheduler.check()
        self.fake.executor.late_failure = None

    @rule(is_on=st.booleans())
    def wait_for_every_step(self, is_on: bool) -> None:
        self.fake.executor.synchronous = is_on

    @precondition(lambda self: self.count > 4)
    @rule()
    def drain(self) -> None:
        self.fake.run()
        assert_finished(self.fake, self.aborted)

    @invariant()
    def tokens_so_far_are_right(self) -> None:
        if hasattr(self, "fake"):
            for (name, index), outcome in self.fake.outcomes.items():
                assert outcome.tokens == self.fake.expected(name, index, count=len(outcome.tokens))

    def teardown(self) -> None:
        if hasattr(self, "fake"):
            self.fake.run()
            assert_finished(self.fake, self.aborted)


def assert_finished(fake: FakeEngine, aborted: set[str]) -> None:
    """Every choice has ended; what was not cut short is complete."""
    capacity = fake.engine.scheduler.pool.num_pages * fake.engine.config.page_size
    for name, request in fake.requests.items():
        for index in range(request.sampling.n):
            outcome = fake.outcomes[name, index]
            assert outcome.finish_reason is not None, f"{name}[{index}] never ended"
            if name in aborted:
                continue
            complete = fake.expected(name, index)
            outgrown = len(request.prompt_token_ids) + len(outcome.tokens) > capacity
            assert outcome.tokens == complete or (
                outgrown and outcome.finish_reason is FinishReason.LENGTH
            ), f"{name}[{index}] ended {outcome.finish_reason} after {len(outcome.tokens)} of {len(complete)}"


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_long_random_load_with_shared_prefixes_aborts_and_a_tiny_pool(
    seed: int, num_steps_ahead: int
) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    fake = FakeEngine(
        page_size=page_size,
        num_pages=160 // page_size,
        max_num_batched_tokens=rng.randrange(8, 48),
        max_num_seqs=6,
        prefill_policy=rng.choice(["exclusive", "mixed"]),
        eos_token_ids=(0, 1),
        max_model_len=120,
        ageing_seconds=0.05,
        num_steps_ahead=num_steps_ahead,
    )
    aborted: set[str] = set()
    for number in range(500):
        prefix = rng.choice(PREFIXES)[: rng.randrange(40)]
        tail = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        fake.add(
            str(number),
            prefix + tail,
            n=rng.choice([1, 1, 1, 3]),
            max_tokens=rng.randrange(0, 30),
            priority=rng.randrange(3),
            seed=rng.randrange(4),
        )
        while len(fake.engine.scheduler.waiting) > 8:
            fake.step()
        if rng.random() < 0.1:
            victim = str(rng.randrange(number + 1))
            aborted.add(victim)
            fake.engine.abort(victim)
    fake.run()
    assert_finished(fake, aborted)
    stats = fake.engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0, (
        "the load was too light to test anything"
    )
