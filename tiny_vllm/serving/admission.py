"""Who may come in: API keys, and how many requests at a time."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiny_vllm.serving.errors import ApiError, overloaded, shutting_down


class ApiKeys:
    """The keys that are accepted; none means that no key is asked for."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str | None) -> str:
        """The key of an Authorization header, "" where none is needed. Raises ApiError.

        Every key is compared in full, so that the time taken tells nothing about them.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        data = given.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(key, data) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong\nhint: send the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return data.decode()


class Door:
    """Calls that want work done come in through it. num_inside: those that have not left.

    is_shut: whether nobody comes in any more, because the server is shutting down.
    """

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_shut = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, a call is waited for. Raises ApiError (503) when the door is shut."""
        if self.is_shut:
            raise shutting_down()
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1


class Admission:
    """Counts the requests in progress. max_per_key: None for no limit."""

    def __init__(self, max_requests: int, max_per_key: int | None) -> None:
        self._max_requests = max_requests
        self._max_per_key = max_per_key
        self._by_key: Counter[str] = Counter()
        self.num_requests = 0

    @contextmanager
    def entered(self, key: str) -> Iterator[None]:
        """Inside, a request counts. Raises ApiError (429) when there are too many."""
        if self.num_requests >= self._max_requests:
            raise overloaded(
                f"{self.num_requests} requests are in progress, and 1 more would exceed max_requests "
                f"({self._max_requests})\nhint: try again later"
            )
        if self._max_per_key is not None and self._by_key[key] >= self._max_per_key:
            raise overloaded(
                f"this API key has {self._by_key[key]} requests in progress, and 1 more would exceed "
                f"max_requests_per_key ({self._max_per_key})\nhint: try again when one has finished"
            )
        self.num_requests += 1
        self._by_key[key] += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]
