"""What a server computes before it says that it is ready, so that no client waits for kernels being compiled.

A GPU prepares a decode step for each number of sequences, rounded up (see `decode_graphs`), when it first
sees it: so as many sequences as there are slots run, and every other step ends those of the largest number
left. Besides, a prompt long enough to leave the paths for a handful of tokens, and a request that filters and
penalises: penalties are a chain of torch operations whose kernels CUDA loads when they are first used. On a
GPU also a long prompt beside a sequence that decodes: products and attention of many tokens have kernels of
their own. Small steps with prompts are CUDA graphs there, recorded when their shape has come some times,
which stops everything for some 0.1 s: those of up to four prompts, alone and beside up to 256 sequences, come
that often.
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
MOST_DECODES = 256
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
        if not config.enforce_eager:
            _visit_shapes(engine, config, room)
    # What imports it is light without.
    from tiny_vllm.engine.decode_graphs import row_bucket

    buckets = sorted({row_bucket(number) for number in range(1, config.max_num_seqs + 1)})
    pages_each = -(-(1 + 2 * len(buckets)) // config.page_size)
    count = min(config.max_num_seqs, config.num_pages // pages_each)
    lens = [2 * (len(buckets) - buckets.index(row_bucket(index + 1))) for index in range(count)]
    _run(engine, [((0,), replace(GREEDY, max_tokens=length)) for length in lens])


def _visit_shapes(engine: DrivenEngine, config: EngineConfig, room: int) -> None:
    """Steps of a prompt beside some decodes, that fill each shape of `forward_graphs`, until it is
    recorded."""
    # What imports it is light without.
    from tiny_vllm.engine.forward_graphs import DECODE_BUCKETS, RECORD_AT, ROW_BUCKETS

    assert config.num_pages is not None and config.max_num_seqs and config.max_num_batched_tokens
    is_mixed = config.prefill_policy != "exclusive"
    for num_decodes in DECODE_BUCKETS if is_mixed else (0,):
        if num_decodes > min(MOST_DECODES, config.max_num_seqs - 1):
            break
        limit = min(room, config.max_num_batched_tokens - num_decodes)
        if num_decodes and config.max_prefill_tokens_per_decode is not None:
            limit = min(limit, config.max_prefill_tokens_per_decode)
        lens = [rows - num_decodes for rows in ROW_BUCKETS if num_decodes < rows <= limit + num_decodes]
        # Of each decode: its prompt, a token a step, and one that is planned ahead.
        pages_each = -(-(RECORD_AT * len(lens) + 3) // config.page_size)
        free_pages = config.num_pages - num_decodes * pages_each
        names = [f"decode {index}" for index in range(num_decodes)]
        if not lens or 2 * -(-(lens[0] + 1) // config.page_size) > free_pages:
            continue
        for name in names:
            _add(engine, name, (0,), replace(GREEDY, max_tokens=RECORD_AT * len(lens) + 2))
        if names:
            engine.step()
        for length in lens:
            # Two of them hold pages at a time where steps are planned ahead.
            if 2 * -(-(length + 1) // config.page_size) <= free_pages:
                for occurrence in range(RECORD_AT):
                    _add(engine, f"{length}, {occurrence}", (0,) * length, replace(GREEDY, max_tokens=1))
                    engine.step()
        while engine.has_work:
            engine.step()


def _run(engine: DrivenEngine, requests: list[tuple[tuple[int, ...], SamplingParams]]) -> None:
    for index, (prompt, params) in enumerate(requests):
        _add(engine, str(index), prompt, params)
    while engine.has_work:
        engine.step()


def _add(engine: DrivenEngine, name: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
    """Requests of other names share no pages."""
    salt = f"warm-up {name}"
    engine.add(Request(salt, prompt, params, time.monotonic(), cache_salt=salt))
