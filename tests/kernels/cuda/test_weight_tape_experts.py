"""The weight tape's kernel, emulated on a CPU with few blocks, against FP32 torch: mixtures of experts, and a
dense model beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.tape_world import (
    Routed,
    World,
    choose_token,
    error,
    make_world,
    new_rows,
    reference,
    start,
)
from tests.helpers.weight_tape import EmulatedFunction
from tiny_vllm.kernels.weight_tape import layout, pack, step
from tiny_vllm.kernels.weight_tape.layout import TapeLayout, plan_block
from tiny_vllm.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from tiny_vllm.models.tape_decode import TapeDecode, tape_shape

NUM_BLOCKS = 4
NUM_SLOTS = 3
MAX_LEN = 64


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, pack, step):
        monkeypatch.setattr(module, "NUM_BLOCKS", NUM_BLOCKS)


def experts(num_experts: int = 11, num_active: int = 3, size: int = 256, **changes: object) -> ExpertsSpec:
    return ExpertsSpec(num_experts=num_experts, num_active=num_active, intermediate_size=size, **changes)


def tiny_spec(mixture: ExpertsSpec | None = None, **changes: object) -> ModelSpec:
    values = dict(
        family="qwen3_moe", vocab_size=97, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=64, max_position_embeddings=MAX_LEN, rms_norm_eps=1e-5, qk_norm="head",
        rope=RopeSpec(theta=1e4, rotary_dim=64), experts=experts() if mixture is None else mixture,
    )  # fmt: skip
    return ModelSpec(**{**values, **changes})


def emulated_world(spec: ModelSpec, mistake: tuple[str, str] | None = None, *, rows: int = 1) -> World:
    function = EmulatedFunction(TapeLayout.of(tape_shape(spec, 16)), rows, mistake=mistake)
    return make_world(
        spec, {rows: function}, device=torch.device("cpu"), max_len=MAX_LEN, num_slots=NUM_SLOTS
    )


def logits_of(world: World, slot: int) -> Tensor:
    tape = world.tape.step(1)
    tape.slots.fill_(slot)
    tape.logits.fill_(float("nan"))
    tape.compute_logits()
    return tape.logits[0].clone()


def check_step(world: World, slot: int, position: int) -> list[list[int]]:
    """Returns the picks of each layer."""
    routed: Routed = []
    exact = reference(world, slot, torch.float32, routed)
    rounded = reference(world, slot, torch.bfloat16)
    limit = 1.5 * error(rounded[0], exact[0])
    assert error(logits_of(world, slot), exact[0]) <= limit
    for cached, index in ((world.cache.k, 1), (world.cache.v, 2)):
        limit = 1.5 * error(rounded[index], exact[index])
        assert error(new_rows(world, cached, slot, position), exact[index]) <= limit
    return [picks for picks, _ in routed]


SPECS = {
    "tiny": tiny_spec(num_layers=3),
    "shares of all": tiny_spec(experts(40, 5, 512, normalize=False)),
    "one pick": tiny_spec(experts(8, 1, 768), qk_norm=None, qkv_bias=True),
    # Chunks of two pairs; gate rows of 4 KB in two pieces; down rows in two pieces.
    "wide": tiny_spec(experts(12, 2, 768), hidden_size=2048, num_layers=1),
    "wider": tiny_spec(experts(5, 2, 256), hidden_size=4096, num_layers=1),
    "long rows": tiny_spec(experts(4, 2, 2048), num_layers=1),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_step_is_as_near_to_fp32_as_bf16_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "wider":
        for module in (layout, pack, step):
            monkeypatch.setattr(module, "NUM_BLOCKS", 8)
    world = emulated_world(SPECS[name])
    start(world, [1], [37])
    choose_token(world, 1)
    check_step(world, 1, 37)


@pytest.mark.parametrize("kv_stream_limit", [MAX_LEN, 8])
def test_a_long_context_is_no_obstacle(kv_stream_limit: int) -> None:
    world = emulated_world(tiny_spec())
    world.tape.step(1).set_tuning(direct_limit=8, kv_stream_limit=kv_stream_limit)
    start(world, [1], [58])
    choose_token(world, 1)
    check_step(world, 1, 58)


@pytest.mark.parametrize("direct_limit", [512, 8])
def test_a_dense_step_is_as_near_to_fp32_as_bf16_torch(direct_limit: int) -> None:
    world = emulated_world(replace(tiny_spec(), experts=None, intermediate_size=1024), rows=2)
    start(world, [2, 0], [40, 19])
    tape = world.tape.step(2)
    tape.set_tuning(direct_limit=direct_limit)
    tape.slots.copy_(torch.tensor([2, 0]))
    tape.compute_logits()
    for logits, slot in zip(tape.logits, (2, 0), strict=True):
        exact = reference(world, slot, torch.float32)[0]
        assert error(logits, exact) <= 1.5 * error(reference(world, slot, torch.bfloat16)[0], exact)


def test_logits_that_are_no_numbers_make_no_pick_that_there_is_not() -> None:
    world = emulated_world(tiny_spec(num_layers=1))
    start(world, [1], [20])
    world.cache.v[:, world.state.page_table[1, 0]] = float("nan")
    assert logits_of(world, 1).isnan().all()
    start(world, [1], [20])
    choose_token(world, 1)
    check_step(world, 1, 20)


@pytest.mark.parametrize(("stages", "ring", "held"), [(4, 4, 0), (11, 4, 7), (11, 7, 4), (10, 9, 1)])
def test_other_rings_and_held_chunks_give_the_same(
    stages: int, ring: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_STAGES", stages)
    monkeypatch.setattr(layout, "RING_STAGES", ring)
    world = emulated_world(tiny_spec())
    plan = plan_block(world.tape.layout, 1)
    assert plan is not None and (plan.stages, plan.held) == (ring, held)
    start(world, [1], [17])
    choose_token(world, 1)
    check_step(world, 1, 17)


def test_steps_with_changing_picks_repeat_bit_for_bit_whatever_the_order_of_events() -> None:
    world = emulated_world(SPECS["tiny"])
    seen, runs = set(), []
    for run in range(3):
        start(world, [2], [14])
        outcomes = []
        for position in range(14, 18):
            world.state.last_token[2] = position * 5 % 97
            choose_token(world, 2)
            if run == 0:
                seen.update(map(tuple, check_step(world, 2, position)))
            outcomes.append(logits_of(world, 2))
            world.state.computed_len[2] += 1
        runs.append((torch.stack(outcomes), world.cache.k.nan_to_num(), world.cache.v.nan_to_num()))
    assert len(seen) > 6 and len({order[0] for order in seen}) > 4, "the picks hardly change"
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("equal", [range(11), (1, 4, 7, 10), (9, 10)])
def test_equal_logits_favour_the_lower_expert(equal: range | tuple[int, ...]) -> None:
    world = emulated_world(tiny_spec())
    for layer in world.weights.layers:
        assert layer.router is not None
        layer.router[list(equal)] = layer.router[equal[0]].clone()
    world = rebuilt(world)
    start(world, [0], [5])
    choose_token(world, 0)
    picks = check_step(world, 0, 5)
    if len(equal) == 11:
        assert picks == [[0, 1, 2]] * 2


def rebuilt(world: World, mistake: tuple[str, str] | None = None) -> World:
    """With the tape made anew of the weights."""
    function = EmulatedFunction(world.tape.layout, mistake=mistake)
    tape = TapeDecode(
        world.spec, world.weights, world.cos_sin, world.cache, world.state, world.temperature, {1: function}
    )
    return replace(world, tape=tape)


def test_a_draw_moves_the_slot_on_and_reports_what_is_not_finite() -> None:
    world = emulated_world(tiny_spec())
    start(world, [1], [20])
    token = torch.tensor([-7])
    tape = world.tape.step(1)
    tape.slots.fill_(1)
    tape.parameters.tokens = token.data_ptr()
    tape._enqueue(draw=1, logits=True)
    assert token.item() == int(tape.logits[0].argmax()) == int(world.state.last_token[1])
    assert world.state.computed_len.tolist() == [0, 21, 0]
    world.cache.v[:, world.state.page_table[1, 0]] = float("nan")
    tape._enqueue(draw=1, logits=True)
    assert token.item() == -1 and int(world.state.last_token[1]) == 0


MISTAKES = {
    "held chunks of the layer before": ("is_held<M>(chunk) ? held_parity :", "is_held<M>(chunk) ? 0u :"),
    "the higher of equal logits": ("lane == __ffs((int)lanes) - 1", "lane == 31 - __builtin_clz(lanes)"),
    "an input in another order than its rows": (
        "c.x[0][i] = *(const uint4*)(from + R::block(i, c.g) * 64);",
        "c.x[0][i] = *(const uint4*)(from + i * 64);",
    ),
    "one weight for all": ("s.pick_weights[item / PICK_ITEMS]", "s.pick_weights[0]"),
    "a stage that is refilled early": (
        "((index / STAGES) & 1) ^ 1);\n    const u32 q",
        "(index / STAGES) & 1);\n    const u32 q",
    ),
    "the gate's rows for up": ("gate + (i64)EXPERT_SIZE * HIDDEN", "gate + (i64)HIDDEN"),
    "rows of other blocks": (
        "row = cta * OWN_ROWS + unit * 8;",
        "row = (CTAS - 1 - cta) * OWN_ROWS + unit * 8;",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in list(MISTAKES)[:2] else [pytest.mark.slow]) for name in MISTAKES],
)
def test_the_emulation_finds(name: str) -> None:
    world = emulated_world(tiny_spec(hidden_size=512), MISTAKES[name])
    if "equal" in name:
        for layer in world.weights.layers:
            assert layer.router is not None
            layer.router.zero_()
        world = rebuilt(world, MISTAKES[name])
    start(world, [1], [17])
    choose_token(world, 1)
    exact = reference(world, 1, torch.float32)[0]
    limit = 1.5 * error(reference(world, 1, torch.bfloat16)[0], exact)
    try:
        errors = [error(logits_of(world, 1), exact) for _ in range(2)]
    except RuntimeError:
        return
    assert not max(errors) <= limit
