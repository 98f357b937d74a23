"""The registry of parts, and how a part declares the settings it reads. This module does not import torch.

A part is a position scheme, a token mixer (such as an attention variant), a feed-forward layer, a recurrent cell or an
attention score: one class in one file, registered by one line, `@register("name")`. Help texts, the command line,
presets and everything that lists or builds parts read this registry, so nothing else has to know that a part exists.
`regard/layers/__init__.py` imports the files of the parts, so the registry is full once `regard.layers` is imported.

A part with settings has a table of them, `[model.NAME]`, which exists only in configurations that choose the part. An
architecture may have such a table too (`register_table`).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from regard.errors import RegardError

# Components of architectures; each model class declares which of them it has (models/model.py).
BLOCKS, RECURRENT, ALIGNMENT, IMAGES = "blocks", "recurrent layers", "an alignment", "images"
MADE_OF: dict[str, tuple[str, ...]] = {}  # architecture -> its components; filled by models/architectures.py


class Kind(NamedTuple):
    """A kind of part: the settings of `[model]` that name one, each with the component of architectures that reads it."""

    fields: Mapping[str, str]


KINDS = {
    "positions": Kind(dict.fromkeys(("positions", "encoder_positions", "cross_positions"), BLOCKS)),
    "mixer": Kind({"mixer": BLOCKS}),
    "feedforward": Kind({"feedforward": BLOCKS, "recurrent_feedforward": RECURRENT}),
    "cell": Kind({"cell": RECURRENT}),
    "attention_score": Kind({"attention_score": ALIGNMENT}),
}
PARTS: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}  # kind -> name -> class


@dataclass(frozen=True)
class Table:
    """A table of settings `[model.NAME]`: its dataclass, and the models that have it."""

    settings: type
    help: str
    of: tuple[str, ...]  # architectures with any of these components may have the table
    kind: str = ""  # the kind of part that the table belongs to; "" for a table of architectures

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(name for name, parts in MADE_OF.items() if any(component in parts for component in self.of))


TABLES: dict[str, Table] = {}  # by name; only tables that have settings
RESERVED_NAMES: set[str] = set()  # the settings of `[model]` itself, whose names no table may have (see schema.py)

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
    part: str = "",
    of: str = "",
) -> Any:
    """Return a dataclass field with its help text and the range that its values must lie in.

    `least` and `most` are included in the range, `above` and `below` are not. Numbers without any of them are at least 0;
    `least=-math.inf` allows all.
    `part` is a kind: the setting names a registered part of that kind, or one of `choices`. `of` is the component of
    architectures that read the setting; in other architectures it is an error.
    """
    limits = {"least": least, "above": above, "below": below, "most": most}
    metadata: dict[str, Any] = {"help": help, **{name: value for name, value in limits.items() if value is not None}}
    rest = {"choices": choices, "part": part, "of": of}
    if isinstance(default, (int, float)) and (wrong := range_fault(default, metadata)):
        raise RegardError(f"the default {default!r} of a setting ({help}) must be {wrong}: give its range to setting()")
    return field(default=default, metadata=metadata | {name: value for name, value in rest.items() if value})


# Maxima of integers are far above every model that exists: a larger value is a mistake, and would fill the memory before
# any other check. Settings without a maximum of their own are at most LARGEST.
LARGEST = (1 << 31) - 1


def range_fault(value: float, limits: Mapping[str, Any]) -> str | None:
    """Return the range that a number should be in, in words, or None where it is inside."""
    if isinstance(value, bool):
        return None
    least, most = limits.get("least", 0), limits.get("most", LARGEST if isinstance(value, int) else math.inf)
    if value > most:
        return f"at most {most:,}"
    if "above" in limits and "below" in limits:
        low, high = limits["above"], limits["below"]
        return None if low < value < high else f"above {low:g} and below {high:g}"
    if "above" in limits:
        return None if limits["above"] < value < math.inf else f"above {limits['above']:g}"
    if "below" in limits:
        return None if least <= value < limits["below"] else f"from {least:g} to below {limits['below']:g}"
    return None if least == -math.inf or least <= value < math.inf else f"a number from {least:g} up"


def register(name: str) -> Callable[[P], P]:
    """Return a class decorator that registers a part under `name`; its kind comes from its base class.

    A class that is defined again, by a reloaded module or a notebook cell, replaces itself.
    """

    def enter(cls: Any) -> Any:
        parts = PARTS[cls.kind]
        there = parts.get(name, cls)
        if (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RegardError(f"two parts of kind {cls.kind} are called '{name}'")
        if not dataclasses.is_dataclass(cls.Settings):
            raise RegardError(f"the Settings of the part '{name}' must be a dataclass: @dataclass(frozen=True)")
        for declared in dataclasses.fields(cls.Settings):
            if "help" not in declared.metadata:
                raise RegardError(f"model.{name}.{declared.name} has no help: declare it by setting(default, help)")
        cls.check_declaration(name)
        if name in parts:
            unregister(cls.kind, name)
        if dataclasses.fields(cls.Settings):
            settings: Any = cls.Settings
            _add_table(
                name, Table(settings, help_of(cls), tuple(dict.fromkeys(KINDS[cls.kind].fields.values())), cls.kind)
            )
        cls.name = name
        parts[name] = cls
        return cls

    return enter


def architectures_with(component: str) -> tuple[str, ...]:
    """Return the architectures that have a component."""
    return tuple(name for name, parts in MADE_OF.items() if component in parts)


def register_table(name: str, of: str) -> Callable[[P], P]:
    """Return a class decorator that registers a dataclass as the table `[model.NAME]`.

    The architectures that have the component `of` have this table.
    """

    def enter(cls: Any) -> Any:
        cls.table = name
        _add_table(name, Table(cls, help_of(cls), (of,)))
        return cls

    return enter


def _add_table(name: str, table: Table) -> None:
    if name in TABLES:
        raise RegardError(f"two tables of settings would be called [model.{name}]: choose another name for the part")
    if name in RESERVED_NAMES:
        raise RegardError(f"a table [model.{name}] cannot be told from the setting model.{name}: choose another name")
    TABLES[name] = table


def unregister(kind: str, name: str) -> None:
    """Remove a part from the registry; for tests that define their own."""
    table = TABLES.get(name)
    if table is not None and table.kind == kind:
        del TABLES[name]
    del PARTS[kind][name]


def help_of(cls: type) -> str:
    """Return the first sentence of a class's docstring, on one line."""
    text = " ".join((cls.__doc__ or "").split())
    end = next(
        (i for i, c in enumerate(text) if c == "." and text[i + 1 : i + 2] in ("", " ") and _ends_sentence(text, i)),
        None,
    )
    return text if end is None else text[:end]


