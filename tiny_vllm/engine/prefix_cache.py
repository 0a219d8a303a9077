"""Content hashes of pages: equal hash, equal keys and values.

The K/V of a page depends on its own tokens and on all tokens before it, so hashes are chained: the hash of a
page covers the hash of the page before it. The root covers the salt. SHA-256 makes a collision infeasible
even for someone who chooses the prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from tiny_vllm.engine.page_pool import PagePool


def root_hash(salt: str | None) -> bytes:
    """The start of a chain. Sequences share pages only if their salts are equal."""
    return sha256(b"shared" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], page_size: int) -> None:
    """Append the hashes of the full pages of `token_ids` that `hashes` does not cover yet."""
    for index in range(len(hashes), len(token_ids) // page_size):
        previous = hashes[-1] if hashes else root
        tokens = array("q", token_ids[index * page_size : (index + 1) * page_size])
        hashes.append(sha256(previous + tokens.tobytes()).digest())


def find_prefix(pool: PagePool, hashes: Sequence[bytes]) -> list[int]:
    """Pages of the longest findable prefix, in order."""
    pages = []
    for content_hash in hashes:
        page = pool.find(content_hash)
        if page is None:
            break
        pages.append(page)
    return pages
