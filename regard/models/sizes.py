"""The sizes of a model: those of its preset where none are given, and none that cannot be.

A preset has a style too, which models/architectures.py puts into a configuration; here it is there already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from regard.config import ModelConfig
from regard.errors import RegardError

SIZES = (
    *("n_encoder_layers", "n_decoder_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff"),
    *("d_hidden", "source_vocab", "target_vocab"),
)
DERIVED = ("n_kv_heads", "d_head")  # sizes that follow from others where they are 0
# Settings that only some architectures read: those of recurrent layers, of Transformer blocks, of a recurrent decoder.
RECURRENT = (
    *("cell", "d_hidden", "bidirectional", "recurrent_norm", "variational"),
    *("hidden_dropout", "output_dropout", "weight_dropout", "word_dropout"),
)
BLOCKS = (
    *("n_heads", "n_kv_heads", "d_head", "d_ff", "norm", "parallel", "norm_kind", "norm_eps", "bias", "activation"),
    *("gated", "embedding_norm", "positions", "encoder_positions", "cross_positions", "window", "mixer", "kernel"),
    *("dilations", "token_types", "attention_dropout", "ff_dropout"),
)
ALIGNMENT = ("score", "reverse_source")
RATES = (
    *("dropout", "attention_dropout", "ff_dropout"),
    *("hidden_dropout", "output_dropout", "weight_dropout", "word_dropout"),
)


def resolve_sizes(config: ModelConfig, presets: Mapping[str, Mapping[str, Any]]) -> ModelConfig:
    """Sizes left at 0 are the preset's or follow from others; impossible ones are refused."""
    if config.preset not in presets:
        raise RegardError(f"unknown model.preset '{config.preset}': choose one of {', '.join(presets)}")
    preset = presets[config.preset]
    sizes: dict[str, int] = {name: getattr(config, name) or preset[name] for name in SIZES if name in preset}
    if "n_heads" in preset:
        sizes |= heads(config, sizes)
    config = dataclasses.replace(config, architecture=preset["architecture"], **sizes)  # type: ignore[arg-type]
    check(config, sizes, preset)
    return config


def heads(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """What follows from the number of heads."""
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


def check(config: ModelConfig, sizes: Mapping[str, int], preset: Mapping[str, Any]) -> None:
    for name in (*sizes, "max_len", "trained_len", "shaw_clip", "fire_width", "disentangled_reach", "kernel"):
        least = 0 if name == "d_ff" and config.mixer == "convolution" else 1
        if getattr(config, name) < least:
            raise RegardError(f"model.{name} must be at least {least}, not {getattr(config, name)}")
    for name in RATES:
        if not 0 <= getattr(config, name) < 1:
            raise RegardError(f"model.{name} must be from 0 to below 1, not {getattr(config, name)}")
    for name in ("yarn_slow", "yarn_fast", "fire_threshold"):
        if not getattr(config, name) > 0:
            raise RegardError(f"model.{name} must be above 0, not {getattr(config, name)}")
    if not config.position_base > 1:
        raise RegardError(f"model.position_base must be above 1, not {config.position_base}: 10000 is usual")
    if not config.rope_factor >= 1:
        raise RegardError(
            f"model.rope_factor must be at least 1, not {config.rope_factor}: it stretches, never squeezes"
        )
    check_convolution(config)
    check_idle(config, preset)
    if config.n_kv_heads and config.n_heads % config.n_kv_heads:
        raise RegardError(
            f"model.n_heads {config.n_heads} cannot share model.n_kv_heads {config.n_kv_heads} evenly: "
            f"choose a divisor of the heads"
        )
    if config.t5_buckets < 4:
        raise RegardError(f"model.t5_buckets must be at least 4, not {config.t5_buckets}: 32 is usual")
    if config.t5_max_distance <= config.t5_buckets // 2:
        raise RegardError(
            f"model.t5_max_distance {config.t5_max_distance} must be above half of model.t5_buckets {config.t5_buckets}"
        )
    near = config.disentangled_buckets // 2
    if near and not 1 < near < config.disentangled_reach - 1:
        raise RegardError(
            f"model.disentangled_buckets {config.disentangled_buckets} must be 0, or at least 4 and half of it below "
            f"model.disentangled_reach {config.disentangled_reach} - 1"
        )
    if config.parallel and config.norm != "pre":
        raise RegardError("model.parallel adds sublayers that read one norm: it needs model.norm pre")


def check_convolution(config: ModelConfig) -> None:
    if not config.dilations or min(config.dilations) < 1:
        raise RegardError(f"model.dilations must be numbers from 1 on, not {list(config.dilations)}")
    if config.mixer == "convolution" and config.window:
        raise RegardError("model.window is for self-attention: convolutions see what model.kernel and dilations say")
    if config.mixer == "convolution" and config.n_encoder_layers and config.kernel % 2 == 0:
        raise RegardError(f"model.kernel must be odd, not {config.kernel}: an encoder sees as far back as ahead")


def check_idle(config: ModelConfig, preset: Mapping[str, Any]) -> None:
    """Settings of layers that this model does not have; what its preset says is no question."""
    usual = {**vars(ModelConfig()), **preset}
    for name, why in idle(config).items():
        if getattr(config, name) != usual[name]:
            raise RegardError(f"model.{name} would do nothing here, {why}: leave it out")


def idle(config: ModelConfig) -> dict[str, str]:
    """Settings that nothing reads, and why."""
    if config.mixer != "convolution":
        return dict.fromkeys(("kernel", "dilations"), "without model.mixer convolution")
    found: dict[str, str] = {}
    if not (config.n_encoder_layers and config.n_decoder_layers):  # there is no cross-attention
        found |= dict.fromkeys(("n_heads", "attention_dropout"), "where nothing is left of attention")
    if not config.d_ff:
        found |= dict.fromkeys(("activation", "gated", "ff_dropout"), "where model.d_ff is 0")
    return found
