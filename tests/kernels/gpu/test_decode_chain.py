"""Whole decode steps through the kernels against plain torch, from the same weights and pages."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.hopper_linear import decode_launch
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights

pytestmark = pytest.mark.gpu

# The step in FP32 differs from the reference in the order of sums only.
TOLERANCE = 1e-4
CONTEXTS = (5, 70, 16, 33)
PAGE_SIZE = 16
# With these, a step takes the tiled products.
PADDING = [len(CONTEXTS)] * 9


def make_spec() -> ModelSpec:
    sizes = dict(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2)
    if not INTERPRETED:
        sizes = dict(
            hidden_size=1024, intermediate_size=2816, num_heads=16, num_kv_heads=4, head_dim=64, num_layers=4
        )
    return ModelSpec(
        family="llama",
        vocab_size=100 if INTERPRETED else 500,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, rotary_dim=sizes["head_dim"]),
        **sizes,
    )


def make_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(device, dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(spec.hidden_size)).to(device, dtype)

    layers = [
        LayerWeights(
            input_norm=norm(),
            qkv=matrix(spec.qkv_size, spec.hidden_size),
            output=matrix(spec.hidden_size, spec.q_size),
            post_attention_norm=norm(),
            gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            down=matrix(spec.hidden_size, spec.intermediate_size),
            qkv_bias=torch.randn(spec.qkv_size).to(device, dtype),
        )
        for _ in range(spec.num_layers)
    ]
    table = matrix(spec.vocab_size, spec.hidden_size)
    return ModelWeights(table, layers, norm(), table)


class Setup:
    """Sequences of CONTEXTS tokens with random keys and values, the newest token not yet computed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, use_pdl: bool) -> None:
        self.spec = make_spec()
        self.weights = make_weights(self.spec, dtype, device)
        width = -(-(max(CONTEXTS) + 10) // PAGE_SIZE)
        pages = torch.randperm(len(CONTEXTS) * width) + 1
        self.cache = KVCache.allocate(
            self.spec, num_pages=len(pages) + 1, page_size=PAGE_SIZE, dtype=dtype, device=device
        )
        self.cache.k.copy_(torch.randn(self.cache.k.shape))
        self.cache.v.copy_(torch.randn(self.cache.v.shape))
        count = len(CONTEXTS)
        self.state = SlotState(
            page_table=pages.view(count, width).to(device),
            computed_len=torch.tensor(CONTEXTS, device=device) - 1,
            last_token=torch.randint(0, self.spec.vocab_size, (count,)).to(device),
            stream=torch.arange(count, device=device) * 1000003,
            sample_position=torch.zeros(count, dtype=torch.int64, device=device),
        )
        self.cos_sin = rope_table(self.spec.rope, max_len=256).to(device)
        self.chain = DecodeChain(self.spec, self.weights, self.cos_sin, self.cache, use_pdl=use_pdl)

    def expected_logits(self, slots: torch.Tensor) -> torch.Tensor:
        """FP64, plain torch, straight from the definition; does not write to the pages."""
        spec, state = self.spec, self.state
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        rows = []
        for slot in slots.tolist():
            position = int(state.computed_len[slot])
            angles = self.cos_sin[position].double()
            cos, sin = angles.chunk(2)
            where = torch.arange(position, device=slots.device)
            pages = state.page_table[slot, where // PAGE_SIZE]

            def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return x * torch.rsqrt(x.square().mean() + spec.rms_norm_eps) * weight.double()

            def turn(x: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
                first, second = x.chunk(2, -1)
                return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

            x = self.weights.embedding[int(state.last_token[slot])].double()
            for layer, (k_cache, v_cache) in zip(self.weights.layers, self.cache.layers, strict=True):
                qkv = layer.qkv.double() @ norm(x, layer.input_norm) + layer.qkv_bias.double()
                q, k, v = qkv.view(-1, dim).split([heads, kv_heads, kv_heads])
                keys = torch.cat((k_cache[pages, :, where % PAGE_SIZE].double(), turn(k)[None]))
                values = torch.cat((v_cache[pages, :, where % PAGE_SIZE].double(), v[None]))
                keys = keys.repeat_interleave(heads // kv_heads, 1)
                values = values.repeat_interleave(heads // kv_heads, 1)
                scores = torch.einsum("hd,lhd->hl", turn(q), keys) * dim**-0.5
                attended = torch.einsum("hl,lhd->hd", scores.softmax(-1), values).reshape(-1)
                x = x + layer.output.double() @ attended
                gate, up = (layer.gate_up.double() @ norm(x, layer.post_attention_norm)).chunk(2)
                x = x + layer.down.double() @ (gate * torch.sigmoid(gate) * up)
            rows.append(self.weights.lm_head.double() @ norm(x, self.weights.final_norm))
        return torch.stack(rows)


def pdl_options() -> list[bool]:
    has_gpu = torch.cuda.is_available() and not INTERPRETED
    return [False, True] if has_gpu and has_pdl(torch.device("cuda")) else [False]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("use_pdl", pdl_options())
@pytest.mark.parametrize("slots", [[1], [2, 1, 0, 3]] if INTERPRETED else [[1], [3, 0], [2, 1, 0, 3]])
def test_fp32_steps_follow_the_definition(device: torch.device, slots: list[int], use_pdl: bool) -> None:
    setup = Setup(torch.float32, device, use_pdl)
    chosen = torch.tensor(slots, device=device)
    greedy = torch.zeros(len(CONTEXTS), device=device)
    for step in range(2):
        expected = setup.expected_logits(chosen)
        assert relative_error(setup.chain.logits(setup.state, chosen), expected) < TOLERANCE
        tokens = setup.chain.step(setup.state, chosen, greedy)
        assert torch.equal(tokens, expected.argmax(-1))
        assert torch.equal(setup.state.last_token[chosen], tokens)
        lens = torch.tensor(CONTEXTS, device=device)[chosen] + step
        assert torch.equal(setup.state.computed_len[chosen], lens)


@pytest.mark.parametrize("use_pdl", pdl_options())
def test_bf16_is_as_close_to_the_definition_as_its_rounding_allows(
    device: torch.device, use_pdl: bool
) -> None:
    setup = Setup(torch.bfloat16, device, use_pdl)
    for slots in ([1], [2, 1, 0, 3], [2, 1, 0, 3] + PADDING):
        chosen = torch.tensor(slots, device=device)
        logits = setup.chain.logits(setup.state, chosen)[: len(CONTEXTS)]
        chosen = chosen[: len(CONTEXTS)]
        # Some ten roundings a layer, each 2**-9 of its operand, add up as a random walk.
        limit = (10 * setup.spec.num_layers) ** 0.5 * (2**-7 if INTERPRETED else 2**-8)
        assert relative_error(logits, setup.expected_logits(chosen)) < limit


@pytest.mark.skipif(INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [65, 256])
def test_products_for_hopper_are_as_close_to_the_definition(
    device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_hopper(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs a Hopper GPU")
    taken: list[tuple[int, ...]] = []
    multiply = decode_launch._multiply

    def record(x: torch.Tensor, weight: torch.Tensor, gated: bool, pdl: bool) -> torch.Tensor | None:
        result = multiply(x, weight, gated, pdl)
        assert result is not None, "the kernel does not compile"
        taken.append(tuple(weight.shape))
        return result

    monkeypatch.setattr(decode_launch, "_multiply", record)
    setup = Setup(torch.bfloat16, device, has_pdl(torch.device("cuda")))
    slots = torch.arange(rows, device=device).clamp_(max=len(CONTEXTS))
    logits = setup.chain.logits(setup.state, slots)[: len(CONTEXTS)]
    limit = (10 * setup.spec.num_layers) ** 0.5 * 2**-8
    assert relative_error(logits, setup.expected_logits(slots[: len(CONTEXTS)])) < limit
    layer = setup.weights.layers[0]
    matrices = layer.qkv, layer.output, layer.gate_up, layer.down
    assert taken == [tuple(matrix.shape) for matrix in matrices] * setup.spec.num_layers


def test_padding_rows_change_no_slot_and_no_result(device: torch.device) -> None:
    setup = Setup(torch.float32, device, use_pdl=False)
    greedy = torch.zeros(len(CONTEXTS), device=device)
    spare = len(CONTEXTS)
    expected = setup.expected_logits(torch.tensor([1, 3], device=device))
    before = setup.state.computed_len.clone()
    slots = torch.tensor([1, 3, spare, spare], device=device)
    assert relative_error(setup.chain.logits(setup.state, slots)[:2], expected) < TOLERANCE
    assert torch.equal(setup.chain.step(setup.state, slots, greedy)[:2], expected.argmax(-1))
    assert (setup.state.computed_len - before).tolist() == [0, 1, 0, 1]


def test_more_rows_than_the_small_kernels_take(device: torch.device) -> None:
    setup = Setup(torch.float32, device, use_pdl=False)
    slots = torch.tensor([1, 3] + PADDING, device=device)
    greedy = torch.zeros(len(CONTEXTS), device=device)
    for _ in range(2):
        expected = setup.expected_logits(slots[:2])
        assert relative_error(setup.chain.logits(setup.state, slots)[:2], expected) < TOLERANCE
        setup.chain.step(setup.state, slots, greedy)
        assert torch.equal(setup.state.last_token[slots[:2]], expected.argmax(-1))


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
@pytest.mark.parametrize("use_pdl", pdl_options())
@pytest.mark.parametrize("rows", [1, 4, 64, 256])
@torch.inference_mode()
def test_a_replayed_graph_repeats_bit_for_bit(device: torch.device, rows: int, use_pdl: bool) -> None:
    setup = Setup(torch.bfloat16, device, use_pdl)
    slots = torch.arange(rows, device=device).clamp_(max=len(CONTEXTS))
    temperature = torch.full((len(CONTEXTS),), 0.8, device=device)
    start = [column.clone() for column in (setup.state.computed_len, setup.state.last_token)]

    def rewind() -> None:
        setup.state.computed_len.copy_(start[0])
        setup.state.last_token.copy_(start[1])
        setup.state.sample_position.zero_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        logits = setup.chain.logits(setup.state, slots)
        return logits, setup.chain.step(setup.state, slots, temperature)

    expected = step()
    rewind()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, tokens = step()
    for _ in range(100):
        rewind()
        logits.fill_(float("nan"))
        tokens.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(logits, expected[0]) and torch.equal(tokens, expected[1])
        real = slots < len(CONTEXTS)
        assert torch.equal(setup.state.last_token[slots[real]], tokens[real])
