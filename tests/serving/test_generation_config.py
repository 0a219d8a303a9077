"""Requests that leave out a sampling parameter get what the model's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tests.serving.support import RunningServer, running_server
from tests.serving.test_openai_requests import CALL
from tests.serving.test_serve_command import serving
from tiny_vllm.serving.openai_requests import RequestMaker
from tiny_vllm.serving.schemas import ChatBody, CompletionBody
from tiny_vllm.text.request_builder import RequestBuilder
from tiny_vllm.types import SamplingParams
from tiny_vllm.weights.checkpoint import open_checkpoint

RECOMMENDED = dict(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.5, max_new_tokens=3)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_llama(tmp_path_factory.mktemp("tiny"), make_tiny_llama())
    edit_json(directory / "generation_config.json", **RECOMMENDED)
    return directory


def sampling(directory: Path, **body: Any) -> SamplingParams:
    checkpoint = open_checkpoint(str(directory))
    tokenizer = checkpoint.load_tokenizer()
    builder = RequestBuilder(tokenizer, vocab_size=384, max_model_len=256)
    maker = RequestMaker(builder, tokenizer, 4, 2, checkpoint.sampling_defaults("auto"))
    if "messages" in body:
        return maker.chat(ChatBody(**body), CALL)[0].request.sampling
    return maker.completion(CompletionBody(prompt=[5, 6], **body), CALL)[0].request.sampling


def test_what_is_left_out_or_null_follows_the_file(directory: Path) -> None:
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.5, max_tokens=3)
    assert sampling(directory) == expected
    assert sampling(directory, messages=HELLO) == expected
    assert sampling(directory, temperature=None, top_k=None, max_tokens=None) == expected


def test_what_a_request_says_wins(directory: Path) -> None:
    said = dict(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
    assert sampling(directory, **said, max_tokens=9) == SamplingParams(max_tokens=9)
    for limit in ("max_tokens", "max_completion_tokens"):
        assert sampling(directory, messages=HELLO, **said, **{limit: 9}) == SamplingParams(max_tokens=9)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    with running_server(engine={"model": str(directory)}) as server:
        yield server


def num_tokens(server: RunningServer, path: str, **body: Any) -> int:
    answer = server.post(path, {"ignore_eos": True, **body})
    assert answer.status == 200, answer.data
    return answer.json()["usage"]["completion_tokens"]


def test_both_endpoints_follow_the_file_unless_told(server: RunningServer) -> None:
    for path, prompt in (("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", {"messages": HELLO})):
        assert num_tokens(server, path, **prompt) == 3
        assert num_tokens(server, path, **prompt, max_tokens=5) == 5


def test_none_leaves_the_file_aside(directory: Path) -> None:
    with running_server(engine={"model": str(directory), "generation_config": "none"}) as server:
        assert num_tokens(server, "/v1/completions", prompt=[5]) == 16
        assert num_tokens(server, "/v1/chat/completions", messages=HELLO) > 100


def test_the_command_says_at_its_start_what_it_took(directory: Path) -> None:
    with serving(str(directory)) as (process, _):
        assert process.stderr is not None
        assert process.stderr.readline() == (
            "requests that do not set them have temperature 0.6, top_k 20, top_p 0.9, "
            f"repetition_penalty 1.5, max_tokens 3 from {directory / 'generation_config.json'} "
            "(--generation-config none: OpenAI's)\n"
        )
