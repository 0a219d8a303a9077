from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.fakes import FakeLLM
from tiny_vllm.cli.main import main
from tiny_vllm.errors import RequestError

ROOT = Path(__file__).parents[2]
OUTPUT_HINT = "hint: look at where stdout goes: a file, a disk, another program\n"


def test_a_user_error_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--page-size", "24"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: --page-size is 24, but must be a power of two\nhint: use 16\n"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            ["generate", "x", "--max-toks", "5"],
            "unrecognized arguments: --max-toks 5",
            "did you mean --max-tokens?",
        ),
        (
            ["bench", "latency", "--num-iter=3"],
            "unrecognized arguments: --num-iter=3",
            "did you mean --num-iters?",
        ),
        (["info", "--xyzzy"], "unrecognized arguments: --xyzzy", "--help lists the options"),
        (["info", "model", "another"], "unrecognized arguments: another", "--help tells what is taken"),
        (
            ["generate", "x", "--top-k", "1.5"],
            "argument --top-k: invalid int value: '1.5'",
            "keep the k most likely",
        ),
        (["generate", "x", "--top-k"], "argument --top-k: expected one argument", "keep the k most likely"),
        (
            ["serve", "--dtype", "fp16"],
            "argument --dtype: invalid choice: 'fp16'",
            "type of weights, activations",
        ),
        (["sevre"], "argument COMMAND: invalid choice: 'sevre'", "did you mean serve?"),
        (["xyzzy"], "argument COMMAND: invalid choice: 'xyzzy'", "--help lists them"),
        ([], "the following arguments are required: COMMAND", "--help tells what is taken"),
    ],
)
def test_what_the_parser_refuses_has_a_hint(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    *usage, refusal, last = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and usage[0].startswith("usage: tiny-vllm")
    assert message in refusal and last.startswith(f"hint: {hint}")


def test_the_usage_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "latency", "--xyzzy"])
    assert capsys.readouterr().err.startswith("usage: tiny-vllm bench latency")


def test_debug_shows_the_traceback(llm: FakeLLM) -> None:
    llm.error = RequestError("too long")
    with pytest.raises(RequestError):
        main(["generate", "x", "--debug"])


def test_a_fault_of_the_program_is_told_apart(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.error = RuntimeError("boom")
    assert main(["generate", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: unexpected RuntimeError: boom\n")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError("Unable to allocate 64.0 TiB"),
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_the_program(
    fault: Exception, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.error = fault
    assert main(["generate", "x"]) == 1
    what = str(fault) or "MemoryError"
    assert capsys.readouterr().err == (
        f"error: memory ran out: {what}\n"
        "hint: free memory, or raise what limits it: ulimit -v, the container's limit\n"
    )


def test_ctrl_c_ends_quietly_with_130(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.before_word = lambda index: os.kill(os.getpid(), signal.SIGINT) if index == 1 else None
    assert main(["generate", "x"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "Hello"
    assert captured.err.strip() == ""
    assert llm.is_closed


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import sys; from tests.cli.fakes import FakeLLM; from tiny_vllm.cli import main, session\n"
        "session.open_llm = lambda args: FakeLLM(words=('word ',) * 200_000)\n"
        "sys.exit(main.main(['generate', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.wait() == 141


FAKE_MAIN = (
    "import sys; from tests.cli.fakes import FakeLLM; from tiny_vllm.cli import main, session\n"
    "session.open_llm = lambda args: FakeLLM()\n"
    "sys.exit(main.main(sys.argv[1:]))"
)


def run_in_shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a redirection of the shell, for what only a process of its own can meet."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", FAKE_MAIN, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments", [["generate", "x"], ["generate", "x", "--json"], ["demo"], ["info", "--load-format=dummy"]]
)
def test_a_full_disk_is_one_error_without_blame(arguments: list[str]) -> None:
    run = run_in_shell(">/dev/full", *arguments)
    assert run.stderr == f"error: cannot write the output: No space left on device\n{OUTPUT_HINT}"
    assert run.returncode == 1


def test_a_closed_stdout_is_one_error() -> None:
    run = run_in_shell(">&-", "generate", "x")
    assert run.stderr == f"error: cannot write the output: stdout is closed\n{OUTPUT_HINT}"
    assert run.returncode == 1


def test_other_files_that_fail_are_not_the_output(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.error = OSError(28, "No space left on device")
    assert main(["generate", "x"]) == 1
    assert "cannot write the output" not in capsys.readouterr().err


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "usage: tiny-vllm" in capsys.readouterr().err


def test_python_dash_m_is_the_same_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tiny_vllm", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for command in ("generate", "chat", "demo", "bench", "info"):
        assert command in run.stdout


@pytest.mark.parametrize("arguments", [["x"], ["x", "y"], ["x", "--json"]])
def test_a_terminal_of_another_encoding_shows_what_it_can(arguments: list[str]) -> None:
    code = (
        "import sys; from tests.cli.fakes import FakeLLM; from tiny_vllm.cli import main, session\n"
        "session.open_llm = lambda args: FakeLLM(words=('caf\\u00e9 ', '\\u4e16'))\n"
        "sys.exit(main.main(['generate', *sys.argv[1:]]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"caf\xe9 ?" in run.stdout
