"""What a request may ask for: scoring without generating, budgets, empty prompts, ids, absurd numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.helpers.oracle import all_logits
from tests.helpers.tiny_models import VOCAB_SIZE
from tests.scenarios.conftest import CONTEXT, Served, Tiny
from tests.serving.support import assert_once_below
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.engine.runner import PROMPT_LOGPROBS_ROWS
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.openai_requests import Call, RequestMaker
from tiny_vllm.serving.schemas import CompletionBody
from tiny_vllm.text.request_builder import RequestBuilder

# FP32 sums of at most 96 terms of size ~10, over two layers, in another order.
LOGPROB_TOLERANCE = 1e-4
USER = {"role": "user", "content": "hi"}


def joined_choices(answer: Any, is_streamed: bool) -> dict[int, dict[str, Any]]:
    """Text, finish reason and log-probabilities by index, whether they came at once or in parts."""
    found: dict[int, dict[str, Any]] = {}
    for part in answer.events() if is_streamed else [answer.json()]:
        for choice in part["choices"]:
            entry = found.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": [], "end": None})
            entry["text"] += choice["text"]
            if choice["logprobs"]:
                entry["tokens"] += choice["logprobs"]["tokens"]
                entry["logprobs"] += choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"]:
                assert entry["end"] is None, "two ends"
                entry["end"] = choice["finish_reason"]
    return found


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_s01_a_prompt_is_scored_without_generating(server: Served, is_streamed: bool, n: int) -> None:
    prompt = "Hello, world! One, two, three"
    tokens = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    rows = torch.log_softmax(all_logits(server.tiny.model, tokens), dim=-1)
    expected = [float(rows[place, token]) for place, token in enumerate(tokens[1:])]
    usage = {"stream_options": {"include_usage": True}} if is_streamed else {}
    for echo in (True, False):
        answer = server.complete(
            prompt, max_tokens=0, echo=echo, logprobs=1, n=n, stream=is_streamed, **usage
        )
        assert answer.status == 200
        choices = joined_choices(answer, is_streamed)
        assert sorted(choices) == list(range(n))
        for choice in choices.values():
            assert (choice["text"], choice["end"]) == (prompt if echo else "", "length")
            assert len(choice["logprobs"]) == (len(tokens) if echo else 0)
            if echo:
                assert choice["logprobs"][0] is None
                assert choice["logprobs"][1:] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        last = answer.events()[-1] if is_streamed else answer.json()
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (len(tokens), 0)
    server.assert_alive_and_right()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "5", True, [5], {}])
def test_s02_a_budget_of_a_chat_is_a_whole_number(server: Served, name: str, value: Any) -> None:
    for stream in (False, True):
        body = {"messages": [USER], name: value, "stream": stream}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status == 400 and name in answer.error["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("excess", [1, 10])
def test_s03_a_conversation_beyond_the_context_is_refused_with_its_length(
    server: Served, excess: int, is_streamed: bool
) -> None:
    messages = [{"role": "user", "content": "\x00" * CONTEXT * excess}]
    num_tokens = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert num_tokens > CONTEXT * excess
    for budget in ({}, {"max_tokens": 1}, {"max_tokens": 10**9}):
        answer = server.post("/v1/chat/completions", {"messages": messages, "stream": is_streamed, **budget})
        assert answer.status == 400
        assert f"{num_tokens} tokens" in answer.error["message"]
        assert str(CONTEXT) in answer.error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_s04_an_empty_prompt_is_bos_where_the_tokenizer_adds_it(server: Served, prompt: Any) -> None:
    for stream in (False, True):
        answer = server.complete(
            prompt, max_tokens=3, temperature=0, ignore_eos=True, return_token_ids=True, stream=stream
        )
        assert answer.status == 200
        parts = answer.events() if stream else [answer.json()]
        token_ids = [token_id for part in parts for token_id in part["choices"][0]["token_ids"]]
        assert token_ids == server.tiny.greedy([0], 3)
    assert server.post("/v1/chat/completions", {"messages": []}).status == 400
    server.assert_alive_and_right()


@pytest.mark.parametrize(
    "bias", ['{"5": NaN}', '{"5": -Infinity}', '{"5": 1e999}', '{"5": "1"}', '{"5": null}', '{"5": true}']
)
def test_s06_a_bias_is_a_finite_number(server: Served, bias: str) -> None:
    for path, prompt in (("completions", '"prompt": "x"'), ("chat/completions", '"messages": []')):
        answer = server.post(f"/v1/{path}", f'{{{prompt}, "logit_bias": {bias}}}'.encode())
        assert answer.status == 400 and "logit_bias[5]" in answer.error["message"]


@pytest.mark.parametrize("bias", [{"05": 1, "5": 2}, {"5 ": 1}, {"٥": 1}, {"5.0": 1}, {"": 1}, {"-1": 1}])
def test_s06_a_bias_names_each_token_once_and_in_digits(server: Served, bias: dict[str, float]) -> None:
    answer = server.complete("x", logit_bias=bias)
    assert answer.status == 400 and "logit_bias" in answer.error["message"]


def test_s08_log_probabilities_of_a_chat_are_capped(server: Served) -> None:
    for number in (VOCAB_SIZE, 21, -1):
        body = {"messages": [USER], "logprobs": True, "top_logprobs": number}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status == 400 and f"logprobs is {number}" in answer.error["message"]


def test_s08_choices_of_all_prompts_together_are_capped(server: Served) -> None:
    assert server.complete([[5]] * 2, n=8, max_tokens=1).status == 200
    for stream in (False, True):
        answer = server.complete([[5]] * 16, n=8, max_tokens=1, stream=stream)
        assert answer.status == 400 and answer.error["param"] == "n"
        assert "128 choices" in answer.error["message"] and "16" in answer.error["message"]


def test_s08_a_long_prompt_is_scored_few_rows_at_a_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of logits is as long as the vocabulary: all rows of a long prompt at once would be gigabytes."""
    num_rows: list[int] = []
    logits = Decoder.logits

    def spy(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", spy)
    with LLM(str(tiny.directory), num_pages=100, max_num_seqs=1, max_num_batched_tokens=2048) as llm:
        (output,) = llm.generate([[5] * 1000], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 1000
    assert sum(num_rows) == 1000 and max(num_rows) <= PROMPT_LOGPROBS_ROWS


def test_s08_lists_that_every_prompt_of_a_call_carries_hold_nobody_up(server: Served) -> None:
    """Each prompt is a request of its own with its own copy of the call's lists."""
    prompts = [[5]] * 16
    words = {"bad_words": [f"{number:016}" for number in range(1024)]}  # as long in all as they may be
    stops = {"stop": [f"{number:0>1000}" for number in range(16)]}
    lists: dict[str, Any] = {"stop_token_ids": list(range(100, VOCAB_SIZE)), "logit_bias": {"5": 1}}

    def slowest_health() -> float:
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(server.complete, prompts, max_tokens=2, **words, **stops, **lists)
            slowest = server.slowest_health([call])
            assert call.result().status == 200
        return slowest

    assert_once_below(1, slowest_health)
    longer = {"bad_words": [*words["bad_words"][1:], "y" * 17]}
    for body in ({"prompt": "x"}, {"prompt": prompts}):
        answer = server.post("/v1/completions", {**body, **longer})
        assert answer.status == 400 and "16385 characters" in answer.error["message"]


def test_s08_copies_of_long_lists_are_counted() -> None:
    maker = RequestMaker(RequestBuilder(None, vocab_size=50_000, max_model_len=50), None, 256, 16)
    call = Call("cmpl-x", None, None, 0.0)
    lists: dict[str, Any] = {"allowed_token_ids": list(range(50_000))}
    for num_prompts, is_accepted in ((1, True), (20, True), (21, False), (256, False)):
        body = CompletionBody(prompt=[[5]] * num_prompts, **lists)
        if is_accepted:
            assert len(maker.completion(body, call)) == num_prompts
        else:
            with pytest.raises(ApiError, match=f"50000 token ids for each of {num_prompts} prompts"):
                maker.completion(body, call)
