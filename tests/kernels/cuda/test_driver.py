from __future__ import annotations

import ctypes

import pytest
import torch

from tiny_vllm.kernels.cuda.driver import (
    CudaFunction,
    LaunchAttribute,
    LaunchConfig,
    architecture,
    load_function,
)
from tiny_vllm.kernels.cuda.errors import DriverError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin

SOURCE = """
extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
  const int stride = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void through_shared(float* out, int n) {
  extern __shared__ float buffer[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) buffer[i] = i;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = buffer[n - 1 - i];
}
// What the kernel before wrote is there behind the wait, however early this one started.
extern "C" __global__ void add_one_late(float* y, int n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for (int i = threadIdx.x; i < n; i += blockDim.x) ((volatile float*)y)[i] += 1;
}
// Every block waits for all others: only launches that run all blocks at once end.
extern "C" __global__ void meet(int* arrived) {
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < gridDim.x) {}
  }
  __syncthreads();
}
"""


def test_without_a_driver_the_error_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a CUDA driver")
    from tiny_vllm.kernels.cuda import driver

    with pytest.raises(DriverError, match=r"libcuda\.so\.1 is not on this machine"):
        driver._driver()


def test_structures_are_as_large_as_in_cuda_h() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 8 + 64 and LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(LaunchConfig) == 56 and LaunchConfig.stream.offset == 32


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def cubin(device: torch.device) -> bytes:
    return compile_cubin(SOURCE, name="driver_test", arch=architecture(device))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def load(cubin: bytes, name: str, device: torch.device, shared_bytes: int = 0) -> CudaFunction:
    return load_function(cubin, name, shared_bytes=shared_bytes, device=device)


@pytest.mark.gpu
def test_a_kernel_computes_what_torch_computes(cubin: bytes, device: torch.device) -> None:
    saxpy = load(cubin, "saxpy", device)
    assert 0 < saxpy.num_registers <= 64 and saxpy.local_bytes == 0
    x, y = torch.randn(2, 10_007, device=device)
    expected = torch.addcmul(y.double(), x.double(), torch.full((), 0.5, device=device).double())
    saxpy.launch(7, 128, (pointer(y), pointer(x), ctypes.c_float(0.5), ctypes.c_int(len(x))))
    torch.testing.assert_close(y, expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_a_prepared_launch_takes_the_values_of_its_moment(cubin: bytes, device: torch.device) -> None:
    x, y = torch.ones(100, device=device), torch.zeros(100, device=device)
    factor = ctypes.c_float(1)
    prepared = load(cubin, "saxpy", device).prepare(
        (pointer(y), pointer(x), factor, ctypes.c_int(100)), grid=1, block=32
    )
    prepared.launch()
    factor.value = 10
    prepared.launch()
    assert y.tolist() == [11] * 100


@pytest.mark.gpu
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_graph_captures_a_launch(cubin: bytes, device: torch.device, cooperative: bool) -> None:
    x, y = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    prepared = load(cubin, "saxpy", device).prepare(
        (pointer(y), pointer(x), ctypes.c_float(2), ctypes.c_int(1000)),
        grid=4,
        block=64,
        cooperative=cooperative,
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
    assert y.sum().item() == 0
    for _ in range(3):
        graph.replay()
    assert y.tolist() == [6] * 1000


@pytest.mark.gpu
def test_a_launch_goes_to_the_stream_that_is_asked_for(cubin: bytes, device: torch.device) -> None:
    x, y = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    torch.cuda.synchronize()
    arguments = (pointer(y), pointer(x), ctypes.c_float(2), ctypes.c_int(1000))
    stream = torch.cuda.Stream()
    load(cubin, "saxpy", device).launch(4, 64, arguments, stream=stream.cuda_stream)
    stream.synchronize()
    assert y.tolist() == [2] * 1000


@pytest.mark.gpu
def test_shared_memory_beyond_48_kib_can_be_used(cubin: bytes, device: torch.device) -> None:
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    assert limit > 48 * 1024
    count = limit // 4
    out = torch.zeros(count, device=device)
    kernel = load(cubin, "through_shared", device, shared_bytes=4 * count)
    kernel.launch(1, 256, (pointer(out), ctypes.c_int(count)))
    assert torch.equal(out, torch.arange(count - 1, -1, -1, device=device, dtype=torch.float32))
    with pytest.raises(DriverError, match=f"needs {limit + 4} bytes of shared memory per block, but"):
        load(cubin, "through_shared", device, shared_bytes=limit + 4)


@pytest.mark.gpu
def test_a_cooperative_launch_runs_all_blocks_or_none(cubin: bytes, device: torch.device) -> None:
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    meet = load(cubin, "meet", device)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    meet.launch(blocks, 1024, (pointer(arrived),), cooperative=True)
    assert arrived.item() == blocks
    with pytest.raises(DriverError) as caught:
        meet.launch(blocks * 100, 1024, (pointer(arrived),), cooperative=True)
    assert caught.value.code == "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"


@pytest.mark.gpu
def test_the_drivers_refusals_have_names(cubin: bytes, device: torch.device) -> None:
    with pytest.raises(DriverError, match="no kernel missing: CUDA_ERROR_NOT_FOUND"):
        load(cubin, "missing", device)
    # An architecture that no device has both of: the binary of another is refused.
    other = "sm_80" if torch.cuda.get_device_capability(device) != (8, 0) else "sm_90a"
    with pytest.raises(DriverError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        load(compile_cubin(SOURCE, name="driver_test", arch=other), "saxpy", device)
    with pytest.raises(DriverError, match="saxpy cannot be launched: CUDA_ERROR_INVALID_VALUE"):
        load(cubin, "saxpy", device).launch(1, 100_000, [ctypes.c_int(0)] * 4)


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_kernels_are_chained_by_programmatic_dependent_launch(
    cubin: bytes, device: torch.device, is_captured: bool
) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs compute capability 9.0")
    y = torch.zeros(10_000, device=device)
    kernel = load(cubin, "add_one_late", device)
    arguments = pointer(y), ctypes.c_int(len(y))

    def run() -> None:
        kernel.launch(1, 256, arguments)
        for _ in range(49):
            kernel.launch(1, 256, arguments, pdl=True)

    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
    else:
        run()
    assert y.tolist() == [50] * len(y)
