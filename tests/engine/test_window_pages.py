"""Pages that slid out of every layer's window go back to the pool, and nothing else changes."""

from __future__ import annotations

import random

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.engine.page_pool import NULL_PAGE, PagePool
from tiny_vllm.engine.prefix_cache import extend_hashes, find_prefix, root_hash
from tiny_vllm.errors import RequestError
from tiny_vllm.types import FinishReason

WINDOW = 10
PAGE_SIZE = 4


def used(fake: FakeEngine) -> int:
    return fake.engine.scheduler.pool.usage().num_used


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("prompt_len", [1, 9, 40, 120])
def test_a_long_sequence_holds_the_pages_of_its_window(prompt_len: int, num_steps_ahead: int) -> None:
    fake = FakeEngine(
        page_size=PAGE_SIZE, window=WINDOW, num_pages=40, max_num_batched_tokens=8, max_num_seqs=2,
        num_steps_ahead=num_steps_ahead,
    )  # fmt: skip
    fake.add("a", [number % 50 for number in range(prompt_len)], max_tokens=70)
    # The window, a page begun at either end, and what the steps under way write, eight tokens each.
    limit = 3 + 1 + max(2, num_steps_ahead + 1) * 8 // PAGE_SIZE
    while fake.engine.has_work:
        fake.step()
        assert used(fake) <= limit
        for row in fake.executor.slots.values():
            assert len(row.pages) - row.pages.count(NULL_PAGE) <= limit
    fake.assert_correct("a")


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("budget", [3, 64])
def test_a_sequence_outgrows_the_pool_without_ending(budget: int, num_steps_ahead: int) -> None:
    """Three pages of window and one to go on with suffice for any length."""
    fake = FakeEngine(
        page_size=PAGE_SIZE, window=WINDOW, num_pages=4, max_num_batched_tokens=budget, max_num_seqs=2,
        num_steps_ahead=num_steps_ahead,
    )  # fmt: skip
    fake.add("long prompt", [3] * 100, max_tokens=80)
    fake.run()
    fake.assert_correct("long prompt")
    assert fake.outcomes["long prompt", 0].finish_reason is FinishReason.LENGTH
    assert len(fake.outcomes["long prompt", 0].tokens) == 80


def test_a_pool_smaller_than_the_window_refuses_what_needs_more() -> None:
    fake = FakeEngine(page_size=PAGE_SIZE, window=WINDOW, num_pages=3)
    fake.add("fits", [3] * 12, max_tokens=0)
    with pytest.raises(RequestError, match="pages"):
        fake.add("does not", [3] * 13, max_tokens=1)
    fake.run()


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 3])
def test_preempted_sequences_longer_than_the_pool_are_recomputed(num_steps_ahead: int) -> None:
    fake = FakeEngine(
        page_size=PAGE_SIZE, window=WINDOW, num_pages=9, max_num_batched_tokens=7, max_num_seqs=3,
        num_steps_ahead=num_steps_ahead,
    )  # fmt: skip
    for number in range(3):
        fake.add(str(number), [number, 5, 6], max_tokens=90, ignore_eos=True)
    for _ in range(60):
        fake.step()
    fake.add("urgent", [7] * 30, priority=-1, max_tokens=20)
    fake.run()
    assert fake.engine.stats().num_preemptions > 0
    for name in fake.requests:
        fake.assert_correct(name)


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
def test_a_prefill_goes_on_though_others_hold_the_pages_it_gives_back(num_steps_ahead: int) -> None:
    """The second shares pages of the first, which has outrun its own by then."""
    fake = FakeEngine(
        page_size=PAGE_SIZE, window=WINDOW, num_pages=7, max_num_batched_tokens=4, max_num_seqs=3,
        num_steps_ahead=num_steps_ahead,
    )  # fmt: skip
    prompt = [number % 50 for number in range(120)]
    fake.add("long", prompt, max_tokens=4)
    for _ in range(8):
        fake.step()
    for number in range(2):
        fake.add(f"sharing {number}", prompt[:25], max_tokens=2)
    fake.run()
    for name in fake.requests:
        fake.assert_correct(name)


def test_a_prefix_whose_seen_pages_are_left_is_found() -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(None), list(range(24)), PAGE_SIZE)
    pool = PagePool(6)
    pages = pool.allocate(6)

    def unseen(num_pages: int) -> int:
        return max(num_pages * PAGE_SIZE - WINDOW + 1, 0) // PAGE_SIZE

    for index in (0, 1, 3, 4):
        pool.publish(pages[index], hashes[index])
    assert find_prefix(pool, hashes, lambda _: 0) == pages[:2]
    # Behind five pages a query sees three: the one that is missing among them ends the prefix before it.
    assert find_prefix(pool, hashes, unseen) == pages[:2]
    pool.publish(pages[5], hashes[5])
    assert find_prefix(pool, hashes, unseen) == [NULL_PAGE] * 3 + pages[3:]
    assert find_prefix(PagePool(1), hashes, unseen) == []


def test_the_end_of_a_long_conversation_is_shared_though_its_beginning_is_gone() -> None:
    fake = FakeEngine(page_size=PAGE_SIZE, window=WINDOW, num_pages=12, max_num_batched_tokens=8)
    prompt = [number % 50 for number in range(100)]
    fake.add("first", prompt, max_tokens=1)
    fake.run()
    assert fake.engine.scheduler.pool.usage().num_cached < 25
    fake.add("second", [*prompt, 4, 5], max_tokens=5)
    fake.run()
    assert fake.outcomes["second", 0].num_cached_tokens == 100
    fake.assert_correct("second")


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_windows_equals_solo_runs(seed: int, num_steps_ahead: int) -> None:
    rng = random.Random(seed)
    page_size, window = rng.choice([1, 4, 16]), rng.choice([1, 5, 16, 33])
    fake = FakeEngine(
        page_size=page_size,
        window=window,
        num_pages=-(-window // page_size) + rng.randrange(2, 60 // page_size + 3),
        max_num_batched_tokens=rng.randrange(6, 40),
        max_num_seqs=rng.randrange(1, 6),
        prefill_policy=rng.choice(["exclusive", "mixed"]),
        max_prefill_tokens_per_decode=rng.choice([None, 3, 20]),
        enable_prefix_caching=rng.random() < 0.7,
        eos_token_ids=(0,),
        ageing_seconds=0.05,
        num_steps_ahead=num_steps_ahead,
    )
    prefixes = [[rng.randrange(50) for _ in range(90)] for _ in range(3)]
    aborted: set[str] = set()
    for number in range(150):
        tail = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        fake.add(
            str(number),
            rng.choice(prefixes)[: rng.randrange(90)] + tail,
            n=rng.choice([1, 1, 2]),
            max_tokens=rng.randrange(0, 60),
            priority=rng.randrange(3),
            seed=rng.randrange(3),
        )
        while len(fake.engine.scheduler.waiting) > 5:
            fake.step()
        if rng.random() < 0.1:
            fake.executor.failure = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                while fake.engine.has_work:
                    fake.step()
                raise KeyboardInterrupt
            fake.executor.failure = None
        if rng.random() < 0.1:
            victim = str(rng.randrange(number + 1))
            aborted.add(victim)
            fake.engine.abort(victim)
    fake.run(20_000)
    for name, request in fake.requests.items():
        for index in range(request.sampling.n):
            if name not in aborted:
                fake.assert_correct(name, index)
