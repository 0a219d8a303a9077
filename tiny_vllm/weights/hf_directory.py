"""A Hugging Face model directory: which files hold the weights, and what its JSON files say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiny_vllm.errors import UNREADABLE, ModelError, json_type, printable, shown

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES_SHOWN = 6


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=UNREADABLE) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", hint="download it again") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds a {json_type(content)}, but must hold an object", hint="download it again"
        )
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`; an absent file is an empty object."""
    return read_json(path) if path.is_file() else {}


def weight_files(directory: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The safetensors files to read, and tensor name -> file name if an index says so.

    An index decides alone: files it does not name are strays and are ignored. Raises ModelError naming what
    is missing.
    """
    index = directory / INDEX
    if index.is_file():
        return _indexed_files(directory, index)
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE], {}
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1 and "-of-" not in files[0].name:
        return files, {}
    if files:
        raise ModelError(
            f"{directory} has {len(files)} safetensors file(s) ({_listed([file.name for file in files])}), "
            f"but neither {SINGLE_FILE} nor {INDEX}",
            hint="download the index too",
        )
    if any(directory.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{directory} holds its weights as pytorch_model.bin, which is not supported",
            hint="save it again as safetensors",
        )
    raise ModelError(
        f"{directory} has no weights ({SINGLE_FILE} or {INDEX})", hint="download the model again"
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index. Raises ModelError naming the index if it holds no such map."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(
            f"{index} has no weight_map from tensor names to file names", hint="download it again"
        )
    outside = sorted({name for name in weight_map.values() if Path(name).name != name})
    if outside:
        raise ModelError(
            f"{index} names files outside its directory: {_listed(outside)}",
            hint="put them beside it, and name them without a directory",
        )
    return weight_map


def _indexed_files(directory: Path, index: Path) -> tuple[list[Path], Mapping[str, str]]:
    weight_map = read_weight_map(index)
    names = sorted(set(weight_map.values()))
    # Unlike Path.is_file this takes a name that no file can have for one that is missing.
    missing = [name for name in names if not os.path.isfile(directory / name)]
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of {len(names)} weight files are missing: {_listed(missing)}",
            hint="download the model again",
        )
    return [directory / name for name in names], weight_map


def token_ids(directory: Path, config: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    """Ids of the "eos" or "bos" token, united from all of a directory's files in order of appearance.

    config: contents of config.json. directory: where generation_config.json and tokenizer_config.json are
    looked for. Negative ones are among them: they say that there is no such token.
    """
    key = f"{kind}_token_id"
    generation = directory / GENERATION_CONFIG
    ids = [
        *_ids(config.get(key), f"{directory / CONFIG}: {key}"),
        *_ids(read_optional_json(generation).get(key), f"{generation}: {key}"),
        *tokenizer_token_ids(directory, kind),
    ]
    return tuple(dict.fromkeys(ids))


def tokenizer_token_ids(directory: Path, kind: str) -> tuple[int, ...]:
    """Id of the text that the tokenizer's files name as "eos" or "bos"; empty if they name none."""
    config = read_optional_json(directory / "tokenizer_config.json")
    text = config.get(f"{kind}_token")
    if text is None:
        text = read_optional_json(directory / "special_tokens_map.json").get(f"{kind}_token")
    if isinstance(text, dict):
        text = text.get("content")
    if not isinstance(text, str):
        return ()
    tokenizer = read_optional_json(directory / "tokenizer.json")
    added = config.get("added_tokens_decoder", {})
    try:
        ids = {entry["content"]: int(token) for token, entry in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is {shown(added)}, but must map "
            "token ids to objects with content",
            hint="correct the file, or download it again",
        ) from error
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict):
            ids |= vocabulary
        ids |= {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(
            f"{directory / 'tokenizer.json'}: model or added_tokens is malformed: both must be as the "
            "tokenizers library writes them",
            hint="download it again",
        ) from error
    return tuple(_ids(ids.get(text), f"{directory}: the id of {shown(text)}", may_be_none=False))


def _ids(value: object, name: str, *, may_be_none: bool = True) -> Iterator[int]:
    for token in value if isinstance(value, list) else [value]:
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or (token < 0 and not may_be_none):
            raise ModelError(
                f"{name} is {shown(value)}, but must be a token id or a list of them",
                hint="correct the file, or download it again",
            )
        yield token


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return ", ".join(map(printable, names[:NAMES_SHOWN])) + more
