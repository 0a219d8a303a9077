"""RMSNorm, gated activations, embedding, rotation with the cache write: kernels against their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.test_gated_activation import FORMULAS
from tests.models.test_spec import LLAMA
from tiny_vllm.kernels.embedding import embedding
from tiny_vllm.kernels.gated_activation import gated_activation
from tiny_vllm.kernels.qkv_rope_and_cache import _launch_qkv_rope_and_cache
from tiny_vllm.kernels.rms_norm import norm_in_place, rms_norm
from tiny_vllm.kernels.rope import HeadNorms, prepare_rope, rope_and_cache
from tiny_vllm.kernels.token_inputs import _launch_read_tokens, read_tokens_ref
from tiny_vllm.kernels.triton_support import INTERPRETED
from tiny_vllm.kernels.write_out import _launch_write_out
from tiny_vllm.models.residual import ResidualJoin

pytestmark = pytest.mark.gpu

# One rounding of the result, relative; the interpreter cuts BF16 off where a GPU rounds.
TOLERANCES = {
    torch.float32: 2**-20,
    torch.bfloat16: 2**-7 if INTERPRETED else 2**-8,
    torch.float16: 2**-10,
}
WIDTHS = (64, 577, 1000) if INTERPRETED else (64, 577, 2048, 4096, 8192, 14336)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, size: float = 0.0) -> None:
    """size: what the absolute error scales with where terms may cancel."""
    assert actual.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * size + 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7])
def test_rms_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(rows, width, device=device)).to(dtype)
    weight = 1 + 0.1 * torch.randn(width, device=device)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    check(rms_norm(x, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_in_place_of_some_columns(device: torch.device, width: int, dtype: torch.dtype) -> None:
    whole = torch.randn(5, 2 * width + 3, device=device).to(dtype)
    weight = 1 + 0.1 * torch.randn(width, device=device)
    before, wide = whole.clone(), whole[:, 3 : width + 3].double()
    norm_in_place(whole[:, 3 : width + 3], weight, 1e-5)
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    check(whole[:, 3 : width + 3], expected, dtype)
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, width + 3 :], before[:, width + 3 :])


@pytest.mark.parametrize(("has_norm", "multiplier"), [(False, 1.0), (False, 0.25), (True, 1.0), (True, 0.25)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_residual_join(device: torch.device, has_norm: bool, multiplier: float, dtype: torch.dtype) -> None:
    spec = replace(LLAMA, norm_offset=1.0, residual_multiplier=multiplier)
    norm = 0.1 * torch.randn(96, device=device) if has_norm else None
    branch, residual = (torch.randn(5, 96, device=device).to(dtype) for _ in range(2))
    expected = branch.double()
    if norm is not None:
        scale = torch.rsqrt(expected.square().mean(-1, keepdim=True) + spec.rms_norm_eps)
        expected = expected * scale * (1 + norm.double())
    expected = residual.double() + multiplier * expected
    assert ResidualJoin(spec, norm)(branch[:0], residual[:0]).shape == (0, 96)
    check(ResidualJoin(spec, norm)(branch, residual), expected, dtype, size=4.0)


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7])
def test_gated_activation(
    device: torch.device, rows: int, width: int, dtype: torch.dtype, activation: str
) -> None:
    # The interpreter takes an infinite power for an error, a GPU goes on with it.
    gate_up = ((2 if INTERPRETED else 5) * torch.randn(rows, 2 * width, device=device)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    check(gated_activation(gate_up, activation), FORMULAS[activation](gate, up), dtype)


@pytest.mark.parametrize("activation", FORMULAS)
def test_what_is_no_number_passes_through_activations(device: torch.device, activation: str) -> None:
    gate_up = torch.ones(1, 12, device=device)
    gate_up[0, 1] = gate_up[0, 6 + 3] = float("nan")
    activated = gated_activation(gate_up, activation)
    assert activated.isnan().tolist() == [[False, True, False, True, False, False]]


@pytest.mark.parametrize("width", WIDTHS)
def test_embedding(device: torch.device, width: int) -> None:
    table = torch.randn(50, width, device=device).half()
    token_ids = torch.tensor([49, 0, 7, 7], device=device)
    assert torch.equal(embedding(table, token_ids), table[token_ids])


class Heads:
    """Caches of NaN, positions, cells and angles for T tokens; `turn` is the rotation in FP64."""

    def __init__(
        self, tokens: int, num_kv_heads: int, head_dim: int, rotary_dim: int, page_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.rotary_dim = rotary_dim
        shape = (2, tokens + 2, num_kv_heads, page_size, head_dim)
        self.k_cache, self.v_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.positions = torch.randint(0, 100, (tokens,), device=device)
        self.cells = (torch.randperm((tokens + 1) * page_size, device=device) + page_size)[:tokens]
        angles = torch.arange(100, device=device)[:, None] * torch.rand(rotary_dim // 2, device=device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    def turn(self, x: Tensor) -> Tensor:
        """x [T, heads, D]."""
        cos, sin = self.cos_sin[self.positions].double()[:, None].chunk(2, -1)
        first, second, rest = x.double().split(
            [self.rotary_dim // 2, self.rotary_dim // 2, x.shape[-1] - self.rotary_dim], -1
        )
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def check_caches(self, k: Tensor, v: Tensor, dtype: torch.dtype, size: float) -> None:
        """k, v [T, Hkv, D] in FP64; every other cell must still be NaN."""
        page_size = self.k_cache.shape[2]
        where = (self.cells // page_size, slice(None), self.cells % page_size)
        for cache, expected in ((self.k_cache, k), (self.v_cache, v)):
            check(cache[where], expected, dtype, size)
            rest = cache.clone()
            rest[where] = float("nan")
            assert rest.isnan().all()


# num_heads, num_kv_heads, head_dim, rotary_dim, page_size
HEADS = {
    "typical": (2, 1, 64, 64, 16),
    "partial_rotation": (1, 1, 80, 32, 1),
    "head_96": (3, 1, 96, 96, 32),
    "head_256_partial": (1, 1, 256, 64, 64),
    "more_heads_than_a_program_takes": (24, 8, 16, 16, 4),
}
if not INTERPRETED:
    HEADS |= {
        "llama_1b": (32, 8, 64, 64, 16),
        "llama_8b": (32, 8, 128, 128, 16),
        "group_16": (16, 1, 128, 128, 64),
    }

# Types differ in what is loaded and stored alone: the interpreter, which takes seconds, tries all once.
CASES = [
    (case, dtype)
    for case in HEADS
    for dtype in TOLERANCES
    if not INTERPRETED or case == "typical" or dtype == torch.float32
]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("tokens", "has_norms"), [(1, False), (6, False), (6, True)])
def test_rope_and_cache(
    device: torch.device, case: str, tokens: int, has_norms: bool, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size = HEADS[case]
    heads = Heads(tokens, num_kv_heads, head_dim, rotary_dim, page_size, dtype, device)
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    step = prepare_rope(heads.cos_sin, heads.positions, heads.cells, num_kv_heads, page_size)
    q, k, v = qkv.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    norms, size = None, 4.0
    if has_norms:
        norms = HeadNorms(*(1 + 0.5 * torch.rand(2, head_dim, device=device)), 1e-3)
        q, k = (
            x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norms.eps) * weight.double()
            for x, weight in ((q, norms.q), (k, norms.k))
        )
        size = 1.5 * head_dim**0.5
    actual = rope_and_cache(qkv, step, heads.k_cache, heads.v_cache, num_heads, norms)
    check(actual, heads.turn(q), dtype, size=size)
    heads.check_caches(heads.turn(k), v.double(), dtype, size=size)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3] if INTERPRETED else [1, 2, 3, 8])
@pytest.mark.parametrize("has_bias", [False, True])
def test_qkv_rope_and_cache(
    device: torch.device, case: str, has_bias: bool, tokens: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size = HEADS[case]
    hidden = 96 if INTERPRETED else 2048
    heads = Heads(tokens, num_kv_heads, head_dim, rotary_dim, page_size, dtype, device)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    size = (num_heads + 2 * num_kv_heads) * head_dim
    weight = (torch.randn(size, hidden, device=device) * hidden**-0.5).to(dtype)
    bias = torch.randn(size, device=device).to(dtype) if has_bias else None
    norm = 1 + 0.1 * torch.randn(hidden, device=device)
    actual = _launch_qkv_rope_and_cache(
        x, weight, bias, norm, 1e-5, heads.cos_sin, heads.positions, heads.cells, heads.k_cache,
        heads.v_cache, num_heads,
    )  # fmt: skip
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    qkv = wide @ weight.double().T + (0 if bias is None else bias.double())
    q, k, v = qkv.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    # Errors scale with the sum of the magnitudes of a value's terms, about sqrt(hidden) for these sizes.
    size_of_terms = float((wide.abs() @ weight.double().abs().T).max()) + 4
    check(actual, heads.turn(q), dtype, size_of_terms)
    heads.check_caches(heads.turn(k), v, dtype, size_of_terms)


@pytest.mark.parametrize("page_size", [1, 12, 16])
@pytest.mark.parametrize(("num_decodes", "num_tokens"), [(0, 1), (3, 0), (5, 300), (130, 7)])
def test_tokens_positions_and_cells_of_a_step_with_prompts(
    device: torch.device, num_decodes: int, num_tokens: int, page_size: int
) -> None:
    num_slots, width = 9, 40
    max_len = width * page_size
    slots = torch.randint(num_slots, (num_decodes + num_tokens,), device=device)
    tokens = torch.randint(1000, (num_tokens,), device=device)
    positions = torch.randint(max_len, (num_tokens,), device=device)
    last_token = torch.randint(1000, (num_slots,), device=device)
    computed_len = torch.randint(max_len, (num_slots,), device=device)
    page_table = torch.randint(2**33, (num_slots, width), device=device)
    arguments = slots, tokens, positions, last_token, computed_len, page_table, page_size
    actual, expected = _launch_read_tokens(*arguments), read_tokens_ref(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("count", [1, 64, 300])
def test_tokens_are_written_to_the_host(device: torch.device, count: int) -> None:
    """A part of a buffer that starts anywhere; what lies around it stays."""
    source = torch.randint(-1, 1 << 40, (count,), device=device)
    target = torch.full((count + 8,), -7, pin_memory=not INTERPRETED)
    _launch_write_out(source, target[3 : 3 + count])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target[3 : 3 + count], source.cpu())
    assert (target[:3] == -7).all() and (target[3 + count :] == -7).all()
