"""Turn logits into tokens for the slots of a batch, with each slot's own parameters and randomness.

Order: raw logits -> logprobs (reported from these) -> allowed_token_ids, bad_words, min_tokens, logit_bias ->
penalties -> temperature -> top_k -> top_p -> min_p -> draw. The common parameters are rows of device
tensors and cost the same however they are mixed; a rare one costs something only in the rows that use it.
Nothing here waits for the device, but for log-probabilities and for bad words of several tokens.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.engine.seen_tokens import SeenTokens
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.token_constraints import TokenConstraints
from tiny_vllm.engine.transfers import Arriving, Upload
from tiny_vllm.kernels.draw_tokens import SlotAdvance
from tiny_vllm.kernels.logprobs import token_logprobs
from tiny_vllm.kernels.penalties import apply_penalties
from tiny_vllm.kernels.read_sampling import SamplingColumns, read_sampling
from tiny_vllm.kernels.sampling import sample_and_advance
from tiny_vllm.kernels.sampling_noise import stream_of_seed
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
class SamplingBatch:
    """What sampling one token for each of some slots needs to know; valid until one of them is assigned anew.

    slot_ids: [N] I64. penalised, constrained, with_logprobs: the rows that use the feature;
    penalised_rows, penalised_slots, logprob_rows: the same for the device.
    """

    slots: Sequence[int]
    slot_ids: Arriving
    has_filters: bool
    penalised: list[int]
    penalised_rows: Arriving
    penalised_slots: Arriving
    constrained: list[int]
    with_logprobs: list[int]
    logprob_rows: Arriving
    needs_host: bool

    @property
    def is_plain(self) -> bool:
        """Whether temperatures are all that these tokens are drawn by."""
        return not (self.has_filters or self.penalised or self.constrained or self.with_logprobs)


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """On the device: tokens [N] I64, -1 for rows whose logits hold NaN or +inf, or nothing above -inf: fail
    such a row's request and release its slot. Other rows are not affected. raw_logits: rows that report
    log-probabilities."""

    tokens: Tensor
    raw_logits: Tensor | None


class Sampler:
    """Sampling state of all slots. A slot is assigned, sampled from step after step, and released.

    temperature [slots] FP32; stream, position [slots] I64: seeds and output positions of the random streams.
    A step that draws on the device reads them there and advances `position` itself.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        device = torch.device(device)
        # One row per parameter, so that a slot's are written together and a column stays contiguous.
        self._integers = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        self._reals = torch.zeros(6, num_slots, dtype=torch.float32, device=device)
        self.stream, self.position, top_k = self._integers.unbind()
        self.temperature, top_p, min_p, *_ = self._reals.unbind()
        self._columns = SamplingColumns(self.stream, self.position, top_k, self.temperature, top_p, min_p)
        self._seen = SeenTokens(num_slots, device)
        self._filtered: set[int] = set()
        self._penalised: set[int] = set()
        self._constraints: dict[int, TokenConstraints] = {}
        self._num_logprobs: dict[int, int] = {}

    def assign(self, assignments: Mapping[int, SlotSampling], upload: Upload) -> None:
        """Give slots to sequences, once the upload has arrived. Ids in allowed_token_ids and logit_bias must
        be in the vocabulary."""
        if not assignments:
            return
        for slot, sampling in assignments.items():
            self._register(slot, sampling, upload)
        slots = upload.integers(list(assignments))
        integers = [self._integers_of(sampling) for sampling in assignments.values()]
        reals = [_reals_of(sampling.params) for sampling in assignments.values()]
        sent_integers = upload.integers(np.array(integers, dtype=np.int64).T.reshape(-1))
        sent_reals = upload.reals(np.array(reals).T.reshape(-1))

        def write() -> None:
            self._integers.index_copy_(1, slots.tensor, sent_integers.tensor.view(3, -1))
            self._reals.index_copy_(1, slots.tensor, sent_reals.tensor.view(6, -1))

        upload.then(write)

    def release(self, slot: int) -> None:
        """Forget the slot's sequence; releasing a free slot does nothing."""
        self._filtered.discard(slot)
        self._penalised.discard(slot)
        self._constraints.pop(slot, None)
        self._num_logprobs.pop(slot, None)

    def prepare(self, slots: Sequence[int], slot_ids: Arriving, upload: Upload) -> SamplingBatch:
        """Get ready to draw one token for each of N distinct slots, once the upload has arrived.

        slot_ids: the slots, part of the same upload. A batch may be used for many steps.
        """
        penalised = _rows_of(slots, self._penalised)
        constrained = _rows_of(slots, self._constraints)
        with_logprobs = _rows_of(slots, self._num_logprobs)
        return SamplingBatch(
            slots=slots,
            slot_ids=slot_ids,
            has_filters=not self._filtered.isdisjoint(slots),
            penalised=penalised,
            penalised_rows=upload.integers(penalised),
            penalised_slots=upload.integers([slots[row] for row in penalised]),
            constrained=constrained,
            with_logprobs=with_logprobs,
            logprob_rows=upload.integers(with_logprobs),
            needs_host=bool(with_logprobs)
            or any(self._constraints[slots[row]].needs_tokens for row in constrained),
        )

    @torch.inference_mode()
    def draw(self, logits: Tensor, batch: SamplingBatch, table: SlotTable) -> DrawnTokens:
        """Draw a token for every row and move its slot on by it, without waiting for the device.

        logits: [N, vocab] FP32 of the model, contiguous; row i belongs to batch.slots[i]. They may be
        overwritten. table: gets the new last tokens, and computed lengths greater by one. If
        batch.needs_host, `finish` must follow before the next draw.
        """
        raw = logits.index_select(0, batch.logprob_rows.tensor) if batch.with_logprobs else None
        for row in batch.constrained:
            self._constraints[batch.slots[row]].apply(logits[row])
        if batch.penalised:
            self._apply_penalties(logits, batch)
        slot_ids = batch.slot_ids.tensor
        tokens = sample_and_advance(
            logits,
            read_sampling(self._columns, slot_ids),
            self.temperature,
            SlotAdvance(slot_ids, table.last_token, table.computed_len, self.position),
            has_filters=batch.has_filters,
        )
        if batch.penalised:
            slots = [batch.slots[row] for row in batch.penalised]
            drawn = tokens.index_select(0, batch.penalised_rows.tensor).clamp_(min=0)
            self._seen.record(slots, batch.penalised_slots.tensor, drawn)
        return DrawnTokens(tokens, raw)

    @torch.inference_mode()
    def finish(
        self, batch: SamplingBatch, drawn: DrawnTokens, token_ids: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        """Tell constraints what was drawn, and work out the log-probabilities asked for.

        token_ids: the tokens on the host, None where they are not valid; such rows have no log-probabilities.
        """
        for row in batch.constrained:
            constraints, token_id = self._constraints[batch.slots[row]], token_ids[row]
            if constraints.needs_tokens and token_id is not None:
                constraints.record(token_id)
        return self._logprobs(drawn, token_ids, batch)

    def _register(self, slot: int, sampling: SlotSampling, upload: Upload) -> None:
        self.release(slot)
        params = sampling.params
        if not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            self._filtered.add(slot)
        if params.uses_penalties:
            self._seen.assign(slot, sampling.prompt_token_ids, sampling.output_token_ids, upload)
            self._penalised.add(slot)
        if TokenConstraints.are_needed(params, sampling.bad_words_token_ids):
            self._constraints[slot] = TokenConstraints(
                params,
                sampling.output_token_ids,
                sampling.ending_token_ids,
                sampling.bad_words_token_ids,
                self._vocab_size,
                upload,
            )
        if params.logprobs is not None:
            self._num_logprobs[slot] = _count_top(params.logprobs, self._vocab_size)

    def _integers_of(self, sampling: SlotSampling) -> tuple[int, int, int]:
        """Stream, position and top_k."""
        top_k = sampling.params.top_k
        return (
            stream_of_seed(sampling.seed),
            len(sampling.output_token_ids),
            min(top_k, self._vocab_size) if top_k > 0 else self._vocab_size,
        )

    def _apply_penalties(self, logits: Tensor, batch: SamplingBatch) -> None:
        seen, slots = self._seen, batch.penalised_slots.tensor
        apply_penalties(
            logits,
            batch.penalised_rows.tensor,
            seen.token_ids[slots],
            seen.counts[slots],
            seen.in_prompt[slots],
            self._reals[3:].index_select(1, slots).T,
        )

    def _logprobs(
        self, drawn: DrawnTokens, token_ids: Sequence[int | None], batch: SamplingBatch
    ) -> list[TokenLogprobs | None]:
        """Rows that list equally many tokens are worked on together."""
        found: list[TokenLogprobs | None] = [None] * len(batch.slots)
        if drawn.raw_logits is None:
            return found
        raw, rows = drawn.raw_logits, batch.with_logprobs
        counts = [self._num_logprobs[batch.slots[row]] for row in rows]
        for num_top in set(counts):
            members = [i for i, count in enumerate(counts) if count == num_top]
            member_rows = [rows[i] for i in members]
            tokens = drawn.tokens[member_rows].clamp(min=0)
            entries = _as_logprobs(*token_logprobs(raw[members], tokens, num_top))
            for row, entry in zip(member_rows, entries, strict=True):
                found[row] = None if token_ids[row] is None else entry
        return found


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
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


def _reals_of(params: SamplingParams) -> tuple[float, ...]:
    """Temperature, top_p, min_p, repetition, frequency and presence."""
    return (
        0.0 if params.is_greedy else min(params.temperature, MAX_TEMPERATURE),
        params.top_p,
        params.min_p,
        min(max(params.repetition_penalty, 1 / MAX_REPETITION), MAX_REPETITION),
        params.frequency_penalty,
        params.presence_penalty,
    )


def _rows_of(slots: Sequence[int], users: Container[int]) -> list[int]:
    """Rows whose slot uses a feature."""
    return [row for row, slot in enumerate(slots) if slot in users] if users else []


def _count_top(num_top: int, vocab_size: int) -> int:
    return vocab_size if num_top < 0 else min(num_top, vocab_size)


def _as_logprobs(token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> list[TokenLogprobs]:
    rows = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprobs(tuple(ids), tuple(values), tuple(places)) for ids, values, places in rows]
