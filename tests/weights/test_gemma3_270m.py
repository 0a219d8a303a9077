"""A real model of another family, Gemma 3 270M in Q4_K_M, against transformers and against SentencePiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.gemma import gemma_path
from tests.helpers.oracle import all_logits
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[1] / "text" / "data" / "gemma3.json"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    # Over 1100 tokens: more than two windows.
    " ".join(f"Item {number}: a page of the pool holds {number} tokens." for number in range(70)),
)
NUM_TOKENS = 32
# FP32 sums of up to 2048 terms in another order, 7 products deep in each of 18 layers: every one of the 126
# may change what follows by a relative 2^-24 x sqrt(2048). Log-probabilities are of logits up to 45.
TOLERANCE = 126 * 2**-24 * 2048**0.5 * 45


@pytest.fixture(scope="module")
def path() -> str:
    return str(gemma_path())


@pytest.fixture(scope="module")
def oracle(path: str) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = Gemma3TextConfig(**load_gguf_checkpoint(path)["config"], attn_implementation="eager")
    with torch.device("meta"):
        empty = Gemma3ForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = Gemma3ForCausalLM(config).eval()
    model.load_state_dict({name: torch.as_tensor(tensor) for name, tensor in tensors.items()})
    return model


def test_greedy_text_equals_transformers_beyond_the_window(path: str, oracle: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    options = dict(dtype="float32", max_model_len=2048, num_pages=256, max_num_batched_tokens=300)
    with LLM(path, **options) as llm:
        outputs = llm.generate(list(PROMPTS), params)
    for output in outputs:
        (choice,) = output.outputs
        assert output.prompt_token_ids is not None and choice.logprobs is not None
        tokens = [*output.prompt_token_ids, *choice.token_ids[:-1]]
        logits = all_logits(oracle, tokens)[len(output.prompt_token_ids) - 1 :]
        assert choice.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1)
        actual = [step[token].logprob for step, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        torch.testing.assert_close(torch.tensor(actual), expected, rtol=0, atol=TOLERANCE)
    assert len(outputs[-1].prompt_token_ids or ()) > 1024


def test_texts_have_the_token_ids_of_sentencepiece(path: str) -> None:
    """Recorded with the SentencePiece library from the same pieces and scores, control tokens apart."""
    tokenizer = open_checkpoint(path).load_tokenizer()
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(recorded["texts"]) >= 200
    for text, ids in zip(recorded["texts"], recorded["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text)[0] == tokenizer.bos_token_id


def test_control_tokens_in_plain_text_have_the_ids_of_sentencepiece(path: str) -> None:
    """To the SentencePiece library control tokens in text are text."""
    tokenizer = open_checkpoint(path).load_tokenizer()
    recorded = json.loads(RECORDED.with_name("written_control_tokens.json").read_text(encoding="utf-8"))
    for text, ids in zip(recorded["gemma3"]["texts"], recorded["gemma3"]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False) == ids, text
