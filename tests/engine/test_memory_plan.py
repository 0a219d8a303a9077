"""How many pages a GPU's memory gets, from what it has and what is taken, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny_vllm.config import Choice, EngineConfig, ModelFacts, resolve
from tiny_vllm.engine import build

GIB = 1 << 30
TOTAL = 20 * GIB
# The bundled model in 16 bits: keys and values of 30 layers, 3 KV heads of 64, in pages of 16 tokens.
PAGE_BYTES = 2 * 30 * 3 * 64 * 2 * 16
WEIGHT_BYTES = 134_515_008 * 2


@pytest.fixture
def plan(plan_config: Any) -> Any:
    """Bytes planned for pages with so much memory taken by others."""

    def plan(taken: int = 0, **options: Any) -> int:
        num_pages = plan_config(TOTAL, taken, **options).num_pages
        assert num_pages is not None
        return num_pages * PAGE_BYTES

    return plan


@pytest.fixture
def plan_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The complete config on a GPU with so many bytes, of which others have taken some."""

    def plan_config(total: int, taken: int = 0, **options: Any) -> EngineConfig:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - taken, total))
        options = {"dtype": "bfloat16", "weight_tape": False, **options}
        return build.plan_engine(EngineConfig(load_format="dummy", device="cuda", **options)).config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return plan_config


def test_nine_tenths_of_the_memory_are_used_unless_told(plan: Any) -> None:
    assert plan() == plan(gpu_memory_utilization=0.9)
    assert plan() - plan(gpu_memory_utilization=0.5) == pytest.approx(0.4 * TOTAL, abs=PAGE_BYTES)


def test_what_others_hold_and_the_weights_are_not_planned_twice(plan: Any) -> None:
    assert plan() - plan(taken=3 * GIB) == pytest.approx(3 * GIB, abs=PAGE_BYTES)
    # What is left beside pages and weights is for a step: logits of 256 rows in FP32, three copies, and
    # activations of 8192 tokens, for this model less than a GiB together.
    left = 0.9 * TOTAL - WEIGHT_BYTES - plan()
    assert 3 * 256 * 49152 * 4 < left < GIB


def test_a_step_of_fewer_tokens_leaves_more_for_pages(plan: Any) -> None:
    # Per token: four hidden vectors of 576, two of Q, K and V (960), three of the MLP (1536), 2 bytes each.
    saved = (8192 - 1024) * (4 * 576 + 2 * 960 + 3 * 1536) * 2
    assert plan(max_num_batched_tokens=1024) - plan() == pytest.approx(saved, abs=PAGE_BYTES)


def test_no_more_pages_than_all_slots_can_fill(plan: Any) -> None:
    assert plan(max_num_seqs=2, max_model_len=100) == 2 * 7 * PAGE_BYTES


@pytest.mark.parametrize(
    ("gigabytes", "options", "expected"),
    [
        (20, {}, (256, 8192)),
        (80, {}, (256, 16384)),
        (80, {"max_prefill_tokens_per_decode": 4096}, (160, 8192)),
        (80, {"max_num_seqs": 20_000}, (20_000, 20_000)),
        (80, {"max_num_batched_tokens": 100}, (100, 100)),
        (80, {"max_prefill_tokens_per_decode": 4096, "max_num_seqs": 256}, (256, 8192)),
    ],
)
def test_slots_and_steps_suit_the_gpu_and_whether_anybody_waits_for_tokens(
    plan_config: Any, gigabytes: int, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = plan_config(gigabytes * GIB, **options)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected
    assert config.prefill_policy == "exclusive"


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"max_num_seqs": 20_000}, "max_num_batched_tokens", "a token of each slot"),
        ({"max_num_batched_tokens": 100}, "max_num_seqs", "no more than max_num_batched_tokens"),
        ({"max_num_batched_tokens": 100_000}, "max_num_seqs", "default for this device"),
        ({"max_num_seqs": 10}, "max_num_batched_tokens", "default for this device"),
    ],
)
def test_a_limit_that_follows_from_the_other_says_so(options: dict[str, int], name: str, reason: str) -> None:
    facts = ModelFacts(128, 128, 1000, 10)
    device, dtype = Choice("device", "cuda", ""), Choice("dtype", "bfloat16", "")
    _, choices = resolve(
        EngineConfig(**options), facts, device=device, dtype=dtype, free_bytes=GIB, gpu_bytes=TOTAL
    )
    assert [choice.reason for choice in choices if choice.name == name] == [reason]


def test_the_memory_of_large_steps_is_planned(plan_config: Any) -> None:
    # With more memory the pool would hold all that slots can, whatever a step takes.
    tight = {"gpu_memory_utilization": 0.02}
    more = plan_config(80 * GIB, max_num_batched_tokens=8192, **tight).num_pages
    pages = plan_config(80 * GIB, **tight).num_pages
    per_token = (4 * 576 + 2 * 960 + 3 * 1536) * 2
    assert (more - pages) * PAGE_BYTES == pytest.approx(8192 * per_token, abs=PAGE_BYTES)
