"""Decoder-only families: GPT-2, LLaMA, BLOOM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.family import ACTIVATIONS, Family, Kind, Setting, Their, nothing, square, whole
from regard.exchange.rules import (
    BOTH,
    TRANSPOSED,
    WEIGHT,
    Part,
    Rule,
    by_group,
    check_moved,
    gates,
    joined,
    pairs,
    same,
)


def tie(their: Their, default: bool) -> dict[str, str]:
    return {"tie": "all" if their.get("tie_word_embeddings", default) else "none"}


def tied(config: ModelConfig) -> bool:
    """Whether the head is the embedding."""
    return config.tie in ("decoder", "all")


def head_copy(config: ModelConfig, embedding: str) -> dict[str, str]:
    return {"lm_head.weight": embedding} if tied(config) else {}


def ends(config: ModelConfig, embedding: str) -> Iterator[Rule]:
    """The embedding, and a head of its own where it is not tied."""
    yield Rule("embedding.weight", (Part(embedding),))
    if not tied(config) and config.answer == "none":
        yield Rule("head.weight", (Part("lm_head.weight"),))


# ---- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from ends(config, "transformer.wte.weight")
    yield Rule("decoder.schemes.0.encoding", (Part("transformer.wpe.weight"),))
    yield from same("decoder.norm", "transformer.ln_f")
    for i in range(config.n_decoder_layers):
        mine, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield from same(f"{mine}.norms.self", f"{theirs}.ln_1")
        yield from same(f"{mine}.sublayers.self.qkv", f"{theirs}.attn.c_attn", (TRANSPOSED, by_group(config)))
        yield from same(f"{mine}.sublayers.self.out", f"{theirs}.attn.c_proj", (TRANSPOSED,))
        yield from same(f"{mine}.norms.ff", f"{theirs}.ln_2")
        yield from same(f"{mine}.sublayers.ff.inner", f"{theirs}.mlp.c_fc", (TRANSPOSED,))
        yield from same(f"{mine}.sublayers.ff.outer", f"{theirs}.mlp.c_proj", (TRANSPOSED,))
    if config.answer == "row":
        yield from same("answers", "score", kinds=WEIGHT, group="answers")
        yield Rule("answers.bias", (Part("", rows=config.n_classes),), "answers")


def settle_answers(config: ModelConfig, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their answers have no bias. The last norm has one, which nothing else reads: W h + b = W (h + e) where W e = b."""
    if config.answer == "none" or not own["answers.bias"].any():
        return {}
    norm, weight, bias = "body.decoder.norm.bias", own["answers.weight"].double(), own["answers.bias"].double()
    moved = torch.linalg.lstsq(weight, bias[:, None], driver="gelsd").solution[:, 0]
    check_moved(weight @ moved, bias, moved, "answers.bias")
    return {norm: (own[norm] + moved).float(), "answers.bias": torch.zeros_like(own["answers.bias"])}


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="gpt",
    task="causal-lm",
    kinds={
        "GPT2LMHeadModel": Kind(),
        "GPT2Model": Kind(bare=True),
        "GPT2ForSequenceClassification": Kind(("body", "answers"), "row"),
    },
    settings=(
        Setting("n_embd", "d_model"),
        Setting("n_layer", "n_decoder_layers"),
        Setting("n_head", "n_heads"),
        Setting("n_positions", "max_len"),
        Setting("layer_norm_epsilon", "norm_eps", 1e-5),
        Setting("activation_function", "activation", "gelu_new", ACTIVATIONS),
        Setting("resid_pdrop", "dropout", 0.1),
        Setting("attn_pdrop", "attention_dropout", 0.1),
    ),
    style={"norm": "pre", "positions": "learned", "scale_embeddings": False},
    demands={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),  # the same numbers, in another order
        "add_cross_attention": (False,),
    },
    rules=gpt2_rules,
    prefix="transformer.",
    copies=lambda config: head_copy(config, "transformer.wte.weight"),
    ignored=((r"\.attn\.(bias|masked_bias)$", "a mask, not a weight"),),
    read=lambda their: {"d_ff": whole(their, "n_inner", default=4 * whole(their, "n_embd")), **tie(their, True)},
    write=lambda config: {"n_inner": config.d_ff, "tie_word_embeddings": tied(config)},
    settle=settle_answers,
)


# ---- LLaMA ------------------------------------------------------------------------------------------------------------


def llama_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from ends(config, "model.embed_tokens.weight")
    yield from same("decoder.norm", "model.norm", kinds=WEIGHT)
    kinds = BOTH if config.bias else WEIGHT
    queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    turned = ((pairs(config.n_heads),), (pairs(config.n_kv_heads),), ())
    for i in range(config.n_decoder_layers):
        mine, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from same(f"{mine}.norms.self", f"{theirs}.input_layernorm", kinds=WEIGHT)
        qkv = dict(zip((f"{theirs}.self_attn.{x}_proj" for x in "qkv"), (queries, keys, keys), strict=True))
        yield from joined(f"{mine}.sublayers.self.qkv", qkv, by_group(config), turned, kinds)
        yield from same(f"{mine}.sublayers.self.out", f"{theirs}.self_attn.o_proj", kinds=kinds)
        yield from same(f"{mine}.norms.ff", f"{theirs}.post_attention_layernorm", kinds=WEIGHT)
        gate = {f"{theirs}.mlp.{x}_proj": config.d_ff for x in ("gate", "up")}
        yield from joined(f"{mine}.sublayers.ff.inner", gate, gates(config), kinds=kinds)
        yield from same(f"{mine}.sublayers.ff.outer", f"{theirs}.mlp.down_proj", kinds=kinds)


