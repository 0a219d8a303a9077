"""The LM head is the largest matrix: it computes the rows that a token is drawn from, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.models.decoder import Decoder


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_of_a_prompt_only_the_last_token_goes_through_the_lm_head(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    logits = Decoder.logits

    def spy(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return logits(self, hidden)

    save_tiny_llama(tmp_path, make_tiny_llama())
    with LLM(
        str(tmp_path), num_pages=100, max_num_seqs=3, max_num_batched_tokens=16, prefill_policy=policy,
        fused_cpu_decode=False,
    ) as llm:  # fmt: skip
        monkeypatch.setattr(Decoder, "logits", spy)
        prompts = [[5] * 40, [6] * 17, [7] * 3, [8]]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert sum(num_rows) == 4 * 6 and max(num_rows) <= 3
