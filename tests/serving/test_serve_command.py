"""`tiny-vllm serve` as a user runs it: a process that listens, answers, and stops in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tests.serving.support import assert_once_below, has_ended, wait_until
from tiny_vllm.cli.main import main
from tiny_vllm.serving import server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory, make_tiny_llama())
    return directory


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tiny_vllm", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        match = re.search(r"http://\S+", process.stderr.readline())
        assert match is not None
        yield process, match[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def call(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def engine_processes(parent_id: int) -> list[int]:
    """From /proc: `ps` cuts its lines to $COLUMNS, wherever that is set."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            status = (directory / "status").read_text()
            command = (directory / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"\nPPid:\t{parent_id}\n" in status and "tiny_vllm.serving.engine_process" in command:
            found.append(int(directory.name))
    return found


def test_a_server_answers_and_stops_on_sigterm_with_code_0(checkpoint: Path) -> None:
    with serving(str(checkpoint), "--api-key", "k", TINY_VLLM_API_KEY="other") as (process, url):
        wait_until(lambda: call(f"{url}/ready")[0] == 200, 180)
        body = {"prompt": "The quick", "max_tokens": 4, "temperature": 0}
        assert call(f"{url}/v1/completions", body)[0] == 401
        for key in ("k", "other"):
            status, answer = call(f"{url}/v1/completions", body, Authorization=f"Bearer {key}")
            assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        engines = engine_processes(process.pid)
        assert len(engines) == 1
        # A service manager signals the whole group.
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
        assert not Path(f"/proc/{engines[0]}").exists()


def test_a_second_signal_ends_a_busy_server_at_once_and_in_order(checkpoint: Path) -> None:
    with serving(str(checkpoint), "--max-model-len", "256") as (process, url):
        wait_until(lambda: call(f"{url}/ready")[0] == 200, 180)
        (engine,) = engine_processes(process.pid)
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 64}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            response.readline()
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(60) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_an_idle_server_is_gone_within_a_second(checkpoint: Path) -> None:
    """Or, on a slow machine, within a tenth of the time that it took to start."""

    def seconds_to_stop() -> float:
        begin = time.monotonic()
        with serving(str(checkpoint)) as (process, url):
            wait_until(lambda: call(f"{url}/ready")[0] == 200, 180)
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            return (time.monotonic() - start) / max(1.0, (start - begin) / 10)

    assert_once_below(1, seconds_to_stop)


PARENT = """
import asyncio, sys
from tests.serving.support import STUB_COMMAND, eventually
from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.engine_client import EngineClient, EngineState

async def main():
    client = EngineClient(EngineConfig(), None, command=STUB_COMMAND)
    task = asyncio.create_task(client.run())
    await eventually(lambda: client.state is EngineState.READY)
    print(client.process_id, flush=True)
    await task

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_killed_server() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: has_ended(engine))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model"], "there is no model at"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--port", "70000"], "port is 70000"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0"),
        (["--separate-keys"], "no API key"),
        (["--page-size", "3"], "--page-size is 3"),
        (["a", "--model", "b"], "given twice"),
    ],
)
def test_wrong_options_are_one_message_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


# Noticed by the command, and by the engine's process.
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "3"], "--page-size is 3"),
        (["--num-pages", "1000000000"], "lower --num-pages"),
        (
            ["--max-num-batched-tokens", "2", "--max-num-seqs", "3"],
            "--max-num-batched-tokens is 2, less than",
        ),
    ],
)
def test_wrong_options_end_with_one_message_and_code_2(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "tiny_vllm", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "listening on" not in line]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]


def test_an_engine_that_is_killed_before_it_is_ready_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kill = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert server.serve.__kwdefaults__ is not None
    monkeypatch.setitem(server.serve.__kwdefaults__, "engine_command", kill)
    assert main(["serve", "--port", "0"]) == 2
    listening, *lines = capfd.readouterr().err.splitlines()
    assert "listening on" in listening
    assert lines == [
        "error: the engine could not start: its process ended by signal 9",
        "hint: so the system ends what takes too much memory: lower --num-pages, --max-model-len or "
        "--max-num-batched-tokens",
    ]


def test_no_terminal_obeys_the_name_of_a_served_directory(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "tiny\x1b[31m")
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    assert server.serve.__kwdefaults__ is not None
    monkeypatch.setitem(server.serve.__kwdefaults__, "engine_command", (sys.executable, "-c", ""))
    assert main(["serve", "--port", "0", str(directory)]) == 2
    listening, recommended, *_ = capfd.readouterr().err.splitlines()
    assert listening.startswith(r"tiny\x1b[31m: listening on") and r"tiny\x1b[31m" in recommended
