from __future__ import annotations

import argparse

import pytest

from tests.cli.fakes import FakeLLM
from tiny_vllm.cli import session


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Takes the place of the model that a command would load."""
    fake = FakeLLM()

    def open_fake(args: argparse.Namespace) -> FakeLLM:
        return fake

    monkeypatch.setattr(session, "open_llm", open_fake)
    return fake
