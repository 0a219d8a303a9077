"""The weight-tape kernel against FP32 torch: needs a GPU of sm_90 or newer and cannot be interpreted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.draw_tokens import draw_tokens_ref
from tiny_vllm.kernels.sampling_noise import noise_keys
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import INTERPRETED
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.tape_decode import TapeDecode, compile_tape
from tiny_vllm.models.weights import LayerWeights, ModelWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
        reason="the weight tape is CUDA C++ for sm_90 and newer",
    ),
]
PAGE_SIZE = 16
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
    "biased": dict(
        hidden_size=2048, intermediate_size=11008, num_heads=16, num_kv_heads=2, head_dim=128, qkv_bias=True
    ),
}


@dataclass
class World:
    spec: ModelSpec
    weights: ModelWeights
    cache: KVCache
    cos_sin: Tensor
    state: SlotState
    temperature: Tensor
    tape: TapeDecode


def make_world(name: str, *, num_layers: int = 2, vocab_size: int = 32003) -> World:
    device = torch.device("cuda")
    sizes = SHAPES[name]
    spec = ModelSpec(
        family="llama",
        vocab_size=vocab_size,
        num_layers=num_layers,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0, rotary_dim=sizes["head_dim"]),
        **sizes,
    )
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, device=device) * columns**-0.5 * scale
        return values.to(torch.bfloat16)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(spec.hidden_size, device=device)).to(torch.bfloat16)

    def head_norm() -> Tensor:
        return (1 + 0.3 * torch.randn(spec.head_dim, device=device)).to(torch.bfloat16)

    layers = [
        LayerWeights(
            norm(),
            matrix(spec.qkv_size, spec.hidden_size),
            matrix(spec.hidden_size, spec.q_size),
            norm(),
            matrix(2 * spec.intermediate_size, spec.hidden_size),
            matrix(spec.hidden_size, spec.intermediate_size),
            qkv_bias=matrix(1, spec.qkv_size, 20.0)[0] if spec.qkv_bias else None,
            q_norm=head_norm() if spec.qk_norm else None,
            k_norm=head_norm() if spec.qk_norm else None,
        )
        for _ in range(num_layers)
    ]
    weights = ModelWeights(
        matrix(vocab_size, spec.hidden_size, 2.0), layers, norm(), matrix(vocab_size, spec.hidden_size, 4.0)
    )
    pages_per_slot = MAX_LEN // PAGE_SIZE
    cache = KVCache.allocate(
        spec,
        num_pages=NUM_SLOTS * pages_per_slot + 1,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=device,
    )
    pages = torch.randperm(NUM_SLOTS * pages_per_slot, device=device).view(NUM_SLOTS, -1) + 1
    zeros = torch.zeros(NUM_SLOTS, dtype=torch.int64, device=device)
    state = SlotState(
        pages, zeros.clone(), zeros.clone(), torch.arange(NUM_SLOTS, device=device) * 7919 + 3, zeros.clone()
    )
    cos_sin = rope_table(spec.rope, max_len=MAX_LEN).to(device)
    temperature = torch.zeros(NUM_SLOTS, device=device)
    functions = compile_tape(spec, PAGE_SIZE, NUM_SLOTS, device)
    tape = TapeDecode(spec, weights, cos_sin, cache, state, temperature, functions)
    return World(spec, weights, cache, cos_sin, state, temperature, tape)


_worlds: dict[str, World] = {}


@pytest.fixture(params=list(SHAPES))
def world(request: pytest.FixtureRequest) -> World:
    if request.param not in _worlds:
        _worlds[request.param] = make_world(request.param)
    return _worlds[request.param]


def start(world: World, slots: list[int], positions: list[int]) -> None:
    """Random keys and values up to each slot's position, NaN behind; random tokens."""
    torch.manual_seed(sum(positions))
    state, cache = world.state, world.cache
    for pages in (cache.k, cache.v):
        pages.normal_()
    pages_nan = torch.full((), float("nan"), device="cuda", dtype=torch.bfloat16)
    for slot, position in zip(slots, positions, strict=True):
        state.computed_len[slot] = position
        state.last_token[slot] = int(torch.randint(0, world.spec.vocab_size, ()))
        page, offset = position // PAGE_SIZE, position % PAGE_SIZE
        for cached in (cache.k, cache.v):
            cached[:, state.page_table[slot, page], :, offset:] = pages_nan
            cached[:, state.page_table[slot, page + 1 :]] = pages_nan
    state.sample_position.fill_(5)
    world.temperature.zero_()


