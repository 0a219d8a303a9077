"""The rarely used controls of one sequence that forbid or favour single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiny_vllm.types import SamplingParams


class TokenConstraints:
    """allowed_token_ids, bad_words, min_tokens and logit_bias of one sequence, applied in that order.

    The allow-list always holds. Bad words, and then the ban on ending before min_tokens, give way for a
    step in which they would leave no token at all.
    A bad word of several tokens forbids its last token after the others have been generated; the prompt's
    end is not looked at.
    """

    def __init__(
        self,
        params: SamplingParams,
        output_token_ids: Sequence[int],
        ending_token_ids: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        def tensor(token_ids: Sequence[int]) -> torch.Tensor:
            return torch.tensor(sorted(set(token_ids)), dtype=torch.int64, device=device)

        self._output = list(output_token_ids)
        self._min_tokens = params.min_tokens
        self._endings = tensor([token for token in ending_token_ids if token < vocab_size])
        self._allowed = None if params.allowed_token_ids is None else tensor(params.allowed_token_ids)
        self._bad_words = [(list(word[:-1]), word[-1]) for word in bad_words if word[-1] < vocab_size]
        bias = params.logit_bias or {}
        self._biased = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._device = device

    @staticmethod
    def are_needed(params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> bool:
        """Whether a sequence uses any of them."""
        has_any = params.min_tokens or params.logit_bias or params.allowed_token_ids is not None or bad_words
        return bool(has_any)

    def apply(self, logits: torch.Tensor) -> None:
        """Change one row of logits [V] FP32 in place."""
        if not logits.amax().isfinite():
            return  # A broken row must stay recognisable: a mask could hide its NaN.
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(-torch.inf)
            logits[self._allowed] = kept
        banned = [last for start, last in self._bad_words if self._ends_with(start)]
        _forbid(logits, torch.tensor(banned, dtype=torch.int64, device=self._device))
        if len(self._output) < self._min_tokens:
            _forbid(logits, self._endings)
        logits[self._biased] += self._biases

    def record(self, token_id: int) -> None:
        self._output.append(token_id)

    def _ends_with(self, start: list[int]) -> bool:
        return not start or self._output[-len(start) :] == start


def _forbid(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Mask the tokens, unless that would leave none."""
    saved = logits[token_ids]
    logits[token_ids] = -torch.inf
    if logits.amax() == -torch.inf:
        logits[token_ids] = saved
