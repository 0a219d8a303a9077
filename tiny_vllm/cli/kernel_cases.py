"""The kernels of a decode step, each alone, in a model's shapes: what to launch, and what it must read.

A case launches its kernel once for each of several copies of what it reads, enough of them to push one
another out of the caches, so that every launch reads memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.config import kv_bytes
from tiny_vllm.kernels.draw_tokens import draw_tokens
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, quantise_rows
from tiny_vllm.kernels.norm_linear import MAX_SMALL_ROWS, norm_linear
from tiny_vllm.kernels.paged_decode_attention import (
    attend_pages,
    paged_decode_attention,
    prepare_decode_attention,
)
from tiny_vllm.kernels.qkv_rope_and_cache import qkv_rope_and_cache
from tiny_vllm.kernels.tiled_linear import split_linear, tiled_linear
from tiny_vllm.kernels.triton_support import has_pdl, runs_triton
from tiny_vllm.models.spec import ModelSpec

# Several times the L2 cache of an H200 or the last-level cache of a server's processor.
COLD_BYTES = 400_000_000
# Attention over a short context reads so little that it takes many.
MAX_COPIES = 2000


@dataclass(frozen=True)
class KernelCase:
    """line: what identifies it in a report. num_bytes: that one launch must read. num_launches: per `launch`.

    launch: takes whether kernels are chained by programmatic dependent launch. rival: the same work, or its
    larger part, by torch; None where there is none. is_cold: whether the copies are more than any cache
    holds.
    """

    line: dict[str, Any]
    num_bytes: int
    num_launches: int
    launch: Callable[[bool], Any]
    rival: Callable[[], Any] | None
    is_cold: bool


class KernelCases:
    """Makes the cases of a model on one device, in one type. is_fp8: keys and values are stored in FP8."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        *,
        is_fp8: bool = False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.page_size = page_size
        self.is_fp8 = is_fp8

    def products(self, name: str, batch_sizes: tuple[int, ...]) -> Iterator[KernelCase]:
        """A matrix of `matrices` with every batch size; all share the copies of the matrix."""
        num_rows, num_columns = self.matrices()[name]
        weights = self._copies(num_rows, num_columns, scale=num_columns**-0.5)
        for batch_size in batch_sizes:
            x = self._random(batch_size, num_columns)
            launch = self._product(name, x, weights)
            yield self._case(
                {"kernel": name, "batch_size": batch_size},
                weights,
                launch,
                lambda x=x: [F.linear(x, weight) for weight in weights],  # type: ignore[misc]
            )

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> rows and columns."""
        spec = self.spec
        return {
            "qkv": (spec.qkv_size, spec.hidden_size),
            "output": (spec.hidden_size, spec.q_size),
            "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
            "down": (spec.hidden_size, spec.intermediate_size),
            "lm_head": (spec.vocab_size, spec.hidden_size),
        }

    def attention(self, batch_size: int, context: int) -> KernelCase:
        """Attention of one new token per sequence, over pages in random order."""
        spec, page_size = self.spec, self.page_size
        width = -(-context // page_size)
        num_bytes = kv_bytes(
            2 * batch_size * context * spec.kv_size,
            spec.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            kv_cache_dtype="fp8" if self.is_fp8 else "auto",
        )
        num_pages = batch_size * width + 1
        copies = self._copies(2, num_pages, spec.num_kv_heads, page_size, spec.head_dim, num_bytes=num_bytes)
        caches = [self._stored(copy) for copy in copies]
        table = (torch.randperm(batch_size * width, device=self.device) + 1).view(batch_size, width)
        lens = torch.full((batch_size,), context, device=self.device)
        q = self._random(batch_size, spec.num_heads, spec.head_dim)
        scale = spec.head_dim**-0.5

        def launch(pdl: bool) -> list[Tensor]:
            if runs_triton(q):
                return [attend_pages(q, k, v, table, lens, scale, pdl=pdl) for k, v in caches]
            contexts = prepare_decode_attention(table, lens, spec.num_kv_heads, page_size, self.dtype)
            return [paged_decode_attention(q, k, v, contexts, scale) for k, v in caches]

        line = {"kernel": "attention", "batch_size": batch_size, "context": context}
        return self._case(line, copies, launch, None, num_bytes=num_bytes)

    def _stored(self, caches: Tensor) -> tuple[Cache, Cache]:
        """k and v of [2, ...]."""
        if not self.is_fp8:
            return caches[0], caches[1]
        k, v = (Fp8Cache(*quantise_rows(cache), self.dtype) for cache in caches)
        return k, v

    def draw(self, batch_size: int) -> KernelCase:
        """Drawing tokens from logits by temperature."""
        logits = self._copies(batch_size, self.spec.vocab_size, dtype=torch.float32)
        keys = torch.randint(-(2**31), 2**31, (batch_size, 2), device=self.device).int()
        temperature = torch.full((batch_size,), 0.8, device=self.device)

        def launch(pdl: bool) -> list[Any]:
            return [draw_tokens(one, temperature, keys, pdl=pdl) for one in logits]

        line = {"kernel": "draw", "batch_size": batch_size}
        return self._case(line, logits, launch, lambda: [one.argmax(-1) for one in logits])

    def _product(self, name: str, x: Tensor, weights: list[Tensor]) -> Callable[[bool], list[Tensor]]:
        spec, batch_size = self.spec, len(x)
        if batch_size > MAX_SMALL_ROWS and runs_triton(x):
            return self._tiled_product(name, x, weights)
        norm = torch.ones(spec.hidden_size, device=self.device)
        if name == "qkv" and not self.is_fp8:
            cos_sin = torch.randn(batch_size, spec.rope.rotary_dim, device=self.device)
            places = torch.arange(batch_size, device=self.device)
            num_pages = -(-batch_size // self.page_size)
            k, v = self._random(2, num_pages, spec.num_kv_heads, self.page_size, spec.head_dim)
            bias = self._random(spec.qkv_size) if spec.qkv_bias else None
            rest = (bias, norm, spec.rms_norm_eps, cos_sin, places, places, k, v, spec.num_heads)
            return lambda pdl: [qkv_rope_and_cache(x, weight, *rest, pdl) for weight in weights]
        options: dict[str, Any] = {}
        if name in ("qkv", "gate_up", "lm_head"):
            options |= {"norm_weight": norm, "eps": spec.rms_norm_eps}
        else:
            options["residual"] = self._random(batch_size, spec.hidden_size)
        options["gated"] = name == "gate_up"
        options["out_dtype"] = torch.float32 if name in ("qkv", "lm_head") else None
        return lambda pdl: [norm_linear(x, weight, **options, pdl=pdl) for weight in weights]

    def _tiled_product(self, name: str, x: Tensor, weights: list[Tensor]) -> Callable[[bool], list[Tensor]]:
        """As the chain computes it with many rows; what else belongs to the step is in other kernels."""
        if name in ("gate_up", "lm_head"):
            gated, out_dtype = name == "gate_up", torch.float32 if name == "lm_head" else None
            return lambda pdl: [
                tiled_linear(x, weight, gated=gated, out_dtype=out_dtype, pdl=pdl) for weight in weights
            ]
        return lambda pdl: [split_linear(x, weight, pdl) for weight in weights]

    def _case(
        self,
        line: dict[str, Any],
        copies: list[Tensor],
        launch: Callable[[bool], Any],
        rival: Callable[[], Any] | None,
        *,
        num_bytes: int | None = None,
    ) -> KernelCase:
        num_bytes = copies[0].nbytes if num_bytes is None else num_bytes
        is_cold = num_bytes * len(copies) >= COLD_BYTES
        return KernelCase(line, num_bytes, len(copies), launch, rival, is_cold)

    def can_chain(self) -> bool:
        """Whether the engine launches kernels with programmatic dependence here."""
        return has_pdl(self.device)

    def _copies(
        self,
        *shape: int,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        num_bytes: int | None = None,
    ) -> list[Tensor]:
        """Enough equal tensors to be cold. num_bytes: that a launch reads of one, by default all of it."""
        first = self._random(*shape, dtype=dtype) * scale
        count = min(max(-(-COLD_BYTES // (num_bytes or first.nbytes)), 2), MAX_COPIES)
        return [first, *(torch.empty_like(first).copy_(first) for _ in range(count - 1))]

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)
