from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.cubin import ResourceUsage, resource_usage
from tests.helpers.kernel_compiler import missing_tools
from tiny_vllm.errors import TinyVLLMError
from tiny_vllm.kernels.cuda import nvrtc
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin, nvrtc_version

pytestmark = pytest.mark.usefixtures("needs_nvrtc", "own_cache")

SCALE = """
float scaled(float value) { return FACTOR * value; }
extern "C" __global__ void scale(float* out) { out[threadIdx.x] = scaled(out[threadIdx.x]); }
"""
# More values alive at once than there are registers.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) shuffle(float* out, const float* in) {
  float values[100];
#pragma unroll
  for (int i = 0; i < 100; i++) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; i++) out[i * 1024 + threadIdx.x] = values[99 - i] * values[i * 7 % 100];
}
"""


def test_source_becomes_a_binary_with_the_kernel() -> None:
    usage = resource_usage(compile_cubin(SCALE, name="scale", defines={"FACTOR": 3}))
    assert set(usage) == {"scale"}
    assert 0 < usage["scale"].registers < 32
    assert usage["scale"].stack_bytes == 0


def test_spilled_registers_show() -> None:
    usage = resource_usage(compile_cubin(SPILLING, name="shuffle"))
    assert usage["shuffle"].registers <= 65536 // 1024
    assert usage["shuffle"].stack_bytes > 0


@pytest.mark.parametrize("source", [SCALE, SPILLING], ids=["lean", "spilling"])
def test_resource_usage_agrees_with_cuobjdump(source: str, tmp_path: Path) -> None:
    reason = missing_tools()
    if reason:
        pytest.skip(reason)
    import triton

    cubin = compile_cubin(source, name="kernel", defines={"FACTOR": 3})
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    expected = {
        name: ResourceUsage(int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", text)
    }
    assert resource_usage(cubin) == expected


def test_a_refused_source_says_where_and_why() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cubin('\nextern "C" __global__ void broken() { missing(); }', name="broken")
    assert isinstance(caught.value, TinyVLLMError)
    assert "broken.cu(2)" in caught.value.log
    assert '"missing" is undefined' in str(caught.value)


def test_an_architecture_that_does_not_exist_is_named() -> None:
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_cubin(SCALE, name="scale", defines={"FACTOR": 3}, arch="sm_1")


def test_the_second_time_no_compiler_runs(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cubin(SCALE, name="scale", defines={"FACTOR": 3})
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_cubin(SCALE, name="scale", defines={"FACTOR": 3}) == first


def test_whatever_changes_the_binary_is_another_entry(own_cache: Path) -> None:
    compile_cubin(SCALE, name="scale", defines={"FACTOR": 3})
    compile_cubin(SCALE, name="scale", defines={"FACTOR": 4})
    compile_cubin(SCALE, name="scale", defines={"FACTOR": 3}, arch="sm_80")
    compile_cubin(SCALE + " ", name="scale", defines={"FACTOR": 3})
    assert len(list(own_cache.iterdir())) == 4


def test_a_damaged_entry_is_compiled_again(own_cache: Path) -> None:
    first = compile_cubin(SCALE, name="scale", defines={"FACTOR": 3})
    (entry,) = own_cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert compile_cubin(SCALE, name="scale", defines={"FACTOR": 3}) == first


def test_a_name_cannot_leave_the_cache(own_cache: Path) -> None:
    compile_cubin(SCALE, name="../../scale", defines={"FACTOR": 3})
    (entry,) = own_cache.iterdir()
    assert entry.name.startswith("______scale-sm_90a-")


def test_an_old_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc_version() >= nvrtc.MIN_VERSION
    monkeypatch.setattr(nvrtc, "_version", lambda library: (12, 3))
    with pytest.raises(CompileError, match=r"NVRTC is version 12\.3, but 12\.4"):
        nvrtc._refuse_old(ctypes.CDLL(None))


def test_the_compiler_of_torchs_cuda_version_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    names = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.alt.so.13")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    specification = type("Specification", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: specification)

    def found(cuda: str | None) -> list[str]:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return [path.name for path in nvrtc._packaged_libraries()]

    assert found("12.8") == ["libnvrtc.so.12", "libnvrtc.so.13"]
    assert found("13.0") == found(None) == ["libnvrtc.so.13", "libnvrtc.so.12"]
