"""Looking inside a model: recording, tracing, interventions, figures and the page.

    from regard.look import show

    show("runs/multi30k-en-de", "A man is eating an apple.").save("look.html")

Names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.look.model_trace import Trace
    from regard.look.page.html_page import Page, show
    from regard.look.tracers import trace

__all__ = ["Page", "Trace", "show", "trace"]

_MODULES = {
    "Page": "regard.look.page.html_page",
    "show": "regard.look.page.html_page",
    "Trace": "regard.look.model_trace",
    "trace": "regard.look.tracers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'regard.look' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
