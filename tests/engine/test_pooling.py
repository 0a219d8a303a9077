"""Pooled hidden states: the scheduler over a fake model, and the whole engine against transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.engines import FakeEngine
from tests.helpers.fake_model import expected_pooled
from tests.helpers.oracle import greedy_tokens
from tests.helpers.tiny_models import TURN_END_ID, make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, ModelError, RequestError, SamplingParams
from tiny_vllm.types import FinishReason, Pooling, Request

EOS_IDS = (1, TURN_END_ID)
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
ONLY_PROMPT = SamplingParams(max_tokens=0)

# FP32 sums of at most 96 terms in another order, a few products deep, relative to values of size about 1; the
# mean over the tokens adds nothing, since rounding errors are averaged with the values.
TOLERANCE = 5e-5


class PoolingEngine(FakeEngine):
    """A fake engine that keeps what requests have been told of their prompts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pooled: dict[str, bytes | None] = {}
        self.cached: dict[str, int] = {}

    def add_pooled(self, request_id: str, prompt: list[int], pooling: Pooling, priority: int = 0) -> None:
        request = Request(request_id, tuple(prompt), ONLY_PROMPT, self.clock(), priority, pooling=pooling)
        self.engine.add(request)
        self.requests[request_id] = request

    def step(self) -> Any:
        events = super().step()
        for event in events:
            if event.prompt is not None:
                self.pooled[event.request_id] = event.prompt.pooled
                self.cached[event.request_id] = event.prompt.num_cached_tokens
        return events

    def assert_pooled(self, request_id: str) -> None:
        request = self.requests[request_id]
        assert request.pooling is not None
        expected = expected_pooled(request.prompt_token_ids, request.pooling)
        data = self.pooled[request_id]
        assert data is not None
        np.testing.assert_allclose(np.frombuffer(data, np.float32), expected, rtol=1e-6)
        assert self.outcomes[request_id, 0].finish_reason is FinishReason.LENGTH
        assert self.outcomes[request_id, 0].tokens == []


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_a_prompt_in_chunks_is_pooled_as_a_whole(pooling: Pooling, budget: int) -> None:
    engine = PoolingEngine(max_num_batched_tokens=budget)
    for length in (1, 4, 5, 30):
        engine.add_pooled(f"{length}", list(range(length)), pooling)
    engine.run()
    for length in (1, 4, 5, 30):
        engine.assert_pooled(f"{length}")


def test_a_mean_uses_no_cached_pages_and_leaves_some() -> None:
    prompt = list(range(30))
    engine = PoolingEngine()
    for request_id, pooling, num_cached in (("a", "mean", 0), ("b", "last", 28), ("c", "mean", 0)):
        engine.add_pooled(request_id, prompt, pooling)  # type: ignore[arg-type]
        engine.run()
        engine.assert_pooled(request_id)
        assert engine.cached[request_id] == num_cached
    engine.add("d", prompt, max_tokens=3)
    engine.run()
    assert engine.cached["d"] == 28
    engine.assert_correct("d")


def test_simultaneous_means_of_one_prompt_do_not_wait_for_each_other() -> None:
    engine = PoolingEngine()
    for request_id in "abc":
        engine.add_pooled(request_id, list(range(20)), "mean")
    engine.step()
    assert len(engine.executor.plans[0].chunks) == 3
    engine.run()
    for request_id in "abc":
        engine.assert_pooled(request_id)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_prompt_is_pooled_anew(pooling: Pooling) -> None:
    engine = PoolingEngine(num_pages=10, max_num_batched_tokens=8)
    engine.add_pooled("slow", list(range(32)), pooling, priority=5)
    engine.step()
    engine.step()
    engine.add("urgent", list(range(40, 49)) * 2, max_tokens=2)
    engine.run()
    assert engine.engine.stats().num_preemptions == 1
    engine.assert_pooled("slow")
    engine.assert_correct("urgent")


