"""The two READMEs say the same: links, code and figures of one are those of the other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))


def links(readme: Path) -> set[str]:
    return set(re.findall(r"\]\(([^)#:]+)\)", readme.read_text(encoding="utf-8"))) - {
        ENGLISH.name,
        CHINESE.name,
    }


def code(readme: Path) -> list[str]:
    """Blocks of code without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [re.sub(r"  # .*", "", block) for block in blocks]


def figures(readme: Path) -> set[str]:
    """Numbers of at least three digits, whatever stands between thousands, and those with a decimal point."""
    text = readme.read_text(encoding="utf-8")
    return set(re.findall(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?![\w])|(?<![\w.,-])\d+\.\d+(?![\w.])", text))


def test_they_link_to_the_same_files_and_these_exist() -> None:
    assert links(CHINESE) == links(ENGLISH)
    assert len(links(ENGLISH)) > 5 and all((ROOT / link).exists() for link in links(ENGLISH))


def test_they_show_the_same_code() -> None:
    assert len(code(ENGLISH)) >= 5
    assert code(CHINESE) == code(ENGLISH)


def test_no_figure_is_in_the_chinese_one_alone() -> None:
    assert len(figures(CHINESE)) > 40
    assert figures(CHINESE) - figures(ENGLISH) == set()
