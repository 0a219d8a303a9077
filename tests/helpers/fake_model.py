"""A stand-in for the device half: no tensors, but the same contract, and it notices every misplaced page.

The "K/V" of a token is a fingerprint of all tokens up to it. The fake writes it to the cell the plan implies
and, before each token, reads back the whole context through the slot's page table and compares. The next
token is a pure function of the context and the seed, so what a request must produce is known without running
anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from tiny_vllm.engine.page_pool import NULL_PAGE
from tiny_vllm.engine.plan import Chunk, StepPlan, StepResult

VOCABULARY = 50


def fingerprint(previous: bytes, token: int) -> bytes:
    return blake2b(previous + token.to_bytes(8, "little"), digest_size=16).digest()


def next_token(context: bytes, seed: int) -> int:
    digest = blake2b(context + seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def expected_tokens(prompt: tuple[int, ...], seed: int, count: int, ending: frozenset[int]) -> list[int]:
    """What a sequence generates when nothing else runs."""
    context = b""
    for token in prompt:
        context = fingerprint(context, token)
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in ending):
        tokens.append(next_token(context, seed))
        context = fingerprint(context, tokens[-1])
    return tokens


def hidden_state(context: bytes) -> np.ndarray:
    """Three positive numbers that tell contexts apart."""
    return 1 + np.frombuffer(context[:3], np.uint8).astype(np.float32)


def expected_pooled(prompt: tuple[int, ...], pooling: str) -> np.ndarray:
    """What a prompt's hidden states come to."""
    context, states = b"", []
    for token in prompt:
        context = fingerprint(context, token)
        states.append(hidden_state(context))
    return np.mean(states, axis=0) if pooling == "mean" else states[-1]


@dataclass
class FakeSlot:
    request_id: str
    seed: int
    pages: list[int]
    computed_len: int
    last_token: int | None = None


@dataclass
class FakeStep:
    """Computed when it was submitted, but only told when asked for."""

    executor: FakeExecutor
    answer: StepResult
    is_synchronous: bool

    def result(self) -> StepResult:
        if self.executor.late_failure is not None:
            failure, self.executor.late_failure = self.executor.late_failure, None
            raise failure
        return self.answer


@dataclass
class FakeExecutor:
    """failure: raise this instead of computing, once. late_failure: raise it when a result is asked for,
    once. synchronous: says so of its steps. broken: request id to the context length after which its logits
    are unusable."""

    page_size: int
    cells: dict[int, bytes] = field(default_factory=dict)
    slots: dict[int, FakeSlot] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    failure: BaseException | None = None
    late_failure: BaseException | None = None
    synchronous: bool = False
    broken: dict[str, int] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> FakeStep:
        return FakeStep(self, self.execute(plan), self.synchronous)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.plans.append(plan)
        for slot in plan.released_slots:
            self.slots.pop(slot, None)
        for admission in plan.admissions:
            assert admission.slot not in self.slots, "admitted into a taken slot"
            self.slots[admission.slot] = FakeSlot(
                admission.request.request_id,
                admission.seed,
                list(admission.page_ids),
                admission.computed_len,
            )
        for edit in plan.page_edits:
            assert edit.index == len(self.slots[edit.slot].pages), "page tables only grow at the end"
            self.slots[edit.slot].pages.append(edit.page_id)
        scheduled = [*plan.decode_slots, *(chunk.slot for chunk in plan.chunks)]
        assert len(set(scheduled)) == len(scheduled), "a sequence is scheduled twice in a step"
        tokens: list[int | None] = []
        # All reads of a step see the pages as they were before it: nothing may depend on a neighbour's write.
        contexts = [self._context(slot) for slot in scheduled]
        for slot, context in zip(plan.decode_slots, contexts, strict=False):
            token = self.slots[slot].last_token
            assert token is not None
            tokens.append(self._run(slot, context, [token], samples=True))
        pooled: dict[int, np.ndarray] = {}
        for position, chunk in enumerate(plan.chunks):
            context = contexts[len(plan.decode_slots) + position]
            assert chunk.start == self.slots[chunk.slot].computed_len
            token = self._run(chunk.slot, context, list(chunk.token_ids), chunk.samples)
            if chunk.samples:
                tokens.append(token)
            if chunk.num_pooled:
                pooled[position] = self._pool(chunk)
        return StepResult(token_ids=tokens, pooled=pooled)

    def _pool(self, chunk: Chunk) -> np.ndarray:
        """The sum of the hidden states of the chunk's last positions."""
        row = self.slots[chunk.slot]
        context = self._context(chunk.slot)
        states = [hidden_state(each) for each in context[len(context) - chunk.num_pooled :]]
        total = np.sum(states, axis=0, dtype=np.float32)
        return total * np.nan if row.computed_len == self.broken.get(row.request_id) else total

    def _context(self, slot: int) -> list[bytes]:
        row = self.slots[slot]
        return [self.cells[self._cell(row, position)] for position in range(row.computed_len)]

    def _cell(self, row: FakeSlot, position: int) -> int:
        page = row.pages[position // self.page_size]
        assert page != NULL_PAGE
        return page * self.page_size + position % self.page_size

    def _run(self, slot: int, context: list[bytes], token_ids: list[int], samples: bool) -> int | None:
        row = self.slots[slot]
        last = context[-1] if context else b""
        for token in token_ids:
            last = fingerprint(last, token)
            self.cells[self._cell(row, row.computed_len)] = last
            row.computed_len += 1
        if samples and row.computed_len == self.broken.get(row.request_id):
            row.last_token = 0
            return None
        if samples:
            row.last_token = next_token(last, row.seed)
            return row.last_token
        return None
