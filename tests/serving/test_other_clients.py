"""Clients that are not OpenAI's work unchanged. Skipped without them: pip install langchain-openai litellm"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.support import RunningServer, running_server

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the clients' own dependencies

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # A client that cannot follow gets several tokens in a chunk: these come slowly enough.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STUB_STEP_SECONDS", "0.02")
        with running_server() as server:
            yield server
            server.assert_alive()


def test_langchain_chats_whole_and_streamed(server: RunningServer) -> None:
    reason = "langchain-openai is not installed"
    langchain: Any = pytest.importorskip("langchain_openai", reason=reason)
    chat = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_tokens=12, max_retries=0
    )
    whole = chat.invoke("Hello there")
    assert whole.content and whole.usage_metadata["output_tokens"] == 12
    chunks = list(chat.stream("Hello there"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert len(chunks) > 3


def test_langchain_completes_several_prompts(server: RunningServer) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.OpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_tokens=3, max_retries=0
    )
    result = model.generate(["One, two", "Three, four"])
    assert [choices[0].text for choices in result.generations] == ["One, two", "Three, four"]


def test_langchain_embeds(server: RunningServer) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        dimensions=4,
        check_embedding_ctx_length=False,  # or it would send token ids of OpenAI's own models
    )
    texts = ["One, two", "Three"] * 150
    vectors = model.embed_documents(texts)
    assert len(vectors) == 300 and {len(vector) for vector in vectors} == {4}
    assert model.embed_query("Three") == pytest.approx(vectors[1])


def test_litellm_embeds(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
    answer = litellm.embedding(
        f"openai/{MODEL}", input=["One, two", "Three"], api_base=f"{server.url}/v1", api_key="none"
    )
    assert [len(made["embedding"]) for made in answer.data] == [576, 576]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3


def test_litellm_chats_completes_and_streams(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it would look for one on the network
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
    options: dict[str, Any] = dict(api_base=f"{server.url}/v1", api_key="none", max_tokens=12, num_retries=0)
    messages = [{"role": "user", "content": "Hello there"}]
    whole = litellm.completion(f"openai/{MODEL}", messages=messages, **options)
    assert whole.usage.completion_tokens == 12
    stream = litellm.completion(f"openai/{MODEL}", messages=messages, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    completed = litellm.text_completion("One, two", f"text-completion-openai/{MODEL}", **options)
    assert completed.choices[0].text.startswith("One, two")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(f"openai/{MODEL}", messages=messages, temperature=-1, **options)
