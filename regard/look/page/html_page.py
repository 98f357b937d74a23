"""One HTML file that shows a trace, or compares two; everything is inside it, and nothing is loaded from elsewhere.

    show("runs/multi30k-en-de", "A man is eating an apple.").save("look.html")

The page's own files are in files/: an HTML template, its style and its scripts, which are joined in the order of their
names.
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
from regard.look.model_trace import Trace
from regard.look.page.document import Document, make_document
from regard.look.tracers import trace


@dataclass(frozen=True)
class Page:
    """A page of one trace, or of two to be compared. A notebook shows it."""

    views: Sequence[Trace]

    def __post_init__(self) -> None:
        if len(self.views) not in (1, 2):
            raise RegardError(f"a page shows one view, or compares two, not {len(self.views)}")

    @cached_property
    def document(self) -> Document:
        return make_document(self.views)

    def html(self) -> str:
        return fill_template(self.document)

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
    device: str = "cpu",
    **options: Any,
) -> Page:
    """Return the page of a model and an input; with another model, or with interventions on this one, compare the two.

    The second model reads what the first one wrote, so that weights can be compared token by token, and its own output
    is shown beside; with `own` each reads what it wrote itself. Options are those of `[decode]`.
    """
    alone = other is None and not changes
    if alone and own:
        raise RegardError(
            "own output is for two that are compared, but there is one view: name another model, or a change"
        )
    first = trace(model, text, device=device, **options)
    if alone:
        return Page([first])
    second = trace(model if other is None else other, text, changes, first, own, device, **options)
    return Page([first, second])


def fill_template(document: Document) -> str:
    """Return the HTML template with style, document and scripts in their places."""
    numbers = [f'<script type="application/json" id="document">{document.json()}</script>']
    blobs = document.base64()
    numbers += [f'<script type="text/plain" id="blob-{i}">{blob}</script>' for i, blob in enumerate(blobs)]
    parts = {
        "STYLE": f"<style>\n{join_files('.css')}</style>",
        "DOCUMENT": "\n".join(numbers),
        "SCRIPT": f"<script>\n{join_files('.js')}</script>",
    }
    return re.sub(r"<!--(STYLE|DOCUMENT|SCRIPT)-->", lambda found: parts[found[1]], read_file("page.html"))


def join_files(ending: str) -> str:
    names = sorted(one.name for one in page_files().iterdir() if one.name.endswith(ending))
    return "\n".join(read_file(name) for name in names)


def read_file(name: str) -> str:
    return page_files().joinpath(name).read_text(encoding="utf-8")


def page_files() -> Any:
    return resources.files("regard.look.page") / "files"
