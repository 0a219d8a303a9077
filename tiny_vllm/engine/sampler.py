"""Turn logits into tokens for the slots of a batch, with each slot's own parameters and randomness.

Order: raw logits -> logprobs (reported from these) -> allowed_token_ids, bad_words, min_tokens, logit_bias ->
penalties -> temperature -> top_k -> top_p -> min_p -> draw. The common parameters are rows of device
tensors and cost the same however they are mixed; a rare one costs something only in the rows that use it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from tiny_vllm.engine.seen_tokens import SeenTokens
from tiny_vllm.engine.token_constraints import TokenConstraints
from tiny_vllm.kernels.logprobs import token_logprobs
from tiny_vllm.kernels.penalties import apply_penalties
from tiny_vllm.kernels.sampling import SamplingRows, sample
from tiny_vllm.kernels.sampling_noise import noise_keys, stream_of_seed
from tiny_vllm.types import SamplingParams, TokenLogprobs

# Beyond these, FP32 arithmetic would overflow or vanish, and the order of tokens is long decided.
MAX_TEMPERATURE = 1e20
MAX_REPETITION = 1e20
# Rows of prompt logits worked on at once: bounds the memory of a long prompt.
PROMPT_LOGPROBS_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """What the sampler must know of a sequence when it takes a slot.

    seed: any integer, taken modulo 2**64; choices of one request need different ones. output_token_ids:
    generated before a preemption. ending_token_ids: not drawn before min_tokens. bad_words_token_ids:
    non-empty sequences.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    ending_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry per row.

    invalid_rows: rows whose logits hold NaN or +inf, or nothing above -inf. Their token is meaningless: fail
    their requests and release their slots. Other rows are not affected.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    invalid_rows: tuple[int, ...] = ()


