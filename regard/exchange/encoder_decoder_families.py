"""Encoder-decoder families: T5, Switch Transformers, BART, Marian."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.model_family import ACTIVATIONS, Family, ModelClass, Setting, Their, read_size
from regard.exchange.tensor_rules import (
    TRANSPOSE,
    WEIGHT,
    Rule,
    SourceTensor,
    Step,
    Steps,
    copy_layer,
    drop_first_rows,
    drop_leading_dims,
    interleave_gates,
    interleave_kv,
    interleave_qkv,
    interleave_sinusoids,
    join_experts,
    join_layers,
    scale,
)

BOTH_SIDES = {"encoder": ("self", "ff"), "decoder": ("self", "cross", "ff")}


def is_gated(config: ModelConfig) -> bool:
    return config.feedforward == ("gated",)


def count_layers(config: ModelConfig, side: str) -> int:
    return config.n_encoder_layers if side == "encoder" else config.n_decoder_layers


# ---- T5 ---------------------------------------------------------------------------------------------------------------


def t5_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of T5."""
    yield Rule("source_embedding.weight", (SourceTensor("shared.weight"),))
    if config.tie == "inputs":
        yield Rule("head.weight", (SourceTensor("lm_head.weight"),))
    for side, parts in BOTH_SIDES.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Rule(f"{side}.schemes.0.weight", (SourceTensor(bias, (TRANSPOSE,)),))
        yield from copy_layer(f"{side}.norm", f"{side}.final_layer_norm", names=WEIGHT)
        for i in range(count_layers(config, side)):
            for n, part in enumerate(parts):
                ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer.{n}"
                yield from copy_layer(f"{ours}.norms.{part}", f"{theirs}.layer_norm", names=WEIGHT)
                if part == "ff" and "switch" in config.feedforward:
                    yield from switch_rules(f"{ours}.sublayers.{part}", f"{theirs}.mlp", config, i)
                else:
                    yield from t5_sublayer_rules(part, f"{ours}.sublayers.{part}", theirs, config)


