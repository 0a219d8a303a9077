"""Decides what every step computes: admission, page growth, preemption, chunking; and records what came back.

`schedule` turns the state into a `StepPlan`; `commit` applies its result and says what each sequence got.
Both are plain Python on plain data, without torch.

Several steps may be under way: planned, and not committed yet. Lengths move on when a step is planned, so
the next one can be planned before the tokens are known; tokens, events and shareable pages come with the
commit. Steps run in the order of their plans, so slots and pages that are given up can be handed out again at
once: the next owner overwrites what a step under way still writes there. A sequence whose last token is under
way gives up its slot when that step is planned and its pages when it is committed. One that turns out to have
ended earlier is still in the steps under way; its rows there are ignored. Preemption is decided on read
results alone: `schedule` then asks for them first.

Rules, in the order they are applied in a step:
1. Every decoding sequence gets the page for its next token. If the pool is empty, the sequence that would
   come last in the queue is preempted: it gives up slot and pages and waits again. A sequence that is alone
   and still finds no page has outgrown the pool and ends with reason `length`.
2. Waiting sequences are admitted in queue order while there is a slot, pages for all known tokens, and token
   budget. A more urgent sequence that finds no room preempts less urgent ones. A sequence whose next prefix
   page is being computed by another one at this moment is passed over until it can share that page.
3. Chunks of known tokens fill the token budget, in queue order. `mixed` runs them beside all decodes;
   `exclusive` runs them alone. While sequences decode, at most max_prefill_tokens_per_decode known tokens are
   computed between two of their tokens: that bounds how long prompts delay them.

Where every layer has a window, a page that has slid out of it is given back when the step is committed; the
null page takes its place in the page table. A prefill then starts with the pages of its window and of some
chunks, and takes a new page for each that it gives back; should that not do, it grows by rule 1.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from tiny_vllm.engine.page_pool import NULL_PAGE, PagePool
from tiny_vllm.engine.plan import Admission, Chunk, PageEdit, StepPlan, StepResult
from tiny_vllm.engine.prefix_cache import extend_hashes, find_prefix
from tiny_vllm.engine.sequence import Sequence
from tiny_vllm.engine.waiting import WaitingQueue
from tiny_vllm.types import FinishReason, PromptInfo, TokenEvent, TokenLogprobs


class _ResultsNeeded(Exception):
    """The next step can only be planned once the steps under way have been committed."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The decoding sequences, as rows of a plan. The same object every step until one comes or goes."""

    sequences: tuple[Sequence, ...] = ()
    slots: tuple[int, ...] = ()
    sequence_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    """A plan and the sequences of its decodes and of its chunks, in the plan's order."""

    plan: StepPlan
    decodes: tuple[Sequence, ...]
    chunked: tuple[Sequence, ...]


