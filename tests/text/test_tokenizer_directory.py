from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tiny_vllm.errors import ModelError, RequestError
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.text.tokenizer_directory import load_tokenizer_directory

TEXTS = ("hello world", "x =   3", "\n\n1.", "naïve 😀", "a<s>b</s>", "<tool>x</tool>", "  lead", "")


def write(directory: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """A checkpoint's tokenizer files; tokenizer_config=..., special_tokens_map=... and so on are JSON."""
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "roles as text": {"bos_token": "<s>", "eos_token": "</s>"},
    "roles as objects": {
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "pad_token": None,
    },
    "bos asked for": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    "bos and eos asked for": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    "bos not asked for": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_ids_and_texts_are_those_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, name: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    config = {**CONFIGS[name], "tokenizer_class": "PreTrainedTokenizerFast"}
    directory = write(tmp_path, request.getfixturevalue(f"{kind}_tokenizer"), tokenizer_config=config)
    reference = transformers.AutoTokenizer.from_pretrained(str(directory))
    tokenizer = load_tokenizer_directory(directory)
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.special_tokens.get("eos_token") == reference.eos_token


def test_a_tokenizer_json_may_be_named_itself(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> None:
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"eos_token": "</s>"})
    assert load_tokenizer_directory(tmp_path / "tokenizer.json").special_tokens == {"eos_token": "</s>"}


def test_roles_come_from_the_special_tokens_map_too(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> None:
    write(tmp_path, byte_level_tokenizer, special_tokens_map={"eos_token": {"content": "</s>"}})
    assert load_tokenizer_directory(tmp_path).special_tokens == {"eos_token": "</s>"}


def test_added_tokens_of_the_config_are_added(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> None:
    first = byte_level_tokenizer.vocab_size
    entries = {
        str(first + 1): {"content": "<end>", "special": True},
        str(first): {"content": "<tool>", "special": False},
    }
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"added_tokens_decoder": entries})
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.vocab_size == first + 2
    assert tokenizer.encode("<tool><end>") == [first, first + 1]
    assert tokenizer.decode([first, first + 1]) == "<tool>"


def test_added_tokens_with_contradicting_ids_are_refused(
    tmp_path: Path, byte_level_tokenizer: Tokenizer
) -> None:
    entries = {"9999": {"content": "<tool>"}}
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"added_tokens_decoder": entries})
    with pytest.raises(ModelError, match="'<tool>' the id 9999"):
        load_tokenizer_directory(tmp_path)


@pytest.mark.parametrize(
    "entries", [{"x": {"content": "<tool>"}}, {"900": "<tool>"}, {"9" * 5000: {"content": "<tool>"}}]
)
def test_malformed_added_tokens_are_refused(
    tmp_path: Path, byte_level_tokenizer: Tokenizer, entries: dict[str, Any]
) -> None:
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"added_tokens_decoder": entries})
    with pytest.raises(ModelError, match="added_tokens_decoder"):
        load_tokenizer_directory(tmp_path)


def test_named_control_tokens_are_skipped_in_text(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> None:
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"additional_special_tokens": ["in"]})
    tokenizer = load_tokenizer_directory(tmp_path)
    token_id = tokenizer.token_id("in")
    assert token_id is not None
    assert tokenizer.decode([token_id]) == ""


def test_a_role_without_a_token_is_left_out(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> None:
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"pad_token": "[PAD]", "eos_token": "</s>"})
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.vocab_size == byte_level_tokenizer.vocab_size
    assert tokenizer.special_tokens == {"eos_token": "</s>"}


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, None),
        ({"chat_template": "in config"}, {}, "in config"),
        ({"chat_template": "in config"}, {"chat_template.jinja": "in file"}, "in file"),
        ({"chat_template": [{"name": "default", "template": "of list"}]}, {}, "of list"),
        ({}, {"chat_template.json": '{"chat_template": "in json"}'}, "in json"),
        (
            {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
                "chat_template": "{{bos_token}}{{eos_token}}",
            },
            {},
            "<s></s>",
        ),
    ],
)
def test_the_chat_template_is_found_wherever_it_is(
    tmp_path: Path, byte_level_tokenizer: Tokenizer, config: Any, files: dict[str, str], expected: str | None
) -> None:
    write(tmp_path, byte_level_tokenizer, tokenizer_config=config)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    template = load_tokenizer_directory(tmp_path).chat_template
    assert (template and template.render(MESSAGES)) == expected


