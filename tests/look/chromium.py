"""Pages in a real browser, as fixtures.

A test module says `pytest_plugins = "chromium"` and asks for `open_page`. One browser serves the whole session; whatever a
page logs as an error or asks of a network fails the test that opened it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import drawn

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def executable() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if executable() is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=ARGUMENTS)
        yield browser
        browser.close()


class Pages:
    """Pages of one browser that are opened again and again: a new page is a new process of the browser."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.idle: dict[str, list[Any]] = {}  # by the options of their contexts
        self.busy: list[tuple[str, Any]] = []
        self.complaints: list[str] = []

    def take(self, options: dict[str, Any]) -> Any:
        key = repr(options)
        page = self.idle[key].pop() if self.idle.get(key) else self.new(options)
        self.busy.append((key, page))
        page.bring_to_front()  # keys are for the page in front
        return page

    def new(self, options: dict[str, Any]) -> Any:
        page = self.browser.new_context(**options).new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda asked: outside(asked.url) and self.complaints.append(asked.url))
        return page

    def release(self) -> list[str]:
        """Leave all pages for the next test, and return what they complained about."""
        for key, page in self.busy:
            page.goto("about:blank")
            page.mouse.move(0, 0)
            self.idle.setdefault(key, []).append(page)
        found, self.complaints, self.busy = self.complaints, [], []
        return found


@pytest.fixture(scope="session")
def pages(chromium: Any) -> Pages:
    return Pages(chromium)


@pytest.fixture
def open_page(pages: Pages, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """open_page(html, "tab=chain", color_scheme="dark") -> Playwright's page, when it is drawn."""

    def opened(html: str, state: str = "", **options: Any) -> Any:
        path = tmp_path / f"page-{len(pages.busy)}.html"
        path.write_text(html, encoding="utf-8")
        page = pages.take({"viewport": {"width": 1300, "height": 1000}, **options})
        page.goto(f"{path.as_uri()}#{state}" if state else path.as_uri())
        drawn(page)
        return page

    yield opened
    assert pages.release() == []


def outside(url: str) -> bool:
    return not url.startswith(("file://", "data:", "blob:", "about:"))
