"""The rarely used controls of one sequence that forbid or favour single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiny_vllm.engine.transfers import Arriving, Upload
from tiny_vllm.types import MAX_BIAS, SamplingParams


class TokenConstraints:
    """allowed_token_ids, bad_words, min_tokens and logit_bias of one sequence, applied in that order.

    The allow-list always holds. Bad words, and then the ban on ending before min_tokens, give way for a
    step in which they would leave no token at all. A bias of 100 or -100, the ends of its range, decides
    whatever the size of the logits: only such tokens, or none of them. Both give way likewise.
    A bad word of several tokens forbids its last token after the others have been generated; the prompt's
    end is not looked at. Only such words need the tokens on the host: see `needs_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        output_token_ids: Sequence[int],
        ending_token_ids: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
        vocab_size: int,
        upload: Upload,
    ) -> None:
        """Can be applied once the upload has arrived."""

        def send(token_ids: Sequence[int]) -> Arriving | None:
            distinct = sorted({token for token in token_ids if 0 <= token < vocab_size})
            return upload.integers(distinct) if distinct else None

        self._num_drawn = len(output_token_ids)
        self._output = list(output_token_ids)
        self._min_tokens = params.min_tokens
        self._endings = send(ending_token_ids)
        self._allowed = None if params.allowed_token_ids is None else send(params.allowed_token_ids)
        self._banned = send([word[0] for word in bad_words if len(word) == 1])
        self._bad_words = [
            (list(word[:-1]), word[-1]) for word in bad_words if len(word) > 1 and word[-1] < vocab_size
        ]
        bias = params.logit_bias or {}
        self._wanted = send([token for token, value in bias.items() if value == MAX_BIAS])
        self._unwanted = send([token for token, value in bias.items() if value == -MAX_BIAS])
        self._biased = upload.integers(list(bias)) if bias else None
        self._biases = upload.reals(list(bias.values())) if bias else None

    @staticmethod
    def are_needed(params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> bool:
        """Whether a sequence uses any of them."""
        has_any = params.min_tokens or params.logit_bias or params.allowed_token_ids is not None or bad_words
        return bool(has_any)

    @property
    def needs_tokens(self) -> bool:
        """Whether every token drawn must be given to `record` before the next `apply`."""
        return bool(self._bad_words)

    def apply(self, logits: Tensor) -> None:
        """Change the logits of the next token, one row [V] FP32, in place, without waiting for the device."""
        # A broken row must stay recognisable: a mask could hide its NaN.
        is_sound = logits.amax().isfinite()
        if self._allowed is None:
            masked = logits.clone()
        else:
            allowed = self._allowed.tensor
            masked = torch.full_like(logits, -torch.inf)
            masked.index_copy_(0, allowed, logits.index_select(0, allowed))
        banned = None if self._banned is None else self._banned.tensor
        if self._bad_words:
            banned = self._with_completions(banned, logits.device)
        if banned is not None:
            _forbid(masked, banned)
        if self._num_drawn < self._min_tokens and self._endings is not None:
            _forbid(masked, self._endings.tensor)
        if self._wanted is not None:
            _keep_only(masked, self._wanted.tensor)
        if self._unwanted is not None:
            _forbid(masked, self._unwanted.tensor)
        if self._biased is not None and self._biases is not None:
            masked.index_add_(0, self._biased.tensor, self._biases.tensor)
        torch.where(is_sound, masked, logits, out=logits)
        self._num_drawn += 1

    def record(self, token_id: int) -> None:
        self._output.append(token_id)

    def _with_completions(self, banned: Tensor | None, device: torch.device) -> Tensor | None:
        """The tokens that are always banned, and those that would complete a bad word now."""
        last = [token for start, token in self._bad_words if self._output[-len(start) :] == start]
        if not last:
            return banned
        completing = torch.tensor(last, dtype=torch.int64, device=device)
        return completing if banned is None else torch.cat((banned, completing))


def _keep_only(logits: Tensor, token_ids: Tensor) -> None:
    """Mask all other tokens, unless these are masked themselves."""
    kept = logits.index_select(0, token_ids)
    logits.copy_(torch.where(kept.amax() == -torch.inf, logits, -torch.inf))
    logits.index_copy_(0, token_ids, kept)


def _forbid(logits: Tensor, token_ids: Tensor) -> None:
    """Mask the tokens, unless that would leave none."""
    saved = logits.index_select(0, token_ids)
    logits.index_fill_(0, token_ids, -torch.inf)
    logits.index_copy_(0, token_ids, torch.where(logits.amax() == -torch.inf, saved, -torch.inf))
