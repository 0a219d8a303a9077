"""How far this engine's FP32 logits are from those of transformers, for every case of every family.

python -m docs.family_differences    # measures, prints the table, writes reference/family-differences.json

The models are those of tests/weights/test_family_logits.py: tiny and random, on a CPU.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.tiny_families import CASES
from tests.weights.test_family_logits import logits_of_both
from tiny_vllm.cli.machine import describe_machine

RECORD = Path(__file__).parent / "reference" / "family-differences.json"


def measure(case: str) -> dict[str, float]:
    """largest_difference: over all logits of all positions. largest_logit: of transformers, by magnitude."""
    with tempfile.TemporaryDirectory() as directory:
        _, ours, theirs = logits_of_both(case, Path(directory))
    return {
        "largest_difference": (ours - theirs).abs().max().item(),
        "largest_logit": theirs.abs().max().item(),
    }


def rows(cases: dict[str, Any]) -> Iterator[str]:
    for case, numbers in cases.items():
        yield f"{case:26} {numbers['largest_difference']:.1e} of {numbers['largest_logit']:.1f}"


def main() -> None:
    record = {
        "processor": describe_machine("cpu")["name"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": {case: measure(case) for case in CASES},
    }
    print(*rows(record["cases"]), sep="\n")
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
