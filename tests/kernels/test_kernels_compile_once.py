"""What runs outside captured graphs, prompts and sampling, is not compiled anew for other sizes of a step.

Triton compiles a kernel for each combination of integers that are 1, multiples of 16, or neither; of pointers
that are multiples of 16 bytes, or are not; and of constants. Every sequence waits while it does. Part of an
upload, as the product makes them, is a view that starts anywhere: at multiples of eight bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.helpers.kernel_compiler import CompiledKernel, compiling, meta, missing_tools
from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens
from tiny_vllm.kernels.embedding import embedding
from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts
from tiny_vllm.kernels.gated_activation import gated_activation
from tiny_vllm.kernels.mask_filtered import mask_filtered
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.pick_experts import pick_experts
from tiny_vllm.kernels.prefill_attention import attend_chunks
from tiny_vllm.kernels.read_sampling import SamplingColumns, read_sampling
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache
from tiny_vllm.kernels.token_inputs import read_tokens
from tiny_vllm.kernels.write_out import write_out

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

NUM_TOKENS = (1, 7, 16, 33, 512, 8192)
NUM_SEQUENCES = (1, 2, 5, 16, 17, 300)
TABLE_WIDTHS = (1, 3, 16, 100, 1000)
VOCAB = 128256
SLOTS = 256


def uploaded(size: int, start: int) -> Tensor:
    """int64 [size], part of an upload."""
    return meta(start + size, dtype=torch.int64)[start:]


def count(kernels: Iterable[CompiledKernel]) -> dict[str, int]:
    """How often each kernel was compiled."""
    keys = defaultdict(set)
    for kernel in kernels:
        keys[kernel.name].add(kernel.key)
    return {name: len(found) for name, found in keys.items()}


def test_operators_on_tokens() -> None:
    cache = meta(100, 8, 16, 64)
    with compiling() as kernels:
        for num_tokens in NUM_TOKENS:
            tokens = meta(num_tokens, dtype=torch.int64)
            embedding(meta(VOCAB, 2048), tokens)
            # Beside a decode, or none; behind something else of the upload.
            slots, table = meta(SLOTS + 1, dtype=torch.int64), meta(SLOTS + 1, 100, dtype=torch.int64)
            parts = uploaded(num_tokens + 1, num_tokens % 2), uploaded(num_tokens, 1), uploaded(num_tokens, 0)
            read_tokens(*parts, slots, slots, table, 16)
            # A step's last token, and what is scored of a prompt.
            rms_norm(meta(num_tokens + 3, 2048)[3:], meta(2048, dtype=torch.float32), 1e-5)
            gated_activation(meta(num_tokens, 16384), "silu")
            step = prepare_rope(meta(4096, 64, dtype=torch.float32), tokens, tokens, 8, 16)
            rope_and_cache(meta(num_tokens, 3072), step, cache, cache, 32)
    assert count(kernels) == {
        "_embedding_kernel": 1,
        "_read_tokens_kernel": 1,
        "_rms_norm_kernel": 1,
        "_gated_activation_kernel": 1,
        "_rope_and_cache_kernel": 1,
    }


def test_tokens_on_their_way_out() -> None:
    with compiling() as kernels:
        for num_tokens in NUM_SEQUENCES:
            tokens = meta(num_tokens, dtype=torch.int64)
            write_out(tokens, uploaded(num_tokens, num_tokens % 2))
    assert count(kernels) == {"_write_out_kernel": 1}


def test_prefill_attention() -> None:
    cache = meta(100, 8, 16, 64)
    with compiling() as kernels:
        for num_sequences in NUM_SEQUENCES:
            for width in TABLE_WIDTHS:
                first = (num_sequences + width) % 2
                # What is left of a mixed step's queries, behind those of its decodes.
                attend_chunks(
                    meta(first + 512, 32, 64)[first:],
                    cache,
                    cache,
                    meta(num_sequences, width, dtype=torch.int64),
                    uploaded(num_sequences + 1, first),
                    uploaded(num_sequences, first),
                    0.125,
                )
    assert count(kernels) == {"_prefill_attention_kernel": 1}


def test_decode_attention_of_mixed_steps() -> None:
    """A context may be one part, joined by nobody; longer contexts have more tiles under way. Few parts are
    joined with fewer registers than many."""
    cache = meta(100, 8, 16, 64)
    with compiling() as kernels:
        for num_sequences in NUM_SEQUENCES:
            for width in TABLE_WIDTHS:
                table = meta(num_sequences, width, dtype=torch.int64)
                q, lens = meta(num_sequences, 32, 64), meta(num_sequences, dtype=torch.int64)
                attend_pages(q, cache, cache, table, lens, 0.125)
    assert count(kernels) == {"_attend_part_kernel": 4, "_join_parts_kernel": 2}


@pytest.mark.parametrize(("num_active", "num_products"), [(1, 3 * 2), (8, 4 * 2)])
def test_mixture_of_experts(num_active: int, num_products: int) -> None:
    """Both products have larger tiles for more picks, here up to the third or fourth size. Few picks are
    sorted in smaller blocks, of two sizes; fewer are not sorted, and those of one token share no experts."""
    matrices = ExpertMatrices(meta(128, 1536, 2048), meta(128, 2048, 768), None, None)
    with compiling() as kernels:
        for num_tokens in (*NUM_TOKENS, 2048, 16384):
            logits = meta(1, num_tokens, 128)
            experts, weights = pick_experts(logits, None, num_active, True)
            expert_parts(meta(num_tokens, 2048), experts, weights, matrices, "silu")
    assert count(kernels) == {
        "_pick_experts_kernel": 1,
        "_picked_product_kernel": 2 if num_active == 8 else 2 * 2,
        "_expert_tiles_kernel": 3,
        "_expert_product_kernel": num_products,
    }


@pytest.mark.parametrize("vocab_size", [VOCAB, 32768])
def test_sampling(vocab_size: int) -> None:
    reals, integers = meta(6, SLOTS, dtype=torch.float32), meta(3, SLOTS, dtype=torch.int64)
    temperature, top_p, min_p, *_ = reals.unbind()
    stream, position, top_k = integers.unbind()
    columns = SamplingColumns(stream, position, top_k, temperature, top_p, min_p)
    table = meta(SLOTS, dtype=torch.int64)
    with compiling() as kernels:
        for num_rows in (1, 2, 5, 16, 17, 256):
            slots = uploaded(num_rows, num_rows % 2)
            rows = read_sampling(columns, slots)
            logits = meta(num_rows, vocab_size, dtype=torch.float32)
            mask_filtered(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
            draw_tokens(logits, temperature, rows.keys, SlotAdvance(slots, table, table, position))
    assert set(count(kernels).values()) == {1}, count(kernels)
    assert len(count(kernels)) == 8
