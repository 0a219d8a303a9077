"""What an engine on a CPU holds besides pages, and what gives way where memory is short.

The bundled model: 134,515,008 parameters, of which 49,152 x 576 are the embedding and, tied, the LM head.
"""

from __future__ import annotations

from typing import Any

import pytest

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import build
from tiny_vllm.engine.available_memory import AvailableMemory
from tiny_vllm.engine.build import EnginePlan
from tiny_vllm.errors import ConfigError

MIB = 1 << 20
PARAMETERS = 134_515_008
HEAD = 49_152 * 576
# Of a step of 256 tokens: four hidden vectors, two of Q, K and V, three of the MLP. Logits of 128 rows, FP32,
# three copies.
STEP_VALUES = 256 * (4 * 576 + 2 * 960 + 3 * 1536)
LOGITS = 3 * 128 * 49_152 * 4
# Angles of 8192 positions, and while they are put together 1.5 times as much; page numbers of 16 slots.
TABLES = 8192 * 64 * 4 * 5 // 2 + 16 * 512 * 8
PAGE_VALUES = 2 * 30 * 3 * 64 * 16
WIDTH = {"float32": 4, "bfloat16": 2}


def beside_pages(dtype: str) -> int:
    return (PARAMETERS + HEAD + STEP_VALUES) * WIDTH[dtype] + LOGITS + TABLES


