"""`tiny-vllm chat`: a conversation in the terminal. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli import session
from tiny_vllm.cli.options import (
    add_common_options,
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    check_sampling_options,
    engine_config,
    spelt_as_options,
)
from tiny_vllm.cli.records import stats_line
from tiny_vllm.errors import RequestError

if TYPE_CHECKING:
    from tiny_vllm.llm import LLM
    from tiny_vllm.types import SamplingParams

EXIT_REFUSED = 2

DEFAULTS = {"max_tokens": None, "temperature": 0.7}

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and forget the conversation; without TEXT remove it
/help          show this
/quit          leave, as Ctrl-D does
Ctrl-C stops the running answer; pressed again, it leaves."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with the model",
        usage="%(prog)s [options] [MODEL]",
        description="Talk with the model. /help lists what can be typed beside messages.",
        allow_abbrev=False,
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message to begin with")
    parser.add_argument("--stats", action="store_true", help="print tokens per second and more on stderr")
    add_sampling_options(parser, DEFAULTS, follows_model=True)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_sampling_options(args)
    if args.n != 1:
        raise RequestError(f"n is {args.n}, but a conversation has one answer", hint="use generate")
    engine_config(args)
    # Python leaves None where the file descriptor was closed before it started.
    if sys.stdin is None:
        raise RequestError("there is nothing to read messages from: stdin is closed", hint="use generate")
    with session.open_llm(args) as llm:
        session.check_takes_text(llm)
        params = session.sampling_for(llm, args)
        conversation = Conversation(
            llm, params, system=args.system, show_stats=args.stats, option_names=vars(args)
        )
        conversation.run()
    # A person has seen the refusal; a script sees only the exit code.
    return EXIT_REFUSED if conversation.num_refused and not sys.stdin.isatty() else 0


class Conversation:
    """The messages so far, and the loop that reads and answers.

    option_names: see `spelt_as_options`. num_refused: messages without an answer.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None,
        show_stats: bool,
        option_names: Iterable[str],
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.show_stats = show_stats
        self.option_names = option_names
        self.messages: list[dict[str, str]] = []
        self.num_refused = 0

    def run(self) -> None:
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            _enable_line_editing()
            _note("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                line = input("\n> " if is_interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                return
            except UnicodeDecodeError as error:
                raise RequestError(f"stdin is not text: {error}", hint="send UTF-8") from None
            if line.startswith("/"):
                if not self.obey(line):
                    return
            elif line:
                self.answer(line)

    def obey(self, line: str) -> bool:
        """Carry out a line that begins with a slash. False: leave."""
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self.messages.clear()
            _note("the conversation is forgotten")
        elif command == "/system":
            self.messages.clear()
            self.system = rest.strip() or None
            _note("the system message is " + ("set" if self.system else "removed"))
        elif command == "/help":
            _note(HELP)
        else:
            _note(f"unknown command {command}; /help lists the commands")
        return True

    def answer(self, line: str) -> None:
        """Stream an answer and remember it. What Ctrl-C cut short is remembered as far as it came."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self.messages, {"role": "user", "content": line}]
        start = time.monotonic()
        try:
            with (
                contextlib.closing(self.llm.stream([*system, *messages], self.params)) as stream,
                session.deferred_interrupt() as interrupt,
            ):
                output = session.print_stream(stream, should_stop=lambda: interrupt.requested)
        except RequestError as error:
            _note(f"error: {spelt_as_options(str(error), self.option_names)}")
            self.num_refused += 1
            return
        self.messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
        session.check_usable([output])
        if interrupt.requested:
            _note("stopped")
        if self.show_stats:
            _note(stats_line([output], time.monotonic() - start))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _enable_line_editing() -> None:
    """Arrow keys and history for input(), where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
