"""Decoder-only families: GPT-2, LLaMA, BLOOM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.family import ACTIVATIONS, Family, Kind, Setting, Their, nothing, square
from regard.exchange.numbering import Numbering
from regard.exchange.rules import BOTH, TRANSPOSED, WEIGHT, Part, Rule, by_head, joined, pairs, same


def tie(their: Their, default: bool) -> dict[str, str]:
    return {"tie": "all" if their.get("tie_word_embeddings", default) else "none"}


def ends(config: ModelConfig, numbering: Numbering, embedding: str) -> Iterator[Rule]:
    """The embedding, and a head of its own where it is not tied."""
    yield Rule("embedding.weight", (Part(embedding, (numbering.inputs(),)),))
    if config.tie == "none":
        yield Rule("head.weight", (Part("lm_head.weight", (numbering.outputs(),)),))


# ---- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2_rules(config: ModelConfig, numbering: Numbering) -> Iterator[Rule]:
    yield from ends(config, numbering, "transformer.wte.weight")
    yield Rule("decoder.schemes.0.encoding", (Part("transformer.wpe.weight"),))
    yield from same("decoder.norm", "transformer.ln_f")
    for i in range(config.n_decoder_layers):
        mine, theirs = f"decoder.blocks.{i}.sublayers", f"transformer.h.{i}"
        yield from same(f"{mine}.self.norm", f"{theirs}.ln_1")
        yield from same(f"{mine}.self.sublayer.qkv", f"{theirs}.attn.c_attn", (TRANSPOSED,))
        yield from same(f"{mine}.self.sublayer.out", f"{theirs}.attn.c_proj", (TRANSPOSED,))
        yield from same(f"{mine}.ff.norm", f"{theirs}.ln_2")
        yield from same(f"{mine}.ff.sublayer.inner", f"{theirs}.mlp.c_fc", (TRANSPOSED,))
        yield from same(f"{mine}.ff.sublayer.outer", f"{theirs}.mlp.c_proj", (TRANSPOSED,))


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="gpt",
    task="causal-lm",
    kinds={"GPT2LMHeadModel": Kind(), "GPT2Model": Kind(bare=True)},
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
    copies=lambda config: {"lm_head.weight": "transformer.wte.weight"} if config.tie != "none" else {},
    ignored=((r"\.attn\.(bias|masked_bias)$", "a mask, not a weight"),),
    read=lambda their: {"d_ff": their.get("n_inner") or 4 * int(their.get("n_embd", 0)), **tie(their, True)},
    write=lambda config: {"n_inner": config.d_ff, "tie_word_embeddings": config.tie != "none"},
)


# ---- LLaMA ------------------------------------------------------------------------------------------------------------


def llama_rules(config: ModelConfig, numbering: Numbering) -> Iterator[Rule]:
    yield from ends(config, numbering, "model.embed_tokens.weight")
    yield from same("decoder.norm", "model.norm", kinds=WEIGHT)
    kinds = BOTH if config.bias else WEIGHT
    queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    turned = ((pairs(config.n_heads),), (pairs(config.n_kv_heads),), ())
    for i in range(config.n_decoder_layers):
        mine, theirs = f"decoder.blocks.{i}.sublayers", f"model.layers.{i}"
        yield from same(f"{mine}.self.norm", f"{theirs}.input_layernorm", kinds=WEIGHT)
        qkv = dict(zip((f"{theirs}.self_attn.{x}_proj" for x in "qkv"), (queries, keys, keys), strict=True))
        yield from joined(f"{mine}.self.sublayer.qkv", qkv, turned, kinds)
        yield from same(f"{mine}.self.sublayer.out", f"{theirs}.self_attn.o_proj", kinds=kinds)
        yield from same(f"{mine}.ff.norm", f"{theirs}.post_attention_layernorm", kinds=WEIGHT)
        gate = {f"{theirs}.mlp.{x}_proj": config.d_ff for x in ("gate", "up")}
        yield from joined(f"{mine}.ff.sublayer.inner", gate, kinds=kinds)
        yield from same(f"{mine}.ff.sublayer.outer", f"{theirs}.mlp.down_proj", kinds=kinds)


def llama_extra(their: Their) -> dict[str, Any]:
    """Rotary settings stand in `rope_parameters`, or in `rope_theta` and `rope_scaling` before version 5."""
    rope = their.get("rope_parameters") or their.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or their.get("rope_theta") or 10000.0
    heads = int(their.get("num_attention_heads", 1))
    ours: dict[str, Any] = {"dropout": 0.0, "position_base": base, **tie(their, False)}
    ours["n_kv_heads"] = their.get("num_key_value_heads") or heads
    ours["d_head"] = their.get("head_dim") or int(their.get("hidden_size", 0)) // heads
    if kind == "linear":
        ours |= {"rope_scaling": "linear", "rope_factor": rope["factor"]}
    elif kind != "default":
        raise RegardError(f"config.json asks for rope_type {kind!r}: Regard has default and linear")
    if their.get("attention_bias", False) != their.get("mlp_bias", False):
        raise RegardError("config.json has attention_bias and mlp_bias apart: Regard has biases everywhere or nowhere")
    return ours | {"bias": bool(their.get("attention_bias", False))}


def llama_write(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.position_base}
    if config.rope_scaling == "linear":
        rope |= {"rope_type": "linear", "factor": config.rope_factor}
    theirs = {"head_dim": config.d_head, "num_key_value_heads": config.n_kv_heads, "rope_parameters": rope}
    theirs |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    return theirs | {"tie_word_embeddings": config.tie != "none"}


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
        "gated": True,
        "positions": "rope",
        "scale_embeddings": False,
    },
    rules=llama_rules,
    prefix="model.",
    copies=lambda config: {"lm_head.weight": "model.embed_tokens.weight"} if config.tie != "none" else {},
    ignored=((r"\.rotary_emb\.inv_freq$", "angles, which are worked out"),),
    read=llama_extra,
    write=llama_write,
    free=("bias", "rope_scaling"),
    wants=nothing,
)


# ---- BLOOM ------------------------------------------------------------------------------------------------------------


def bloom_rules(config: ModelConfig, numbering: Numbering) -> Iterator[Rule]:
    yield from ends(config, numbering, "transformer.word_embeddings.weight")
    yield from same("embedding_norm", "transformer.word_embeddings_layernorm")
    yield from same("decoder.norm", "transformer.ln_f")
    for i in range(config.n_decoder_layers):
        mine, theirs = f"decoder.blocks.{i}.sublayers", f"transformer.h.{i}"
        yield from same(f"{mine}.self.norm", f"{theirs}.input_layernorm")
        qkv = f"{theirs}.self_attention.query_key_value"
        yield from same(f"{mine}.self.sublayer.qkv", qkv, (by_head(config.n_heads),))
        yield from same(f"{mine}.self.sublayer.out", f"{theirs}.self_attention.dense")
        yield from same(f"{mine}.ff.norm", f"{theirs}.post_attention_layernorm")
        yield from same(f"{mine}.ff.sublayer.inner", f"{theirs}.mlp.dense_h_to_4h")
        yield from same(f"{mine}.ff.sublayer.outer", f"{theirs}.mlp.dense_4h_to_h")


def bloom_extra(their: Their) -> dict[str, Any]:
    """Older files call the sizes by other names; there is no longest text, only the length of training."""
    width = their.get("hidden_size") or their.get("n_embed") or 0
    ours = {"d_model": width, "d_ff": 4 * int(width), "max_len": their.get("seq_length") or 2048, **tie(their, True)}
    ours["n_heads"] = their.get("n_head") or their.get("num_attention_heads") or 0
    return ours | {"n_decoder_layers": their.get("n_layer") or their.get("num_hidden_layers") or 0}


BLOOM = Family(
    name="BLOOM",
    model_type="bloom",
    architecture="gpt",
    task="causal-lm",
    kinds={"BloomForCausalLM": Kind(), "BloomModel": Kind(bare=True)},
    settings=(
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
    copies=lambda config: {"lm_head.weight": "transformer.word_embeddings.weight"} if config.tie != "none" else {},
    read=bloom_extra,
    write=lambda config: {
        "hidden_size": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_decoder_layers,
        "seq_length": config.max_len,
        "tie_word_embeddings": config.tie != "none",
    },
    wants=lambda config: {**square(config), "d_ff": 4 * config.d_model},
)
