"""Settings in and out: frozen dataclasses <-> TOML <-> dotted overrides such as `--train.steps 2000`.

An unknown key is an error that names the nearest valid one, and so is a value of the wrong type or out of its range.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from regard.config import AT_LEAST_ONE, AT_MOST, BELOW_ONE, CHOICES, LARGEST, SIGNED, Config
from regard.errors import RegardError
from regard.files import read_text, shortened

C = TypeVar("C")


def load(path: Path) -> dict[str, Any]:
    """A TOML recipe as nested dictionaries."""
    try:
        values = tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise RegardError(
            f"no recipe at {path}: give the path of a TOML file, such as recipes/toy-en-de.toml"
        ) from None
    except OSError as error:
        raise RegardError(f"cannot read the recipe {shortened(path)}: {error.strerror or error}") from None
    except ValueError as error:
        raise RegardError(f"cannot read the recipe {path}: {error}") from None
    except RecursionError:
        raise RegardError(f"cannot read the recipe {path}: it is nested too deeply") from None
    return {"name": path.stem, **values}


def build(values: Mapping[str, Any], cls: type[C], where: str = "") -> C:
    """Nested dictionaries -> a checked dataclass. Missing keys keep their defaults."""
    hints = get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    built = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key not in known:
            raise RegardError(_unknown(name))
        table = isinstance(value, Mapping) and dataclasses.is_dataclass(hints[key])
        built[key] = build(value, hints[key], f"{name}.") if table else _cast(value, hints[key], name)
    return cls(**built)


def override(values: dict[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train.steps": "2000"}` written over nested dictionaries; returns a new one."""
    try:
        merged: dict[str, Any] = json.loads(json.dumps(values, default=str))
    except RecursionError:
        raise RegardError("the recipe is nested too deeply: it has tables of settings such as [train]") from None
    for name, value in dotted.items():
        *path, key = name.split(".")
        place = merged
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise RegardError(_unknown(name))
        place[key] = value
    return merged


def flatten(config: Any, where: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted name, value, help) of every setting, in order of declaration."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{where}{f.name}.")
        else:
            yield f"{where}{f.name}", value, f.metadata["help"]


def differences(a: Config, b: Config) -> list[str]:
    """The dotted names of settings in which two configurations differ."""
    return [name for (name, x, _), (_, y, _) in zip(flatten(a), flatten(b), strict=True) if x != y]


def to_toml(config: Config) -> str:
    lines = [f"{name} = {_toml_value(getattr(config, name))}" for name in ("name", "task")]
    for f in dataclasses.fields(config):
        table = getattr(config, f.name)
        if dataclasses.is_dataclass(table):
            lines += ["", f"[{f.name}]"]
            lines += [f"{g.name} = {_toml_value(getattr(table, g.name))}" for g in dataclasses.fields(table)]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _unknown(name: str) -> str:
    valid = [known for known, _, _ in flatten(Config())]
    key = name.rsplit(".", 1)[-1]
    elsewhere = [known for known in valid if known.endswith(f".{key}")]
    near = elsewhere or difflib.get_close_matches(name, valid, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "`regard settings` lists them all"
    return f"unknown setting '{name}': {hint}"


def _cast(value: Any, hint: Any, name: str) -> Any:
    """A TOML value or a command-line string, as the declared type."""
    try:
        cast = _cast_to(value, hint)
    except (TypeError, ValueError, OverflowError, RecursionError):
        kind = getattr(hint, "__name__", str(hint))
        raise RegardError(f"'{name}' must be of type {kind}, not {shown(value)}") from None
    wrong = _outside(cast, name)
    if wrong:
        raise RegardError(f"'{name}' must be {wrong}, not {shown(value)}")
    return cast


def shown(value: Any) -> str:
    """Return a value as a line of an error message shows it: on one line, its end left out where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: a whole number of more digits than Python converts
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 100 else f"{text[:100]} ..."


def _outside(value: Any, name: str) -> str | None:
    """The range a value should be in, if it is not."""
    if name in CHOICES:
        return None if value in CHOICES[name] else f"one of {', '.join(CHOICES[name])}"
    if isinstance(value, tuple):
        return next((f"of numbers, each {wrong}" for item in value if (wrong := _outside(item, name))), None)
    if not isinstance(value, (int, float)) or name in SIGNED:
        return None
    if name in BELOW_ONE:
        return None if 0 <= value < 1 else "from 0 to below 1"
    if name == "train.lr" and value == 0:
        return "above 0"
    least = int(name in AT_LEAST_ONE)
    most = AT_MOST.get(name, LARGEST)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        return f"at most {most:,}"
    return None if least <= value < math.inf else f"a number from {least} up"


def _cast_to(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        raise TypeError
    if isinstance(value, Mapping):
        raise TypeError
    if get_origin(hint) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(_cast_to(item, get_args(hint)[0]) for item in items if item != "")
    if hint is bool:
        if str(value).lower() not in ("true", "false"):
            raise ValueError
        return str(value).lower() == "true"
    if isinstance(value, bool) or (hint is int and isinstance(value, float) and value != int(value)):
        raise ValueError
    if hint is str and not isinstance(value, str):
        raise ValueError
    return hint(float(value)) if hint is int and isinstance(value, str) and "e" in value.lower() else hint(value)
