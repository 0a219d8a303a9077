"""Every kernel compiles for GPUs at the shapes that matter, without spilling registers; no GPU is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.helpers.kernel_compiler import CompiledKernel, compiling, decode_chain, meta, missing_tools
from tiny_vllm.kernels.draw_from_linear import DRAW_TILES, draw_from_linear
from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens
from tiny_vllm.kernels.embedding import embedding
from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts
from tiny_vllm.kernels.gated_activation import gated_activation
from tiny_vllm.kernels.mask_filtered import mask_filtered
from tiny_vllm.kernels.norm_and_pick import norm_and_pick
from tiny_vllm.kernels.norm_linear import MAX_SMALL_ROWS
from tiny_vllm.kernels.norm_queries_and_keys import norm_queries_and_keys
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.pick_experts import pick_experts
from tiny_vllm.kernels.prefill_attention import attend_chunks
from tiny_vllm.kernels.read_sampling import SamplingColumns, read_sampling
from tiny_vllm.kernels.rms_norm import norm_in_place, rms_norm
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache
from tiny_vllm.kernels.rope_and_attend import HeadNorms, rope_and_attend
from tiny_vllm.kernels.tiled_linear import look_up
from tiny_vllm.kernels.token_inputs import read_tokens

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

FEW_ROWS = {"_attend_part_kernel", "_join_parts_kernel", "_norm_linear_kernel", "_draw_tile_kernel"}
MANY_ROWS = {"_rope_and_attend_kernel", "_tiled_product_kernel", "_finish_rows_kernel"}
# name: changes to the shape of Llama-3.2-1B
MODELS = {
    "llama_1b": {},
    "llama_8b": dict(hidden=4096, head_dim=128, intermediate=14336),
    "smollm_135m": dict(hidden=576, heads=9, kv_heads=3, intermediate=1536, vocab=49152),
}


def check(kernels: list[CompiledKernel]) -> None:
    for kernel in kernels:
        assert kernel.stack_bytes == 0, f"{kernel.name} spills with {kernel.constants}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows", [1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (8, 16, 256)), 64]
)
@pytest.mark.parametrize(
    "model",
    ["llama_1b", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama_1b")],
)
def test_decode_step(model: str, rows: int, dtype: torch.dtype) -> None:
    with compiling() as kernels:
        decode_chain(rows, dtype, **MODELS[model])
    check(kernels)
    names = {kernel.name for kernel in kernels}
    assert names > (FEW_ROWS if rows <= MAX_SMALL_ROWS else MANY_ROWS)
    assert ("_draw_from_product_kernel" in names) == (look_up(DRAW_TILES, rows) is not None)


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_a_chained_kernel_waits_once_after_loading_weights_and_before_storing(rows: int) -> None:
    with compiling() as kernels:
        decode_chain(rows)
    for kernel in kernels:
        before, *after = kernel.ptx.split("griddepcontrol.wait")
        if kernel.name not in FEW_ROWS | MANY_ROWS | {"_draw_from_product_kernel"}:
            continue
        assert len(after) == 1
        assert before.count("griddepcontrol.launch_dependents") == 1
        assert "st.global" not in before
        if kernel.name == "_norm_linear_kernel":
            assert before.count("evict_first") >= 8
        if kernel.name == "_tiled_product_kernel":
            assert "prefetch.global.L2" in before and "cp.async.bulk.tensor" in after[0]


def test_several_rows_use_tensor_cores() -> None:
    with compiling() as kernels:
        decode_chain(8)
    products = [kernel for kernel in kernels if kernel.name == "_norm_linear_kernel"]
    assert products and all("mma.sync" in kernel.ptx for kernel in products)
    with compiling() as kernels:
        decode_chain(16)
    products = [kernel for kernel in kernels if kernel.name == "_tiled_product_kernel"]
    assert products and all("wgmma" in kernel.ptx for kernel in products)


def test_a_gpu_without_dependent_launch_and_fp32() -> None:
    with compiling(capability=80) as kernels:
        decode_chain(1, use_pdl=False)
        decode_chain(4, torch.float32, use_pdl=False)
        decode_chain(16, use_pdl=False)
    assert kernels and all(".target sm_80" in kernel.ptx for kernel in kernels)
    assert not any("griddepcontrol" in kernel.ptx for kernel in kernels)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_that_rotates(head_dim: int, splits: int) -> None:
    cache, index = meta(100, 8, 16, head_dim), meta(16, dtype=torch.int64)
    parts = meta(splits, 16, 48 * head_dim, dtype=torch.float32)
    table, angles = meta(16, 256, dtype=torch.int64), meta(4096, head_dim, dtype=torch.float32)
    with compiling() as kernels:
        rope_and_attend(parts, None, angles, index, cache, cache, table, index, 32, 0.125, pdl=True)
    check(kernels)
    assert [kernel.name for kernel in kernels] == ["_rope_and_attend_kernel", "_join_parts_kernel"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_prefill_attention(head_dim: int, dtype: torch.dtype) -> None:
    cache = meta(100, 8, 16, head_dim, dtype=dtype)
    index = meta(4, dtype=torch.int64)
    with compiling() as kernels:
        attend_chunks(
            meta(512, 32, head_dim, dtype=dtype), cache, cache, meta(3, 256, dtype=torch.int64), index,
            index[:3], 0.125,
        )  # fmt: skip
    check(kernels)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_with_the_traits_of_families(head_dim: int) -> None:
    cache, index = meta(100, 8, 16, head_dim), meta(16, dtype=torch.int64)
    table, sinks = meta(16, 256, dtype=torch.int64), meta(32, dtype=torch.float32)
    parts, angles = meta(1, 16, 48 * head_dim, dtype=torch.float32), meta(4096, head_dim, dtype=torch.float32)
    norms = HeadNorms(meta(head_dim), meta(head_dim), 1e-6)
    variants: dict[str, Any] = dict(window=128, softcap=50.0, sinks=sinks)
    with compiling() as kernels:
        q = meta(16, 32, head_dim)
        attend_chunks(q, cache, cache, table, meta(17, dtype=torch.int64), index, 0.1, **variants)
        attend_pages(q, cache, cache, table, index, 0.1, pdl=True, **variants)
        rope_and_attend(
            parts, None, angles, index, cache, cache, table, index, 32, 0.1, head_norms=norms, pdl=True,
            **variants,
        )  # fmt: skip
    check(kernels)
    assert len(kernels) == 5


def loads_before_the_first_sum(num_sequences: int) -> tuple[int, int]:
    """Of attention with head norms: before the wait, and from there to the first sum of several threads."""
    cache, index = meta(100, 4, 16, 128), meta(num_sequences, dtype=torch.int64)
    parts = meta(1, num_sequences, 40 * 128, dtype=torch.float32)
    table, angles = meta(16, 256, dtype=torch.int64), meta(4096, 128, dtype=torch.float32)
    norms = HeadNorms(meta(128), meta(128), 1e-6)
    with compiling() as kernels:
        rope_and_attend(
            parts, None, angles, index, cache, cache, table, index, 32, 0.1, head_norms=norms, pdl=True
        )
    check(kernels)
    before, after = kernels[0].ptx.split("griddepcontrol.wait")
    return before.count("ld.global"), after[: after.index("shfl.sync")].count("ld.global")


def test_few_sequences_wait_once_for_all_their_values() -> None:
    """Of the newest token they are its key, the partners of that, and its value; more sequences load them
    when they are needed."""
    (before, first), (same, fewer) = loads_before_the_first_sum(8), loads_before_the_first_sum(9)
    assert before == same and first == fewer + 3
    # Keys and values of the first tile; norms.
    assert before >= 16 + 4


@pytest.mark.parametrize(("q_size", "kv_size"), [(2048, 2048), (4096, 4096), (5120, 1024)])
def test_norms_over_all_heads(q_size: int, kv_size: int) -> None:
    parts = meta(4, 16, q_size + 2 * kv_size, dtype=torch.float32)
    with compiling() as kernels:
        norm_queries_and_keys(parts, None, meta(q_size), meta(kv_size), 1e-6, True)
    check(kernels)
    before, after = kernels[0].ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before and "st.global" not in before and "st.global" in after


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("num_tokens", [8, 64, 2048])
def test_mixture_of_experts(num_tokens: int, capability: int) -> None:
    pdl = capability == 90
    matrices = ExpertMatrices(meta(128, 1536, 2048), meta(128, 2048, 768), None, None)
    with compiling(capability) as kernels:
        experts, weights = pick_experts(meta(1, num_tokens, 128, dtype=torch.float32), None, 8, True, pdl)
        expert_parts(meta(num_tokens, 2048), experts, weights, matrices, "silu", pdl)
    # The tiles of long prompts are Hopper's: Ampere spills some bytes.
    check([kernel for kernel in kernels if pdl or num_tokens < 2048])
    products = [kernel for kernel in kernels if kernel.name == "_expert_product_kernel"]
    assert len(kernels) == 4 and len(products) == 2
    assert all(("wgmma" if pdl else "mma.sync") in kernel.ptx for kernel in products)
    assert all("cp.async" in kernel.ptx for kernel in products)
    assert not pdl or all(kernel.ptx.count("griddepcontrol.wait") == 1 for kernel in kernels)


# tokens, experts, active, hidden, inner; most registers of gate and up, of down: 128 threads with 168 of them
# fit three times, with 128 four times
FEW_PICKS = {
    "qwen3_1": (1, 128, 8, 2048, 768, 112, 96),
    "qwen3_4": (4, 128, 8, 2048, 768, 128, 128),
    "mixtral": (1, 8, 2, 4096, 14336, 168, 128),
    "gpt_oss": (2, 32, 4, 2880, 2880, 168, 128),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FEW_PICKS)
def test_few_picks_of_experts(case: str, dtype: torch.dtype) -> None:
    num_tokens, num_experts, num_active, hidden, inner, *most_registers = FEW_PICKS[case]
    gate_up, down = (
        meta(num_experts, 2 * inner, hidden, dtype=dtype),
        meta(num_experts, hidden, inner, dtype=dtype),
    )
    biases = meta(num_experts, 2 * inner, dtype=dtype), meta(num_experts, hidden, dtype=dtype)
    logits = meta(1, num_tokens, num_experts, dtype=torch.float32)
    with compiling() as kernels:
        picks = norm_and_pick(
            meta(num_tokens, hidden, dtype=dtype), meta(hidden), 1e-6, logits, None, num_active, True, True
        )
        expert_parts(*picks, ExpertMatrices(gate_up, down, *biases), "silu", True)
    check(kernels)
    pick, first, second = kernels
    # A warp that needs no other, and an instruction for the largest of its lanes.
    assert pick.name == "_norm_and_pick_kernel" and pick.num_warps == 1 and "bar.sync" not in pick.ptx
    assert num_experts < 32 or "redux.sync" in pick.ptx
    for kernel, most in zip((first, second), most_registers, strict=True):
        assert kernel.name == "_picked_product_kernel" and kernel.num_registers <= most
        constants = kernel.constants
        loads = (
            constants["NUM_TILES"] * constants["BLOCK_N"] // kernel.num_warps * (1 + constants["IS_FIRST"])
        )
        assert kernel.ptx.count("griddepcontrol.wait") == 1
        # All weights of the first step are asked for before anything is multiplied, 16 bytes at a time.
        before = kernel.ptx[: kernel.ptx.index("fma.rn.f32")]
        assert before.count("ld.global.L1::evict_first.L2::cache_hint.v4.b32") == loads
        assert kernel.ptx.rindex("bar.sync", 0, len(before)) > before.rindex("evict_first")
    before, after = second.ptx.split("griddepcontrol.wait")
    assert before.count("evict_first") >= 3 and "st.global" not in before
    # The first product asks for its successor when its picks are complete.
    before, after = first.ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after and "ld.global" not in before


def test_kernels_for_many_tokens() -> None:
    cache, tokens = meta(100, 8, 16, 64), meta(512, dtype=torch.int64)
    with compiling() as kernels:
        for width in (2048, 4096, 8192):
            rms_norm(meta(512, width), meta(width, dtype=torch.float32), 1e-5)
        for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
            gated_activation(meta(512, 16384), activation)
        norm_in_place(meta(512, 6144)[:, :4096], meta(4096, dtype=torch.float32), 1e-5)
        embedding(meta(128256, 2048), tokens)
        slots = meta(256, dtype=torch.int64)
        read_tokens(tokens, tokens, tokens, slots, slots, meta(256, 100, dtype=torch.int64), 16)
        step = prepare_rope(meta(4096, 64, dtype=torch.float32), tokens, tokens, 8, 16)
        rope_and_cache(meta(512, 3072), step, cache, cache, 32)
        assert not any("griddepcontrol" in kernel.ptx for kernel in kernels)
        draw_tokens(
            meta(512, 128256, dtype=torch.float32),
            meta(512, dtype=torch.float32),
            meta(512, 2, dtype=torch.int32),
        )
    check(kernels)
    assert len(kernels) == 12


@pytest.mark.parametrize("capability", [80, 90])
def test_cut_off_gates_that_are_no_numbers_stay_none(capability: int) -> None:
    """A minimum of PTX takes the other value, unless it is told not to; the interpreter never does."""
    with compiling(capability) as kernels:
        gated_activation(meta(512, 16384), "clamped_swiglu")
    assert {"min.NaN.f32", "max.NaN.f32"} == set(re.findall(r"(?:min|max)\.[\w.]+", kernels[0].ptx))


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 128), (256, 64)])
def test_rotation_moves_16_bytes_at_a_time_and_nothing_through_shared_memory(
    head_dim: int, rotary_dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    norms = HeadNorms(*meta(2, head_dim, dtype=torch.float32), 1e-6) if has_norms else None
    cache, tokens = meta(100, 8, 16, head_dim, dtype=dtype), meta(512, dtype=torch.int64)
    with compiling() as kernels:
        step = prepare_rope(meta(4096, rotary_dim, dtype=torch.float32), tokens, tokens, 8, 16)
        rope_and_cache(meta(512, 48 * head_dim, dtype=dtype), step, cache, cache, 32, norms)
    check(kernels)
    ptx = kernels[0].ptx
    # Besides, a position and a cell.
    assert ptx.count("ld.global") - ptx.count("ld.global.v4.b32") == 2
    assert ptx.count("st.global") == ptx.count("st.global.v4.b32")
    assert ".shared." not in ptx


def draws_from_product(rows: int) -> list[CompiledKernel]:
    index = meta(rows, dtype=torch.int64)
    with compiling() as kernels:
        draw_from_linear(
            meta(rows, 2048), meta(128256, 2048), meta(rows, dtype=torch.float32),
            meta(rows, 2, dtype=torch.int32), SlotAdvance(index, index, index, index), pdl=True,
        )  # fmt: skip
    check(kernels)
    assert all(kernel.ptx.count("griddepcontrol.wait") == 1 for kernel in kernels)
    return kernels


@pytest.mark.parametrize("rows", [9, 16, 32])
def test_a_product_that_draws(rows: int) -> None:
    kernels = draws_from_product(rows)
    assert [kernel.name for kernel in kernels] == ["_draw_from_product_kernel", "_join_tiles_kernel"]
    assert "wgmma" in kernels[0].ptx


def test_the_logits_of_more_rows_are_written() -> None:
    names = [kernel.name for kernel in draws_from_product(33)]
    assert names == ["_tiled_product_kernel", "_draw_tile_kernel", "_join_tiles_kernel"]


def test_sampling_with_filters() -> None:
    reals = meta(256, dtype=torch.float32)
    with compiling() as kernels:
        mask_filtered(
            meta(256, 128256, dtype=torch.float32), reals, meta(256, dtype=torch.int64), reals, reals
        )
        integers = meta(256, dtype=torch.int64)
        read_sampling(SamplingColumns(integers, integers, integers, reals, reals, reals), integers)
    check(kernels)
    assert len(kernels) == 6
