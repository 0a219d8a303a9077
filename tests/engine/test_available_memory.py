"""What main memory a process may still take, read from a tree of files that stands for /proc and /sys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiny_vllm.engine.available_memory import AvailableMemory, available_memory

MIB = 1 << 20
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
OTHER_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 MiB available and no limits; this process has 300 MiB of addresses, 100 of data."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        f"MemTotal:       {2000 * 1024} kB\nMemFree:          1 kB\nMemAvailable:   {1000 * 1024} kB\n"
        "HugePages_Total:       0\n"
    )
    (own / "status").write_text(
        f"Name:\tx\nVmSize:\t  {300 * 1024} kB\nVmData:\t{100 * 1024} kB\nThreads:\t1\n"
    )
    set_limits(tmp_path)
    return tmp_path


def set_limits(root: Path, data: str = "unlimited", addresses: str = "unlimited") -> None:
    (root / "proc/self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {data:20} unlimited            bytes     \n"
        "Max stack size            8388608              unlimited            bytes     \n"
        f"Max address space         {addresses:20} unlimited            bytes     \n"
        "Max realtime timeout      unlimited            unlimited            us        \n"
    )


def write(directory: Path, **files: object) -> None:
    """memory_max=5 is the file memory.max."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("_", ".", 1)).write_text(f"{content}\n")


def in_v2(root: Path, own: str, mounted: str = "/") -> Path:
    (root / "proc/self/cgroup").write_text(f"0::{own}\n")
    (root / "proc/self/mountinfo").write_text(V2_MOUNT.format(root=mounted))
    return root / "sys/fs/cgroup"


def in_v1(root: Path, own: str, mounted: str = "/") -> Path:
    (root / "proc/self/cgroup").write_text(f"5:cpu,cpuacct:/else\n4:memory:{own}\n1:name=systemd:/\n0::/\n")
    (root / "proc/self/mountinfo").write_text(OTHER_MOUNTS + V1_MOUNT.format(root=mounted))
    return root / "sys/fs/cgroup/memory"


def found(root: Path) -> tuple[float, str | None]:
    memory = available_memory(root)
    assert memory is not None
    return memory.num_bytes / MIB, memory.limit


def test_without_limits_it_is_what_the_machine_has(root: Path) -> None:
    assert found(root) == (1000, None)
    write(in_v2(root, "/"))  # the root of all cgroups has no limit
    assert found(root) == (1000, None)


def test_a_container_may_take_what_its_limit_leaves_with_its_file_cache(root: Path) -> None:
    group = in_v2(root, "/")
    stat = f"anon 1\nactive_file {20 * MIB}\ninactive_file {30 * MIB}\nfile 9"
    write(group, memory_max=512 * MIB, memory_current=112 * MIB, memory_stat=stat)
    assert found(root) == (450, "memory.max of the cgroup is 0.50 GiB")


def test_the_cache_never_counts_for_more_than_what_is_used(root: Path) -> None:
    write(in_v2(root, "/"), memory_max=64 * MIB, memory_current=MIB, memory_stat=f"active_file {9 * MIB}")
    assert found(root)[0] == 64


@pytest.mark.parametrize(("outer", "expected"), [(700, 600), (200, 100), (50, 0)])
def test_every_cgroup_above_limits_too(root: Path, outer: int, expected: int) -> None:
    top = in_v2(root, "/pod/box")
    write(top / "pod/box", memory_max="max", memory_current=7 * MIB)
    write(top / "pod", memory_max=outer * MIB, memory_current=100 * MIB)
    assert found(root)[0] == expected


@pytest.mark.parametrize(
    ("own", "mounted", "directory"),
    [
        ("/docker/abc/x", "/docker/abc", "x"),  # the mount shows the container's part alone
        ("/docker/abc", "/docker/abc", ""),
        ("/elsewhere", "/docker/abc", ""),  # a path of another namespace: what is mounted is ours
        ("/../other", "/", ""),
    ],
)
@pytest.mark.parametrize("is_v2", [True, False])
def test_cgroups_are_found_in_what_is_mounted(
    root: Path, own: str, mounted: str, directory: str, is_v2: bool
) -> None:
    if is_v2:
        write(in_v2(root, own, mounted) / directory, memory_max=300 * MIB, memory_current=MIB)
    else:
        group = in_v1(root, own, mounted) / directory
        write(group, memory_limit_in_bytes=300 * MIB, memory_usage_in_bytes=MIB)
    assert found(root)[0] == 299


def test_cgroups_of_the_first_version_count(root: Path) -> None:
    top = in_v1(root, "/a/b")
    write(top, memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=900 * MIB)
    stat = f"active_file 1\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}"
    write(
        top / "a",
        memory_limit_in_bytes=256 * MIB,
        memory_usage_in_bytes=100 * MIB,
        memory_stat=stat,
    )
    write(top / "a/b", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=90 * MIB)
    assert found(root) == (158, "memory.limit_in_bytes of the cgroup /a is 0.25 GiB")


def test_limits_of_the_process_count_what_it_has_already(root: Path) -> None:
    set_limits(root, addresses=str(800 * MIB))
    assert found(root) == (500, "its address space is limited to 0.78 GiB, ulimit -v")
    set_limits(root, addresses=str(800 * MIB), data=str(512 * MIB))
    assert found(root) == (412, "its data is limited to 0.50 GiB, ulimit -d")
    set_limits(root, addresses=str(200 * MIB))
    assert found(root)[0] == 0


def test_the_smallest_of_all_decides(root: Path) -> None:
    set_limits(root, addresses=str(800 * MIB))
    write(in_v2(root, "/"), memory_max=600 * MIB, memory_current=MIB)
    assert found(root)[0] == 500
    (root / "proc/meminfo").write_text(f"MemAvailable: {400 * 1024} kB\n")
    assert found(root) == (400, None)


def test_a_limit_is_known_where_the_machines_memory_is_not(root: Path) -> None:
    (root / "proc/meminfo").unlink()
    set_limits(root, addresses=str(800 * MIB))
    assert found(root)[0] == 500


def test_a_system_that_says_nothing_leaves_it_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize("text", ["", "\n", "MemAvailable:\n", "MemAvailable: many kB\n", "\0\xff"])
def test_files_in_an_unknown_form_say_nothing(root: Path, text: str) -> None:
    for name in ("meminfo", "self/status", "self/limits", "self/cgroup", "self/mountinfo"):
        (root / "proc" / name).write_text(text)
    assert available_memory(root) is None
    group = in_v2(root, "/")
    write(group, memory_max=text, memory_current=text, memory_stat=text)
    assert available_memory(root) is None
    write(group, memory_max=5 * MIB, memory_current=MIB)
    assert available_memory(root) == AvailableMemory(4 * MIB, "memory.max of the cgroup is 0.00 GiB")


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="needs Linux")
def test_a_real_limit_is_seen() -> None:
    code = (
        "import resource\n"
        "from tiny_vllm.engine.available_memory import available_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 29, -1))\n"
        "memory = available_memory()\n"
        "print(0 < memory.num_bytes < 3 << 29, memory.limit)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True its address space is limited to 1.50 GiB, ulimit -v\n"
