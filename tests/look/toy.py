"""A toy language that is translated word for word, and models that learn it in seconds: the alignment is known."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import torch.nn.functional as F
from tokens import EOS, SETTINGS, SOS

from regard.config import DecodeConfig, TokenizerConfig
from regard.decode.constraints import pad_rows
from regard.inference.translator import Translator
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.special_tokens import PAD
from regard.text.tokenizer import Tokenizer, Tokenizers

WORDS = {
    "ape": "Affe",
    "bee": "Biene",
    "cat": "Katze",
    "dog": "Hund",
    "elk": "Elch",
    "fox": "Fuchs",
    "gnu": "Gnu",
    "hen": "Henne",
    "jay": "Eichelhäher",
    "owl": "Eule",
}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {  # preset, settings, steps
    "transformer": (
        "transformer-tiny",
        {
            "n_encoder_layers": 1,
            "n_decoder_layers": 2,
            "d_model": 48,
            "n_heads": 4,
            "d_ff": 64,
            "positions": "sinusoidal",
        },
        350,
    ),
    "rnnsearch": ("rnnsearch-small", {"d_model": 32, "recurrent.d_hidden": 48}, 150),
}


def sentence(rng: random.Random) -> str:
    return " ".join(rng.sample(list(WORDS), rng.randint(3, 6)))


def translated(text: str) -> str:
    return " ".join(WORDS[word] for word in text.split())


@functools.cache
def tokens() -> Tokenizer:
    return Tokenizer.train([*WORDS, *WORDS.values()] * 3, TokenizerConfig(kind="split", vocab_size=40))


@functools.cache
def taught(kind: str) -> ModelPackage:
    """The same for all tests of a session, so nobody may leave it changed.

    It learns until it translates two hundred other sentences without a mistake: how far some number of steps takes it
    depends on the processor."""
    name, settings, steps = MODELS[kind]
    cut = tokens()
    sizes = {"source_vocab": len(cut), "target_vocab": len(cut), "max_len": 16, "dropout": 0.0, **SETTINGS}
    torch.manual_seed(0)
    model = make_model(preset(name, **sizes, **settings))
    package = ModelPackage(model, Tokenizers(cut, cut), "translation", DecodeConfig(beam=3), source="en", target="de")
    optimizer, rng, others = torch.optim.Adam(model.parameters()), random.Random(0), random.Random(1)
    unknown = [sentence(others) for _ in range(200)]
    for _ in range(8):
        learn(model.train(), optimizer, rng, steps)
        model.eval()
        found = Translator(package).translate(unknown)
        if all(one.text == translated(text) for one, text in zip(found, unknown, strict=True)):
            return package
    raise AssertionError(f"the {kind} has not learned the language")


def learn(model: Any, optimizer: torch.optim.Optimizer, rng: random.Random, steps: int) -> None:
    """Learn with a rate that falls to zero, after which a model makes few mistakes."""
    cut = tokens()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / steps)
        texts = [sentence(rng) for _ in range(48)]
        source = pad_rows([[*cut.encode(text), EOS] for text in texts], torch.device("cpu"))
        target = pad_rows([[SOS, *cut.encode(translated(text)), EOS] for text in texts], torch.device("cpu"))
        loss = F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
