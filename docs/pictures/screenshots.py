"""Pictures of pages of `regard look`, for the documentation: look-attention.png, look-chain.png, ...

    regard look en-de-fr-zh "The old woman gave the children two red apples." --to de --out look.html
    python docs/pictures/screenshots.py look.html [--picture vit.html] [--compare compare.html] [--gpt gpt.html]
                                        [--bert bert.html] [--alignment rnnsearch.html] [--into docs/pictures]

Chromium draws them, without a window. What a page shows is told by what stands after "#" in its address.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

VIEWS = {  # name -> state, height, what to point at
    "attention": ("queries=4", 1000, "2,3"),
    "lines": ("show=lines", 880, ""),
    "heads": ("show=grid", 880, ""),
    "chain": ("tab=chain&queries=4", 1500, ""),
    "predictions": ("tab=predictions", 900, ""),
    "tree": ("tab=tree", 800, ""),
    "dark": ("theme=dark&head=mean", 1000, "5,5"),
}
OTHERS = {
    "picture": ("tab=picture&head=mean", 950, ""),
    "compare": ("tab=compare", 1500, ""),
    "gpt": ("show=lines", 1000, ""),
    "bert": ("tab=predictions", 900, ""),
    "alignment": ("", 1000, ""),
}


def shoot(browser: Any, page: Path, into: Path, name: str, state: str, height: int, cell: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": height})
    tab = context.new_page()
    tab.goto(f"{page.resolve().as_uri()}#{state}")
    tab.wait_for_selector("html[data-drawn]", state="attached")
    if cell:
        tab.hover(f'main [data-cell="{cell}"]', force=True)
    tab.wait_for_timeout(1000)  # small pictures are drawn when there is time
    bottom = tab.evaluate("document.getElementById('main').getBoundingClientRect().bottom")
    box = {"x": 0, "y": 0, "width": 1280, "height": min(height, bottom + 12)}
    tab.screenshot(path=into / f"look-{name}.png", clip=box)
    context.close()
    print(into / f"look-{name}.png")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", help="a page of a translation")
    for name in OTHERS:
        parser.add_argument(f"--{name}", type=Path, help=f"the page for look-{name}.png")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="where the pictures go")
    options = parser.parse_args()
    given = {name: (options.page, view) for name, view in VIEWS.items()}
    given |= {name: (getattr(options, name), view) for name, view in OTHERS.items()}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, (page, view) in given.items():
            if page is not None:
                shoot(browser, page, options.into, name, *view)


if __name__ == "__main__":
    main()
