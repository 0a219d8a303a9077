"""`tiny-vllm generate`: continue prompts. The text alone goes to stdout."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tiny_vllm.cli import session
from tiny_vllm.cli.options import (
    add_common_options,
    add_engine_options,
    add_sampling_options,
    check_sampling_options,
    engine_config,
)
from tiny_vllm.cli.records import output_record, stats_line
from tiny_vllm.errors import RequestError

DEFAULTS = {"max_tokens": 128}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue one or more prompts",
        usage="%(prog)s [options] [PROMPT ...]",
        description="Continue prompts. The text alone goes to stdout, streamed if there is one prompt.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads stdin")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, with every field"
    )
    parser.add_argument("--stats", action="store_true", help="print tokens per second and more on stderr")
    add_sampling_options(parser, DEFAULTS, follows_model=True)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_sampling_options(args)
    engine_config(args)
    prompts = read_prompts(args.prompts)
    with session.open_llm(args) as llm:
        session.check_takes_text(llm)
        params = session.sampling_for(llm, args)
        start = time.monotonic()
        if len(prompts) == 1 and params.n == 1 and not args.json:
            outputs = [session.print_stream(llm.stream(prompts[0], params))]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr is not None and sys.stderr.isatty())
            for output in outputs:
                if args.json:
                    print(json.dumps(output_record(output), ensure_ascii=False))
                else:
                    print(*(choice.text for choice in output.outputs), sep="\n")
        if args.stats:
            print(stats_line(outputs, time.monotonic() - start), file=sys.stderr)
        session.check_usable(outputs)
    return 0


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of a command line: as given, with stdin for "-" and for no prompt at all.

    One line end at the end of stdin is the shell's, not the prompt's, and is dropped.
    """
    # Python leaves None where the file descriptor was closed before it started.
    if not arguments and (sys.stdin is None or sys.stdin.isatty()):
        raise RequestError("there is no prompt", hint="tiny-vllm generate 'Once upon a time'")
    if arguments.count("-") > 1:
        raise RequestError("- is given more than once, but stdin can be read only once", hint="leave one out")
    return [_read_stdin() if argument == "-" else argument for argument in arguments or ["-"]]


def _read_stdin() -> str:
    if sys.stdin is None:
        raise RequestError("- stands for stdin, but stdin is closed", hint="give the prompt as an argument")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not text: {error}", hint="send UTF-8") from None
