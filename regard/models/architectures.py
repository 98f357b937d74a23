"""The registry of model architectures and presets, and the construction of a model from its configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from regard.config import ModelConfig
from regard.config.recipes import build, merge_tables, nest
from regard.config.registry import MADE_OF
from regard.errors import RegardError
from regard.models.bert import Bert
from regard.models.classification_model import ClassificationModel
from regard.models.gpt import GPT
from regard.models.model import ARCHITECTURES, Model
from regard.models.rnn import RNN
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.models.vit import ViT

PRESETS: dict[str, dict[str, Any]] = {}  # of all architectures
M = TypeVar("M", bound=type[Model])


def register(name: str) -> Callable[[M], M]:
    """Return a class decorator that enters an architecture and its presets under `name`."""

    def enter(cls: M) -> M:
        if name in ARCHITECTURES:
            raise RegardError(f"two architectures are called '{name}'")
        if taken := [preset for preset in cls.presets if preset in PRESETS]:
            raise RegardError(f"two presets are called '{taken[0]}'")
        cls.name = name
        for settings in cls.presets.values():
            settings["architecture"] = name
        ARCHITECTURES[name] = cls
        MADE_OF.pop(name, None)  # `Model.resolve` may have entered it before: the order is that of registration
        MADE_OF[name] = cls.made_of
        PRESETS.update(cls.presets)
        return cls

    return enter


register("transformer")(Transformer)
register("gpt")(GPT)
register("bert")(Bert)
register("vit")(ViT)
register("rnn")(RNN)
register("seq2seq")(Seq2Seq)


def architecture_of(config: ModelConfig) -> type[Model]:
    """Return the model class of a configuration, whose attributes describe the architecture."""
    name = config.architecture or with_preset({"preset": config.preset})["architecture"]
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise RegardError(f"unknown model.architecture '{name}': {hint}there are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def preset(name: str, **settings: Any) -> ModelConfig:
    """Return the configuration of a preset with some settings changed: `preset("llama3-8b", rope={"base": 1e6})`.

    Names may be dotted: `preset("llama3-8b", **{"rope.base": 1e6})`.
    """
    return build(with_preset({"preset": name, **nest(settings)}), ModelConfig, "model.")


def with_preset(settings: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Merge the settings of a preset, of a `[model]` table and of its overrides; the later ones take precedence.

    The preset is the one that the overrides or the table name."""
    overrides = overrides or {}
    name = overrides.get("preset", settings.get("preset", ModelConfig.preset))
    if not isinstance(name, str) or name not in PRESETS:
        raise RegardError(f"unknown model.preset '{name}': {suggest_preset(str(name))}")
    return merge_tables(merge_tables(PRESETS[name], settings), overrides)


def suggest_preset(name: str) -> str:
    """Return a hint for a name that is no preset: the nearest one, and how to list all."""
    near = [preset for preset in PRESETS if name and name in preset.split("-")]  # tiny: transformer-tiny comes first
    family = [preset for preset in PRESETS if preset.split("-")[0] == name.split("-")[0]]
    near = near or difflib.get_close_matches(name, family or PRESETS, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}`regard cost` lists all presets"


def resolve(config: ModelConfig) -> ModelConfig:
    """Return the configuration with all sizes filled in; refuse impossible ones and parts where they make no sense."""
    return architecture_of(config).resolve(config)


def make_model(config: ModelConfig) -> nn.Module:
    """Return a model with random initial weights; where `prediction_head` is set, with such a head on top."""
    config = resolve(config)
    try:
        body = architecture_of(config)(config)
        return body if config.prediction_head == "none" else ClassificationModel(body.config, body)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise RegardError("there is not enough memory for a model of these sizes: choose smaller ones") from None
        raise
