"""The page of scenarios names tests that exist, and all that are named after a scenario."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "scenarios.md"
ROW = re.compile(r"^\| ([SR]\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    """Scenario to the tests its row names."""
    return {name: re.findall(r"`([^`]+)`", tests) for name, _, tests in ROW.findall(PAGE.read_text())}


def test_every_named_test_exists() -> None:
    named = [test for tests in rows().values() for test in tests]
    assert len(named) > 100
    for test in named:
        path, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", (TESTS / path).read_text(), re.MULTILINE), test


def test_every_test_of_a_scenario_is_in_its_row() -> None:
    listed = rows()
    for path in Path(__file__).parent.glob("test_*.py"):
        for function, scenario in re.findall(r"^def (test_([sr]\d+)_\w+)\(", path.read_text(), re.MULTILINE):
            assert f"scenarios/{path.name}::{function}" in listed[scenario.upper()]
