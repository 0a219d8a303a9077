"""Files that code and documents name are there: a source that is gone proves nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "tests", "tiny_vllm")
NAMED = re.compile(rf"(?<![\w/.…-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w\.(?:py|cu|h|json|md|png)\b")


def texts() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    yield ROOT / "Makefile"
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cu", ".h", ".md"} and "node_modules" not in path.parts:
                yield path


def test_named_files_exist() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts()
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert missing == set()


def test_a_word_that_chooses_tests_chooses_some() -> None:
    chosen = re.compile(r"pytest (tests/[\w/]+\.py) -k (\w+)")
    found = chosen.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert found
    for name, word in found:
        assert re.search(rf"def test_\w*{word}", (ROOT / name).read_text(encoding="utf-8")), (name, word)
