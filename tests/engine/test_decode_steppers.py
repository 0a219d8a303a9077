"""Steps of decodes alone through a stepper, as on a GPU, with the same tokens as without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tests.models.reference import PagedDecoder, spec_of, weights_of
from tiny_vllm import LLM, RequestOutput, SamplingParams
from tiny_vllm.engine import build
from tiny_vllm.engine.decode_graphs import DecodeGraphs, row_bucket
from tiny_vllm.engine.runner import Runner
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens_ref
from tiny_vllm.kernels.sampling_noise import noise_keys
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.models import attention
from tiny_vllm.models.batch import ForwardBatch


class ReferenceChain:
    """What `DecodeChain` does, by the CPU's decoder; slots beyond the table are padding."""

    def __init__(self, runner: Runner, state: SlotState) -> None:
        self.decoder, self.kv_cache, self.page_size = runner._decoder, runner._kv_cache, runner._page_size
        self.num_slots = len(state.computed_len)

    def logits(self, state: SlotState, slots: torch.Tensor, *, max_context_len: int) -> torch.Tensor:
        is_real = slots < self.num_slots
        rows = torch.where(is_real, slots, 0)
        positions = torch.where(is_real, state.computed_len[rows], 0)
        table = torch.where(is_real[:, None], state.page_table[rows], 0)
        assert int(positions.max()) < max_context_len
        pages = table.gather(1, positions[:, None] // self.page_size)[:, 0]
        none = torch.empty(0, dtype=torch.int64)
        batch = ForwardBatch(
            token_ids=torch.where(is_real, state.last_token[rows], 0),
            positions=positions,
            cells=pages * self.page_size + positions % self.page_size,
            decode_page_table=table,
            decode_context_lens=positions + 1,
            prefill_page_table=table[:0],
            prefill_query_starts=torch.zeros(1, dtype=torch.int64),
            prefill_context_lens=none,
        )
        return self.decoder.logits(self.decoder.forward(batch, self.kv_cache))

    def step(
        self, state: SlotState, slots: torch.Tensor, temperature: torch.Tensor, *, max_context_len: int
    ) -> torch.Tensor:
        rows = torch.where(slots < self.num_slots, slots, 0)
        keys = noise_keys(state.stream[rows], state.sample_position[rows])
        logits = self.logits(state, slots, max_context_len=max_context_len)
        advance = SlotAdvance(slots, state.last_token, state.computed_len, state.sample_position)
        return draw_tokens_ref(logits, temperature, keys, advance)


class Watched:
    """A stepper that notes which slots it was given, and keeps to a number of rows."""

    def __init__(self, inner: DecodeGraphs, max_rows: int) -> None:
        self.inner = inner
        self.max_rows = max_rows
        self.row_counts: list[int] = []
        self.drawn: list[torch.Tensor] = []
        self.contexts: list[int] = []
        self.num_logits = 0

    def draw(self, slots: torch.Tensor, max_context_len: int, tokens: torch.Tensor) -> None:
        self.row_counts.append(len(slots))
        self.drawn.append(slots)
        self.contexts.append(max_context_len)
        self.inner.draw(slots, max_context_len, tokens)

    def logits(self, slots: torch.Tensor, max_context_len: int) -> torch.Tensor:
        self.row_counts.append(len(slots))
        self.num_logits += 1
        return self.inner.logits(slots, max_context_len)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), make_tiny_llama())


def with_steppers(directory: Path, row_limits: tuple[int, ...], **options: Any) -> tuple[LLM, list[Watched]]:
    """An engine on the CPU whose decodes go through steppers, as those of a GPU do."""
    options = {"num_pages": 120, "page_size": 4, "max_num_seqs": 6, "fused_cpu_decode": False, **options}
    llm = LLM(str(directory), async_scheduling=True, **options)
    runner = llm._live_engine()._executor
    assert isinstance(runner, Runner)
    table, sampler = runner._table, runner._sampler
    state = SlotState(
        table.page_table, table.computed_len, table.last_token, sampler.stream, sampler.position
    )
    chain: Any = ReferenceChain(runner, state)
    steppers = [
        Watched(DecodeGraphs(chain, state, sampler.temperature, capture=False), limit) for limit in row_limits
    ]
    runner._steppers = steppers
    return llm, steppers


@pytest.fixture(params=[(6,), (1, 4)], ids=["one", "by rows"])
def stepped(directory: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, list[Watched]]]:
    llm, steppers = with_steppers(directory, request.param)
    yield llm, steppers
    llm.close()


def results(outputs: list[RequestOutput]) -> list[tuple[list[int], str | None]]:
    return [(choice.token_ids, choice.finish_reason) for output in outputs for choice in output.outputs]


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(4, 320) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