def test_a_broken_chat_template_is_no_obstacle_to_plain_text(
    tmp_path: Path, byte_level_tokenizer: Tokenizer
) -> None:
    write(tmp_path, byte_level_tokenizer, tokenizer_config={"chat_template": "{% for %}"})
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.encode("hi") == byte_level_tokenizer.encode("hi")


def test_a_template_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, byte_level_tokenizer: Tokenizer
) -> None:
    directory = write(tmp_path, byte_level_tokenizer)
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load_tokenizer_directory(directory)


def test_a_tool_template_serves_conversations_with_tools(
    tmp_path: Path, byte_level_tokenizer: Tokenizer
) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    template = load_tokenizer_directory(
        write(tmp_path, byte_level_tokenizer, tokenizer_config={"chat_template": named})
    ).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{}]) == "1 tools"


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        load_tokenizer_directory(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"hint: tokenizer\.model alone is not read"):
        load_tokenizer_directory(tmp_path)


def test_a_vocabulary_without_its_unknown_token_refuses_texts(tmp_path: Path) -> None:
    vocabulary = {"a": 0}
    Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.encode("aa") == [0, 0]
    for parse_special_tokens in (True, False):
        with pytest.raises(RequestError, match=r"cannot encode this text: Unk token `.` not found"):
            tokenizer.encode("ab", parse_special_tokens=parse_special_tokens)
    vocabulary = {"b": 0}
    Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer: Unk token"):
        load_tokenizer_directory(tmp_path)


def test_a_byte_order_mark_before_any_of_the_files_is_no_part_of_it(
    tmp_path: Path, byte_level_tokenizer: Tokenizer
) -> None:
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    write(
        tmp_path,
        byte_level_tokenizer,
        tokenizer_config={"bos_token": "<s>"},
        special_tokens_map={"eos_token": "</s>"},
        chat_template={"chat_template": "from JSON"},
    )
    (templates / "tool_use.jinja").write_text("with {{ tools }}", encoding="utf-8")
    plain = load_tokenizer_directory(tmp_path)
    marked = [*tmp_path.glob("*.json"), *templates.iterdir()]
    for file in marked:
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    tokenizer = load_tokenizer_directory(tmp_path)
    assert len(marked) == 5
    assert tokenizer.encode("hello world") == plain.encode("hello world")
    assert tokenizer.special_tokens == plain.special_tokens
    assert (tokenizer.bos_token_id, tokenizer.special_tokens["eos_token"]) == (0, "</s>")
    assert tokenizer.chat_template is not None and plain.chat_template is not None
    assert tokenizer.chat_template.source == "from JSON"
    assert tokenizer.chat_template.tool_source == plain.chat_template.tool_source == "with {{ tools }}"
    (tmp_path / "chat_template.jinja").write_bytes(codecs.BOM_UTF8 + b"of its own")
    own = load_tokenizer_directory(tmp_path).chat_template
    assert own is not None and own.source == "of its own"


def test_damaged_files_are_named(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> None:
    write(tmp_path, byte_level_tokenizer)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        load_tokenizer_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelError, match="chat_template is of type number"):
        load_tokenizer_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer_directory(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")
    with pytest.raises(
        ModelError, match=r"cannot read .*tokenizer\.json: Input/output error\nhint: check its"
    ):
        load_tokenizer_directory(tmp_path)