def llama_extra(their: Their) -> dict[str, Any]:
    """Rotary settings stand in `rope_parameters`, or in `rope_theta` and `rope_scaling` before version 5."""
    rope = their.get("rope_parameters") or their.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise RegardError(
            f"config.json has rope_parameters {rope!r}, which must be an object such as {{'rope_type': ...}}"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or their.get("rope_theta") or 10000.0
    heads = whole(their, "num_attention_heads")
    ours: dict[str, Any] = {"dropout": 0.0, "rope.base": base, **tie(their, False)}
    ours["n_kv_heads"] = whole(their, "num_key_value_heads", default=heads)
    ours["d_head"] = whole(their, "head_dim", default=whole(their, "hidden_size") // heads)
    if kind == "linear":
        if "factor" not in rope:
            raise RegardError(
                "config.json asks for rope_type 'linear' without a factor: add the one it was trained with"
            )
        ours |= {"rope.scaling": "linear", "rope.factor": rope["factor"]}
    elif kind != "default":
        raise RegardError(f"config.json asks for rope_type {kind!r}: Regard has default and linear")
    if their.get("attention_bias", False) != their.get("mlp_bias", False):
        raise RegardError("config.json has attention_bias and mlp_bias apart: Regard has biases everywhere or nowhere")
    return ours | {"bias": bool(their.get("attention_bias", False))}


def llama_write(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.value("rope.base")}
    if config.value("rope.scaling") == "linear":
        rope |= {"rope_type": "linear", "factor": config.value("rope.factor")}
    theirs = {"head_dim": config.d_head, "num_key_value_heads": config.n_kv_heads, "rope_parameters": rope}
    theirs |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    return theirs | {"tie_word_embeddings": tied(config)}


LLAMA = Family(
    name="LLaMA",
    model_type="llama",
    architecture="gpt",
    task="causal-lm",
    kinds={"LlamaForCausalLM": Kind(), "LLaMAForCausalLM": Kind()},
    settings=(
        Setting("hidden_size", "d_model"),
        Setting("num_hidden_layers", "n_decoder_layers"),
        Setting("num_attention_heads", "n_heads"),
        Setting("intermediate_size", "d_ff"),
        Setting("max_position_embeddings", "max_len", 2048),
        Setting("rms_norm_eps", "norm_eps", 1e-6),
        Setting("hidden_act", "activation", "silu", ACTIVATIONS),
        Setting("attention_dropout", "attention_dropout", 0.0),
    ),
    style={
        "norm": "pre",
        "norm_kind": "rms",
        "feedforward": "gated",
        "positions": "rope",
        "scale_embeddings": False,
    },
    rules=llama_rules,
    prefix="model.",
    copies=lambda config: head_copy(config, "model.embed_tokens.weight"),
    ignored=((r"\.rotary_emb\.inv_freq$", "angles, which are worked out"),),
    read=llama_extra,
    write=llama_write,
    free=("bias", "rope.base", "rope.scaling", "rope.factor"),
    wants=nothing,
)


# ---- BLOOM ------------------------------------------------------------------------------------------------------------


def bloom_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from ends(config, "transformer.word_embeddings.weight")
    yield from same("embedding_norm", "transformer.word_embeddings_layernorm")
    yield from same("decoder.norm", "transformer.ln_f")
    for i in range(config.n_decoder_layers):
        mine, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield from same(f"{mine}.norms.self", f"{theirs}.input_layernorm")
        yield from same(
            f"{mine}.sublayers.self.qkv", f"{theirs}.self_attention.query_key_value"
        )  # head by head there too
        yield from same(f"{mine}.sublayers.self.out", f"{theirs}.self_attention.dense")
        yield from same(f"{mine}.norms.ff", f"{theirs}.post_attention_layernorm")
        yield from same(f"{mine}.sublayers.ff.inner", f"{theirs}.mlp.dense_h_to_4h")
        yield from same(f"{mine}.sublayers.ff.outer", f"{theirs}.mlp.dense_4h_to_h")


def bloom_extra(their: Their) -> dict[str, Any]:
    return {"d_ff": 4 * whole(their, "hidden_size", "n_embed"), **tie(their, True)}


BLOOM = Family(
    name="BLOOM",
    model_type="bloom",
    architecture="gpt",
    task="causal-lm",
    kinds={"BloomForCausalLM": Kind(), "BloomModel": Kind(bare=True)},
    settings=(
        Setting("hidden_size", "d_model", older="n_embed"),
        Setting("n_head", "n_heads", older="num_attention_heads"),
        Setting("n_layer", "n_decoder_layers", older="num_hidden_layers"),
        Setting("seq_length", "max_len", 2048),  # there is no longest text, only the length of training
        Setting("layer_norm_epsilon", "norm_eps", 1e-5),
        Setting("hidden_dropout", "dropout", 0.0),
        Setting("attention_dropout", "attention_dropout", 0.0),
    ),
    style={
        "norm": "pre",
        "positions": "alibi",
        "scale_embeddings": False,
        "embedding_norm": True,
        "activation": "gelu-tanh",
    },
    demands={"apply_residual_connection_post_layernorm": (False,)},
    rules=bloom_rules,
    prefix="transformer.",
    copies=lambda config: head_copy(config, "transformer.word_embeddings.weight"),
    read=bloom_extra,
    write=lambda config: {"tie_word_embeddings": tied(config)},
    wants=lambda config: {**square(config), "d_ff": 4 * config.d_model},
)
