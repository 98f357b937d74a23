"""Tiny models of several kinds, and models with the settings of foreign families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tokens import SETTINGS

from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_ff": 16, "max_len": 32, "dropout": 0.0, **SETTINGS}
FAMILIES = ("gpt2", "llama", "bloom", "bert", "t5", "marian")


def tokenizer() -> Tokenizer:
    return Tokenizer.train(["abcdefgh"], TokenizerConfig(kind="char", vocab_size=100))


def package_of(config: ModelConfig, task: str, **more: Any) -> ModelPackage:
    torch.manual_seed(0)
    one = tokenizer()
    sizes = {f"{side}_vocab": len(one) for side in ("source", "target")}
    own = {"gpt": ["target_vocab"], "bert": ["source_vocab"]}.get(config.architecture, list(sizes))
    model = make_model(replace(config, **{name: sizes[name] for name in own})).eval()
    return ModelPackage(model, Tokenizers(one, one), task, DecodeConfig(beam=2), **more)


def model_package(kind: str) -> ModelPackage:
    if kind == "translation":
        config = preset("transformer-tiny", n_encoder_layers=1, n_decoder_layers=1, **SIZES)
        made = package_of(config, "translation", source="en", target="de")
        return replace(made, languages={"en": {" ab": -1.0}, "de": {"bc ": -2.0}})
    if kind == "gpt":
        config = preset("gpt-tiny", n_decoder_layers=2, positions="rope", **{"attention.window": 4}, **SIZES)
        return package_of(config, "causal-lm")
    config = preset("bert-tiny", n_encoder_layers=1, prediction_head="sequence", n_classes=3, token_types=2, **SIZES)
    return package_of(config, "classification", labels=("a", "b", "c"))


def exported_package(family: str) -> ModelPackage:
    """A model of ours whose settings are those of a family elsewhere."""
    plain = {**SIZES, "scale_embeddings": False}
    depth = {"n_encoder_layers": 2, "n_decoder_layers": 1}
    if family == "gpt2":
        config = preset("gpt2", **{**plain, "n_decoder_layers": 2})
    elif family == "llama":
        config = preset("llama-7b", **{**plain, "n_decoder_layers": 2})
    elif family == "bloom":
        config = preset("bloom-560m", **{**plain, "n_decoder_layers": 2, "d_ff": 32})
    elif family == "bert":
        sizes = {**plain, "n_encoder_layers": 2, "prediction_head": "sequence", "n_classes": 3}
        return package_of(preset("bert-base", **sizes), "classification", labels=("a", "b", "c"))
    elif family == "t5":
        config = preset("t5-small", **{**plain, **depth, "d_head": 4})
    else:
        config = preset("marian", **{**SIZES, **depth, "head_bias": False})
    return package_of(config, {"gpt": "causal-lm"}.get(config.architecture, "translation"))