class Sampler:
    """Sampling state of all slots. A slot is assigned, sampled from step after step, and released.

    temperature [slots] FP32; stream, position [slots] I64: seeds and output positions of the random streams.
    A step that draws on the device reads them there and advances `position` itself.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=self._device)

        self.temperature = column(torch.float32)
        self._top_k = column(torch.int64)
        self._top_p = column(torch.float32)
        self._min_p = column(torch.float32)
        self.stream = column(torch.int64)
        self.position = column(torch.int64)
        self._penalties = torch.zeros(num_slots, 3, dtype=torch.float32, device=self._device)
        self._seen = SeenTokens(num_slots, self._device)
        self._penalised: set[int] = set()
        self._constraints: dict[int, TokenConstraints] = {}
        self._num_logprobs: dict[int, int] = {}
        self._special: set[int] = set()

    @torch.inference_mode()
    def assign(self, slot: int, sampling: SlotSampling) -> None:
        """Give a slot to a sequence. Ids in allowed_token_ids and logit_bias must be in the vocabulary."""
        self.release(slot)
        params = sampling.params
        self.temperature[slot] = 0.0 if params.is_greedy else min(params.temperature, MAX_TEMPERATURE)
        self._top_k[slot] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self.stream[slot] = stream_of_seed(sampling.seed)
        self.position[slot] = len(sampling.output_token_ids)
        if params.uses_penalties:
            repetition = min(max(params.repetition_penalty, 1 / MAX_REPETITION), MAX_REPETITION)
            self._penalties[slot] = torch.tensor(
                [repetition, params.frequency_penalty, params.presence_penalty]
            )
            self._seen.assign(slot, sampling.prompt_token_ids, sampling.output_token_ids)
            self._penalised.add(slot)
        if TokenConstraints.are_needed(params, sampling.bad_words_token_ids):
            self._constraints[slot] = TokenConstraints(
                params,
                sampling.output_token_ids,
                sampling.ending_token_ids,
                sampling.bad_words_token_ids,
                self._vocab_size,
                self._device,
            )
        if params.logprobs is not None:
            self._num_logprobs[slot] = _count_top(params.logprobs, self._vocab_size)
        filters = not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        if filters or any(
            slot in users for users in (self._penalised, self._constraints, self._num_logprobs)
        ):
            self._special.add(slot)

    def release(self, slot: int) -> None:
        """Forget the slot's sequence; releasing a free slot does nothing."""
        self._penalised.discard(slot)
        self._constraints.pop(slot, None)
        self._num_logprobs.pop(slot, None)
        self._special.discard(slot)

    def need_logits(self, slots: Sequence[int]) -> bool:
        """Whether any of these slots needs more than its temperature to draw a token."""
        return not self._special.isdisjoint(slots)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> SampledTokens:
        """Draw one token for each of N distinct slots and record it.

        logits: [N, vocab] FP32 of the model, contiguous; row i belongs to slots[i]. They may be overwritten.
        """
        if not slots:
            return SampledTokens([], [])
        rows_with_logprobs = _rows_of(slots, self._num_logprobs)
        constrained = _rows_of(slots, self._constraints)
        penalised = _rows_of(slots, self._penalised)
        raw = logits[rows_with_logprobs] if rows_with_logprobs else logits[:0]
        for row in constrained:
            self._constraints[slots[row]].apply(logits[row])
        if penalised:
            self._apply_penalties(logits, penalised, slots)
        slot_ids = torch.tensor(slots, device=self._device)
        tokens, is_valid = sample(logits, self._select(slot_ids))
        self.position[slot_ids] += 1
        if penalised:
            self._seen.record([slots[row] for row in penalised], tokens[penalised])
        token_ids: list[int] = tokens.tolist()
        for row in constrained:
            self._constraints[slots[row]].record(token_ids[row])
        invalid_rows = tuple(row for row, valid in enumerate(is_valid.tolist()) if not valid)
        logprobs = self._logprobs(raw, tokens, rows_with_logprobs, slots)
        for row in invalid_rows:
            logprobs[row] = None
        return SampledTokens(token_ids, logprobs, invalid_rows)

    def _select(self, slot_ids: torch.Tensor) -> SamplingRows:
        return SamplingRows(
            temperature=self.temperature[slot_ids],
            top_k=self._top_k[slot_ids],
            top_p=self._top_p[slot_ids],
            min_p=self._min_p[slot_ids],
            keys=noise_keys(self.stream[slot_ids], self.position[slot_ids]),
        )

    def _apply_penalties(self, logits: torch.Tensor, rows: list[int], slots: Sequence[int]) -> None:
        slot_ids = torch.tensor([slots[row] for row in rows], device=self._device)
        seen = self._seen
        apply_penalties(
            logits,
            torch.tensor(rows, device=self._device),
            seen.token_ids[slot_ids],
            seen.counts[slot_ids],
            seen.in_prompt[slot_ids],
            self._penalties[slot_ids],
        )

    def _logprobs(
        self, raw: torch.Tensor, tokens: torch.Tensor, rows: list[int], slots: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Rows that list equally many tokens are worked on together."""
        found: list[TokenLogprobs | None] = [None] * len(slots)
        for num_top in {self._num_logprobs[slots[row]] for row in rows}:
            members = [i for i, row in enumerate(rows) if self._num_logprobs[slots[row]] == num_top]
            member_rows = [rows[i] for i in members]
            entries = _as_logprobs(*token_logprobs(raw[members], tokens[member_rows], num_top))
            for row, entry in zip(member_rows, entries, strict=True):
                found[row] = entry
        return found


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, next_token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """Logprobs of prompt tokens.

    logits: [N, vocab] FP32 of N positions. next_token_ids: [N] I64, the tokens that follow them.
    num_top: most likely tokens listed beside each; -1 lists the vocabulary.
    """
    found: list[TokenLogprobs] = []
    num_top = _count_top(num_top, logits.shape[-1])
    for start in range(0, len(logits), PROMPT_LOGPROBS_ROWS):
        rows = slice(start, start + PROMPT_LOGPROBS_ROWS)
        found += _as_logprobs(*token_logprobs(logits[rows], next_token_ids[rows], num_top))
    return found


def _rows_of(slots: Sequence[int], users: Container[int]) -> list[int]:
    """Rows whose slot uses a feature."""
    return [row for row, slot in enumerate(slots) if slot in users] if users else []


def _count_top(num_top: int, vocab_size: int) -> int:
    return vocab_size if num_top < 0 else min(num_top, vocab_size)


def _as_logprobs(token_ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor) -> list[TokenLogprobs]:
    rows = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprobs(tuple(ids), tuple(values), tuple(places)) for ids, values, places in rows]
