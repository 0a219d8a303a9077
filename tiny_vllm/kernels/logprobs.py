"""Log-probabilities of chosen and most likely tokens: log-softmax in FP32 without storing it.

logprob(token) = logit(token) - logsumexp(logits)       rank(token) = 1 + number of larger logits
"""

from __future__ import annotations

import torch

from tiny_vllm.kernels.top_tokens import top_tokens

# Spare candidates make it unlikely that equal logits straddle the border and force a full sort.
NUM_SPARE = 16


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The given token of each row, then the num_top most likely ones (larger logit, then lower id, first).

    logits: [N, V] FP32. token_ids: [N] I64. 0 <= num_top <= V. Returns ids I64, logprobs FP32 and ranks
    I64, each [N, 1 + num_top].
    """
    chosen = logits.gather(-1, token_ids[:, None])
    rank = (logits > chosen).sum(-1, keepdim=True) + 1
    values, top_ids = _most_likely(logits, num_top)
    # Equal values share the rank of the first of them.
    position = torch.arange(1, num_top + 1, device=logits.device).expand(len(logits), -1)
    is_tie = torch.zeros_like(top_ids, dtype=torch.bool)
    is_tie[:, 1:] = values[:, 1:] == values[:, :-1]
    top_ranks = position.masked_fill(is_tie, 0).cummax(-1).values
    logprobs = torch.cat((chosen, values), -1) - logits.logsumexp(-1, keepdim=True)
    return torch.cat((token_ids[:, None], top_ids), -1), logprobs, torch.cat((rank, top_ranks), -1)


def _most_likely(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size = logits.shape[-1]
    values, token_ids, num_certain = top_tokens(logits, min(num_top + NUM_SPARE, vocab_size))
    if (num_certain < num_top).any():
        values, token_ids, _ = top_tokens(logits, vocab_size)
    return values[:, :num_top], token_ids[:, :num_top]
