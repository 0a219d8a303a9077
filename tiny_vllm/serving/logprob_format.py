"""Log-probabilities on their way to JSON, as the completion and the chat format both need them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiny_vllm.outputs import Logprob, RequestOutput

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (OpenAI's choice)."""

Entries = Sequence[tuple[int, Mapping[int, Logprob] | None]]
"""Token ids with the log-probabilities at their positions."""


def is_asked_for(entry: Logprob, number: int) -> bool:
    """Whether an entry is among the `number` most likely ones; -1 means all of them."""
    return number < 0 or entry.rank <= number


def paired(token_ids: Sequence[int], logprobs: Iterable[Mapping[int, Logprob]] | None) -> Entries:
    return [] if logprobs is None else list(zip(token_ids, logprobs, strict=True))


def shown_prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's format: for each prompt token but the first, token id to its entry."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in output.prompt_logprobs
    ]


def token_name(token_id: int, text: str | None, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id or text is None else text


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
