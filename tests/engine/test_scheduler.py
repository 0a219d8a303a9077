from __future__ import annotations

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.types import FinishReason


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * position) % 50 for position in range(length)]


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_lengths_at_page_edges_sent_three_times_equal_the_solo_run(
    policy: str, page_size: int, budget: int
) -> None:
    fake = FakeEngine(
        page_size=page_size, num_pages=400 // page_size, prefill_policy=policy, max_num_batched_tokens=budget
    )
    lengths = sorted({max(1, n) for n in (page_size - 1, page_size, page_size + 1, 2 * page_size)})
    for length in lengths:
        for repeat in range(3):
            name = f"{length}/{repeat}"
            fake.add(name, prompt(length), max_tokens=page_size + 2)
            fake.run()
            fake.assert_correct(name)
            if repeat:
                # The last token is always computed, whatever the cache holds.
                assert fake.outcomes[name, 0].num_cached_tokens == (length - 1) // page_size * page_size


def test_a_prefix_shared_inside_one_batch_is_computed_once() -> None:
    fake = FakeEngine(max_num_batched_tokens=8)
    fake.add("a", prompt(32) + [1], max_tokens=5)
    fake.add("b", prompt(32) + [2], max_tokens=5)
    fake.run()
    fake.assert_correct("a")
    fake.assert_correct("b")
    assert fake.outcomes["a", 0].num_cached_tokens == 0
    assert fake.outcomes["b", 0].num_cached_tokens == 32


def test_a_page_is_not_shared_before_it_is_written() -> None:
    fake = FakeEngine(max_num_batched_tokens=8)
    fake.add("a", prompt(16) + [1], max_tokens=1)
    fake.step()
    fake.add("b", prompt(16) + [2], max_tokens=1)
    plan_before = len(fake.executor.plans)
    fake.step()
    assert [c.start for c in fake.executor.plans[plan_before].chunks] == [8], "b must wait for a's pages"
    fake.run()
    fake.assert_correct("b")


def test_a_prompt_is_not_copied_before_its_turn() -> None:
    fake = FakeEngine(max_num_batched_tokens=8)
    fake.add("a", prompt(16), max_tokens=2)
    fake.add("b", prompt(12, start=2), max_tokens=2)
    fake.step()
    (waiting,) = fake.engine.scheduler.waiting
    assert (waiting.token_ids, waiting.known_len, waiting.num_generated) == ([], 12, 0)
    fake.run()
    fake.assert_correct("b")


def test_choices_share_the_prompt_even_without_prefix_caching() -> None:
    fake = FakeEngine(enable_prefix_caching=False)
    fake.add("a", prompt(17), n=3, max_tokens=6)
    fake.step()
    fake.step()
    assert fake.engine.stats().num_shared_pages == 4
    fake.run()
    outcomes = [fake.outcomes["a", index].tokens for index in range(3)]
    for index in range(3):
        fake.assert_correct("a", index)
    assert len({tuple(tokens) for tokens in outcomes}) == 3, "choices must differ from one another"
    fake.add("again", prompt(17), max_tokens=2)
    fake.run()
    assert fake.outcomes["again", 0].num_cached_tokens == 0


def test_salts_keep_tenants_apart() -> None:
    fake = FakeEngine()
    for name, salt in (("a", None), ("b", "tenant"), ("c", "tenant"), ("d", "other")):
        fake.add(name, prompt(17), cache_salt=salt, max_tokens=2)
        fake.run()
    hits = [fake.outcomes[name, 0].num_cached_tokens for name in "abcd"]
    assert hits == [0, 0, 16, 0]


def test_preemption_while_a_prefix_is_shared_gives_the_same_tokens() -> None:
    # 34 prompt tokens and 35 new ones each, a common prefix, and a pool that cannot hold all of them.
    fake = FakeEngine(num_pages=24, max_num_seqs=3)
    for name in "abc":
        fake.add(name, [*prompt(33), ord(name) % 50], max_tokens=35, n=2 if name == "b" else 1)
    fake.run()
    assert fake.engine.stats().num_preemptions > 0
    for name in "ac":
        fake.assert_correct(name)
    fake.assert_correct("b", 0)
    fake.assert_correct("b", 1)


