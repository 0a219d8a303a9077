"""The device half: executes plans. Holds the slot table, the pages, the decoder and the sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.engine.batch import build_batch
from tiny_vllm.engine.decode_graphs import DecodeGraphs
from tiny_vllm.engine.plan import StepPlan, StepResult
from tiny_vllm.engine.sampler import Sampler, SlotSampling, prompt_logprobs
from tiny_vllm.engine.slot_table import SlotTable
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
    is_synchronous: bool = False

    def result(self) -> StepResult:
        return self.answer


class Runner:
    """Executes plans on one device.

    page_size: tokens. graphs: how a GPU runs steps of decodes alone; None runs them like all others.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        sampler: Sampler,
        table: SlotTable,
        *,
        page_size: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._table = table
        self._page_size = page_size
        self._graphs = graphs

    def submit(self, plan: StepPlan) -> ComputedStep:
        """Compute the step at once."""
        return ComputedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's edits, compute its tokens, sample, and write the new tokens into the slot
        table."""
        self._edit(plan)
        if self._graphs is not None and not plan.chunks:
            return self._replay(self._graphs, plan)
        batch = build_batch(plan, self._table, self._page_size)
        hidden = self._decoder.forward(batch, self._kv_cache)
        slots, rows = self._sampling_rows(plan)
        result = self._sample(hidden, slots, rows)
        self._report_prompts(plan, hidden, result)
        self._advance(plan, slots, result)
        return result

    def _edit(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            self._sampler.release(slot)
        for admission in plan.admissions:
            self._table.admit(admission)
            self._sampler.assign(
                admission.slot,
                SlotSampling(
                    params=admission.request.sampling,
                    seed=admission.seed,
                    prompt_token_ids=admission.request.prompt_token_ids,
                    output_token_ids=admission.generated_token_ids,
                    ending_token_ids=admission.ending_token_ids,
                    bad_words_token_ids=admission.request.bad_words_token_ids,
                ),
            )
        self._table.edit_pages(plan.page_edits)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> StepResult:
        slots = plan.decode_slots
        capacity = max(self._table.num_pages[slot] for slot in slots) * self._page_size
        if not self._sampler.need_logits(slots):
            tokens, is_valid = graphs.draw(slots, capacity)
            return StepResult(
                [token if valid else None for token, valid in zip(tokens, is_valid, strict=True)]
            )
        result = self._draw(graphs.logits(slots, capacity), slots)
        self._advance(plan, slots, result)
        return result

    @staticmethod
    def _sampling_rows(plan: StepPlan) -> tuple[list[int], list[int]]:
        """Slots that get a token, and the batch rows of their logits."""
        slots = list(plan.decode_slots)
        rows = list(range(len(slots)))
        row = len(slots)
        for chunk in plan.chunks:
            row += len(chunk.token_ids)
            if chunk.samples:
                slots.append(chunk.slot)
                rows.append(row - 1)
        return slots, rows

    def _sample(self, hidden: Tensor, slots: list[int], rows: list[int]) -> StepResult:
        if not slots:
            return StepResult(token_ids=[])
        if len(rows) != hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, device=hidden.device)]
        return self._draw(self._decoder.logits(hidden), slots)

    def _draw(self, logits: Tensor, slots: Sequence[int]) -> StepResult:
        with _one_torch_thread(self._decoder.fused_decode is not None):
            sampled = self._sampler.sample(logits, slots)
        token_ids: list[int | None] = list(sampled.token_ids)
        for row in sampled.invalid_rows:
            token_ids[row] = None
        return StepResult(token_ids=token_ids, logprobs=sampled.logprobs)

    def _report_prompts(self, plan: StepPlan, hidden: Tensor, result: StepResult) -> None:
        row = len(plan.decode_slots)
        for position, chunk in enumerate(plan.chunks):
            if chunk.num_prompt_logprobs is not None:
                rows = hidden[row : row + len(chunk.target_token_ids)]
                result.prompt_logprobs[position] = self._score(
                    rows, chunk.target_token_ids, chunk.num_prompt_logprobs
                )
            row += len(chunk.token_ids)

    def _score(self, hidden: Tensor, targets: tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROBS_ROWS):
            end = start + PROMPT_LOGPROBS_ROWS
            logits = self._decoder.logits(hidden[start:end])
            next_tokens = torch.tensor(targets[start:end], device=logits.device)
            scores.extend(prompt_logprobs(logits, next_tokens, num_top))
        return scores

    def _advance(self, plan: StepPlan, slots: Sequence[int], result: StepResult) -> None:
        table, device = self._table, self._table.last_token.device
        if plan.decode_slots:
            table.computed_len[torch.tensor(plan.decode_slots, device=device)] += 1
        for chunk in plan.chunks:
            table.computed_len[chunk.slot] = chunk.start + len(chunk.token_ids)
        if slots:
            tokens = [0 if token is None else token for token in result.token_ids]
            table.last_token[torch.tensor(slots, device=device)] = torch.tensor(tokens, device=device)
