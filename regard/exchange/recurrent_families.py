"""Decoder-only families whose memory of a text has a fixed size: Mamba and RWKV-4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.decoder_families import embedding_and_head, head_copy, is_tied, read_tie
from regard.exchange.model_family import Family, ModelClass, Setting, Their, no_values, read_size
from regard.exchange.tensor_rules import BOTH, WEIGHT, Rule, SourceTensor, Step, copy_layer, drop_leading_dims

# A depthwise convolution has one input channel in torch, which is a dimension of size 1.
ONE_INPUT = Step("without sizes of 1", lambda x: x[:, 0], lambda x: x[:, None])


# ---- Mamba ------------------------------------------------------------------------------------------------------------


def backbone_rules(config: ModelConfig, mixer: str) -> Iterator[Rule]:
    """Yield the rules that Mamba and Mamba-2 share: blocks of a norm and a mixer, its projections and its convolution."""
    yield from embedding_and_head(config, "backbone.embeddings.weight")
    yield from copy_layer("decoder.norm", "backbone.norm_f", names=WEIGHT)
    names = BOTH if config.bias else WEIGHT
    for i, (ours, theirs) in enumerate(mixer_names(config)):
        yield from copy_layer(f"decoder.blocks.{i}.norms.self", f"backbone.layers.{i}.norm", names=WEIGHT)
        yield from copy_layer(f"{ours}.inner", f"{theirs}.in_proj", names=names)
        yield from copy_layer(f"{ours}.out", f"{theirs}.out_proj", names=names)
        yield Rule(f"{ours}.convolution.weight", (SourceTensor(f"{theirs}.conv1d.weight", (ONE_INPUT,)),))
        if config.value(f"{mixer}.conv_bias"):
            yield Rule(f"{ours}.convolution.bias", (SourceTensor(f"{theirs}.conv1d.bias"),))


def mixer_names(config: ModelConfig) -> list[tuple[str, str]]:
    """Return our name and theirs of the mixer of each block."""
    return [
        (f"decoder.blocks.{i}.sublayers.self", f"backbone.layers.{i}.mixer") for i in range(config.n_decoder_layers)
    ]


def mamba_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of Mamba."""
    yield from backbone_rules(config, "mamba")
    for ours, theirs in mixer_names(config):
        yield from copy_layer(f"{ours}.select", f"{theirs}.x_proj", names=WEIGHT)
        yield from copy_layer(f"{ours}.dt", f"{theirs}.dt_proj", names=WEIGHT)
        for own, name in (("dt_bias", "dt_proj.bias"), ("A_log", "A_log"), ("D", "D")):
            yield Rule(f"{ours}.{own}", (SourceTensor(f"{theirs}.{name}"),))


