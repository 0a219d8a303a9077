"""Decides what every step computes: admission, page growth, preemption, chunking; and records what came back.

`schedule` turns the state into a `StepPlan`; `commit` applies its result and says what each sequence got.
Both are plain Python on plain data, without torch.

Rules, in the order they are applied in a step:
1. Every decoding sequence gets the page for its next token. If the pool is empty, the sequence that would
   come last in the queue is preempted: it gives up slot and pages and waits again. A sequence that is alone
   and still finds no page has outgrown the pool and ends with reason `length`.
2. Waiting sequences are admitted in queue order while there is a slot, pages for all known tokens, and token
   budget. A more urgent sequence that finds no room preempts less urgent ones. A sequence whose next prefix
   page is being computed by another one at this moment is passed over until it can share that page.
3. Chunks of known tokens fill the token budget, in queue order. `mixed` runs them beside all decodes;
   `exclusive` runs them alone.
"""

from __future__ import annotations

from tiny_vllm.engine.page_pool import PagePool
from tiny_vllm.engine.plan import Admission, Chunk, PageEdit, StepPlan, StepResult
from tiny_vllm.engine.prefix_cache import extend_hashes, find_prefix
from tiny_vllm.engine.sequence import Sequence
from tiny_vllm.engine.waiting import WaitingQueue
from tiny_vllm.types import FinishReason, PromptInfo, TokenEvent, TokenLogprobs


