"""The tables of docs/guides/serving.md, made from the code.

python -m tests.serving.guide_tables    # writes them
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from tiny_vllm.cli.options import _sampling_helps
from tiny_vllm.cli.serve import DEFAULTS
from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.parameters import IGNORED, REFUSED
from tiny_vllm.serving.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)

BODIES: tuple[tuple[str, type[Body]], ...] = (
    ("completions", CompletionBody),
    ("chat", ChatBody),
    ("embeddings", EmbeddingBody),
    ("tokenize", TokenizeBody),
    ("detokenize", DetokenizeBody),
)
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"


def options_table(config: ServerConfig | EngineConfig) -> str:
    """config: with the defaults of `tiny-vllm serve`."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in fields(config):
        flag = "--" + option.name.replace("_", "-")
        default = _default(getattr(config, option.name))
        rows.append(f"| `{flag}` | {default} | {option.metadata['help']} |")
    return "\n".join(rows)


def parameters_table() -> str:
    heads = ["parameter", *(body_name for body_name, _ in BODIES), "remark"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in parameter_names():
        marks = [_status(name, body.model_fields) for _, body in BODIES]
        rows.append(f"| {' | '.join([f'`{name}`', *marks, _remark(name)])} |")
    return "\n".join(rows)


def parameter_names() -> list[str]:
    """Every parameter that any endpoint knows, if only to refuse it."""
    fields_of_bodies = {name for _, body in BODIES for name in body.model_fields}
    return sorted({*fields_of_bodies, *REFUSED, *IGNORED})


def _remark(name: str) -> str:
    """Each text that says something about a parameter, once."""
    texts = [_description(body.model_fields.get(name)) for _, body in BODIES]
    texts.append("" if any(texts) else _sampling_helps().get(name, ""))
    if name in REFUSED:
        neutral = ", ".join(f"`{_json(value)}`" for value in REFUSED[name].neutral)
        texts.append(REFUSED[name].reason + (f"; {neutral} is accepted" if neutral else ""))
    texts.append(IGNORED.get(name, ""))
    return "; ".join(dict.fromkeys(filter(None, texts)))


def filled(text: str) -> str:
    """The guide with its tables made anew."""
    tables = {
        "options": options_table(ServerConfig()),
        "engine options": options_table(EngineConfig(**DEFAULTS)),
        "parameters": parameters_table(),
    }
    for name, table in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
        assert count == 1, f"the guide has no place for the table of {name}"
    return text


def _status(name: str, known: dict[str, Any]) -> str:
    if name in known:
        return "yes"
    return "ignored" if name in IGNORED else "refused"


def _description(field: Any) -> str:
    return "" if field is None or field.description is None else field.description


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, ()) else f"`{value}`"


def _json(value: object) -> str:
    return json.dumps(value)


if __name__ == "__main__":
    GUIDE.write_text(filled(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
