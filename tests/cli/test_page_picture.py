from __future__ import annotations

from tiny_vllm.cli.page_picture import page_picture

POOL = ["null", "shared", "used", "used", "cached", "free", "free", "free"]


def test_each_page_is_one_letter_in_order_without_colours() -> None:
    lines = page_picture(POOL, width=8, colours=False).plain.splitlines()
    assert [line.replace(" ", "") for line in lines[:2]] == ["#oo+", "..."]


def test_the_legend_counts_every_state() -> None:
    legend = page_picture(POOL, width=80, colours=False).plain.splitlines()[-1]
    assert [part for part in legend.split("   ") if part] == [
        "# shared 1",
        "o in use 2",
        "+ cached 1",
        ". free 3",
    ]
    assert len(legend.rstrip()) <= 80


def test_colours_tell_the_states_apart() -> None:
    picture = page_picture(["used", "free"], width=80)
    assert picture.plain.startswith("■ ■")
    assert len({span.style for span in picture.spans}) == 2


def test_a_large_pool_shows_the_busiest_page_of_each_block() -> None:
    pages = ["free"] * 1000
    pages[999] = "used"
    lines = page_picture(pages, width=20, max_rows=5, colours=False).plain.splitlines()
    rows, note = lines[:-2], lines[-1]
    assert [line.replace(" ", "") for line in rows] == ["." * 10] * 4 + ["." * 9 + "o"]
    assert note == "one block is 20 pages and shows the busiest of them"


def test_an_empty_pool_draws_nothing() -> None:
    assert page_picture([], width=80).plain == ""