def _ends_sentence(text: str, at: int) -> bool:
    """Return whether the full stop at `at` ends a sentence, and does not belong to "et al.", "e.g." or a dot product."""
    return not text[: at + 1].endswith((" al.", "e.g.", "i.e.", " ."))


def find(kind: str, name: str) -> Any:
    """Return the class of a part; an unknown name is a RegardError that suggests the nearest one."""
    parts = PARTS[kind]
    if name not in parts:
        near = difflib.get_close_matches(name, parts, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise RegardError(f"unknown {kind} '{name}': {hint}there are {', '.join(parts)}")
    return parts[name]


def chosen_tables(model: Mapping[str, Any]) -> list[str]:
    """Return the names of the tables of settings that a model has, given the values of all settings of `[model]`.

    An unknown architecture counts as having all components.
    """
    architecture = model["architecture"]
    has = MADE_OF.get(architecture, (BLOCKS, RECURRENT, ALIGNMENT, IMAGES))
    names = {
        (kind, name)
        for kind, (fields,) in KINDS.items()
        for field, component in fields.items()
        if component in has
        for name in split_names(model[field])
        if name
    }
    return [
        name
        for name, table in TABLES.items()
        if any(component in has for component in table.of) and (not table.kind or (table.kind, name) in names)
    ]


def split_names(value: Any) -> list[str]:
    """Return the names in a setting that names parts: one name, several, or several separated by commas."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else []


def explain_unused_table(name: str, architecture: str) -> str:
    """Return why a model of this architecture does not have the table `[model.NAME]`, and what to do about it."""
    table = TABLES[name]
    if architecture in MADE_OF and architecture not in table.architectures:
        return f"it is for {', '.join(table.architectures)} models, and this is a {architecture}; leave it out"
    has = MADE_OF.get(architecture, table.of)
    field = next(field for field, component in KINDS[table.kind].fields.items() if component in has)
    return f"choose model.{field} {name} to use it, or leave it out"
