"""Encoder-decoder families: T5, BART, Marian."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.family import ACTIVATIONS, Family, Kind, Setting, Their, whole
from regard.exchange.rules import (
    TRANSPOSED,
    WEIGHT,
    Part,
    Rule,
    Step,
    Steps,
    bare,
    by_group,
    gates,
    joined,
    keys_by_group,
    same,
    scaled,
    waves,
    without_first,
)

BOTH_SIDES = {"encoder": ("self", "ff"), "decoder": ("self", "cross", "ff")}


def gated(config: ModelConfig) -> bool:
    return config.feedforward == "gated"


def depth(config: ModelConfig, side: str) -> int:
    return config.n_encoder_layers if side == "encoder" else config.n_decoder_layers


# ---- T5 ---------------------------------------------------------------------------------------------------------------


def t5_rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("source_embedding.weight", (Part("shared.weight"),))
    if config.tie == "inputs":
        yield Rule("head.weight", (Part("lm_head.weight"),))
    for side, parts in BOTH_SIDES.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Rule(f"{side}.schemes.0.weight", (Part(bias, (TRANSPOSED,)),))
        yield from same(f"{side}.norm", f"{side}.final_layer_norm", kinds=WEIGHT)
        for i in range(depth(config, side)):
            for n, part in enumerate(parts):
                mine, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer.{n}"
                yield from same(f"{mine}.norms.{part}", f"{theirs}.layer_norm", kinds=WEIGHT)
                yield from t5_sublayer(part, f"{mine}.sublayers.{part}", theirs, config)


def t5_sublayer(part: str, mine: str, theirs: str, config: ModelConfig) -> Iterator[Rule]:
    """Its cross-attention is not scaled by 1/sqrt(D) either; ours is, so its queries are larger here."""
    if part == "ff" and gated(config):
        inner = {f"{theirs}.DenseReluDense.{name}": config.d_ff for name in ("wi_0", "wi_1")}
        yield from joined(f"{mine}.inner", inner, gates(config), kinds=WEIGHT)
    elif part == "ff":
        yield from same(f"{mine}.inner", f"{theirs}.DenseReluDense.wi", kinds=WEIGHT)
    if part == "ff":
        yield from same(f"{mine}.outer", f"{theirs}.DenseReluDense.wo", kinds=WEIGHT)
        return
    width = config.n_heads * config.d_head
    if part == "self":
        attention = f"{theirs}.SelfAttention"
        yield from joined(f"{mine}.qkv", {f"{attention}.{x}": width for x in "qkv"}, by_group(config), kinds=WEIGHT)
    else:
        attention = f"{theirs}.EncDecAttention"
        yield from same(f"{mine}.q", f"{attention}.q", (scaled(config.d_head**0.5),), WEIGHT)
        yield from joined(f"{mine}.kv", {f"{attention}.{x}": width for x in "kv"}, keys_by_group(config), kinds=WEIGHT)
    yield from same(f"{mine}.out", f"{attention}.o", kinds=WEIGHT)


def t5_extra(their: Their) -> dict[str, Any]:
    """Version 1.1 has gates and does not shrink its logits; whether its head is its own, its tensors tell."""
    gate, _, act = str(their.get("feed_forward_proj", "relu")).rpartition("-")
    act = "gelu_new" if (gate, act) == ("gated", "gelu") else act
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise RegardError(f"config.json asks for feed_forward_proj {their['feed_forward_proj']!r}, which Regard lacks")
    scale = their.get("scale_decoder_outputs", their.get("tie_word_embeddings", True) is not False)
    layers = {"n_decoder_layers": whole(their, "num_decoder_layers", "num_layers")}
    return layers | {"feedforward": gate or "dense", "activation": ACTIVATIONS[act], "scale_logits": bool(scale)}


def t5_write(config: ModelConfig) -> dict[str, Any]:
    act = {"gelu-tanh": "gelu_new"}.get(config.activation, config.activation)
    proj = f"gated-{act}".replace("gelu_new", "gelu") if gated(config) else act
    theirs = {"feed_forward_proj": proj, "num_decoder_layers": config.n_decoder_layers}
    theirs |= {"is_gated_act": gated(config), "dense_act_fn": act}
    return theirs | {"scale_decoder_outputs": config.scale_logits, "tie_word_embeddings": config.scale_logits}


def t5_copies(config: ModelConfig) -> dict[str, str]:
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys(names + (["lm_head.weight"] if config.tie == "all" else []), "shared.weight")


T5 = Family(
    name="T5",
    model_type="t5",
    architecture="transformer",
    task="spans",
    kinds={"T5ForConditionalGeneration": Kind(), "T5WithLMHeadModel": Kind()},
    settings=(
        Setting("d_model", "d_model"),
        Setting("d_kv", "d_head"),
        Setting("d_ff", "d_ff"),
        Setting("num_layers", "n_encoder_layers"),
        Setting("num_heads", "n_heads"),
        Setting("n_positions", "max_len", 512),
        Setting("relative_attention_num_buckets", "t5.buckets", 32),
        Setting("relative_attention_max_distance", "t5.max_distance", 128),
        Setting("dropout_rate", "dropout", 0.1),
        Setting("layer_norm_epsilon", "norm_eps", 1e-6),
    ),
    style={"norm": "pre", "norm_kind": "rms", "bias": False, "positions": "t5", "scale_embeddings": False},
    demands={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    rules=t5_rules,
    copies=t5_copies,
    ignored=((r"EncDecAttention\.relative_attention_bias", "left over: its cross-attention has no positions"),),
    read=t5_extra,
    write=t5_write,
    free=("feedforward", "scale_logits"),
    ties=("all", "inputs"),
    wants=lambda config: {"n_kv_heads": config.n_heads},
)


# ---- BART and Marian --------------------------------------------------------------------------------------------------

FAIRSEQ = (
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


def one_width(their: Their) -> dict[str, Any]:
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = their.get(f"encoder_{name}"), their.get(f"decoder_{name}")
        if encoder != decoder:
            raise RegardError(f"config.json has {encoder} encoder_{name} and {decoder} decoder_{name}: Regard has one")
    return {}


def both_widths(config: ModelConfig) -> dict[str, Any]:
    return {"decoder_attention_heads": config.n_heads, "decoder_ffn_dim": config.d_ff}


def layers(config: ModelConfig, columns: Steps = (), rows: Steps = ()) -> Iterator[Rule]:
    """`columns` are the steps of whatever reads the residual stream, `rows` of whatever is written to it."""
    for side, parts in BOTH_SIDES.items():
        for i in range(depth(config, side)):
            mine, theirs = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
            for part in parts:
                norm = {"self": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ff": "final_layer_norm"}
                yield from same(f"{mine}.norms.{part}", f"{theirs}.{norm[part]}", rows)
                yield from sublayer(part, f"{mine}.sublayers.{part}", theirs, config, columns, rows)


def sublayer(part: str, mine: str, theirs: str, config: ModelConfig, columns: Steps, rows: Steps) -> Iterator[Rule]:
    if part == "ff":
        yield from reading(f"{mine}.inner", {f"{theirs}.fc1": 0}, columns)
        yield from same(f"{mine}.outer", f"{theirs}.fc2", rows)
        return
    attention, width = f"{theirs}.{'self_attn' if part == 'self' else 'encoder_attn'}", config.d_model
    if part == "self":
        yield from reading(f"{mine}.qkv", {f"{attention}.{x}_proj": width for x in "qkv"}, columns, by_group(config))
    else:
        yield from reading(f"{mine}.q", {f"{attention}.q_proj": 0}, columns)
        yield from reading(f"{mine}.kv", {f"{attention}.{x}_proj": width for x in "kv"}, columns, keys_by_group(config))
    yield from same(f"{mine}.out", f"{attention}.out_proj", rows)


def reading(mine: str, theirs: dict[str, int], columns: Steps, *together: Step) -> Iterator[Rule]:
    for kind, steps in (("weight", columns), ("bias", ())):
        parts = (Part(f"{name}.{kind}", steps, rows) for name, rows in theirs.items())
        yield Rule(f"{mine}.{kind}", tuple(parts), steps=together)


def bart_rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("source_embedding.weight", (Part("model.shared.weight"),))
    for side, norm in {"encoder": "source_norm", "decoder": "target_norm"}.items():
        table = f"model.{side}.embed_positions.weight"
        yield Rule(f"{side}.schemes.0.encoding", (Part(table, (without_first(2),)),))
        yield from same(norm, f"model.{side}.layernorm_embedding")
    yield from logit_bias(config)
    yield from layers(config)


def shared_copies(config: ModelConfig) -> dict[str, str]:
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    if config.tie == "all":
        return dict.fromkeys(names, "model.shared.weight")
    return {"lm_head.weight": names[1], "model.shared.weight": names[0]}


def logit_bias(config: ModelConfig) -> Iterator[Rule]:
    """Theirs is always there; ours where it is not all zero."""
    if config.head_bias:
        yield Rule("head.bias", (Part("final_logits_bias", (bare(1),)),))


def no_bias(config: ModelConfig) -> dict[str, Tensor]:
    return {} if config.head_bias else {"final_logits_bias": torch.zeros(1, config.target_vocab)}


BART = Family(
    name="BART",
    model_type="bart",
    architecture="transformer",
    task="denoising",
    kinds={"BartForConditionalGeneration": Kind()},
    settings=FAIRSEQ,
    style={"norm": "post", "positions": "learned", "embedding_norm": True, "tie": "all"},
    demands={"tie_word_embeddings": (True,), "is_encoder_decoder": (True,), "normalize_before": (False,),
             "add_final_layer_norm": (False,), "normalize_embedding": (True,), "extra_pos_embeddings": (2,)},
    rules=bart_rules,
    prefix="model.",
    copies=shared_copies,
    ignored=((r"^final_logits_bias$", "all zero"),),
    constants=no_bias,
    free=("head_bias",),
    read=one_width,
    write=both_widths,
)  # fmt: skip


def marian_rules(config: ModelConfig) -> Iterator[Rule]:
    """Its positions are the same waves in another order, all sines before all cosines. The channels of the whole residual
    stream change places instead: every sum and every norm stays what it was."""
    columns, rows = (waves(config.d_model, 1),), (waves(config.d_model, 0),)
    words = columns
    if config.tie == "all":
        yield Rule("source_embedding.weight", (Part("model.shared.weight", words),))
    else:
        yield Rule("source_embedding.weight", (Part("model.encoder.embed_tokens.weight", words),))
        yield Rule("target_embedding.weight", (Part("model.decoder.embed_tokens.weight", words),))
    yield from logit_bias(config)
    yield from layers(config, columns, rows)


def marian_extra(their: Their) -> dict[str, Any]:
    vocab, other = their.get("vocab_size"), their.get("decoder_vocab_size")
    if other not in (None, vocab):
        raise RegardError(f"config.json has a decoder_vocab_size of {other} beside {vocab}: Regard reads joint ones")
    return one_width(their) | {"tie": "all" if their.get("share_encoder_decoder_embeddings", True) else "decoder"}


MARIAN = Family(
    name="Marian",
    model_type="marian",
    architecture="transformer",
    task="translation",
    kinds={"MarianMTModel": Kind()},
    settings=FAIRSEQ,
    style={"norm": "post", "positions": "sinusoidal", "embedding_norm": False},
    demands={"tie_word_embeddings": (True,), "is_encoder_decoder": (True,), "static_position_embeddings": (True,),
             "normalize_before": (False,), "add_final_layer_norm": (False,), "normalize_embedding": (False,)},
    rules=marian_rules,
    prefix="model.",
    copies=shared_copies,
    ignored=(
        (r"^final_logits_bias$", "all zero"),
        (r"embed_positions\.weight$", "sines and cosines, which are worked out"),
    ),
    constants=no_bias,
    free=("head_bias",),
    ties=("all", "decoder"),
    read=marian_extra,
    write=lambda config: {**both_widths(config), "share_encoder_decoder_embeddings": config.tie == "all",
                          "decoder_vocab_size": None},
)  # fmt: skip
