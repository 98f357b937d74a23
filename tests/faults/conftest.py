"""Tiny models of several kinds, made once; and a place that a user without rights can enter."""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokens import SETTINGS

from regard import model_folder as folders
from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.exchange.huggingface import write_huggingface
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_ff": 16, "max_len": 32, "dropout": 0.0, **SETTINGS}


@pytest.fixture(autouse=True)
def _end_whatever_hangs() -> Iterator[None]:
    """A test that hangs inside a library, which no alarm ends, ends the whole suite with a traceback."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def open_place() -> Iterator[Path]:
    """A folder that every user may enter: pytest's own is for its owner alone. In memory where that can be had, because
    folders are written with fsync, which a busy disk answers late."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix="regard-faults-", dir=memory))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def place(open_place: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=open_place))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


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
    config = preset("bert-tiny", n_encoder_layers=1, answer="row", n_classes=3, token_types=2, **SIZES)
    return package_of(config, "classification", labels=("a", "b", "c"))


@pytest.fixture(scope="session")
def models(open_place: Path) -> dict[str, Path]:
    """Model folders by kind."""
    for kind in ("translation", "gpt", "classifier"):
        folders.save(open_place / kind, model_package(kind), "# card\n")
    return {kind: open_place / kind for kind in ("translation", "gpt", "classifier")}


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
        sizes = {**plain, "n_encoder_layers": 2, "answer": "row", "n_classes": 3}
        return package_of(preset("bert-base", **sizes), "classification", labels=("a", "b", "c"))
    elif family == "t5":
        config = preset("t5-small", **{**plain, **depth, "d_head": 4})
    else:
        config = preset("marian", **{**SIZES, **depth, "head_bias": False})
    return package_of(config, {"gpt": "causal-lm"}.get(config.architecture, "translation"))


FAMILIES = ("gpt2", "llama", "bloom", "bert", "t5", "marian")


@pytest.fixture(scope="session")
def foreign(open_place: Path) -> dict[str, Path]:
    """Folders of Hugging Face's form by family."""
    for family in FAMILIES:
        write_huggingface(open_place / f"hf-{family}", exported_package(family))
    return {family: open_place / f"hf-{family}" for family in FAMILIES}
