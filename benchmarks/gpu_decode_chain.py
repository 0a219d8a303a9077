"""How long does a whole decode step take as one CUDA graph, and is it right?

    PYTHONPATH=. python3 benchmarks/gpu_decode_chain.py --output results.json [--model 8b] [--rows 1,8]

Random weights in a Llama's shape, pages in random order. Before anything is timed, the step's logits are
compared with FP32 torch, and BF16 torch's own error is printed beside the chain's. `share` counts the bytes
of the weights and of the keys and values, against the rate of torch.sum.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Report, measure_read_rate, time_replays
from tiny_vllm.engine.decode_graphs import MIN_CONTEXT_BUCKET
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import has_pdl
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights

DEVICE = torch.device("cuda", 0)
PAGE_SIZE = 16
REPLAYS = 50
SIZES = {
    "1b": dict(
        hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64, num_layers=16,
        tie_word_embeddings=True,
    ),
    "8b": dict(
        hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, num_layers=32,
    ),
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128, num_layers=28,
        tie_word_embeddings=True, qk_norm="head", vocab_size=151936,
    ),
}  # fmt: skip


def make_spec(model: str) -> ModelSpec:
    sizes = SIZES[model]
    return ModelSpec(
        family="llama",
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0, rotary_dim=sizes["head_dim"]),
        **{"vocab_size": 128256, **sizes},
    )


def make_weights(spec: ModelSpec) -> ModelWeights:
    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) * columns**-0.5

    def norm(size: int = spec.hidden_size) -> Tensor:
        return (1 + 0.1 * torch.randn(size, device=DEVICE)).bfloat16()

    has_head_norms = spec.qk_norm == "head"

    layers = [
        LayerWeights(
            input_norm=norm(),
            qkv=matrix(spec.qkv_size, spec.hidden_size),
            output=matrix(spec.hidden_size, spec.q_size),
            q_norm=norm(spec.head_dim) if has_head_norms else None,
            k_norm=norm(spec.head_dim) if has_head_norms else None,
            post_attention_norm=norm(),
            gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            down=matrix(spec.hidden_size, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    ]
    table = matrix(spec.vocab_size, spec.hidden_size)
    head = table if spec.tie_word_embeddings else matrix(spec.vocab_size, spec.hidden_size)
    return ModelWeights(table, layers, norm(), head)


def count_weight_bytes(weights: ModelWeights) -> int:
    """Bytes of the matrices that a step reads."""
    return weights.lm_head.nbytes + sum(
        matrix.nbytes
        for layer in weights.layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )


class Workload:
    """`rows` sequences whose step has contexts of `context` tokens, the newest included."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, cos_sin: Tensor, rows: int, context: int, use_pdl: bool
    ) -> None:
        self.spec, self.weights, self.cos_sin, self.context = spec, weights, cos_sin, context
        width = -(-(context + REPLAYS + 1) // PAGE_SIZE)
        self.cache = KVCache.allocate(
            spec, num_pages=rows * width + 1, page_size=PAGE_SIZE, dtype=torch.bfloat16, device=DEVICE
        )
        self.cache.k.normal_()
        self.cache.v.normal_()
        self.state = SlotState(
            page_table=(torch.randperm(rows * width, device=DEVICE) + 1).view(rows, width),
            computed_len=torch.full((rows,), context - 1, device=DEVICE),
            last_token=torch.randint(0, spec.vocab_size, (rows,), device=DEVICE),
            stream=torch.arange(rows, device=DEVICE) * 1000003,
            sample_position=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        )
        self.first_tokens = self.state.last_token.clone()
        self.slots = torch.arange(rows, device=DEVICE)
        self.temperature = torch.zeros(rows, device=DEVICE)
        self.chain = DecodeChain(spec, weights, cos_sin, self.cache, use_pdl=use_pdl)

    def rewind(self) -> None:
        self.state.computed_len.fill_(self.context - 1)
        self.state.last_token.copy_(self.first_tokens)
        self.state.sample_position.zero_()

    @property
    def longest(self) -> int:
        """As the engine's graphs allow for."""
        return max(MIN_CONTEXT_BUCKET, 1 << (self.context + REPLAYS - 1).bit_length())

    def step(self) -> Tensor:
        return self.chain.step(self.state, self.slots, self.temperature, max_context_len=self.longest)

    def logits(self) -> Tensor:
        return self.chain.logits(self.state, self.slots, max_context_len=self.longest)

    @torch.inference_mode()
    def reference(self, dtype: torch.dtype) -> Tensor:
        """Logits by plain torch in the given type; reads older keys and values, writes none."""
        spec, position = self.spec, self.context - 1
        cos, sin = self.cos_sin[position].chunk(2)
        where = torch.arange(position, device=DEVICE)
        pages, offsets = self.state.page_table[:, where // PAGE_SIZE], where % PAGE_SIZE

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.rms_norm_eps)
            return (wide * weight.float()).to(dtype)

        def turn(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(dtype)

        x = self.weights.embedding[self.first_tokens].to(dtype)
        for layer, (k_cache, v_cache) in zip(self.weights.layers, self.cache.layers, strict=True):
            qkv = F.linear(norm(x, layer.input_norm), layer.qkv.to(dtype)).unflatten(-1, (-1, spec.head_dim))
            q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
            attended = []
            for row in range(len(x)):
                keys = torch.cat((k_cache[pages[row], :, offsets].to(dtype), turn(k[row])[None]))
                values = torch.cat((v_cache[pages[row], :, offsets].to(dtype), v[row][None]))
                queries = turn(q[row]).view(spec.num_kv_heads, -1, spec.head_dim)
                scores = torch.einsum("hgd,lhd->hgl", queries, keys).float() * spec.head_dim**-0.5
                mixed = torch.einsum("hgl,lhd->hgd", scores.softmax(-1).to(dtype), values)
                attended.append(mixed.reshape(-1))
            x = x + F.linear(torch.stack(attended), layer.output.to(dtype))
            gate, up = F.linear(norm(x, layer.post_attention_norm), layer.gate_up.to(dtype)).chunk(2, -1)
            x = x + F.linear((F.silu(gate.float()) * up.float()).to(dtype), layer.down.to(dtype))
        return F.linear(norm(x, self.weights.final_norm), self.weights.lm_head.to(dtype)).float()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@torch.inference_mode()
def bench(
    report: Report, spec: ModelSpec, weights: ModelWeights, cos_sin: Tensor, read_rate: float, model: str,
    rows: int, context: int, use_pdl: bool,
) -> None:  # fmt: skip
    work = Workload(spec, weights, cos_sin, rows, context, use_pdl)
    expected = work.reference(torch.float32)
    torch_error = relative_error(work.reference(torch.bfloat16), expected)
    torch.cuda.empty_cache()
    error = relative_error(first := work.logits().clone(), expected)
    work.step()
    work.rewind()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = work.step()
    drawn, repeats = [], True
    for _ in range(20):
        work.rewind()
        tokens.fill_(-7)
        repeats &= torch.equal(first, work.logits())
        graph.replay()
        drawn.append(tokens.clone())
    repeats &= all(torch.equal(drawn[0], other) for other in drawn)
    seconds = time_replays(graph, rounds=9, replays=REPLAYS, before_round=work.rewind)
    kv_bytes = 2 * spec.kv_values_per_token * rows * context
    weight_bytes = count_weight_bytes(weights)
    report.add(
        model=model, rows=rows, context=context, pdl=use_pdl, us=seconds * 1e6, error=error,
        torch_bf16_error=torch_error, repeats=repeats,
        draws_argmax=float((drawn[0] == first.argmax(-1)).float().mean()),
        greedy_equal=float((drawn[0] == expected.argmax(-1)).float().mean()),
        weights_tb_per_s=weight_bytes / seconds / 1e12,
        share=(weight_bytes + kv_bytes) / seconds / read_rate,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", choices=SIZES, default="1b")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--contexts", default="129,640,4096")
    parser.add_argument("--only-pdl", action="store_true", help="not without programmatic dependent launch")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.output)
    rates = measure_read_rate()
    report.add(read_gb_per_s=rates["sum"] / 1e9, copy_gb_per_s=rates["copy"] / 1e9)
    spec = make_spec(arguments.model)
    weights = make_weights(spec)
    cos_sin = rope_table(spec.rope, max_len=8192).to(DEVICE)
    report.add(
        weight_bytes=count_weight_bytes(weights), floor_us=count_weight_bytes(weights) / rates["sum"] * 1e6
    )
    launches = (False, True) if has_pdl(DEVICE) else (False,)
    if arguments.only_pdl:
        launches = launches[-1:]
    for rows in map(int, arguments.rows.split(",")):
        for context in map(int, arguments.contexts.split(",")):
            for use_pdl in launches:
                run = partial(
                    bench,
                    report,
                    spec,
                    weights,
                    cos_sin,
                    rates["sum"],
                    arguments.model,
                    rows,
                    context,
                    use_pdl,
                )
                report.section(f"rows {rows} context {context} pdl {use_pdl}", run)
    print("failed sections:", report.failures or "none")


if __name__ == "__main__":
    main()
