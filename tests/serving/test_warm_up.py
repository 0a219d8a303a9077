"""What runs before a server says that it is ready."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.engine.forward_graphs import RECORD_AT, ROW_BUCKETS
from tiny_vllm.serving.warm_up import warm_up


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize(
    ("num_slots", "sizes"), [(1, {1}), (5, {1, 2, 4, 5}), (40, {1, 2, 4, 8, 16, 32, 40})]
)
def test_every_number_of_sequences_that_graphs_are_made_for_has_decoded_together(
    num_slots: int, sizes: set[int], num_steps_ahead: int
) -> None:
    fake = FakeEngine(max_num_seqs=num_slots, num_pages=400, num_steps_ahead=num_steps_ahead)
    warm_up(fake.engine, fake.engine.config)
    plans = fake.executor.plans
    assert {len(plan.decode_slots) for plan in plans if not plan.chunks} >= sizes
    assert max(len(chunk.token_ids) for plan in plans for chunk in plan.chunks) == 64
    assert not fake.engine.has_work and fake.engine.stats().num_used_pages == 0
    assert fake.engine.stats().num_preemptions == 0


def test_on_a_gpu_a_long_prompt_has_run_beside_a_decode() -> None:
    fake = FakeEngine(max_num_seqs=4, num_pages=1000, max_model_len=4096, max_num_batched_tokens=8192)
    warm_up(fake.engine, replace(fake.engine.config, device="cuda"))
    mixed = [plan for plan in fake.executor.plans if plan.chunks and plan.decode_slots]
    assert any(sum(len(chunk.token_ids) for chunk in plan.chunks) > 512 for plan in mixed)
    assert not fake.engine.has_work and fake.engine.stats().num_used_pages == 0


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
def test_on_a_gpu_shapes_of_small_steps_have_come_until_they_are_recorded(num_steps_ahead: int) -> None:
    fake = FakeEngine(
        max_num_seqs=20, num_pages=2000, max_model_len=4096, max_num_batched_tokens=8192,
        num_steps_ahead=num_steps_ahead,
    )  # fmt: skip
    warm_up(fake.engine, replace(fake.engine.config, device="cuda"))
    seen: Counter[tuple[int, int]] = Counter()
    for plan in fake.executor.plans:
        if len(plan.chunks) == 1:
            seen[len(plan.decode_slots), plan.num_tokens] += 1
    shapes = {(decodes, rows) for decodes in (0, 4, 16) for rows in ROW_BUCKETS}
    assert [shape for shape in shapes if seen[shape] < RECORD_AT] == []
    assert not fake.engine.has_work and fake.engine.stats().num_used_pages == 0
    assert fake.engine.stats().num_preemptions == 0


def test_without_graphs_their_shapes_are_left_out() -> None:
    plans = []
    for eager in (False, True):
        fake = FakeEngine(max_num_seqs=8, num_pages=2000, max_model_len=4096, max_num_batched_tokens=8192)
        warm_up(fake.engine, replace(fake.engine.config, device="cuda", enforce_eager=eager))
        plans.append(len(fake.executor.plans))
    assert plans[0] > plans[1] + RECORD_AT * len(ROW_BUCKETS)


def test_filters_and_penalties_have_been_applied_and_left_out() -> None:
    """On a GPU they have kernels of their own, and a model's generation_config.json turns them on."""
    fake = FakeEngine(max_num_seqs=4)
    warm_up(fake.engine, fake.engine.config)
    asked = [admission.request.sampling for plan in fake.executor.plans for admission in plan.admissions]
    kinds = {(params.top_k > 0 and params.top_p < 1, params.uses_penalties) for params in asked}
    assert kinds == {(False, False), (True, True)}
    assert all(not params.is_greedy for params in asked if params.top_k > 0)


@pytest.mark.parametrize(
    "options", [dict(num_pages=3), dict(max_model_len=2), dict(num_pages=1, page_size=1)]
)
def test_small_pools_and_short_contexts_are_warmed_up_as_far_as_they_go(options: dict[str, int]) -> None:
    fake = FakeEngine(max_num_seqs=8, **options)
    warm_up(fake.engine, fake.engine.config)
    warm_up(fake.engine, replace(fake.engine.config, device="cuda"))
    assert fake.executor.plans and not fake.engine.has_work
