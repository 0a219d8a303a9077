"""P prompts with n choices each are P x n choices, those of the first prompt first, as OpenAI has them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.support import running_server


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_in_the_order_of_their_prompts(stream: bool) -> None:
    prompts = [[40, 41, 42], [50], [60, 61]]
    body: dict[str, Any] = {
        "prompt": prompts,
        "n": 2,
        "max_tokens": 4,
        "stream": stream,
        "return_token_ids": True,
    }
    with running_server(engine={"max_num_seqs": 2}) as server:
        answer = server.post("/v1/completions", body)
    token_ids: list[list[int]] = [[] for _ in range(6)]
    for part in answer.events() if stream else [answer.json()]:
        for choice in part["choices"]:
            token_ids[choice["index"]] += choice["token_ids"]
    # The stub repeats the prompt, and each choice begins a token later.
    assert token_ids == [(prompt * 5)[index : index + 4] for prompt in prompts for index in range(2)]
