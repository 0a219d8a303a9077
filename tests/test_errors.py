"""How messages show what came from outside."""

from __future__ import annotations

import pytest

from tiny_vllm.errors import MAX_SHOWN_LEN, json_type, printable, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("\x1b[2Jname\n\x9b\x7f", r"\x1b[2Jname\n\x9b\x7f"),
        ("\u202egnp.exe \ud800", r"\u202egnp.exe \ud800"),
        ("Größe 中", "Größe 中"),
    ],
)
def test_control_characters_are_written_out(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert expected in shown(text).replace("\\\\", "\\")


@pytest.mark.parametrize("show", [shown, printable])
def test_what_is_cut_says_so(show: object) -> None:
    assert callable(show)
    whole, cut = show("x" * (MAX_SHOWN_LEN - 2)), show("x" * 10**6)
    assert not whole.endswith(" ...")
    assert cut.endswith("x ...") and len(cut) == MAX_SHOWN_LEN + 4


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "null"),
        (True, "boolean"),
        (5, "number"),
        (1.5, "number"),
        ("", "string"),
        ([], "list"),
        ({}, "object"),
        (b"", "bytes"),
    ],
)
def test_types_have_the_names_of_json(value: object, name: str) -> None:
    assert json_type(value) == name
