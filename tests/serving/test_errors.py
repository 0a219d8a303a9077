from __future__ import annotations

import pytest

from tiny_vllm.errors import CapacityError, EngineDead, RequestError
from tiny_vllm.serving.errors import MAX_MESSAGE_LEN, ApiError, api_error
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
    ],
)
def test_a_client_is_told_which_parameter_is_wrong(options: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert api_error(caught.value).param == param


def test_a_prompt_is_known_by_several_names_so_none_is_told() -> None:
    builder = RequestBuilder(None, vocab_size=10, max_model_len=5)
    with pytest.raises(RequestError) as caught:
        builder.build([5] * 5, SamplingParams())
    assert api_error(caught.value).param is None


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("x"), 400), (CapacityError("x"), 429), (EngineDead("x"), 503)]
)
def test_each_error_has_a_status_of_its_own(error: RequestError, status: int) -> None:
    answer = api_error(error)
    assert (answer.status, answer.message, answer.param) == (status, "x", None)
    assert ("retry-after" in answer.headers) == (status != 400)


def test_messages_are_bounded() -> None:
    assert len(ApiError(400, "x" * 10**6).message) < MAX_MESSAGE_LEN + 10
