"""`tiny-vllm demo`: one answer streamed, then several at once sharing a prefix, and the page pool drawn."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli import session
from tiny_vllm.cli.options import (
    add_common_options,
    add_engine_options,
    add_sampling_options,
    engine_config,
    sampling_params,
)
from tiny_vllm.cli.records import stats_line
from tiny_vllm.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from tiny_vllm.llm import LLM
    from tiny_vllm.outputs import RequestOutput
    from tiny_vllm.types import SamplingParams

ENGINE_DEFAULTS = {"num_pages": 128, "max_num_seqs": 8}
"""A pool small enough to draw page by page."""

SAMPLING_DEFAULTS = {"max_tokens": 64, "temperature": 0.0}

SYSTEM = (
    "You are a friendly guide to the natural sciences. You answer questions from curious people of any age. "
    "Use plain words and short sentences. Explain one idea at a time, give an everyday example where it "
    "helps, and never make a fact up. If a question has no known answer, say so. Keep every answer to a few "
    "sentences."
)
QUESTIONS = (
    "Why is the sky blue?",
    "Why do leaves fall in autumn?",
    "What makes a rainbow?",
    "How do birds find their way?",
    "Why is the sea salty?",
    "What is a shooting star?",
)

MAX_WIDTH = 80


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="see the engine at work",
        usage="%(prog)s [options]",
        description="Answer one question, then several at once that share a prefix, and draw the page pool.",
        allow_abbrev=False,
    )
    add_sampling_options(parser, SAMPLING_DEFAULTS)
    add_engine_options(parser, ENGINE_DEFAULTS)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if params.n != 1:
        raise RequestError(
            f"n is {params.n}, but the demo shows one answer per question", hint="use generate"
        )
    engine_config(args)
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    start = time.monotonic()
    with session.open_llm(args) as llm:
        session.check_takes_text(llm)
        check_requests(llm, params)
        _heading(console, "The engine")
        console.print(
            f"{llm.spec.num_parameters / 1e6:.0f}M parameters in {llm.config.dtype} on {llm.config.device}, "
            f"ready after {time.monotonic() - start:.1f} s; "
            f"{llm.config.num_pages} pages of {llm.config.page_size} tokens for keys and values"
        )
        show_one_answer(console, llm, params)
        show_answers_together(console, llm, params)
    return 0


def check_requests(llm: LLM, params: SamplingParams) -> None:
    """Raises RequestError if this model cannot take every question: half a demo helps nobody."""
    with ExitStack() as streams:
        for messages, shorter in all_requests(params):
            try:
                streams.enter_context(closing(llm.stream(messages, shorter)))
            except RequestError as error:
                raise RequestError(
                    f"the demo's questions do not suit this model: {error.message}", hint=error.hint
                ) from error


def all_requests(params: SamplingParams) -> list[tuple[list[dict[str, str]], SamplingParams]]:
    return [
        (conversation(question), shortened(params, quarters=index % 3))
        for index, question in enumerate(QUESTIONS)
    ]


def show_one_answer(console: Console, llm: LLM, params: SamplingParams) -> None:
    _heading(console, "One answer, streamed")
    console.print(f"> {QUESTIONS[0]}", style="bold")
    start = time.monotonic()
    stream = llm.stream(conversation(QUESTIONS[0]), params)
    output = session.print_stream(stream, arrange=WordWrap(console.width))
    console.print(stats_line([output], time.monotonic() - start), style="cyan")


def show_answers_together(console: Console, llm: LLM, params: SamplingParams) -> None:
    _heading(console, f"{len(QUESTIONS)} answers at once, sharing a prefix")
    has_drawn = False

    def draw_midway(outputs: Sequence[RequestOutput | None]) -> None:
        nonlocal has_drawn
        done = [output for output in outputs if output is not None and output.finished]
        if done and len(done) < len(outputs) and not has_drawn:
            has_drawn = True
            console.print("The page pool while they run:")
            draw_pool(console, llm)

    start = time.monotonic()
    outputs = stream_together(llm, all_requests(params), draw_midway)
    seconds = time.monotonic() - start
    for question, output in zip(QUESTIONS, outputs, strict=True):
        console.print(f"\n> {question}", style="bold")
        console.print(" ".join(output.outputs[0].text.split()), markup=False)
    console.print()
    console.print(stats_line(outputs, seconds), style="cyan")
    stats = llm.stats()
    console.print(
        f"prefix cache: {stats.prefix_hit_tokens} of {stats.prefix_query_tokens} prompt tokens found",
        style="cyan",
    )
    console.print("\nThe page pool afterwards:")
    draw_pool(console, llm)


def shortened(params: SamplingParams, *, quarters: int) -> SamplingParams:
    """Take quarters off max_tokens: uneven answers leave cached pages behind while others still run."""
    if not params.max_tokens:
        return params
    limit = max(params.max_tokens * (4 - quarters) // 4, params.min_tokens, 1)
    return replace(params, max_tokens=limit)


def stream_together(
    llm: LLM,
    requests: Sequence[tuple[list[dict[str, str]], SamplingParams]],
    watch: Callable[[Sequence[RequestOutput | None]], None],
) -> list[RequestOutput]:
    """Run several streams side by side; `watch` sees the output of each after every round."""
    streams = dict(enumerate(llm.stream(messages, params) for messages, params in requests))
    outputs: list[RequestOutput | None] = [None] * len(requests)
    while streams:
        for index, stream in list(streams.items()):
            update = next(stream, None)
            if update is None:
                del streams[index]
            else:
                outputs[index] = update.output
        watch(outputs)
    return [output for output in outputs if output is not None]


class WordWrap:
    """Breaks a growing text between words: a piece that would cross the right edge begins a new line.

    A word that comes in several pieces may still be cut: holding it back until it is complete would hide the
    streaming.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.column = 0

    def __call__(self, piece: str) -> str:
        lines: list[str] = []
        for line in piece.split("\n"):
            if lines:
                self.column = 0
            if self.column + len(line) > self.width and line.startswith(" "):
                line = "\n" + line[1:]
                self.column = -1
            self.column += len(line)
            lines.append(line)
        return "\n".join(lines)


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def draw_pool(console: Console, llm: LLM) -> None:
    from tiny_vllm.cli.page_picture import page_picture

    colours = console.is_terminal and not console.no_color
    console.print(page_picture(llm.page_map(), width=64, colours=colours))


def _heading(console: Console, title: str) -> None:
    console.print()
    console.rule(title, align="left", style="bright_black", characters="─" if console.is_terminal else "-")
