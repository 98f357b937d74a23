"""The Python interface as `help` shows it: examples that run, typed options, and errors for wrong types."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pydoc
from pathlib import Path
from typing import get_type_hints

import pytest

import regard
from regard.config import DecodeConfig, VectorsConfig
from regard.inference.arguments import GenerateOptions, TranslateOptions
from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.vectors.word_vectors import VectorOptions, WordVectors

CLASSES = (Translator, Generator, Classifier, Embedder, WordVectors)
MODULES = (
    "regard.inference.translator",
    "regard.inference.generator",
    "regard.inference.classifier",
    "regard.inference.embedder",
    "regard.inference.load",
    "regard.tasks.run",
    "regard.vectors.word_vectors",
)
GPT = """
task = "causal-lm"
data.train = ["text.txt"]
data.valid = ["text.txt"]
tokenizer.kind = "word"
model = { preset = "gpt-tiny", d_model = 16, n_heads = 2, d_ff = 32, max_len = 32 }
train = { steps = 60, batch_tokens = 256, warmup = 5, lr = 3e-3, samples = 0, device = "cpu" }
"""
SENTIMENT = """
task = "classification"
data.train = ["train.tsv"]
data.valid = ["train.tsv"]
tokenizer.kind = "word"
model = { preset = "bert-tiny", d_model = 16, n_heads = 2, d_ff = 32, max_len = 16 }
train = { steps = 2, batch_tokens = 64, device = "cpu" }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the examples load."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "text.txt").write_text("Once upon a time there was a king .\n" * 40)
    (folder / "train.tsv").write_text("text\tlabel\n" + "Wonderful .\tgood\nA waste of time .\tbad\n" * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, recipe in (("gpt", GPT), ("sentiment", SENTIMENT)):
            (folder / f"{name}.toml").write_text(recipe)
            regard.train(f"{name}.toml", quiet=True)
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_run(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0


def test_help_of_the_package_reads_like_a_page() -> None:
    text = pydoc.plain(pydoc.render_doc(regard))
    for word in ("regard.translate(", "class Translator", "class Generator", "regard.train(", "load(path: "):
        assert word in text
    assert "**options: Any" not in text


@pytest.mark.parametrize("cls", CLASSES)
def test_every_public_method_says_what_it_does_and_has_types(cls: type) -> None:
    assert ">>>" in (cls.__doc__ or "")
    assert "Attributes:" in (cls.__doc__ or "")
    for name, method in inspect.getmembers(cls, lambda member: inspect.isfunction(member) or inspect.ismethod(member)):
        if name.startswith("_"):
            continue
        assert method.__doc__, name
        for parameter in inspect.signature(method).parameters.values():
            assert parameter.name == "self" or parameter.annotation is not inspect.Parameter.empty, (name, parameter)
            assert "options: Any" not in str(parameter) or name == "decode_options", (name, parameter)


@pytest.mark.parametrize("options", [TranslateOptions, GenerateOptions])
def test_options_are_settings_with_their_types(options: type) -> None:
    settings = get_type_hints(DecodeConfig)
    for name, hint in get_type_hints(options).items():
        setting = {"n": "nbest", "stop": "stop_strings"}.get(name, name)
        assert setting in settings
        if setting not in ("stop_strings", "beam_stop", "replace_unknown"):
            assert hint == settings[setting] | None


def test_options_of_word_vectors_are_their_settings() -> None:
    assert get_type_hints(VectorOptions) == get_type_hints(VectorsConfig)


def test_wrong_types_say_what_was_expected(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    generator, classifier = Generator.load("runs/gpt", "cpu"), Classifier.load("runs/sentiment", "cpu")
    embedder, translator = Embedder.load("runs/gpt", "cpu"), regard.load("en-de-fr-zh", "cpu")
    wrong = {
        "translate takes a string or a list of strings, not NoneType": lambda: translator.translate(None),  # type: ignore[call-overload]
        "translate takes a string or a list of strings, but item 1 is a NoneType": lambda: translator.translate(
            ["a", None]  # type: ignore[list-item]
        ),
        "translate takes a string or a list of strings, not bytes": lambda: translator.translate(b"abc"),  # type: ignore[call-overload]
        "generate takes a string or a list of strings, not int": lambda: generator.generate(5),  # type: ignore[call-overload]
        "max_new_tokens must be a whole number, not 1.5": lambda: generator.generate("a", max_new_tokens=1.5),  # type: ignore[call-overload]
        "temperature must be a number, not True": lambda: generator.generate("a", temperature="hot" and True),
        "stop_strings must be a list of strings": lambda: generator.generate("a", stop=[3]),  # type: ignore[list-item]
        "embed takes a string or a list of strings, not int": lambda: embedder.embed(3),  # type: ignore[arg-type]
        "classify takes texts, pairs of texts and paths, but item 0 is a int": lambda: classifier.classify([3]),  # type: ignore[list-item]
        "load takes a path or the name of a bundled model, not int": lambda: regard.load(3),  # type: ignore[call-overload]
    }
    for message, call in wrong.items():
        with pytest.raises(TypeError, match=message.replace("(", r"\(")):
            call()  # type: ignore[no-untyped-call]


def test_one_string_gives_one_vector(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    embedder = Embedder.load("runs/gpt", "cpu")
    assert embedder.embed("Once upon").shape == (16,)
    assert embedder.embed(text for text in ["Once", "upon"]).shape == (2, 16)


def test_another_class_says_what_the_model_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(regard.RegardError, match="this model learned causal-lm; translating needs an encoder-decoder"):
        Translator.load("runs/gpt", "cpu")
    with pytest.raises(regard.RegardError, match="this model learned causal-lm, not to predict labels"):
        Classifier.load("runs/gpt", "cpu")
