from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_vllm.text.stop_strings import StopMatcher, StopStrings

SHORT = st.text(alphabet="abc", min_size=1, max_size=4)
STOPS = st.lists(SHORT, min_size=1, max_size=4)
PIECES = st.lists(st.text(alphabet="abcd", max_size=5), max_size=20)


def first_match(stops: list[str], text: str) -> tuple[int, str] | None:
    """By brute force: (end, stop) of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopStrings(stops), include=include)
    shown = [matcher.add(piece) for piece in pieces]
    if matcher.matched is None:
        shown.append(matcher.flush())
    return shown, matcher.matched


@given(stops=STOPS, pieces=PIECES, include=st.booleans())
def test_the_shown_text_ends_at_the_first_match(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, matched = run(stops, pieces, include=include)
    text = "".join(pieces)
    expected = first_match(stops, text)
    if expected is None:
        assert (matched, "".join(shown)) == (None, text)
    else:
        end, stop = expected
        assert matched == stop
        assert "".join(shown) == text[: end if include else end - len(stop)]


@given(stops=STOPS, pieces=PIECES)
def test_only_what_may_still_become_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.add(piece)
        if matcher.matched is not None:
            return
        held = len(seen) - len(shown)
        longest = max(
            length
            for stop in stops
            for length in range(len(stop) + 1)
            if length == 0 or (length <= len(seen) and seen.endswith(stop[:length]))
        )
        assert held == longest


@given(stops=STOPS, text=st.text(alphabet="abcd", max_size=30))
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str) -> None:
    whole, matched = run(stops, [text])
    assert run(stops, list(text))[1] == matched
    assert "".join(run(stops, list(text))[0]) == "".join(whole)


def test_a_stop_string_over_several_pieces_never_leaks() -> None:
    assert run(["</answer>"], ["yes", "</", "ans", "wer", "> and more"]) == (
        ["yes", "", "", "", ""],
        "</answer>",
    )


def test_text_that_turns_out_harmless_is_released() -> None:
    assert run(["###"], ["a", "#", "#", "b", "#"]) == (["a", "", "", "##b", "", "#"], None)


def test_the_longest_of_those_that_end_together_wins() -> None:
    assert run(["b", "ab", "zab"], ["xa", "b"]) == (["x", ""], "ab")


def test_the_first_to_end_wins_over_a_longer_one() -> None:
    assert run(["abc", "b"], ["xabc"]) == (["xa"], "b")


def test_include_adds_exactly_the_stop_string() -> None:
    assert run(["END"], ["aE", "NDb"], include=True) == (["a", "END"], "END")


def test_a_match_does_not_count_while_disarmed() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.add("xab", armed=False) == "x"
    assert matcher.matched is None
    assert matcher.add("y") == "aby"
    assert matcher.add("a", armed=False) == ""
    assert matcher.add("bz") == ""
    assert matcher.matched == "ab"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["."]))
    assert [matcher.add("a."), matcher.add("b"), matcher.flush()] == ["a", "", ""]


@pytest.mark.parametrize(("stop", "piece"), [("a" * 1000 + "b", "aaa"), ("ab" * 500, "aab")])
def test_repetitive_text_falls_back_at_most_once_per_character(stop: str, piece: str) -> None:
    class Counting(list[int]):
        count = 0

        def __getitem__(self, node: Any) -> Any:
            Counting.count += 1
            return super().__getitem__(node)

    stops = StopStrings([stop])
    stops.fallbacks = Counting(stops.fallbacks)
    matcher = StopMatcher(stops)
    for _ in range(5000):
        matcher.add(piece)
    assert 0 < Counting.count <= 5000 * len(piece)
