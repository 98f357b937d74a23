"""ViT, whose words are patches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange.encoders import SIZES, STYLE
from regard.exchange.family import Family, Kind, Setting, Their, whole
from regard.exchange.rules import Part, Rule, bare, by_group, joined, same


def vit_rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("summary", (Part("vit.embeddings.cls_token", (bare(2),)),))
    yield Rule("encoder.schemes.0.encoding", (Part("vit.embeddings.position_embeddings", (bare(1),)),))
    yield from same("patches", "vit.embeddings.patch_embeddings.projection")
    for i in range(config.n_encoder_layers):
        mine, theirs = f"encoder.blocks.{i}", f"vit.encoder.layer.{i}"
        names = (f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value"))
        yield from joined(f"{mine}.sublayers.self.qkv", dict.fromkeys(names, config.d_model), by_group(config))
        yield from same(f"{mine}.sublayers.self.out", f"{theirs}.attention.output.dense")
        yield from same(f"{mine}.norms.self", f"{theirs}.layernorm_before")
        yield from same(f"{mine}.sublayers.ff.inner", f"{theirs}.intermediate.dense")
        yield from same(f"{mine}.sublayers.ff.outer", f"{theirs}.output.dense")
        yield from same(f"{mine}.norms.ff", f"{theirs}.layernorm_after")
    yield from same("encoder.norm", "vit.layernorm")
    yield from same("head", "classifier", group="classifier")


def vit_patches(their: Their) -> dict[str, Any]:
    """Square images alone: a position for each patch, and one for the summary."""
    image, patch = whole(their, "image_size", default=224), whole(their, "patch_size", default=16)
    if image % patch:
        raise RegardError(f"config.json has image_size {image}, which patches of patch_size {patch} do not fill")
    return {"max_len": (image // patch) ** 2 + 1}


VIT = Family(
    name="ViT",
    model_type="vit",
    architecture="vit",
    task="images",
    kinds={"ViTForImageClassification": Kind(("body", "classifier")), "ViTModel": Kind(bare=True)},
    settings=(*SIZES, Setting("patch_size", "vit.patch_size", 16), Setting("num_channels", "vit.image_channels", 3)),
    style={**STYLE, "norm": "pre", "embedding_norm": False},
    demands={"qkv_bias": (True,)},
    rules=vit_rules,
    prefix="vit.",
    ignored=(
        (r"^(vit\.)?pooler\.", "a layer for other uses than classes, which Regard does not have"),
        (r"embeddings\.mask_token$", "for learning by hidden patches, which Regard does not have"),
    ),
    read=vit_patches,
    write=lambda config: {"image_size": round((config.max_len - 1) ** 0.5) * config.value("vit.patch_size")},
)
