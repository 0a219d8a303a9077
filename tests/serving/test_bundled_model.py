"""The OpenAI client over the real model: the same tokens as the offline API, and the real page pool."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.serving.support import RunningServer, running_server, sent, wait_until
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.serving.engine_client import ENGINE_COMMAND

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"num_pages": 256, "max_num_seqs": 8, "max_queue_len": 64}
    with running_server(ENGINE_COMMAND, engine) as server:
        yield server
        # Whatever the tests did: every page is free or cached again.
        wait_until(server.is_idle)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


def test_completions_are_those_of_the_offline_api(client: openai.OpenAI, bundled_llm: LLM) -> None:
    prompts = [PROMPT, "Once upon a time", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    expected = bundled_llm.generate(prompts, params, use_tqdm=False)
    answer = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=12, logprobs=2)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]
    for choice, output in zip(answer.choices, expected, strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        entries = zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
        offline = [entry[token_id].logprob for token_id, entry in entries]
        assert choice.logprobs.token_logprobs == pytest.approx(offline, abs=0.05)


def test_a_chat_is_that_of_the_offline_api(client: openai.OpenAI, bundled_llm: LLM) -> None:
    expected = bundled_llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == expected[0].outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected[0].prompt_token_ids)


def test_a_chat_has_the_tokens_of_its_rendered_prompt(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    rendered = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert server.post("/tokenize", {"prompt": rendered}).json()["tokens"] == tokens


def test_seeds_repeat_in_any_company(client: openai.OpenAI) -> None:
    def sampled(seed: int | None) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=1.5, max_tokens=8, n=2, seed=seed
        )
        return [choice.text for choice in answer.choices]

    alone = sampled(7)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(sampled, [7, None, 7, 8]))
    assert together[0] == together[2] == alone
    assert alone[0] != alone[1] and together[3] != alone


def test_logit_bias_forces_and_forbids(client: openai.OpenAI, server: RunningServer) -> None:
    (token_id,) = server.post("/tokenize", {"prompt": " Paris"}).json()["tokens"]
    options: Any = dict(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=3)
    forced = client.completions.create(**options, logit_bias={str(token_id): 100})
    assert forced.choices[0].text == " Paris" * 3
    forbidden = client.completions.create(**options, logit_bias={str(token_id): -100})
    assert "Paris" not in forbidden.choices[0].text


def test_the_last_added_token_can_be_biased_and_one_more_cannot(
    client: openai.OpenAI, server: RunningServer
) -> None:
    tokenizer = server.service.model.tokenizer
    assert tokenizer is not None
    last = tokenizer.vocab_size - 1
    options: Any = dict(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2)
    options["extra_body"] = {"return_token_ids": True}
    forced: Any = client.completions.create(**options, logit_bias={str(last): 100})
    assert forced.choices[0].token_ids == [last, last]
    with pytest.raises(openai.BadRequestError, match=str(last + 1)):
        client.completions.create(**options, logit_bias={str(last + 1): 100})


def test_bad_requests_do_not_touch_running_ones(client: openai.OpenAI, server: RunningServer) -> None:
    options: Any = dict(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40, stream=True)
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

    def tokens(disturb: bool) -> list[int]:
        seen: list[int] = []
        for chunk in client.completions.create(**options):
            seen += chunk.choices[0].token_ids  # type: ignore[attr-defined]
            if disturb:
                for prompt in ([-1], [5, 49152], [2**63], [[5], [-1]], "x" * 100_000):
                    assert server.complete(prompt).status == 400
        return seen

    assert tokens(disturb=True) == tokens(disturb=False)


def test_random_bytes_stream_as_they_decode(client: openai.OpenAI, server: RunningServer) -> None:
    tokenizer = server.service.model.tokenizer
    assert tokenizer is not None
    ids = [token_id for token_id in range(49152) if tokenizer.token_bytes(token_id)[:1] >= b"\x80"]
    options: Any = dict(model=MODEL, prompt=PROMPT, seed=5, temperature=2.0, max_tokens=30)
    options["extra_body"] = {"allowed_token_ids": ids, "return_token_ids": True}
    whole: Any = client.completions.create(**options).choices[0]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert whole.text == streamed == tokenizer.decode(whole.token_ids)


def test_a_repeated_prompt_is_cached_unless_the_salt_differs(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = client.completions.create(
            model=MODEL, prompt="one two three " * 20, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert (cached("a"), cached("b")) == (0, 0)
    assert cached("a") > 30


def test_a_client_that_left_leaves_its_prefix_behind(client: openai.OpenAI, server: RunningServer) -> None:
    options: Any = dict(model=MODEL, prompt="This prompt is of someone in a hurry. " * 12, max_tokens=4000)
    options["extra_body"] = {"ignore_eos": True}
    with client.completions.create(**options, stream=True) as stream:
        next(iter(stream))
    wait_until(server.is_idle)
    again = client.completions.create(**{**options, "max_tokens": 1})
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= again.usage.prompt_tokens - 16


def test_a_prompt_is_scored_with_and_without_a_warm_cache(client: openai.OpenAI) -> None:
    def score() -> Any:
        return client.completions.create(
            model=MODEL, prompt="Water boils at 100 degrees", max_tokens=0, echo=True, logprobs=1
        ).choices[0]

    first, second = score(), score()
    assert first.text == "Water boils at 100 degrees" and first.finish_reason == "length"
    assert first.logprobs.token_logprobs[0] is None
    assert first.logprobs.token_logprobs == second.logprobs.token_logprobs


def test_an_urgent_request_overtakes(server: RunningServer) -> None:
    """Eight slots are busy with the patient ones; the urgent one still finishes before all of them."""
    engine = server.service.engine
    with ExitStack() as stack:
        for number in range(16):
            body = {"prompt": f"patient {number} was", "max_tokens": 500, "priority": 5, "ignore_eos": True}
            stack.enter_context(sent(server, body))
        wait_until(lambda: engine.stats and (engine.stats.num_running, engine.stats.num_waiting) == (8, 8))
        assert server.complete("urgent was", max_tokens=2, priority=0, ignore_eos=True).status == 200
        assert engine.num_requests == 16
    wait_until(server.is_idle)
