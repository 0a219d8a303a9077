"""Steps planned ahead of the tokens they depend on: nothing a client sees may tell that they were."""

from __future__ import annotations

import pytest

from tests.helpers.engines import FakeEngine
from tests.helpers.fake_model import VOCABULARY
from tiny_vllm.errors import EngineDead
from tiny_vllm.types import FinishReason, TokenEvent

AHEAD = [1, 2, 4]


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * position) % VOCABULARY for position in range(length)]


def num_computed(fake: FakeEngine) -> int:
    return sum(plan.num_tokens for plan in fake.executor.plans)


@pytest.mark.parametrize("ahead", AHEAD)
def test_events_come_so_many_steps_late_and_work_remains_until_then(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead)
    fake.add("a", prompt(5), max_tokens=ahead + 3)
    for _ in range(ahead):
        assert fake.step() == []
    assert len(fake.executor.plans) == ahead
    assert [event.token_id for event in fake.step()] == fake.expected("a", count=1)
    fake.run()
    fake.assert_correct("a")


def test_a_length_known_in_advance_costs_no_step_too_many() -> None:
    fake = FakeEngine(num_steps_ahead=1)
    fake.add("a", prompt(5), max_tokens=6)
    fake.add("b", prompt(3, start=9), max_tokens=0)
    fake.add("c", prompt(3, start=2), max_tokens=1)
    fake.run()
    for name in "abc":
        fake.assert_correct(name)
    assert num_computed(fake) == 5 + 3 + 3 + 5


def test_a_slot_whose_last_token_is_under_way_is_taken_in_the_very_next_step() -> None:
    fake = FakeEngine(num_steps_ahead=1, max_num_seqs=1)
    for name in "abc":
        fake.add(name, prompt(5, start=ord(name) % 40), max_tokens=2)
    fake.run()
    for name in "abc":
        fake.assert_correct(name)
    assert all(not plan.is_empty for plan in fake.executor.plans)
    assert len(fake.executor.plans) == 6


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_end_found_late_emits_no_token_too_many_and_shares_no_page_of_what_came_after(
    ahead: int, page_size: int
) -> None:
    fake = FakeEngine(
        num_steps_ahead=ahead,
        page_size=page_size,
        num_pages=2000 // page_size,
        eos_token_ids=tuple(range(10)),
    )
    for number in range(8):
        fake.add(str(number), prompt(9, start=number), max_tokens=60)
    fake.run()
    ended = 0
    for number in range(8):
        fake.assert_correct(str(number))
        ended += fake.outcomes[str(number), 0].finish_reason is FinishReason.STOP
    assert ended > 4
    # What ended is continued as a prompt: its pages are found, and the fake model reads every cell of them.
    for number in range(8):
        known = [*prompt(9, start=number), *fake.outcomes[str(number), 0].tokens]
        fake.add(f"{number} again", [*known, 11, 12, 13, 14, 15], max_tokens=5)
        fake.run()
        fake.assert_correct(f"{number} again")
        cached = fake.outcomes[f"{number} again", 0].num_cached_tokens
        assert cached == (len(known) - 1) // page_size * page_size


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_steps", range(10))
def test_abort_and_stop_while_steps_are_under_way(ahead: int, num_steps: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, max_num_batched_tokens=8, num_pages=14, max_num_seqs=3)
    fake.add("aborted", prompt(20), max_tokens=12)
    fake.add("stopped", prompt(6, start=3), max_tokens=5, n=2)
    fake.add("other", prompt(9, start=4), max_tokens=12)
    for _ in range(num_steps):
        fake.step()
    fake.engine.abort("aborted")
    fake.engine.stop("stopped", 1)
    usage = fake.engine.stats()
    fake.engine.scheduler.check()
    assert usage.num_used_pages <= usage.num_pages
    fake.run()
    fake.assert_correct("other")
    fake.assert_correct("stopped", 0)
    for key, reason in ((("aborted", 0), FinishReason.ABORT), (("stopped", 1), FinishReason.STOP)):
        outcome = fake.outcomes[key]
        assert outcome.finish_reason in (reason, FinishReason.LENGTH)
        assert outcome.tokens == fake.expected(*key, count=len(outcome.tokens))


