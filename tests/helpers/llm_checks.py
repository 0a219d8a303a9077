"""What tests of the offline API have in common."""

from __future__ import annotations

import random
from typing import Any

from tests.helpers.tiny_models import TURN_END_ID
from tiny_vllm import LLM, RequestOutput, SamplingParams

EOS_IDS = (1, TURN_END_ID)
"""Tokens that end a choice of the tiny model."""


def assert_pool_is_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, **options})


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 320) for _ in range(length)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]
