"""Tiny models of every kind that can be looked into, with random weights, as folders on disk.

`folders["translation"]` is one, `TEXTS["translation"]` something for it to read; `picture` is a file for the vision
Transformer. The browser's tests use them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokens import BERT_TEMPLATE, SETTINGS, SOS

from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.special_tokens import EOS_TEMPLATE, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers

sys.path.append(str(Path(__file__).parent))
from small import add_noise

LINES = ["der Mann hat einen roten Apfel gegessen.", "the man has eaten a red apple.", "don't, say I!"]
HOSTILE = (
    "</script><script>alert(1)</script> <!-- \"double\" 'single' &amp; \u05e9\u05dc\u05d5\u05dd 👩\u200d🚀 "
    "a\u202eb null ${x} \\u003c"
)
TEXTS = {
    "translation": "the man has eaten a red apple.",
    "post-norm": "the man has eaten a red apple.",
    "rope": "the man has eaten a red apple.",
    "gpt": "the man has",
    "bert": "der Mann hat einen roten Apfel gegessen.",
    "classifier": "the red apple, say I!",
    "rnnsearch": "der Mann hat einen Apfel.",
    "hostile": HOSTILE,
}
ENCODER = {"n_encoder_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24}
BOTH = {**ENCODER, "n_decoder_layers": 2}
PLAIN = {"max_len": 64, "dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # preset and settings
    "translation": ("transformer-tiny", BOTH),
    "post-norm": ("transformer-tiny", {**BOTH, "norm": "post", "positions": "learned"}),
    "rope": ("transformer-tiny", {**BOTH, "positions": "rope"}),
    "hostile": ("transformer-tiny", BOTH),
    "gpt": (
        "gpt-tiny",
        {**BOTH, "n_heads": 4, "n_kv_heads": 2, "positions": "rope", "norm_kind": "rms", "feedforward": "gated"},
    ),
    "bert": (
        "bert-tiny",
        {**ENCODER, "norm": "post", "token_types": 2, "embedding_norm": True, "positions": "learned"},
    ),
    "classifier": ("bert-tiny", {**ENCODER, "token_types": 2, "prediction_head": "sequence", "n_classes": 3}),
    "vit": ("vit-tiny", {**ENCODER, "positions": "learned", "n_classes": 3, "vit.image_channels": 1, "max_len": 17}),
    "rnnsearch": ("rnnsearch-small", {"d_model": 16, "recurrent.d_hidden": 16}),
}
TASKS = {"gpt": "causal-lm", "bert": "masked-lm", "classifier": "classification", "vit": "image-classification"}
FRAMES = {"gpt": SpecialTokenTemplate(before=(SOS,), after=()), "bert": BERT_TEMPLATE, "classifier": BERT_TEMPLATE}


def tokenizer(kind: str) -> Tokenizer:
    """Pieces of words; for hostile text whatever stands between spaces is one piece."""
    if kind == "hostile":
        return Tokenizer.train([HOSTILE] * 3, TokenizerConfig(kind="split", vocab_size=40))
    return Tokenizer.train(LINES * 3, TokenizerConfig(kind="bpe", vocab_size=60))


def tiny(kind: str, **changes: Any) -> ModelPackage:
    """Weights that look somewhere, the same in every session; `changes` are settings of the model."""
    name, settings = MODELS[kind]
    pieces = None if kind == "vit" else tokenizer(kind)
    sizes = {} if pieces is None else {"source_vocab": len(pieces), "target_vocab": len(pieces)}
    torch.manual_seed(1)
    model = make_model(preset(changes.pop("preset", name), **{**PLAIN, **SETTINGS, **sizes, **settings, **changes}))
    add_noise(model, kind)
    labels = ("bad", "fair", "good") if kind in ("classifier", "vit") else ()
    pixels = {"mean": [0.5], "std": [0.25], "size": [16.0, 16.0]} if kind == "vit" else {}
    return ModelPackage(
        model.eval(),
        Tokenizers(pieces, pieces) if pieces else None,
        TASKS.get(kind, "translation"),
        DecodeConfig(beam=3, min_len=3, max_len_a=0.0, max_len_b=7, max_new_tokens=6),  # some tokens, whatever is drawn
        source="en",
        target="de",
        labels=labels,
        token_template=FRAMES.get(kind, EOS_TEMPLATE),
        pixels=pixels,
    )


Maker = Callable[..., ModelPackage]


@pytest.fixture(scope="session")
def make() -> Maker:
    """`tiny`, for tests that want a model of their own."""
    return tiny


@pytest.fixture(scope="session")
def bundles() -> dict[str, ModelPackage]:
    """In memory, by kind; nobody may change them."""
    return {kind: tiny(kind) for kind in MODELS}


@pytest.fixture(scope="session")
def folders(bundles: dict[str, ModelPackage], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same as model folders."""
    root = tmp_path_factory.mktemp("models")
    for kind, package in bundles.items():
        model_folder.save(root / kind, package, "a card")
    return {kind: root / kind for kind in bundles}


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grey ring of 16 x 16 pixels, which is 4 x 4 patches."""
    y, x = np.mgrid[:16, :16] - 7.5
    ring = np.exp(-((np.hypot(x, y) - 5) ** 2) / 4)
    path = tmp_path_factory.mktemp("pictures") / "ring.png"
    Image.fromarray((255 * ring).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="session")
def asked(picture: Path) -> dict[str, str]:
    """What to give each kind."""
    return {**TEXTS, "vit": str(picture)}
