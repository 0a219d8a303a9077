"""Command-line options made from the fields of EngineConfig and SamplingParams, and back.

A field `max_model_len` is the option `--max-model-len`; a boolean is `--x` and `--no-x`. The two classes
check the limits themselves, so that a wrong value gets the same message here and from Python.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from tiny_vllm.config import OPTION_KINDS, EngineConfig
from tiny_vllm.errors import ConfigError
from tiny_vllm.types import SAMPLING_FIELDS, SamplingParams
from tiny_vllm.weights.generation_config import RECOMMENDED

# `--seed` is the engine's: it already decides the tokens of every request that brings no seed.
SHARED_FIELDS = frozenset(option.name for option in fields(EngineConfig)) & frozenset(SAMPLING_FIELDS)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command."""
    group = parser.add_argument_group("output")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    group.add_argument(
        "-v", "--verbose", action="count", default=0, help="log what happens on stderr; -vv logs more"
    )


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The model as an argument of its own, for commands that take no other."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def add_engine_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None) -> None:
    """One option per field of EngineConfig. defaults: a command's own, by field name."""
    add_config_options(parser.add_argument_group("engine options"), EngineConfig, defaults)


def add_config_options(
    group: argparse._ArgumentGroup, config_class: type, defaults: Mapping[str, Any] | None = None
) -> None:
    """One option per field of a configuration; tuples are options that may be given several times."""
    for option in fields(config_class):
        if option.type == "tuple[str, ...]":
            group.add_argument(
                _flag(option.name),
                action="append",
                default=[],
                metavar="TEXT",
                help=_escaped(option.metadata["help"]),
            )
            continue
        kind = OPTION_KINDS[str(option.type)]
        default = (defaults or {}).get(option.name, option.default)
        text = f"{option.metadata['help']} ({_limits(option)}default: {_shown(default)})"
        if kind.type is bool:
            _add_switch(group, option.name, default, text)
            continue
        group.add_argument(
            _flag(option.name),
            default=default,
            type=_optional(kind.type) if kind.optional else kind.type,
            choices=kind.choices or None,
            metavar=None if kind.choices else _metavar(kind.type),
            help=_escaped(text),
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The validated engine options of a command line. Raises ConfigError."""
    options = {option.name: getattr(args, option.name) for option in fields(EngineConfig)}
    model = getattr(args, "positional_model", None)
    if model is not None:
        if options["model"] is not None:
            raise ConfigError("the model is given twice", hint="leave out --model")
        options["model"] = model
    return EngineConfig.from_options(options)


@dataclass(frozen=True, slots=True)
class ModelsElse:
    """Stands for an option that is not given and that the model's generation_config.json may decide.

    otherwise: its value where the file does not.
    """

    otherwise: Any


def add_sampling_options(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any] | None = None,
    *,
    follows_model: bool = False,
) -> None:
    """One option per field of SamplingParams. defaults: a command's own, by field name. follows_model: what
    the model recommends comes before them."""
    group = parser.add_argument_group("sampling options")
    helps = _sampling_helps()
    for option in fields(SamplingParams):
        if option.name in SHARED_FIELDS:
            continue
        default = (defaults or {}).get(option.name, option.default)
        if follows_model and option.name in RECOMMENDED.values():
            default = ModelsElse(default)
        text = f"{helps.get(option.name, '')} (default: {_shown(default)})".strip()
        if option.type == "bool":
            _add_switch(group, option.name, default, text)
        else:
            group.add_argument(
                _flag(option.name),
                default=default,
                help=_escaped(text),
                **SAMPLING_ARGUMENTS[str(option.type)],
            )


def sampling_params(args: argparse.Namespace, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
    """The validated sampling options of a command line. Raises RequestError.

    recommended: the model's values for those that are not given, by field name.
    """
    values = {name: getattr(args, name) for name in SAMPLING_FIELDS if name not in SHARED_FIELDS}
    for name, value in values.items():
        if isinstance(value, ModelsElse):
            values[name] = (recommended or {}).get(name, value.otherwise)
    if values["logit_bias"] is not None:
        values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams(**values)


def check_sampling_options(args: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, what would be wrong with every model. Raises RequestError."""
    # No limit, as if the model lifted it: a min_tokens above the command's own may be within the model's.
    sampling_params(args, {"max_tokens": None})


def spelt_as_options(text: str, names: Iterable[str]) -> str:
    """An error's text with option names as they are typed: `max_n` as `--max-n`, `x=False` as `--no-x`.

    A name of one word may be a word: it counts before "=", and where a message begins with what is wrong.
    """
    known = "|".join(re.escape(name) for name in names)
    if not known:
        return text

    def typed(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        is_subject = found.start() == 0 and re.match(r" (?:is|has|contains) ", text[found.end() :])
        if "_" not in name and value is None and not is_subject:
            return found[0]
        if value == "False":
            return _flag(f"no_{name}")
        return _flag(name) + (f" {value.strip(chr(39))}" if value and value != "True" else "")

    return re.sub(rf"(?<![\w'/-])(?P<name>{known})(?:=(?P<value>'[^']*'|\w*))?(?![\w'/])", typed, text)


def _add_switch(group: argparse._ArgumentGroup, name: str, default: bool, text: str) -> None:
    group.add_argument(
        _flag(name), action=argparse.BooleanOptionalAction, default=default, help=_escaped(text)
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[kind]


def _shown(default: object) -> str:
    if isinstance(default, ModelsElse):
        return f"the model's, else {_shown(default.otherwise)}"
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def _limits(option: Field[Any]) -> str:
    low, high = option.metadata["low"], option.metadata["high"]
    if low is None and high is None:
        return ""
    return f"at least {low}; " if high is None else f"{low} to {high}; "


def _optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter that also takes the word none."""

    def convert(text: str) -> Any:
        return None if text == "none" else kind(text)

    # argparse names the converter in its message about a value it cannot read.
    convert.__name__ = kind.__name__
    return convert


def _token_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    return int(token_id), float(value)


_token_ids.__name__ = "list of token ids"
_bias.__name__ = "ID=VALUE"

SAMPLING_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "int | None": {"type": _optional(int), "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str | Sequence[str] | None": {"action": "append", "metavar": "TEXT"},
    "Sequence[str] | None": {"action": "append", "metavar": "TEXT"},
    "Sequence[int] | None": {"type": _token_ids, "metavar": "ID,ID,..."},
    "Mapping[int, float] | None": {"action": "append", "type": _bias, "metavar": "ID=VALUE"},
}
"""How argparse reads each annotation of SamplingParams. Lists of texts are options given several times."""


def _sampling_helps() -> dict[str, str]:
    """Field -> its sentence in the docstring of SamplingParams, so that there is one text to keep true."""
    docstring = re.sub(r"\s+", " ", SamplingParams.__doc__ or "")
    name = "|".join(SAMPLING_FIELDS)
    parts = re.split(rf"(?:^|(?<=\. ))((?:{name})(?:, (?:{name}))*): ", docstring)
    helps: dict[str, str] = {}
    for names, text in zip(parts[1::2], parts[2::2], strict=True):
        helps.update(dict.fromkeys(names.split(", "), text.strip().removesuffix(".")))
    return helps
