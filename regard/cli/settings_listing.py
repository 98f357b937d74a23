"""The list that `regard settings` prints: all settings with defaults and meanings, and the parts of models by kind."""

from __future__ import annotations

import difflib
import json
from typing import Any

import regard.models.architectures  # noqa: F401 (fills the registry of parts and of architectures)
from regard.config import Config
from regard.config.recipes import (
    RECIPE_FOLDER,
    SHIPPED_FOLDER,
    choices_of,
    fields_of,
    find_recipe,
    flatten,
    shipped_recipes,
)
from regard.config.registry import KINDS, PARTS, TABLES, help_of
from regard.errors import RegardError

TITLES = {
    "positions": "position schemes",
    "mixer": "token mixers",
    "feedforward": "feed-forward layers",
    "cell": "recurrent cells",
    "attention_score": "attention scores of seq2seq models",
}


def print_settings(name: str) -> None:
    """Print all settings, or those of one section (`train`), kind of part (`positions`), part (`yarn`) or table (`vit`)."""
    sections = [section for section, value in vars(Config()).items() if not isinstance(value, str)]
    if not name:
        for setting, value, help in flatten(Config()):
            print_setting(setting, value, help)
        for kind in KINDS:
            print_kind(kind)
        print_tables([table for table, entry in TABLES.items() if not entry.kind])
        print_recipes()
    elif name in shipped_recipes():
        print(find_recipe(name).read_text(encoding="utf-8").replace(RECIPE_FOLDER, str(SHIPPED_FOLDER)), end="")
    elif name in sections:
        for setting, value, help in flatten(getattr(Config(), name), f"{name}."):
            print_setting(setting, value, help)
    elif any(name in parts for parts in PARTS.values()):
        for kind, parts in PARTS.items():
            if name in parts:
                print_part(kind, name)
    elif name in PARTS:
        print_kind(name)
    elif name in TABLES:
        print_tables([name])
    else:
        known = [*sections, *PARTS, *(part for parts in PARTS.values() for part in parts), *TABLES, *shipped_recipes()]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "`regard settings` lists them all"
        raise RegardError(f"there is no section, part or table '{name}': {hint}")


def print_kind(kind: str) -> None:
    print(f"\n{TITLES[kind]} ({', '.join(f'model.{field}' for field in KINDS[kind].fields)})")
    for name in PARTS[kind]:
        print_part(kind, name)


def print_part(kind: str, name: str) -> None:
    """Print a part with the first sentence of its docstring, and its table of settings below it."""
    print(f"  {name:<13} {help_of(PARTS[kind][name])}")
    if TABLES.get(name) is not None and TABLES[name].kind == kind:
        print_table(name)


def print_recipes() -> None:
    """Print the shipped recipes with the comment that they begin with."""
    print("\nrecipes (regard train NAME; regard settings NAME prints one)")
    for name in shipped_recipes():
        first = find_recipe(name).read_text(encoding="utf-8").partition("\n")[0]
        print(f"  {name:<22} {first.removeprefix('# ')}")


def print_tables(names: list[str]) -> None:
    for name in names:
        print(f"\n[model.{name}] {TABLES[name].help} ({', '.join(TABLES[name].architectures)})")
        print_table(name)


def print_table(name: str) -> None:
    for setting, value, help in flatten(TABLES[name].settings(), f"model.{name}."):
        print_setting(setting, value, help, indent=4)


def print_setting(name: str, value: Any, help: str, indent: int = 0) -> None:
    choices = parts_named(name)
    print(f"{' ' * indent}{name:<{36 - indent}} {json.dumps(value, ensure_ascii=False):<18} {help}{choices}")


def parts_named(name: str) -> str:
    """Return the parts that a setting may name, if it is one that names parts."""
    section, _, field = name.partition(".")
    if section != "model":
        return ""
    table, _, key = field.rpartition(".")
    known = fields_of(TABLES[table].settings) if table else fields_of(type(Config().model))
    if key not in known or not (known[key].metadata.get("part") or (table and known[key].metadata.get("choices"))):
        return ""
    return f": {', '.join(filter(None, choices_of(known[key])))}"
