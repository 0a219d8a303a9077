"""The kernels of a mixture of experts against FP64 sums over experts, at loads of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_spec import LLAMA
from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts, expert_parts_ref
from tiny_vllm.kernels.expert_tiles import expert_tiles, expert_tiles_ref
from tiny_vllm.kernels.pick_experts import pick_experts, pick_experts_ref
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
}
if not INTERPRETED:
    LOADS |= {"qwen3_step": (8, 128, 8), "qwen3_prompt": (2000, 128, 8), "gpt_oss": (300, 32, 4)}


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


def test_tiles_of_many_rows(device: torch.device) -> None:
    experts = torch.randint(0, 5, (3000,)).int().to(device)
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


def random_matrices(
    num_experts: int, dtype: torch.dtype, device: torch.device, has_bias: bool
) -> ExpertMatrices:
    hidden, inner = SIZES["hidden"], SIZES["inner"]
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
@pytest.mark.parametrize("load", LOADS)
def test_parts_are_the_weighted_outputs_of_the_picked_experts(
    device: torch.device, load: str, kind: str, activation: str, has_bias: bool, dtype: torch.dtype
) -> None:
    num_tokens, num_experts, num_active = LOADS[load]
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
