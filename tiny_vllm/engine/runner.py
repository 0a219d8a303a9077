"""The device half: executes plans. Holds the slot table, the pages, the decoder and the sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.engine.batch import BatchShape, build_batch, pack_batch
from tiny_vllm.engine.decode_stepper import DecodeStepper
from tiny_vllm.engine.forward_graphs import ForwardGraphs
from tiny_vllm.engine.plan import StepPlan, StepResult
from tiny_vllm.engine.sampler import DrawnTokens, Sampler, SamplingBatch, SlotSampling, prompt_logprobs
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.transfers import Arriving, Fetch, Transfers, Upload
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.types import TokenLogprobs

PROMPT_LOGPROBS_ROWS = 128
"""Prompt positions whose logits exist at the same time: a row of logits is as long as the vocabulary."""


@contextmanager
def _one_torch_thread(is_wanted: bool) -> Iterator[None]:
    """Keep torch's operators to the calling thread.

    OpenMP's threads spin for milliseconds after an operator that used them, in the way of the next fused CPU
    decode step's: sampling on one thread doubles single-stream decode on two cores.
    """
    num_threads = torch.get_num_threads()
    if is_wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if is_wanted:
            torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose result is known."""

    answer: StepResult
    is_synchronous: bool

    def result(self) -> StepResult:
        return self.answer


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step whose tokens are on their way to the host."""

    tokens: Fetch
    is_synchronous: bool = False

    def result(self) -> StepResult:
        return StepResult(_token_ids(self.tokens))


@dataclass(slots=True)
class _Decodes:
    """What steps of the same decodes share. num_pages: at least those of the longest page table."""

    slots: tuple[int, ...]
    slot_ids: Arriving
    sampling: SamplingBatch
    num_pages: int


class Runner:
    """Executes plans on one device.

    page_size: tokens. steppers: how the device runs steps of decodes alone; the first that takes as many rows
    is used, and without one they run like all others. graphs: how it runs small steps with chunks; None:
    as it does large ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        sampler: Sampler,
        table: SlotTable,
        transfers: Transfers,
        *,
        page_size: int,
        steppers: Sequence[DecodeStepper] = (),
        graphs: ForwardGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._table = table
        self._transfers = transfers
        self._page_size = page_size
        self._steppers = steppers
        self._graphs = graphs
        self._decodes: _Decodes | None = None

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> ComputedStep | StepUnderWay:
        """Apply the plan's edits, compute its tokens, sample, and write the new tokens into the slot table.

        The device is waited for only if somebody asks for log-probabilities or pooled hidden states, or bans
        words of several tokens.
        """
        upload = Upload()
        self._edit(plan, upload)
        stepper = None if plan.chunks else self._choose_stepper(len(plan.decode_slots))
        if stepper is None:
            return self._forward(plan, upload)
        decodes = self._prepare_decodes(plan, upload)
        upload.send(self._transfers)
        slot_ids, context = decodes.slot_ids.tensor, decodes.num_pages * self._page_size
        if decodes.sampling.is_plain:
            draw = partial(stepper.draw, slot_ids, context)
            return StepUnderWay(self._transfers.receive(len(plan.decode_slots), draw))
        drawn = self._sampler.draw(stepper.logits(slot_ids, context), decodes.sampling, self._table)
        return self._finish(drawn, decodes.sampling, StepResult([]))

    def _edit(self, plan: StepPlan, upload: Upload) -> None:
        for slot in plan.released_slots:
            self._sampler.release(slot)
        if plan.admissions:
            self._decodes = None
            self._sampler.assign(
                {
                    admission.slot: SlotSampling(
                        params=admission.request.sampling,
                        seed=admission.seed,
                        prompt_token_ids=admission.request.prompt_token_ids,
                        output_token_ids=admission.generated_token_ids,
                        ending_token_ids=admission.ending_token_ids,
                        bad_words_token_ids=admission.request.bad_words_token_ids,
                    )
                    for admission in plan.admissions
                },
                upload,
            )
        self._table.edit(plan, upload)
        if self._decodes is not None:
            for edit in plan.page_edits:
                self._decodes.num_pages = max(self._decodes.num_pages, edit.index + 1)

    def _choose_stepper(self, num_rows: int) -> DecodeStepper | None:
        for stepper in self._steppers:
            if num_rows <= stepper.max_rows:
                return stepper
        return None

    def _prepare_decodes(self, plan: StepPlan, upload: Upload) -> _Decodes:
        """What the last step of decodes used, if it had the same ones."""
        slots, decodes = plan.decode_slots, self._decodes
        if decodes is None or (decodes.slots is not slots and decodes.slots != slots):
            slot_ids = upload.integers(slots)
            sampling = self._sampler.prepare(slots, slot_ids, upload)
            num_pages = max([self._table.num_pages[slot] for slot in slots])
            decodes = self._decodes = _Decodes(slots, slot_ids, sampling, num_pages)
        return decodes

    def _forward(self, plan: StepPlan, upload: Upload) -> ComputedStep | StepUnderWay:
        """A step with chunks, or on a device without a stepper."""
        graphs, table = self._graphs, self._table
        padded = None if graphs is None else graphs.choose_shape(plan)
        shape = padded or BatchShape.of(plan, table)
        packed = upload.integers(pack_batch(plan, shape, table.padding_slot))
        ends = list(accumulate(1 if shape.ends_only else len(chunk.token_ids) for chunk in plan.chunks))
        slots, rows = self._sampling_rows(plan, shape.num_decodes, ends)
        slot_ids, row_ids = upload.integers(slots), upload.integers(rows)
        sampling = self._sampler.prepare(slots, slot_ids, upload)
        upload.send(self._transfers)
        if graphs is not None and padded is not None:
            hidden = graphs.forward(padded, packed.tensor)
        else:
            batch = build_batch(packed.tensor, shape, table, self._page_size)
            hidden = self._decoder.forward(batch, self._kv_cache)
        of_chunks = hidden[shape.num_decodes :]
        result = StepResult(
            [],
            prompt_logprobs=self._score_prompts(plan, of_chunks, ends),
            pooled=self._pool_prompts(plan, of_chunks, ends),
        )
        if not slots:
            return ComputedStep(result, result.tells_of_prompts)
        if len(rows) != hidden.shape[0]:
            hidden = hidden.index_select(0, row_ids.tensor)
        with _one_torch_thread(self._decoder.fused_decode is not None):
            drawn = self._sampler.draw(self._decoder.logits(hidden), sampling, self._table)
        return self._finish(drawn, sampling, result)

    @staticmethod
    def _sampling_rows(plan: StepPlan, first_row: int, ends: list[int]) -> tuple[list[int], list[int]]:
        """Slots that get a token, and their rows of hidden states. first_row: of the chunks; ends: where the
        rows of each chunk end, counted from there."""
        slots = list(plan.decode_slots)
        rows = list(range(len(slots)))
        for chunk, end in zip(plan.chunks, ends, strict=True):
            if chunk.samples:
                slots.append(chunk.slot)
                rows.append(first_row + end - 1)
        return slots, rows

    def _finish(
        self, drawn: DrawnTokens, sampling: SamplingBatch, result: StepResult
    ) -> ComputedStep | StepUnderWay:
        """result: what is known of prompts; gets the tokens if they are waited for."""
        tokens = self._transfers.fetch(drawn.tokens)
        if not (sampling.needs_host or result.tells_of_prompts):
            return StepUnderWay(tokens)
        result.token_ids = token_ids = _token_ids(tokens)
        result.logprobs = self._sampler.finish(sampling, drawn, token_ids)
        return ComputedStep(result, is_synchronous=True)

    def _score_prompts(
        self, plan: StepPlan, hidden: Tensor, ends: list[int]
    ) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens of chunks that ask for them, by position in the plan.

        hidden: of the chunks, whose rows end at `ends`."""
        found: dict[int, list[TokenLogprobs]] = {}
        for position, (chunk, end) in enumerate(zip(plan.chunks, ends, strict=True)):
            if chunk.num_prompt_logprobs is not None:
                first = end - len(chunk.token_ids)
                rows = hidden[first : first + len(chunk.target_token_ids)]
                found[position] = self._score(rows, chunk.target_token_ids, chunk.num_prompt_logprobs)
        return found

    def _pool_prompts(self, plan: StepPlan, hidden: Tensor, ends: list[int]) -> dict[int, np.ndarray]:
        """Sums of the hidden states that chunks want pooled, by position in the plan.

        hidden: of the chunks, whose rows end at `ends`."""
        places: list[int] = []
        sums: list[Tensor] = []
        for position, (chunk, end) in enumerate(zip(plan.chunks, ends, strict=True)):
            if chunk.num_pooled:
                rows = self._decoder.final_hidden(hidden[end - chunk.num_pooled : end])
                places.append(position)
                sums.append(rows.sum(0, dtype=torch.float32))
        return dict(zip(places, torch.stack(sums).cpu().numpy(), strict=True)) if sums else {}

    def _score(self, hidden: Tensor, targets: tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROBS_ROWS):
            end = start + PROMPT_LOGPROBS_ROWS
            logits = self._decoder.logits(hidden[start:end])
            next_tokens = torch.tensor(targets[start:end], device=logits.device)
            scores.extend(prompt_logprobs(logits, next_tokens, num_top))
        return scores


def _token_ids(tokens: Fetch) -> list[int | None]:
    """None for a row whose logits were unusable, which arrives as -1."""
    values = tokens.read()
    if min(values) < 0:
        return [token if token >= 0 else None for token in values]
    return list[int | None](values)
