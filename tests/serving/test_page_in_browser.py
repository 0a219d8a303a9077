"""The live page in a real headless Chromium: it loads, chats, and shows pages filling and freeing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.support import STUB_COMMAND, RunningServer, running_server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed (apt-get install chromium)", allow_module_level=True)

SLOW_COMMAND = ("env", "STUB_STEP_SECONDS=0.02", *STUB_COMMAND)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"max_num_seqs": 4, "num_pages": 300}
    with running_server(SLOW_COMMAND, engine) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, server: RunningServer) -> Iterator[Any]:
    page = browser.new_page(color_scheme=request.param, viewport={"width": 1280, "height": 1000})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda sent: None if sent.url.startswith(server.url) else problems.append(sent.url))
    page.goto(server.url)
    yield page
    page.close()
    # The browser itself reports a refused request; the page shows it.
    assert [p for p in problems if not p.startswith(("data:", "Failed to load resource"))] == []


def until(page: Any, expression: str) -> None:
    """Wait in Python: the page forbids the evaluation that Playwright's own waiting needs."""
    deadline = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(30)


def test_it_shows_the_engine(page: Any, server: RunningServer) -> None:
    page.wait_for_selector("#state.ready")
    assert page.text_content("#model") == server.service.model.name
    assert "4 slots" in page.text_content("#facts")
    assert "300 free of 300 pages" in page.text_content("#pool")


def test_it_chats_and_stops(page: Any, server: RunningServer) -> None:
    page.fill("#question", "Hello there, how are you?")
    page.click("#send")
    until(page, "document.querySelector('.message.assistant')?.textContent.length > 40")
    until(page, "document.querySelector('#speed').textContent.includes('tokens/s')")
    page.click("#stop")
    page.wait_for_selector("#send:enabled")
    assert page.text_content(".message.user") == "Hello there, how are you?"
    # What was stopped is stopped in the engine too.
    until(page, "document.querySelector('#running').textContent === '0'")


def test_an_error_is_shown(page: Any) -> None:
    page.evaluate("document.querySelector('#temperature').value = -1")
    page.fill("#question", "x")
    page.click("#send")
    page.wait_for_selector(".message.error")
    assert "temperature is -1" in page.text_content(".message.error")


COLOURED = """() => {
  const canvas = document.querySelector("#map"), context = canvas.getContext("2d");
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--used").trim();
  const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    if (data[i] === r && data[i + 1] === g && data[i + 2] === b) count++;
  return count;
}"""


def test_a_burst_fills_pages_and_frees_them(page: Any) -> None:
    page.wait_for_selector("#state.ready")
    page.fill("#burst_size", "8")
    page.fill("#burst_tokens", "60")
    page.click("#burst")
    until(page, "document.querySelector('#slots').textContent.startsWith('4 of 4')")
    until(page, f"({COLOURED})() > 0")
    assert page.locator("#sequences .bar").count() > 0
    until(page, "document.querySelector('#burst_state').textContent === '8 of 8 done'")
    until(page, f"({COLOURED})() === 0")
    assert "300 free of 300 pages" in page.text_content("#pool")
