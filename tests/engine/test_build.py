"""What is refused before any weight is read. The bundled model has 0.25 GiB of weights in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import build
from tiny_vllm.errors import ConfigError

MIB = 1 << 20


def refusal(**options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        build.plan_engine(EngineConfig(load_format="dummy", **options))
    return error.value


@pytest.mark.parametrize("num_pages", [None, 1])
@pytest.mark.parametrize(
    ("dtype", "need", "hint"),
    [
        ("bfloat16", "0.25", "use a smaller model"),
        ("float32", "0.50", "use a smaller model, or dtype='bfloat16' (half as much)"),
    ],
)
def test_weights_that_exceed_main_memory_are_refused_in_their_own_words(
    dtype: str, need: str, hint: str, num_pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_available_bytes", lambda: 100 * MIB)
    error = refusal(device="cpu", dtype=dtype, num_pages=num_pages)
    assert error.message == f"the weights need {need} GiB in {dtype}, but 0.10 GiB of memory are available"
    assert error.hint == hint


def test_memory_of_unknown_size_refuses_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_available_bytes", lambda: 0)
    build.plan_engine(EngineConfig(load_format="dummy", device="cpu"))


def test_weights_that_fit_leave_the_blame_to_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_available_bytes", lambda: 300 * MIB)
    error = refusal(device="cpu", dtype="bfloat16")
    assert error.message.startswith("the page pool needs")


@pytest.mark.parametrize("pages", [{}, {"num_pages": 1}, {"kv_cache_memory_bytes": 1 << 20}])
@pytest.mark.parametrize(
    ("total", "there", "hint"),
    [
        (100 * MIB, "0.05", "use a smaller model"),
        (400 * MIB, "0.20", "use a smaller model, or raise gpu_memory_utilization"),
    ],
)
def test_weights_that_exceed_the_gpus_memory_are_refused_in_their_own_words(
    total: int, there: str, hint: str, pages: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    error = refusal(device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5, **pages)
    assert error.message == (
        f"the weights need 0.25 GiB in bfloat16, but {there} GiB of memory are available "
        "(gpu_memory_utilization is 0.5)"
    )
    assert error.hint == hint
