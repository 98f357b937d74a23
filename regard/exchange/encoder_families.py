"""Encoder-only families, BERT, RoBERTa, RoFormer and ViT: the state dict mapping and the settings of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.model_family import ACTIVATIONS, Family, ModelClass, Setting, Their, read_size
from regard.exchange.tensor_rules import (
    Rule,
    SourceTensor,
    Steps,
    copy_layer,
    drop_first_rows,
    drop_leading_dims,
    interleave_qkv,
    join_layers,
)
from regard.layers.positions.absolute import sinusoids

SETTINGS = (
    Setting("hidden_size", "d_model"),
    Setting("num_hidden_layers", "n_encoder_layers"),
    Setting("num_attention_heads", "n_heads"),
    Setting("intermediate_size", "d_ff"),
    Setting("layer_norm_eps", "norm_eps", 1e-12),
    Setting("hidden_act", "activation", "gelu", ACTIVATIONS),
    Setting("hidden_dropout_prob", "dropout", 0.1),
    Setting("attention_probs_dropout_prob", "attention_dropout", 0.1),
)
FIXED_SETTINGS = {"norm": "post", "positions": "learned", "scale_embeddings": False, "embedding_norm": True}
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute", None),
    "tie_word_embeddings": (True,),
}


def embedding_rules(their: str, config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of the embeddings of tokens and token types, and of their norm."""
    yield Rule("embedding.weight", (SourceTensor(f"{their}.embeddings.word_embeddings.weight"),))
    if config.token_types:
        yield Rule("types.weight", (SourceTensor(f"{their}.embeddings.token_type_embeddings.weight"),))
    yield from copy_layer("embedding_norm", f"{their}.embeddings.LayerNorm")


def position_rules(their: str, steps: Steps = ()) -> Iterator[Rule]:
    yield Rule("encoder.schemes.0.encoding", (SourceTensor(f"{their}.embeddings.position_embeddings.weight", steps),))


QKV_NAMES = ("query", "key", "value")


def layer_rules(their: str, config: ModelConfig, qkv_names: tuple[str, ...] = QKV_NAMES) -> Iterator[Rule]:
    """Yield the rules of the layers; those of queries, keys and values only where `qkv_names` names them."""
    for i in range(config.n_encoder_layers):
        ours, theirs = f"encoder.blocks.{i}", f"{their}.encoder.layer.{i}"
        if qkv_names:
            qkv = dict.fromkeys((f"{theirs}.attention.self.{name}" for name in qkv_names), config.d_model)
            yield from join_layers(f"{ours}.sublayers.self.qkv", qkv, interleave_qkv(config))
        yield from copy_layer(f"{ours}.sublayers.self.out", f"{theirs}.attention.output.dense")
        yield from copy_layer(f"{ours}.norms.self", f"{theirs}.attention.output.LayerNorm")
        yield from copy_layer(f"{ours}.sublayers.ff.inner", f"{theirs}.intermediate.dense")
        yield from copy_layer(f"{ours}.sublayers.ff.outer", f"{theirs}.output.dense")
        yield from copy_layer(f"{ours}.norms.ff", f"{theirs}.output.LayerNorm")


def masked_head_rules(inner: str, norm: str, bias: str) -> Iterator[Rule]:
    """Yield the rules of a head of masked language modelling."""
    yield from copy_layer("head.inner", inner, group="masked")
    yield from copy_layer("head.norm", norm, group="masked")
    yield Rule("head.bias", (SourceTensor(bias),), "masked")


def bert_head_rules() -> Iterator[Rule]:
    """Yield the rules of the head of masked language modelling by BERT's names."""
    predictions = "cls.predictions"
    transform = f"{predictions}.transform"
    yield from masked_head_rules(f"{transform}.dense", f"{transform}.LayerNorm", f"{predictions}.bias")


def list_head_copies(their: str, head: str) -> dict[str, str]:
    """Return the tensors of a tied head, which older versions of transformers store a second time."""
    words = f"{their}.embeddings.word_embeddings.weight"
    return {f"{head}.decoder.weight": words, f"{head}.decoder.bias": f"{head}.bias"}


