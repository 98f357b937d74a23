"""Looking inside.

    from regard.look import show

    show("runs/multi30k-en-de", "A man is eating an apple.").save("look.html")

Names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.look.page.html import Page, show
    from regard.look.page.seen import Seen, see

__all__ = ["Page", "Seen", "see", "show"]

_HOMES = {
    "Page": "regard.look.page.html",
    "show": "regard.look.page.html",
    "Seen": "regard.look.page.seen",
    "see": "regard.look.page.seen",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'regard.look' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
