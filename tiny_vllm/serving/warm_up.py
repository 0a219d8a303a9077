"""What a server computes before it says that it is ready, so that no client waits for kernels being compiled.

A GPU prepares a decode step for each number of sequences, rounded up to a power of two, when it first sees
it: so as many sequences as there are slots run, and half of those left end every other step. Besides, a
prompt long enough to leave the paths for a handful of tokens, and a request that filters and penalises:
penalties are a chain of torch operations whose kernels CUDA loads when they are first used. On a GPU also a
long prompt beside a sequence that decodes: products and attention of many tokens have kernels of their own.
"""

from __future__ import annotations

import time
from dataclasses import replace

from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.engine_loop import DrivenEngine
from tiny_vllm.types import Request, SamplingParams

PROMPT_LEN = 64
LONG_PROMPT_LEN = 2048
NUM_TOKENS = 4
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False)
FILTERED = replace(GREEDY, temperature=1.0, seed=0, top_p=0.9, top_k=50, repetition_penalty=1.1)


def warm_up(engine: DrivenEngine, config: EngineConfig) -> None:
    """config: resolved. The engine is idle before and after."""
    assert config.max_model_len is not None and config.num_pages is not None and config.max_num_seqs
    room = min(config.max_model_len, config.num_pages * config.page_size) - NUM_TOKENS
    prompt = (0,) * max(1, min(PROMPT_LEN, room))
    for params in (GREEDY, FILTERED):
        _run(engine, [(prompt, params)])
    if config.device == "cuda":
        _add(engine, "first", prompt[: max(1, room // 2)], GREEDY)
        engine.step()
        _run(engine, [((0,) * max(1, min(LONG_PROMPT_LEN, room // 2)), GREEDY)])
    num_halvings = (config.max_num_seqs - 1).bit_length()
    pages_each = -(-(3 + 2 * num_halvings) // config.page_size)
    count = min(config.max_num_seqs, config.num_pages // pages_each)
    lens = [2 + 2 * (num_halvings - index.bit_length()) for index in range(count)]
    _run(engine, [((0,), replace(GREEDY, max_tokens=length)) for length in lens])


def _run(engine: DrivenEngine, requests: list[tuple[tuple[int, ...], SamplingParams]]) -> None:
    for index, (prompt, params) in enumerate(requests):
        _add(engine, str(index), prompt, params)
    while engine.has_work:
        engine.step()


def _add(engine: DrivenEngine, name: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
    engine.add(Request(f"warm-up {name}", prompt, params, time.monotonic(), cache_salt="warm-up"))
