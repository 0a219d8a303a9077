"""What a trace of torch's profiler says of the GPU's idle time, and a picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
PARTS = {"plan and commit": "#b8c4d6", "submit": "#4878a8", "wait": "#e8e0d0"}
"""Host's parts of a step -> colour in the picture."""
KINDS = {"kernel": "#2a7d4f", "copy": "#d08030"}


@dataclass(frozen=True, slots=True)
class Span:
    """Microseconds. name: a part of a step, or the kind of what the GPU does. launch: what was launched
    together, such as the kernels of a CUDA graph, has one number; 0 on the host."""

    name: str
    start: float
    end: float
    launch: int = 0


def parse_trace(trace: Mapping[str, Any]) -> tuple[list[Span], list[Span]]:
    """A trace in Chrome's format -> the host's spans named in PARTS or "step", and the GPU's, by start."""
    host, gpu = [], []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        category, name = event.get("cat"), event["name"]
        if category in GPU_CATEGORIES:
            kind = "kernel" if category == "kernel" else "copy"
            gpu.append(Span(kind, start, end, int(event["args"].get("correlation", 0))))
        elif category == "user_annotation" and (name in PARTS or name == "step"):
            host.append(Span(name, start, end))
    return sorted(host, key=lambda span: span.start), sorted(gpu, key=lambda span: span.start)


def idle_figures(gpu: Sequence[Span]) -> dict[str, float]:
    """Shares of the time from the first start to the last end in which the GPU did nothing.

    idle_share: in all. idle_between_share: between what was launched apart, so without the gaps between the
    kernels of one CUDA graph. gpu: by start.
    """
    idle = between = 0.0
    latest = gpu[0]
    for span in gpu[1:]:
        gap = span.start - latest.end
        if gap > 0:
            idle += gap
            between += gap if span.launch != latest.launch or not span.launch else 0.0
        if span.end > latest.end:
            latest = span
    window = latest.end - gpu[0].start
    return {
        "traced_us": window,
        "idle_share": idle / window,
        "idle_between_share": between / window,
        "num_launches": len({span.launch for span in gpu}),
        "num_gpu_activities": len(gpu),
    }


def excerpt(host: Sequence[Span], gpu: Sequence[Span], num_steps: int) -> dict[str, list[list[Any]]]:
    """The middle num_steps of the traced steps as plain lists [name, start, end], in us from its start.
    Empty if nothing was traced."""
    steps = [span for span in host if span.name == "step"]
    first = max((len(steps) - num_steps) // 2, 0)
    chosen = steps[first : first + num_steps]
    if not chosen:
        return {"host": [], "gpu": []}
    start, end = chosen[0].start, chosen[-1].end

    def cut(spans: Sequence[Span]) -> list[list[Any]]:
        inside = [span for span in spans if span.end > start and span.start < end and span.name != "step"]
        return [
            [span.name, round(max(span.start, start) - start, 2), round(min(span.end, end) - start, 2)]
            for span in inside
        ]

    return {"host": cut(host), "gpu": cut(gpu)}


def own_time(spans: Sequence[Span], name: str, parts: Sequence[str]) -> list[float]:
    """Of every span of that name: how long it was in none of the parts within it."""
    inner = [span for span in spans if span.name in parts]
    return [
        outer.end
        - outer.start
        - sum(part.end - part.start for part in inner if outer.start <= part.start and part.end <= outer.end)
        for outer in spans
        if outer.name == name
    ]


def host_figures(spans: Sequence[Span]) -> dict[str, float]:
    """Medians over the steps: a step from start to start, what the host did in it, and how long it waited."""
    starts = [span.start for span in spans if span.name == "step"]
    waits = [span.end - span.start for span in spans if span.name == "wait"]
    return {
        "us_per_step": (starts[-1] - starts[0]) / (len(starts) - 1),
        "host_us": statistics.median(own_time(spans, "step", ["wait"])),
        "submit_us": statistics.median(s.end - s.start for s in spans if s.name == "submit"),
        "wait_us": statistics.median(waits) if waits else 0.0,
    }


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A panel per row: what the host did and what the GPU did, over the same few steps."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.7 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axis, row in zip(axes, rows, strict=True):
        trace = row["trace"]
        for place, (lane, colours) in enumerate((("gpu", KINDS), ("host", PARTS))):
            for name, colour in colours.items():
                bars = [(start, end - start) for kind, start, end in trace[lane] if kind == name]
                axis.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour)
        axis.set_yticks([0, 1], ["GPU", "host"])
        axis.set_ylim(-0.6, 1.6)
        axis.set_xlim(left=0)
        axis.set_xlabel("us")
        axis.set_title(
            f"batch {row['batch_size']}: {row['us_per_step']:.0f} us a step, host {row['host_us']:.0f} us, "
            f"GPU idle between launches {row['idle_between_share']:.1%}",
            fontsize=10,
        )
    patches = [Patch(color=colour, label=name) for name, colour in {**PARTS, **KINDS}.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9)
    figure.savefig(path, format="png", dpi=110)
