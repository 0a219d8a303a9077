"""Of a chunk whose inner positions nobody reads, the last layer computes the last one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_families import CASES
from tests.models.reference import PagedDecoder
from tests.models.test_family_devices import TOLERANCE_FP32, make_weights, spec_of_case

PROMPT_LENS = 70, 41, 3  # windows are 16


def steps(case: str, device: str, *, ends_only: bool) -> list[Tensor]:
    """Last logits of each sequence, step by step: chunks first alone, then beside a decode, then decodes."""
    spec = spec_of_case(case)
    paged = PagedDecoder(spec, make_weights(spec, device), page_size=16, device=device, poison=float("nan"))
    generator = torch.Generator().manual_seed(0)
    first, second, third = (
        paged.add(
            torch.randint(spec.vocab_size, (length + 2,), generator=generator).tolist(), max_len=length + 2
        )
        for length in PROMPT_LENS
    )
    logits = paged.step([], [(first, 70), (second, 20)], ends_only=ends_only)
    logits += paged.step([first], [(second, 21), (third, 3)], ends_only=ends_only)
    logits += paged.step([first, second, third], [])
    return [of_one[-1].cpu() for of_one in logits]


def assert_ends_equal(case: str, device: str) -> None:
    whole, ends = (steps(case, device, ends_only=ends_only) for ends_only in (False, True))
    for expected, actual in zip(whole, ends, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE_FP32)


@pytest.mark.parametrize("case", CASES)
def test_the_ends_of_chunks_are_what_they_are_among_all_rows(case: str) -> None:
    assert_ends_equal(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_ends_of_chunks_on_a_gpu(case: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: without one it is the test above")
    assert_ends_equal(case, "cuda")


def test_the_last_layer_computes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of_case("llama")
    paged = PagedDecoder(spec, make_weights(spec), page_size=16)
    rows = []
    for layer in paged.decoder.layers:

        def count(hidden: Tensor, residual: Tensor, mlp: Any = layer.mlp) -> Tensor:
            rows.append(len(hidden))
            return mlp(hidden, residual)

        monkeypatch.setattr(layer, "mlp", count)
    first, second = (paged.add(list(range(20)), max_len=20) for _ in range(2))
    paged.step([], [(first, 10), (second, 7)], ends_only=True)
    assert rows == [17] * (spec.num_layers - 1) + [2]
    rows.clear()
    paged.step([first], [(second, 7)], ends_only=True)
    assert rows == [8] * (spec.num_layers - 1) + [2]
