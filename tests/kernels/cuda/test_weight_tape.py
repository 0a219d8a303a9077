"""The parts of the weight tape that need no GPU: its geometry, its order, and that it compiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.cubin import resource_usage
from tiny_vllm.config import choose_weight_tape
from tiny_vllm.errors import ConfigError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.weight_tape.layout import (
    CHUNK_BYTES,
    NUM_BLOCKS,
    SHARED_BYTES,
    UNIT_ROWS,
    WINDOW,
    MatrixLayout,
    TapeLayout,
    TapeShape,
    plan_block,
    token_buckets,
    unsupported,
)
from tiny_vllm.kernels.weight_tape.pack import TapeMatrices, pack_matrix, pack_tape
from tiny_vllm.kernels.weight_tape.step import macros, source
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.tape_decode import spec_obstacle


def shape(**changes: int) -> TapeShape:
    llama_1b = dict(
        hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        vocab_size=128256, page_size=16,
    )  # fmt: skip
    return TapeShape(**{**llama_1b, **changes})


SHAPES = {
    "llama-3.2-1b": shape(),
    "llama-3.2-3b": shape(hidden_size=3072, num_heads=24, head_dim=128, num_layers=28),
    "llama-3.1-8b": shape(hidden_size=4096, intermediate_size=14336, head_dim=128, num_layers=32),
    "mistral-nemo": shape(hidden_size=5120, intermediate_size=14336, head_dim=128, num_layers=40),
    "qwen2.5-32b": shape(
        hidden_size=5120, intermediate_size=27648, num_heads=40, head_dim=128, qkv_bias=True
    ),
    "llama-3.1-70b": shape(hidden_size=8192, intermediate_size=28672, num_heads=64, head_dim=128),
    "llama-2-7b": shape(hidden_size=4096, intermediate_size=11008, num_kv_heads=32, head_dim=128),
    "tinyllama": shape(intermediate_size=5632, num_kv_heads=4, vocab_size=32000),
    "qwen3-0.6b": shape(
        hidden_size=1024, intermediate_size=3072, num_heads=16, head_dim=128, num_layers=28, qk_norm=True
    ),
    "qwen2.5-7b-like": shape(
        hidden_size=4096, intermediate_size=16384, num_heads=28, num_kv_heads=4, head_dim=128, qkv_bias=True
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_bucket_of_tokens_has_a_plan_that_fits_a_block(name: str) -> None:
    layout = TapeLayout.of(SHAPES[name])
    assert unsupported(SHAPES[name]) is None
    assert 0 <= layout.overhead < 0.08
    for tokens in token_buckets(SHAPES[name]):
        plan = plan_block(layout, tokens)
        assert plan is not None
        assert plan.shared_bytes <= SHARED_BYTES
        # Else a warp group could mistake an earlier use of a stage for the next one.
        assert plan.stages >= 4 + WINDOW or plan.stages == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_dim=80), "the head size 80 is neither 64 nor 128"),
        (dict(num_heads=72), "72 query heads on 8 KV heads"),
        (dict(page_size=8), "the page size 8 is no multiple of 16"),
        (dict(hidden_size=576, num_heads=9, num_kv_heads=3), "576 hidden values in units of 8"),
        (dict(hidden_size=2560), "2560 hidden values in units of 8"),
        (dict(intermediate_size=4097), "no multiple of 8"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(changes: dict[str, int], reason: str) -> None:
    found = unsupported(shape(**changes))
    assert found is not None and reason in found


def spec(**changes: object) -> ModelSpec:
    values = dict(
        family="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=2,
        num_heads=32, num_kv_heads=8, head_dim=64, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=64),
    )  # fmt: skip
    return ModelSpec(**{**values, **changes})


def test_specs_beyond_the_kernel_are_refused_with_the_reason() -> None:
    assert spec_obstacle(spec(), 16) is None
    assert spec_obstacle(spec(qkv_bias=True), 16) is None
    assert spec_obstacle(spec(qk_norm="head"), 16) is None
    for changes, reason in (
        (dict(rope=RopeSpec(theta=1e4, rotary_dim=32)), "only 32 of 64 dimensions"),
        (dict(mlp_bias=True), "biases"),
        (dict(qk_norm="whole"), "family llama"),
        (dict(attention_softcap=30.0), "family llama"),
        (dict(sliding_window=16, sliding_layers=(0,)), "family llama"),
    ):
        assert reason in (spec_obstacle(spec(**changes), 16) or "")


def place_on_the_tape(layout: MatrixLayout, row: int, column: int) -> int:
    """Where a value lies, worked out step by step from the description in `layout` and `tape.cu`."""
    block, own_row = divmod(row, layout.units * UNIT_ROWS)
    unit, unit_row = divmod(own_row, UNIT_ROWS)
    chunk_of_columns, rest = divmod(column, layout.chunk_columns)
    if layout.by_unit:
        chunk = unit * layout.num_column_chunks + chunk_of_columns
    else:
        chunk = chunk_of_columns * layout.units + unit
    chunk_values = UNIT_ROWS * layout.chunk_columns
    quarter, rest = divmod(rest, layout.chunk_columns // 4)
    half, rest = divmod(rest, layout.chunk_columns // 8)
    stripe, rest = divmod(rest, 32)
    lane, rest = divmod(rest, 8)
    word, rest = divmod(rest, 4)
    pair, last = divmod(rest, 2)
    inside = ((((quarter * (layout.chunk_columns // 256) + stripe) * 2 + word) * 8 + unit_row) * 4 + lane) * 8
    return (chunk * NUM_BLOCKS + block) * chunk_values + inside + pair * 4 + half * 2 + last


@pytest.mark.parametrize("by_unit", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(3072, 2048), (2040, 700), (1500, 3072)])
def test_a_matrix_lies_on_the_tape_as_described(rows: int, columns: int, by_unit: bool) -> None:
    num_chunks = -(-columns // 1024)
    chunk_columns = -(-columns // 256 // num_chunks) * 256
    layout = MatrixLayout(rows, columns, -(-rows // 8 // NUM_BLOCKS), num_chunks, chunk_columns, by_unit)
    matrix = torch.randn(rows, columns).to(torch.bfloat16)
    packed = pack_matrix(layout, matrix)
    assert packed.shape == (layout.num_values,)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        row = int(torch.randint(rows, (), generator=generator))
        column = int(torch.randint(columns, (), generator=generator))
        assert packed[place_on_the_tape(layout, row, column)] == matrix[row, column]
    assert packed.float().pow(2).sum() == pytest.approx(float(matrix.float().pow(2).sum()), rel=1e-5)


def test_the_tape_holds_every_weight_once_in_order_of_use() -> None:
    small = shape(hidden_size=1024, intermediate_size=1024, num_layers=2, num_heads=16, vocab_size=2000)
    layout = TapeLayout.of(small)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randint(-9, 10, (rows, columns)).to(torch.bfloat16)

    layers = [
        TapeMatrices(
            matrix(small.qkv_size, 1024), matrix(1024, small.q_size), matrix(2048, 1024), matrix(1024, 1024)
        )
        for _ in range(2)
    ]
    lm_head = matrix(2000, 1024)
    tape = pack_tape(layout, layers, lm_head)
    assert tape.nbytes == layout.num_bytes
    end = layout.qkv.num_values
    assert torch.equal(tape[:end], pack_matrix(layout.qkv, layers[0].qkv))
    assert torch.equal(tape[-layout.lm_head.num_values :], pack_matrix(layout.lm_head, lm_head))
    # A unit of gate and up: 4 rows of gate, then the 4 rows of up that belong to them.
    start = end + layout.output.num_values
    mixed = torch.stack(
        (layers[0].gate_up[:1024].view(-1, 4, 1024), layers[0].gate_up[1024:].view(-1, 4, 1024)), 1
    )
    expected = pack_matrix(layout.gate_up, mixed.reshape(2048, 1024))
    assert torch.equal(tape[start : start + layout.gate_up.num_values], expected)


COMPILED = [
    pytest.param(name, tokens, marks=[] if name in ("llama-3.2-1b", "mistral-nemo") else [pytest.mark.slow])
    for name in SHAPES
    for tokens in token_buckets(SHAPES[name])
]


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(("name", "tokens"), COMPILED)
def test_the_kernel_compiles_and_hardly_spills(name: str, tokens: int) -> None:
    """A spill costs a trip to L2, because the ring leaves little L1. Seen: one register of the 1B
    shape, touched outside the layers, and elsewhere a few that are touched once a layer."""
    values = macros(TapeLayout.of(SHAPES[name]), tokens)
    usage = resource_usage(compile_cubin(source(), name="tape", defines=values))["tape_step"]
    assert usage.registers <= 96, "18 warps of more do not fit a multiprocessor"
    limit = 16 if name == "llama-3.2-1b" else 512
    assert usage.stack_bytes <= limit


def test_a_chunk_of_the_widest_kind_fills_a_stage() -> None:
    assert all(
        m.chunk_columns * UNIT_ROWS * 2 <= CHUNK_BYTES for m in vars_of(TapeLayout.of(SHAPES["llama-3.1-8b"]))
    )


def vars_of(layout: TapeLayout) -> list[MatrixLayout]:
    return [layout.qkv, layout.output, layout.gate_up, layout.down, layout.lm_head]


def test_the_second_copy_is_kept_where_it_leaves_room_for_pages() -> None:
    gib = 1 << 30
    assert choose_weight_tape(None, obstacle=None, tape_bytes=2 * gib, free_bytes=100 * gib).value is True
    too_large = choose_weight_tape(None, obstacle=None, tape_bytes=30 * gib, free_bytes=100 * gib)
    assert too_large.value is False and "30.00 GiB of weights held twice" in too_large.reason
    assert choose_weight_tape(True, obstacle=None, tape_bytes=30 * gib, free_bytes=100 * gib).value is True
    left = dict(obstacle=None, tape_bytes=10 * gib, free_bytes=100 * gib)
    assert choose_weight_tape(None, asked_page_bytes=80 * gib, **left).value is True
    spoken_for = choose_weight_tape(None, asked_page_bytes=95 * gib, **left)
    assert spoken_for.value is False and "the 5.00 GiB that the pages asked for leave" in spoken_for.reason
    assert choose_weight_tape(False, obstacle=None, tape_bytes=1, free_bytes=100 * gib).value is False
    missing = choose_weight_tape(None, obstacle="the GPU is too old", tape_bytes=0, free_bytes=100 * gib)
    assert missing.value is False and missing.reason == "the GPU is too old"
    with pytest.raises(ConfigError, match="weight_tape is True, but the GPU is too old"):
        choose_weight_tape(True, obstacle="the GPU is too old", tape_bytes=0, free_bytes=100 * gib)
