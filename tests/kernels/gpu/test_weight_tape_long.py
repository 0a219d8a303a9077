"""The weight-tape kernel in long contexts, whose keys and values come through its ring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu import test_weight_tape as tape

pytestmark = tape.pytestmark
CASES = [
    [32_768],
    [32_767, 9_000],
    [20_001, 31, 4_096, 12_345],
    [1_000 + 1_777 * row for row in range(8)],
]


@pytest.fixture(params=["1b", "8b"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tape.World:
    monkeypatch.setattr(tape, "MAX_LEN", 33_024)
    return tape.make_world(request.param)


@pytest.mark.parametrize("positions", CASES, ids=lambda positions: f"{len(positions)} rows")
def test_keys_and_values_through_the_ring_change_no_bit(world: tape.World, positions: list[int]) -> None:
    slots = list(range(len(positions)))
    step = world.tape.step(len(slots))
    step.slots.fill_(tape.NUM_SLOTS)
    step.slots[: len(slots)] = torch.tensor(slots)
    tape.start(world, slots, positions)
    exact = [tape.reference(world, slot, torch.float32)[0] for slot in slots]
    rounded = [tape.reference(world, slot, torch.bfloat16)[0] for slot in slots]
    first: list[Tensor] = []
    for kv_stream_limit, kv_window in ((2**31 - 1, 3), (0, 1), (0, 3), (0, 6), (0, 12)):
        step.set_tuning(kv_stream_limit=kv_stream_limit, kv_window=kv_window)
        for _ in range(20):
            tape.start(world, slots, positions)  # NaN behind the contexts
            step.logits.fill_(float("nan"))
            step.compute_logits()
            got = [step.logits[: len(slots)].clone()]
            for cached in (world.cache.k, world.cache.v):
                rows = zip(slots, positions, strict=True)
                got += [tape.new_rows(world, cached, slot, position).clone() for slot, position in rows]
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(first, got, strict=True))
    for row in range(len(slots)):
        limit = 1.1 * tape.error(rounded[row], exact[row])
        assert tape.error(step.logits[row], exact[row]) <= limit, f"row {row}: limit {limit}"


def test_steps_of_long_contexts_repeat_bit_for_bit(world: tape.World) -> None:
    """The first row begins to use the ring on the way."""
    slots, positions = [3, 1], [970, 31_000]
    step = world.tape.step(2)
    step.slots.copy_(torch.tensor(slots))
    drawn = torch.empty(2, dtype=torch.int64, device="cuda")
    runs = []
    for _ in range(3):
        tape.start(world, slots, positions)
        tokens = []
        for _ in range(300):
            step.draw(drawn, stores_logits=True)
            tokens.append(drawn.clone())
        runs.append((torch.stack(tokens), step.logits.clone()))
    assert len(set(runs[0][0][:, 0].tolist())) > 50, "the run is no test if it loops"
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
