"""A model with random weights, its cache and slot tables around the weight tape, and FP32 torch's result of a
step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.pick_experts import pick_experts_ref
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.tape_decode import TapeDecode
from tiny_vllm.models.weights import LayerWeights, ModelWeights

PAGE_SIZE = 16


@dataclass
class World:
    spec: ModelSpec
    weights: ModelWeights
    cache: KVCache
    cos_sin: Tensor
    state: SlotState
    temperature: Tensor
    tape: TapeDecode


def make_world(
    spec: ModelSpec,
    functions: Mapping[int, Any],
    *,
    device: torch.device,
    max_len: int,
    num_slots: int,
) -> World:
    """functions: as of `compile_tape`."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, device=device) * columns**-0.5 * scale
        return values.to(torch.bfloat16)

    def stack(count: int, rows: int, columns: int) -> Tensor:
        return torch.stack([matrix(rows, columns) for _ in range(count)])

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(spec.hidden_size, device=device)).to(torch.bfloat16)

    def head_norm() -> Tensor:
        return (1 + 0.3 * torch.randn(spec.head_dim, device=device)).to(torch.bfloat16)

    experts = spec.experts
    layers = [
        LayerWeights(
            norm(),
            matrix(spec.qkv_size, spec.hidden_size),
            matrix(spec.hidden_size, spec.q_size),
            norm(),
            matrix(2 * spec.intermediate_size, spec.hidden_size)
            if experts is None
            else stack(experts.num_experts, 2 * experts.intermediate_size, spec.hidden_size),
            matrix(spec.hidden_size, spec.intermediate_size)
            if experts is None
            else stack(experts.num_experts, spec.hidden_size, experts.intermediate_size),
            router=matrix(experts.num_experts, spec.hidden_size, 2.0) if experts else None,
            qkv_bias=matrix(1, spec.qkv_size, 20.0)[0] if spec.qkv_bias else None,
            q_norm=head_norm() if spec.qk_norm else None,
            k_norm=head_norm() if spec.qk_norm else None,
        )
        for _ in range(spec.num_layers)
    ]
    weights = ModelWeights(
        matrix(spec.vocab_size, spec.hidden_size, 2.0),
        layers,
        norm(),
        matrix(spec.vocab_size, spec.hidden_size, 4.0),
    )
    pages_per_slot = max_len // PAGE_SIZE
    cache = KVCache.allocate(
        spec,
        num_pages=num_slots * pages_per_slot + 1,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=device,
    )
    pages = torch.randperm(num_slots * pages_per_slot, device=device).view(num_slots, -1) + 1
    zeros = torch.zeros(num_slots, dtype=torch.int64, device=device)
    state = SlotState(
        pages, zeros.clone(), zeros.clone(), torch.arange(num_slots, device=device) * 7919 + 3, zeros.clone()
    )
    cos_sin = rope_table(spec.rope, max_len=max_len).to(device)
    temperature = torch.zeros(num_slots, device=device)
    tape = TapeDecode(spec, weights, cos_sin, cache, state, temperature, functions)
    return World(spec, weights, cache, cos_sin, state, temperature, tape)


def start(world: World, slots: list[int], positions: list[int]) -> None:
    """Random keys and values up to each slot's position, NaN behind; random tokens."""
    torch.manual_seed(sum(positions))
    state, cache = world.state, world.cache
    for pages in (cache.k, cache.v):
        pages.normal_()
    pages_nan = torch.full((), float("nan"), device=cache.k.device, dtype=torch.bfloat16)
    for slot, position in zip(slots, positions, strict=True):
        state.computed_len[slot] = position
        state.last_token[slot] = int(torch.randint(0, world.spec.vocab_size, ()))
        page, offset = position // PAGE_SIZE, position % PAGE_SIZE
        for cached in (cache.k, cache.v):
            cached[:, state.page_table[slot, page], :, offset:] = pages_nan
            cached[:, state.page_table[slot, page + 1 :]] = pages_nan
    state.sample_position.fill_(5)
    world.temperature.zero_()


Routed = list[tuple[list[int], Tensor]]


def reference(
    world: World, slot: int, dtype: torch.dtype, routed: Routed | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [vocab] and new keys and values [layers, kv_heads, head_dim] of a slot's next step. routed:
    takes each layer's picked experts and the router's logits [experts]."""
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

    def gated(gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        gate, up = (gate_up.to(dtype) @ x).chunk(2)
        return down.to(dtype) @ (F.silu(gate) * up)

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
        normed = rms(x, layer.post_attention_norm)
        if layer.router is None:
            x = x + gated(layer.gate_up, layer.down, normed)
        else:
            # So wide that equal rows have equal sums, in whatever order.
            logits = (layer.router.double() * normed.double()).sum(-1).float()
            assert spec.experts is not None
            experts, shares = pick_experts_ref(
                logits[None, None], None, spec.experts.num_active, spec.experts.normalize
            )
            if routed is not None:
                routed.append((experts[0].tolist(), logits))
            for expert, share in zip(experts[0].tolist(), shares[0], strict=True):
                x = x + (share * gated(layer.gate_up[expert], layer.down[expert], normed).float()).to(dtype)
    return weights.lm_head.to(dtype) @ rms(x, weights.final_norm), torch.stack(keys), torch.stack(values)


def choose_token(world: World, slot: int) -> None:
    """Another last token of the slot, until no layer's last pick is nearly, but not quite, equal to an expert
    that is not picked: rounding would decide between them."""
    while world.spec.experts is not None:
        routed: Routed = []
        reference(world, slot, torch.float32, routed)
        gaps = []
        for picks, logits in routed:
            rest = logits.clone()
            rest[picks] = float("-inf")
            rest[logits == logits[picks[-1]]] = float("-inf")
            gaps.append(float((logits[picks[-1]] - rest.max()) / logits.std()))
        if min(gaps) > 0.06:
            return
        world.state.last_token[slot] = (world.state.last_token[slot] + 1) % world.spec.vocab_size


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def new_rows(world: World, cached: Tensor, slot: int, position: int) -> Tensor:
    return cached[:, world.state.page_table[slot, position // PAGE_SIZE], :, position % PAGE_SIZE]
