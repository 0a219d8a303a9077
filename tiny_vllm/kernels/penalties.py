"""Repetition, frequency and presence penalties, on the tokens a sequence has seen and on no others.

    logit = logit / repetition if logit > 0 else logit * repetition     prompt and generated tokens
    logit = logit - frequency * count - presence                        generated tokens, count = occurrences

Each row lists its distinct tokens, so the work is proportional to the sequence and not to the vocabulary:
16 rows with 1,000 tokens each touch 16,000 logits where count tables of [slots, vocabulary] touch 786,432
(and take 134 MB for 256 slots of 128k tokens).
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    strengths: torch.Tensor,
) -> None:
    """Penalise P rows of logits [N, V] FP32 in place.

    rows: [P] I64, distinct. token_ids: [P, L] I64; an id may repeat within a row if its count and in_prompt
    repeat too. counts: [P, L] I32, times generated. in_prompt: [P, L] bool. strengths: [P, 3] FP32 of
    repetition (1 is off), frequency and presence (0 is off). Entries neither generated nor in the prompt
    change nothing.
    """
    repetition, frequency, presence = strengths[:, :, None].unbind(1)
    where = (rows[:, None], token_ids)
    values = logits[where]
    generated = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(generated | in_prompt, repeated, values)
    logits[where] = values - frequency * counts - presence * generated
