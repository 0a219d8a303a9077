"""The decode step of a few sequences as one function that all CPU threads run together.

    per layer:  x += W_o attention(rope(W_qkv norm(x)));  gate, up = W_gu norm(x);  x += W_d (silu(gate) up)
    at the end: logits = W_head norm(x)

One new token for each of M <= MAX_ROWS sequences; shapes are in `decode.CPUDecode`. BF16 or FP32 storage,
FP32 accumulation, rounding wherever the plain path stores a tensor, so that the two differ by the order of
sums alone (and within attention, where the plain path rounds probabilities to BF16). A result has the same
bits every time, for every number of threads, and whatever runs beside it.
Moves the weights once, and K and V of every context token: memory-bound, 2 FLOPs per weight and row.
SmolLM2-135M in BF16 reads 269 MB a step, 212 of them in its layers. Two Zen 5 cores compute the layers in
4.4 ms (48 GB/s; sums of a large buffer read 43 to 50), where some 900 torch operators take 9.6.

- `tape`: weights in the order of reading, so that each thread reads few long runs. They exist twice then,
  here and packed by oneDNN for prompts and larger batches: 269 MB more for SmolLM2-135M in BF16.
- `step`: the function; threads split every phase by fixed ranges and meet at five barriers per layer. Context
  chunks have fixed borders, and every thread joins their online softmax (arXiv 1805.02867) for itself.
- `products`, `intrinsics`: inner loops as LLVM vectors, what numba cannot say.
- `pool`: the threads. They sleep between steps. `decode`: all of it as an object.

Rejected: numba's own parallel loops (a fork and join per phase, more compilation); plain numba indexing,
whose test for negative numbers keeps loops scalar; OpenMP between the steps, for the LM head or for sampling:
its threads spin on for milliseconds and slow down the next step (single stream: 75 tokens/s against 147).
The first use compiles for some seconds; numba keeps the code on disk and then loads it in a fraction of one.
Needs numba, which is imported only when a step is built.
"""

from __future__ import annotations

from importlib.util import find_spec

MAX_ROWS = 8
"""Most sequences of a fused step, a multiple of 4. Beyond, oneDNN's use of BF16 instructions pays."""


def has_numba() -> bool:
    """Whether the package that compiles the step is installed."""
    return find_spec("numba") is not None
