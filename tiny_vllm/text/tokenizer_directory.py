"""A Tokenizer from the files of a Hugging Face checkpoint."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tiny_vllm.errors import MAX_REASON_LEN, UNREADABLE, ModelError, json_type, printable, shown
from tiny_vllm.text.chat_template import ChatTemplate
from tiny_vllm.text.tokenizer import Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
TOOL_TEMPLATE_NAME = "tool_use"

MAX_ID_DIGITS = 20
"""More than any token id has; Python refuses to read some thousand."""

REPAIR = "correct the file, or download it again"
"""The hint for a file that cannot be used."""


def load_tokenizer_directory(path: str | Path) -> Tokenizer:
    """Read tokenizer.json and the files beside it.

    path: a directory, or a tokenizer.json. Read besides, where present: tokenizer_config.json (special
    tokens, added tokens, chat_template as text or as a list of named templates), special_tokens_map.json,
    chat_template.jinja, additional_chat_templates/*.jinja and chat_template.json. What is added around a
    prompt is up to tokenizer.json alone: add_bos_token and add_eos_token speak to converters of old formats.
    Each may begin with a byte order mark. Raises ModelError for what is missing, damaged or contradictory.
    """
    path = Path(path)
    directory = path.parent if path.is_file() else path
    backend = _read_backend(path if path.is_file() else path / "tokenizer.json")
    config = _read_json(directory / "tokenizer_config.json")
    _add_tokens(backend, _added_tokens(config))
    roles = _special_tokens({**_read_json(directory / "special_tokens_map.json"), **config})
    roles = {role: token for role, token in roles.items() if backend.token_to_id(token) is not None}
    _mark_special(backend, [*roles.values(), *_further_special_tokens(config)])
    templates = _chat_templates(directory, config)
    return Tokenizer(
        backend,
        special_tokens=roles,
        chat_template=None if templates is None else templates.with_tokens(roles),
    )


@dataclass(frozen=True, slots=True)
class _Templates:
    """Sources of the chat template, and of the one for conversations with tools."""

    default: str
    tool: str | None = None

    def with_tokens(self, special_tokens: Mapping[str, str]) -> ChatTemplate:
        return ChatTemplate(self.default, tool_source=self.tool, special_tokens=special_tokens)


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        hint = "a checkpoint for the tokenizers library has this file"
        if (path.parent / "tokenizer.model").is_file():
            hint = "tokenizer.model alone is not read: save the tokenizer in its fast form beside it"
        raise ModelError(f"{path} does not exist", hint=hint)
    try:
        # The library takes no byte order mark; Python's reader of JSON does.
        backend = Backend.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        backend.encode("a")  # Some damage shows only now.
        return backend
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=UNREADABLE) from None
    except Exception as error:  # the library raises bare Exception
        reason = printable(str(error), MAX_REASON_LEN)
        raise ModelError(f"{path} is not a tokenizer: {reason}", hint="download it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=UNREADABLE) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", hint="download it again") from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path} holds a {json_type(value)}, but must hold an object", hint="download it again"
        )
    return value


def _text_of(token: object) -> str | None:
    """Tokens are written as text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    try:
        token.encode()
    except UnicodeEncodeError:
        raise ModelError(
            f"the tokenizer's configuration has the token {shown(token)}, which is no text", hint=REPAIR
        ) from None
    return token


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {role: _text_of(config.get(role)) for role in ROLES}
    return {role: text for role, text in texts.items() if text}


def _further_special_tokens(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    tokens = listed.values() if isinstance(listed, Mapping) else listed
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ModelError(
            f"tokenizer_config.json lists the special tokens {shown(listed)}, which is no list", hint=REPAIR
        )
    return [text for token in tokens if (text := _text_of(token))]


def _added_tokens(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping):
        raise ModelError(
            f"added_tokens_decoder of tokenizer_config.json is {shown(entries)}, which is no object",
            hint=REPAIR,
        )
    for key, entry in entries.items():
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS or not isinstance(entry, Mapping):
            raise ModelError(
                "added_tokens_decoder of tokenizer_config.json has the entry "
                f"{shown(key)}: {shown(entry)}, but must map token ids to objects",
                hint=REPAIR,
            )
    return entries


def _add_tokens(backend: Backend, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Add what tokenizer_config.json lists beyond tokenizer.json. Raises ModelError if ids disagree."""
    added = backend.get_added_tokens_decoder()
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = _text_of(entry)
        if not content:
            continue
        known = added.get(int(key))
        if known is None or known.content != content or known.special != bool(entry.get("special")):
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            token = AddedToken(content, **{flag: bool(entry[flag]) for flag in flags if flag in entry})
            if token.special:
                backend.add_special_tokens([token])
            else:
                backend.add_tokens([token])
        token_id = backend.token_to_id(content)
        if token_id != int(key):
            raise ModelError(
                f"tokenizer_config.json gives token {shown(content)} the id {printable(key)}, "
                f"but tokenizer.json {token_id}",
                hint="the files are of different versions; download both again",
            )


def _mark_special(backend: Backend, tokens: list[str]) -> None:
    """Tokens with a role are control tokens, also where tokenizer.json does not say so."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in tokens:
        if token not in special and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> _Templates | None:
    """A file of its own comes before an entry in a JSON file."""
    named = _named_templates(_read_json(directory / "chat_template.json").get("chat_template"))
    named = {**_named_templates(config.get("chat_template")), **named}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = _read_text(file)
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        named["default"] = _read_text(own_file)
    tool = named.get(TOOL_TEMPLATE_NAME)
    default = named.get("default", tool)
    return None if default is None else _Templates(default, tool)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}", hint="it must be a text file in UTF-8") from error


def _named_templates(value: object) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            entries = [entry for entry in value if isinstance(entry, Mapping)]
            return {str(entry.get("name")): str(entry.get("template")) for entry in entries}
    raise ModelError(
        f"chat_template is of type {json_type(value)}, but must be text or a list of templates", hint=REPAIR
    )
