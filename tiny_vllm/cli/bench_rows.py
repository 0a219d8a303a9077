"""A report of many measurements: every one is printed and on disk as soon as it is known."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli.machine import ReadLimit, describe_machine, measure_read_limit
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import UNWRITABLE, ConfigError

if TYPE_CHECKING:
    from tiny_vllm.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON, anew after each line; - is stdout"
    )


def check_report_options(args: argparse.Namespace) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if args.json in (None, "-"):
        return
    path = Path(args.json)
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:  # nothing has been measured yet
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{args.json} cannot be written: {error.strerror}", hint=UNWRITABLE) from error


def release_memory() -> None:
    """Give back what torch keeps of the GPU's memory for later: the next measurement may size itself by what
    is free."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def positive_numbers(text: str) -> tuple[int, ...]:
    """A converter for argparse: "1,2,4"."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError(text)
    return values


positive_numbers.__name__ = "list of positive numbers"


class RowReport:
    """path: of the JSON, "-" for stdout (text then goes to stderr), or None. program: whose arguments are
    shown as the command.

    Measures the read limit at once, before a model takes the memory, so that all shares are of one figure.
    """

    def __init__(
        self,
        name: str,
        path: str | None,
        *,
        spec: ModelSpec,
        config: EngineConfig,
        options: Mapping[str, Any],
        program: str = "tiny-vllm",
    ) -> None:
        self._path = path
        self._out = sys.stderr if path == "-" else sys.stdout
        machine = describe_machine(config.device)
        self._head = {
            "benchmark": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([program, *sys.argv[1:]]),
            "machine": machine,
            "model": asdict(spec) | {"num_parameters": spec.num_parameters},
            "engine": asdict(config),
            "options": dict(options),
        }
        self._say(
            f"{name}: {machine['name']}, torch {machine['torch']}, {spec.num_parameters / 1e6:.0f}M "
            f"parameters in {config.dtype}"
        )
        self.limit: ReadLimit = measure_read_limit(config.device)
        release_memory()
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self._say(
            f"read limit: {self.limit.bytes_per_second / 1e9:.1f} GB/s ({self.limit.method})"
            + "".join(f"; {key}: {value / 1e9:.1f}" for key, value in self.limit.details.items())
        )
        self._write()

    def add(self, **row: Any) -> None:
        """Print one measurement, and write the report with it. Mappings are for the JSON alone."""
        self.rows.append(row)
        shown = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
        self._say("  ".join(_cell(key, value) for key, value in shown.items()))
        self._write()

    def add_traffic(self, seconds: float, num_bytes: float, /, **row: Any) -> None:
        """The same for a measurement that reads memory: with its rate, and the share of the read limit."""
        rate = num_bytes / seconds
        self.add(**row, gb_per_s=rate / 1e9, share=rate / self.limit.bytes_per_second)

    def skip(self, reason: str, /, **row: Any) -> None:
        """Note why a measurement was not made."""
        self.add(**row, skipped=reason)

    def attempt(self, measure: Callable[[], None], /, **row: Any) -> None:
        """Run one measurement. If it fails, say so and go on: the others are worth having."""
        try:
            measure()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.failures.append({**{key: str(value) for key, value in row.items()}, "error": text})
            self._say("  ".join(_cell(key, value) for key, value in row.items()) + f"  FAILED: {text}")
            logger.debug("the measurement failed", exc_info=True)
            self._write()
        finally:
            release_memory()

    def finish(self) -> int:
        """Write JSON to stdout if it goes there. Returns the exit code: 1 if anything failed, or all was
        skipped."""
        if self._path == "-":
            print(json.dumps(self._content(), indent=1))
        measured = [row for row in self.rows if "skipped" not in row]
        return 1 if self.failures or (self.rows and not measured) else 0

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _content(self) -> dict[str, Any]:
        return {
            **self._head,
            "read_limit": asdict(self.limit),
            "rows": self.rows,
            "failures": self.failures,
        }

    def _write(self) -> None:
        if self._path in (None, "-"):
            return
        assert self._path is not None
        try:
            Path(self._path).write_text(json.dumps(self._content(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}", hint=UNWRITABLE) from error


def _cell(key: str, value: Any) -> str:
    if key == "share":
        return f"share {value:.1%}"
    name = key.replace("_", " ")
    return f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
