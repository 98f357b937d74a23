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


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """open_page(html, "tab=chain", color_scheme="dark") -> Playwright's page, when it is drawn."""
    contexts, complaints = [], []

    def opened(html: str, state: str = "", **options: Any) -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        context = chromium.new_context(**{"viewport": {"width": 1300, "height": 1000}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda asked: outside(asked.url) and complaints.append(asked.url))
        page.goto(f"{path.as_uri()}#{state}" if state else path.as_uri())
        drawn(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def outside(url: str) -> bool:
    return not url.startswith(("file://", "data:", "blob:"))