IGNORED = (
    (r"embeddings\.position_ids$", "the numbers 0, 1, 2, ..."),
    (r"embeddings\.token_type_ids$", "zeros"),
    (r"^cls\.seq_relationship\.", "the head of next-sentence prediction, which Regard does not have"),
)


# ---- BERT -------------------------------------------------------------------------------------------------------------


def bert_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of BERT."""
    yield from embedding_rules("bert", config)
    yield from position_rules("bert")
    yield from layer_rules("bert", config)
    yield from copy_layer("pooler.inner", "bert.pooler.dense", group="pooler")
    yield from bert_head_rules()
    if config.prediction_head != "none":
        yield from copy_layer("prediction_head", "classifier", group="prediction_head")


BERT = Family(
    name="BERT",
    model_type="bert",
    architecture="bert",
    task="masked-lm",
    classes={
        "BertForMaskedLM": ModelClass(("body", "masked")),
        "BertForPreTraining": ModelClass(("body", "masked", "pooler"), exported_as="BertForMaskedLM"),
        "BertModel": ModelClass(headless=True),
        "BertForSequenceClassification": ModelClass(("body", "pooler", "prediction_head"), "sequence"),
        "BertForTokenClassification": ModelClass(("body", "prediction_head"), "token"),
    },
    settings=(
        *SETTINGS,
        Setting("max_position_embeddings", "max_len", 512),
        Setting("type_vocab_size", "token_types", 2),
    ),
    fixed_settings=FIXED_SETTINGS,
    supported_values=SUPPORTED_VALUES,
    rules=bert_rules,
    prefix="bert.",
    copies=lambda config: list_head_copies("bert", "cls.predictions"),
    ignored=IGNORED,
)


# ---- RoBERTa ----------------------------------------------------------------------------------------------------------


FIRST_POSITION = 2  # RoBERTa's first position is its padding id, 1, plus one: the rows before it are never read


def roberta_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of RoBERTa."""
    yield from embedding_rules("roberta", config)
    yield from position_rules("roberta", (drop_first_rows(FIRST_POSITION),))
    yield from layer_rules("roberta", config)
    yield from masked_head_rules("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
    if config.prediction_head == "sequence":  # the first layer of its classification head is our pooler
        yield from copy_layer("pooler.inner", "classifier.dense", group="prediction_head-pooler")
        yield from copy_layer("prediction_head", "classifier.out_proj", group="prediction_head")
    else:
        yield from copy_layer("pooler.inner", "roberta.pooler.dense", group="pooler")
    if config.prediction_head == "token":
        yield from copy_layer("prediction_head", "classifier", group="prediction_head")


def read_roberta_length(their: Their) -> dict[str, Any]:
    return {"max_len": read_size(their, "max_position_embeddings", default=512) - FIRST_POSITION}


ROBERTA = Family(
    name="RoBERTa",
    model_type="roberta",
    architecture="bert",
    task="masked-lm",
    classes={
        "RobertaForMaskedLM": ModelClass(("body", "masked")),
        "RobertaModel": ModelClass(headless=True),
        "RobertaForSequenceClassification": ModelClass(
            ("body", "prediction_head-pooler", "prediction_head"), "sequence"
        ),
        "RobertaForTokenClassification": ModelClass(("body", "prediction_head"), "token"),
    },
    settings=(*SETTINGS, Setting("type_vocab_size", "token_types", 2)),
    fixed_settings=FIXED_SETTINGS,
    supported_values={**SUPPORTED_VALUES, "pad_token_id": (FIRST_POSITION - 1,)},
    rules=roberta_rules,
    prefix="roberta.",
    copies=lambda config: list_head_copies("roberta", "lm_head"),
    ignored=IGNORED,
    read_settings=read_roberta_length,
)


# ---- RoFormer ---------------------------------------------------------------------------------------------------------


def roformer_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of RoFormer."""
    yield from embedding_rules("roformer", config)
    yield from layer_rules("roformer", config)
    yield from bert_head_rules()


def check_embedding_size(their: Their) -> dict[str, Any]:
    if their.get("embedding_size") not in (None, their.get("hidden_size")):
        raise RegardError("config.json has an embedding_size other than its hidden_size: Regard's RoFormer has one")
    return {}


def make_rotary_table(config: ModelConfig) -> dict[str, Tensor]:
    table = sinusoids(config.max_len, config.d_head, config.value("rope.base"))
    return {"roformer.encoder.embed_positions.weight": torch.cat([table[:, 0::2], table[:, 1::2]], 1)}


ROFORMER = Family(
    name="RoFormer",
    model_type="roformer",
    architecture="bert",
    task="masked-lm",
    classes={"RoFormerForMaskedLM": ModelClass(("body", "masked")), "RoFormerModel": ModelClass(headless=True)},
    settings=(
        *SETTINGS,
        Setting("max_position_embeddings", "max_len", 1536),
        Setting("type_vocab_size", "token_types", 2),
    ),
    fixed_settings={**FIXED_SETTINGS, "positions": "rope"},
    supported_values={**SUPPORTED_VALUES, "rotary_value": (False,)},
    rules=roformer_rules,
    prefix="roformer.",
    copies=lambda config: list_head_copies("roformer", "cls.predictions"),
    ignored=(*IGNORED, (r"encoder\.embed_positions\.weight$", "sines and cosines, which are worked out")),
    constants=make_rotary_table,
    read_settings=check_embedding_size,
    write_settings=lambda config: {"embedding_size": config.d_model},
)


# ---- ViT --------------------------------------------------------------------------------------------------------------


def vit_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of ViT."""
    yield Rule("summary", (SourceTensor("vit.embeddings.cls_token", (drop_leading_dims(2),)),))
    yield Rule(
        "encoder.schemes.0.encoding", (SourceTensor("vit.embeddings.position_embeddings", (drop_leading_dims(1),)),)
    )
    yield from copy_layer("patches", "vit.embeddings.patch_embeddings.projection")
    for i in range(config.n_encoder_layers):
        ours, theirs = f"encoder.blocks.{i}", f"vit.encoder.layer.{i}"
        names = (f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value"))
        yield from join_layers(
            f"{ours}.sublayers.self.qkv", dict.fromkeys(names, config.d_model), interleave_qkv(config)
        )
        yield from copy_layer(f"{ours}.sublayers.self.out", f"{theirs}.attention.output.dense")
        yield from copy_layer(f"{ours}.norms.self", f"{theirs}.layernorm_before")
        yield from copy_layer(f"{ours}.sublayers.ff.inner", f"{theirs}.intermediate.dense")
        yield from copy_layer(f"{ours}.sublayers.ff.outer", f"{theirs}.output.dense")
        yield from copy_layer(f"{ours}.norms.ff", f"{theirs}.layernorm_after")
    yield from copy_layer("encoder.norm", "vit.layernorm")
    yield from copy_layer("head", "classifier", group="classifier")


def read_patch_count(their: Their) -> dict[str, Any]:
    """Return the number of positions: one for each patch of a square image, and one for the class token."""
    image, patch = read_size(their, "image_size", default=224), read_size(their, "patch_size", default=16)
    if image % patch:
        raise RegardError(f"config.json has image_size {image}, which patches of patch_size {patch} do not fill")
    return {"max_len": (image // patch) ** 2 + 1}


VIT = Family(
    name="ViT",
    model_type="vit",
    architecture="vit",
    task="image-classification",
    classes={"ViTForImageClassification": ModelClass(("body", "classifier")), "ViTModel": ModelClass(headless=True)},
    settings=(*SETTINGS, Setting("patch_size", "vit.patch_size", 16), Setting("num_channels", "vit.image_channels", 3)),
    fixed_settings={**FIXED_SETTINGS, "norm": "pre", "embedding_norm": False},
    supported_values={"qkv_bias": (True,)},
    rules=vit_rules,
    prefix="vit.",
    ignored=(
        (r"^(vit\.)?pooler\.", "a layer for other uses than classes, which Regard does not have"),
        (r"embeddings\.mask_token$", "for learning by hidden patches, which Regard does not have"),
    ),
    read_settings=read_patch_count,
    write_settings=lambda config: {"image_size": round((config.max_len - 1) ** 0.5) * config.value("vit.patch_size")},
)