def test_a_prompt_that_can_never_fit_is_refused_and_others_run() -> None:
    fake = FakeEngine(num_pages=10, max_model_len=200)
    with pytest.raises(ValueError, match=r"41 tokens.*holds 40"):
        fake.add("big", prompt(41))
    fake.add("good", prompt(8), max_tokens=3)
    fake.run()
    fake.assert_correct("good")


def test_a_request_that_outgrows_the_pool_ends_with_length_and_blocks_nobody() -> None:
    fake = FakeEngine(num_pages=10, max_model_len=200)
    fake.add("growing", prompt(30), max_tokens=100)
    for number in range(4):
        fake.add(f"good{number}", prompt(6, start=number + 2), max_tokens=4)
    fake.run()
    for number in range(4):
        fake.assert_correct(f"good{number}")
    outcome = fake.outcomes["growing", 0]
    assert outcome.finish_reason is FinishReason.LENGTH
    assert outcome.tokens == fake.expected("growing", count=len(outcome.tokens))
    # The pool holds 40 tokens; the last one generated needs no cell.
    assert len(outcome.tokens) == 40 - 30 + 1


def test_urgent_work_goes_first_and_the_victim_resumes_with_the_same_tokens() -> None:
    fake = FakeEngine(max_num_seqs=2)
    for name in ("low0", "low1"):
        fake.add(name, prompt(9, start=len(name)), priority=5, max_tokens=40)
    for _ in range(5):
        fake.step()
    fake.add("urgent", prompt(12, start=3), priority=0, max_tokens=4)
    finished: list[str] = []
    while fake.engine.has_work:
        finished += [event.request_id for event in fake.step() if event.finish_reason]
    assert finished[0] == "urgent"
    assert fake.engine.stats().num_preemptions == 1
    for name in ("low0", "low1", "urgent"):
        fake.assert_correct(name)


def test_equal_priorities_run_by_arrival_and_never_preempt_each_other() -> None:
    fake = FakeEngine(max_num_seqs=1)
    for name in "abcd":
        fake.add(name, prompt(5), max_tokens=3)
    finished: list[str] = []
    while fake.engine.has_work:
        finished += [event.request_id for event in fake.step() if event.finish_reason]
    assert finished == list("abcd")
    assert fake.engine.stats().num_preemptions == 0


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_ageing_bounds_the_wait_under_an_endless_stream_of_urgent_work(policy: str) -> None:
    fake = FakeEngine(max_num_seqs=1, ageing_seconds=1.0, prefill_policy=policy)
    fake.add("patient", prompt(5), priority=3, max_tokens=3)
    number = 0
    while fake.outcomes["patient", 0].finish_reason is None:
        if len(fake.engine.scheduler.waiting) < 3:
            fake.add(f"urgent{number}", prompt(5, start=number % 40), priority=0, max_tokens=3)
            number += 1
        fake.step()
        assert fake.clock() < 3.5, "waited longer than three levels of priority are worth"
    assert fake.clock() > 2.5, "urgent work should have gone first for that long"


def test_mixed_policy_never_leaves_out_a_running_decode() -> None:
    fake = FakeEngine(max_num_batched_tokens=8, prefill_policy="mixed")
    fake.add("running", prompt(4), max_tokens=30)
    fake.step()
    fake.add("long", prompt(100, start=5), max_tokens=2)
    for _ in range(14):
        before = len(fake.outcomes["running", 0].tokens)
        fake.step()
        assert len(fake.outcomes["running", 0].tokens) == before + 1
        assert fake.executor.plans[-1].num_tokens <= 8
    fake.run()
    fake.assert_correct("running")
    fake.assert_correct("long")


def test_exclusive_policy_computes_prompts_alone() -> None:
    fake = FakeEngine(max_num_batched_tokens=8, prefill_policy="exclusive")
    fake.add("running", prompt(4), max_tokens=10)
    fake.step()
    fake.add("long", prompt(40, start=5), max_tokens=2)
    fake.run()
    assert not any(plan.chunks and plan.decode_slots for plan in fake.executor.plans)
    fake.assert_correct("running")
    fake.assert_correct("long")


