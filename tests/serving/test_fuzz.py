"""Bodies made of everything JSON can hold: the answer is 200 or a proper 4xx, soon, and the server lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.support import RunningServer, running_server
from tiny_vllm.serving.parameters import IGNORED, REFUSED
from tiny_vllm.serving.schemas import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(engine={"max_num_seqs": 4, "max_model_len": 64, "max_n": 4}) as server:
        yield server
        server.assert_alive()


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 60),
    st.sampled_from([2**31, 2**63, 2**64, -(2**70), 49151, 49152, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "auto", "none", "text", "\x00", "\ud83d\ude00", "0", "-1", "5", " ", "\n"]),
    st.text(max_size=20),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "developer", ""]) | PLAIN,
            "content": st.text(max_size=20) | VALUES,
            "tool_calls": VALUES,
        },
    ),
    max_size=4,
)
PROMPTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.integers(0, 49151), max_size=70),
    st.lists(st.text(max_size=5) | st.lists(st.integers(0, 49151), max_size=5), max_size=4),
    VALUES,
)
BODIES = {
    "/v1/completions": (CompletionBody, {"prompt": PROMPTS}),
    "/v1/chat/completions": (ChatBody, {"messages": MESSAGES | VALUES}),
    "/v1/embeddings": (EmbeddingBody, {"input": PROMPTS}),
    "/tokenize": (TokenizeBody, {}),
    "/detokenize": (DetokenizeBody, {"tokens": st.lists(st.integers(0, 49151), max_size=9) | VALUES}),
}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    body_class, required = BODIES[path]
    others = [*body_class.model_fields, *REFUSED, *IGNORED, "unknown"]
    special: dict[str, Any] = {"messages": MESSAGES | VALUES, "prompt": PROMPTS, "model": st.none()}
    optional = {name: special.get(name, VALUES) for name in others if name not in required}
    # Few of them at a time, or something would always be wrong.
    chosen = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: optional[name] for name in names}})
    )


@pytest.mark.parametrize("path", BODIES)
def test_any_body_gets_an_answer(server: RunningServer, path: str) -> None:
    @settings(max_examples=120, suppress_health_check=list(HealthCheck))
    @given(body=bodies(path))
    def check(body: dict[str, Any]) -> None:
        answer = server.post(path, body)
        assert answer.status in (200, 400, 404), (body, answer.data)
        if answer.status != 200:
            assert answer.error["message"]
        elif body.get("stream") is True:
            assert answer.events()

    check()
