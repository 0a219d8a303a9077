"""Small steps with prompts, padded to the shapes of graphs: the same tokens as without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forward_graphs import CountingRecorder, runner_of, take_graphs
from tests.helpers.tiny_families import make_tiny_model
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.engine.batch import BatchShape, build_batch, pack_batch
from tiny_vllm.engine.forward_graphs import MAX_ROWS, ForwardGraphs
from tiny_vllm.engine.plan import Chunk, StepPlan

PARAMS = (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=5, temperature=0.8, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=11, top_k=20, repetition_penalty=1.2, ignore_eos=True),
)
CASES = ("llama", "mistral", "gemma2", "qwen3 moe", "gpt-oss")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("llama"), make_tiny_llama(), tokenizer=False))


def open_llm(path: str, **options: Any) -> LLM:
    defaults = dict(
        device="cpu",
        dtype="float32",
        num_pages=100,
        page_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        fused_cpu_decode=False,
    )
    return LLM(path, **{**defaults, **options})


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Longer than a chunk, short, of a common prefix, of one token."""
    prefix = [rng.randrange(4, VOCAB_SIZE) for _ in range(20)]
    tails = [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (90, 3, 30, 1)]
    return [prefix + tails[0], tails[1], prefix + tails[2], tails[3], prefix + tails[1]]


def generate(llm: LLM) -> list[list[int]]:
    """Rounds of equal lengths and other tokens, so that shapes come back."""
    rng = random.Random(0)
    tokens: list[list[int]] = []
    for _ in range(3):
        prompts = make_prompts(rng)
        params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += [output.outputs[0].token_ids for output in outputs]
    return tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["step_by_step", "ahead"])
@pytest.mark.parametrize("case", CASES)
def test_padded_steps_give_the_tokens_of_steps_as_they_are(case: str, ahead: bool, tmp_path: Path) -> None:
    path = str(save_tiny_llama(tmp_path, make_tiny_model(case), tokenizer=False))
    with open_llm(path, async_scheduling=ahead) as llm:
        expected = generate(llm)
    with open_llm(path, async_scheduling=ahead) as llm:
        recorder = CountingRecorder()
        take_graphs(llm, recorder)
        assert generate(llm) == expected
    assert recorder.num_replays > recorder.num_recorded > 1


