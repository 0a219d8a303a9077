"""argparse, with a hint in whatever it refuses."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Refuses, like its base class, with its usage and exit code 2; what it does not know at once, so that
    the usage is that of the command with the unknown option. Subcommands have parsers of this class too.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\nhint: {self._hint(message)}")

    def _hint(self, message: str) -> str:
        subject, _, fault = message.partition(": ")
        if subject == "unrecognized arguments" and fault.startswith("-"):
            given = fault.split()[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            return _did_you_mean(given, known) or "--help lists the options"
        for action in self._actions:
            if subject == f"argument {'/'.join(action.option_strings) or action.metavar or action.dest}":
                if action.help:
                    return action.help.replace("%%", "%")
                given = fault.split("'")[1] if "'" in fault else ""
                return _did_you_mean(given, list(action.choices or ())) or "--help lists them"
        return "--help tells what is taken"


def _did_you_mean(given: str, known: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(given[:64], known, n=1)
    return f"did you mean {close[0]}?" if close else None