PLAIN = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=9, temperature=1.8, stop_token_ids=list(range(4, 60))),
)
SPECIAL = (
    SamplingParams(seed=3, max_tokens=9, top_k=20, top_p=0.8),
    SamplingParams(seed=4, max_tokens=12, repetition_penalty=1.3, min_p=0.02, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, logit_bias={7: 3.0}, min_tokens=4, logprobs=1),
    SamplingParams(seed=5, max_tokens=14, bad_words=["e", "the", "qu"], ignore_eos=True),
)


@pytest.mark.parametrize("params", [PLAIN, PLAIN + SPECIAL], ids=["plain", "with special ones"])
def test_tokens_are_those_of_the_engine_without_a_stepper(
    directory: Path, stepped: tuple[LLM, list[Watched]], params: tuple[SamplingParams, ...]
) -> None:
    llm, steppers = stepped
    all_params = [*params] * 3
    prompts = random_prompts(len(all_params))
    with LLM(str(directory), num_pages=120, page_size=4, max_num_seqs=6, fused_cpu_decode=False) as plain:
        expected = results(plain.generate(prompts, all_params))
    assert results(llm.generate(prompts, all_params)) == expected
    for stepper in steppers:
        assert stepper.row_counts and max(stepper.row_counts) <= stepper.max_rows
    assert params is PLAIN or any(stepper.num_logits for stepper in steppers)
    stats = llm.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_unchanged_decodes_are_given_as_the_same_tensor_and_contexts_cover_every_page(
    directory: Path,
) -> None:
    llm, (stepper,) = with_steppers(directory, (6,))
    with llm:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        llm.generate([[5] * 5, [6] * 9], params)
        both = [slots for slots in stepper.drawn if len(slots) == 2]
        assert len(both) > 40 and all(slots is both[0] for slots in both)
        assert stepper.contexts == sorted(stepper.contexts)
        assert stepper.contexts[-1] == -(-(9 + 49) // 4) * 4


def test_a_slot_that_changes_hands_is_sampled_by_its_new_owners_rules(directory: Path) -> None:
    """The decodes have the same slots before and after, but other parameters."""
    llm, (stepper,) = with_steppers(directory, (6,), max_num_seqs=1)
    special = SamplingParams(max_tokens=6, seed=1, top_k=1, temperature=5.0, ignore_eos=True)
    with llm:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        first, second = llm.generate([[5, 6, 7], [5, 6, 7]], [greedy, special])
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert stepper.num_logits == 5 and len(stepper.drawn) == 5


def test_a_tape_that_does_not_compile_is_replaced_with_one_warning() -> None:
    compiling: Future[Any] = Future()
    compiling.set_exception(CompileError("NVRTC cannot compile the kernel tape"))
    nothing: Any = None
    with pytest.warns(RuntimeWarning, match="NVRTC cannot compile the kernel tape") as warned:
        sampler: Any = SimpleNamespace(temperature=None)
        assert build._make_tape(nothing, nothing, nothing, nothing, nothing, sampler, compiling) == []
    assert len(warned) == 1


@pytest.mark.parametrize("max_model_len", [7, 256])
def test_what_prompts_run_through_is_loaded_without_touching_anybodys_page(max_model_len: int) -> None:
    model = make_tiny_llama()
    paged = PagedDecoder(
        spec_of(model.config),
        weights_of(model),
        page_size=16,
        num_pages=5,
        max_model_len=max_model_len,
        poison=7.0,
    )
    device = torch.device("cpu")
    table = SlotTable(3, -(-max_model_len // 16), device)
    build._load_prompt_kernels(paged.decoder, paged.kv_cache, table, max_model_len, device)
    for pages in (paged.kv_cache.k, paged.kv_cache.v):
        assert (pages[:, 1:] == 7).all()
        assert not (pages[:, 0, :, : min(max_model_len, 16)] == 7).any()
        assert (pages[:, 0, :, max_model_len:] == 7).all()


def test_attention_of_whole_chunks_and_of_their_ends_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_llama()
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=16, max_model_len=64)
    rows = []

    def told(name: str, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def tell(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            rows.append((name, len(q)))
            return attend(q, *args, **options)

        return tell

    for name in ("prefill_attention", "paged_decode_attention"):
        monkeypatch.setattr(attention, name, told(name, getattr(attention, name)))
    device = torch.device("cpu")
    build._load_prompt_kernels(paged.decoder, paged.kv_cache, SlotTable(3, 4, device), 64, device)
    assert rows == [("prefill_attention", 32), ("paged_decode_attention", 1)]


def test_rows_are_padded_by_less_than_half_and_beyond_32_by_less_than_a_step() -> None:
    buckets = [row_bucket(number) for number in range(1, 600)]
    assert all(number <= bucket < 2 * number for number, bucket in enumerate(buckets, 1))
    assert all(bucket - number < (32 if number <= 256 else 64) for number, bucket in enumerate(buckets, 1))
    assert sorted(set(buckets))[:9] == [1, 2, 4, 8, 16, 32, 64, 96, 128]