class Scheduler:
    """Owns the sequences, the slots and the page pool.

    max_num_batched_tokens: most tokens in a step; at least num_slots, so that no decode is ever left out.
    window: tokens that a query sees in any layer, itself included; None if some layer shows it all.
    finishing: sequences whose last token is under way; they have pages but no slot.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_num_batched_tokens: int,
        prefill_policy: str,
        max_prefill_tokens_per_decode: int | None = None,
        window: int | None = None,
    ) -> None:
        assert max_num_batched_tokens >= num_slots
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_exclusive = prefill_policy == "exclusive"
        self.max_prefill_tokens_per_decode = max_prefill_tokens_per_decode
        self.window = window
        self._max_pages_at_start = num_pages + 1
        if window is not None:
            # Beside the window the pages of two steps under way, if the pool has them: one is enough.
            wanted = self._pages_for(window + 2 * max_num_batched_tokens) + 1
            self._max_pages_at_start = max(self._pages_for(window) + 1, min(wanted, num_pages))
        self.waiting = WaitingQueue()
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.finishing: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._step = 0
        self._num_prefilled_since_decode = 0
        self._released_slots: list[int] = []
        self._admissions: list[Admission] = []
        self._page_edits: list[PageEdit] = []
        self._events: list[TokenEvent] = []
        self._under_way: deque[_StepUnderWay] = deque()
        self._decodes: _Decodes | None = None

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding or self._under_way or self._events)

    def running(self) -> list[Sequence]:
        """Sequences in slots, most urgent first."""
        return sorted([*self.prefilling.values(), *self.decoding.values()], key=lambda s: s.queue_key)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this many known tokens could run if it were alone."""
        return self._pages_at_start(num_tokens) <= self.pool.num_pages

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; empty when nothing can run. now: seconds on the engine's clock.

        None: commit the oldest step under way, and call again. A plan that is not empty is under way from now
        on, until it is committed or rolled back.
        """
        try:
            self._grow()
            self._admit(now)
        except _ResultsNeeded:
            return None
        chunked, chunks = self._cut_chunks()
        must_wait = self.is_exclusive and bool(chunks) and bool(self.decoding)
        decodes = _Decodes() if must_wait else self._current_decodes()
        prefilled = sum(len(chunk.token_ids) for chunk in chunks)
        self._num_prefilled_since_decode = (self._num_prefilled_since_decode + prefilled) if must_wait else 0
        self._step += 1
        plan = StepPlan(
            step=self._step,
            released_slots=tuple(self._released_slots),
            admissions=tuple(self._admissions),
            page_edits=tuple(self._page_edits),
            decode_slots=decodes.slots,
            decode_sequence_ids=decodes.sequence_ids,
            chunks=chunks,
        )
        if not plan.is_empty:  # an empty plan is not executed, so what it says must be said again
            self._released_slots.clear()
            self._admissions.clear()
            self._page_edits.clear()
            self._under_way.append(_StepUnderWay(plan, decodes.sequences, chunked))
            self._advance(decodes.sequences, chunked, chunks)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Record what the oldest step under way computed: new tokens, finished sequences, shareable pages."""
        step = self._under_way.popleft()
        assert step.plan is plan, "steps are committed in the order of their plans"
        tokens = iter(result.token_ids)
        logprobs = iter(result.logprobs or repeat(None))
        page_size, add_event = self.page_size, self._events.append
        for sequence, token_id, token_logprobs in zip(step.decodes, tokens, logprobs, strict=False):
            if sequence.finish_reason is not None:
                continue
            token_ids = sequence.token_ids
            # Everything known before this token has been computed now.
            known_len = len(token_ids)
            if not known_len % page_size:
                self._publish(sequence, known_len)
                self._slide(sequence, known_len)
            if (
                token_id is None
                or token_id in sequence.ending_token_ids
                or known_len + 1 >= sequence.end_len
                or token_logprobs is not None
            ):
                self._append(sequence, token_id, token_logprobs)
            else:  # what nearly every token is, without a call
                token_ids.append(token_id)
                add_event(TokenEvent(sequence.request_id, sequence.index, token_id))
        for position, (sequence, chunk) in enumerate(zip(step.chunked, plan.chunks, strict=True)):
            token_id, token_logprobs = (next(tokens), next(logprobs)) if chunk.samples else (None, None)
            if sequence.finish_reason is not None:
                continue
            computed_len = chunk.start + len(chunk.token_ids)
            sequence.prompt_logprobs.extend(result.prompt_logprobs.get(position, ()))
            if position in result.pooled:
                before = sequence.pooled_sum
                pooled = result.pooled[position]
                sequence.pooled_sum = pooled if before is None else before + pooled
            self._publish(sequence, computed_len)
            self._slide(sequence, computed_len)
            if chunk.samples:
                self._append(sequence, token_id, token_logprobs)
            elif computed_len >= sequence.end_len:
                pooled_sum = sequence.pooled_sum
                is_usable = pooled_sum is None or bool(np.isfinite(pooled_sum).all())
                self._finish(sequence, FinishReason.LENGTH if is_usable else FinishReason.ERROR)

    def take_events(self) -> list[TokenEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stop(self, sequence: Sequence, reason: FinishReason) -> None:
        """End an unfinished sequence from outside, in whatever state it is."""
        self._finish(sequence, reason)

    def roll_back(self, plan: StepPlan) -> None:
        """Take back the newest plan, which was not (or only partly) executed, and with it all steps under
        way: every running sequence starts over from its known tokens. Whatever the plan would have released
        is released by the next one."""
        assert self._under_way[-1].plan is plan
        self._under_way.clear()
        self._released_slots.extend(plan.released_slots)
        for sequence in [*self.running(), *self.finishing.values()]:
            self._preempt(sequence)

    def check(self) -> None:
        """Assert that pages and slots are accounted for."""
        running = self.running()
        self.pool.check(sequence.held_pages for sequence in [*running, *self.finishing.values()])
        assert all(set(sequence.page_ids[: sequence.num_unseen]) <= {NULL_PAGE} for sequence in running)
        assert all(sequence.slot is None for sequence in self.finishing.values())
        slots = [sequence.slot for sequence in running]
        assert len(set(slots)) == len(slots) and not set(slots) & set(self._free_slots)
        assert all(sequence.slot is None and not sequence.page_ids for sequence in self.waiting)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _pages_at_start(self, num_tokens: int) -> int:
        """Pages that a sequence of this many known tokens starts with."""
        return min(self._pages_for(num_tokens), self._max_pages_at_start)

    def _num_unseen(self, computed_len: int) -> int:
        """Leading pages that no query behind this many tokens sees."""
        return 0 if self.window is None else max(computed_len - self.window + 1, 0) // self.page_size

    def _current_decodes(self) -> _Decodes:
        if self._decodes is None:
            sequences = tuple(self.decoding.values())
            self._decodes = _Decodes(
                sequences,
                tuple([sequence.slot for sequence in sequences if sequence.slot is not None]),
                tuple(self.decoding),
            )
        return self._decodes

    def _advance(
        self, decodes: tuple[Sequence, ...], chunked: tuple[Sequence, ...], chunks: tuple[Chunk, ...]
    ) -> None:
        """Move on by a step that has just been planned."""
        last = []
        for sequence in decodes:
            sequence.computed_len = computed_len = sequence.computed_len + 1
            # The new token is the one after those computed.
            if computed_len + 1 >= sequence.end_len:
                last.append(sequence)
        for sequence, chunk in zip(chunked, chunks, strict=True):
            sequence.computed_len += len(chunk.token_ids)
            if chunk.samples:
                del self.prefilling[sequence.sequence_id]
                self.decoding[sequence.sequence_id] = sequence
                self._decodes = None
            if sequence.computed_len + chunk.samples >= sequence.end_len:
                last.append(sequence)
        for sequence in last:
            self._give_up_slot(sequence)
            self.finishing[sequence.sequence_id] = sequence

    def _need_results(self) -> None:
        """Ask for the results of the steps under way before going on: they may free what is wanted."""
        if self._under_way:
            raise _ResultsNeeded

    def _grow(self) -> None:
        page_size = self.page_size
        running = (*self.decoding.values(), *self.prefilling.values())
        growing = [s for s in running if s.computed_len >= len(s.page_ids) * page_size]
        if len(growing) > 1:
            growing.sort(key=lambda s: s.queue_key)
        for sequence in growing:
            while sequence.slot is not None and not self.pool.num_available:
                self._need_results()
                victim = self.running()[-1]
                if victim is sequence and self.num_running == 1:
                    self._finish(sequence, FinishReason.LENGTH)
                else:
                    self._preempt(victim)
            if sequence.slot is not None:
                (page,) = self.pool.allocate(1)
                self._page_edits.append(PageEdit(sequence.slot, len(sequence.page_ids), page))
                sequence.page_ids.append(page)

    def _admit(self, now: float) -> None:
        if not self.waiting:
            return
        budget = self._chunk_budget()
        pending = self._pending_hashes()
        # Chunks are cut in queue order: what is being computed takes budget only from those who come later.
        computing = sorted(self.prefilling.values(), key=lambda s: s.queue_key, reverse=True)
        for sequence in self.waiting:
            while computing and computing[-1].queue_key < sequence.queue_key:
                earlier = computing.pop()
                budget -= earlier.known_len - earlier.computed_len
            if budget <= 0:
                return
            if not self.can_ever_fit(sequence.known_len):
                self._finish(sequence, FinishReason.LENGTH)
                continue
            sequence.take_prompt()
            prefix = self._find_prefix(sequence)
            if sequence.page_hashes[len(prefix) : len(prefix) + 1] and (
                sequence.page_hashes[len(prefix)] in pending and self._can_share(sequence, len(prefix))
            ):
                continue
            if not self._make_room(sequence, prefix):
                return
            self._start(sequence, prefix, now)
            budget -= sequence.known_len - sequence.computed_len
            pending.update(sequence.page_hashes[sequence.num_published :])

    def _pending_hashes(self) -> set[bytes]:
        """Hashes of the pages that running sequences are about to write, or are writing."""
        writing = list(self.prefilling.values())
        for step in self._under_way:
            writing.extend(sequence for sequence in step.chunked if sequence.finish_reason is None)
        return {
            content_hash
            for sequence in writing
            for content_hash in sequence.page_hashes[sequence.num_published :]
        }

    def _can_share(self, sequence: Sequence, page_index: int) -> bool:
        """Whether the sequence could use page `page_index` from the cache: its last token is always
        computed."""
        return not sequence.computes_all_positions and page_index < (sequence.known_len - 1) // self.page_size

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        extend_hashes(sequence.page_hashes, sequence.root_hash, sequence.token_ids, self.page_size)
        if sequence.computes_all_positions:
            return []
        hashes = sequence.page_hashes[: (sequence.known_len - 1) // self.page_size]
        return find_prefix(self.pool, hashes, lambda num_pages: self._num_unseen(num_pages * self.page_size))

    def _make_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether the sequence can start now, after preempting less urgent ones where that suffices."""
        if self._has_room(sequence, prefix):
            return True
        victims = [
            victim
            for victim in (*self.prefilling.values(), *self.decoding.values())
            if victim.request.priority > sequence.request.priority and victim.queue_key > sequence.queue_key
        ]
        victims.sort(key=lambda s: s.queue_key, reverse=True)
        needed = self._pages_at_start(sequence.known_len)
        if not victims or needed > self.pool.num_available + sum(len(v.held_pages) for v in victims):
            return False
        self._need_results()
        for victim in victims:
            self._preempt(victim)
            if self._has_room(sequence, prefix):
                return True
        return False

    def _has_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        if not self._free_slots:
            return False
        needed = self._num_new_pages(sequence, prefix)
        needed += sum(self.pool.is_cached(page) for page in prefix)
        # Every running sequence must still be able to grow by a page, or it would be preempted right away.
        return needed + self.num_running <= self.pool.num_available

    def _num_new_pages(self, sequence: Sequence, prefix: list[int]) -> int:
        """Pages to allocate when the sequence starts behind this prefix."""
        num_held = len(prefix) - prefix.count(NULL_PAGE)
        return min(self._pages_for(sequence.known_len) - len(prefix), self._max_pages_at_start - num_held)

    def _start(self, sequence: Sequence, prefix: list[int], now: float) -> None:
        self.waiting.remove(sequence)
        sequence.num_unseen = prefix.count(NULL_PAGE)
        for page in prefix[sequence.num_unseen :]:
            self.pool.share(page)
        sequence.page_ids = prefix + self.pool.allocate(self._num_new_pages(sequence, prefix))
        sequence.computed_len = len(prefix) * self.page_size
        sequence.num_published = len(prefix)
        sequence.slot = self._free_slots.pop()
        if sequence.scheduled_time is None:
            sequence.scheduled_time = now
            sequence.num_cached_tokens = min(sequence.computed_len, sequence.prompt_len)
        self.num_prefix_query_tokens += sequence.known_len
        self.num_prefix_hit_tokens += sequence.computed_len
        self.prefilling[sequence.sequence_id] = sequence
        self._admissions.append(
            Admission(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                request=sequence.request,
                seed=sequence.seed,
                computed_len=sequence.computed_len,
                generated_token_ids=tuple(sequence.token_ids[sequence.prompt_len :]),
                ending_token_ids=tuple(sorted(sequence.ending_token_ids)),
                page_ids=tuple(sequence.page_ids),
            )
        )

    def _chunk_budget(self) -> int:
        """Known tokens that the next step may compute in chunks; none if decodes have waited long enough."""
        budget = self.max_num_batched_tokens - (0 if self.is_exclusive else len(self.decoding))
        if self.decoding and self.max_prefill_tokens_per_decode is not None:
            budget = min(budget, self.max_prefill_tokens_per_decode - self._num_prefilled_since_decode)
        return budget

    def _cut_chunks(self) -> tuple[tuple[Sequence, ...], tuple[Chunk, ...]]:
        """The sequences that get a chunk, and their chunks."""
        if not self.prefilling:
            return (), ()
        budget = self._chunk_budget()
        chunked, chunks = [], []
        for sequence in sorted(self.prefilling.values(), key=lambda s: s.queue_key):
            if budget <= 0:
                break
            start, known_len = sequence.computed_len, sequence.known_len
            end = min(known_len, start + budget, len(sequence.page_ids) * self.page_size)
            budget -= end - start
            assert sequence.slot is not None
            wants_logprobs = sequence.wants_prompt_logprobs
            chunked.append(sequence)
            chunks.append(
                Chunk(
                    slot=sequence.slot,
                    sequence_id=sequence.sequence_id,
                    start=start,
                    token_ids=tuple(sequence.token_ids[start:end]),
                    samples=end == known_len < sequence.end_len,
                    num_prompt_logprobs=sequence.request.sampling.prompt_logprobs if wants_logprobs else None,
                    target_token_ids=tuple(sequence.token_ids[start + 1 : min(end + 1, sequence.prompt_len)])
                    if wants_logprobs
                    else (),
                    num_pooled=_num_pooled(sequence, start, end),
                )
            )
        return tuple(chunked), tuple(chunks)

    def _publish(self, sequence: Sequence, computed_len: int) -> None:
        """Make the full pages of the first computed_len tokens findable. Only now: a page is shareable once
        it is fully written, and a step under way may still be rolled back."""
        num_full = computed_len // self.page_size
        if num_full == sequence.num_published:
            return
        extend_hashes(sequence.page_hashes, sequence.root_hash, sequence.token_ids, self.page_size)
        for index in range(sequence.num_published, num_full):
            self.pool.publish(sequence.page_ids[index], sequence.page_hashes[index])
        sequence.num_published = num_full

    def _slide(self, sequence: Sequence, computed_len: int) -> None:
        """Give back the pages that no query behind the first computed_len tokens sees; a prefill that has not
        all its pages yet takes as many again."""
        num_unseen = self._num_unseen(computed_len)
        if num_unseen <= sequence.num_unseen or sequence.slot is None:
            return
        indices = range(sequence.num_unseen, num_unseen)
        num_available = self.pool.num_available
        self.pool.release([sequence.page_ids[index] for index in indices])
        for index in indices:
            sequence.page_ids[index] = NULL_PAGE
            self._page_edits.append(PageEdit(sequence.slot, index, NULL_PAGE))
        sequence.num_unseen = num_unseen
        num_missing = self._pages_for(sequence.known_len) - len(sequence.page_ids)
        # Pages that others share have not become available.
        num_gained = self.pool.num_available - num_available
        for page in self.pool.allocate(max(min(num_missing, num_gained), 0)):
            self._page_edits.append(PageEdit(sequence.slot, len(sequence.page_ids), page))
            sequence.page_ids.append(page)

    def _append(self, sequence: Sequence, token_id: int | None, logprobs: TokenLogprobs | None) -> None:
        if token_id is None:
            self._finish(sequence, FinishReason.ERROR)
            return
        sequence.token_ids.append(token_id)
        event = TokenEvent(sequence.request_id, sequence.index, token_id, logprobs=logprobs)
        if not sequence.reported_prompt:
            event.prompt = self._prompt_info(sequence)
        self._events.append(event)
        if token_id in sequence.ending_token_ids and (
            sequence.num_generated > sequence.request.sampling.min_tokens
        ):
            event.finish_reason = FinishReason.STOP
            if token_id in (sequence.request.sampling.stop_token_ids or ()):
                event.stop_reason = token_id
        elif len(sequence.token_ids) >= sequence.end_len:
            event.finish_reason = FinishReason.LENGTH
        else:
            return
        self._leave(sequence, event.finish_reason)

    def _prompt_info(self, sequence: Sequence) -> PromptInfo:
        sequence.reported_prompt = True
        assert sequence.scheduled_time is not None
        asked = sequence.request.sampling.prompt_logprobs is not None
        prompt_logprobs = (None, *sequence.prompt_logprobs) if asked else None
        return PromptInfo(
            sequence.scheduled_time, sequence.num_cached_tokens, prompt_logprobs, _pooled(sequence)
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence without a new token."""
        event = TokenEvent(sequence.request_id, sequence.index, None, finish_reason=reason)
        if not sequence.reported_prompt and sequence.scheduled_time is not None:
            event.prompt = self._prompt_info(sequence)
        self._events.append(event)
        self._leave(sequence, reason)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.slot is None and sequence.sequence_id not in self.finishing:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)
        sequence.finish_reason = reason

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its known tokens are recomputed later, its published pages may still be
        found."""
        self._release(sequence)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        sequence.pooled_sum = None
        sequence.computed_len = 0
        sequence.num_published = 0
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self.finishing.pop(sequence.sequence_id, None) is None:
            self._give_up_slot(sequence)
        self.pool.release(sequence.held_pages)
        sequence.page_ids = []
        sequence.num_unseen = 0

    def _give_up_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.prefilling.pop(sequence.sequence_id, None)
        if self.decoding.pop(sequence.sequence_id, None) is not None:
            self._decodes = None
        self._free_slots.append(sequence.slot)
        self._released_slots.append(sequence.slot)
        # What was planned for this slot and not sent yet no longer applies.
        if self._admissions:
            self._admissions = [a for a in self._admissions if a.slot != sequence.slot]
        if self._page_edits:
            self._page_edits = [edit for edit in self._page_edits if edit.slot != sequence.slot]
        sequence.slot = None


def _num_pooled(sequence: Sequence, start: int, end: int) -> int:
    """How many of the positions before `end`, from `start` on, are pooled."""
    match sequence.request.pooling:
        case "mean":
            return end - start
        case "last":
            return int(end == sequence.prompt_len)
    return 0


def _pooled(sequence: Sequence) -> bytes | None:
    if sequence.pooled_sum is None:
        return None
    count = sequence.prompt_len if sequence.request.pooling == "mean" else 1
    return (sequence.pooled_sum / np.float32(count)).tobytes()