def test_max_tokens_zero_evaluates_the_prompt_and_generates_nothing() -> None:
    fake = FakeEngine()
    fake.add("score", prompt(17), max_tokens=0)
    fake.run()
    outcome = fake.outcomes["score", 0]
    assert (outcome.tokens, outcome.finish_reason, outcome.num_cached_tokens) == ([], FinishReason.LENGTH, 0)
    fake.add("after", prompt(17), max_tokens=2)
    fake.run()
    assert fake.outcomes["after", 0].num_cached_tokens == 16


def test_output_stops_at_the_context_limit() -> None:
    fake = FakeEngine(max_model_len=20)
    fake.add("a", prompt(19), max_tokens=None)
    fake.add("b", prompt(12), max_tokens=1000)
    fake.run()
    assert len(fake.outcomes["a", 0].tokens) == 1
    assert len(fake.outcomes["b", 0].tokens) == 8
    assert fake.outcomes["b", 0].finish_reason is FinishReason.LENGTH
    for length in (20, 21, 200):
        with pytest.raises(ValueError, match=f"{length} tokens.*20.*19"):
            fake.add(f"too long {length}", prompt(length))


@pytest.mark.parametrize("num_steps", range(12))
def test_abort_at_any_moment_gives_one_terminal_event_and_returns_the_pages(num_steps: int) -> None:
    fake = FakeEngine(max_num_batched_tokens=8, num_pages=12, max_num_seqs=2)
    fake.add("victim", prompt(20), max_tokens=12, n=2)
    fake.add("other", prompt(9, start=4), max_tokens=12)
    for _ in range(num_steps):
        fake.step()
    fake.engine.abort("victim")
    fake.engine.abort("victim")
    fake.run()
    fake.assert_correct("other")
    for index in range(2):
        outcome = fake.outcomes["victim", index]
        assert outcome.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert outcome.tokens == fake.expected("victim", index, count=len(outcome.tokens))


def test_a_short_choice_does_not_cut_the_others() -> None:
    fake = FakeEngine(eos_token_ids=tuple(range(8)))
    fake.add("a", prompt(10), n=6, max_tokens=30)
    fake.run()
    lengths = set()
    for index in range(6):
        fake.assert_correct("a", index)
        lengths.add(len(fake.outcomes["a", index].tokens))
    assert len(lengths) > 1


def test_min_tokens_delays_the_end_of_sequence() -> None:
    fake = FakeEngine(eos_token_ids=tuple(range(50)))
    fake.add("a", prompt(10), min_tokens=5, max_tokens=30)
    fake.run()
    assert len(fake.outcomes["a", 0].tokens) == 6


def test_stopping_from_outside_ends_one_choice_only() -> None:
    fake = FakeEngine()
    fake.add("a", prompt(10), n=2, max_tokens=10)
    for _ in range(4):
        fake.step()
    fake.engine.stop("a", 1)
    fake.run()
    assert fake.outcomes["a", 1].finish_reason is FinishReason.STOP
    fake.assert_correct("a", 0)


def test_an_interrupted_step_loses_nothing() -> None:
    fake = FakeEngine()
    fake.add("a", prompt(10), max_tokens=10)
    fake.step()
    fake.add("b", prompt(11), max_tokens=10)
    fake.executor.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fake.step()
    fake.run()
    fake.assert_correct("a")
    fake.assert_correct("b")


def test_a_failed_step_ends_the_engine_with_a_clear_error() -> None:
    fake = FakeEngine()
    fake.add("a", prompt(10))
    fake.executor.failure = RuntimeError("out of memory")
    with pytest.raises(Exception, match="out of memory"):
        fake.step()
    with pytest.raises(Exception, match="the engine has stopped"):
        fake.add("b", prompt(3))
    assert not fake.engine.has_work