def test_a_shape_is_recorded_when_it_comes_again(path: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    counts = []
    with open_llm(path) as llm:
        recorder = CountingRecorder()
        take_graphs(llm, recorder)
        for start in (5, 50, 100):
            llm.generate([list(range(start, start + 30))], params, use_tqdm=False)
            counts.append((recorder.num_recorded, recorder.num_replays))
    assert counts == [(0, 0), (1, 1), (1, 2)]


def test_a_shape_has_to_earn_its_recording(path: str) -> None:
    recorder = CountingRecorder()
    with open_llm(path) as llm:
        runner = runner_of(llm)
        graphs = ForwardGraphs(runner._decoder, runner._kv_cache, runner._table, recorder)
        small, large = plan_of((chunk_of(3),)), plan_of((chunk_of(100),))
        found = [graphs.choose_shape(plan) is not None for plan in (small, small, large, small, small, large)]
    assert found == [False, False, False, False, True, False]


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def plan_of(chunks: tuple[Chunk, ...], decode_slots: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(0, (), (), (), decode_slots, decode_slots, chunks)


def chunk_of(num_tokens: int, slot: int = 0, *, reads_inside: bool = False) -> Chunk:
    num_logprobs = 0 if reads_inside else None
    return Chunk(slot, slot, 0, (7,) * num_tokens, samples=True, num_prompt_logprobs=num_logprobs)


def forward(llm: LLM, plan: StepPlan, graphs: ForwardGraphs) -> torch.Tensor:
    graphs.choose_shape(plan)
    shape = graphs.choose_shape(plan)
    assert shape is not None
    packed = torch.from_numpy(pack_batch(plan, shape, runner_of(llm)._table.padding_slot))
    return graphs.forward(shape, packed)


@pytest.mark.parametrize(("reads_inside", "num_rows"), [(False, 4 + 4), (True, 64)])
def test_padding_is_finite(path: str, reads_inside: bool, num_rows: int) -> None:
    """A row that is not would be carried on to experts, whose numbers are computed from it."""
    with open_llm(path) as llm:
        graphs = take_graphs(llm, CountingRecorder())
        with uninitialised_memory_is_nan():
            assert torch.empty(1).isnan()
            hidden = forward(llm, plan_of((chunk_of(3, reads_inside=reads_inside),), (1,)), graphs)
    assert len(hidden) == num_rows
    assert hidden.isfinite().all()


def test_many_chunks_come_out_whole(path: str) -> None:
    """Their ends would leave parts of attention in much memory, if a page table is wide."""
    with open_llm(path, max_num_seqs=80, max_num_batched_tokens=256, num_pages=200) as llm:
        graphs = take_graphs(llm, CountingRecorder())
        shapes = []
        for count in (64, 65):
            plan = plan_of(tuple(chunk_of(2, slot) for slot in range(count)))
            graphs.choose_shape(plan)
            shapes.append(graphs.choose_shape(plan))
    few, many = shapes
    assert few is not None and few.ends_only and few.num_outputs == 64
    assert many is not None and not many.ends_only and many.num_outputs == 256


def test_recording_touches_the_null_page_alone(path: str) -> None:
    with open_llm(path) as llm:
        runner = runner_of(llm)
        cache, table = runner._kv_cache, runner._table
        cache.k.fill_(0.5)
        cache.v.fill_(0.5)
        table.page_table.fill_(3)
        table.computed_len.fill_(5)
        table.last_token.fill_(9)

        def check(run: Callable[[], None]) -> Callable[[], None]:
            run()
            assert (cache.k[:, 1:] == 0.5).all() and (cache.v[:, 1:] == 0.5).all()
            assert (cache.k[:, 0] != 0.5).any()
            return run

        forward(llm, plan_of((chunk_of(3),), (1,)), take_graphs(llm, check))
        assert (cache.k[:, 3] != 0.5).any(), "the step itself writes its page"
        assert (table.page_table == 3).all() and (table.computed_len == 5).all()
        assert (table.last_token == 9).all()
        assert (table.all_page_table[-1] == 0).all() and table.all_computed_len[-1] == 0


def test_where_recording_fails_steps_go_on_without(path: str) -> None:
    calls = []

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        calls.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    with open_llm(path) as llm:
        expected = generate(llm)
    with open_llm(path) as llm:
        graphs = take_graphs(llm, refuse)
        with pytest.warns(RuntimeWarning, match="cannot be recorded as a CUDA graph.*not permitted"):
            assert generate(llm) == expected
        assert graphs.choose_shape(plan_of((chunk_of(3),))) is None
    assert len(calls) == 1


def test_shapes_recorded_before_a_failure_are_still_replayed(path: str) -> None:
    recorder = CountingRecorder()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        if recorder.num_recorded:
            raise RuntimeError("out of memory")
        return recorder(run)

    with open_llm(path) as llm:
        graphs = take_graphs(llm, record)
        small, large = plan_of((chunk_of(3),)), plan_of((chunk_of(100),))
        forward(llm, small, graphs)
        with pytest.warns(RuntimeWarning, match="out of memory"):
            forward(llm, large, graphs)
        forward(llm, small, graphs)
        assert recorder.num_replays == 2
        assert graphs.choose_shape(large) is None


def test_prompt_logprobs_and_embeddings_come_from_padded_steps(path: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    prompts = make_prompts(random.Random(1))

    def ask(llm: LLM) -> tuple[list[Any], list[Any]]:
        for _ in range(3):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            embeddings = llm.embed(prompts, use_tqdm=False)
        return outputs, embeddings

    with open_llm(path) as llm:
        expected, expected_embeddings = ask(llm)
    with open_llm(path) as llm:
        recorder = CountingRecorder()
        take_graphs(llm, recorder)
        actual, embeddings = ask(llm)
        assert recorder.num_replays > 3
    for output, other in zip(actual, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert len(output.prompt_logprobs) == len(other.prompt_logprobs)
        for entries, others in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert entries.keys() == others.keys()
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(others[token].logprob, abs=1e-4)
    for one, other in zip(embeddings, expected_embeddings, strict=True):
        torch.testing.assert_close(
            torch.tensor(one.outputs.embedding), torch.tensor(other.outputs.embedding), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    ("num_decodes", "lens", "expected"),
    [
        (0, (1,), (0, 64, 4)),
        (0, (64,), (0, 64, 4)),
        (0, (60, 5), (0, 128, 4)),
        (1, (60,), (4, 60, 4)),
        (1, (61,), (4, 124, 4)),
        (3, (500, 8, 1, 1, 1), (4, 508 + 128, 16)),
        (0, (MAX_ROWS,), (0, MAX_ROWS, 4)),
    ],
)
def test_shapes_have_room_for_the_step(
    path: str, num_decodes: int, lens: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    with open_llm(path, max_num_seqs=8) as llm:
        graphs = take_graphs(llm, CountingRecorder())
        plan = plan_of(tuple(chunk_of(length) for length in lens), tuple(range(num_decodes)))
        assert graphs.choose_shape(plan) is None, "not yet"
        shape = graphs.choose_shape(plan)
        assert shape is not None
        assert (shape.num_decodes, shape.num_tokens, shape.num_chunks) == expected


def test_large_steps_and_steps_of_decodes_alone_are_not_padded(path: str) -> None:
    with open_llm(path) as llm:
        graphs = take_graphs(llm, CountingRecorder())
        for plan in (
            plan_of((chunk_of(MAX_ROWS + 1),)),
            plan_of((chunk_of(MAX_ROWS),), (1,)),
            plan_of((), (0, 1)),
        ):
            assert graphs.choose_shape(plan) is None
            assert graphs.choose_shape(plan) is None


def test_page_tables_are_as_wide_as_the_longest_decode(path: str) -> None:
    """Four times as wide where they do not suffice, and never wider than the table of slots."""
    with open_llm(path, num_pages=2000, max_model_len=256, page_size=1) as llm:
        graphs = take_graphs(llm, CountingRecorder())
        table = runner_of(llm)._table
        table.num_pages[1] = 200
        plan = plan_of((chunk_of(3),), (1,))
        graphs.choose_shape(plan)
        shape = graphs.choose_shape(plan)
        assert shape is not None and (shape.decode_width, shape.prefill_width) == (256, 256)


def test_a_padded_batch_holds_the_batch_and_null_pages(path: str) -> None:
    with open_llm(path) as llm:
        table = runner_of(llm)._table
        table.page_table[0] = torch.arange(1, table.page_table.shape[1] + 1)
        table.page_table[2] = torch.arange(50, table.page_table.shape[1] + 50)
        table.computed_len[2], table.last_token[2] = 13, 99
        plan = plan_of((Chunk(0, 0, 6, (4, 5, 6), samples=True),), (2,))
        table.num_pages[0], table.num_pages[2] = 2, 2
        exact = BatchShape.of(plan, table)
        batch = build_batch(torch.from_numpy(pack_batch(plan, exact, 4)), exact, table, 8)
        assert batch.token_ids.tolist() == [99, 4, 5, 6]
        assert batch.positions.tolist() == [13, 6, 7, 8]
        assert batch.cells.tolist() == [51 * 8 + 5, 8 + 6, 8 + 7, 2 * 8]
        assert batch.decode_page_table.tolist() == [[50, 51]] and batch.decode_context_lens.tolist() == [14]
        assert batch.prefill_page_table.tolist() == [[1, 2]] and batch.prefill_context_lens.tolist() == [9]
        assert batch.prefill_query_starts.tolist() == [0, 3]
        shape = BatchShape(3, 5, 2, 4, 3)
        padded = build_batch(torch.from_numpy(pack_batch(plan, shape, 4)), shape, table, 8, is_padded=True)
        assert padded.token_ids.tolist() == [99, 0, 0, 4, 5, 6, 0, 0]
        assert padded.positions.tolist() == [13, 0, 0, 6, 7, 8, 0, 0]
        assert padded.cells.tolist() == [51 * 8 + 5, 0, 0, 8 + 6, 8 + 7, 2 * 8, 0, 0]
        assert padded.decode_page_table.tolist() == [[50, 51, 52, 53], [0] * 4, [0] * 4]
        assert padded.decode_context_lens.tolist() == [14, 1, 1]
        assert padded.prefill_page_table.tolist() == [[1, 2, 3], [0] * 3]
        assert padded.prefill_query_starts.tolist() == [0, 3, 3]
        assert padded.prefill_context_lens.tolist() == [9, 1]
