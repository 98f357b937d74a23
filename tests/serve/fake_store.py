"""Models for tests of the server: a translator that is a rule, and small models of every kind, trained or not.

The translator writes each sentence in capitals, so that every answer is known. Some words in a text make it do other things:
`slow` waits until the request is cancelled or its time is over, `crash`, `lost` and `busy` are errors.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard import model_folder
from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.decode.generation import generation_steps
from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.inference.translator import Translation, Translator
from regard.model_folder import ModelPackage
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.serve.model_store import ModelEntry
from regard.serve.request_context import Draining, Overloaded, WorkerLost, current_request
from regard.text.language_identification import learn_profile
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.vectors.word_vectors import WordVectors

sys.path.append(str(Path(__file__).parents[1] / "inference"))
from fake_translator import Fake
from test_classifier import package as classifier_package
from test_classifier import picture_bundle
from test_generator import bert_bundle
from tokens import SETTINGS, SOS

LINES = ["The man went to the house.", "Der Mann ging in das Haus.", "User: Hello\nAssistant: Good day.", "0123456789"]
SIZES: dict[str, Any] = {"n_encoder_layers": 1, "n_decoder_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 16}
STARTED = threading.Event()  # a slow request has begun
STOPPED = threading.Event()  # and was cancelled, or its time is over


class RuleTranslator(Fake):
    """A translator that writes sentences in capitals, and obeys some words in them."""

    def translate_sentences(self, sentences: Any, **options: Any) -> list[Translation]:
        joined = " ".join(sentences)
        context = current_request.get()
        assert context is not None, "inference runs with the request in its context"
        if "crash" in joined:
            raise RuntimeError(f"a secret: {joined}")
        if "lost" in joined:
            raise WorkerLost("the process that decoded this has died; try again")
        if "busy" in joined:
            raise Overloaded("tokens in the queue", 100, 200, 2.0)
        if "slow" in joined:
            STARTED.set()
            try:
                while True:
                    context.check()
                    time.sleep(0.005)
            finally:
                STOPPED.set()
        return super().translate_sentences(sentences, **options)


def train_tokenizer() -> Tokenizers:
    config = TokenizerConfig(kind="byte-bpe", vocab_size=300, language_tokens=("de", "en"))
    joint = Tokenizer.train(LINES, config)
    return Tokenizers(joint, joint)


def tiny_translator() -> ModelPackage:
    """An untrained transformer of two directions."""
    torch.manual_seed(0)
    tokenizers = train_tokenizer()
    size = len(tokenizers.source)
    config = ModelConfig(
        architecture="transformer", source_vocab=size, target_vocab=size, max_len=64, **SETTINGS, **SIZES
    )
    languages = {name: learn_profile([line]) for name, line in zip(("en", "de"), LINES, strict=False)}
    decode = DecodeConfig(beam=2, max_len_a=1.0, max_len_b=4)
    directions = ("en>de", "de>en")
    return ModelPackage(
        Transformer(config).eval(), tokenizers, "translation", decode, "en", "de", directions, languages=languages
    )


def tiny_writer() -> ModelPackage:
    """An untrained GPT that never ends by itself soon."""
    torch.manual_seed(0)
    tokenizers = train_tokenizer()
    sizes = {name: value for name, value in SIZES.items() if name != "n_encoder_layers"}
    config = ModelConfig(
        preset="gpt-tiny",
        architecture="gpt",
        target_vocab=len(tokenizers.target),
        max_len=96,
        dropout=0.0,
        **SETTINGS,
        **sizes,
    )
    model = GPT(config).eval()
    for parameter in model.parameters():  # texts that differ plainly
        torch.nn.init.normal_(parameter, std=0.4)
    template = model_folder.SpecialTokenTemplate(before=(SOS,))
    return ModelPackage(model, tokenizers, "causal-lm", DecodeConfig(max_new_tokens=12), token_template=template)


def word_vectors() -> WordVectors:
    words = ["king", "man", "woman", "queen", "apple"]
    return WordVectors(words, np.array([[1, 1, 0], [0, 1, 0], [0, 1, 1], [1, 1, 1], [-1, 0, 0]], np.float32))


@dataclass
class Loaded:
    entry: ModelEntry
    inference: Any


@dataclass
class FakeStore:
    """A store with models in memory that are decoded where they are asked for."""

    entries: dict[str, ModelEntry] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    works: bool = True  # a forward pass succeeds
    checks: int = 0
    users: int = 0
    is_draining: bool = False
    is_closed: bool = False

    def add(self, name: str, task: str, inference: Any, path: Path) -> None:
        self.entries[name] = ModelEntry(name, path, task)
        self.models[name] = inference

    @contextmanager
    def lease(self, name: str | None = None) -> Iterator[Loaded]:
        if self.is_draining:
            raise Draining("the server is stopping")
        entry = self.entries[name or next(iter(self.entries))]
        self.users += 1
        try:
            yield Loaded(entry, self.models[entry.name])
        finally:
            self.users -= 1

    def check(self, name: str | None = None) -> float:
        self.checks += 1
        if not self.works:
            raise RuntimeError("broken")
        return 0.001

    def statistics(self) -> dict[str, Any]:
        return {"queued_tokens": 3, "models": {"rule": {"queued_tokens": 3}}}

    def drain(self, seconds: float) -> bool:
        self.is_draining = True
        return True

    def close(self) -> None:
        self.is_closed = True


def make_store(folder: Path, *names: str) -> FakeStore:
    """Return a store of all models, or of some; those that can be looked into are saved in a folder."""
    store = FakeStore()
    for name, task, make in (
        ("rule", "translation", lambda: RuleTranslator(max_len=200)),
        ("tiny", "translation", lambda: tiny_translator()),
        ("writer", "generation", lambda: tiny_writer()),
        ("classes", "classification", lambda: classifier_package("classification")),
        ("pictures", "images", picture_bundle),
        ("encoder", "embedding", bert_bundle),
        ("words", "vectors", word_vectors),
    ):
        if names and name not in names:
            continue
        made: Any = make()
        if isinstance(made, ModelPackage):
            if not (folder / name).exists():
                model_folder.save(folder / name, made, "# A model for tests")
            kinds = {"translation": Translator, "generation": Generator, "embedding": Embedder}
            made = kinds.get(task, Classifier)(made)
        if isinstance(made, Generator):
            made.steps = generation_steps
        store.add(name, task, made, folder / name)
    return store
