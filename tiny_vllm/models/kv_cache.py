"""The page pool's memory: keys and values of every page of every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.models.spec import ModelSpec


class KVCache:
    """k, v: [num_layers, num_pages, num_kv_heads, page_size, head_dim], contiguous.

    Page 0 is the null page: page tables are padded with it, and no sequence owns it.
    layers: for each layer its (k, v), views of the above.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k = k
        self.v = v
        self.num_pages = k.shape[1]
        self.page_size = k.shape[3]
        self.layers = list(zip(k.unbind(), v.unbind(), strict=True))

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Allocate all pages at once, zeroed. num_pages counts the null page."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        k = torch.zeros(shape, dtype=dtype, device=device)
        return cls(k, torch.zeros_like(k))