def t5_sublayer_rules(part: str, ours: str, theirs: str, config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of a sublayer.

    T5 does not scale scores by 1/sqrt(D). Our cross-attention does, so its queries are larger here by sqrt(D).
    """
    if part == "ff" and is_gated(config):
        inner = {f"{theirs}.DenseReluDense.{name}": config.d_ff for name in ("wi_0", "wi_1")}
        yield from join_layers(f"{ours}.inner", inner, interleave_gates(config), names=WEIGHT)
    elif part == "ff":
        yield from copy_layer(f"{ours}.inner", f"{theirs}.DenseReluDense.wi", names=WEIGHT)
    if part == "ff":
        yield from copy_layer(f"{ours}.outer", f"{theirs}.DenseReluDense.wo", names=WEIGHT)
        return
    width = config.n_heads * config.d_head
    if part == "self":
        attention = f"{theirs}.SelfAttention"
        yield from join_layers(
            f"{ours}.qkv", {f"{attention}.{x}": width for x in "qkv"}, interleave_qkv(config), names=WEIGHT
        )
    else:
        attention = f"{theirs}.EncDecAttention"
        yield from copy_layer(f"{ours}.q", f"{attention}.q", (scale(config.d_head**0.5),), WEIGHT)
        yield from join_layers(
            f"{ours}.kv", {f"{attention}.{x}": width for x in "kv"}, interleave_kv(config), names=WEIGHT
        )
    yield from copy_layer(f"{ours}.out", f"{attention}.o", names=WEIGHT)


def read_dropouts(their: Their) -> dict[str, float]:
    """Return our dropouts of attention weights and inside of feed-forward layers: theirs has one rate for all."""
    rate = their.get("dropout_rate")
    return dict.fromkeys(("attention_dropout", "ff_dropout"), 0.1 if rate is None else rate)


def t5_read(their: Their) -> dict[str, Any]:
    """Return our settings of version 1.0 or 1.1, which is gated and does not scale its logits.

    Whether the head is tied is read from the tensors (see `read_head_settings`).
    """
    gate, _, act = str(their.get("feed_forward_proj", "relu")).rpartition("-")
    act = "gelu_new" if (gate, act) == ("gated", "gelu") else act
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise RegardError(f"config.json asks for feed_forward_proj {their['feed_forward_proj']!r}, which Regard lacks")
    scale = their.get("scale_decoder_outputs", their.get("tie_word_embeddings", True) is not False)
    sizes = {"n_decoder_layers": read_size(their, "num_decoder_layers", "num_layers"), **read_dropouts(their)}
    return sizes | {"feedforward": (gate or "dense",), "activation": ACTIVATIONS[act], "scale_logits": bool(scale)}


def t5_write(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of `t5_read` in their spelling."""
    act = {"gelu-tanh": "gelu_new"}.get(config.activation, config.activation)
    proj = f"gated-{act}".replace("gelu_new", "gelu") if is_gated(config) else act
    theirs = {"feed_forward_proj": proj, "num_decoder_layers": config.n_decoder_layers}
    theirs |= {"is_gated_act": is_gated(config), "dense_act_fn": act}
    return theirs | {"scale_decoder_outputs": config.scale_logits, "tie_word_embeddings": config.scale_logits}


def list_t5_copies(config: ModelConfig) -> dict[str, str]:
    """Return the tied tensors: name -> the one it equals."""
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys(names + (["lm_head.weight"] if config.tie == "all" else []), "shared.weight")


T5 = Family(
    name="T5",
    model_type="t5",
    architecture="transformer",
    task="span-corruption",
    classes={"T5ForConditionalGeneration": ModelClass(), "T5WithLMHeadModel": ModelClass()},
    settings=(
        Setting("d_model", "d_model"),
        Setting("d_kv", "d_head"),
        Setting("d_ff", "d_ff"),
        Setting("num_layers", "n_encoder_layers"),
        Setting("num_heads", "n_heads"),
        Setting("n_positions", "max_len", 512),
        Setting("relative_attention_num_buckets", "t5.buckets", 32),
        Setting("relative_attention_max_distance", "t5.max_distance", 128),
        Setting("dropout_rate", "dropout", 0.1),  # `read_dropouts` reads two more of ours from it
        Setting("layer_norm_epsilon", "norm_eps", 1e-6),
    ),
    fixed_settings={"norm": "pre", "norm_kind": "rms", "bias": False, "positions": "t5", "scale_embeddings": False},
    supported_values={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    rules=t5_rules,
    copies=list_t5_copies,
    ignored=((r"EncDecAttention\.relative_attention_bias", "left over: its cross-attention has no positions"),),
    read_settings=t5_read,
    write_settings=t5_write,
    custom_settings=("feedforward", "scale_logits"),
    find_differences=lambda config: (
        [] if config.feedforward in (("dense",), ("gated",)) else [f"feedforward is {config.feedforward!r}"]
    ),
    allowed_ties=("all", "inputs"),
    derived_settings=lambda config: {"n_kv_heads": config.n_heads},
)


# ---- Switch Transformers ------------------------------------------------------------------------------------------------

UNLIMITED = 1 << 30  # the capacity that stands for none


def switch_rules(ours: str, theirs: str, config: ModelConfig, block: int) -> Iterator[Rule]:
    """Yield the rules of the feed-forward layer of a block, dense or a mixture of experts."""
    if has_experts(config, block):
        experts = range(config.value("switch.experts"))
        yield Rule(f"{ours}.router", (SourceTensor(f"{theirs}.router.classifier.weight"),))
        names = [f"{theirs}.experts.expert_{e}" for e in experts]
        yield join_experts(f"{ours}.inner", [f"{name}.wi" for name in names], config.d_ff, len(experts))
        yield join_experts(f"{ours}.outer", [f"{name}.wo" for name in names], config.d_model, len(experts))
    else:
        yield from copy_layer(f"{ours}.inner", f"{theirs}.wi", names=WEIGHT)
        yield from copy_layer(f"{ours}.outer", f"{theirs}.wo", names=WEIGHT)


def has_experts(config: ModelConfig, block: int) -> bool:
    return config.feedforward[block % len(config.feedforward)] == "switch"


def list_sparse(layers: int, sparse: int) -> list[bool]:
    """Return which of `layers` blocks have experts, if config.json says that `sparse` of them have."""
    step = layers // sparse if sparse > 0 else layers
    return [step == 1 or i % max(step, 1) == 1 for i in range(layers)]


def switch_read(their: Their) -> dict[str, Any]:
    """Return which blocks have experts, as a list that is repeated over the blocks of both sides; capacity and tying."""
    layers = read_size(their, "num_layers"), read_size(their, "num_decoder_layers", "num_layers")
    sparse = [their.get(f"num_sparse_{side}_layers", 3) for side in ("encoder", "decoder")]
    flags = sorted((list_sparse(n, m) for n, m in zip(layers, sparse, strict=True)), key=len)
    pattern = next(
        (flags[1][:n] for n in range(1, len(flags[1]) + 1) if all(repeats(flags[1][:n], x) for x in flags)), None
    )
    if pattern is None:
        raise RegardError(
            f"config.json has experts in other blocks of the encoder than of the decoder (num_sparse_encoder_layers "
            f"{sparse[0]}, num_sparse_decoder_layers {sparse[1]}): Regard has one list for both"
        )
    if not any(pattern):
        raise RegardError(
            f"config.json has no block with experts (num_sparse_encoder_layers {sparse[0]}, num_sparse_decoder_layers "
            f"{sparse[1]}; {layers[0]} and {layers[1]} layers): Regard reads Switch Transformers that have some"
        )
    tied, capacity = bool(their.get("tie_word_embeddings", True)), read_size(their, "expert_capacity", default=64)
    return {
        "n_decoder_layers": layers[1],
        **read_dropouts(their),
        "feedforward": tuple("switch" if x else "dense" for x in pattern),
        "switch.capacity": 0 if capacity >= UNLIMITED else capacity,
        **{"tie": "all" if tied else "inputs", "scale_logits": tied},
    }


def repeats(pattern: list[bool], flags: list[bool]) -> bool:
    return all(x == pattern[i % len(pattern)] for i, x in enumerate(flags))


def find_sparse(config: ModelConfig, side: str) -> int | None:
    """Return the number of blocks with experts that `list_sparse` turns into those of the model, or None."""
    n = count_layers(config, side)
    wanted = [has_experts(config, i) for i in range(n)]
    # More than n make no block sparse, which the only block of a side is if the list begins with "dense".
    return next((m for m in range(n + 1, 0, -1) if list_sparse(n, m) == wanted), None)


def switch_write(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of `switch_read` in their spelling."""
    sparse = {f"num_sparse_{side}_layers": find_sparse(config, side) for side in BOTH_SIDES}
    capacity = config.value("switch.capacity") or UNLIMITED
    theirs = {"num_decoder_layers": config.n_decoder_layers, "expert_capacity": capacity}
    return {**sparse, **theirs, "tie_word_embeddings": config.tie == "all"}


def find_switch_differences(config: ModelConfig) -> list[str]:
    """Return what keeps a model of ours from being a Switch Transformer, in words."""
    wrong = []
    if not {*config.feedforward} <= {"dense", "switch"} or "switch" not in config.feedforward:
        wrong.append(f"feedforward is {config.feedforward!r}")
    elif any(find_sparse(config, side) is None for side in BOTH_SIDES):
        wrong.append(f"feedforward is {config.feedforward!r}: the second of every few blocks must have the experts")
    if config.scale_logits != (config.tie == "all"):
        wrong.append(f"scale_logits is {config.scale_logits} where tie is {config.tie}")
    return wrong


SWITCH = Family(
    name="Switch Transformers",
    model_type="switch_transformers",
    architecture="transformer",
    task="span-corruption",
    classes={"SwitchTransformersForConditionalGeneration": ModelClass()},
    settings=(
        *T5.settings,
        Setting("dense_act_fn", "activation", "relu", ACTIVATIONS),
        Setting("num_experts", "switch.experts", 8),
        Setting("router_jitter_noise", "switch.jitter", 0.01),
        Setting("router_aux_loss_coef", "switch.balance", 0.001),
        Setting("router_z_loss_coef", "switch.z_loss", 0.001),
    ),
    fixed_settings={**T5.fixed_settings, "switch.capacity_factor": 0.0, "switch.eval_capacity_factor": 0.0},
    supported_values={
        **T5.supported_values,
        "router_bias": (False,),
        "router_dtype": ("float32",),
        "is_gated_act": (False,),
    },
    rules=t5_rules,
    copies=list_t5_copies,
    # Without tie_word_embeddings transformers ties not even the two embeddings to each other.
    written_copies=lambda config: list_t5_copies(config) if config.tie == "inputs" else {},
    ignored=T5.ignored,
    read_settings=switch_read,
    write_settings=switch_write,
    custom_settings=("feedforward", "scale_logits", "switch.capacity"),
    find_differences=find_switch_differences,
    allowed_ties=("all", "inputs"),
    derived_settings=T5.derived_settings,
)


# ---- BART and Marian --------------------------------------------------------------------------------------------------

BART_SETTINGS = (
    Setting("d_model", "d_model"),
    Setting("encoder_layers", "n_encoder_layers"),
    Setting("decoder_layers", "n_decoder_layers"),
    Setting("encoder_attention_heads", "n_heads"),
    Setting("encoder_ffn_dim", "d_ff"),
    Setting("max_position_embeddings", "max_len", 1024),
    Setting("activation_function", "activation", "gelu", ACTIVATIONS),
    Setting("dropout", "dropout", 0.1),
    Setting("attention_dropout", "attention_dropout", 0.0),
    Setting("activation_dropout", "ff_dropout", 0.0),
    Setting("scale_embedding", "scale_embeddings", False),
)


def check_equal_sizes(their: Their) -> dict[str, Any]:
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = their.get(f"encoder_{name}"), their.get(f"decoder_{name}")
        if encoder != decoder:
            raise RegardError(f"config.json has {encoder} encoder_{name} and {decoder} decoder_{name}: Regard has one")
    return {}


def write_equal_sizes(config: ModelConfig) -> dict[str, Any]:
    return {"decoder_attention_heads": config.n_heads, "decoder_ffn_dim": config.d_ff}


def layer_rules(config: ModelConfig, columns: Steps = (), rows: Steps = ()) -> Iterator[Rule]:
    """Yield the rules of all layers.

    `columns` are the steps of weights that read the residual stream, `rows` those of weights that write to it.
    """
    for side, parts in BOTH_SIDES.items():
        for i in range(count_layers(config, side)):
            ours, theirs = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
            for part in parts:
                norm = {"self": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ff": "final_layer_norm"}
                yield from copy_layer(f"{ours}.norms.{part}", f"{theirs}.{norm[part]}", rows)
                yield from sublayer_rules(part, f"{ours}.sublayers.{part}", theirs, config, columns, rows)


def sublayer_rules(
    part: str, ours: str, theirs: str, config: ModelConfig, columns: Steps, rows: Steps
) -> Iterator[Rule]:
    """Yield the rules of a sublayer."""
    if part == "ff":
        yield from input_rules(f"{ours}.inner", {f"{theirs}.fc1": 0}, columns)
        yield from copy_layer(f"{ours}.outer", f"{theirs}.fc2", rows)
        return
    attention, width = f"{theirs}.{'self_attn' if part == 'self' else 'encoder_attn'}", config.d_model
    if part == "self":
        yield from input_rules(
            f"{ours}.qkv", {f"{attention}.{x}_proj": width for x in "qkv"}, columns, interleave_qkv(config)
        )
    else:
        yield from input_rules(f"{ours}.q", {f"{attention}.q_proj": 0}, columns)
        yield from input_rules(
            f"{ours}.kv", {f"{attention}.{x}_proj": width for x in "kv"}, columns, interleave_kv(config)
        )
    yield from copy_layer(f"{ours}.out", f"{attention}.out_proj", rows)


def input_rules(ours: str, theirs: dict[str, int], columns: Steps, *together: Step) -> Iterator[Rule]:
    for kind, steps in (("weight", columns), ("bias", ())):
        parts = (SourceTensor(f"{name}.{kind}", steps, rows) for name, rows in theirs.items())
        yield Rule(f"{ours}.{kind}", tuple(parts), steps=together)


def bart_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of BART."""
    yield Rule("source_embedding.weight", (SourceTensor("model.shared.weight"),))
    for side, norm in {"encoder": "source_norm", "decoder": "target_norm"}.items():
        table = f"model.{side}.embed_positions.weight"
        yield Rule(f"{side}.schemes.0.encoding", (SourceTensor(table, (drop_first_rows(2),)),))
        yield from copy_layer(norm, f"model.{side}.layernorm_embedding")
    yield from logit_bias_rules(config)
    yield from layer_rules(config)


def list_embedding_copies(config: ModelConfig) -> dict[str, str]:
    """Return the tied tensors: name -> the one it equals."""
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    if config.tie == "all":
        return dict.fromkeys(names, "model.shared.weight")
    return {"lm_head.weight": names[1], "model.shared.weight": names[0]}


def logit_bias_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rule of the bias of the logits. Theirs is always there; ours only where it is not all zero."""
    if config.head_bias:
        yield Rule("head.bias", (SourceTensor("final_logits_bias", (drop_leading_dims(1),)),))


def make_zero_logit_bias(config: ModelConfig) -> dict[str, Tensor]:
    return {} if config.head_bias else {"final_logits_bias": torch.zeros(1, config.target_vocab)}


BART = Family(
    name="BART",
    model_type="bart",
    architecture="transformer",
    task="denoising",
    classes={"BartForConditionalGeneration": ModelClass()},
    settings=BART_SETTINGS,
    fixed_settings={"norm": "post", "positions": "learned", "embedding_norm": True, "tie": "all"},
    supported_values={"tie_word_embeddings": (True,), "is_encoder_decoder": (True,), "normalize_before": (False,),
             "add_final_layer_norm": (False,), "normalize_embedding": (True,), "extra_pos_embeddings": (2,)},
    rules=bart_rules,
    prefix="model.",
    copies=list_embedding_copies,
    ignored=((r"^final_logits_bias$", "all zero"),),
    constants=make_zero_logit_bias,
    custom_settings=("head_bias",),
    read_settings=check_equal_sizes,
    write_settings=write_equal_sizes,
)  # fmt: skip


def marian_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of Marian.

    Marian's sinusoidal positions have all sines before all cosines; ours alternate. The channels of the whole residual
    stream are reordered instead of the positions, which changes no sum and no norm.
    """
    columns, rows = (interleave_sinusoids(config.d_model, 1),), (interleave_sinusoids(config.d_model, 0),)
    if config.tie == "all":
        yield Rule("source_embedding.weight", (SourceTensor("model.shared.weight", columns),))
    else:
        yield Rule("source_embedding.weight", (SourceTensor("model.encoder.embed_tokens.weight", columns),))
        yield Rule("target_embedding.weight", (SourceTensor("model.decoder.embed_tokens.weight", columns),))
    yield from logit_bias_rules(config)
    yield from layer_rules(config, columns, rows)


def marian_read(their: Their) -> dict[str, Any]:
    """Return which embeddings are tied. Refuse models with two vocabularies."""
    vocab, other = their.get("vocab_size"), their.get("decoder_vocab_size")
    if other not in (None, vocab):
        raise RegardError(f"config.json has a decoder_vocab_size of {other} beside {vocab}: Regard reads joint ones")
    return check_equal_sizes(their) | {
        "tie": "all" if their.get("share_encoder_decoder_embeddings", True) else "decoder"
    }


MARIAN = Family(
    name="Marian",
    model_type="marian",
    architecture="transformer",
    task="translation",
    classes={"MarianMTModel": ModelClass()},
    settings=BART_SETTINGS,
    fixed_settings={"norm": "post", "positions": "sinusoidal", "embedding_norm": False},
    supported_values={"tie_word_embeddings": (True,), "is_encoder_decoder": (True,), "static_position_embeddings": (True,),
             "normalize_before": (False,), "add_final_layer_norm": (False,), "normalize_embedding": (False,)},
    rules=marian_rules,
    prefix="model.",
    copies=list_embedding_copies,
    ignored=(
        (r"^final_logits_bias$", "all zero"),
        (r"embed_positions\.weight$", "sines and cosines, which are worked out"),
    ),
    constants=make_zero_logit_bias,
    custom_settings=("head_bias",),
    allowed_ties=("all", "decoder"),
    read_settings=marian_read,
    write_settings=lambda config: {**write_equal_sizes(config), "share_encoder_decoder_embeddings": config.tie == "all",
                          "decoder_vocab_size": None},
)  # fmt: skip
