from __future__ import annotations

import io
import json
import sys

import pytest

from tests.cli.fakes import FakeLLM
from tiny_vllm.cli.main import main
from tiny_vllm.outputs import Logprob


def test_the_text_alone_is_on_stdout(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once"]) == 0
    assert capsys.readouterr() == ("Hello big world\n", "")
    assert llm.asked[0][0] == "Once"
    assert llm.is_closed


def test_one_prompt_is_streamed(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    llm.before_word = lambda index: seen.append(capsys.readouterr().out)
    main(["generate", "Once"])
    assert seen == ["", "Hello", " big"]


def test_several_prompts_come_one_after_another(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "a", "b"])
    assert capsys.readouterr().out == "Hello big world\nHello big world\n"
    assert [prompt for prompt, _ in llm.asked] == ["a", "b"]


def test_every_choice_is_printed(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "a", "--n", "3"])
    assert capsys.readouterr().out == "Hello big world\n" * 3


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_prompt_can_come_from_stdin(
    arguments: list[str], llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    main(["generate", *arguments])
    assert llm.asked[0][0] == "two\nlines"


def test_stdin_that_is_not_text_is_an_error(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["generate"]) == 2
    assert "error: stdin is not text" in capsys.readouterr().err


def test_a_terminal_without_a_prompt_is_an_error(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [([], "there is no prompt"), (["-"], "stdin is closed")])
def test_a_closed_stdin_is_an_error(
    arguments: list[str],
    message: str,
    llm: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["generate", "a prompt needs no stdin"]) == 0


def test_json_has_every_field(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "é", "b", "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[0] == {
        "request_id": "r0",
        "prompt": "é",
        "prompt_token_ids": [1, 2, 3],
        "prompt_logprobs": None,
        "outputs": [
            {
                "index": 0,
                "text": "Hello big world",
                "token_ids": [7],
                "cumulative_logprob": None,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "finished": True,
        "metrics": {
            "queue_time": 0.25,
            "time_to_first_token": 0.5,
            "time_per_output_token": 0.5,
            "num_generated_tokens": 3,
            "num_cached_tokens": 2,
        },
    }
    assert len(records) == 2


def test_logprobs_become_objects() -> None:
    from tiny_vllm.cli.records import output_record

    output = FakeLLM()._output("a", "b", "stop")
    output.prompt_logprobs = [None, {5: Logprob(-0.5, 1, "x")}]
    record = json.loads(json.dumps(output_record(output)))
    assert record["prompt_logprobs"] == [None, {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]


def test_statistics_go_to_stderr(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "a", "--stats"])
    captured = capsys.readouterr()
    assert captured.out == "Hello big world\n"
    assert captured.err.startswith("3 tokens, ")
    assert "first after 500 ms" in captured.err
    assert "prompt 3 tokens (2 cached)" in captured.err


def test_sampling_options_reach_the_request(llm: FakeLLM) -> None:
    main(["generate", "a", "--temperature", "0", "--stop", "x", "--max-tokens", "9"])
    params = llm.asked[0][1]
    assert (params.temperature, params.stop, params.max_tokens) == (0.0, ("x",), 9)


@pytest.mark.parametrize("options", [[], ["--json"], ["--n", "2"], ["another"]])
def test_a_model_without_usable_numbers_is_an_error(
    options: list[str], llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.finish_reason = "error"
    assert main(["generate", "x", *options]) == 2
    captured = capsys.readouterr()
    assert "Hello big world" in captured.out
    assert captured.err.startswith("error: the model gave no usable numbers")
    assert "--dtype" in captured.err
