"""Configurations of models for tests, with the settings of parts by dotted names.

Tables of parts that are not chosen are kept, so one configuration can hold the settings of all schemes that a test tries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import regard.layers  # noqa: F401 (fills the registry)
from regard.config import ModelConfig
from regard.config.registry import find
from regard.layers.part import Place, settings_of


def replaced(config: ModelConfig, **settings: Any) -> ModelConfig:
    """`replaced(config, d_model=8, **{"rope.base": 100.0})`."""
    plain = {name: value for name, value in settings.items() if "." not in name}
    config = dataclasses.replace(config, **plain)
    for name, value in settings.items():
        table, _, key = name.rpartition(".")
        if table:
            changed = dataclasses.replace(config.named(table), **{key: value})
            config = dataclasses.replace(config, parts={**config.parts, table: changed})
    return config


def model_config(**settings: Any) -> ModelConfig:
    return replaced(ModelConfig(), **settings)


SCHEMES = (
    *("none", "linear", "sinusoidal", "learned", "shaw", "t5", "rope", "yarn"),
    *("alibi", "kerple-log", "kerple-power", "fire", "cope"),
)  # those that make sense in a decoder


def scheme(name: str, side: str = "decoder", **given: Any) -> Any:
    """A position scheme of these sizes and settings of its own, wherever it stands: `scheme("shaw", d_head=8, clip=2)`."""
    sizes = {key for key in given if key in ModelConfig.__dataclass_fields__}
    config = model_config(**{key if key in sizes or "." in key else f"{name}.{key}": x for key, x in given.items()})
    cls = find("positions", name)
    return cls(settings_of(cls, config), config, Place(side, causal=side == "decoder"))
