"""The page pool's memory: keys and values of every page of every layer."""

from __future__ import annotations

import torch

from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, quantise_rows
from tiny_vllm.kernels.triton_support import HAS_TRITON
from tiny_vllm.models.spec import ModelSpec


class KVCache:
    """k, v: [num_layers, num_pages, num_kv_heads, page_size, head_dim], contiguous.

    Page 0 is the null page: page tables are padded with it, and no sequence owns it.
    dtype: in which keys and values are read: with FP8 codes in k and v, the model's.
    layers: for each layer its (k, v), views of the above.
    """

    def __init__(self, k: Cache, v: Cache) -> None:
        self.dtype = k.dtype
        self.num_pages = k.shape[1]
        self.page_size = k.shape[3]
        self.k, self.v = (cache.codes if isinstance(cache, Fp8Cache) else cache for cache in (k, v))
        self.layers = list(zip(_layers_of(k), _layers_of(v), strict=True))

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        is_fp8: bool = False,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Allocate all pages at once, zeroed. num_pages counts the null page. dtype: the model's."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        if not is_fp8:
            k = torch.zeros(shape, dtype=dtype, device=device)
            return cls(k, torch.zeros_like(k))
        codes = torch.zeros(2, *shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(2, *shape[:-1], dtype=torch.bfloat16, device=device)
        return cls(Fp8Cache(codes[0], scales[0], dtype), Fp8Cache(codes[1], scales[1], dtype))

    def randomise(self) -> None:
        """Normally distributed values, for measurements."""
        for cache in (cache for caches in self.layers for cache in caches):
            if isinstance(cache, Fp8Cache):
                values = torch.randn(cache.shape, dtype=cache.dtype, device=cache.codes.device)
                codes, scales = quantise_rows(values)
                cache.codes.copy_(codes)
                cache.scales.copy_(scales)
            else:
                cache.normal_()


def fp8_obstacle(device: torch.device) -> str | None:
    """Why FP8 keys and values cannot be read on this device, or None."""
    if device.type != "cuda" or not HAS_TRITON:
        return None
    if torch.version.cuda is None:
        return "the kernels read NVIDIA's FP8 alone"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"the GPU (sm_{major}{minor}) is older than sm_89, the first that reads FP8"
    return None


def _layers_of(cache: Cache) -> list[Cache]:
    if isinstance(cache, Fp8Cache):
        parts = zip(cache.codes.unbind(), cache.scales.unbind(), strict=True)
        return [Fp8Cache(codes, scales, cache.dtype) for codes, scales in parts]
    return list(cache.unbind())
