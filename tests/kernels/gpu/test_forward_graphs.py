"""Small steps with prompts as CUDA graphs, against the same steps kernel by kernel.

Where kernels are interpreted, a replay runs the padded step again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.forward_graphs import runner_of
from tests.helpers.tiny_families import CASES, WINDOW
from tests.kernels.gpu.test_chain_families import make_weights, on_device
from tests.kernels.gpu.test_engine import CONFIG
from tests.models.test_family_devices import spec_of_case
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.engine import forward_graphs
from tiny_vllm.engine.batch import BatchShape, build_batch, pack_batch
from tiny_vllm.engine.forward_graphs import RECORD_AT, ForwardGraphs, GraphRecorder, Record
from tiny_vllm.engine.plan import Chunk, StepPlan
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.kernels.triton_support import INTERPRETED
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs: needs a GPU")

PAGE_SIZE = 16
MAX_LEN = 128
PREFIX_LEN = 2 * PAGE_SIZE
# Of the largest value, over some layers. FP32: products of other sizes add up in another order. BF16: each of
# some ten roundings per row may fall to the other side.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 10 * 2**-8}
SHOWN_CASES = ["llama", "gpt-oss"] if INTERPRETED else [*CASES]


class Rig:
    """A decoder over the pages of four slots, of which slot 3 shares its first pages with slot 0."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_len: int = MAX_LEN
    ) -> None:
        weights = on_device(make_weights(spec), device)
        if dtype != torch.float32:
            weights = _converted(weights, dtype)
        self.spec, self.device = spec, device
        self.decoder = Decoder(spec, weights, max_model_len=max_len)
        width = max_len // PAGE_SIZE
        num_pages = 4 * width + 1
        self.kv_cache = KVCache.allocate(
            spec, num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype, device=device
        )
        self.table = SlotTable(4, width, device)
        pages = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        pages = pages.view(4, width)
        pages[3, : PREFIX_LEN // PAGE_SIZE] = pages[0, : PREFIX_LEN // PAGE_SIZE]
        self.table.page_table.copy_(pages)
        self.table.num_pages[:] = [width] * 4
        record: Record = (lambda run: run) if device.type == "cpu" else GraphRecorder(device)
        self.graphs = ForwardGraphs(self.decoder, self.kv_cache, self.table, record, record_at=1)

    def chunk(self, slot: int, start: int, length: int, seed: int = 0) -> Chunk:
        rng = random.Random(f"{slot} {start} {seed}")
        tokens = tuple(rng.randrange(self.spec.vocab_size) for _ in range(length))
        return Chunk(slot, slot, start, tokens, samples=True)

    def set_decode(self, slot: int, computed_len: int, token: int) -> None:
        self.table.computed_len[slot] = computed_len
        self.table.last_token[slot] = token

    @torch.inference_mode()
    def eager(self, plan: StepPlan) -> Tensor:
        shape = BatchShape.of(plan, self.table)
        packed = torch.from_numpy(pack_batch(plan, shape, 4)).to(self.device)
        return self.decoder.forward(build_batch(packed, shape, self.table, PAGE_SIZE), self.kv_cache)

    def replayed(self, plan: StepPlan) -> Tensor:
        """The rows of the step from a graph, which is recorded if need be."""
        shape = self.graphs.choose_shape(plan)
        assert shape is not None
        packed = torch.from_numpy(pack_batch(plan, shape, 4)).to(self.device)
        hidden = self.graphs.forward(shape, packed)
        assert hidden.isfinite().all(), "padding"
        end = shape.num_decodes + sum(1 if shape.ends_only else len(chunk.token_ids) for chunk in plan.chunks)
        return torch.cat((hidden[: len(plan.decode_slots)], hidden[shape.num_decodes : end]))


def _converted(weights: Any, dtype: torch.dtype) -> Any:
    layers = []
    for layer in weights.layers:
        names = [name for name in layer.__slots__ if getattr(layer, name) is not None]
        layers.append(replace(layer, **{name: getattr(layer, name).to(dtype) for name in names}))
    embedding = weights.embedding.to(dtype)
    is_tied = weights.lm_head is weights.embedding
    return replace(
        weights,
        embedding=embedding,
        layers=layers,
        final_norm=weights.final_norm.to(dtype),
        lm_head=embedding if is_tied else weights.lm_head.to(dtype),
    )


def plan_of(*chunks: Chunk, decodes: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(0, (), (), (), decodes, decodes, chunks)


def check(rig: Rig, plan: StepPlan) -> None:
    """Where the ends of chunks are wanted alone, and where all rows are."""
    whole = tuple(replace(chunk, num_prompt_logprobs=0) for chunk in plan.chunks)
    for chunks in (plan.chunks, whole):
        of_kind = replace(plan, chunks=chunks)
        expected = rig.eager(of_kind).clone()
        actual = rig.replayed(of_kind)
        tolerance = TOLERANCES[expected.dtype] * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def check_all_kinds(rig: Rig) -> None:
    """Twice: other tokens go through graphs that were recorded with the first ones."""
    for seed in range(1 if INTERPRETED else 2):
        chunk = lambda slot, start, length, seed=seed: rig.chunk(slot, start, length, seed)  # noqa: E731
        # Prompts, one of them longer than the window.
        check(rig, plan_of(chunk(0, 0, 2 * WINDOW + 5), chunk(2, 0, 5)))
        # The first chunk of a prompt beside decodes.
        rig.set_decode(0, 2 * WINDOW + 5, 7 + seed)
        rig.set_decode(2, 5, 11)
        check(rig, plan_of(chunk(1, 0, 19), decodes=(2, 0)))
        # Its rest, beside a prefix hit.
        check(rig, plan_of(chunk(1, 19, 20), chunk(3, PREFIX_LEN, 6), decodes=(2,)))
        check(rig, plan_of(chunk(1, 19, 20)))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take a millisecond per program."""
    if INTERPRETED:
        monkeypatch.setattr(forward_graphs, "ROW_BUCKETS", (48,))


@pytest.mark.parametrize("case", SHOWN_CASES)
@pytest.mark.usefixtures("few_rows")
def test_replays_follow_steps_kernel_by_kernel(device: torch.device, case: str) -> None:
    check_all_kinds(Rig(spec_of_case(case), device, torch.float32))


LLAMA = dict(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)


def larger_spec(**changes: Any) -> ModelSpec:
    spec = spec_of_case("llama")
    rope = replace(spec.rope, rotary_dim=64)
    return replace(spec, **{**LLAMA, "rope": rope, **changes})


@needs_gpu
def test_replays_in_bf16_follow_steps_kernel_by_kernel(device: torch.device) -> None:
    """With heads of 64, as the kernels for Hopper take them."""
    rig = Rig(larger_spec(), device, torch.bfloat16, max_len=2048)
    check_all_kinds(rig)
    # Shapes in turn, graphs and single kernels: what a kernel leaves for the next launch is in order.
    for length in (3, 700, 64, 130, 900, 3):
        for plan in (plan_of(rig.chunk(1, 0, length)), plan_of(rig.chunk(1, 5, length), decodes=(2,))):
            check(rig, plan)
            check(rig, plan)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [64, 512])
def test_a_step_that_fills_its_shape_is_the_same_bit_for_bit(device: torch.device, num_tokens: int) -> None:
    rig = Rig(larger_spec(), device, torch.bfloat16, max_len=1024)
    for seed in range(2):
        plan = plan_of(replace(rig.chunk(1, 0, num_tokens, seed), num_prompt_logprobs=0))
        expected = rig.eager(plan).clone()
        assert torch.equal(rig.replayed(plan), expected)


@needs_gpu
def test_recording_leaves_slots_and_pages_as_they_are(device: torch.device) -> None:
    rig = Rig(spec_of_case("llama"), device, torch.float32)
    rig.eager(plan_of(rig.chunk(0, 0, 30)))
    rig.set_decode(0, 30, 5)
    columns = rig.table.all_page_table, rig.table.all_computed_len, rig.table.all_last_token
    before = [tensor.clone() for tensor in (*columns, rig.kv_cache.k[:, 1:], rig.kv_cache.v[:, 1:])]
    record = rig.graphs._record
    assert record is not None

    def check_after(run: Callable[[], None]) -> Callable[[], None]:
        replay = record(run)
        after = (*columns, rig.kv_cache.k[:, 1:], rig.kv_cache.v[:, 1:])
        assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
        return replay

    rig.graphs._record = check_after
    rig.replayed(plan_of(rig.chunk(1, 0, 20), decodes=(0,)))


@needs_gpu
def test_the_engine_takes_graphs_unless_it_is_eager(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 1024}))

    def generate(eager: bool) -> tuple[list[list[int]], ForwardGraphs | None]:
        rng = random.Random(1)
        params = [
            SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
            SamplingParams(seed=1, max_tokens=5, temperature=0.8),
            SamplingParams(seed=2, max_tokens=12, top_k=20, top_p=0.8, repetition_penalty=1.1),
        ]
        options: dict[str, Any] = dict(
            load_format="dummy", dtype="float32", num_pages=400, page_size=16, max_num_seqs=8,
            max_num_batched_tokens=300, device="cuda", enforce_eager=eager,
        )  # fmt: skip
        tokens = []
        with LLM(str(path), **options) as llm:
            for _ in range(RECORD_AT + 2):
                prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (400, 3, 90, 250, 64)]
                chosen = [params[index % 3] for index in range(len(prompts))]
                outputs = llm.generate(prompts, chosen, use_tqdm=False)
                tokens += [output.outputs[0].token_ids for output in outputs]
            return tokens, runner_of(llm)._graphs

    expected, no_graphs = generate(eager=True)
    actual, graphs = generate(eager=False)
    assert actual == expected
    assert no_graphs is None
    assert graphs is not None and graphs._record is not None and len(graphs._replays) > 1
