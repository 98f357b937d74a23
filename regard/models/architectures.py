"""Every model by name: what a recipe's preset or a model folder's configuration may ask for, and nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.models import bert, gpt, rnn, seq2seq, transformer, vit
from regard.models.classifier import Classifier
from regard.models.presets import TABLES
from regard.models.sizes import resolve_sizes
from regard.recipes import build, nested, over

ARCHITECTURES: dict[str, type[nn.Module]] = {
    "transformer": transformer.Transformer,
    "gpt": gpt.GPT,
    "bert": bert.Bert,
    "vit": vit.ViT,
    "rnn": rnn.RNN,
    "seq2seq": seq2seq.Seq2Seq,
}
PRESETS: dict[str, dict[str, Any]] = {name: settings for table in TABLES.values() for name, settings in table.items()}


def preset(name: str, **settings: Any) -> ModelConfig:
    """A published model's sizes and style, with some of them changed: `preset("llama3-8b", rope={"base": 1e6})`.

    Names may be dotted: `preset("llama3-8b", **{"rope.base": 1e6})`.
    """
    return build(with_preset({"preset": name, **nested(settings)}), ModelConfig, "model.")


def with_preset(settings: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a `[model]` table, and of what is written over it, over those of the preset that they name."""
    overrides = overrides or {}
    name = overrides.get("preset", settings.get("preset", ModelConfig.preset))
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise RegardError(f"unknown model.preset '{name}': {hint}there are {', '.join(PRESETS)}")
    return over(over(PRESETS[name], settings), overrides)


def resolve(config: ModelConfig) -> ModelConfig:
    """The sizes this model will have; impossible ones are refused, and positions where they make no sense."""
    architecture = config.architecture or with_preset({"preset": config.preset})["architecture"]
    if architecture in ("transformer", "seq2seq"):
        return (transformer if architecture == "transformer" else seq2seq).resolve(config)
    return resolve_sizes(config, TABLES[architecture])


def make_model(config: ModelConfig) -> nn.Module:
    """Fresh weights; with answers to give, a head for them on top of the model that reads."""
    config = resolve(config)
    try:
        body = ARCHITECTURES[config.architecture](config)
        return body if config.answer == "none" else Classifier(body.config, body)  # type: ignore[arg-type]
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise RegardError("there is not enough memory for a model of these sizes: choose smaller ones") from None
        raise
