"""Compiled kernels on disk, so that a program waits for the compiler once per machine.

A cache can only save time: whatever is wrong with it (no home directory, no space, no permission, damaged
files), the kernel is compiled again and the program goes on.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path | None:
    """`cuda` in $TINY_VLLM_CACHE, $XDG_CACHE_HOME/tiny-vllm or ~/.cache/tiny-vllm; None without a home."""
    if own := os.environ.get("TINY_VLLM_CACHE"):
        return Path(own) / "cuda"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tiny-vllm" / "cuda"
    try:
        return Path.home() / ".cache" / "tiny-vllm" / "cuda"
    except RuntimeError:
        return None


def read_entry(name: str) -> bytes | None:
    """The content of an entry; None if there is none, or if it is not what was written."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        stored = (directory / name).read_bytes()
    except OSError:
        return None
    digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    return content if digest == hashlib.sha256(content).digest() else None


def write_entry(name: str, content: bytes) -> None:
    """Keep an entry if possible. Readers see the whole of it or nothing, also with several writers."""
    directory = cache_directory()
    if directory is None:
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f"{name}.", suffix=".partial")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, directory / name)
        except OSError:
            os.unlink(temporary)
            raise
