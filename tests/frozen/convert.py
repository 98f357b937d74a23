"""What commit 0802df8 called things and how it laid them out, in the words and layouts of the code under test.

The frozen data hold settings, weights and token ids as that commit had them. Where the code has changed its names or
layouts, the functions here translate. Nothing here may change a number: weights are only renamed and their rows reordered.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig

FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}
NESTED = "parts" in FIELDS  # settings of parts have tables of their own
PADDING = -1 if "eos_token_id" in FIELDS else 0  # the id that fills up a batch
GROUPED = True  # fused matrices are laid out so that they can be cut by heads

BOS, EOS, SUPPRESSED = 1, 2, [0, 1, 3, 4]  # the special tokens that commit 0802df8 fixed for every vocabulary

Settings = dict[str, Any]

# ---- settings ---------------------------------------------------------------------------------------------------------

TABLES = {
    **{"shaw_clip": "shaw.clip", "cope_positions": "cope.positions", "window": "attention.window"},
    **{"t5_buckets": "t5.buckets", "t5_max_distance": "t5.max_distance"},
    **{"trained_len": "yarn.trained_len", "yarn_slow": "yarn.slow", "yarn_fast": "yarn.fast"},
    **{"fire_width": "fire.width", "fire_threshold": "fire.threshold"},
    **{"disentangled_buckets": "disentangled.buckets", "disentangled_reach": "disentangled.reach"},
    **{"kernel": "convolution.kernel", "dilations": "convolution.dilations"},
    **{"recurrent_norm": "recurrent.norm", "reverse_source": "seq2seq.reverse_source"},
    **{name: f"recurrent.{name}" for name in ("d_hidden", "bidirectional", "variational")},
    **{name: f"recurrent.{name}" for name in ("hidden_dropout", "output_dropout", "weight_dropout", "word_dropout")},
    **{name: f"vit.{name}" for name in ("patch_size", "image_channels")},
    "rope_scaling": "rope.scaling",
}
NAMES = {"answer": "prediction_head", "score": "attention_score"}
VALUES = {"prediction_head": {"row": "sequence"}}  # setting -> old value -> new value
DECODE_NAMES = {"stop": "beam_stop"}
SHARED = {"position_base": ("base", ("sinusoidal", "rope", "yarn")), "rope_factor": ("factor", ("rope", "yarn"))}


def settings(old: Mapping[str, Any]) -> Settings:
    """Return the settings of a model, given the flat ones of commit 0802df8."""
    return nested(old) if NESTED else dict(old)


def nested(old: Mapping[str, Any]) -> Settings:
    """Return the same settings with a table for each part, and the special tokens that were fixed before."""
    new: Settings = {}
    schemes = {old[name] for name in ("positions", "encoder_positions") if name in old}
    for name, value in old.items():
        if name in SHARED:
            leaf, readers = SHARED[name]
            for scheme in sorted(schemes & set(readers)):
                new.setdefault(scheme, {})[leaf] = value
        elif name in TABLES:
            table, leaf = TABLES[name].split(".")
            new.setdefault(table, {})[leaf] = value
        elif name == "gated":
            new |= {"feedforward": "gated"} if value else {}
        else:
            name = NAMES.get(name, name)
            new[name] = VALUES.get(name, {}).get(value, value)
    if "vocab" in " ".join(old):  # a model that reads images has no vocabulary
        new |= {"eos_token_id": EOS, "suppress_tokens": SUPPRESSED}
    return new


def decode_settings(old: Mapping[str, Any]) -> Settings:
    """Return the settings of decoding, given those of commit 0802df8."""
    return {DECODE_NAMES.get(name, name): value for name, value in old.items()}


# ---- inputs -----------------------------------------------------------------------------------------------------------


def padded(ids: Tensor) -> Tensor:
    """Return a batch of ids in which -1 marks padding as the models read it."""
    return ids.where(ids >= 0, PADDING)


# ---- weights ----------------------------------------------------------------------------------------------------------

RENAMED: tuple[tuple[str, str], ...] = (
    (r"^answers\.", r"prediction_head."),
    (r"\.sublayers\.(\w+)\.sublayer\.", r".sublayers.\1."),
    (r"\.sublayers\.(\w+)\.norm\.", r".norms.\1."),
)  # (pattern, replacement) of parameter paths, tried one after the other


def weights(old: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters of a model under their names and in their layout, given those of commit 0802df8.

    `sizes` has n_heads, n_kv_heads, d_head, d_ff and gated of the model.
    """
    return {renamed(name): laid_out(name, x, sizes) for name, x in old.items()}


def renamed(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def laid_out(name: str, x: Tensor, sizes: Mapping[str, Any]) -> Tensor:
    if not GROUPED:
        return x
    if re.search(r"\.self\.sublayer\.qkv\.(weight|bias)$", name):
        return by_key_group(x, sizes["n_heads"], sizes["n_kv_heads"], sizes["d_head"])
    if re.search(r"\.cross\.sublayer\.kv\.(weight|bias)$", name):
        return by_key_head(x, sizes["n_kv_heads"], sizes["d_head"])
    if sizes["gated"] and re.search(r"\.ff\.sublayer\.inner\.(weight|bias)$", name):
        return in_blocks(x, sizes["d_ff"])
    if re.search(r"\.projection\.(weight|bias)$", name):  # DeBERTa 1: queries and keys of distances
        return in_groups(x, sizes["n_heads"], sizes["n_kv_heads"], sizes["d_head"])
    return x


def in_groups(x: Tensor, n_heads: int, n_kv_heads: int, d_head: int) -> Tensor:
    """Rows [q; k] -> for each head of keys its H/G heads of queries, then it: (G, H/G + 1, D)."""
    parts = x.split([n_heads * d_head, n_kv_heads * d_head])
    return torch.cat([part.unflatten(0, (n_kv_heads, -1, d_head)) for part in parts], 1).flatten(0, 2)


def by_key_group(x: Tensor, n_heads: int, n_kv_heads: int, d_head: int) -> Tensor:
    """Rows [q; k; v] -> for each head of keys its H/G heads of queries, then it, then its values: (G, H/G + 2, D)."""
    q, k, v = x.split([n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head])
    parts = [part.unflatten(0, (n_kv_heads, -1, d_head)) for part in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 2)


def by_key_head(x: Tensor, n_kv_heads: int, d_head: int) -> Tensor:
    """Rows [k; v] -> the keys and then the values of each head, (G, 2, D)."""
    return x.unflatten(0, (2, n_kv_heads, d_head)).transpose(0, 1).flatten(0, 2)


def in_blocks(x: Tensor, d_ff: int) -> Tensor:
    """Rows [gate; value] -> alternating blocks of c gates and c values, c the largest power of two up to 32 in d_ff."""
    c = min(32, d_ff & -d_ff)
    return x.unflatten(0, (2, d_ff // c, c)).transpose(0, 1).flatten(0, 2)