def test_pages_of_an_aborted_sequence_are_free_at_once_although_steps_are_under_way() -> None:
    fake = FakeEngine(num_steps_ahead=2, enable_prefix_caching=False)
    fake.add("a", prompt(30), max_tokens=30)
    for _ in range(5):
        fake.step()
    fake.engine.abort("a")
    stats = fake.engine.stats()
    assert stats.num_used_pages == 0
    assert fake.engine.has_work
    fake.run()
    assert fake.step() == []


@pytest.mark.parametrize("ahead", AHEAD)
def test_preemption_waits_for_what_is_under_way_and_changes_no_token(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, num_pages=24, max_num_seqs=3)
    for name in "abc":
        fake.add(name, [*prompt(33), ord(name) % 50], max_tokens=35, n=2 if name == "b" else 1)
    fake.run()
    assert fake.engine.stats().num_preemptions > 0
    for key in (("a", 0), ("b", 0), ("b", 1), ("c", 0)):
        fake.assert_correct(*key)


@pytest.mark.parametrize("ahead", AHEAD)
def test_no_sequence_is_preempted_for_pages_that_an_unread_end_gives_back(ahead: int) -> None:
    """Both sequences need a page at the same step, and one is left; the first one's end is under way."""
    runs = []
    for num_steps_ahead in (0, ahead):
        fake = FakeEngine(num_steps_ahead=num_steps_ahead, num_pages=8, max_num_seqs=2)
        fake.add("ends", prompt(13), max_tokens=3)
        fake.add("grows", prompt(13, start=5), max_tokens=16)
        fake.run()
        fake.assert_correct("ends")
        fake.assert_correct("grows")
        runs.append(fake.engine.stats().num_preemptions)
    assert runs[0] == runs[1] == 0


@pytest.mark.parametrize("ahead", AHEAD)
def test_urgent_work_preempts_after_the_tokens_under_way_are_read(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, max_num_seqs=2)
    for name in ("low0", "low1"):
        fake.add(name, prompt(9, start=int(name[-1])), priority=5, max_tokens=40)
    for _ in range(5):
        fake.step()
    fake.add("urgent", prompt(12, start=3), priority=0, max_tokens=4)
    finished: list[str] = []
    while fake.engine.has_work:
        finished += [event.request_id for event in fake.step() if event.finish_reason]
    assert finished[0] == "urgent"
    assert fake.engine.stats().num_preemptions == 1
    # Recomputing a victim costs its known tokens but repeats no token that was already drawn.
    for name in ("low0", "low1", "urgent"):
        fake.assert_correct(name)


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_sequence_that_outgrows_the_pool_keeps_every_token_that_fits(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, num_pages=10, max_model_len=200)
    fake.add("growing", prompt(30), max_tokens=100)
    fake.run()
    outcome = fake.outcomes["growing", 0]
    assert outcome.finish_reason is FinishReason.LENGTH
    assert outcome.tokens == fake.expected("growing", count=40 - 30 + 1)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("broken_at", [10, 13])
def test_unusable_logits_end_a_request_late_but_without_a_token_of_theirs(ahead: int, broken_at: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead)
    fake.executor.broken["bad"] = broken_at
    fake.add("bad", prompt(10), max_tokens=20)
    fake.add("good", prompt(7, start=3), max_tokens=20)
    fake.run()
    outcome = fake.outcomes["bad", 0]
    assert outcome.finish_reason is FinishReason.ERROR
    assert outcome.tokens == fake.expected("bad", count=broken_at - 10)
    fake.assert_correct("good")


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_interruption_at_any_moment_loses_no_token_and_repeats_none(ahead: int, num_steps: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, max_num_batched_tokens=8)
    fake.add("a", prompt(14), max_tokens=6)
    fake.add("b", prompt(11, start=2), max_tokens=3)
    for _ in range(num_steps):
        fake.step()
    fake.add("c", prompt(5, start=4), max_tokens=5)
    for failure in ("failure", "late_failure"):
        setattr(fake.executor, failure, KeyboardInterrupt())
        raised = 0
        while fake.engine.has_work and not raised:
            try:
                fake.step()
            except KeyboardInterrupt:
                raised += 1
                fake.engine.scheduler.check()
        assert raised or failure == "late_failure"
    fake.executor.late_failure = None
    fake.run()
    for name in "abc":
        fake.assert_correct(name)


