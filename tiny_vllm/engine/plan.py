"""A step as plain data: what the scheduler decided, and what the device half answered.

A plan can be printed, tested, recorded, replayed and sent to other ranks. It holds no sequence objects and no
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiny_vllm.types import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot. Sent once, before its first chunk there.

    computed_len: tokens whose K/V the prefix cache already holds. generated_token_ids: those from before a
    preemption. ending_token_ids: tokens that end the sequence, sorted.
    """

    slot: int
    sequence_id: int
    request: Request
    seed: int
    computed_len: int
    generated_token_ids: tuple[int, ...]
    ending_token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageEdit:
    """Entry `index` of a slot's page table becomes `page_id`: the null page once no query sees that entry."""

    slot: int
    index: int
    page_id: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of one sequence to compute: positions start to start + len(token_ids) - 1.

    samples: whether the last position's logits give the next token.
    num_prompt_logprobs: entries per prompt token to report for this chunk, None if not asked for.
    target_token_ids: the known tokens after each position of the chunk that are prompt tokens (for prompt
        log-probabilities); shorter than the chunk by one where the prompt ends.
    num_pooled: how many of the chunk's last positions go into the prompt's pooled hidden state.
    """

    slot: int
    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    num_prompt_logprobs: int | None = None
    target_token_ids: tuple[int, ...] = ()
    num_pooled: int = 0

    @property
    def reads_inside(self) -> bool:
        """Whether hidden states of more than the last position are wanted."""
        return self.num_prompt_logprobs is not None or self.num_pooled > 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Edits apply in this order: released slots, admissions, page edits, then the computation.

    decode_slots, decode_sequence_ids: sequences that advance by their one last token, in order. The token may
    be one that only the device knows yet.
    """

    step: int
    released_slots: tuple[int, ...]
    admissions: tuple[Admission, ...]
    page_edits: tuple[PageEdit, ...]
    decode_slots: tuple[int, ...]
    decode_sequence_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not self.decode_slots and not self.chunks


@dataclass(slots=True)
class StepResult:
    """Tokens in the plan's order: one per decode slot, then one per chunk that samples.

    token_ids[i] is None where the model gave no usable logits. logprobs is None when nobody asked.
    prompt_logprobs: by position in `plan.chunks`, one entry per target token.
    pooled: likewise, the sum of the pooled positions' hidden states after the final norm, FP32 [hidden].
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def tells_of_prompts(self) -> bool:
        return bool(self.prompt_logprobs or self.pooled)
