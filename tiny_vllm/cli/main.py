"""The `tiny-vllm` command: reads the arguments, calls one command, and turns errors into exit codes.

Exit codes: 0 done; 1 a fault of the program, no memory, or stdout cannot be written; 2 a wrong argument,
option or request; 130 Ctrl-C; 141 nobody reads the output any more. Data goes to stdout, everything else to
stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from tiny_vllm.cli import bench, chat, demo, generate, info, serve
from tiny_vllm.cli.options import spelt_as_options
from tiny_vllm.cli.output import OutputError, guarded_stdout, print_error
from tiny_vllm.cli.parser import Parser
from tiny_vllm.engine.available_memory import is_out_of_memory
from tiny_vllm.errors import TinyVLLMError

COMMANDS = (generate, chat, serve, demo, bench, info)

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _ShowVersion(argparse.Action):
    """Reads the version only when it is asked for: that import is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tiny-vllm {version('tiny-vllm')}")
        except PackageNotFoundError:
            print("tiny-vllm (not installed, run from its source)")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The complete command line. Every leaf parser sets `run`, the function to call with the arguments."""
    parser = Parser(prog="tiny-vllm", description="Run a language model on this machine.", allow_abbrev=False)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(levelname).1s %(name)s: %(message)s", stream=sys.stderr)
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    logging.getLogger("tiny_vllm").setLevel(levels[min(args.verbose, 2)])
    try:
        with guarded_stdout():
            code: int = args.run(args)
        return code
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except OutputError as error:
        _discard_output()
        if args.debug:
            raise
        print_error(str(error))
        return EXIT_FAULT
    except TinyVLLMError as error:
        if args.debug:
            raise
        print_error(spelt_as_options(str(error), vars(args)))
        return EXIT_USAGE
    except Exception as error:
        if args.debug:
            raise
        if is_out_of_memory(error):
            print_error(
                f"memory ran out: {str(error) or type(error).__name__}\n"
                "hint: free memory, or raise what limits it: ulimit -v, the container's limit"
            )
            return EXIT_FAULT
        print_error(
            f"unexpected {type(error).__name__}: {error}\n"
            "hint: this is a fault of tiny-vllm; --debug shows where it happened"
        )
        return EXIT_FAULT


def _discard_output() -> None:
    """Python flushes stdout once more on exit; give it a place where that cannot fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
