"""The free-list page pool: who holds which page, and which freed pages can still be found by content.

Every page is in exactly one of three states:

    free     never written, or its content was given up
    cached   no sequence holds it, but its content is known by hash and can be shared again
    in use   held by `reference_count` sequences

Allocation takes free pages first and then the least recently released cached page. Page 0 is the null page:
it pads page tables and is never handed out. Pages are plain integers; the K/V tensors live elsewhere.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_PAGE = 0

NULL, FREE, CACHED, USED, FOUND, SHARED = b"nfcuhs"
PAGE_STATES = {"n": "null", "f": "free", "c": "cached", "u": "used", "h": "used", "s": "shared"}
"""What the letters of `PagePool.states` stand for. h: used, after it had been found by its content."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Pages by state. `num_shared` counts the pages in use by more than one sequence."""

    num_pages: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int


class PagePool:
    """Pages 1 to num_pages. All methods are O(1) per page they are given."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Popping from the end hands out low page numbers first.
        self._free = list(range(num_pages, NULL_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reference_counts = [0] * (num_pages + 1)
        self._states = bytearray([NULL, *[FREE] * num_pages])
        self._num_shared = 0
        self._hash_of_page: dict[int, bytes] = {}
        self._page_of_hash: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each held once. The caller has checked `num_available`."""
        assert count <= self.num_available, "allocate without checking num_available"
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of_hash[self._hash_of_page.pop(page)]
            self._reference_counts[page] = 1
            self._states[page] = USED
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Hold a page that `find` returned once more."""
        count = self._reference_counts[page]
        if count == 0:
            del self._cached[page]
        elif count == 1:
            self._num_shared += 1
        self._reference_counts[page] = count + 1
        self._states[page] = SHARED if count else FOUND

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page of a sequence.

        The last page goes first, so that of one prefix the tail is forgotten before the head.
        """
        for page in reversed(pages):
            count = self._reference_counts[page] - 1
            assert count >= 0, f"page {page} released more often than held"
            self._reference_counts[page] = count
            if count == 1:
                self._num_shared -= 1
                self._states[page] = USED
            elif count == 0 and page in self._hash_of_page:
                self._cached[page] = None
                self._states[page] = CACHED
            elif count == 0:
                self._free.append(page)
                self._states[page] = FREE

    def publish(self, page: int, content_hash: bytes) -> None:
        """Make a fully written page findable. Of two pages with equal content the first stays findable."""
        if content_hash not in self._page_of_hash and page not in self._hash_of_page:
            self._page_of_hash[content_hash] = page
            self._hash_of_page[page] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """The page with this content, in use or cached."""
        return self._page_of_hash.get(content_hash)

    def is_cached(self, page: int) -> bool:
        """Whether sharing this page would make one page fewer available."""
        return page in self._cached

    def forget_cached(self) -> None:
        """Give up the content of every cached page."""
        for page in self._cached:
            del self._page_of_hash[self._hash_of_page.pop(page)]
            self._free.append(page)
            self._states[page] = FREE
        self._cached.clear()

    def usage(self) -> PoolUsage:
        """The pages in each state, in O(1)."""
        used = self.num_pages - self.num_available
        return PoolUsage(self.num_pages, len(self._free), len(self._cached), used, self._num_shared)

    def states(self) -> str:
        """A letter per page by number, see PAGE_STATES; a copy of a byte per page."""
        return self._states.decode("ascii")

    def check(self, page_tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariant: every page in one state, reference counts equal to the page tables given."""
        held = Counter(page for table in page_tables for page in table)
        free, cached = set(self._free), set(self._cached)
        used = {page for page in range(1, self.num_pages + 1) if self._reference_counts[page] > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert NULL_PAGE not in free | cached | set(held), "the null page was handed out"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert len(free) + len(cached) + len(used) == self.num_pages, "a page was lost"
        for page in range(1, self.num_pages + 1):
            assert self._reference_counts[page] == held[page], f"page {page}: count differs from page tables"
            not_held = FREE if page in free else CACHED
            states = ((not_held,), (USED, FOUND), (SHARED,))[min(held[page], 2)]
            assert self._states[page] in states, f"page {page}: wrong state"
        assert self._num_shared == sum(count > 1 for count in held.values()), "shared pages miscounted"
        assert {page: key for key, page in self._page_of_hash.items()} == self._hash_of_page
        assert cached <= set(self._hash_of_page), "a cached page has no hash"
        assert not free & set(self._hash_of_page), "a free page has a hash"
