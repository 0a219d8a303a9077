"""`tiny-vllm info`: the machine, the model, the memory plan and every choice made. Loads no weights.

Exit code 1 with one error says that the model would be refused, and why; what is known of it is shown all the
same.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tiny_vllm.cli.machine import describe_machine
from tiny_vllm.cli.options import (
    add_common_options,
    add_engine_options,
    add_model_argument,
    engine_config,
    spelt_as_options,
)
from tiny_vllm.cli.output import print_error
from tiny_vllm.config import DTYPE_BYTES, GIB, Choice, EngineConfig, kv_bytes
from tiny_vllm.errors import ConfigError, ModelError, RequestError, written_out

if TYPE_CHECKING:
    from tiny_vllm.engine.build import EnginePlan
    from tiny_vllm.engine.memory_needs import MemoryNeeds
    from tiny_vllm.models.spec import ModelSpec
    from tiny_vllm.text.tokenizer import Tokenizer
    from tiny_vllm.weights.checkpoint import Checkpoint

EXIT_REFUSED = 1
Found = TypeVar("Found")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="show the machine, the model and what the engine would choose",
        usage="%(prog)s [options] [MODEL]",
        description="Show the machine, the model, the memory plan and every choice, without loading weights.",
        allow_abbrev=False,
    )
    add_model_argument(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from tiny_vllm.engine.build import plan_engine

    try:
        plan = plan_engine(config)
        sampling = plan.checkpoint.choose_sampling_defaults(config.generation_config)
        tokenizer = None if plan.checkpoint.tokenizer is None else plan.checkpoint.load_tokenizer()
    except (ConfigError, ModelError) as error:
        if args.debug:
            raise
        _show_refused(config)
        print_error(spelt_as_options(str(error), vars(args)))
        return EXIT_REFUSED
    _show_machine(plan.config.device)
    _section("model", [*_model_rows(plan.checkpoint), *_text_rows(plan.checkpoint, tokenizer)])
    _show_plan(plan, plan.config, [sampling])
    return 0


def _show_machine(device: str) -> None:
    machine = describe_machine(device)
    _section("machine", ((name, _shown(name, value)) for name, value in machine.items()))


def _show_plan(plan: EnginePlan, config: EngineConfig, more_choices: Sequence[Choice]) -> None:
    """config: the plan's, with what was asked for where that was another."""
    assert config.num_pages is not None
    spec = plan.checkpoint.spec
    per_page = _page_bytes(spec, config, config.dtype)
    _section(
        "memory",
        [
            *_memory_rows(spec, config, config.dtype),
            *((name, f"{size / GIB:.3f} GiB") for name, size in _other_needs(plan.needs) if size),
            (
                "available",
                "unknown" if plan.available is None else f"{plan.available.size}{plan.available.reason}",
            ),
            ("page pool", f"{config.num_pages} pages, {config.num_pages * per_page / GIB:.3f} GiB"),
            ("room for", f"{config.num_pages * config.page_size:,} tokens"),
        ],
    )
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for choice in (*plan.choices, *more_choices):
        reasons[choice.name].append(choice.reason)
    _section(
        "options",
        (
            (option.name, _with_reasons(getattr(config, option.name), reasons[option.name]))
            for option in fields(EngineConfig)
        ),
    )