def test_an_interruption_while_reading_discards_nothing() -> None:
    fake = FakeEngine(num_steps_ahead=1)
    fake.add("a", prompt(10), max_tokens=8)
    fake.step()
    fake.executor.late_failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fake.step()
    fake.run()
    fake.assert_correct("a")
    assert fake.engine.stats().num_preemptions == 0
    assert num_computed(fake) == 10 + 7


def test_a_failure_that_shows_when_reading_ends_the_engine_with_a_clear_error() -> None:
    fake = FakeEngine(num_steps_ahead=1)
    fake.add("a", prompt(10))
    fake.step()
    fake.executor.late_failure = RuntimeError("illegal address")
    with pytest.raises(EngineDead, match="illegal address"):
        fake.step()
    assert not fake.engine.has_work
    with pytest.raises(EngineDead, match="the engine has stopped"):
        fake.step()


def test_memory_that_runs_out_in_a_step_ends_the_engine_with_what_to_lower() -> None:
    fake = FakeEngine(num_steps_ahead=1)
    fake.add("a", prompt(10))
    fake.step()
    fake.executor.late_failure = MemoryError("Unable to allocate 1.00 GiB")
    with pytest.raises(EngineDead, match="Unable to allocate") as error:
        fake.step()
    assert error.value.hint == "lower num_pages, max_num_batched_tokens or max_num_seqs, or free memory"


def test_steps_the_host_waits_for_anyway_are_read_at_once() -> None:
    fake = FakeEngine(num_steps_ahead=2)
    fake.executor.synchronous = True
    fake.add("a", prompt(5), max_tokens=4)
    lengths = [len(fake.step()) for _ in range(4)]
    assert lengths == [1, 1, 1, 1]
    assert not fake.engine.has_work


@pytest.mark.parametrize("ahead", AHEAD)
def test_simultaneous_requests_with_one_prefix_compute_it_once(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, max_num_batched_tokens=8)
    fake.add("a", prompt(32) + [1], max_tokens=5)
    fake.add("b", prompt(32) + [2], max_tokens=5)
    fake.add("n", prompt(32, start=9), max_tokens=4, n=3)
    fake.run()
    cached = {}
    for name, index in (("a", 0), ("b", 0), ("n", 0), ("n", 1), ("n", 2)):
        fake.assert_correct(name, index)
        cached[name, index] = fake.outcomes[name, index].num_cached_tokens
    assert (cached["a", 0], cached["b", 0]) == (0, 32)
    assert sorted(cached["n", index] or 0 for index in range(3)) == [0, 28, 28]


@pytest.mark.parametrize("ahead", AHEAD)
def test_decodes_of_one_composition_are_one_object(ahead: int) -> None:
    """What the device half keeps from step to step is recognised by identity."""
    fake = FakeEngine(num_steps_ahead=ahead, max_num_seqs=2)
    for name in "ab":
        fake.add(name, prompt(5, start=ord(name) % 40), max_tokens=12)
    fake.run()
    slots = [plan.decode_slots for plan in fake.executor.plans if len(plan.decode_slots) == 2]
    assert len(slots) > 5 and all(entry is slots[0] for entry in slots)


def test_one_terminal_event_each(ahead: int = 2) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, eos_token_ids=(1, 2, 3))
    for number in range(12):
        fake.add(str(number), prompt(4 + number, start=number), max_tokens=9, n=1 + number % 2)
    terminal: list[TokenEvent] = []
    while fake.engine.has_work:
        terminal += [event for event in fake.step() if event.finish_reason is not None]
    keys = [(event.request_id, event.index) for event in terminal]
    assert len(keys) == len(set(keys)) == 18


@pytest.mark.parametrize("ahead", [0, *AHEAD])
def test_a_release_that_was_interrupted_is_made_up_for(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead, max_num_seqs=2)
    fake.add("long", prompt(5), max_tokens=20)
    fake.add("short", prompt(4, start=3), max_tokens=2)
    while not (fake.executor.plans and fake.executor.plans[-1].decode_slots):
        fake.step()
    # The next plan says that the slot of the short one is free.
    fake.executor.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fake.step()
    fake.add("next", prompt(6, start=8), max_tokens=4)
    fake.add("last", prompt(6, start=11), max_tokens=4)
    fake.run()
    for name in ("long", "short", "next", "last"):
        fake.assert_correct(name)
