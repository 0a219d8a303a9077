"""Kernels in CUDA C++, compiled on the user's machine without a CUDA toolkit.

Source text becomes a binary by NVRTC (`nvrtc`), is kept on disk (`cubin_cache`), and is loaded and launched
through the CUDA driver (`driver`). Both libraries come with torch and the GPU's driver, and are opened when
first used.

NVRTC has no headers: a source must not include <cuda_runtime.h>, <stdint.h> or anything else. Write `unsigned
int` for uint32_t and `unsigned long long` for uint64_t, and declare kernels `extern "C"` so that their names
stay as written.
"""
