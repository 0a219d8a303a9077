"""OpenAI's client for Node works unchanged. npm install in tests/serving/node brings it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support import running_server

DIRECTORY = Path(__file__).with_name("node")
MODEL = "SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (DIRECTORY / "node_modules" / "openai").is_dir(),
        reason="no client: npm install --no-package-lock in tests/serving/node",
    ),
]


def test_models_chats_streams_completions_embeddings_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STEP_SECONDS", "0.02")  # so that each token has a chunk of its own
    with running_server() as server:
        run = subprocess.run(
            ["node", "client.js", f"{server.url}/v1", MODEL],
            cwd=DIRECTORY,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stderr
        seen: dict[str, Any] = json.loads(run.stdout)
        server.assert_alive()
    assert seen["models"] == [MODEL]
    assert seen["chat"] and seen["usage"]["completion_tokens"] == 12
    assert "".join(seen["chunks"]) == seen["chat"] == seen["collected"]
    assert len(seen["chunks"]) > 3 and seen["streamedUsage"] == seen["usage"]
    assert [index for index, _ in seen["completions"]] == [0, 1, 2, 3]
    assert seen["completions"][0][1] == "One, two"
    assert seen["embeddings"] == [pytest.approx([0.6, 0.8]), pytest.approx([0.5**0.5, 0.5**0.5])]
    assert seen["floats"] == [pytest.approx(values) for values in seen["embeddings"]]
    is_ours, status, message = seen["error"]
    assert is_ours and status == 400 and "temperature is -1" in message
