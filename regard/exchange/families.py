"""All families that can come in and go out, by the name that config.json gives them."""

from __future__ import annotations

from typing import Any

from regard.config import ModelConfig
from regard.config.recipes import format_value
from regard.errors import RegardError
from regard.exchange.deberta import DEBERTA, DEBERTA2
from regard.exchange.decoders import BLOOM, GPT2, LLAMA
from regard.exchange.encoders import BERT, ROBERTA, ROFORMER
from regard.exchange.family import Family, Kind
from regard.exchange.pairs import BART, MARIAN, T5
from regard.exchange.vision import VIT

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (GPT2, LLAMA, BLOOM, BERT, ROBERTA, ROFORMER, DEBERTA, DEBERTA2, T5, BART, MARIAN, VIT)
}


def find(their: dict[str, Any]) -> tuple[Family, str]:
    """The family of a config.json, and the class of its model."""
    known = ", ".join(family.name for family in FAMILIES.values())
    if their.get("model_type") is None:
        types = ", ".join(f'"{name}"' for name in FAMILIES)
        raise RegardError(
            f'config.json does not say which family its model is of: add "model_type", one of {types} (Regard reads {known})'
        )
    family = FAMILIES.get(str(their["model_type"]))
    if family is None:
        raise RegardError(f"config.json is of a {format_value(their['model_type'])} model: Regard reads {known}")
    bare = [name for name, kind in family.kinds.items() if kind.bare] or list(family.kinds)
    names = their.get("architectures") or bare
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise RegardError(
            f"config.json has architectures {format_value(names)}, which must be a list with the name of a class"
        )
    name = names[0]
    if name not in family.kinds:
        raise RegardError(
            f"config.json is of a {format_value(name)[1:-1]}: of {family.name}, Regard reads {', '.join(family.kinds)}"
        )
    return family, name


def fitting(config: ModelConfig) -> Family:
    """The family that a model of ours belongs to, by its settings alone."""
    wrong = {family.name: family.differences(config) for family in FAMILIES.values()}
    for family in FAMILIES.values():
        if not wrong[family.name]:
            return family
    same = {f.name: wrong[f.name] for f in FAMILIES.values() if f.architecture == config.architecture}
    if not same:
        raise RegardError(f"no family of models elsewhere is a {config.architecture}: it stays in a folder of Regard's")
    nearest = min(same, key=lambda name: len(same[name]))
    raise RegardError(
        f"no family of models elsewhere has these settings; the nearest is {nearest}, but {'; '.join(same[nearest])}"
    )


def kind_for(family: Family, config: ModelConfig, before: str = "") -> tuple[str, Kind]:
    """The class of theirs that answers what ours does: the one it came from, or the family's first."""
    names = [name for name, kind in family.kinds.items() if kind.answer == config.answer]
    name = before if before in names else names[0]
    name = family.kinds[name].out or name
    return name, family.kinds[name]
