"""Full garbage collections wait until no sequence runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tiny_vllm import LLM, SamplingParams
from tiny_vllm.engine.garbage import NEVER, YOUNG_OBJECTS, without_full_collections


def test_thresholds_come_back_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), without_full_collections():
        assert gc.get_threshold() == (YOUNG_OBJECTS, before[1], NEVER)
        raise KeyError
    assert gc.get_threshold() == before


def test_no_full_collection_interrupts_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = LLM._step

    def watched(*arguments: Any) -> Any:
        seen.append(gc.get_threshold()[2])
        return step(*arguments)

    monkeypatch.setattr(LLM, "_step", watched)
    before = gc.get_threshold()
    llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert seen and set(seen) == {NEVER}
    assert gc.get_threshold() == before
