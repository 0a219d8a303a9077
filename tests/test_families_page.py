"""The page about model families says what the tables say."""

from __future__ import annotations

from docs.families_page import PAGE, cases_of, differences, render
from tests.helpers.tiny_families import CASES
from tiny_vllm.models.families import FAMILIES


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m docs.families_page"


def test_every_family_has_cases_and_every_case_a_family() -> None:
    cases = [case for family in FAMILIES for case in cases_of(family)]
    assert sorted(cases) == sorted(CASES)
    assert all(cases_of(family) for family in FAMILIES)


def test_every_family_but_the_first_differs_from_it_in_words() -> None:
    words = {family.name: tuple(differences(family)) for family in FAMILIES}
    assert len(set(words.values())) > 10
    assert words["gemma3"] != words["gemma2"]
