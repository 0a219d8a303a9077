"""`tiny-vllm bench plot`: step time, batch, queue and pages over time, as a picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_vllm.cli.bench_load import STEP_COLUMNS
from tiny_vllm.cli.options import add_common_options
from tiny_vllm.config import MAX_NUMBER
from tiny_vllm.errors import UNWRITABLE, ConfigError

PANELS = (
    ("seconds", "step, ms", 1e3),
    ("num_running", "running", 1.0),
    ("num_waiting", "waiting", 1.0),
    ("num_used_pages", "pages in use", 1.0),
)
"""Column, label, factor."""

HINT = "measure with --request-rate and --keep-steps"


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "plot",
        help="draw a report of bench throughput",
        usage="%(prog)s [options] REPORT PNG",
        description="Draw what `bench throughput --request-rate R --keep-steps --json REPORT` wrote, where "
        "matplotlib is installed: the machine that measured need not have it.",
        allow_abbrev=False,
    )
    parser.add_argument("report", metavar="REPORT", help="JSON with steps")
    parser.add_argument("picture", metavar="PNG", help="the file to write")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_plot(args.picture)
    try:
        rows = json.loads(Path(args.report).read_text(encoding="utf-8"))["rows"]
        series = [(title(row), row["steps"]) for row in rows if "steps" in row]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{args.report} is no report: {type(error).__name__}: {error}", hint=HINT
        ) from error
    if not series:
        raise ConfigError(f"{args.report} has no steps", hint=HINT)
    for _, steps in series:
        _check_steps(args.report, steps)
    draw(args.picture, series)
    return 0


def _check_steps(report: str, steps: object) -> None:
    """Raises ConfigError unless they are lists of numbers, equally long, by STEP_COLUMNS."""
    columns = steps if isinstance(steps, Mapping) else {}
    num_steps = None
    for name in STEP_COLUMNS:
        values = columns.get(name)
        if isinstance(values, list) and all(map(_is_number, values)):
            num_steps = len(values) if num_steps is None else num_steps
            if len(values) == num_steps:
                continue
        raise ConfigError(
            f"{report} is no report: the steps' {name} must be a list of numbers, as long as the others",
            hint=HINT,
        )


def _is_number(value: object) -> bool:
    # The comparison is written so that NaN fails it.
    return isinstance(value, int | float) and abs(value) <= MAX_NUMBER


def title(row: Mapping[str, Any]) -> str:
    """What a row of the report measured."""
    caching = "" if row["prefix_caching"] else ", no prefix caching"
    return f"{row['workload']}, {row['request_rate']} requests/s{caching}"


def check_plot(path: str) -> None:
    """Refuse what could not be drawn before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib is not installed, so nothing can be drawn",
            hint="pip install 'tiny-vllm[plot]', or --keep-steps with --json and `bench plot` elsewhere",
        )
    if not path.endswith(".png"):
        raise ConfigError(f"{path} does not end in .png", hint="pictures are PNG files")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: its directory does not exist", hint=UNWRITABLE)


def draw(path: str, series: Sequence[tuple[str, Mapping[str, Sequence[float]]]]) -> None:
    """Write the picture: a column of panels per run. series: headings, and steps by STEP_COLUMNS. Raises
    ConfigError where it cannot be written."""
    # Figure draws by itself: pyplot would look for a screen and keep state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(series), 9), layout="constrained")
    axes = figure.subplots(len(PANELS), len(series), sharex="col", squeeze=False)
    for place, (heading, steps) in enumerate(series):
        assert set(STEP_COLUMNS) <= set(steps)
        axes[0][place].set_title(heading)
        for row, (column, label, factor) in enumerate(PANELS):
            axis = axes[row][place]
            axis.plot(steps["end_s"], [value * factor for value in steps[column]], linewidth=0.8)
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[-1][place].set_xlabel("seconds")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}", hint="name another file for the picture"
        ) from error
