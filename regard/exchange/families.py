"""The families of Hugging Face models that Regard imports and exports, by their `model_type` in config.json."""

from __future__ import annotations

from typing import Any

from regard.config import ModelConfig
from regard.config.recipes import format_value
from regard.errors import RegardError
from regard.exchange.deberta_family import DEBERTA, DEBERTA2
from regard.exchange.decoder_families import BLOOM, GPT2, LLAMA, MIXTRAL
from regard.exchange.encoder_decoder_families import BART, MARIAN, SWITCH, T5
from regard.exchange.encoder_families import BERT, ROBERTA, ROFORMER, VIT
from regard.exchange.mamba2_family import MAMBA2
from regard.exchange.model_family import Family, ModelClass
from regard.exchange.recurrent_families import MAMBA, RWKV

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(GPT2, LLAMA, MIXTRAL, BLOOM, BERT, ROBERTA, ROFORMER, DEBERTA, DEBERTA2),
        *(T5, SWITCH, BART, MARIAN, VIT, MAMBA, MAMBA2, RWKV),
    )
}


def find_family(their: dict[str, Any]) -> tuple[Family, str]:
    """Return the family of a config.json and the name of its model class."""
    known = ", ".join(family.name for family in FAMILIES.values())
    if their.get("model_type") is None:
        types = ", ".join(f'"{name}"' for name in FAMILIES)
        raise RegardError(
            f'config.json does not say which family its model is of: add "model_type", one of {types} (Regard reads {known})'
        )
    family = FAMILIES.get(str(their["model_type"]))
    if family is None:
        raise RegardError(f"config.json is of a {format_value(their['model_type'])} model: Regard reads {known}")
    headless = [name for name, found in family.classes.items() if found.headless] or list(family.classes)
    names = their.get("architectures") or headless
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise RegardError(
            f"config.json has architectures {format_value(names)}, which must be a list with the name of a class"
        )
    name = names[0]
    if name not in family.classes:
        raise RegardError(
            f"config.json is of a {format_value(name)[1:-1]}: of {family.name}, Regard reads {', '.join(family.classes)}"
        )
    return family, name


def match_family(config: ModelConfig) -> Family:
    """Return the first family whose settings cover those of a model of ours."""
    wrong = {family.name: family.list_differences(config) for family in FAMILIES.values()}
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


def choose_class(family: Family, config: ModelConfig, before: str = "") -> tuple[str, ModelClass]:
    """Return the model class of theirs that predicts what ours does: `before`, from which it came, or the family's first."""
    names = [name for name, found in family.classes.items() if found.prediction_head == config.prediction_head]
    name = before if before in names else names[0]
    name = family.classes[name].exported_as or name
    return name, family.classes[name]
