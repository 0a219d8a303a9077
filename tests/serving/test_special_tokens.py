"""Control tokens that clients write out: plain text in messages, themselves in prompts, or as asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.tiny_models import TURN_END, TURN_END_ID, save_tiny_tokenizer
from tiny_vllm.serving.openai_requests import Call, RequestMaker
from tiny_vllm.serving.schemas import ChatBody, CompletionBody, TokenizeBody
from tiny_vllm.text.request_builder import RequestBuilder
from tiny_vllm.text.tokenizer_directory import load_tokenizer_directory

CALL = Call("c", None, None, 0.0)
MESSAGES = [{"role": "user", "content": f"a {TURN_END} b"}]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> RequestMaker:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    tokenizer = load_tokenizer_directory(directory)
    builder = RequestBuilder(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=500)
    return RequestMaker(builder, tokenizer, max_prompts=4, max_stop_strings=2)


@pytest.mark.parametrize(("asked", "is_control"), [(None, False), (False, False), (True, True)])
def test_messages(maker: RequestMaker, asked: bool | None, is_control: bool) -> None:
    (written_by_client,) = maker.chat(ChatBody(messages=MESSAGES, parse_special_tokens=asked), CALL)
    (template_alone,) = maker.chat(ChatBody(messages=[{"role": "user", "content": "a b"}]), CALL)
    ids = written_by_client.request.prompt_token_ids
    expected = template_alone.request.prompt_token_ids.count(TURN_END_ID) + is_control
    assert ids.count(TURN_END_ID) == expected
    assert maker.tokens(TokenizeBody(messages=MESSAGES, parse_special_tokens=asked)) == list(ids)


@pytest.mark.parametrize(("asked", "is_control"), [(None, True), (True, True), (False, False)])
@pytest.mark.parametrize("add", [None, False])
def test_prompts(maker: RequestMaker, asked: bool | None, is_control: bool, add: bool | None) -> None:
    options: dict[str, Any] = dict(
        prompt=f"a {TURN_END} b", parse_special_tokens=asked, add_special_tokens=add
    )
    (prepared,) = maker.completion(CompletionBody(**options), CALL)
    assert prepared.prompt == options["prompt"]
    assert prepared.request.prompt_token_ids.count(TURN_END_ID) == is_control
    assert maker.tokens(TokenizeBody(**options)) == list(prepared.request.prompt_token_ids)
