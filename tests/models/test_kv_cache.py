"""The page pool's memory."""

from __future__ import annotations

import torch

from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="llama",
    vocab_size=16,
    hidden_size=24,
    intermediate_size=32,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e4, rotary_dim=4),
)


def test_pages_of_all_layers_are_allocated_zeroed_at_the_promised_size() -> None:
    cache = KVCache.allocate(SPEC, num_pages=5, page_size=8, dtype=torch.bfloat16)
    assert cache.k.shape == cache.v.shape == (3, 5, 2, 8, 4)
    assert (cache.num_pages, cache.page_size) == (5, 8)
    assert cache.k.nbytes + cache.v.nbytes == 5 * 8 * SPEC.kv_values_per_token * 2
    assert not cache.k.any()
    assert not cache.v.any()


def test_layers_are_views_of_the_pool() -> None:
    cache = KVCache.allocate(SPEC, num_pages=5, page_size=8, dtype=torch.float32)
    k, v = cache.layers[1]
    k[2] = 1
    v[3] = 2
    assert cache.k[1, 2].eq(1).all()
    assert cache.v[1, 3].eq(2).all()
    assert cache.k.sum() == 2 * 8 * 4
