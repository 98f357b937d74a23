"""The registry of parts, and how a part declares the settings it reads. Imports no torch.

A part is a position scheme, a token mixer, a feed-forward layer, a recurrent cell or an attention score: one class in one
file, entered here by one line, `@register("name")`. Help texts, the command line, presets and everything that lists or
builds parts read this registry, so nothing else has to know that a part exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

from regard.errors import RegardError

KINDS = ("positions", "mixer", "feedforward", "cell", "score")
PARTS: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}  # kind -> name -> class

P = TypeVar("P", bound=type)


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: int | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field with its help text and the range that its values must lie in.

    `least` and `most` are included in the range, `above` and `below` are not. Numbers without any of them are at least 0.
    """
    limits = {"least": least, "above": above, "below": below, "most": most}
    metadata: dict[str, Any] = {"help": help, **{name: value for name, value in limits.items() if value is not None}}
    if choices:
        metadata["choices"] = choices
    return field(default=default, metadata=metadata)


def register(name: str) -> Callable[[P], P]:
    """Return a class decorator that enters a part under `name`; its kind comes from its base class."""

    def enter(cls: P) -> P:
        parts = PARTS[cls.kind]  # type: ignore[attr-defined]
        if name in parts:
            raise RegardError(f"two parts of kind {cls.kind} are called '{name}'")  # type: ignore[attr-defined]
        cls.name = name  # type: ignore[attr-defined]
        parts[name] = cls
        return cls

    return enter


def find(kind: str, name: str) -> Any:
    """Return the class of a part, or raise an error that names the nearest one there is."""
    parts = PARTS[kind]
    if name not in parts:
        near = difflib.get_close_matches(name, parts, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise RegardError(f"unknown {kind} '{name}': {hint}there are {', '.join(parts)}")
    return parts[name]
