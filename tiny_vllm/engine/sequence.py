"""One generation in progress.

A sequence has a known length (prompt plus generated tokens) and a computed length (leading tokens whose keys
and values exist, or will once the steps under way have run). A step lets the computed length catch up by a
chunk. Prefill, chunked prefill, decode, prefix hits and recomputation after preemption are all this one rule;
the four states are derived from it.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from tiny_vllm.types import FinishReason, Request, TokenLogprobs


class SequenceState(StrEnum):
    """WAITING -> PREFILL -> DECODE -> FINISHED; preemption leads back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """Choice `index` of a request. `sequence_id` is unique and grows with arrival.

    end_len: known length at which the sequence ends with reason `length`.
    queue_key: smaller runs first; see `waiting.queue_key`.
    token_ids: the known tokens, from `take_prompt` on.
    seed: 64-bit seed of this choice's random stream.
    page_hashes: chained hashes of the leading full pages of known tokens, extended when needed.
    num_published: leading pages already findable by hash.
    num_unseen: leading pages that no query will see again; the null page stands for them in `page_ids`.
    pooled_sum: of the hidden states that are to be pooled, so far; FP32 [hidden].
    """

    __slots__ = (
        "computed_len",
        "end_len",
        "ending_token_ids",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_published",
        "num_unseen",
        "page_hashes",
        "page_ids",
        "pooled_sum",
        "prompt_len",
        "prompt_logprobs",
        "queue_key",
        "reported_prompt",
        "request",
        "request_id",
        "root_hash",
        "scheduled_time",
        "seed",
        "sequence_id",
        "slot",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        index: int,
        *,
        seed: int,
        end_len: int,
        ending_token_ids: frozenset[int],
        queue_key: tuple[float, int],
        root_hash: bytes,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.seed = seed
        self.end_len = end_len
        self.ending_token_ids = ending_token_ids
        self.queue_key = queue_key
        self.root_hash = root_hash
        self.token_ids: list[int] = []
        self.prompt_len = len(request.prompt_token_ids)
        self.computed_len = 0
        self.page_ids: list[int] = []
        self.page_hashes: list[bytes] = []
        self.num_published = 0
        self.num_unseen = 0
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.scheduled_time: float | None = None
        self.num_cached_tokens = 0
        self.reported_prompt = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled_sum: np.ndarray | None = None

    def take_prompt(self) -> None:
        """Start `token_ids` with the prompt, if that has not been done.

        Not before the sequence may get a slot: copies of all prompts would delay the first step of a batch.
        """
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)

    @property
    def known_len(self) -> int:
        return len(self.token_ids) or self.prompt_len

    @property
    def held_pages(self) -> list[int]:
        return self.page_ids[self.num_unseen :]

    @property
    def num_generated(self) -> int:
        return self.known_len - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are asked for and not yet complete."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.prompt_len - 1
        )

    @property
    def computes_all_positions(self) -> bool:
        """Whether something is asked for that needs every position of the prompt, so cached pages are of no
        use."""
        return self.wants_prompt_logprobs or self.request.pooling == "mean"

    @property
    def state(self) -> SequenceState:
        if self.finish_reason is not None:
            return SequenceState.FINISHED
        if self.slot is None:
            return SequenceState.WAITING
        # A decode under way may have computed more than is known here.
        if self.computed_len >= self.prompt_len and self.computed_len >= self.known_len - 1:
            return SequenceState.DECODE
        return SequenceState.PREFILL

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}[{self.index}] {self.state}, "
            f"{self.computed_len}/{self.known_len} computed, pages {self.page_ids})"
        )