class Scheduler:
    """Owns the sequences, the slots and the page pool.

    max_num_batched_tokens: most tokens in a step; at least num_slots, so that no decode is ever left out.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_num_batched_tokens: int,
        prefill_policy: str,
    ) -> None:
        assert max_num_batched_tokens >= num_slots
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_exclusive = prefill_policy == "exclusive"
        self.waiting = WaitingQueue()
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._step = 0
        self._released_slots: list[int] = []
        self._admissions: list[Admission] = []
        self._page_edits: list[PageEdit] = []
        self._events: list[TokenEvent] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding or self._events)

    def running(self) -> list[Sequence]:
        """Sequences in slots, most urgent first."""
        return sorted([*self.prefilling.values(), *self.decoding.values()], key=lambda s: s.queue_key)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this many known tokens could run if it were alone."""
        return self._pages_for(num_tokens) <= self.pool.num_pages

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step; empty when nothing can run. now: seconds on the engine's clock."""
        self._grow_decodes()
        self._admit(now)
        chunks = self._cut_chunks()
        decodes = [] if self.is_exclusive and chunks else list(self.decoding.values())
        self._step += 1
        plan = StepPlan(
            step=self._step,
            released_slots=tuple(self._released_slots),
            admissions=tuple(self._admissions),
            page_edits=tuple(self._page_edits),
            decode_slots=[sequence.slot for sequence in decodes if sequence.slot is not None],
            decode_sequence_ids=[sequence.sequence_id for sequence in decodes],
            chunks=chunks,
        )
        if not plan.is_empty:  # an empty plan is not executed, so what it says must be said again
            self._released_slots.clear()
            self._admissions.clear()
            self._page_edits.clear()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Record what a step computed: lengths, new tokens, finished sequences, shareable pages."""
        tokens = iter(result.token_ids)
        logprobs = iter(result.logprobs or [None] * len(result.token_ids))
        for sequence_id in plan.decode_sequence_ids:
            sequence = self.decoding[sequence_id]
            sequence.computed_len += 1
            if sequence.computed_len % self.page_size == 0:
                self._publish(sequence)
            self._append(sequence, next(tokens), next(logprobs))
        for position, chunk in enumerate(plan.chunks):
            sequence = self.prefilling[chunk.sequence_id]
            sequence.computed_len += len(chunk.token_ids)
            sequence.prompt_logprobs.extend(result.prompt_logprobs.get(position, ()))
            self._publish(sequence)
            if chunk.samples:
                del self.prefilling[chunk.sequence_id]
                self.decoding[chunk.sequence_id] = sequence
                self._append(sequence, next(tokens), next(logprobs))
            elif sequence.computed_len >= sequence.end_len:
                self._finish(sequence, FinishReason.LENGTH)

    def take_events(self) -> list[TokenEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stop(self, sequence: Sequence, reason: FinishReason) -> None:
        """End an unfinished sequence from outside, in whatever state it is."""
        self._finish(sequence, reason)

    def roll_back(self, plan: StepPlan) -> None:
        """Take back a plan that was not (or only partly) executed: every running sequence starts over from
        its known tokens. Whatever the plan would have released is released by the next one."""
        self._released_slots.extend(plan.released_slots)
        for sequence in self.running():
            self._preempt(sequence)

    def check(self) -> None:
        """Assert that pages and slots are accounted for."""
        running = self.running()
        self.pool.check(sequence.page_ids for sequence in running)
        slots = [sequence.slot for sequence in running]
        assert len(set(slots)) == len(slots) and not set(slots) & set(self._free_slots)
        assert all(sequence.slot is None and not sequence.page_ids for sequence in self.waiting)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _grow_decodes(self) -> None:
        page_size = self.page_size
        growing = [s for s in self.decoding.values() if s.computed_len >= len(s.page_ids) * page_size]
        for sequence in sorted(growing, key=lambda s: s.queue_key):
            while sequence.slot is not None and not self.pool.num_available:
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
        budget = self.max_num_batched_tokens - (0 if self.is_exclusive else len(self.decoding))
        budget -= sum(s.known_len - s.computed_len for s in self.prefilling.values())
        pending = self._pending_hashes()
        for sequence in self.waiting:
            if budget <= 0:
                return
            if not self.can_ever_fit(sequence.known_len):
                self._finish(sequence, FinishReason.LENGTH)
                continue
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
        """Hashes of the pages that running sequences are about to write."""
        return {
            content_hash
            for sequence in self.prefilling.values()
            for content_hash in sequence.page_hashes[sequence.num_published :]
        }

    def _can_share(self, sequence: Sequence, page_index: int) -> bool:
        """Whether the sequence could use page `page_index` from the cache: its last token is always
        computed."""
        return not sequence.wants_prompt_logprobs and page_index < (sequence.known_len - 1) // self.page_size

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        extend_hashes(sequence.page_hashes, sequence.root_hash, sequence.token_ids, self.page_size)
        if sequence.wants_prompt_logprobs:
            return []
        return find_prefix(self.pool, sequence.page_hashes[: (sequence.known_len - 1) // self.page_size])

    def _make_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether the sequence can start now, after preempting less urgent ones where that suffices."""
        if self._has_room(sequence, prefix):
            return True
        victims = [
            victim
            for victim in reversed(self.running())
            if victim.request.priority > sequence.request.priority and victim.queue_key > sequence.queue_key
        ]
        needed = self._pages_for(sequence.known_len)
        if not victims or needed > self.pool.num_available + sum(len(v.page_ids) for v in victims):
            return False
        for victim in victims:
            self._preempt(victim)
            if self._has_room(sequence, prefix):
                return True
        return False

    def _has_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        if not self._free_slots:
            return False
        needed = self._pages_for(sequence.known_len) - len(prefix)
        needed += sum(self.pool.is_cached(page) for page in prefix)
        # Every running sequence must still be able to grow by a page, or it would be preempted right away.
        return needed + self.num_running <= self.pool.num_available

    def _start(self, sequence: Sequence, prefix: list[int], now: float) -> None:
        self.waiting.remove(sequence)
        for page in prefix:
            self.pool.share(page)
        sequence.page_ids = prefix + self.pool.allocate(self._pages_for(sequence.known_len) - len(prefix))
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

    def _cut_chunks(self) -> tuple[Chunk, ...]:
        budget = self.max_num_batched_tokens - (0 if self.is_exclusive else len(self.decoding))
        chunks = []
        for sequence in sorted(self.prefilling.values(), key=lambda s: s.queue_key):
            if budget <= 0:
                break
            start, known_len = sequence.computed_len, sequence.known_len
            end = min(known_len, start + budget)
            budget -= end - start
            assert sequence.slot is not None
            wants_logprobs = sequence.wants_prompt_logprobs
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
                )
            )
        return tuple(chunks)

    def _publish(self, sequence: Sequence) -> None:
        """Make the pages written so far findable. Only now: a page is shareable once it is fully written."""
        num_full = sequence.computed_len // self.page_size
        if num_full == sequence.num_published:
            return
        extend_hashes(sequence.page_hashes, sequence.root_hash, sequence.token_ids, self.page_size)
        for index in range(sequence.num_published, num_full):
            self.pool.publish(sequence.page_ids[index], sequence.page_hashes[index])
        sequence.num_published = num_full

    def _append(self, sequence: Sequence, token_id: int | None, logprobs: TokenLogprobs | None) -> None:
        if token_id is None:
            self._finish(sequence, FinishReason.ERROR)
            return
        sequence.token_ids.append(token_id)
        event = TokenEvent(sequence.request.request_id, sequence.index, token_id, logprobs=logprobs)
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
        return PromptInfo(sequence.scheduled_time, sequence.num_cached_tokens, prompt_logprobs)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence without a new token."""
        event = TokenEvent(sequence.request.request_id, sequence.index, None, finish_reason=reason)
        if not sequence.reported_prompt and sequence.scheduled_time is not None:
            event.prompt = self._prompt_info(sequence)
        self._events.append(event)
        self._leave(sequence, reason)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.slot is None:
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
        sequence.computed_len = 0
        sequence.num_published = 0
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.prefilling.pop(sequence.sequence_id, None)
        self.decoding.pop(sequence.sequence_id, None)
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        self._free_slots.append(sequence.slot)
        self._released_slots.append(sequence.slot)
        # What was planned for this slot and not sent yet no longer applies.
        self._admissions = [a for a in self._admissions if a.slot != sequence.slot]
        self._page_edits = [edit for edit in self._page_edits if edit.slot != sequence.slot]
        sequence.slot = None
