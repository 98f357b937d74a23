"""One HTML file in which a model can be looked into: everything is inside it, and nothing is loaded from elsewhere.

    show("runs/multi30k-en-de", "A man is eating an apple.").save("look.html")

The page's own files are in files/: a skeleton, its style and its scripts, which are put together by their names.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.files import write_text
from regard.look.page.document import Document, document_of
from regard.look.page.seen import Seen, see


@dataclass(frozen=True)
class Page:
    """One view, or two to be compared. Shows itself in a notebook."""

    views: Sequence[Seen]

    def __post_init__(self) -> None:
        if len(self.views) not in (1, 2):
            raise RegardError(f"a page shows one view, or compares two, not {len(self.views)}")

    @cached_property
    def document(self) -> Document:
        return document_of(self.views)

    def html(self) -> str:
        return filled(self.document)

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self.html())

    def _repr_html_(self) -> str:
        inside = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{inside}" style="width: 100%; height: 900px; border: 0"></iframe>'


def show(
    model: Any,
    text: str | Path,
    other: Any = None,
    changes: Sequence[Any] = (),
    own: bool = False,
    **options: Any,
) -> Page:
    """Look into a model; with another model, or with changes to this one (look/change/intervene.py), compare the two.

    A second view reads what the first one wrote, so that weights can be compared token by token, and says what it would
    have written; with `own` each reads what it wrote itself. Options are those of `[decode]`.
    """
    alone = other is None and not changes
    if alone and own:
        raise RegardError(
            "own output is for two that are compared, but there is one view: name another model, or a change"
        )
    first = see(model, text, **options)
    if alone:
        return Page([first])
    second = see(model if other is None else other, text, changes, first, own, **options)
    return Page([first, second])


def filled(document: Document) -> str:
    """The skeleton with style, numbers and scripts in their places."""
    numbers = [f'<script type="application/json" id="document">{document.json()}</script>']
    blobs = document.base64()
    numbers += [f'<script type="text/plain" id="blob-{i}">{blob}</script>' for i, blob in enumerate(blobs)]
    parts = {
        "STYLE": f"<style>\n{joined('.css')}</style>",
        "DOCUMENT": "\n".join(numbers),
        "SCRIPT": f"<script>\n{joined('.js')}</script>",
    }
    return re.sub(r"<!--(STYLE|DOCUMENT|SCRIPT)-->", lambda found: parts[found[1]], file("page.html"))


def joined(ending: str) -> str:
    names = sorted(one.name for one in files().iterdir() if one.name.endswith(ending))
    return "\n".join(file(name) for name in names)


def file(name: str) -> str:
    return files().joinpath(name).read_text(encoding="utf-8")


def files() -> Any:
    return resources.files("regard.look.page") / "files"
