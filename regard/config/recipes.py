"""Recipes: frozen dataclasses of settings <-> TOML <-> dotted overrides such as `--train.steps 2000`.

An unknown setting is a RegardError that suggests the nearest valid one; so is a value of the wrong type or out of range.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from regard.config.registry import PARTS, TABLES, chosen_tables, explain_unused_table, range_fault
from regard.config.schema import Config, ModelConfig
from regard.errors import RegardError
from regard.files import exists, read_text, shorten_path

C = TypeVar("C")


SHIPPED_FOLDER = Path(__file__).parents[1] / "recipes"
RECIPE_FOLDER = "{recipe}"  # in data.root: the folder of the recipe itself


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that ship with Regard, for `regard train NAME`."""
    return sorted(path.stem for path in SHIPPED_FOLDER.glob("*.toml"))


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe: the file itself, or the shipped recipe of this name."""
    path, name = Path(recipe), str(recipe).removesuffix(".toml")
    is_shipped = name in shipped_recipes()
    if exists(path) and not (is_shipped and path.is_dir()):  # a run may have the name of its recipe
        return path
    if is_shipped:
        return SHIPPED_FOLDER / f"{name}.toml"
    near = difflib.get_close_matches(path.stem, shipped_recipes(), n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise RegardError(
        f"no recipe at {shorten_path(path)}: {hint}give the path of a TOML file, or the name of a shipped recipe "
        f"({', '.join(shipped_recipes())})"
    )


# Around the settings of a run: half of a TOML file may be a valid one, and would train with defaults.
FIRST_LINE, LAST_LINE = "# All settings of this run, up to the line 'end'.\n", "# end\n"


def load(recipe: str | Path) -> dict[str, Any]:
    """Read a TOML recipe as nested dictionaries; its name is that of the file unless it gives another."""
    path = find_recipe(recipe)
    try:
        text = read_text(path)
        if text.startswith(FIRST_LINE) and not text.endswith(LAST_LINE):
            raise RegardError(f"{path} ends before its last line, so settings are missing: put the whole file back")
        values = tomllib.loads(text)
    except OSError as error:
        raise RegardError(f"cannot read the recipe {shorten_path(path)}: {error.strerror or error}") from None
    except ValueError as error:
        raise RegardError(f"cannot read the recipe {path}: {error}") from None
    except RecursionError:
        raise RegardError(f"cannot read the recipe {path}: it is nested too deeply") from None
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("root"), str):
        data["root"] = data["root"].replace(RECIPE_FOLDER, str(path.parent))
    return {"name": path.stem, **values}


HINTS: dict[Any, dict[str, Any]] = {}


def type_hints(cls: Any) -> dict[str, Any]:
    """Return the types of the settings of a dataclass, which take Python a millisecond to find out."""
    if cls not in HINTS:
        HINTS[cls] = get_type_hints(cls)
    return HINTS[cls]


def build(values: Mapping[str, Any], cls: type[C], where: str = "") -> C:
    """Build a checked dataclass from nested dictionaries; missing settings keep their defaults.

    A table of a part, such as `[model.yarn]`, is a RegardError where the model does not have that part.
    """
    hints, known = type_hints(cls), fields_of(cls)
    built: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if cls is ModelConfig and key in TABLES:
            continue
        if key not in known:
            raise RegardError(
                _unknown_section(name) if cls is Config and isinstance(value, Mapping) else _unknown(name)
            )
        table = isinstance(value, Mapping) and dataclasses.is_dataclass(hints[key])
        built[key] = build(value, hints[key], f"{name}.") if table else _cast(value, hints[key], name, known[key])
    if cls is ModelConfig:
        built["parts"] = _build_tables({k: v for k, v in values.items() if k in TABLES}, built, where)
    return cls(**built)


def cast_settings(values: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    """Return settings of the command line with the types that the dataclass declares; those not given are left out."""
    built: Any = build(values, cls, where)
    return {name: getattr(built, name) for name in values}


def fields_of(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings that a dataclass declares, by name, without the tables of a model's parts."""
    return {f.name: f for f in dataclasses.fields(cls) if not (f.name == "parts" and issubclass(cls, ModelConfig))}


