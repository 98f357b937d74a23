"""Encoder-only families: BERT, RoBERTa, RoFormer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.family import ACTIVATIONS, Family, Kind, Setting, Their, whole
from regard.exchange.rules import Part, Rule, Steps, by_group, joined, same, without_first
from regard.layers.positions.absolute import sinusoids

SIZES = (
    Setting("hidden_size", "d_model"),
    Setting("num_hidden_layers", "n_encoder_layers"),
    Setting("num_attention_heads", "n_heads"),
    Setting("intermediate_size", "d_ff"),
    Setting("layer_norm_eps", "norm_eps", 1e-12),
    Setting("hidden_act", "activation", "gelu", ACTIVATIONS),
    Setting("hidden_dropout_prob", "dropout", 0.1),
    Setting("attention_probs_dropout_prob", "attention_dropout", 0.1),
)
STYLE = {"norm": "post", "positions": "learned", "scale_embeddings": False, "embedding_norm": True}
DEMANDS: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute", None),
    "tie_word_embeddings": (True,),
}


def embeddings(their: str, config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embedding.weight", (Part(f"{their}.embeddings.word_embeddings.weight"),))
    if config.token_types:
        yield Rule("types.weight", (Part(f"{their}.embeddings.token_type_embeddings.weight"),))
    yield from same("embedding_norm", f"{their}.embeddings.LayerNorm")


def positions(their: str, steps: Steps = ()) -> Iterator[Rule]:
    yield Rule("encoder.schemes.0.encoding", (Part(f"{their}.embeddings.position_embeddings.weight", steps),))


NAMES = ("query", "key", "value")


def layers(their: str, config: ModelConfig, names: tuple[str, ...] = NAMES) -> Iterator[Rule]:
    for i in range(config.n_encoder_layers):
        mine, theirs = f"encoder.blocks.{i}", f"{their}.encoder.layer.{i}"
        if names:
            qkv = dict.fromkeys((f"{theirs}.attention.self.{name}" for name in names), config.d_model)
            yield from joined(f"{mine}.sublayers.self.qkv", qkv, by_group(config))
        yield from same(f"{mine}.sublayers.self.out", f"{theirs}.attention.output.dense")
        yield from same(f"{mine}.norms.self", f"{theirs}.attention.output.LayerNorm")
        yield from same(f"{mine}.sublayers.ff.inner", f"{theirs}.intermediate.dense")
        yield from same(f"{mine}.sublayers.ff.outer", f"{theirs}.output.dense")
        yield from same(f"{mine}.norms.ff", f"{theirs}.output.LayerNorm")


def masked_head(inner: str, norm: str, bias: str) -> Iterator[Rule]:
    yield from same("head.inner", inner, group="masked")
    yield from same("head.norm", norm, group="masked")
    yield Rule("head.bias", (Part(bias),), "masked")


def bert_head() -> Iterator[Rule]:
    predictions = "cls.predictions"
    transform = f"{predictions}.transform"
    yield from masked_head(f"{transform}.dense", f"{transform}.LayerNorm", f"{predictions}.bias")


def head_copies(their: str, head: str) -> dict[str, str]:
    """Heads that read the embedding the other way round, written out a second time by older versions."""
    words = f"{their}.embeddings.word_embeddings.weight"
    return {f"{head}.decoder.weight": words, f"{head}.decoder.bias": f"{head}.bias"}


IGNORED = (
    (r"embeddings\.position_ids$", "the numbers 0, 1, 2, ..."),
    (r"embeddings\.token_type_ids$", "zeros"),
    (r"^cls\.seq_relationship\.", "the head of next-sentence prediction, which Regard does not have"),
)


# ---- BERT -------------------------------------------------------------------------------------------------------------


def bert_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from embeddings("bert", config)
    yield from positions("bert")
    yield from layers("bert", config)
    yield from same("pooler.inner", "bert.pooler.dense", group="pooler")
    yield from bert_head()
    if config.answer != "none":
        yield from same("answers", "classifier", group="answers")


BERT = Family(
    name="BERT",
    model_type="bert",
    architecture="bert",
    task="masked-lm",
    kinds={
        "BertForMaskedLM": Kind(("body", "masked")),
        "BertForPreTraining": Kind(("body", "masked", "pooler"), out="BertForMaskedLM"),
        "BertModel": Kind(bare=True),
        "BertForSequenceClassification": Kind(("body", "pooler", "answers"), "row"),
        "BertForTokenClassification": Kind(("body", "answers"), "token"),
    },
    settings=(
        *SIZES,
        Setting("max_position_embeddings", "max_len", 512),
        Setting("type_vocab_size", "token_types", 2),
    ),
    style=STYLE,
    demands=DEMANDS,
    rules=bert_rules,
    prefix="bert.",
    copies=lambda config: head_copies("bert", "cls.predictions"),
    ignored=IGNORED,
)


# ---- RoBERTa ----------------------------------------------------------------------------------------------------------


FIRST_POSITION = 2  # RoBERTa counts positions from the id of its padding, 1, plus one: the rows below are never read


def roberta_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from embeddings("roberta", config)
    yield from positions("roberta", (without_first(FIRST_POSITION),))
    yield from layers("roberta", config)
    yield from masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
    if config.answer == "row":  # its classes are read through a layer that is our pooler
        yield from same("pooler.inner", "classifier.dense", group="answers-pooler")
        yield from same("answers", "classifier.out_proj", group="answers")
    else:
        yield from same("pooler.inner", "roberta.pooler.dense", group="pooler")
    if config.answer == "token":
        yield from same("answers", "classifier", group="answers")


def roberta_positions(their: Their) -> dict[str, Any]:
    return {"max_len": whole(their, "max_position_embeddings", default=512) - FIRST_POSITION}


ROBERTA = Family(
    name="RoBERTa",
    model_type="roberta",
    architecture="bert",
    task="masked-lm",
    kinds={
        "RobertaForMaskedLM": Kind(("body", "masked")),
        "RobertaModel": Kind(bare=True),
        "RobertaForSequenceClassification": Kind(("body", "answers-pooler", "answers"), "row"),
        "RobertaForTokenClassification": Kind(("body", "answers"), "token"),
    },
    settings=(*SIZES, Setting("type_vocab_size", "token_types", 2)),
    style=STYLE,
    demands={**DEMANDS, "pad_token_id": (FIRST_POSITION - 1,)},
    rules=roberta_rules,
    prefix="roberta.",
    copies=lambda config: head_copies("roberta", "lm_head"),
    ignored=IGNORED,
    read=roberta_positions,
)


# ---- RoFormer ---------------------------------------------------------------------------------------------------------


def roformer_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from embeddings("roformer", config)
    yield from layers("roformer", config)
    yield from bert_head()


def one_size(their: Their) -> dict[str, Any]:
    if their.get("embedding_size") not in (None, their.get("hidden_size")):
        raise RegardError("config.json has an embedding_size other than its hidden_size: Regard's RoFormer has one")
    return {}


def roformer_waves(config: ModelConfig) -> dict[str, Tensor]:
    table = sinusoids(config.max_len, config.d_head, config.value("rope.base"))
    return {"roformer.encoder.embed_positions.weight": torch.cat([table[:, 0::2], table[:, 1::2]], 1)}


ROFORMER = Family(
    name="RoFormer",
    model_type="roformer",
    architecture="bert",
    task="masked-lm",
    kinds={"RoFormerForMaskedLM": Kind(("body", "masked")), "RoFormerModel": Kind(bare=True)},
    settings=(
        *SIZES,
        Setting("max_position_embeddings", "max_len", 1536),
        Setting("type_vocab_size", "token_types", 2),
    ),
    style={**STYLE, "positions": "rope"},
    demands={**DEMANDS, "rotary_value": (False,)},
    rules=roformer_rules,
    prefix="roformer.",
    copies=lambda config: head_copies("roformer", "cls.predictions"),
    ignored=(*IGNORED, (r"encoder\.embed_positions\.weight$", "sines and cosines, which are worked out")),
    constants=roformer_waves,
    read=one_size,
    write=lambda config: {"embedding_size": config.d_model},
)
