"""A tiny random model whose tokenizer adds BOS and whose template is strict, offline and behind a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.oracle import greedy_tokens
from tests.helpers.tiny_models import (
    BOS,
    BOS_ID,
    TURN_END,
    make_tiny_llama,
    make_tiny_tokenizer,
    save_tiny_llama,
)
from tests.serving.support import RunningServer, running_server, wait_until
from tiny_vllm import LLM
from tiny_vllm.serving.engine_client import ENGINE_COMMAND

CONTEXT = 2048
STRICT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('there is no role ' + message.role) }}{% endif %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "{% if loop.previtem and loop.previtem.role == message.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """model: of transformers, the oracle. directory: where it lies."""

    model: Any
    directory: Path

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return greedy_tokens(self.model, prompt, count)


@dataclass
class Served(RunningServer):
    """A server over the tiny model."""

    tiny: Tiny

    def assert_alive_and_right(self) -> None:
        """A normal request gets its expected tokens, and then nothing is left of any request."""
        answer = self.complete(
            [5, 6, 7], max_tokens=6, temperature=0, ignore_eos=True, return_token_ids=True
        ).json()
        assert answer["choices"][0]["token_ids"] == self.tiny.greedy([5, 6, 7], 6)
        wait_until(self.is_idle)


def save_bos_tokenizer(directory: Path) -> None:
    from tokenizers import processors

    tokenizer = make_tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "chat_template": STRICT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    model = make_tiny_llama(max_position_embeddings=CONTEXT)
    directory = save_tiny_llama(tmp_path_factory.mktemp("scenarios"), model, tokenizer=False)
    save_bos_tokenizer(directory)
    return Tiny(model, directory)


@pytest.fixture(scope="session")
def llm(tiny: Tiny) -> Iterator[LLM]:
    with LLM(str(tiny.directory), num_pages=100, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(tiny: Tiny) -> Iterator[Served]:
    """The pool holds 1600 tokens, fewer than the context; long prompts take many steps."""
    engine = {
        "model": str(tiny.directory),
        "num_pages": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_n": 8,
    }
    with running_server(ENGINE_COMMAND, engine, max_prompts=16) as running:
        served = Served(running.service, running.port, running.stop, running.thread, tiny)
        yield served
        served.assert_alive_and_right()