def _build_tables(given: Mapping[str, Any], built: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the given tables of settings of a model's parts, by name; a table of any other part is a RegardError."""
    names = chosen_tables({**MODEL_DEFAULTS, **built})
    for name, table in given.items():
        if not isinstance(table, Mapping):
            raise RegardError(f"'{where}{name}' is a table of settings, [{where}{name}], not {format_value(table)}")
        if name not in names:
            raise RegardError(
                f"[{where}{name}] would do nothing here: {explain_unused_table(name, built.get('architecture', ''))}"
            )
    return {name: build(table, TABLES[name].settings, f"{where}{name}.") for name, table in given.items()}


MODEL_DEFAULTS = {name: f.default for name, f in fields_of(ModelConfig).items()}


def merge_tables(base: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[model]` table `base` updated with `model`, the tables of parts setting by setting.

    A part's table that only `base` has is dropped where `model` chooses another part in its place.
    """
    merged = {**base, **model}
    for name in TABLES:
        tables = [table.get(name, {}) for table in (base, model)]
        if all(isinstance(table, Mapping) for table in tables) and (tables[0] or name in model):
            merged[name] = {**tables[0], **tables[1]}
    before, after = (chosen_tables({**MODEL_DEFAULTS, **table}) for table in (base, merged))
    gone = [name for name in before if name not in after and name not in model]
    return {key: value for key, value in merged.items() if key not in gone}


def check_values(config: Any, where: str = "") -> None:
    """Raise a RegardError for a value outside its range; for configurations that were not made by `build`."""
    for name, f in fields_of(type(config)).items():
        value = getattr(config, name)
        wrong = _outside(value, f)
        if wrong:
            raise RegardError(f"'{where}{name}' must be {wrong}, not {format_value(value)}")
    for name, table in getattr(config, "parts", {}).items():
        check_values(table, f"{where}{name}.")


def override(values: dict[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dictionaries with dotted settings, such as `{"train.steps": "2000"}`, written over them."""
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


def nest(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings as nested dictionaries: `{"rope.base": 1e6}` -> `{"rope": {"base": 1e6}}`."""
    return override({}, dotted)


def flatten(config: Any, where: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted name, value, help) of every setting in order of declaration, a model's parts after its own settings."""
    for name, f in fields_of(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value, f.metadata["help"]
    for name, table in getattr(config, "parts", {}).items():
        yield from flatten(table, f"{where}{name}.")


def differences(a: Config, b: Config) -> list[str]:
    """Return the dotted names of settings that differ between two configurations or that only one of them has."""
    old, new = ({name: value for name, value, _ in flatten(config)} for config in (a, b))
    return [name for name in {**old, **new} if name not in old or name not in new or old[name] != new[name]]


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as the nested dictionaries that `build` reads; the settings of parts are tables."""
    made = {name: getattr(config, name) for name in fields_of(type(config))}
    made |= getattr(config, "parts", {})
    return {name: to_dict(value) if dataclasses.is_dataclass(value) else value for name, value in made.items()}


def changed_settings(config: ModelConfig, **settings: Any) -> ModelConfig:
    """Return a model's configuration with other settings, e.g. `changed_settings(config, rope={"base": 5e5})`.

    Names may be dotted: `changed_settings(config, **{"rope.base": 5e5})`.
    """
    return build(merge_tables(to_dict(config), nest(settings)), ModelConfig, "model.")


def to_run_toml(config: Config) -> str:
    """Return the settings of a run as the file that it keeps, which says where it ends."""
    return FIRST_LINE + to_toml(config) + LAST_LINE


def to_toml(config: Config) -> str:
    """Return settings as TOML."""
    return "\n".join(_toml_lines(to_dict(config))) + "\n"


def _toml_lines(values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    yield from (f"{name} = {_toml_value(value)}" for name, value in values.items() if not isinstance(value, Mapping))
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ("", f"[{where}{name}]")
            yield from _toml_lines(value, f"{where}{name}.")


def _toml_value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def every_setting() -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted name, default, help) of all settings, with those of all registered parts."""
    yield from flatten(Config())
    for name, table in TABLES.items():
        yield from flatten(table.settings(), f"model.{name}.")


def _unknown(name: str) -> str:
    valid = [known for known, _, _ in every_setting()]
    key = name.rsplit(".", 1)[-1]
    elsewhere = [known for known in valid if known.endswith(f".{key}")]
    near = difflib.get_close_matches(
        name, elsewhere or [*valid, *(f"model.{table}" for table in TABLES)], n=1, cutoff=0.8
    )
    near = near or elsewhere
    hint = f"did you mean '{near[0]}'?" if near else "`regard settings` lists them all"
    return f"unknown setting '{name}': {hint}"


def _unknown_section(name: str) -> str:
    sections = [f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)]
    near = difflib.get_close_matches(name, sections, n=1)
    hint = f"did you mean [{near[0]}]?" if near else f"there are [{'], ['.join(sections)}]"
    return f"unknown table [{name}]: {hint}"


def check_names(dotted: Mapping[str, Any]) -> None:
    """Refuse a dotted setting whose section does not exist, such as trian.steps, and suggest the nearest setting."""
    known = fields_of(Config)
    for name in dotted:
        if name.partition(".")[0] not in known:
            raise RegardError(_unknown(name))


def _cast(value: Any, hint: Any, name: str, f: dataclasses.Field[Any]) -> Any:
    """Return a TOML value or a command-line string converted to the declared type of a setting."""
    try:
        cast = _cast_to(value, hint)
    except (TypeError, ValueError, OverflowError, RecursionError):
        kind = getattr(hint, "__name__", str(hint))
        raise RegardError(f"'{name}' must be of type {kind}, not {format_value(value)}") from None
    wrong = _outside(cast, f)
    if wrong:
        raise RegardError(f"'{name}' must be {wrong}, not {format_value(value)}")
    return cast


def format_value(value: Any) -> str:
    """Return a value for an error message: on one line, shortened where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer with more digits than Python converts
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 100 else f"{text[:100]} ..."


def _outside(value: Any, f: dataclasses.Field[Any]) -> str | None:
    """Return the range that a value should be in, or None where it is inside."""
    limits = f.metadata
    if isinstance(value, tuple):
        wrong = next((wrong for item in value if (wrong := _outside(item, f))), None)
        return f"of numbers, each {wrong}" if wrong and not isinstance(value[0], str) else wrong
    choices = choices_of(f)
    if choices:
        hint = suggest(value, choices) if "part" in limits else ""
        hint = hint or (" (a part of your own is known once its module is imported)" if "part" in limits else "")
        return None if value in choices else f"one of {', '.join(filter(None, choices))}{hint}"
    return range_fault(value, limits) if isinstance(value, (int, float)) else None


def choices_of(f: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the allowed values of a setting, or nothing where it has a range; names of parts come from the registry."""
    choices: tuple[str, ...] = f.metadata.get("choices", ())
    kind = f.metadata.get("part")
    if not kind:
        return choices
    if not PARTS[kind]:
        raise RuntimeError("the registry of parts is empty: import regard.layers before settings of models are read")
    return (*choices, *PARTS[kind])


def suggest(value: Any, choices: tuple[str, ...]) -> str:
    """Return the hint " (did you mean '...'?)" with the nearest choice, or the empty string."""
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _corpus_spec(item: Any) -> Any:
    """Return an item of a list; {corpus = "x.tsv", weight = 2.5} in the short form "x.tsv*2.5"."""
    if isinstance(item, Mapping) and set(item) == {"corpus", "weight"}:
        return f"{item['corpus']}*{float(item['weight']):g}"
    return item


def _cast_to(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        raise TypeError
    if isinstance(value, Mapping):
        raise TypeError
    if get_origin(hint) is tuple:
        items = value.split(",") if isinstance(value, str) else map(_corpus_spec, value)
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
