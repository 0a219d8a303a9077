from __future__ import annotations

from hashlib import sha256

import pytest

from tiny_vllm.engine.prefix_cache import extend_hashes, root_hash

PAGE_SIZE = 4
TOKENS = [7, 0, 49151, 3, 2**40, 5, 5, 5, 1, 2, 3, 4, 9, 9]


def chain(salt: str | None) -> list[bytes]:
    """The definition: each page's hash covers the one before and the page's ids as eight bytes each."""
    hashes = [root_hash(salt)]
    for start in (0, 4, 8):
        content = b"".join(token.to_bytes(8, "little") for token in TOKENS[start : start + PAGE_SIZE])
        hashes.append(sha256(hashes[-1] + content).digest())
    return hashes[1:]


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("lengths", [[14], [4, 14], [3, 7, 9, 11, 12, 14], [0, 14, 14]])
def test_full_pages_get_chained_hashes_however_the_tokens_arrive(
    salt: str | None, lengths: list[int]
) -> None:
    hashes: list[bytes] = []
    for length in lengths:
        extend_hashes(hashes, root_hash(salt), TOKENS[:length], PAGE_SIZE)
        assert hashes == chain(salt)[: length // PAGE_SIZE]


def test_an_unfinished_page_has_no_hash() -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(None), TOKENS[: PAGE_SIZE - 1], PAGE_SIZE)
    assert hashes == []
