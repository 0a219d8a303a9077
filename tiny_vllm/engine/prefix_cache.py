"""Content hashes of pages: equal hash, equal keys and values.

The K/V of a page depends on its own tokens and on all tokens before it, so hashes are chained: the hash of a
page covers the hash of the page before it. The root covers the salt. SHA-256 makes a collision infeasible
even for someone who chooses the prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from tiny_vllm.engine.page_pool import NULL_PAGE, PagePool


def root_hash(salt: str | None) -> bytes:
    """The start of a chain. Sequences share pages only if their salts are equal."""
    return sha256(b"shared" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], page_size: int) -> None:
    """Append the hashes of the full pages of `token_ids` that `hashes` does not cover yet."""
    first, end = len(hashes), len(token_ids) // page_size
    if first >= end:
        return
    # One conversion for all pages: made page by page it costs as much as the hash.
    content = array("q", token_ids[first * page_size : end * page_size]).tobytes()
    num_bytes = page_size * 8
    latest = hashes[-1] if hashes else root
    for start in range(0, len(content), num_bytes):
        latest = sha256(latest + content[start : start + num_bytes]).digest()
        hashes.append(latest)


def find_prefix(pool: PagePool, hashes: Sequence[bytes], num_unseen: Callable[[int], int]) -> list[int]:
    """Pages of the longest findable prefix, in order.

    num_unseen: of a prefix of so many pages, how many leading ones no query behind it sees. They need not be
    findable, and the null page stands for each.
    """
    num_pages = first_of_run = 0
    for index, content_hash in enumerate(hashes):
        if pool.find(content_hash) is not None:
            if first_of_run <= num_unseen(index + 1):
                num_pages = index + 1
        elif num_unseen(len(hashes)) <= index:
            break
        else:
            first_of_run = index + 1
    unseen = num_unseen(num_pages)
    pages = [pool.find(content_hash) for content_hash in hashes[unseen:num_pages]]
    return [NULL_PAGE] * unseen + [page for page in pages if page is not None]
