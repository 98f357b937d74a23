"""The family of Mamba-2 models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.decoder_families import head_copy, is_tied, read_tie
from regard.exchange.model_family import Family, ModelClass, Setting, Their, read_size
from regard.exchange.recurrent_families import backbone_rules, mixer_names
from regard.exchange.tensor_rules import WEIGHT, Rule, SourceTensor, copy_layer

INFINITY = {"__float__": "Infinity"}


def mamba2_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of Mamba-2."""
    yield from backbone_rules(config, "mamba2")
    for ours, theirs in mixer_names(config):
        for own, name in (("log_a", "A_log"), ("d", "D"), ("dt_bias", "dt_bias")):
            yield Rule(f"{ours}.{own}", (SourceTensor(f"{theirs}.{name}"),))
        yield from copy_layer(f"{ours}.norm", f"{theirs}.norm", names=WEIGHT)


def mamba2_read(their: Their) -> dict[str, Any]:
    """Return the limits of step sizes and the settings that follow from several of theirs."""
    width, heads, head = (read_size(their, name) for name in ("hidden_size", "num_heads", "head_dim"))
    expand = their.get("expand", 2)
    if heads * head != expand * width:
        raise RegardError(
            f"config.json has num_heads {heads} * head_dim {head}, which must be expand {expand} * hidden_size {width}"
        )
    least, most = map(read_number, their.get("time_step_limit") or (0.0, math.inf))
    if not 0 <= least <= most or not most:
        raise RegardError(
            f"config.json has time_step_limit {[least, most]}: both must be from 0 up, the second above 0 and no less"
        )
    limits = {"mamba2.dt_least": least, "mamba2.dt_most": 0.0 if math.isinf(most) else most}
    return {**limits, **read_tie(their, False)}


def read_number(value: Any) -> float:
    """Return a number; JSON has no infinity, and transformers 5 writes INFINITY for it."""
    return math.inf if value == INFINITY else float(value)


def mamba2_write(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of `mamba2_read` in their spelling."""
    heads = config.value("mamba2.expand") * config.d_model // config.value("mamba2.d_head")
    most = config.value("mamba2.dt_most") or INFINITY
    return {
        "num_heads": heads,
        "time_step_limit": [config.value("mamba2.dt_least"), most],
        "tie_word_embeddings": is_tied(config),
    }


MAMBA2 = Family(
    name="Mamba-2",
    model_type="mamba2",
    architecture="gpt",
    task="causal-lm",
    classes={"Mamba2ForCausalLM": ModelClass(), "Mamba2Model": ModelClass(headless=True)},
    settings=(
        Setting("hidden_size", "d_model"),
        Setting("num_hidden_layers", "n_decoder_layers"),
        Setting("layer_norm_epsilon", "norm_eps", 1e-5),
        Setting("use_bias", "bias", False),
        Setting("state_size", "mamba2.d_state", 128),
        Setting("head_dim", "mamba2.d_head", 64),
        Setting("expand", "mamba2.expand", 2),
        Setting("n_groups", "mamba2.groups", 8),
        Setting("conv_kernel", "mamba2.kernel", 4),
        Setting("use_conv_bias", "mamba2.conv_bias", True),
        Setting("time_step_min", "mamba2.dt_init_least", 0.001),
        Setting("time_step_max", "mamba2.dt_init_most", 0.1),
    ),
    fixed_settings={
        "preset": "mamba2-tiny",
        "mixer": ("mamba2",),
        "norm": "pre",
        "norm_kind": "rms",
        "positions": "none",
        "scale_embeddings": False,
        "dropout": 0.0,
        "d_ff": 0,
    },
    supported_values={"hidden_act": ("silu", "swish")},
    rules=mamba2_rules,
    prefix="backbone.",
    copies=lambda config: head_copy(config, "backbone.embeddings.weight"),
    old_names=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    read_settings=mamba2_read,
    write_settings=mamba2_write,
    custom_settings=("mamba2.dt_least", "mamba2.dt_most", "preset", "dropout", "n_heads", "n_kv_heads", "d_head"),
    derived_settings=lambda config: {},
)
