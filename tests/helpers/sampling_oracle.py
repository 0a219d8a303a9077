"""One token of one request, the slow and obvious way: numpy, float64, a sort, Python integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiny_vllm.types import SamplingParams

MASK_64 = 2**64 - 1


def splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def arrival_times(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """E of every token, float64."""
    stream = splitmix((seed + 0x9E3779B97F4A7C15) & MASK_64)
    key = splitmix((stream + position * 0x9E3779B97F4A7C15) & MASK_64)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    x = (np.arange(vocab_size, dtype=np.uint32) + np.uint32(0x9E3779B1)) * (high | np.uint32(1)) ^ low
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    u = ((x & np.uint32(2**31 - 1)).astype(np.float64) + 0.5) * 2.0**-31 * (1 - 2.0**-24)
    return -np.log1p(-u)


def processed_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    endings: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
) -> np.ndarray:
    """Masks, bias and penalties, float64."""
    logits = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        forbidden = set(range(len(logits))) - set(params.allowed_token_ids)
        logits[list(forbidden)] = -np.inf
    text = tuple(output)
    banned = [word[-1] for word in bad_words if (*text, word[-1])[-len(word) :] == word]
    for tokens in (banned, list(endings) if len(output) < params.min_tokens else []):
        masked = logits.copy()
        masked[tokens] = -np.inf
        if masked.max() > -np.inf:
            logits = masked
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    return logits


def kept_tokens(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """What is left after top_k, top_p and min_p; the most likely token first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.is_greedy:
        return order[:1]
    mass = {token: np.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        whole = sum(mass[token] for token in order)
        kept, before = [], 0.0
        for token in order:
            if kept and before >= params.top_p * whole:
                break
            kept.append(token)
            before += mass[token]
        order = kept
    return [token for token in order if mass[token] >= params.min_p]


def draw(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
    """The token drawn from processed logits."""
    kept = kept_tokens(logits, params)
    if len(kept) == 1:
        return kept[0]
    scores = logits / params.temperature - np.log(arrival_times(seed, position, len(logits)))
    return max(kept, key=lambda token: scores[token])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
