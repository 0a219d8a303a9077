"""The page pool's counts and states, kept as pages change hands; random engines check the rest."""

from __future__ import annotations

import random

from tiny_vllm.engine.page_pool import PAGE_STATES, PagePool


def test_a_page_goes_through_its_states() -> None:
    pool = PagePool(3)
    assert pool.states() == "nfff"
    pages = pool.allocate(2)
    assert pages == [1, 2] and pool.states() == "nuuf"
    pool.publish(1, b"one")
    pool.share(1)
    assert pool.states() == "nsuf" and pool.usage().num_shared == 1
    pool.release([1, 2])
    assert pool.states() == "nuff" and pool.usage().num_shared == 0
    pool.release([1])
    assert pool.states() == "ncff" and pool.is_cached(1)
    pool.share(1)
    assert pool.states() == "nhff", "found by its content, not written by who holds it"
    pool.check([[1]])
    pool.release([1])
    pool.forget_cached()
    assert pool.states() == "nfff" and pool.find(b"one") is None
    pool.check([])
    assert set(pool.states()) <= set(PAGE_STATES)


def test_the_least_recently_released_cached_page_is_taken_when_none_is_free() -> None:
    pool = PagePool(2)
    pool.allocate(2)
    pool.publish(1, b"one")
    pool.publish(2, b"two")
    pool.release([2])
    pool.release([1])
    assert pool.allocate(1) == [2] and pool.find(b"two") is None and pool.find(b"one") == 1
    assert pool.states() == "ncu"


def test_counts_follow_random_use() -> None:
    rng = random.Random(3)
    pool = PagePool(40)
    held: list[list[int]] = []
    for step in range(3000):
        if rng.random() < 0.5 and pool.num_available >= 5:
            table = []
            for _ in range(rng.randint(0, 2)):
                known = pool.find(bytes([rng.randrange(60)]))
                if known is not None and (not pool.is_cached(known) or pool.num_available > 5):
                    pool.share(known)
                    table.append(known)
            table += pool.allocate(min(rng.randint(1, 3), pool.num_available))
            pool.publish(table[-1], bytes([rng.randrange(60)]))
            held.append(table)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        if step % 100 == 0:
            pool.check(held)
    usage = pool.usage()
    letters = pool.states()
    assert (usage.num_free, usage.num_cached, usage.num_shared) == tuple(map(letters.count, "fcs"))
    assert usage.num_used == sum(map(letters.count, "uhs"))
