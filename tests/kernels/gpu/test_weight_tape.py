"""The weight-tape kernel against FP32 torch: needs a GPU of sm_90 or newer and cannot be interpreted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.helpers.tape_world import (
    PAGE_SIZE,
    World,
    choose_token,
    error,
    make_world,
    new_rows,
    reference,
    start,
)
from tiny_vllm.kernels.draw_tokens import draw_tokens_ref
from tiny_vllm.kernels.sampling_noise import noise_keys
from tiny_vllm.kernels.triton_support import INTERPRETED
from tiny_vllm.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from tiny_vllm.models.tape_decode import compile_tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
        reason="the weight tape is CUDA C++ for sm_90 and newer",
    ),
]
NUM_SLOTS = 10
MAX_LEN = 6144
SHAPES = {
    # Llama-3.2-1B, Llama-3.1-8B, Llama-3.2-3B, Qwen3-0.6B, Qwen2.5-like with bias: real widths, few layers.
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128),
    "3b": dict(hidden_size=3072, intermediate_size=8192, num_heads=24, num_kv_heads=8, head_dim=128),
    "normed": dict(
        hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm="head"
    ),
    # Qwen3-30B-A3B, and another mixture.
    "experts": dict(
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm="head",
        experts=ExpertsSpec(num_experts=128, num_active=8, intermediate_size=768),
    ),
    "shares of all": dict(
        hidden_size=1024,
        intermediate_size=2048,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        experts=ExpertsSpec(num_experts=300, num_active=4, intermediate_size=512, normalize=False),
    ),
    "biased": dict(
        hidden_size=2048, intermediate_size=11008, num_heads=16, num_kv_heads=2, head_dim=128, qkv_bias=True
    ),
}


def gpu_world(name: str) -> World:
    device = torch.device("cuda")
    sizes = SHAPES[name]
    spec = ModelSpec(
        **{
            "family": "llama",
            "vocab_size": 32003,
            "num_layers": 2,
            "max_position_embeddings": MAX_LEN,
            "rms_norm_eps": 1e-5,
            "rope": RopeSpec(theta=500000.0, rotary_dim=sizes["head_dim"]),
            **sizes,
        }
    )
    functions = compile_tape(spec, PAGE_SIZE, NUM_SLOTS, device)
    return make_world(spec, functions, device=device, max_len=MAX_LEN, num_slots=NUM_SLOTS)


_worlds: dict[str, World] = {}


def needs_rows(world: World, num_rows: int) -> None:
    if num_rows > world.tape.max_rows:
        pytest.skip(f"with experts the kernel takes {world.tape.max_rows} row")


@pytest.fixture(params=list(SHAPES))
def world(request: pytest.FixtureRequest) -> World:
    if request.param not in _worlds:
        _worlds[request.param] = gpu_world(request.param)
    return _worlds[request.param]


CASES = {
    "one": [129],
    "first token": [0],
    "page edges": [15, 16],
    "short": [1, 17, 300, 511],
    "ragged": [700, 0, 5000, 31, 512, 1030, 128],
    "eight": [640] * 8,
    "long": [5999],
    "two long": [4096, 2047],
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_new_rows_are_as_near_to_fp32_as_bf16_torch(world: World, case: str) -> None:
    positions = CASES[case]
    needs_rows(world, len(positions))
    slots = list(range(len(positions)))[::-1]
    start(world, slots, positions)
    for slot in slots:
        choose_token(world, slot)
    step = world.tape.step(len(slots))
    step.slots.fill_(NUM_SLOTS)
    step.slots[: len(slots)] = torch.tensor(slots)
    exact = [reference(world, slot, torch.float32) for slot in slots]
    rounded = [reference(world, slot, torch.bfloat16) for slot in slots]
    others = world.cache.k.clone()
    step.logits.fill_(float("nan"))
    step.compute_logits()
    torch.cuda.synchronize()
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        limit = 1.1 * error(rounded[row][0], exact[row][0])
        assert error(step.logits[row], exact[row][0]) <= limit, f"row {row}: limit {limit}"
        for cached, index in ((world.cache.k, 1), (world.cache.v, 2)):
            limit = 1.1 * error(rounded[row][index], exact[row][index])
            assert error(new_rows(world, cached, slot, position), exact[row][index]) <= limit
        assert int(world.state.computed_len[slot]) == position
        # Nothing else was written.
        new_rows(world, world.cache.k, slot, position).copy_(new_rows(world, others, slot, position))
    assert torch.equal(world.cache.k[:, 1:].view(torch.int16), others[:, 1:].view(torch.int16))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_it_draws_what_the_rule_of_the_race_says_and_moves_the_slots_on(world: World, num_rows: int) -> None:
    needs_rows(world, num_rows)
    positions = [77 + 300 * row for row in range(num_rows)]
    slots = list(range(1, num_rows + 1))
    start(world, slots, positions)
    world.temperature[slots] = torch.tensor(
        [0.0, 0.7, 1.3, 0.0, 1.0, 2.0, 0.5, 1e-30][:num_rows], device="cuda"
    )
    step = world.tape.step(num_rows)
    step.slots.fill_(NUM_SLOTS)
    step.slots[:num_rows] = torch.tensor(slots)
    tokens = torch.full((8,), -7).pin_memory()
    index = torch.tensor(slots, device="cuda")
    keys = noise_keys(world.state.stream[index], world.state.sample_position[index])
    step.draw(tokens, stores_logits=True)
    torch.cuda.synchronize()
    expected = draw_tokens_ref(step.logits[:num_rows], world.temperature[index], keys)
    assert tokens.tolist() == [*expected.tolist(), *[-7] * (8 - num_rows)]
    assert world.state.last_token[index].tolist() == expected.tolist()
    assert world.state.computed_len[index].tolist() == [position + 1 for position in positions]
    assert world.state.sample_position[index].tolist() == [6] * num_rows
    assert world.state.sample_position[0] == 5 and world.state.sample_position[9] == 5


def test_steps_repeat_bit_for_bit_also_inside_a_graph(world: World) -> None:
    num_rows = min(world.tape.max_rows, 2)
    slots, positions = [3, 1][:num_rows], [480, 900][:num_rows]
    num_steps = 1000 if world.spec.head_dim == 64 else 200
    step = world.tape.step(num_rows)
    step.slots.copy_(torch.tensor(slots))
    drawn = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    runs = []
    for captured in (False, True, False):
        start(world, slots, positions)
        if world.spec.experts:
            world.temperature.fill_(1.0)  # so that picks change
        step.logits.fill_(float("nan"))
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step.draw(drawn, stores_logits=True)
            launch = graph.replay
        else:
            launch = lambda: step.draw(drawn, stores_logits=True)  # noqa: E731
        tokens = []
        for _ in range(num_steps):
            launch()
            tokens.append(drawn.clone())
        torch.cuda.synchronize()
        runs.append(
            (torch.stack(tokens), step.logits.clone(), world.cache.k.nan_to_num(), world.cache.v.nan_to_num())
        )
    assert len(set(runs[0][0][:, 0].tolist())) > 50, "the run is no test if it loops"
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_a_row_whose_logits_are_not_finite_is_reported_and_hurts_no_other(world: World) -> None:
    num_rows = min(world.tape.max_rows, 2)
    slots, positions = [2, 5][-num_rows:], [100, 200][-num_rows:]
    start(world, slots, positions)
    step = world.tape.step(num_rows)
    step.slots.copy_(torch.tensor(slots))
    world.cache.v[:, world.state.page_table[5, 1]] = float("nan")
    tokens = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    step.draw(tokens, stores_logits=True)
    torch.cuda.synchronize()
    others = [int(row.argmax()) for row in step.logits[:-1]]
    assert tokens.tolist() == [*others, -1]
    assert world.state.last_token[slots].tolist() == [*others, 0]


STUCK = """
import torch
from tests.kernels.gpu.test_weight_tape import gpu_world
from tiny_vllm.kernels.weight_tape.step import NUM_THREADS

world = gpu_world("1b")
step = world.tape.step(1)
# Half of the blocks are missing, so the others wait for vectors that never come.
function = world.tape.function(1)
function.prepare((step.parameters,), grid=64, block=NUM_THREADS, cooperative=True).launch()
torch.cuda.synchronize()
"""


def test_a_stuck_kernel_becomes_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "CUDA error" in done.stderr
