"""A stand-in for the device half: no tensors, but the same contract, and it notices every misplaced page.

The "K/V" of a token is a fingerprint of all tokens up to it. The fake writes it to the cell the plan implies
and, before each token, reads back the context through the slot's page table and compares: all of it, or what
the first query's window leaves. The next token is a pure function of all tokens and the seed, so what a
request must produce is known without running anything.
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
    known: list[bytes]
    """Fingerprints of the known tokens."""
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
    are unusable. window: tokens that a query sees, itself included."""

    page_size: int
    window: int | None = None
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
            known: list[bytes] = []
            for token in (*admission.request.prompt_token_ids, *admission.generated_token_ids):
                known.append(fingerprint(known[-1] if known else b"", token))
            self.slots[admission.slot] = FakeSlot(
                admission.request.request_id,
                admission.seed,
                list(admission.page_ids),
                admission.computed_len,
                known,
            )
        for edit in plan.page_edits:
            pages = self.slots[edit.slot].pages
            if edit.page_id == NULL_PAGE:
                assert pages[edit.index] != NULL_PAGE, "a page is given back twice"
                pages[edit.index] = NULL_PAGE
            else:
                assert edit.index == len(pages), "page tables only grow at the end"
                pages.append(edit.page_id)
        scheduled = [*plan.decode_slots, *(chunk.slot for chunk in plan.chunks)]
        assert len(set(scheduled)) == len(scheduled), "a sequence is scheduled twice in a step"
        tokens: list[int | None] = []
        # All reads of a step see the pages as they were before it: nothing may depend on a neighbour's write.
        for slot in scheduled:
            self._check_context(slot)
        for slot in plan.decode_slots:
            token = self.slots[slot].last_token
            assert token is not None
            tokens.append(self._run(slot, [token], samples=True))
        pooled: dict[int, np.ndarray] = {}
        for position, chunk in enumerate(plan.chunks):
            assert chunk.start == self.slots[chunk.slot].computed_len
            token = self._run(chunk.slot, list(chunk.token_ids), chunk.samples)
            if chunk.samples:
                tokens.append(token)
            if chunk.num_pooled:
                pooled[position] = self._pool(chunk)
        return StepResult(token_ids=tokens, pooled=pooled)

    def _pool(self, chunk: Chunk) -> np.ndarray:
        """The sum of the hidden states of the chunk's last positions."""
        row = self.slots[chunk.slot]
        start = row.computed_len - chunk.num_pooled
        states = [hidden_state(context) for context in row.known[start : row.computed_len]]
        total = np.sum(states, axis=0, dtype=np.float32)
        return total * np.nan if row.computed_len == self.broken.get(row.request_id) else total

    def _check_context(self, slot: int) -> None:
        """Read what the first query of this step sees."""
        row = self.slots[slot]
        first = 0 if self.window is None else max(row.computed_len - self.window + 1, 0)
        read = [self.cells[self._cell(row, position)] for position in range(first, row.computed_len)]
        assert read == row.known[first : row.computed_len], "the K/V of other tokens"

    def _cell(self, row: FakeSlot, position: int) -> int:
        page = row.pages[position // self.page_size]
        assert page != NULL_PAGE
        return page * self.page_size + position % self.page_size

    def _run(self, slot: int, token_ids: list[int], samples: bool) -> int | None:
        row = self.slots[slot]
        last = row.known[row.computed_len - 1] if row.computed_len else b""
        for token in token_ids:
            last = fingerprint(last, token)
            if row.computed_len == len(row.known):
                row.known.append(last)
            assert row.known[row.computed_len] == last
            self.cells[self._cell(row, row.computed_len)] = last
            row.computed_len += 1
        if samples and row.computed_len == self.broken.get(row.request_id):
            row.last_token = 0
            return None
        if samples:
            row.last_token = next_token(last, row.seed)
            return row.last_token
        return None
