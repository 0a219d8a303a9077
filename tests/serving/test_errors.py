from __future__ import annotations

import pytest

from tiny_vllm.errors import CapacityError, EngineDead, PromptTooLong, RequestError
from tiny_vllm.serving.errors import MAX_MESSAGE_LEN, ApiError, api_error
from tiny_vllm.serving.messages import Fault
from tiny_vllm.text.request_builder import RequestBuilder
from tiny_vllm.types import SamplingParams


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {5: 1e9}}, "logit_bias"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_client_is_told_which_parameter_is_wrong(options: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert api_error(caught.value).param == param


@pytest.mark.parametrize("name", ["prompt", "messages", "input"])
def test_a_prompt_that_is_too_long_is_told_as_openai_tells_it(name: str) -> None:
    builder = RequestBuilder(None, vocab_size=10, max_model_len=5)
    with pytest.raises(RequestError) as caught:
        builder.build([5] * 5, SamplingParams())
    # Clients that shorten their prompts look for the code, or for these words.
    answer = api_error(caught.value, prompt_name=name)
    assert (answer.status, answer.param, answer.code) == (400, name, "context_length_exceeded")
    assert "this model's maximum context length is 5 tokens" in answer.message


def test_a_refusal_by_the_engine_process_keeps_its_kind() -> None:
    error = Fault.of(PromptTooLong("the prompt has 5 tokens", hint="shorten it")).exception()
    assert api_error(error, prompt_name="input").code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("x"), 400), (CapacityError("x"), 429), (EngineDead("x"), 503)]
)
def test_each_error_has_a_status_of_its_own(error: RequestError, status: int) -> None:
    answer = api_error(error)
    assert (answer.status, answer.message, answer.param) == (status, "x", None)
    assert ("retry-after" in answer.headers) == (status != 400)


def test_messages_are_bounded() -> None:
    assert len(ApiError(400, "x" * 10**6).message) < MAX_MESSAGE_LEN + 10