def reference(world: World, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [vocab] and new keys and values [layers, kv_heads, head_dim] of a slot's next step."""
    spec, weights, state = world.spec, world.weights, world.state
    position = int(state.computed_len[slot])
    half = spec.head_dim // 2
    cos, sin = world.cos_sin[position].to(dtype).split(half)
    keys, values = [], []

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps)).to(
            dtype
        ) * weight.to(dtype)

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x = weights.embedding[state.last_token[slot]].to(dtype)
    for index, layer in enumerate(weights.layers):
        qkv = layer.qkv.to(dtype) @ rms(x, layer.input_norm)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.to(dtype)
        kv_size = spec.num_kv_heads * spec.head_dim
        q, k, v = (t.view(-1, spec.head_dim) for t in qkv.split([spec.q_size, kv_size, kv_size]))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms(q, layer.q_norm), rms(k, layer.k_norm)
        q, k = rotate(q), rotate(k)
        keys.append(k)
        values.append(v)
        past = [
            cached[index, state.page_table[slot]].transpose(1, 2).flatten(0, 1)[:position].to(dtype)
            for cached in (world.cache.k, world.cache.v)
        ]
        k_all, v_all = torch.cat((past[0], k[None])), torch.cat((past[1], v[None]))
        group = spec.num_heads // spec.num_kv_heads
        k_all, v_all = k_all.repeat_interleave(group, 1), v_all.repeat_interleave(group, 1)
        scores = torch.einsum("hd,thd->ht", q, k_all) * spec.head_dim**-0.5
        attended = torch.einsum("ht,thd->hd", scores.float().softmax(-1).to(dtype), v_all)
        x = x + layer.output.to(dtype) @ attended.flatten()
        gate, up = (layer.gate_up.to(dtype) @ rms(x, layer.post_attention_norm)).chunk(2)
        x = x + layer.down.to(dtype) @ (F.silu(gate) * up)
    return weights.lm_head.to(dtype) @ rms(x, weights.final_norm), torch.stack(keys), torch.stack(values)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def new_rows(world: World, cached: Tensor, slot: int, position: int) -> Tensor:
    return cached[:, world.state.page_table[slot, position // PAGE_SIZE], :, position % PAGE_SIZE]


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
    slots = list(range(len(positions)))[::-1]
    start(world, slots, positions)
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
    slots, positions, num_steps = [3, 1], [480, 900], 1000 if world.spec.head_dim == 64 else 100
    step = world.tape.step(2)
    step.slots.copy_(torch.tensor(slots))
    drawn = torch.empty(2, dtype=torch.int64, device="cuda")
    runs = []
    for captured in (False, True, False):
        start(world, slots, positions)
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
    slots, positions = [2, 5], [100, 200]
    start(world, slots, positions)
    step = world.tape.step(2)
    step.slots.copy_(torch.tensor(slots))
    world.cache.v[:, world.state.page_table[5, 1]] = float("nan")
    tokens = torch.empty(2, dtype=torch.int64, device="cuda")
    step.draw(tokens, stores_logits=True)
    torch.cuda.synchronize()
    assert tokens.tolist() == [int(step.logits[0].argmax()), -1]
    assert world.state.last_token[slots].tolist() == [int(tokens[0]), 0]


STUCK = """
import torch
from tests.kernels.gpu.test_weight_tape import make_world
from tiny_vllm.kernels.weight_tape.step import NUM_THREADS

world = make_world("1b")
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
