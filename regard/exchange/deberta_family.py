"""The DeBERTa family: version 3 (whose model type is deberta-v2) and version 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.encoder_families import (
    FIXED_SETTINGS,
    SUPPORTED_VALUES,
    bert_head_rules,
    embedding_rules,
    layer_rules,
    list_head_copies,
)
from regard.exchange.encoder_families import IGNORED as BERT_IGNORED
from regard.exchange.encoder_families import SETTINGS as BERT_SETTINGS
from regard.exchange.model_family import Family, ModelClass, Setting, Their, read_size
from regard.exchange.tensor_rules import Rule, SourceTensor, check_absorbed, copy_layer, interleave, interleave_qkv
from regard.kernels.weight_layout import deinterleave_rows, interleave_rows

SETTINGS = (
    *(setting for setting in BERT_SETTINGS if setting.theirs != "layer_norm_eps"),
    Setting("layer_norm_eps", "norm_eps", 1e-7),
    Setting("max_position_embeddings", "max_len", 512),
    Setting("type_vocab_size", "token_types", 0),
)
FIXED = {**FIXED_SETTINGS, "encoder_positions": "disentangled"}
del FIXED["positions"]
SUPPORTED: dict[str, tuple[Any, ...]] = {
    **SUPPORTED_VALUES,
    "relative_attention": (True,),
    "position_biased_input": (False,),
    "conv_kernel_size": (0,),
}
IGNORED = (
    *BERT_IGNORED,
    (r"^mask_predictions\.", "the head that tells replaced tokens, which Regard does not have"),
    (r"embeddings\.position_embeddings\.weight$", "absolute positions, which this model does not read"),
)
# Names of the head in Microsoft's own files.
OLD_NAMES = (
    (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
)


def read_distances(their: Their) -> dict[str, Any]:
    """Return the largest relative distance. Refuse models without both kinds of disentangled scores."""
    kinds = their.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if {kind.strip() for kind in kinds} != {"c2p", "p2c"}:
        raise RegardError(f"config.json asks for pos_att_type {kinds}: Regard's DeBERTa has c2p and p2c together")
    reach = int(their.get("max_relative_positions", -1))
    return {"disentangled.reach": reach if reach >= 1 else read_size(their, "max_position_embeddings", default=512)}


def write_distances(config: ModelConfig) -> dict[str, Any]:
    return {"max_relative_positions": config.value("disentangled.reach"), "pos_att_type": ["p2c", "c2p"]}


def shared_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules that both versions share."""
    yield from embedding_rules("deberta", config)
    yield Rule("encoder.schemes.0.distances.table", (SourceTensor("deberta.encoder.rel_embeddings.weight"),))
    yield from bert_head_rules()


# ---- version 3 --------------------------------------------------------------------------------------------------------


