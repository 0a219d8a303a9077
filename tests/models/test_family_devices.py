"""Every family on a GPU against the same weights on the CPU, beyond every window. Needs no transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_families import CASES, COMMON
from tests.models.reference import PagedDecoder
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import ModelWeights
from tiny_vllm.weights.checkpoint import Checkpoint
from tiny_vllm.weights.load import load_weights

PROMPT_LEN = 100
NUM_DECODES = 12
# As in tests/weights/test_family_logits.py, if products are not in TF32.
TOLERANCE_FP32 = 1e-4


def spec_of_case(case: str) -> ModelSpec:
    prefix, options = CASES[case]
    name = f"{prefix.removesuffix('Text')}ForCausalLM"
    return spec_from_hf_config({**COMMON, **options, "architectures": [name]})


def make_weights(spec: ModelSpec, device: str = "cpu", dtype: torch.dtype = torch.float32) -> ModelWeights:
    checkpoint = Checkpoint(
        name="tiny",
        spec=spec,
        eos_token_ids=(),
        bos_token_id=None,
        source=None,
        tensor_names={},
        tokenizer=None,
    )
    return load_weights(checkpoint, dtype=dtype, device=device, seed=1)


def logits_on(spec: ModelSpec, device: str, dtype: torch.dtype) -> Tensor:
    weights = make_weights(spec, device, dtype)
    paged = PagedDecoder(spec, weights, page_size=16, dtype=dtype, device=device)
    tokens = torch.randint(spec.vocab_size, (PROMPT_LEN,), generator=torch.Generator().manual_seed(0))
    sequence = paged.add(tokens.tolist(), max_len=PROMPT_LEN)
    logits = paged.step([], [(sequence, 50)])
    logits += paged.step([], [(sequence, PROMPT_LEN - NUM_DECODES - 50)])
    for _ in range(NUM_DECODES):
        logits += paged.step([sequence], [])
    return torch.cat(logits).cpu()


def error(actual: Tensor, expected: Tensor) -> float:
    """Of the median token, because experts that nearly tie may change places at a few of them."""
    return float((actual - expected).abs().mean(-1).median())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_computes_what_the_cpu_computes(case: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: without one both sides are the same")
    spec = spec_of_case(case)
    exact = logits_on(spec, "cpu", torch.float32)
    assert error(logits_on(spec, "cuda", torch.float32), exact) < TOLERANCE_FP32
    # Both round to BF16 at the same places, so neither is worse than the other but for chance.
    rounded, theirs = (logits_on(spec, device, torch.bfloat16) for device in ("cuda", "cpu"))
    assert error(rounded, exact) < 1.2 * error(theirs, exact)


@pytest.mark.parametrize("case", CASES)
def test_the_cases_need_no_transformers_to_become_specs(case: str) -> None:
    logits = logits_on(spec_of_case(case), "cpu", torch.float32)
    assert logits.shape == (PROMPT_LEN, COMMON["vocab_size"]) and logits.isfinite().all()


@pytest.mark.parametrize("path", ["paged_decode_attention", "prefill_attention"])
def test_contexts_within_the_window_take_the_plain_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is several times as fast as the reference, which windows need beyond it."""
    spec = spec_of_case("mistral")
    assert spec.sliding_window == 16

    def refuse(*args: object, **options: object) -> Tensor:
        raise AssertionError("the reference")

    paged = PagedDecoder(spec, make_weights(spec), page_size=16)
    sequence = paged.add(list(range(20)), max_len=20)
    monkeypatch.setattr(f"tiny_vllm.kernels.{path}.{path}_ref", refuse)
    paged.step([], [(sequence, 15)])
    paged.step([sequence], [])
    with pytest.raises(AssertionError, match="the reference"):
        paged.step([sequence], []) if path == "paged_decode_attention" else paged.step([], [(sequence, 2)])