def _show_refused(config: EngineConfig) -> None:
    """What is known of a model that cannot run as asked: of its files those that can be read count."""
    import torch

    from tiny_vllm.engine.build import plan_checkpoint
    from tiny_vllm.weights.checkpoint import open_checkpoint

    _show_machine("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    for readable, has_text in _readable_parts(config):
        checkpoint = _known(
            partial(
                open_checkpoint,
                readable.model,
                load_format=readable.load_format,
                tokenizer=readable.tokenizer,
                has_text=has_text,
            )
        )
        if checkpoint is None:
            continue
        sampling = _known(partial(checkpoint.choose_sampling_defaults, config.generation_config))
        text_rows: list[tuple[str, object]] = []
        if checkpoint.tokenizer is None and readable.tokenizer == config.tokenizer:
            text_rows = [*_text_rows(checkpoint, None)]
        elif (tokenizer := _known(checkpoint.load_tokenizer)) is not None:
            text_rows = [*_text_rows(checkpoint, tokenizer)]
        _section("model", [*_model_rows(checkpoint), *text_rows])
        plan = _known(partial(plan_checkpoint, readable, checkpoint))
        if plan is None:
            dtype = checkpoint.spec.dtype if config.dtype == "auto" else config.dtype
            _section("memory", _memory_rows(checkpoint.spec, config, dtype))
        else:
            asked = replace(plan.config, load_format=config.load_format, tokenizer=config.tokenizer)
            _show_plan(plan, asked, [] if sampling is None else [sampling])
        return


def _readable_parts(config: EngineConfig) -> Iterator[tuple[EngineConfig, bool]]:
    """The model, then its directory without the weights, then without the tokenizer that was asked for; of
    each the whole, then without what its files say about text."""
    parts = [config]
    if config.model is not None and os.path.isdir(os.path.expanduser(config.model)):
        parts += [replace(config, load_format="dummy"), replace(config, load_format="dummy", tokenizer=None)]
    for part in parts:
        yield part, True
        yield part, False


def _known(find: Callable[[], Found]) -> Found | None:
    """None for what cannot be used: that is, or follows from, what the one error says."""
    try:
        return find()
    except (ConfigError, ModelError):
        return None


def _section(title: str, rows: Iterable[tuple[str, object]]) -> None:
    print(title)
    for name, value in rows:
        print(f"  {name:31} {written_out(str(value))}")
    print()


def _model_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, object]]:
    yield "name", checkpoint.name
    yield "parameters", f"{checkpoint.spec.num_parameters:,}"
    yield from _spec_rows(checkpoint.spec)


def _memory_rows(spec: ModelSpec, config: EngineConfig, dtype: str) -> Iterator[tuple[str, object]]:
    yield "weights", f"{spec.num_parameters * DTYPE_BYTES[dtype] / GIB:.3f} GiB"
    per_page = _page_bytes(spec, config, dtype)
    yield "one page", f"{per_page / 1024:.0f} KiB for {config.page_size} tokens over all layers"


def _other_needs(needs: MemoryNeeds) -> Iterator[tuple[str, int]]:
    yield "weights held twice", needs.copies
    yield "a step", needs.step
    yield "tables", needs.tables
    yield "stays free", needs.spare


def _page_bytes(spec: ModelSpec, config: EngineConfig, dtype: str) -> int:
    return kv_bytes(
        spec.kv_values_per_token * config.page_size,
        spec.head_dim,
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype,
    )


def _spec_rows(spec: ModelSpec) -> Iterator[tuple[str, object]]:
    """The fields of a spec but those it has no value for; of its parts those that differ from the default."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value is None or value == ():
            continue
        if is_dataclass(value):
            parts = {part.name: getattr(value, part.name) for part in fields(value)}
            defaults = {part.name: part.default for part in fields(value)}
            value = ", ".join(f"{name} {parts[name]}" for name in parts if parts[name] != defaults[name])
        yield field.name, f"{value:g}" if isinstance(value, float) else value


def _text_rows(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> Iterator[tuple[str, object]]:
    if checkpoint.eos_remark is not None:
        yield "end of text", checkpoint.eos_remark
    if tokenizer is None:
        yield "tokenizer", "none: prompts are token ids"
        return
    size, known = tokenizer.vocab_size, checkpoint.spec.vocab_size
    more = f", more than the model's {known:,}: prompts with the others are refused" if size > known else ""
    yield "tokenizer", f"{size:,} ids{more}"
    template = "none: no conversations"
    if tokenizer.chat_template is not None:
        try:
            tokenizer.chat_template.render([{"role": "user", "content": "Hello"}])
            template = "yes"
        except RequestError as error:
            template = error.message
    yield "chat template", template


def _shown(name: str, value: object) -> object:
    return f"{value / GIB:.1f} GiB" if name.endswith("_bytes") and isinstance(value, int) else value


def _with_reasons(value: object, reasons: Sequence[str]) -> str:
    return f"{value}  ({'; '.join(reasons)})" if reasons else str(value)
