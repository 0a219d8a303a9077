"""The kernels of a mixture of experts against FP64 sums over experts, at loads of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_spec import LLAMA
from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts, expert_parts_ref
from tiny_vllm.kernels.expert_tiles import expert_tiles, expert_tiles_ref
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.norm_and_pick import norm_and_pick
from tiny_vllm.kernels.norm_linear import norm_linear
from tiny_vllm.kernels.pick_experts import pick_experts, pick_experts_ref
from tiny_vllm.kernels.picked_experts import choose_pick_tiles, takes_picks
from tiny_vllm.kernels.rms_norm import rms_norm_ref
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl
from tiny_vllm.models.experts import Experts
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ExpertsSpec
from tiny_vllm.models.weights import LayerWeights

pytestmark = pytest.mark.gpu

SIZES = dict(hidden=48, inner=40) if INTERPRETED else dict(hidden=2048, inner=768)
# The inner values are rounded once, to a type of so many bits; sums of FP32 are as exact as their length.
TOLERANCES = {
    torch.float32: 1e-5,
    torch.bfloat16: 2**-6 if INTERPRETED else 2**-7,
    torch.float16: 2**-9,
}
# tokens, experts, active
LOADS = {
    "one_token": (1, 8, 3),
    "more_experts_than_tokens": (3, 64, 2),
    "more_tokens_than_a_tile": (70, 4, 2),
    "one_expert": (5, 1, 1),
    "all_active": (9, 6, 6),
    "more_tiles_than_a_group": (1100, 3, 1),
}
# Of few picks, which are not sorted.
FEW_PICKS = {
    "one_of_one": (1, 1, 1),
    "three_tokens": (3, 32, 2),
}
if not INTERPRETED:
    FEW_PICKS |= {
        "two_of_eight": (1, 8, 2),
        "all_but_one": (1, 17, 16),
        "two_tokens": (2, 128, 16),
        "four_tokens": (4, 128, 8),
        "eight_tokens": (8, 64, 2),
    }
    LOADS |= {"qwen3_step": (8, 128, 8), "qwen3_prompt": (2000, 128, 8), "gpt_oss": (300, 32, 4)}
    LOADS |= {"a_thousand_tokens_each": (2000, 4, 2)}


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is no number."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def spread(num_tokens: int, num_experts: int, num_active: int, kind: str) -> Tensor:
    """Different experts for each token: random ones, or the first alone where that is possible."""
    if kind == "first":
        return torch.arange(num_active).expand(num_tokens, -1).int().contiguous()
    return torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_active].int()


@pytest.mark.parametrize("kind", ["random", "first"])
@pytest.mark.parametrize("load", LOADS)
def test_tiles_hold_every_row_of_every_expert_once(device: torch.device, load: str, kind: str) -> None:
    num_experts = LOADS[load][1]
    experts = spread(*LOADS[load], kind).flatten().to(device)
    for tile_rows in (16, 64):
        tiles = expert_tiles(experts, num_experts, tile_rows)
        expected = expert_tiles_ref(experts, num_experts, tile_rows)
        assert torch.equal(tiles.order, expected.order)
        for name in ("experts", "starts", "ends"):
            assert torch.equal(getattr(tiles, name), getattr(expected, name)), name


@pytest.mark.parametrize("num_rows", [3000, 9000])
def test_tiles_of_many_rows(device: torch.device, num_rows: int) -> None:
    experts = torch.randint(0, 5, (num_rows,)).int().to(device)
    experts[experts == 2] = 4
    tiles, expected = expert_tiles(experts, 7, 16), expert_tiles_ref(experts, 7, 16)
    assert torch.equal(tiles.order, expected.order)
    assert torch.equal(tiles.ends, expected.ends) and torch.equal(tiles.experts, expected.experts)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("num_experts", "num_active"), [(5, 2), (128, 8), (32, 4), (1, 1)])
def test_the_likeliest_experts_are_picked(
    device: torch.device, num_experts: int, num_active: int, splits: int, normalize: bool
) -> None:
    parts = torch.randn(splits, 40, num_experts, device=device)
    bias = torch.randn(num_experts, device=device) if splits > 1 else None
    experts, weights = pick_experts(parts, bias, num_active, normalize, has_pdl(device))
    expected, expected_weights = pick_experts_ref(parts, bias, num_active, normalize)
    assert experts.dtype == torch.int32 and torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)


def test_equal_logits_favour_the_lower_expert(device: torch.device) -> None:
    experts, weights = pick_experts(torch.zeros(1, 3, 9, device=device), None, 3, True)
    assert experts.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_logits_that_are_no_numbers_pick_experts_that_exist(device: torch.device) -> None:
    parts = torch.randn(1, 3, 5, device=device)
    expected, _ = pick_experts(parts, None, 2, True)
    parts[0, 1] = float("nan")
    experts, weights = pick_experts(parts, None, 2, True)
    assert ((experts >= 0) & (experts < 5)).all()
    assert weights[1].isnan().all()
    assert torch.equal(experts[[0, 2]], expected[[0, 2]])


def test_one_logit_that_is_no_number_spoils_its_row_alone(device: torch.device) -> None:
    parts = torch.randn(1, 3, 40, device=device)
    parts[0, 1, 7] = float("nan")
    for normalize in (True, False):
        experts, weights = pick_experts(parts, None, 4, normalize)
        assert ((experts >= 0) & (experts < 40)).all() and len(set(experts[1].tolist())) == 4
        assert weights[1].isnan().all() and weights[[0, 2]].isfinite().all()


def test_logits_of_both_signs_and_zeros_of_both_signs_are_in_order(device: torch.device) -> None:
    logits = torch.tensor([-3.0, 0.0, -0.0, -1e-30, 2.0, float("-inf"), -2.0, 0.0], device=device)
    experts, _ = pick_experts(logits.view(1, 1, -1), None, 8, True)
    assert experts.tolist() == [[4, 1, 2, 7, 3, 6, 0, 5]]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("hidden", [48, 2048, 2880])
@pytest.mark.parametrize(("num_experts", "num_active"), [(5, 2), (128, 8), (512, 10), (1, 1)])
def test_the_norm_and_the_choice_of_experts_in_one(
    device: torch.device,
    num_experts: int,
    num_active: int,
    hidden: int,
    normalize: bool,
    dtype: torch.dtype,
    poisoned_memory: None,
) -> None:
    splits, num_tokens = (1, 8) if normalize else (3, 2)
    x, norm = torch.randn(num_tokens, hidden, device=device).to(dtype), torch.rand(hidden, device=device)
    parts = torch.randn(splits, num_tokens, num_experts, device=device)
    bias = None if normalize else torch.randn(num_experts, device=device)
    normed, experts, weights = norm_and_pick(
        x, norm, 1e-5, parts, bias, num_active, normalize, has_pdl(device)
    )
    expected, expected_weights = pick_experts_ref(parts, bias, num_active, normalize)
    assert experts.dtype == torch.int32 and torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)
    # One rounding; the smallest values of FP16 are multiples of one step.
    exact = rms_norm_ref(x.double(), norm.double(), 1e-5)
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(normed.double(), exact, rtol=TOLERANCES[dtype], atol=step)


def random_matrices(
    num_experts: int,
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool,
    hidden: int = SIZES["hidden"],
    inner: int = SIZES["inner"],
) -> ExpertMatrices:
    shapes = (2 * inner, hidden), (hidden, inner)
    gate_up, down = (
        (torch.randn(num_experts, *shape, device=device) * shape[1] ** -0.5).to(dtype) for shape in shapes
    )
    biases = [torch.randn(num_experts, shape[0], device=device).to(dtype) for shape in shapes]
    return ExpertMatrices(gate_up, down, *(biases if has_bias else (None, None)))


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)


def expected_parts(
    x: Tensor, experts: Tensor, weights: Tensor, matrices: ExpertMatrices, activation: str
) -> Tensor:
    parts = torch.zeros(experts.shape[1], *x.shape, dtype=torch.float64, device=x.device)
    for token, picked in enumerate(experts.tolist()):
        for place, expert in enumerate(picked):
            inner = matrices.gate_up[expert].double() @ x[token].double()
            if matrices.gate_up_bias is not None:
                inner = inner + matrices.gate_up_bias[expert].double()
            outputs = matrices.down[expert].double() @ activate(*inner.chunk(2), activation)
            if matrices.down_bias is not None:
                outputs = outputs + matrices.down_bias[expert].double()
            parts[place, token] = outputs * weights[token, place].double()
    return parts


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("activation", "has_bias"), [("silu", False), ("clamped_swiglu", True), ("gelu_tanh", False)]
)
@pytest.mark.parametrize("kind", ["random", "first"])
@pytest.mark.parametrize("load", LOADS | FEW_PICKS)
def test_parts_are_the_weighted_outputs_of_the_picked_experts(
    device: torch.device,
    load: str,
    kind: str,
    activation: str,
    has_bias: bool,
    dtype: torch.dtype,
    poisoned_memory: None,
) -> None:
    num_tokens, num_experts, num_active = (LOADS | FEW_PICKS)[load]
    assert load not in FEW_PICKS or takes_picks(num_tokens, num_active, num_experts)
    matrices = random_matrices(num_experts, dtype, device, has_bias)
    x = torch.randn(num_tokens, SIZES["hidden"], device=device).to(dtype)
    experts = spread(num_tokens, num_experts, num_active, kind).to(device)
    weights = torch.rand(num_tokens, num_active, device=device)
    expected = expected_parts(x, experts, weights, matrices, activation)
    size = float(expected.abs().max())
    for op in (expert_parts, expert_parts_ref):
        actual = op(x, experts, weights, matrices, activation)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[dtype] * size)


@pytest.mark.parametrize(("hidden", "inner"), [(2 * 7 * 128, 24), (24, 13 * 128 + 40)])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_rows_longer_than_what_a_thread_holds(
    device: torch.device, num_tokens: int, hidden: int, inner: int, poisoned_memory: None
) -> None:
    """In steps: of a matrix that they divide, and of one whose last step is short."""
    num_experts, num_active, kind = 16, 2, "first"
    tiles = choose_pick_tiles(max(hidden, inner), torch.float32, hidden > inner)
    assert max(hidden, inner) > tiles.num_tiles * tiles.block_k
    matrices = random_matrices(num_experts, torch.float32, device, True, hidden, inner)
    x = torch.randn(num_tokens, hidden, device=device)
    experts = spread(num_tokens, num_experts, num_active, kind).to(device)
    weights = torch.rand(num_tokens, num_active, device=device)
    expected = expected_parts(x, experts, weights, matrices, "silu")
    actual = expert_parts(x, experts, weights, matrices, "silu")
    size = float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[torch.float32] * size)


def test_a_token_alone_and_in_company_has_the_same_parts(device: torch.device) -> None:
    matrices = random_matrices(64, torch.bfloat16, device, has_bias=True)
    x = torch.randn(4, SIZES["hidden"], device=device).bfloat16()
    experts, weights = spread(4, 64, 4, "first").to(device), torch.rand(4, 4, device=device)
    together = expert_parts(x, experts, weights, matrices, "silu")
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(
            expert_parts(x[one], experts[one], weights[one], matrices, "silu"), together[:, one]
        )


def test_no_tokens_have_no_parts(device: torch.device) -> None:
    matrices = random_matrices(4, torch.float32, device, has_bias=False)
    none = torch.zeros(0, 2, device=device)
    x = torch.zeros(0, SIZES["hidden"], device=device)
    assert expert_parts(x, none.int(), none, matrices, "silu").shape == (2, 0, SIZES["hidden"])


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_layer_of_experts_adds_the_mixture(
    device: torch.device, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of three tokens."""
    monkeypatch.setattr("tiny_vllm.models.experts.MAX_PICKS", 6)
    matrices = random_matrices(5, torch.float32, device, has_bias=True)
    unused, hidden_size = torch.empty(0), SIZES["hidden"]
    layer = LayerWeights(
        input_norm=unused,
        qkv=unused,
        output=unused,
        post_attention_norm=unused,
        gate_up=matrices.gate_up,
        down=matrices.down,
        gate_up_bias=matrices.gate_up_bias,
        down_bias=matrices.down_bias,
        router=torch.randn(5, hidden_size, device=device) * hidden_size**-0.5,
        router_bias=torch.randn(5, device=device),
    )
    assert layer.router is not None and layer.router_bias is not None
    experts = ExpertsSpec(num_experts=5, num_active=2, intermediate_size=SIZES["inner"], bias=True)
    spec = replace(LLAMA, experts=experts, activation="clamped_swiglu")
    hidden, residual = torch.randn(2, num_tokens, hidden_size, device=device)
    actual = Experts(spec, layer, ResidualJoin(spec, None))(hidden, residual)
    logits = hidden @ layer.router.T + layer.router_bias
    picked, weights = pick_experts_ref(logits.unsqueeze(0), None, 2, True)
    parts = expected_parts(hidden, picked, weights, matrices, "clamped_swiglu")
    expected = residual.double() + parts.sum(0)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_one_graph_serves_every_load(device: torch.device) -> None:
    matrices = random_matrices(16, torch.bfloat16, device, has_bias=False)
    x = torch.randn(20, SIZES["hidden"], device=device).bfloat16()
    logits = torch.randn(1, 20, 16, device=device)

    def mixture() -> Tensor:
        experts, weights = pick_experts(logits, None, 3, True)
        return expert_parts(x, experts, weights, matrices, "silu")

    mixture()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mixture()
    for bias in (torch.zeros(16), 50.0 * (torch.arange(16) < 3), torch.randn(16)):
        logits.copy_(torch.randn(1, 20, 16) + bias)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, mixture())


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs and dependent launch")
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
def test_layers_that_overlap_compute_what_layers_in_turn_do(device: torch.device, num_tokens: int) -> None:
    """A product that starts early must not see the picks of another layer, or of another replay."""
    layers = [random_matrices(64, torch.bfloat16, device, has_bias=False) for _ in range(4)]
    routers = torch.randn(4, 64, SIZES["hidden"], device=device).bfloat16()
    norm = torch.ones(SIZES["hidden"], device=device)
    x = torch.randn(num_tokens, SIZES["hidden"], device=device).bfloat16()

    def run(pdl: bool) -> Tensor:
        hidden = x + 0.0
        for index, (matrices, router) in enumerate(zip(layers, routers, strict=True)):
            later = pdl and index > 0
            logits = norm_linear(hidden, router, norm_weight=norm, out_dtype=torch.float32, pdl=later)
            picks = norm_and_pick(hidden, norm, 1e-5, logits.unsqueeze(0), None, 4, True, pdl)
            parts = expert_parts(*picks, matrices, "silu", pdl)
            hidden, _ = finish_rows(parts, hidden, None, 0.0, pdl=pdl)
        return hidden

    run(has_pdl(device))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(has_pdl(device))
    for _ in range(20):
        x.copy_(torch.randn(num_tokens, SIZES["hidden"]))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, run(False))
