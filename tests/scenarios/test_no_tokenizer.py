"""A model without a tokenizer: whoever sends text is told what he can do instead, where he is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, RequestError, SamplingParams
from tiny_vllm.cli.main import main
from tiny_vllm.serving.openai_requests import Call, RequestMaker
from tiny_vllm.serving.schemas import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from tiny_vllm.serving.service import request_builder

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = save_tiny_llama(tmp_path_factory.mktemp("mute"), make_tiny_llama())
    (directory / "tokenizer.json").unlink()
    return str(directory)


def test_in_python_ids_take_the_place_of_text(directory: str) -> None:
    hint = "give {'prompt_token_ids': ids}, or name a tokenizer with tokenizer="
    calls: list[tuple[str, str, Callable[[LLM], Any]]] = [
        ("a prompt of text", hint, lambda llm: llm.generate("Hello")),
        ("a prompt of text", hint, lambda llm: llm.stream("Hello")),
        ("a prompt of text", hint, lambda llm: llm.embed("Hello")),
        ("a conversation", hint, lambda llm: llm.chat(MESSAGES)),
        ("a stop string", "use stop_token_ids", lambda llm: llm.generate([5], SamplingParams(stop="."))),
        ("bad_words", "use logit_bias", lambda llm: llm.generate([5], SamplingParams(bad_words=["no"]))),
    ]
    with LLM(directory, num_pages=8) as llm:
        for what, expected, call in calls:
            with pytest.raises(RequestError) as error:
                call(llm)
            assert error.value.message == f"{what} needs a tokenizer, and this model has none"
            assert error.value.hint == expected
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate({"prompt_token_ids": [5]}, params)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("command", [["generate", "x", "--model"], ["chat"], ["demo", "--model"]])
def test_on_the_command_line_another_tokenizer_is_all_that_helps(
    command: list[str],
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (Path(directory) / "stdin").write_text("Hello\n")
    with (Path(directory) / "stdin").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main([*command, directory, "--num-pages", "64"]) == 2
    said = capsys.readouterr()
    assert (
        said.err == "error: this model has no tokenizer, and takes no text\nhint: name one with --tokenizer\n"
    )
    assert said.out == ""


IDS = "send {} as a list of token ids"


def body(kind: Any, **fields: Any) -> Any:
    """As a client sends it, without what may be left out."""
    return kind(**fields)


CALL = Call("cmpl-x", None, None, 0.0)


@pytest.mark.parametrize(
    ("send", "hint"),
    [
        (lambda maker: maker.completion(body(CompletionBody, prompt="Hello"), CALL), IDS.format("prompt")),
        (
            lambda maker: maker.embeddings(body(EmbeddingBody, input="Hello"), "mean", CALL),
            IDS.format("input"),
        ),
        (
            lambda maker: maker.chat(body(ChatBody, messages=MESSAGES), CALL),
            "send token ids as the prompt of /v1/completions",
        ),
        (lambda maker: maker.tokens(body(TokenizeBody, prompt="Hello")), "start the server with --tokenizer"),
        (lambda maker: maker.text(body(DetokenizeBody, tokens=[5])), "start the server with --tokenizer"),
        (
            lambda maker: maker.completion(body(CompletionBody, prompt=[5], stop="."), CALL),
            "use stop_token_ids",
        ),
        (
            lambda maker: maker.completion(body(CompletionBody, prompt=[5], bad_words=["no"]), CALL),
            "use logit_bias",
        ),
    ],
)
def test_over_http_ids_go_where_text_went(send: Callable[[RequestMaker], Any], hint: str) -> None:
    builder = request_builder(None, 100, {"max_model_len": 50, "max_logprobs": 5, "max_n": 4})
    maker = RequestMaker(builder, None, max_prompts=4, max_stop_strings=2)
    with pytest.raises(RequestError) as error:
        send(maker)
    assert error.value.hint == hint
