"""The weight-tape kernel on the CPU: keys and values through the ring give what loading them gives."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch

from tests.helpers.tape_emulation import EmulatedModel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled by g++")
NEVER = 2**31 - 1


@functools.cache
def model(head_dim: int, page_size: int) -> EmulatedModel:
    return EmulatedModel(head_dim=head_dim, page_size=page_size, num_slots=2, max_len=4608)


CASES = {
    "the first token": [0],
    "one page": [9],
    "page edges": [15, 16],
    "a chunk and its edges": [255, 256],
    "a block without a tile": [40],
    "a short and a long context": [17, 1030],
    "two long contexts": [3001, 1537],
    "a batch of page numbers": [4400],
    "the last of a batch of page numbers": [2048, 2047],
    "padding": [700],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), pytest.param(128, 32, marks=pytest.mark.slow)])
def test_keys_and_values_through_the_ring_change_no_bit(case: str, head_dim: int, page_size: int) -> None:
    positions, tiny = CASES[case], model(head_dim, page_size)
    num_rows = 2 if case == "padding" else len(positions)
    loaded = tiny.step(positions, num_rows=num_rows, kv_stream_limit=NEVER)
    streamed = tiny.step(positions, num_rows=num_rows, seed=1)
    count = len(positions)
    for slot, position in enumerate(positions):
        exact = tiny.reference(slot, position)
        error = (streamed[0][slot] - exact).norm() / exact.norm()
        assert error < 0.02, "BF16 torch is wrong by 0.01"
    assert torch.equal(streamed[0][:count], loaded[0][:count])
    for one, other in zip(streamed[1:], loaded[1:], strict=True):
        # Padding rows write to page 0.
        assert torch.equal(one[:, 1:].view(torch.int16), other[:, 1:].view(torch.int16))


@pytest.mark.parametrize(("stages", "kv_window"), [(4, 1), (4, 3), (7, 12), (8, 8), (10, 6)])
def test_any_ring_and_any_number_of_copies_in_flight_will_do(stages: int, kv_window: int) -> None:
    tiny, positions = model(64, 16), [3333]
    expected = tiny.step(positions, num_rows=1, kv_stream_limit=NEVER)
    for seed in range(2):
        got = tiny.step(positions, num_rows=1, changes={"STAGES": stages}, kv_window=kv_window, seed=seed)
        assert torch.equal(got[0], expected[0])


def test_contexts_below_the_limit_do_not_use_the_ring() -> None:
    tiny, positions = model(64, 16), [1200, 1199]
    # A copy of NaN is noticed by those that use it.
    mistake = ("page * (KV_HEADS * PAGE_SIZE", "0 * (KV_HEADS * PAGE_SIZE")
    logits = tiny.step(positions, num_rows=2, kv_stream_limit=1200, mistake=mistake)[0]
    assert logits[0].isnan().all() and logits[1].isfinite().all()
    logits = tiny.step(positions, num_rows=2, direct_limit=1200, mistake=mistake)[0]
    assert logits[0].isnan().all() and logits[1].isfinite().all()


def test_contexts_far_beyond_the_average_do_not_use_the_ring() -> None:
    tiny, positions, mistake = model(64, 16), [1200, 700], ("page * (KV_HEADS", "0 * (KV_HEADS")
    logits = tiny.step(positions, num_rows=2, changes={"KV_SKEW": 1}, mistake=mistake)[0]
    assert logits[0].isfinite().all() and logits[1].isnan().all()
    expected = tiny.step(positions, num_rows=2, kv_stream_limit=NEVER)[0]
    assert torch.equal(tiny.step(positions, num_rows=2, changes={"KV_SKEW": 1})[0], expected)


def test_the_kernel_can_be_compiled_without_the_ring_for_keys_and_values() -> None:
    tiny, positions = model(64, 16), [1200, 300]
    with_ring = tiny.step(positions, num_rows=2)
    without = tiny.step(positions, num_rows=2, changes={"KV_STREAM": 0})
    assert torch.equal(with_ring[0], without[0])


MISTAKES = [
    ("producer.index = s.kv_index;\n", ""),
    ("min(position - start, POSITIONS)", "min(position - start - 1, POSITIONS)"),
    ("if (c.lane == 0) barrier_arrive(c.empty + 8 * stage + mixed * c.p.zero);", ""),
    ("c.base += chunks;", ""),
    ("if (c > 0) pages = coming;", ""),
    ("coming = page_of(tile + 32 + lane);", "coming = page_of(tile + lane);"),
    ("c.substitute(a, start, position, column);\n      }", "}"),
    ("a.v[i][0] = a.v[i][1] = a.v[i][2] = a.v[i][3] = 0;\n        c", "c"),
    ("barrier_wait(c.full + 8 * stage, (index / STAGES) & 1);", ""),
    ("producer.claim(window, 2 * all_bytes)", "producer.claim(window, CHUNK_BYTES)"),
]
# The values' warp waits for a copy before, as the keys' does: when it looks, the stage may be two uses on.
LATE = (
    "          producer.await_stage();\n        else",
    """          producer.await_stage(),
              barrier_wait(producer.full + 8 * ((producer.index - window) % STAGES),
                           ((producer.index - window) / STAGES) & 1);
        else""",
)


def test_a_wait_of_the_values_warp_that_may_come_too_late_would_be_noticed() -> None:
    tiny = model(64, 16)
    with pytest.raises(RuntimeError, match="deadlock"):
        for seed in range(8):
            changes = {"STAGES": 4}
            tiny.step([3333], num_rows=1, changes=changes, kv_window=3, seed=seed, mistake=LATE)


@pytest.mark.parametrize(
    "mistake",
    [*MISTAKES[:2], *(pytest.param(mistake, marks=pytest.mark.exhaustive) for mistake in MISTAKES[2:])],
)
def test_a_mistake_would_be_noticed(mistake: tuple[str, str]) -> None:
    tiny, noticed = model(64, 16), False
    # A stage that has never been used before (QKV takes eight), and many that are used again and again.
    for position in (100, 4401):
        expected = tiny.step([position], num_rows=1, kv_stream_limit=NEVER)[0]
        try:
            logits = tiny.step([position], num_rows=1, changes={"STAGES": 9}, mistake=mistake)[0]
        except RuntimeError:
            return
        noticed |= not torch.equal(logits, expected)
    assert noticed
