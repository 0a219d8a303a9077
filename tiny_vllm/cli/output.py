"""stdout, with its failures told apart from those of every other file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from typing import Any, TextIO, cast

from tiny_vllm.errors import TinyVLLMError, written_out


class OutputError(TinyVLLMError):
    """What a command has to say cannot be written: a full disk, a closed stdout."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"cannot write the output: {reason}",
            hint="look at where stdout goes: a file, a disk, another program",
        )


def print_error(text: str) -> None:
    """To stderr. Names of files may hold anything: no terminal shall obey them."""
    print("\n".join(map(written_out, f"error: {text}".split("\n"))), file=sys.stderr)


@contextmanager
def guarded_stdout() -> Iterator[None]:
    """Inside, a failed write to stdout raises OutputError; BrokenPipeError stays what it is.

    Raises OutputError at once if stdout is closed, and at the end if the rest cannot be written.
    """
    # Python leaves None where the file descriptor was closed before it started.
    if sys.stdout is None:
        raise OutputError("stdout is closed")
    if isinstance(sys.stdout, TextIOWrapper):
        # A model may write any character; where the locale has no such letter, "?" is better than nothing.
        sys.stdout.reconfigure(errors="replace")
    guarded = _Guarded(sys.stdout)
    with redirect_stdout(cast(TextIO, guarded)):
        yield
        guarded.flush()


class _Guarded:
    """A stream that raises OutputError; everything else is the wrapped stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _told_apart():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told_apart():
            self._stream.flush()


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error
