"""The sizes of a model: those left at 0 are filled in from the preset or derived, and impossible settings are refused.

The style of a preset is not applied here: models/architectures.py has put it into the configuration before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from regard.config import ModelConfig, RecurrentSettings
from regard.config.recipes import check_values, fields_of
from regard.config.registry import (
    ALIGNMENT,
    BLOCKS,
    MADE_OF,
    PARTS,
    RECURRENT,
    architectures_with,
    chosen_tables,
    find,
    split_names,
)
from regard.errors import RegardError
from regard.layers.block import part_at
from regard.layers.part import HEAD_SETTINGS, FeedForward, Place, check_part
from regard.layers.positions.scheme import mixers_of
from regard.layers.recurrent_feedforward import feedforward_config

SIZES = (
    *("n_encoder_layers", "n_decoder_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff"),
    *("source_vocab", "target_vocab"),
)
DERIVED = ("n_kv_heads", "d_head")  # sizes that follow from others where they are 0


def resolve_sizes(config: ModelConfig, presets: Mapping[str, Mapping[str, Any]]) -> ModelConfig:
    """Return the configuration with the sizes that are 0 filled in; refuse impossible ones.

    It then has the tables of the parts that it names, and no others.
    """
    if config.preset not in presets:
        kind = f"of the architecture {config.architecture}" if config.architecture else "known here"
        raise RegardError(f"model.preset {config.preset} is not {kind}: choose one of {', '.join(presets)}")
    preset = presets[config.preset]
    sizes: dict[str, int] = {name: getattr(config, name) or preset[name] for name in SIZES if name in preset}
    if "n_heads" in preset:
        sizes |= head_sizes(config, sizes)
    config = dataclasses.replace(config, architecture=preset["architecture"], **sizes)  # type: ignore[arg-type]
    config = dataclasses.replace(config, parts=part_settings(config, preset))
    check_sizes(config, sizes, preset)
    return config


def part_settings(config: ModelConfig, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the parts that a configuration names, by the names of their tables."""
    found = {name: config.named(name) for name in chosen_tables(vars(config))}
    recurrent = found.get("recurrent")
    if recurrent is not None and not recurrent.d_hidden:
        found["recurrent"] = dataclasses.replace(recurrent, d_hidden=preset["recurrent"]["d_hidden"])
    return found


