"""The engine with every kernel in its place: prompts, decodes through the chain, and every way to sample."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_vllm import LLM, RequestOutput, SamplingParams
from tiny_vllm.engine.build import plan_engine
from tiny_vllm.engine.decode_graphs import DecodeGraphs
from tiny_vllm.engine.runner import Runner
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import INTERPRETED
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.weights.load import load_weights

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARAMS = (
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=5, temperature=0.8),
    SamplingParams(seed=2, max_tokens=6, top_k=20, top_p=0.8),
    SamplingParams(seed=3, max_tokens=4, repetition_penalty=1.3, min_p=0.02, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=4, logit_bias={7: 3.0, 9: -100.0}, min_tokens=2, logprobs=1),
    SamplingParams(temperature=0, max_tokens=9, stop_token_ids=list(range(3, 150))),
)


def results(outputs: list[RequestOutput]) -> list[tuple[list[int], str | None]]:
    return [(choice.token_ids, choice.finish_reason) for output in outputs for choice in output.outputs]


def take_the_chain(llm: LLM) -> DecodeGraphs:
    """Have a CPU engine, whose kernels are interpreted, decode as one on a GPU does."""
    checkpoint = plan_engine(llm.config).checkpoint
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    runner = llm._live_engine()._executor
    assert isinstance(runner, Runner)
    table, sampler = runner._table, runner._sampler
    state = SlotState(
        table.page_table, table.computed_len, table.last_token, sampler.stream, sampler.position
    )
    chain = DecodeChain(llm.spec, weights, runner._decoder.cos_sin, runner._kv_cache)
    graphs = DecodeGraphs(chain, state, sampler.temperature, capture=False)
    runner._steppers = (graphs,)
    return graphs


def test_planning_ahead_with_kernels_gives_the_tokens_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    rng = random.Random(1)
    params = [*PARAMS, *PARAMS[1:4]]
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randrange(1, 20))] for _ in params]
    options: dict[str, Any] = dict(
        load_format="dummy",
        dtype="float32",
        num_pages=40,
        page_size=8,
        max_num_seqs=4,
        fused_cpu_decode=False,
    )
    with LLM(str(path), device="cpu" if INTERPRETED else "cuda", async_scheduling=True, **options) as llm:
        graphs = take_the_chain(llm) if INTERPRETED else None
        actual = results(llm.generate(prompts, params, use_tqdm=False))
        assert graphs is None or graphs._padded.keys() == {1, 2, 4}
    with monkeypatch.context() as patch:
        _without_kernels(patch)
        with LLM(str(path), device="cpu", **options) as llm:
            expected = results(llm.generate(prompts, params, use_tqdm=False))
    assert actual == expected


def _without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Have every op take its torch form on a CPU, also where kernels are interpreted."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tiny_vllm.") and hasattr(module, "runs_triton"):
            patch.setattr(module, "runs_triton", lambda tensor: False)
