from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from tests.cli.fakes import FakeLLM
from tiny_vllm.cli.main import main
from tiny_vllm.errors import RequestError

ANSWER = {"role": "assistant", "content": "Hello big world"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["chat", *arguments])


def conversations(llm: FakeLLM) -> list[list[dict[str, str]]]:
    return [messages for messages, _ in llm.asked]


def test_answers_are_on_stdout_and_the_history_grows(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "hi\n\nand?\n") == 0
    assert capsys.readouterr().out == "Hello big world\nHello big world\n"
    assert conversations(llm) == [[user("hi")], [user("hi"), ANSWER, user("and?")]]


def test_reset_forgets_the_conversation_but_not_the_system_message(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat(monkeypatch, "a\n/reset\nb\n", "--system", "Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert conversations(llm) == [[system, user("a")], [system, user("b")]]


def test_system_sets_and_removes_the_system_message(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat(monkeypatch, "/system Be kind to all\na\n/system\nb\n")
    assert conversations(llm) == [[{"role": "system", "content": "Be kind to all"}, user("a")], [user("b")]]


def test_quit_leaves(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(monkeypatch, "/quit\nnever asked\n") == 0
    assert llm.asked == []
    assert llm.is_closed


def test_help_and_unknown_commands_are_explained_on_stderr(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(monkeypatch, "/help\n/dance\n")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "/reset" in captured.err
    assert "unknown command /dance" in captured.err


def test_ctrl_c_aborts_the_answer_and_the_conversation_goes_on(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_first_answer(index: int) -> None:
        if index == 1 and len(llm.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    llm.before_word = interrupt_first_answer
    before = signal.getsignal(signal.SIGINT)
    assert chat(monkeypatch, "a\nb\n") == 0
    assert capsys.readouterr().out == "Hello big\nHello big world\n"
    assert llm.num_aborted == 1
    assert llm.num_open == 0
    assert conversations(llm)[1] == [user("a"), {"role": "assistant", "content": "Hello big"}, user("b")]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_twice(index: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    llm.before_word = interrupt_twice
    assert chat(monkeypatch, "a\nb\n") == 130
    assert len(llm.asked) == 1
    assert llm.is_closed


@pytest.mark.parametrize(("is_terminal", "code"), [(False, 2), (True, 0)])
def test_a_refused_message_is_not_remembered_and_scripts_are_told(
    is_terminal: bool,
    code: int,
    llm: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused: list[object] = []

    def refuse_once(prompt: object, params: object) -> object:
        if not refused:
            refused.append(prompt)
            raise RequestError("the prompt is too long")
        return FakeLLM.stream(llm, prompt, params)  # type: ignore[arg-type]

    monkeypatch.setattr(llm, "stream", refuse_once)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    assert main(["chat"]) == code
    assert "error: the prompt is too long" in capsys.readouterr().err
    assert conversations(llm) == [[user("b")]]


def test_a_refused_message_names_options_as_they_are_typed(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.error = RequestError("the prompt is too long", hint="shorten the prompt or raise max_model_len")
    assert chat(monkeypatch, "one\n") == 2
    assert "error: the prompt is too long\nhint: shorten the prompt or raise --max-model-len" in (
        capsys.readouterr().err
    )


def test_a_closed_stdin_is_an_error(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat"]) == 2
    assert capsys.readouterr().err.startswith("error: there is nothing to read messages from")


def test_statistics_go_to_stderr(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(monkeypatch, "a\n", "--stats")
    captured = capsys.readouterr()
    assert captured.out == "Hello big world\n"
    assert "tokens/s" in captured.err


def test_more_than_one_choice_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "", "--n", "2") == 2
    assert "n is 2" in capsys.readouterr().err


def test_an_answer_without_usable_numbers_is_an_error(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.finish_reason = "error"
    assert chat(monkeypatch, "hi\n") == 2
    assert capsys.readouterr().err.startswith("error: the model gave no usable numbers")
