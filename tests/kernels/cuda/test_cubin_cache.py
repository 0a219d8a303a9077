from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tiny_vllm.kernels.cuda.cubin_cache import cache_directory, read_entry, write_entry

pytestmark = pytest.mark.usefixtures("own_cache")


def test_an_entry_comes_back_as_it_was_written() -> None:
    assert read_entry("kernel") is None
    write_entry("kernel", b"binary")
    assert read_entry("kernel") == b"binary"
    write_entry("kernel", b"")
    assert read_entry("kernel") == b""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TINY_VLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/cuda"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/tiny-vllm/cuda"),
        ({"TINY_VLLM_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/tiny-vllm/cuda"),
    ],
)
def test_the_environment_says_where(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TINY_VLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TINY_VLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    write_entry("kernel", b"binary")
    assert read_entry("kernel") is None


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_entry_counts_as_missing(own_cache: Path, damage: bytes) -> None:
    write_entry("kernel", b"binary")
    (own_cache / "kernel").write_bytes(damage)
    assert read_entry("kernel") is None


def test_a_changed_byte_counts_as_damage(own_cache: Path) -> None:
    write_entry("kernel", b"binary")
    stored = bytearray((own_cache / "kernel").read_bytes())
    stored[-1] ^= 1
    (own_cache / "kernel").write_bytes(stored)
    assert read_entry("kernel") is None


def test_a_directory_that_cannot_be_is_no_failure(own_cache: Path) -> None:
    """Where a directory should be stands a file: that stops every user, whatever the permissions."""
    own_cache.parent.mkdir()
    own_cache.write_text("in the way")
    write_entry("kernel", b"binary")
    assert read_entry("kernel") is None


def test_a_name_that_is_taken_by_a_directory_leaves_nothing_behind(own_cache: Path) -> None:
    (own_cache / "kernel").mkdir(parents=True)
    write_entry("kernel", b"binary")
    assert read_entry("kernel") is None
    assert [path.name for path in own_cache.iterdir()] == ["kernel"]


def _write_often(content: bytes) -> None:
    for _ in range(100):
        write_entry("kernel", content)


def test_two_processes_write_one_entry_while_a_third_reads(own_cache: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in (1, 2)]
    write_entry("kernel", contents[0])
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_entry("kernel") in contents
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [path.name for path in own_cache.iterdir()] == ["kernel"]
