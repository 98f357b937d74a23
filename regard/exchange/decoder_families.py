"""Decoder-only families: GPT-2, LLaMA, Mixtral, BLOOM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.model_family import (
    ACTIVATIONS,
    Family,
    ModelClass,
    Setting,
    Their,
    no_values,
    read_size,
    split_evenly,
)
from regard.exchange.tensor_rules import (
    BOTH,
    TRANSPOSE,
    WEIGHT,
    Rule,
    SourceTensor,
    check_absorbed,
    copy_layer,
    interleave_gates,
    interleave_qkv,
    interleave_rotary,
    join_experts,
    join_layers,
)


def read_tie(their: Their, default: bool) -> dict[str, str]:
    return {"tie": "all" if their.get("tie_word_embeddings", default) else "none"}


def is_tied(config: ModelConfig) -> bool:
    """Return whether the output head is the embedding."""
    return config.tie in ("decoder", "all")


def head_copy(config: ModelConfig, embedding: str) -> dict[str, str]:
    return {"lm_head.weight": embedding} if is_tied(config) else {}


def embedding_and_head(config: ModelConfig, embedding: str, head: str = "lm_head.weight") -> Iterator[Rule]:
    """Yield the rules of the embedding, and of the output head where it is not tied."""
    yield Rule("embedding.weight", (SourceTensor(embedding),))
    if not is_tied(config) and config.prediction_head == "none":
        yield Rule("head.weight", (SourceTensor(head),))


# ---- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of GPT-2, whose Conv1D layers store their weights transposed."""
    yield from embedding_and_head(config, "transformer.wte.weight")
    yield Rule("decoder.schemes.0.encoding", (SourceTensor("transformer.wpe.weight"),))
    yield from copy_layer("decoder.norm", "transformer.ln_f")
    for i in range(config.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield from copy_layer(f"{ours}.norms.self", f"{theirs}.ln_1")
        yield from copy_layer(
            f"{ours}.sublayers.self.qkv", f"{theirs}.attn.c_attn", (TRANSPOSE, interleave_qkv(config))
        )
        yield from copy_layer(f"{ours}.sublayers.self.out", f"{theirs}.attn.c_proj", (TRANSPOSE,))
        yield from copy_layer(f"{ours}.norms.ff", f"{theirs}.ln_2")
        yield from copy_layer(f"{ours}.sublayers.ff.inner", f"{theirs}.mlp.c_fc", (TRANSPOSE,))
        yield from copy_layer(f"{ours}.sublayers.ff.outer", f"{theirs}.mlp.c_proj", (TRANSPOSE,))
    if config.prediction_head == "sequence":
        yield from copy_layer("prediction_head", "score", names=WEIGHT, group="prediction_head")
        yield Rule("prediction_head.bias", (SourceTensor("", rows=config.n_classes),), "prediction_head")


def absorb_answer_bias(config: ModelConfig, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors changed so that the classification head needs no bias, which theirs lack.

    Nothing else reads the output of the last norm, so its bias can absorb b: W h + b = W (h + e) where W e = b.
    """
    if config.prediction_head == "none" or not own["prediction_head.bias"].any():
        return {}
    norm, weight, bias = (
        "body.decoder.norm.bias",
        own["prediction_head.weight"].double(),
        own["prediction_head.bias"].double(),
    )
    moved = torch.linalg.lstsq(weight, bias[:, None], driver="gelsd").solution[:, 0]
    check_absorbed(weight @ moved, bias, moved, "prediction_head.bias")
    return {norm: (own[norm] + moved).float(), "prediction_head.bias": torch.zeros_like(own["prediction_head.bias"])}


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="gpt",
    task="causal-lm",
    classes={
        "GPT2LMHeadModel": ModelClass(),
        "GPT2Model": ModelClass(headless=True),
        "GPT2ForSequenceClassification": ModelClass(("body", "prediction_head"), "sequence"),
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
    fixed_settings={"norm": "pre", "positions": "learned", "scale_embeddings": False},
    supported_values={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),  # only the order of the arithmetic differs
        "add_cross_attention": (False,),
    },
    rules=gpt2_rules,
    prefix="transformer.",
    copies=lambda config: head_copy(config, "transformer.wte.weight"),
    ignored=((r"\.attn\.(bias|masked_bias)$", "a mask, not a weight"),),
    read_settings=lambda their: {
        "d_ff": read_size(their, "n_inner", default=4 * read_size(their, "n_embd")),
        **read_tie(their, True),
    },
    write_settings=lambda config: {"n_inner": config.d_ff, "tie_word_embeddings": is_tied(config)},
    absorb=absorb_answer_bias,
)


# ---- LLaMA ------------------------------------------------------------------------------------------------------------


def llama_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of LLaMA, whose rotary pairs are (m, m + D/2) where ours are (2m, 2m + 1)."""
    yield from embedding_and_head(config, "model.embed_tokens.weight")
    yield from copy_layer("decoder.norm", "model.norm", names=WEIGHT)
    names = BOTH if config.bias else WEIGHT
    queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    turned = ((interleave_rotary(config.n_heads),), (interleave_rotary(config.n_kv_heads),), ())
    for i in range(config.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from copy_layer(f"{ours}.norms.self", f"{theirs}.input_layernorm", names=WEIGHT)
        qkv = dict(zip((f"{theirs}.self_attn.{x}_proj" for x in "qkv"), (queries, keys, keys), strict=True))
        yield from join_layers(f"{ours}.sublayers.self.qkv", qkv, interleave_qkv(config), turned, names)
        yield from copy_layer(f"{ours}.sublayers.self.out", f"{theirs}.self_attn.o_proj", names=names)
        yield from copy_layer(f"{ours}.norms.ff", f"{theirs}.post_attention_layernorm", names=WEIGHT)
        if config.feedforward == ("mixtral",):
            yield from mixtral_rules(f"{ours}.sublayers.ff", f"{theirs}.block_sparse_moe", config)
            continue
        gate = {f"{theirs}.mlp.{x}_proj": config.d_ff for x in ("gate", "up")}
        yield from join_layers(f"{ours}.sublayers.ff.inner", gate, interleave_gates(config), names=names)
        yield from copy_layer(f"{ours}.sublayers.ff.outer", f"{theirs}.mlp.down_proj", names=names)


def mixtral_rules(ours: str, theirs: str, config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of a mixture of experts: its router, and the gates w1, values w3 and outputs w2 of each expert."""
    experts = range(config.value("mixtral.experts"))
    yield Rule(f"{ours}.router", (SourceTensor(f"{theirs}.gate.weight"),))
    inner = [f"{theirs}.experts.{e}.{name}" for e in experts for name in ("w1", "w3")]
    yield join_experts(f"{ours}.inner", inner, config.d_ff, len(experts), interleave_gates(config))
    outer = [f"{theirs}.experts.{e}.w2" for e in experts]
    yield join_experts(f"{ours}.outer", outer, config.d_model, len(experts))


def llama_read(their: Their, rope_theta: float = 10000.0) -> dict[str, Any]:
    """Return our rotary settings and biases; `rope_theta` is the default of the family.

    Rotary settings are in `rope_parameters`, or in `rope_theta` and `rope_scaling` before transformers 5.
    """
    rope = their.get("rope_parameters") or their.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise RegardError(
            f"config.json has rope_parameters {rope!r}, which must be an object such as {{'rope_type': ...}}"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or their.get("rope_theta") or rope_theta
    heads = read_size(their, "num_attention_heads")
    ours: dict[str, Any] = {"dropout": 0.0, "rope.base": base, **read_tie(their, False)}
    ours["n_kv_heads"] = read_size(their, "num_key_value_heads", default=heads)
    ours["d_head"] = read_size(their, "head_dim", default=read_size(their, "hidden_size") // heads)
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
    """Return the settings of `llama_read` in their spelling."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.value("rope.base")}
    if config.value("rope.scaling") == "linear":
        rope |= {"rope_type": "linear", "factor": config.value("rope.factor")}
    theirs = {"head_dim": config.d_head, "num_key_value_heads": config.n_kv_heads, "rope_parameters": rope}
    theirs |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    return theirs | {"tie_word_embeddings": is_tied(config)}


def scaling_difference(config: ModelConfig) -> list[str]:
    """Return what no rotary type of transformers is: our "ntk" has one frequency for all lengths, theirs one for each."""
    return ["rope.scaling is 'ntk', not 'none' or 'linear'"] if config.value("rope.scaling") == "ntk" else []


LLAMA = Family(
    name="LLaMA",
    model_type="llama",
    architecture="gpt",
    task="causal-lm",
    classes={"LlamaForCausalLM": ModelClass(), "LLaMAForCausalLM": ModelClass()},
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
    fixed_settings={
        "norm": "pre",
        "norm_kind": "rms",
        "feedforward": ("gated",),
        "positions": "rope",
        "scale_embeddings": False,
    },
    rules=llama_rules,
    prefix="model.",
    copies=lambda config: head_copy(config, "model.embed_tokens.weight"),
    ignored=((r"\.rotary_emb\.inv_freq$", "angles, which are worked out"),),
    read_settings=llama_read,
    write_settings=llama_write,
    custom_settings=("bias", "rope.base", "rope.scaling", "rope.factor"),
    find_differences=scaling_difference,
    derived_settings=no_values,
)


MIXTRAL = dataclasses.replace(
    LLAMA,
    name="Mixtral",
    model_type="mixtral",
    classes={"MixtralForCausalLM": ModelClass()},
    settings=(
        *(s for s in LLAMA.settings if s.ours not in ("max_len", "norm_eps")),
        Setting("max_position_embeddings", "max_len", 131072),
        Setting("rms_norm_eps", "norm_eps", 1e-5),
        Setting("num_local_experts", "mixtral.experts", 8),
        Setting("num_experts_per_tok", "mixtral.top_k", 2),
        Setting("router_aux_loss_coef", "mixtral.balance", 0.001),
    ),
    fixed_settings={**LLAMA.fixed_settings, "feedforward": ("mixtral",), "bias": False},
    supported_values={"sliding_window": (None,), "router_jitter_noise": (0.0,)},
    old_names=((r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1."),),
    read_settings=lambda their: llama_read(their, 1e6),
    write_settings=lambda config: {k: v for k, v in llama_write(config).items() if not k.endswith("_bias")},
    custom_settings=("rope.base", "rope.scaling", "rope.factor"),
)


# ---- BLOOM ------------------------------------------------------------------------------------------------------------


def bloom_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of BLOOM."""
    yield from embedding_and_head(config, "transformer.word_embeddings.weight")
    yield from copy_layer("embedding_norm", "transformer.word_embeddings_layernorm")
    yield from copy_layer("decoder.norm", "transformer.ln_f")
    for i in range(config.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield from copy_layer(f"{ours}.norms.self", f"{theirs}.input_layernorm")
        # Their rows are interleaved by head too.
        yield from copy_layer(f"{ours}.sublayers.self.qkv", f"{theirs}.self_attention.query_key_value")
        yield from copy_layer(f"{ours}.sublayers.self.out", f"{theirs}.self_attention.dense")
        yield from copy_layer(f"{ours}.norms.ff", f"{theirs}.post_attention_layernorm")
        yield from copy_layer(f"{ours}.sublayers.ff.inner", f"{theirs}.mlp.dense_h_to_4h")
        yield from copy_layer(f"{ours}.sublayers.ff.outer", f"{theirs}.mlp.dense_4h_to_h")


def bloom_read(their: Their) -> dict[str, Any]:
    return {"d_ff": 4 * read_size(their, "hidden_size", "n_embed"), **read_tie(their, True)}


BLOOM = Family(
    name="BLOOM",
    model_type="bloom",
    architecture="gpt",
    task="causal-lm",
    classes={"BloomForCausalLM": ModelClass(), "BloomModel": ModelClass(headless=True)},
    settings=(
        Setting("hidden_size", "d_model", old_name="n_embed"),
        Setting("n_head", "n_heads", old_name="num_attention_heads"),
        Setting("n_layer", "n_decoder_layers", old_name="num_hidden_layers"),
        Setting("seq_length", "max_len", 2048),  # ALiBi has no longest text; this is the length of training
        Setting("layer_norm_epsilon", "norm_eps", 1e-5),
        Setting("hidden_dropout", "dropout", 0.0),
        Setting("attention_dropout", "attention_dropout", 0.0),
    ),
    fixed_settings={
        "norm": "pre",
        "positions": "alibi",
        "scale_embeddings": False,
        "embedding_norm": True,
        "activation": "gelu-tanh",
    },
    supported_values={"apply_residual_connection_post_layernorm": (False,)},
    rules=bloom_rules,
    prefix="transformer.",
    copies=lambda config: head_copy(config, "transformer.word_embeddings.weight"),
    read_settings=bloom_read,
    write_settings=lambda config: {"tie_word_embeddings": is_tied(config)},
    derived_settings=lambda config: {**split_evenly(config), "d_ff": 4 * config.d_model},
)
