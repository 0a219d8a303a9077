"""A model's generation_config.json says how it is sampled, unless the caller or an option does."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tests.helpers.llm_checks import greedy, tokens_of
from tests.helpers.tiny_models import edit_json
from tiny_vllm import LLM, ModelError, SamplingParams

PROMPT = [5, 6, 7]
HELLO = [{"role": "user", "content": "Hello"}]
RECOMMENDED = dict(temperature=0.0, top_k=5, max_new_tokens=7)


@pytest.fixture(scope="module")
def recommending(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(directory, tmp_path_factory.mktemp("recommending") / "tiny")
    edit_json(copy / "generation_config.json", **RECOMMENDED)
    return copy


def test_calls_without_parameters_follow_the_file(recommending: Path) -> None:
    params = SamplingParams(temperature=0.0, top_k=5, max_tokens=7)
    with LLM(str(recommending), num_pages=64) as llm:
        assert llm.get_default_sampling_params() == params
        outputs = [
            (llm.generate([PROMPT], given, use_tqdm=False), llm.chat(HELLO, given, use_tqdm=False))
            for given in (None, params)
        ]
        for plain, asked in zip(*outputs, strict=True):
            assert tokens_of(plain) == tokens_of(asked)
        assert len(outputs[0][0][0].outputs[0].token_ids) == 7
        streamed = [token for update in llm.stream(PROMPT) for token in update.deltas[0].token_ids]
        assert [[streamed]] == tokens_of(outputs[0][0])


def test_parameters_that_are_given_count_alone(recommending: Path) -> None:
    with LLM(str(recommending), num_pages=64) as llm:
        (output,) = llm.generate([PROMPT], greedy(3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_none_leaves_the_file_aside(recommending: Path) -> None:
    with LLM(str(recommending), num_pages=64, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        (output,) = llm.chat(HELLO, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop" or len(output.outputs[0].token_ids) > 100


def test_a_conversation_still_has_no_limit_where_the_file_names_none(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "tiny")
    edit_json(copy / "generation_config.json", top_k=1)
    with LLM(str(copy), num_pages=64) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1)
        ignoring = SamplingParams(top_k=1, max_tokens=None)
        assert tokens_of(llm.chat(HELLO, use_tqdm=False)) == tokens_of(
            llm.chat(HELLO, ignoring, use_tqdm=False)
        )


def test_what_was_taken_is_among_the_choices_and_in_the_log(
    recommending: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tiny_vllm"), LLM(str(recommending), num_pages=64) as llm:
        (choice,) = (choice for choice in llm.choices if choice.name == "generation_config")
    words = f"temperature 0.0, top_k 5, max_tokens 7 from {recommending / 'generation_config.json'}"
    assert (choice.value, choice.reason) == ("auto", words)
    assert sum(words in message for message in caplog.messages) == 1


def test_a_wrong_value_is_refused_before_anything_is_loaded(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "tiny")
    edit_json(copy / "generation_config.json", top_p=2)
    with pytest.raises(ModelError, match=r"generation_config\.json: 'top_p' is 2, but must be"):
        LLM(str(copy), num_pages=64)
    LLM(str(copy), num_pages=64, generation_config="none").close()
