"""Make the pictures of `regard look` for the documentation: look-attention.png, look-chain.png, ...

    python docs/pictures/screenshots.py                   # all pictures that need only the bundled model
    python docs/pictures/screenshots.py chain tree        # some of them
    python docs/pictures/screenshots.py gpt=gpt.html bert=bert.html picture=vit.html alignment=rnnsearch.html
    python docs/pictures/screenshots.py training=runs/toy-en-de gradients=runs/toy-en-de head-importance=data/val

The third line takes pages that `regard look` has written for other models. The fourth takes a run, and the path of two
files of sentences without their suffixes .en and .de. `--into FOLDER` writes the pictures elsewhere.

Headless Chromium opens the pages; what stands after "#" in an address chooses the view. Pictures are reduced to a width of
1,620 pixels, and to 256 colors if they would have more than 250 KB.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

MODEL = "en-de-fr-zh"
ANIMAL = "The animal could not cross the street because it was too tired."
OTHER_SENTENCES = {  # name: (sentence, target language, other options)
    "tree": ("How are you?", "fr", ("--decode.beam", "4")),
    "compare": ("The old woman gave the children two red apples.", "de", ("--forbid", "alte>old")),
}
ENCODER = "kind=encoder&layer=7&head=7"
IT = 10  # the position of "it" among the pieces of the sentence

VIEWS = {  # name: (what stands after "#", the cell to point at)
    "attention": (f"{ENCODER}&words=1&queries={IT}", "9,2"),  # "it" is word 9: "street" has two pieces
    "lines": (f"show=lines&{ENCODER}&words=1&queries={IT}", ""),
    "heads": (f"{ENCODER}&show=grid", ""),
    "chain": (f"tab=chain&{ENCODER}&queries={IT}", ""),
    "tree": ("tab=tree", ""),
    "dark": (f"theme=dark&{ENCODER}&words=1&queries={IT}", ""),
    "compare": ("tab=compare", ""),
    "gpt": ("show=lines", ""),
    "bert": ("tab=predictions", ""),
    "picture": ("tab=picture&head=mean", ""),
    "alignment": ("", ""),
}
COMMANDS = {  # name: the arguments of `regard look`
    "it": ("attention", MODEL, ANIMAL, "--layer", "encoder.7.self", "--head", "7", "--words"),
    "words": ("alignment", MODEL, "I ate an apple."),
    "statistics": ("statistics", MODEL, ANIMAL),
    "training": ("training", "{path}"),
    "gradients": ("gradients", "{path}"),
    "head-importance": ("heads", MODEL, "--source={path}.en", "--target={path}.de", "--to=de", "--sentences=200"),
}
NEED_A_PATH = ("gpt", "bert", "picture", "alignment", "training", "gradients", "head-importance")


def bundled_page(name: str, folder: Path) -> Path:
    """Return the page of the bundled model that a picture needs, written if it is not there."""
    sentence, language, options = OTHER_SENTENCES.get(name, (ANIMAL, "de", ()))
    path = folder / f"{len(sentence)}.html"
    if not path.exists():
        look("page", MODEL, sentence, "--to", language, *options, "-o", str(path))
    return path


def look(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).parent / "regard"), "look", *arguments], check=True)


def shoot(browser: Any, page: Path, picture: Path, state: str, cell: str) -> None:
    """Take a picture of a page from its top to the end of its main part."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    tab = context.new_page()
    tab.goto(f"{page.resolve().as_uri()}#{state}")
    tab.wait_for_selector("html[data-drawn]", state="attached")
    bottom = tab.evaluate("document.getElementById('main').getBoundingClientRect().bottom")
    tab.set_viewport_size({"width": 1280, "height": math.ceil(bottom) + 12})
    tab.wait_for_timeout(1000)  # small pictures are drawn when there is time
    if cell:
        tab.hover(f'main [data-cell="{cell}"]', force=True)
    tab.screenshot(path=picture)
    context.close()


def reduce(picture: Path) -> None:
    """Rewrite a picture with at most 1,620 pixels a row, and at most 256 colors if it is larger than 250 KB."""
    with Image.open(picture) as image:
        small = image.convert("RGB")
    if small.width > 1620:
        small = small.resize((1620, round(small.height * 1620 / small.width)), Image.Resampling.LANCZOS)
    small.save(picture, optimize=True)
    if picture.stat().st_size > 250_000:
        small.quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME[=PATH]", help=", ".join([*VIEWS, *COMMANDS]))
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="folder for the pictures")
    options = parser.parse_args()
    asked = options.names or [name for name in (*VIEWS, *COMMANDS) if name not in NEED_A_PATH]
    for name, _, path in (text.partition("=") for text in asked):
        if name not in (*VIEWS, *COMMANDS) or (name in NEED_A_PATH) != bool(path):
            parser.error(f"{name}: choose among {', '.join([*VIEWS, *COMMANDS])}; {', '.join(NEED_A_PATH)} need =PATH")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, _, path in (text.partition("=") for text in asked):
            picture = options.into / f"look-{name}.png"
            if name in COMMANDS:
                look(*(part.replace("{path}", path) for part in COMMANDS[name]), "-o", str(picture))
            else:
                shoot(browser, Path(path) if path else bundled_page(name, Path(folder)), picture, *VIEWS[name])
            reduce(picture)
            print(picture, f"{picture.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
