"""Where running sequences are, as the engine tells it."""

from __future__ import annotations

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.engine.sequence import SequenceState


def test_slots_tell_the_state_and_lengths_of_what_runs_and_nothing_of_what_waits() -> None:
    fake = FakeEngine(max_num_seqs=2, max_num_batched_tokens=8)
    fake.add("long", list(range(1, 21)), max_tokens=4)
    fake.add("short", [3, 4], max_tokens=4)
    fake.add("later", [5, 6], max_tokens=4)
    assert fake.engine.slots() == []
    fake.step()
    first = fake.engine.slots()[0]
    assert (first.request_id, first.index, first.state) == ("long", 0, SequenceState.PREFILL)
    assert (first.slot, first.prompt_len, first.known_len, first.computed_len) == (0, 20, 20, 8)
    while any(status.state is SequenceState.PREFILL for status in fake.engine.slots()):
        fake.step()
    statuses = fake.engine.slots()
    assert [status.slot for status in statuses] == [0, 1]
    assert {status.request_id for status in statuses} <= {"long", "short", "later"}
    assert all(status.computed_len == status.known_len - 1 for status in statuses)
    fake.run()
    assert fake.engine.slots() == []


@pytest.mark.parametrize("ahead", [1, 2])
def test_with_look_ahead_more_is_computed_than_known(ahead: int) -> None:
    fake = FakeEngine(num_steps_ahead=ahead)
    fake.add("a", [1, 2, 3], max_tokens=10)
    for _ in range(ahead + 1):
        fake.step()
    (status,) = fake.engine.slots()
    assert (status.state, status.known_len, status.computed_len) == (SequenceState.DECODE, 4, 3 + ahead)
