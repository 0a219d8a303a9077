"""Main memory that this process may still take.

The machine's free memory is one limit of several: a container has its cgroup's, which holds for it together
with everything else in it, and a process may have limits of its own (ulimit). Who passes the first is killed,
who passes the others gets no memory. All of them are read from files, so nothing is known elsewhere than on
Linux.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tiny_vllm.config import GIB

UNLIMITED = 1 << 60
"""Limits beyond this are none: version 1 of cgroups says so with the largest number of pages."""

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "failed to map segment")
"""In the messages of torch's allocators, whose errors have no class of their own on a CPU, and of what loads
shared libraries."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """num_bytes: without swapping. limit: what sets it, in words, where that is not the machine's memory."""

    num_bytes: int
    limit: str | None = None

    @property
    def size(self) -> str:
        return f"{self.num_bytes / GIB:.2f} GiB"

    @property
    def reason(self) -> str:
        """To follow a sentence: the limit in brackets, if there is one."""
        return f" ({self.limit})" if self.limit else ""


def available_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """The smallest of all limits; None where the system names none. root: where /proc and /sys are."""
    found = [*_machine(root), *_cgroups(root), *_process(root)]
    return min(found, key=lambda memory: memory.num_bytes, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on whichever device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_told = isinstance(error, RuntimeError | ImportError) and any(
        text in str(error) for text in OUT_OF_MEMORY
    )
    return isinstance(error, MemoryError) or is_told


def _machine(root: Path) -> Iterator[AvailableMemory]:
    free = _sizes(root / "proc/meminfo").get("MemAvailable")
    if free is not None:
        yield AvailableMemory(free)


def _process(root: Path) -> Iterator[AvailableMemory]:
    taken = _sizes(root / "proc/self/status")
    limits = {
        "Max address space": ("VmSize", "its address space is limited to", "ulimit -v"),
        "Max data size": ("VmData", "its data is limited to", "ulimit -d"),
    }
    for line in _lines(root / "proc/self/limits"):
        name, value = line[:26].strip(), line[26:].split()
        if name in limits and value and value[0].isdecimal():
            key, words, command = limits[name]
            limit = int(value[0])
            left = max(limit - taken.get(key, 0), 0)
            yield AvailableMemory(left, f"{words} {limit / GIB:.2f} GiB, {command}")


def _cgroups(root: Path) -> Iterator[AvailableMemory]:
    """What the process's cgroup and those around it leave."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if number == "0" and not controllers:
            names = ("memory.max", "memory.current", "")
            mount = _mount(root, "cgroup2", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            mount = _mount(root, "cgroup", "memory")
        else:
            continue
        if mount is not None:
            shown, top = mount
            path = _below(PurePosixPath(own), shown)
            for part in (path, *path.parents):
                yield from _cgroup(top / part, f" /{part}" if part.parts else "", *names)


def _mount(root: Path, kind: str, controller: str) -> tuple[PurePosixPath, Path] | None:
    """The cgroup that is mounted, and where."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        own, mounted = before.split(), after.split()
        if len(own) < 5 or len(mounted) < 3 or mounted[0] != kind:
            continue
        if not controller or controller in mounted[2].split(","):
            return PurePosixPath(own[3]), root / own[4].lstrip("/")
    return None


def _below(own: PurePosixPath, shown: PurePosixPath) -> PurePosixPath:
    """The process's cgroup, from the one that is mounted on. In a namespace whose paths say nothing about
    what is mounted, that is the container's own."""
    if not own.is_relative_to(shown) or ".." in own.parts:
        return PurePosixPath()
    return own.relative_to(shown)


def _cgroup(directory: Path, name: str, limit: str, usage: str, prefix: str) -> Iterator[AvailableMemory]:
    """The cache of files counts as used, but goes before anything else has to. prefix: of what holds for a
    cgroup together with those in it."""
    most, used = (_text(directory / file).strip() for file in (limit, usage))
    if not most.isdecimal() or not used.isdecimal() or int(most) > UNLIMITED:
        return
    held = int(used)
    for line in _lines(directory / "memory.stat"):
        match line.split():
            case [key, value] if (
                key in (f"{prefix}active_file", f"{prefix}inactive_file") and value.isdecimal()
            ):
                held -= int(value)
    left = max(int(most) - max(held, 0), 0)
    yield AvailableMemory(left, f"{limit} of the cgroup{name} is {int(most) / GIB:.2f} GiB")


def _sizes(path: Path) -> dict[str, int]:
    """Bytes by name, from lines such as "MemFree:  12 kB"."""
    sizes = {}
    for line in _lines(path):
        match line.split():
            case [name, kilobytes, "kB"] if kilobytes.isdecimal():
                sizes[name.removesuffix(":")] = int(kilobytes) * 1024
    return sizes


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
