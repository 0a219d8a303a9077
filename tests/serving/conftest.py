"""Servers for tests: the real application on a real socket, in a thread, over an engine process."""

from __future__ import annotations

import pytest

from tiny_vllm.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from tiny_vllm.weights.checkpoint import open_checkpoint

    return open_checkpoint(None).load_tokenizer()
