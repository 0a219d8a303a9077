"""Hugging Face transformers as the oracle: one sequence, no batch, FP32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def greedy_tokens(model: Any, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """`count` greedy tokens after the prompt, or fewer if one of `eos` comes first (it is included).

    Computes everything anew for each token, so that no cache is trusted.
    """
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        tokens.append(int(all_logits(model, [*prompt, *tokens])[-1].argmax()))
    return tokens


@torch.inference_mode()
def all_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab] FP32 logits, in one pass without a cache."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