def mamba_read(their: Their) -> dict[str, Any]:
    """Return our rank of step sizes and width; theirs may be "auto", and the width is a multiple of that of the model."""
    width = read_size(their, "hidden_size")
    rank, expand = their.get("time_step_rank", "auto"), read_size(their, "expand", default=2)
    inner = read_size(their, "intermediate_size", default=expand * width)
    if inner != expand * width:
        raise RegardError(
            f"config.json has intermediate_size {inner}, which must be expand {expand} times hidden_size {width}"
        )
    rank = -(-width // 16) if rank == "auto" else read_size(their, "time_step_rank")
    # The preset has no feed-forward layers: a d_ff of 0 stands for that of the preset. There is no longest text: 2048 tokens
    # were used in training.
    sizes = {"preset": "mamba-tiny", "max_len": 2048, "mamba.dt_rank": rank, "mamba.expand": expand}
    return {**sizes, "dropout": 0.0, **read_tie(their, True)}


def mamba_write(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of `mamba_read` in their spelling."""
    rank, expand = config.value("mamba.dt_rank") or -(-config.d_model // 16), config.value("mamba.expand")
    sizes = {"expand": expand, "intermediate_size": expand * config.d_model}
    return {"time_step_rank": rank, **sizes, "tie_word_embeddings": is_tied(config)}


MAMBA = Family(
    name="Mamba",
    model_type="mamba",
    architecture="gpt",
    task="causal-lm",
    classes={"MambaForCausalLM": ModelClass(), "MambaModel": ModelClass(headless=True)},
    settings=(
        Setting("hidden_size", "d_model"),
        Setting("num_hidden_layers", "n_decoder_layers"),
        Setting("state_size", "mamba.d_state", 16),
        Setting("conv_kernel", "mamba.kernel", 4),
        Setting("use_conv_bias", "mamba.conv_bias", True),
        Setting("use_bias", "bias", False),
        Setting("layer_norm_epsilon", "norm_eps", 1e-5),
        Setting("time_step_min", "mamba.dt_min", 0.001),
        Setting("time_step_max", "mamba.dt_max", 0.1),
        Setting("time_step_floor", "mamba.dt_floor", 1e-4),
    ),
    fixed_settings={
        "mixer": ("mamba",),
        "d_ff": 0,
        "norm": "pre",
        "norm_kind": "rms",
        "positions": "none",
        "scale_embeddings": False,
    },
    supported_values={"hidden_act": ("silu", "swish")},
    rules=mamba_rules,
    prefix="backbone.",
    copies=lambda config: head_copy(config, "backbone.embeddings.weight"),
    old_names=((r"backbone\.embedding\.", "backbone.embeddings."),),
    read_settings=mamba_read,
    write_settings=mamba_write,
    custom_settings=("mamba.dt_rank", "mamba.expand", "feedforward"),
    derived_settings=no_values,
)


# ---- RWKV -------------------------------------------------------------------------------------------------------------

NORM_EPS = 1e-5  # of the last norm of all models of this family
SHARE = (drop_leading_dims(2),)  # the shares of the token before are (1, 1, C) there


def rwkv_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of RWKV-4."""
    yield from embedding_and_head(config, "rwkv.embeddings.weight", "head.weight")
    yield from copy_layer("embedding_norm", "rwkv.blocks.0.pre_ln")
    yield from copy_layer("decoder.norm", "rwkv.ln_out")
    for i in range(config.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{i}", f"rwkv.blocks.{i}"
        for norm, name in (("self", "ln1"), ("ff", "ln2")):
            yield from copy_layer(f"{ours}.norms.{norm}", f"{theirs}.{name}")
        mixer, attention = f"{ours}.sublayers.self", f"{theirs}.attention"
        for mine, name in (("decay", "time_decay"), ("bonus", "time_first")):
            yield Rule(f"{mixer}.{mine}", (SourceTensor(f"{attention}.{name}"),))
        for mine, name in (("key", "key"), ("value", "value"), ("receptance", "receptance"), ("out", "output")):
            yield from copy_layer(f"{mixer}.{mine}", f"{attention}.{name}", names=WEIGHT)
        for name in ("key", "value", "receptance"):
            yield Rule(f"{mixer}.mix_{name[0]}", (SourceTensor(f"{attention}.time_mix_{name}", SHARE),))
        layer, feed = f"{ours}.sublayers.ff", f"{theirs}.feed_forward"
        for mine, name in (("inner", "key"), ("receptance", "receptance"), ("outer", "value")):
            yield from copy_layer(f"{layer}.{mine}", f"{feed}.{name}", names=WEIGHT)
        for name in ("key", "receptance"):
            yield Rule(f"{layer}.mix_{name[0]}", (SourceTensor(f"{feed}.time_mix_{name}", SHARE),))


def rwkv_read(their: Their) -> dict[str, Any]:
    """Return our inner width; the width of the time mix must be that of the model."""
    width = read_size(their, "hidden_size")
    if (eps := their.get("layer_norm_epsilon", NORM_EPS)) != NORM_EPS:
        raise RegardError(
            f"config.json has layer_norm_epsilon {eps}: RWKV of transformers has {NORM_EPS} in its last norm whatever this "
            f"setting says, and Regard has one model.norm_eps for all norms, so only {NORM_EPS} can be read"
        )
    own = read_size(their, "attention_hidden_size", default=width)
    if own != width:
        raise RegardError(f"config.json has attention_hidden_size {own}: Regard has hidden_size {width} there")
    inner = read_size(their, "intermediate_size", default=4 * width)
    return {"preset": "rwkv-tiny", "d_ff": inner, "dropout": 0.0, **read_tie(their, False)}


def rwkv_write(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of `rwkv_read` in their spelling."""
    sizes = {"attention_hidden_size": config.d_model, "intermediate_size": config.d_ff}
    return {**sizes, "tie_word_embeddings": is_tied(config)}


RWKV = Family(
    name="RWKV",
    model_type="rwkv",
    architecture="gpt",
    task="causal-lm",
    classes={"RwkvForCausalLM": ModelClass(), "RwkvModel": ModelClass(headless=True)},
    settings=(
        Setting("hidden_size", "d_model"),
        Setting("num_hidden_layers", "n_decoder_layers"),
        Setting("context_length", "max_len", 1024),
    ),
    fixed_settings={
        "mixer": ("rwkv",),
        "norm_eps": NORM_EPS,
        "feedforward": ("rwkv-channel-mix",),
        "norm": "pre",
        "positions": "none",
        "embedding_norm": True,
        "scale_embeddings": False,
    },
    rules=rwkv_rules,
    prefix="rwkv.",
    copies=lambda config: {"head.weight": "rwkv.embeddings.weight"} if is_tied(config) else {},
    read_settings=rwkv_read,
    write_settings=rwkv_write,
    # transformers halves the stream every so many layers in inference, and the weights with it, which changes nothing but
    # the rounding: such folders are read, and 0, which is never, is written.
    extra_settings={"rescale_every": 0, "layer_norm_epsilon": NORM_EPS},
    custom_settings=("d_ff",),
    derived_settings=no_values,
)
