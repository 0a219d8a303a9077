"""/v1/embeddings: its formats and limits over an engine that repeats ids, and its numbers over a real one."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tests.serving.stub_engine import BAD_LOGITS, HANG, HIDDEN_SIZE
from tests.serving.support import Hold, RunningServer, running_server, wait_until
from tiny_vllm.serving.engine_client import ENGINE_COMMAND

MODEL = "SmolLM2-135M-Instruct"
TEXT = "One, two, three"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(engine={"max_num_seqs": 4, "max_queue_len": 12}, max_prompts=16) as server:
        yield server
        server.assert_alive()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


def ids_of(server: RunningServer, text: str) -> list[int]:
    tokenizer = server.service.model.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def repeated(ids: list[int], *, size: int = HIDDEN_SIZE, normalize: bool = True) -> np.ndarray:
    values = np.resize(np.float32(ids), size)
    return values / np.linalg.norm(values) if normalize else values


def embed(server: RunningServer, prompt: Any, **options: Any) -> Any:
    return server.post("/v1/embeddings", {"input": prompt, **options})


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
def test_the_openai_client_gets_the_same_numbers_in_both_encodings(
    server: RunningServer, client: openai.OpenAI, encoding: Any
) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXT, encoding_format=encoding)
    ids = ids_of(server, TEXT)
    (made,) = answer.data
    assert (answer.object, made.object, made.index, answer.model) == ("list", "embedding", 0, MODEL)
    values: Any = made.embedding
    if encoding == "base64":  # the client decodes only what it has asked for itself
        values = np.frombuffer(base64.b64decode(values), "<f4")
    np.testing.assert_allclose(values, repeated(ids), rtol=1e-6)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids), len(ids))


@pytest.mark.parametrize(
    ("given", "count"), [("a b", 1), (["a b", "c"], 2), ([5, 6], 1), ([[5, 6], [7]], 2), ([[5.0], "a"], 2)]
)
def test_every_form_of_input_is_answered_in_order(server: RunningServer, given: Any, count: int) -> None:
    data = embed(server, given).json()["data"]
    assert [made["index"] for made in data] == list(range(count))
    prompts = given if count > 1 else [given]
    for prompt, made in zip(prompts, data, strict=True):
        ids = ids_of(server, prompt) if isinstance(prompt, str) else prompt
        np.testing.assert_allclose(made["embedding"], repeated(ids), rtol=1e-6)


def test_dimensions_pooling_and_normalising_are_those_asked_for(client: openai.OpenAI) -> None:
    def values(**options: Any) -> list[float]:
        return client.embeddings.create(model=MODEL, input=[3, 4, 5], **options).data[0].embedding

    np.testing.assert_allclose(values(dimensions=2), [0.6, 0.8], rtol=1e-6)
    raw = values(extra_body={"normalize": False})
    np.testing.assert_allclose(raw, repeated([3, 4, 5], normalize=False))
    last = values(extra_body={"pooling": "last", "normalize": False})
    assert last == [5.0] * HIDDEN_SIZE


def test_the_server_has_a_pooling_of_its_own() -> None:
    with running_server(pooling="last") as server:
        body = {"input": [3, 4, 5], "normalize": False}
        for options, first in (({}, 5.0), ({"pooling": "mean"}, 3.0)):
            answer = server.post("/v1/embeddings", {**body, **options}).json()
            assert answer["data"][0]["embedding"][0] == first


def test_text_gets_special_tokens_only_if_wanted(server: RunningServer) -> None:
    """The bundled tokenizer adds none; control tokens that are written out count, unless told otherwise."""
    text = "a<|im_end|>"
    usage = [
        embed(server, text, **options).json()["usage"]["prompt_tokens"]
        for options in ({}, {"add_special_tokens": False}, {"parse_special_tokens": False})
    ]
    assert usage[0] == usage[1] == 2 and usage[2] > 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input must be a string"),
    "empty list": ({"input": []}, "the prompt is empty"),
    "empty text": ({"input": ""}, "the prompt is empty"),
    "empty among others": ({"input": ["a", ""]}, "input[1] is empty"),
    "an object": ({"input": {}}, "input must be a string"),
    "mixed": ({"input": [5, "a"]}, "input mixes token ids with prompts"),
    "null": ({"input": ["a", None]}, "input holds null, but must hold strings or lists of token ids"),
    "nested": ({"input": [[[5]]]}, "not a token id"),
    "a float": ({"input": [5.5]}, "not a token id"),
    "an id too large": ({"input": [10**9]}, "token id 1000000000"),
    "too long": ({"input": [5] * 512}, "must be shorter than the context"),
    "too many": ({"input": ["a"] * 17}, "at most 16 are allowed"),
    "encoding": (
        {"encoding_format": "int8"},
        "encoding_format: Input should be 'float' or 'base64', not \"int8\"",
    ),
    "pooling": ({"pooling": "max"}, "pooling: Input should be 'mean' or 'last'"),
    "no dimensions": ({"dimensions": 0}, "dimensions is 0, but must be from 1 to 576"),
    "dimensions": ({"dimensions": 577}, "dimensions is 577, but must be from 1 to 576"),
    "huge dimensions": ({"dimensions": 10**30}, "but must be from 1 to 576"),
    "dimensions in words": ({"dimensions": "2"}, 'dimensions: Input should be a valid integer, not "2"'),
    "dimensions with a fraction": (
        {"dimensions": 0.5},
        "dimensions: Input should be a valid integer, not 0.5",
    ),
    "encoding as list": (
        {"encoding_format": ["float"]},
        "encoding_format: Input should be 'float' or 'base64'",
    ),
    "normalize": ({"normalize": 1}, "normalize: Input should be a valid boolean, not 1"),
    "a stream": ({"stream": True}, "unknown parameter 'stream'"),
    "sampling": ({"temperature": 0.5}, "unknown parameter 'temperature'"),
    "truncation": ({"truncate_prompt_tokens": 5}, "prompts are never cut"),
    "type": ({"embed_dtype": "float16"}, "embeddings are FP32"),
    "order of bytes": ({"endianness": "big"}, "little-endian"),
    "priority": ({"priority": 2**40}, "priority is 1099511627776"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_embedded_is_refused(server: RunningServer, name: str) -> None:
    options, message = BAD[name]
    answer = server.post("/v1/embeddings", {"input": "a", **options})
    assert answer.status == 400
    assert message in answer.error["message"]


def test_what_changes_nothing_is_accepted(server: RunningServer) -> None:
    harmless = {"user": "me", "embed_dtype": "float32", "endianness": "little", "use_activation": True}
    answer = embed(server, "a", **harmless, model=MODEL, priority=-1, cache_salt="x", request_id="mine")
    assert answer.status == 200
    assert embed(server, "a", model="other").status == 404


def test_a_model_without_usable_numbers_is_a_fault_of_the_server(server: RunningServer) -> None:
    answer = embed(server, [[5], [BAD_LOGITS, BAD_LOGITS]])
    assert answer.status == 500
    assert answer.error["code"] == "model_failure"


def test_embeddings_wait_for_their_turn_and_count_in_the_queue(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    engine = {"max_num_seqs": 1, "max_queue_len": 2}
    with running_server(hold.command(), engine) as server, ThreadPoolExecutor(2) as pool:
        with hold:
            busy = pool.submit(server.complete, [5], max_tokens=40)
            wait_until(lambda: server.service.engine.stats and server.service.engine.stats.num_running == 1)
            full = embed(server, ["a", "b", "c"])
            assert (full.status, full.headers["retry-after"]) == (429, "1")
            never = embed(server, ["a"] * 4)
            assert (never.status, never.error["param"]) == (400, None)
            assert "4 answers, but slots and queue hold 3" in never.error["message"]
            waiting = pool.submit(embed, server, ["a", "b"])
            wait_until(lambda: server.service.engine.stats and server.service.engine.stats.num_waiting == 2)
            assert not busy.done() and not waiting.done()
        assert busy.result().status == waiting.result().status == 200


def test_embeddings_that_take_too_long_are_given_up(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    with running_server(hold.command(), request_timeout=0.2) as server:
        with hold:
            assert embed(server, [HANG, HANG]).status == 504
        wait_until(server.is_idle)


def test_a_client_that_leaves_frees_the_slots(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    with running_server(hold.command(), {"max_num_seqs": 1}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=0.3)
        with hold, client, pytest.raises(openai.APITimeoutError):
            client.embeddings.create(model=MODEL, input=[[HANG, HANG]] * 50)
        server.assert_alive()


def test_metrics_count_prompts_but_no_tokens(server: RunningServer) -> None:
    def value(name: str) -> float:
        lines = server.get("/metrics").data.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    shown = server.service.metrics.num_prompt_tokens
    before = value("vllm:prompt_tokens_total"), value("vllm:generation_tokens_total")
    assert embed(server, [[5, 6, 7], [8]]).status == 200
    after = value("vllm:prompt_tokens_total"), value("vllm:generation_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (4, 0)
    assert server.service.metrics.num_prompt_tokens - shown == 4


# FP32, see tests/engine/test_pooling.py.
TOLERANCE = 5e-5


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_numbers_are_those_of_transformers(tmp_path: Path, pooling: str) -> None:
    model = make_tiny_llama()
    directory = save_tiny_llama(tmp_path / "tiny", model)
    prompts = [[5 + i % 300 for i in range(length)] for length in (1, 7, 100, 40)]
    engine = {"model": str(directory), "num_pages": 40, "max_num_batched_tokens": 32, "max_num_seqs": 3}
    with running_server(ENGINE_COMMAND, engine, pooling=pooling) as server:
        stream = threading.Thread(target=server.complete, args=([9] * 30,), kwargs={"max_tokens": 100})
        stream.start()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            answer = client.embeddings.create(model="tiny", input=prompts)
            with pytest.raises(openai.BadRequestError, match="must be shorter than the context"):
                client.embeddings.create(model="tiny", input=[5] * 256)
        stream.join()
    for prompt, made in zip(prompts, answer.data, strict=True):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(0) if pooling == "mean" else hidden[-1], dim=0)
        torch.testing.assert_close(torch.tensor(made.embedding), expected, atol=TOLERANCE, rtol=TOLERANCE)
