"""The page pool drawn as blocks: one per page, or one per group of pages when the pool is large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

STATES = ("shared", "used", "cached", "free")
"""What a page can be, most telling first: that is what a block that stands for several pages shows."""

LABELS = {
    "shared": "shared",
    "used": "in use",
    "cached": "cached",
    "free": "free",
}
BLOCKS = {"shared": "■", "used": "■", "cached": "■", "free": "■"}
LETTERS = {"shared": "#", "used": "o", "cached": "+", "free": "."}
COLOURS = {
    "shared": "magenta",
    "used": "green",
    "cached": "blue",
    "free": "bright_black",
}


def page_picture(pages: Sequence[str], *, width: int, max_rows: int = 8, colours: bool = True) -> Text:
    """Draw a pool.

    pages: the state of each page, one of STATES; null pages, which never hold anything, are left out.
    width: columns to fill. colours: coloured blocks; otherwise a letter for each state.
    Ends with a legend that counts the pages of each state.
    """
    from rich.text import Text

    pages = [state for state in pages if state != "null"]
    symbols = BLOCKS if colours else LETTERS
    per_row = max(width // 2, 1)
    pages_per_block = -(-len(pages) // (per_row * max_rows)) or 1
    picture = Text()
    for start in range(0, len(pages), per_row * pages_per_block):
        row = pages[start : start + per_row * pages_per_block]
        for first in range(0, len(row), pages_per_block):
            state = min(row[first : first + pages_per_block], key=STATES.index)
            picture.append(symbols[state] + " ", style=COLOURS[state] if colours else "")
        picture.append("\n")
    counts = Counter(pages)
    for state in STATES:
        if counts[state]:
            picture.append(symbols[state], style=COLOURS[state] if colours else "")
            picture.append(f" {LABELS[state]} {counts[state]}   ")
    if pages_per_block > 1:
        picture.append(f"\none block is {pages_per_block} pages and shows the busiest of them")
    return picture
