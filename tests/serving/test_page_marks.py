"""What the live page marks on its map, its own script run by Node: hits and preemptions, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from tiny_vllm.engine.page_pool import PagePool

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def marks(before: str, after: str, num_preemptions: int = 0) -> list[str | None]:
    """Of every page (the null page aside) once the map has gone from one to the other."""
    page = files("tiny_vllm.serving").joinpath("page.html").read_text(encoding="utf-8")
    (source,) = re.findall(r"^function takePages\(now\) \{\n.*?^\}\n", page, re.DOTALL | re.MULTILINE)
    # As the server sends them: runs of equal letters.
    first, second = (
        re.sub(r"(.)\1*", lambda run: run[1] + str(len(run[0])), text) for text in (before, after)
    )
    program = f"""
        let pages = "", marks = [], last = null;
        {source}
        for (const [letters, num_preemptions] of [["{first}", 0], ["{second}", {num_preemptions}]]) {{
          const now = {{ pages: letters, stats: {{ num_preemptions }} }};
          takePages(now);
          last = now;
        }}
        console.log(JSON.stringify(marks.map(mark => mark && mark.name)));
    """
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=20, check=True)
    found: list[str | None] = json.loads(done.stdout)
    return found


def test_a_page_found_by_its_content_is_a_hit_and_one_that_is_written_anew_is_none() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    for page in pages:
        pool.publish(page, bytes([page]))
    pool.release([1, 2])
    before = pool.states()[1:]
    pool.share(1)  # found
    pool.share(3)  # found while somebody holds it
    assert pool.allocate(1) == [2]  # nothing is free: what it held is given up
    assert marks(before, pool.states()[1:]) == ["hit", None, "hit"]


def test_what_a_preempted_sequence_held_is_marked() -> None:
    assert marks("uuhs", "fuch", num_preemptions=1) == ["lost", None, "lost", None]
    assert marks("uuhs", "fuch") == [None] * 4