def deberta3_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of version 3, whose layers share one normalized table of relative positions."""
    yield from shared_rules(config)
    yield from copy_layer("encoder.schemes.0.distances.norm", "deberta.encoder.LayerNorm")
    yield from layer_rules("deberta", config, ("query_proj", "key_proj", "value_proj"))


DEBERTA2 = Family(
    name="DeBERTa-v3",
    model_type="deberta-v2",
    architecture="bert",
    task="masked-lm",
    classes={"DebertaV2ForMaskedLM": ModelClass(("body", "masked")), "DebertaV2Model": ModelClass(headless=True)},
    settings=(*SETTINGS, Setting("position_buckets", "disentangled.buckets")),
    fixed_settings=FIXED,
    supported_values={**SUPPORTED, "share_att_key": (True,), "norm_rel_ebd": ("layer_norm",)},
    rules=deberta3_rules,
    prefix="deberta.",
    copies=lambda config: list_head_copies("deberta", "cls.predictions"),
    old_names=OLD_NAMES,
    ignored=IGNORED,
    read_settings=read_distances,
    write_settings=write_distances,
    custom_settings=("disentangled.reach",),
    extra_settings={"legacy": True},
)


# ---- version 1 --------------------------------------------------------------------------------------------------------


def deberta1_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of version 1.

    One matrix holds queries, keys and values, interleaved by head as ours; keys have no bias (see `absorb_key_bias`).
    """
    yield from shared_rules(config)
    yield from layer_rules("deberta", config, ())
    width = config.d_model
    for i in range(config.n_encoder_layers):
        ours, theirs = f"encoder.blocks.{i}.sublayers.self.qkv", f"deberta.encoder.layer.{i}.attention.self"
        yield Rule(f"{ours}.weight", (SourceTensor(f"{theirs}.in_proj.weight"),))
        bias = (
            SourceTensor(f"{theirs}.q_bias", rows=width),
            SourceTensor("", rows=width),
            SourceTensor(f"{theirs}.v_bias", rows=width),
        )
        yield Rule(f"{ours}.bias", bias, steps=(interleave_qkv(config),))
        scheme = f"encoder.schemes.{i}.projection"
        matrices = (SourceTensor(f"{theirs}.{name}.weight", rows=width) for name in ("pos_q_proj", "pos_proj"))
        by_head = (interleave("by head", config.n_heads, 1, 1),)
        yield Rule(f"{scheme}.weight", tuple(matrices), steps=by_head)
        queries = (SourceTensor(f"{theirs}.pos_q_proj.bias", rows=width), SourceTensor("", rows=width))
        yield Rule(f"{scheme}.bias", queries, steps=by_head)


def absorb_key_bias(config: ModelConfig, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors changed so that keys need no bias, which theirs lack.

    A block computes the same without the key bias b if its input is larger by e where W_k e = b: the norm before it adds e,
    and the biases of everything else that reads the input subtract it. The bias of the position keys adds one number to all
    scores of a query, which softmax ignores, so it is set to zero.
    """
    new, heads = dict(own), config.n_heads
    keys = torch.arange(3 * config.d_model).view(heads, 3, config.d_head)[:, 1].flatten()  # the rows of the keys
    for i in range(config.n_encoder_layers):
        attention = f"encoder.blocks.{i}.sublayers.self"
        before = f"encoder.blocks.{i - 1}.norms.ff.bias" if i else "embedding_norm.bias"
        weight, bias = own[f"{attention}.qkv.weight"].double(), own[f"{attention}.qkv.bias"].double()
        positions = f"encoder.schemes.{i}.projection.bias"
        by_query, by_key = deinterleave_rows(own[positions], heads, (1, 1))
        new[positions] = interleave_rows((by_query, torch.zeros_like(by_key)), heads)
        if not bias[keys].any():
            continue
        moved = torch.linalg.lstsq(weight[keys], bias[keys, None], driver="gelsd").solution[:, 0]
        check_absorbed(weight[keys] @ moved, bias[keys], moved, f"{attention}.qkv.bias")
        less = bias - weight @ moved
        less[keys] = 0
        new |= {before: (own[before] + moved).float(), f"{attention}.qkv.bias": less.float()}
        new[f"{attention}.out.bias"] = (own[f"{attention}.out.bias"] - moved).float()
    return new


DEBERTA = Family(
    name="DeBERTa",
    model_type="deberta",
    architecture="bert",
    task="masked-lm",
    classes={"DebertaForMaskedLM": ModelClass(("body", "masked")), "DebertaModel": ModelClass(headless=True)},
    settings=SETTINGS,
    fixed_settings={**FIXED, "disentangled.buckets": 0},
    supported_values={**SUPPORTED, "talking_head": (False,), "share_att_key": (False,)},
    rules=deberta1_rules,
    prefix="deberta.",
    copies=lambda config: list_head_copies("deberta", "cls.predictions"),
    old_names=OLD_NAMES,
    ignored=IGNORED,
    read_settings=read_distances,
    write_settings=write_distances,
    custom_settings=("disentangled.reach",),
    extra_settings={"legacy": True},
    absorb=absorb_key_bias,
)
