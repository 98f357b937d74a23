"""DeBERTa: version 3 (whose class is called V2) and version 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.encoders import DEMANDS, SIZES, STYLE, bert_head, embeddings, head_copies, layers
from regard.exchange.encoders import IGNORED as BERT_IGNORED
from regard.exchange.family import Family, Kind, Setting, Their, whole
from regard.exchange.rules import Part, Rule, by_group, check_moved, same, turns
from regard.kernels.weight_layout import deinterleave_rows, interleave_rows

SETTINGS = (
    *(setting for setting in SIZES if setting.theirs != "layer_norm_eps"),
    Setting("layer_norm_eps", "norm_eps", 1e-7),
    Setting("max_position_embeddings", "max_len", 512),
    Setting("type_vocab_size", "token_types", 0),
)
DISENTANGLED = {**STYLE, "encoder_positions": "disentangled"}
del DISENTANGLED["positions"]
ASKED: dict[str, tuple[Any, ...]] = {
    **DEMANDS,
    "relative_attention": (True,),
    "position_biased_input": (False,),
    "conv_kernel_size": (0,),
}
IGNORED = (
    *BERT_IGNORED,
    (r"^mask_predictions\.", "the head that tells replaced tokens, which Regard does not have"),
    (r"embeddings\.position_embeddings\.weight$", "absolute positions, which this model does not read"),
)
# Microsoft's own files have the head under another name; it does the same.
OLDER = (
    (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
)


def distances(their: Their) -> dict[str, Any]:
    """How far distances are told apart, and that both kinds of scores are there."""
    kinds = their.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if {kind.strip() for kind in kinds} != {"c2p", "p2c"}:
        raise RegardError(f"config.json asks for pos_att_type {kinds}: Regard's DeBERTa has c2p and p2c together")
    reach = int(their.get("max_relative_positions", -1))
    return {"disentangled.reach": reach if reach >= 1 else whole(their, "max_position_embeddings", default=512)}


def write_distances(config: ModelConfig) -> dict[str, Any]:
    return {"max_relative_positions": config.value("disentangled.reach"), "pos_att_type": ["p2c", "c2p"]}


def shared(config: ModelConfig) -> Iterator[Rule]:
    yield from embeddings("deberta", config)
    yield Rule("encoder.schemes.0.distances.table", (Part("deberta.encoder.rel_embeddings.weight"),))
    yield from bert_head()


# ---- version 3 --------------------------------------------------------------------------------------------------------


def rules_of_3(config: ModelConfig) -> Iterator[Rule]:
    yield from shared(config)
    yield from same("encoder.schemes.0.distances.norm", "deberta.encoder.LayerNorm")
    yield from layers("deberta", config, ("query_proj", "key_proj", "value_proj"))


DEBERTA2 = Family(
    name="DeBERTa-v3",
    model_type="deberta-v2",
    architecture="bert",
    task="masked-lm",
    kinds={"DebertaV2ForMaskedLM": Kind(("body", "masked")), "DebertaV2Model": Kind(bare=True)},
    settings=(*SETTINGS, Setting("position_buckets", "disentangled.buckets")),
    style=DISENTANGLED,
    demands={**ASKED, "share_att_key": (True,), "norm_rel_ebd": ("layer_norm",)},
    rules=rules_of_3,
    prefix="deberta.",
    copies=lambda config: head_copies("deberta", "cls.predictions"),
    older=OLDER,
    ignored=IGNORED,
    read=distances,
    write=write_distances,
    free=("disentangled.reach",),
    said={"legacy": True},
)


# ---- version 1 --------------------------------------------------------------------------------------------------------


def rules_of_1(config: ModelConfig) -> Iterator[Rule]:
    """Queries, keys and values are head by head in one matrix, as here; keys have no bias (see `settle_keys`)."""
    yield from shared(config)
    yield from layers("deberta", config, ())
    width = config.d_model
    for i in range(config.n_encoder_layers):
        mine, theirs = f"encoder.blocks.{i}.sublayers.self.qkv", f"deberta.encoder.layer.{i}.attention.self"
        yield Rule(f"{mine}.weight", (Part(f"{theirs}.in_proj.weight"),))
        bias = (Part(f"{theirs}.q_bias", rows=width), Part("", rows=width), Part(f"{theirs}.v_bias", rows=width))
        yield Rule(f"{mine}.bias", bias, steps=(by_group(config),))
        own = f"encoder.schemes.{i}.projection"
        matrices = (Part(f"{theirs}.{name}.weight", rows=width) for name in ("pos_q_proj", "pos_proj"))
        by_head = (turns("by head", config.n_heads, 1, 1),)
        yield Rule(f"{own}.weight", tuple(matrices), steps=by_head)
        queries = (Part(f"{theirs}.pos_q_proj.bias", rows=width), Part("", rows=width))
        yield Rule(f"{own}.bias", queries, steps=by_head)


def settle_keys(config: ModelConfig, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their keys have no bias. Without one, the same comes out of a block whose input is larger by e, where W_k e is that
    bias: what else reads the input has biases that take e away again. A bias of positions' keys adds one number to all
    scores of a query, which its softmax does not see."""
    new, heads = dict(own), config.n_heads
    keys = torch.arange(3 * config.d_model).view(heads, 3, config.d_head)[:, 1].flatten()  # their rows
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
        check_moved(weight[keys] @ moved, bias[keys], moved, f"{attention}.qkv.bias")
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
    kinds={"DebertaForMaskedLM": Kind(("body", "masked")), "DebertaModel": Kind(bare=True)},
    settings=SETTINGS,
    style={**DISENTANGLED, "disentangled.buckets": 0},
    demands={**ASKED, "talking_head": (False,), "share_att_key": (False,)},
    rules=rules_of_1,
    prefix="deberta.",
    copies=lambda config: head_copies("deberta", "cls.predictions"),
    older=OLDER,
    ignored=IGNORED,
    read=distances,
    write=write_distances,
    free=("disentangled.reach",),
    said={"legacy": True},
    settle=settle_keys,
)