def head_sizes(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that are derived from the number of heads."""
    d_model, n_heads, d_head = sizes["d_model"], sizes["n_heads"], sizes.get("d_head", config.d_head)
    if n_heads > 0 and d_model % n_heads and not d_head:
        raise RegardError(
            f"model.d_model {d_model} cannot be split into model.n_heads {n_heads}: "
            f"choose a width that is a multiple of the heads, or give model.d_head"
        )
    return {
        "d_head": d_head or (d_model // n_heads if n_heads > 0 else 0),
        "n_kv_heads": sizes.get("n_kv_heads", config.n_kv_heads) or n_heads,
    }


def check_sizes(config: ModelConfig, sizes: Mapping[str, int], preset: Mapping[str, Any]) -> None:
    """Refuse sizes and settings that are out of range, contradict each other or would do nothing."""
    for kind, usual in (("mixer", "attention"), ("feedforward", "dense")):
        if not getattr(config, kind):
            raise RegardError(f"model.{kind} names no part: choose one, such as {usual}")
        given, n_layers = getattr(config, kind), max(config.n_encoder_layers, config.n_decoder_layers)
        if len(given) > max(1, n_layers) and given != tuple(split_names(preset.get(kind, ()))):
            raise RegardError(
                f"model.{kind} lists {len(given)} parts, and the model has {n_layers} blocks: {given[-1]} would do nothing"
            )
    for name in sizes:
        least = 0 if name == "d_ff" else 1  # blocks may have no feed-forward layer
        if getattr(config, name) < least:
            raise RegardError(f"model.{name} must be at least {least}, not {getattr(config, name)}")
    if RECURRENT in MADE_OF.get(config.architecture, ()) and config.table(RecurrentSettings).d_hidden < 1:
        raise RegardError("model.recurrent.d_hidden must be at least 1, not 0")
    check_values(config, "model.")
    check_architecture(config)
    check_unused(config, preset)
    if config.n_kv_heads and config.n_heads % config.n_kv_heads:
        raise RegardError(
            f"model.n_heads {config.n_heads} cannot share model.n_kv_heads {config.n_kv_heads} evenly: "
            f"choose a divisor of the heads"
        )
    if config.parallel and config.norm != "pre":
        raise RegardError("model.parallel adds sublayers that read one norm: it needs model.norm pre")


def check_architecture(config: ModelConfig) -> None:
    """Refuse settings of other architectures, which would do nothing here."""
    for name, field in fields_of(ModelConfig).items():
        of = field.metadata.get("of", "")
        if of and of not in MADE_OF.get(config.architecture, (of,)) and getattr(config, name) != field.default:
            raise RegardError(
                f"model.{name} is for {', '.join(architectures_with(of))} models, and {config.preset} is a "
                f"{config.architecture}: leave it out"
            )


def check_recurrent(config: ModelConfig, preset: Mapping[str, Any]) -> None:
    """Ask the parts of a recurrent model whether they make sense; refuse connections of layers that there are not."""
    check_part("cell", config.cell, config, Place("decoder", causal=True))
    s, n_layers = config.table(RecurrentSettings), max(config.n_encoder_layers, config.n_decoder_layers)
    if s.residual > n_layers and s.residual != preset["recurrent"].get("residual"):
        raise RegardError(f"model.recurrent.residual {s.residual} would do nothing: the model has {n_layers} layers")
    if s.fast_forward and n_layers < 2:
        raise RegardError("model.recurrent.fast_forward connects layers, and this model has one layer: leave it out")
    if config.recurrent_feedforward:
        if n_layers < 2:
            raise RegardError(
                "model.recurrent_feedforward stands between recurrent layers, and this model has one layer: leave it out, "
                "or raise model.n_decoder_layers"
            )
        own, place = feedforward_config(config, s.d_hidden), Place("decoder", causal=True)
        check_part("feedforward", config.recurrent_feedforward, own, place)
        if find("feedforward", config.recurrent_feedforward).state is not FeedForward.state:
            raise RegardError(
                f"model.recurrent_feedforward {config.recurrent_feedforward} keeps a state between steps, which only blocks "
                f"have: choose another"
            )
    else:
        for name in ("d_ff", "activation", "ff_dropout"):
            if getattr(s, name) != getattr(RecurrentSettings(), name):
                raise RegardError(
                    f"model.recurrent.{name} is for model.recurrent_feedforward, which names no part: leave it out"
                )
    if ALIGNMENT in MADE_OF.get(config.architecture, ()) and config.attention_score in PARTS["attention_score"]:
        check_part("attention_score", config.attention_score, config, Place("cross"))


def check_parts(config: ModelConfig, sides: tuple[str, ...]) -> None:
    """Ask every part of a stack of blocks whether it makes sense on its side: encoder, decoder, or cross between them."""
    for side in sides:
        place = Place(side, causal=side == "decoder")
        check_part("positions", config.positions_at(side), config, place)
        if side == "cross":
            continue
        for kind in ("mixer", *(("feedforward",) if config.d_ff else ())):
            for i in range(len(getattr(config, kind))):
                name, _, own = part_at(kind, config, dataclasses.replace(place, index=i))
                check_part(kind, name, config, own)


def check_unused(config: ModelConfig, preset: Mapping[str, Any]) -> None:
    """Refuse settings of layers that this model does not have, unless the value is the default or the preset's."""
    usual = {**vars(ModelConfig()), **preset}
    derived = {"n_kv_heads": config.n_heads, "d_head": config.d_model // max(1, config.n_heads)}
    for name, why in unused_settings(config).items():
        if getattr(config, name) not in (usual[name], derived.get(name)):
            raise RegardError(f"model.{name} would do nothing here, {why}: leave it out")


def unused_settings(config: ModelConfig) -> dict[str, str]:
    """Return the settings that no layer reads, and why."""
    found: dict[str, str] = {}
    if BLOCKS not in MADE_OF.get(config.architecture, ()):
        return found
    crosses = config.n_encoder_layers and config.n_decoder_layers
    if not crosses:
        read = {name for mixer in mixers_of(config) for name in mixer.reads}
        why = f"where model.mixer is {', '.join(dict.fromkeys(config.mixer))}"
        found |= dict.fromkeys((name for name in HEAD_SETTINGS if name not in read), why)
    if not crosses:
        found["cross_positions"] = "where there is no cross-attention"
    if not config.n_encoder_layers:
        found["encoder_positions"] = "where there is no encoder"
    if not config.d_ff:
        found |= dict.fromkeys(("activation", "feedforward", "ff_dropout", "parallel"), "where model.d_ff is 0")
    elif not any("activation" in find("feedforward", name).reads for name in config.feedforward):
        found["activation"] = f"where model.feedforward is {', '.join(dict.fromkeys(config.feedforward))}"
    return found