def test_an_unusable_hidden_state_ends_its_own_request() -> None:
    engine = PoolingEngine()
    engine.executor.broken["bad"] = 9
    engine.add_pooled("bad", list(range(9)), "mean")
    engine.add_pooled("good", list(range(1, 9)), "mean")
    engine.run()
    assert engine.outcomes["bad", 0].finish_reason is FinishReason.ERROR
    engine.assert_pooled("good")


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 3])
def test_random_pooled_and_generating_requests_equal_solo_runs(num_steps_ahead: int) -> None:
    rng = random.Random(num_steps_ahead)
    engine = PoolingEngine(
        num_pages=18, max_num_batched_tokens=9, num_steps_ahead=num_steps_ahead, max_num_seqs=5
    )
    prefixes = [[rng.randrange(50) for _ in range(30)] for _ in range(2)]
    aborted = set()
    for number in range(60):
        prompt = rng.choice(prefixes)[: rng.randrange(30)] + [rng.randrange(50) for _ in range(5)]
        request_id, priority = f"{number}", rng.randrange(3)
        if rng.random() < 0.6:
            engine.add_pooled(request_id, prompt, rng.choice(POOLINGS), priority)
        else:
            engine.add(request_id, prompt, priority=priority, max_tokens=rng.randrange(1, 12))
        for _ in range(rng.randrange(3)):
            engine.step()
        if rng.random() < 0.1 and engine.outcomes[request_id, 0].finish_reason is None:
            engine.engine.abort(request_id)
            aborted.add(request_id)
    engine.run()
    assert engine.engine.stats().num_preemptions > 0 and aborted
    for request_id, request in engine.requests.items():
        if request_id in aborted:
            assert engine.outcomes[request_id, 0].finish_reason is FinishReason.ABORT
        elif request.pooling is not None:
            engine.assert_pooled(request_id)
        else:
            engine.assert_correct(request_id)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_llama()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), model)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "async"])
def llm(directory: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = dict(page_size=4, num_pages=80, max_num_seqs=4, max_num_batched_tokens=16)
    with LLM(str(directory), async_scheduling=request.param, **options) as llm:
        yield llm


@torch.inference_mode()
def reference(model: Any, prompt: list[int], pooling: Pooling, *, normalize: bool) -> torch.Tensor:
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled


def random_prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 320) for _ in range(length)] for length in lengths]


LENGTHS = (1, 3, 4, 5, 16, 17, 40, 100)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_equal_transformers(model: Any, llm: LLM, pooling: Pooling, normalize: bool) -> None:
    prompts = random_prompts(1, LENGTHS)
    for _ in range(2):  # cold and warm
        outputs = llm.embed(prompts, pooling=pooling, normalize=normalize)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = reference(model, prompt, pooling, normalize=normalize)
            torch.testing.assert_close(
                torch.tensor(output.outputs.embedding), expected, atol=TOLERANCE, rtol=TOLERANCE
            )
            assert output.prompt_token_ids == prompt
    stats = llm.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_embeddings_beside_generation_change_neither(model: Any, llm: LLM) -> None:
    prompts = random_prompts(2, (30, 9, 50))
    stream = llm.stream(prompts[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    first = [token for update in islice(stream, 3) for token in update.deltas[0].token_ids]
    outputs = llm.embed(prompts, pooling="mean")
    rest = [token for update in stream for delta in update.deltas for token in delta.token_ids]
    assert first + rest == greedy_tokens(model, prompts[0], 12, ())
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference(model, prompt, "mean", normalize=True)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


def test_text_is_embedded_as_its_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "The quick brown fox"
    by_text, by_ids = llm.embed([text, {"prompt_token_ids": llm.tokenizer.encode(text)}])
    np.testing.assert_allclose(by_text.outputs.embedding, by_ids.outputs.embedding, atol=TOLERANCE)
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert len(by_text.outputs.embedding) == 64 and by_text.finished
    assert sum(value * value for value in by_text.outputs.embedding) == pytest.approx(1, abs=1e-6)


def test_control_tokens_written_out_count_unless_told_otherwise(llm: LLM) -> None:
    lengths = [
        len(llm.embed("a</s>", parse_special_tokens=parse)[0].prompt_token_ids) for parse in (True, False)
    ]
    assert lengths[0] == 2 < lengths[1]


def test_the_first_dimensions_are_cut_and_normalised_anew(llm: LLM) -> None:
    prompt = random_prompts(3, (12,))
    (raw,) = llm.embed(prompt, normalize=False)
    (cut,) = llm.embed(prompt, dimensions=8)
    first = np.array(raw.outputs.embedding[:8])
    np.testing.assert_allclose(cut.outputs.embedding, first / np.linalg.norm(first), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling is 'max', but must be mean or last"),
        ({"normalize": 1}, "normalize is 1, but must be true or false"),
        ({"dimensions": 0}, "dimensions is 0, but must be from 1 to 64"),
        ({"dimensions": 65}, "dimensions is 65, but must be from 1 to 64"),
        ({"dimensions": True}, "dimensions is True, but must be from 1 to 64"),
    ],
)
def test_wrong_options_are_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.embed([5, 6], **options)
    with pytest.raises(RequestError, match="must be shorter than the context"):
        llm.embed([5] * 256)
    with pytest.raises(RequestError, match="token id 384"):
        llm.embed([[5], [384]])


def test_a_model_that_gives_no_usable_numbers_says_so(tmp_path: Path) -> None:
    model = make_tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[3] = float("inf")
    with (
        LLM(str(save_tiny_llama(tmp_path, model)), num_pages=16) as llm,
        pytest.raises(ModelError, match="no usable numbers"),
    ):
        llm.embed([5, 6, 7])
