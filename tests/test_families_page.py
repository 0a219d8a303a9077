"""The page about model families says what the tables say."""

from __future__ import annotations

import pytest

from docs.families_page import MEASURED, PAGE, cases_of, differences, render
from docs.family_differences import measure
from tests.helpers.tiny_families import CASES
from tests.weights.test_family_logits import TOLERANCE
from tiny_vllm.models.families import FAMILIES


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m docs.families_page"


def test_every_family_has_cases_and_every_case_a_family() -> None:
    cases = [case for family in FAMILIES for case in cases_of(family)]
    assert sorted(cases) == sorted(CASES)
    assert all(cases_of(family) for family in FAMILIES)


def test_every_case_was_measured_and_lies_within_the_tolerance() -> None:
    assert MEASURED["cases"].keys() == CASES.keys()
    for numbers in MEASURED["cases"].values():
        assert 0 < numbers["largest_difference"] < TOLERANCE < numbers["largest_logit"]


def test_the_measure_is_the_one_on_record() -> None:
    """But for what another processor's order of summing changes."""
    numbers, recorded = measure("gemma2"), MEASURED["cases"]["gemma2"]
    assert numbers["largest_logit"] == pytest.approx(recorded["largest_logit"], abs=TOLERANCE)
    assert 0 < numbers["largest_difference"] < TOLERANCE


def test_every_family_but_the_first_differs_from_it_in_words() -> None:
    words = {family.name: tuple(differences(family)) for family in FAMILIES}
    assert len(set(words.values())) > 10
    assert words["gemma3"] != words["gemma2"]