def test_queue_limit_refuses_with_capacity_error_and_queues_nothing() -> None:
    fake = FakeEngine(max_queue_len=2, max_num_seqs=1)
    for name in "abc":  # one for the slot, two for the queue
        fake.add(name, prompt(3))
    with pytest.raises(ValueError, match="max_queue_len"):
        fake.add("d", prompt(3), n=1)
    fake.run()
    for name in "abc":
        fake.assert_correct(name)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    fake = FakeEngine()
    fake.add("a", prompt(3), max_tokens=2)
    with pytest.raises(ValueError, match="already in use"):
        fake.add("a", prompt(4))
    fake.run()
    fake.assert_correct("a")
    fake.engine.add(fake.requests["a"])


def test_pages_of_evicted_prefixes_are_reused_least_recently_used_first() -> None:
    fake = FakeEngine(num_pages=12, max_num_seqs=1)
    for name, start in (("old", 1), ("new", 2)):
        fake.add(name, prompt(17, start), max_tokens=1)
        fake.run()
    fake.add("filler", prompt(24, start=3), max_tokens=1)
    fake.run()
    fake.add("new again", prompt(17, 2), max_tokens=1)
    fake.run()
    assert fake.outcomes["new again", 0].num_cached_tokens == 16
    fake.add("old again", prompt(17, 1), max_tokens=1)
    fake.run()
    assert fake.outcomes["old again", 0].num_cached_tokens < 16


def prefilled_between_tokens(fake: FakeEngine, first_plan: int) -> list[int]:
    """Prompt tokens computed in each stretch between two steps with decodes, those beside the second
    included."""
    counts, count = [], 0
    for plan in fake.executor.plans[first_plan:]:
        count += sum(len(chunk.token_ids) for chunk in plan.chunks)
        if plan.decode_slots:
            counts.append(count)
            count = 0
    return counts


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("limit", [1, 10, 16, 40, None])
def test_prompts_delay_decodes_by_no_more_than_the_limit(policy: str, ahead: int, limit: int | None) -> None:
    fake = FakeEngine(
        max_num_batched_tokens=16,
        prefill_policy=policy,
        num_steps_ahead=ahead,
        max_prefill_tokens_per_decode=limit,
    )
    fake.add("running", prompt(5), max_tokens=170)
    fake.step()
    fake.step()
    first_plan = len(fake.executor.plans)
    for name in "ab":
        fake.add(name, prompt(60, start=ord(name)), max_tokens=3)
    fake.run()
    counts = prefilled_between_tokens(fake, first_plan)
    assert sum(counts) == 120
    if limit is not None:
        assert max(counts) == min(limit, 120 if policy == "exclusive" else 15)
    elif policy == "exclusive":
        # a and b first share a stretch with no token in between: nothing bounds it.
        assert max(counts) == 120
    for name in ("running", "a", "b"):
        fake.assert_correct(name)


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_the_limit_leaves_prompts_alone_while_nobody_decodes(policy: str) -> None:
    fake = FakeEngine(max_num_batched_tokens=16, prefill_policy=policy, max_prefill_tokens_per_decode=1)
    fake.add("a", prompt(48), max_tokens=2)
    for _ in range(3):
        fake.step()
    assert [len(chunk.token_ids) for plan in fake.executor.plans for chunk in plan.chunks] == [16] * 3
    fake.run()
    fake.assert_correct("a")


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_an_urgent_prompt_does_not_wait_until_a_long_one_is_computed(policy: str, ahead: int) -> None:
    fake = FakeEngine(max_num_batched_tokens=8, prefill_policy=policy, num_steps_ahead=ahead)
    fake.add("long", prompt(150), max_tokens=2)
    fake.step()
    fake.add("normal", prompt(6, start=3), max_tokens=1)
    fake.add("urgent", prompt(6, start=2), max_tokens=1, priority=-1)
    for _ in range(1 + ahead):
        fake.step()
    fake.assert_correct("urgent")
    assert not fake.outcomes["normal", 0].tokens, "equal priorities keep their order"
    fake.run()
    for name in ("long", "normal"):
        fake.assert_correct(name)