def holding(num_bytes: int) -> int:
    """The least memory that has so much beside the tenth that stays free where memory sizes the pool."""
    least = num_bytes * 10 // 9 - 2
    while least - int(least * 0.1) < num_bytes:
        least += 1
    return least


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plan in FP32 on a CPU with so many bytes, without a second copy for decodes unless asked for."""

    def plan(available: int | None, limit: str | None = None, **options: Any) -> EnginePlan:
        memory = None if available is None else AvailableMemory(available, limit)
        monkeypatch.setattr(build, "available_memory", lambda: memory)
        options = {"dtype": "float32", "fused_cpu_decode": False, "device": "cpu", **options}
        return build.plan_engine(EngineConfig(load_format="dummy", **options))

    monkeypatch.setattr(build, "can_pack", lambda dtype, device: True)
    return plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_pages", [1, 100, 700])
def test_the_pool_takes_what_all_else_leaves(plan: Any, dtype: str, num_pages: int) -> None:
    page = PAGE_VALUES * WIDTH[dtype]
    enough, more = (holding(beside_pages(dtype) + number * page) for number in (num_pages, num_pages + 1))
    assert plan(enough, dtype=dtype).config.num_pages == num_pages
    assert plan(more - 1, dtype=dtype).config.num_pages == num_pages


def test_it_takes_no_more_than_by_default(plan: Any) -> None:
    default = (1 << 30) // (PAGE_VALUES * 4)
    for available in (None, 64 << 30, holding(beside_pages("float32") + (1 << 30))):
        assert plan(available).config.num_pages == default


def test_a_matrix_that_is_not_copied_leaves_its_memory_to_pages(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "can_pack", lambda dtype, device: False)
    available = holding(beside_pages("float32") - HEAD * 4 + 10 * PAGE_VALUES * 4)
    assert plan(available).config.num_pages == 10


def test_the_second_copy_for_decodes_is_not_planned_twice(plan: Any) -> None:
    copied = (PARAMETERS - 576) * 4  # all but the final norm; the embedding as LM head
    available = holding(beside_pages("float32") + copied + 10 * PAGE_VALUES * 4)
    assert plan(available, fused_cpu_decode=True).config.num_pages == 10
    with pytest.raises(ConfigError) as error:
        plan(available - 12 * PAGE_VALUES * 4, fused_cpu_decode=True)
    assert "fused_cpu_decode=False" in str(error.value)


def test_longer_steps_and_contexts_leave_less(plan: Any) -> None:
    available = holding(beside_pages("float32") + 600 * PAGE_VALUES * 4)
    step = plan(available, max_num_batched_tokens=1256).config.num_pages
    assert (600 - step) * PAGE_VALUES * 4 == pytest.approx(1000 * STEP_VALUES // 256 * 4, abs=PAGE_VALUES * 4)
    context = plan(available, max_model_len=4096).config.num_pages
    assert (context - 600) * PAGE_VALUES * 4 == pytest.approx(TABLES // 2, abs=PAGE_VALUES * 4)


@pytest.mark.parametrize(
    "options", [{"num_pages": 20}, {"kv_cache_memory_bytes": 20 * PAGE_VALUES * 4}, {"mean_sequence_len": 13}]
)
def test_a_pool_that_was_asked_for_does_not_shrink(plan: Any, options: dict[str, Any]) -> None:
    if "mean_sequence_len" in options:
        options = {**options, "pool_sizing": "formula"}  # 16 x 13 x 1.5 tokens
    enough = beside_pages("float32") + 20 * PAGE_VALUES * 4
    assert plan(enough, **options).config.num_pages == 20
    with pytest.raises(ConfigError) as error:
        plan(enough - 1, "memory.max of the cgroup is 1.00 GiB", **options)
    assert error.value.message == (
        "the page pool needs 0.01 GiB (20 pages), but of 0.70 GiB available (memory.max of the cgroup is "
        "1.00 GiB) the weights take 0.50 GiB, what is held of them twice 0.11 GiB, a step 0.08 GiB, tables "
        "0.00 GiB"
    )
    assert error.value.hint == "lower num_pages, kv_cache_memory_bytes or mean_sequence_len"


def test_no_room_for_a_page_is_told_with_all_that_takes_it(plan: Any) -> None:
    with pytest.raises(ConfigError) as error:
        plan(
            holding(beside_pages("float32") + PAGE_VALUES * 4) - 1,
            "its data is limited to 1.00 GiB, ulimit -d",
        )
    assert error.value.message == (
        "no memory is left for the KV cache: of 0.77 GiB available (its data is limited to 1.00 GiB, "
        "ulimit -d) the weights take 0.50 GiB, what is held of them twice 0.11 GiB, a step 0.08 GiB, tables "
        "0.00 GiB, what stays free 0.08 GiB"
    )
    assert error.value.hint == (
        "lower max_num_batched_tokens, max_num_seqs or max_model_len, use dtype='bfloat16', or free memory"
    )


def fused(plan: EnginePlan) -> tuple[object, str]:
    (choice,) = (choice for choice in plan.choices if choice.name == "fused_cpu_decode")
    assert choice.value == plan.config.fused_cpu_decode
    return choice.value, choice.reason


@pytest.mark.parametrize("asked", [{"num_pages": 1400}, {"kv_cache_memory_bytes": 1400 * PAGE_VALUES * 4}])
def test_the_second_copy_comes_before_pages_unless_they_were_asked_for(
    plan: Any, asked: dict[str, Any]
) -> None:
    copied = (PARAMETERS - 576) * 4
    planned = plan(4 * copied, fused_cpu_decode=None)
    assert fused(planned)[0] is True
    spare = int(4 * copied * 0.1)
    assert planned.config.num_pages == (3 * copied - spare - beside_pages("float32")) // (PAGE_VALUES * 4)
    planned = plan(4 * copied, fused_cpu_decode=None, **asked)
    value, reason = fused(planned)
    assert value is False and reason.endswith("GiB that weights, steps and pages leave")
    assert planned.config.num_pages == 1400


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: False)


def test_fp32_is_kept_with_fewer_pages_down_to_one_sequence(plan: Any, without_bf16: None) -> None:
    sequence = holding(beside_pages("float32") + 512 * PAGE_VALUES * 4)
    planned = plan(sequence, dtype="auto")
    assert (planned.config.dtype, planned.config.num_pages) == ("float32", 512)
    planned = plan(sequence - 1, dtype="auto")
    assert planned.config.dtype == "bfloat16"
    (reason,) = (choice.reason for choice in planned.choices if choice.name == "dtype")
    assert reason.endswith(
        ": in FP32 there is room for pages of 8176 tokens, less than one sequence of max_model_len (8192)"
    )
    # Whoever wants less context gets FP32 with less memory.
    less = plan(sequence - 200 * PAGE_VALUES * 4, dtype="auto", max_model_len=4096)
    assert less.config.dtype == "float32"


def test_fp32_that_is_asked_for_takes_the_pages_there_are(plan: Any, without_bf16: None) -> None:
    planned = plan(holding(beside_pages("float32") + 3 * PAGE_VALUES * 4))
    assert (planned.config.dtype, planned.config.num_pages) == ("float32", 3)
