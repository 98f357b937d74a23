"""A model folder with a fault is refused in one line or loads as the very same model; its files stay as they are."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import EVERY, FLIPS, TYPES, WRONG, as_nobody, cases, change_json, content, copied, outcome, reseal
from tiny_packages import model_package

from regard import model_folder as folders
from regard.config import DecodeConfig, ModelConfig
from regard.model_folder import ModelPackage

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [9, 8, 7, 2, 0, 0, 0]])
FILES = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "manifest.json"]
KINDS = {"translation": [*FILES, "languages.json"], "gpt": FILES, "classifier": FILES}


def result(package: ModelPackage) -> Any:
    """Return what a model answers, and all else that a folder tells about it."""
    two = {"translation": (IDS, IDS), "causal-lm": (IDS,), "classification": (IDS, torch.zeros_like(IDS))}
    with torch.inference_mode():
        answers = package.model(*two[package.task])
    kept = (package.labels, package.token_template, package.decode, package.languages, package.source, package.target)
    pieces = package.tokenizers and package.tokenizers.source.fingerprint()
    return answers.tolist(), pieces, kept


def load(folder: Path) -> Any:
    return result(folders.load(folder, CPU))


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Any]:
    return {kind: load(folder) for kind, folder in models.items()}


@pytest.mark.parametrize(("kind", "file", "fault"), [(k, *c) for k, files in KINDS.items() for c in cases(files)])
def test_a_fault_in_a_file(
    kind: str, file: str, fault: str, models: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    folder = copied(models[kind], place / "model")
    EVERY[fault](folder / file)
    before = content(folder)
    with as_nobody(fault):
        how, found = outcome(lambda: load(folder))
    assert how == "line" or found == expected[kind]
    assert how == "line" or fault == "last-bit"  # the manifest's last bit may be of a newline
    assert content(folder) == before


SKIPPED = ("unreadable", "bit-at-a-quarter", "bit-at-three-quarters")


@pytest.mark.parametrize(
    ("kind", "file", "fault"),
    [(k, f, x) for k, files in KINDS.items() for f, x in cases(files) if f != "manifest.json" and x not in SKIPPED],
)
def test_a_fault_that_the_checksums_allow(
    kind: str, file: str, fault: str, models: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    """Somebody made the manifest anew: only what is read can tell, and a flipped bit may be another model's."""
    folder = copied(models[kind], place / "model")
    EVERY[fault](folder / file)
    reseal(folder)
    how, found = outcome(lambda: load(folder))
    left_out = fault in ("deleted", "link-to-itself") and file in OPTIONAL
    if how != "line" and fault not in FLIPS and not left_out:
        assert found == expected[kind]


OPTIONAL = ("languages.json", "tokenizer.json")  # a model folder may be without these


# ---- config.json -----------------------------------------------------------------------------------------------------


CHANGED = (
    "n_decoder_layers",
    "n_encoder_layers",
    "d_model",
    "target_vocab",
    "source_vocab",
    "max_len",
    "n_classes",
    "n_heads",
)


def numbers() -> list[tuple[str, tuple[str, ...]]]:
    """Return the path of every whole number in the configurations of the three models."""
    found = []
    for kind in KINDS:
        config = model_package(kind).config
        own = [f.name for f in fields(ModelConfig) if type(getattr(config, f.name)) is int]
        found += [(kind, ("model", name)) for name in own if kind == "translation" or name in CHANGED]
        if kind == "translation":  # the others read what follows in the same way
            found += [(kind, ("decode", f.name)) for f in fields(DecodeConfig) if f.type == "int" and f.name != "seed"]
            found += [(kind, ("model", "attention", "window")), (kind, ("model", "suppress_tokens"))]
    return found


FREE = {"batch_tokens", "top_k", "min_len", "nbest", "max_len_b", "max_new_tokens", "max_len_a", "beam"}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("kind", "keys"), numbers(), ids=lambda x: ".".join(x) if isinstance(x, tuple) else x)
def test_a_size_in_config_json(
    kind: str, keys: tuple[str, ...], wrong: str, models: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    folder = copied(models[kind], place / "model")
    value = WRONG[wrong]
    if keys[-1] == "suppress_tokens":
        value = f"json:[{value.removeprefix('json:')}]" if wrong == "1e30" else [value]
    change_json(folder / "config.json", keys, value)
    reseal(folder)
    before = content(folder)
    how, found = outcome(lambda: load(folder))
    # settings that choose how to decode, or what attention sees, and are allowed to have that value
    chosen = keys[0] == "decode" and keys[-1] in FREE and wrong in ("zero", "1e9")
    chosen |= keys[-1] in ("window", "suppress_tokens", "eos_token_id") and wrong == "zero"
    assert how == "line" or found == expected[kind] or chosen
    assert content(folder) == before


TOP = [
    "format",
    "task",
    "source",
    "target",
    "directions",
    "labels",
    "token_template",
    "pooling",
    "pixels",
    "origin",
    "model",
    "decode",
]
NESTED = [
    ("token_template", "before"),
    ("token_template", "start"),
    ("model", "preset"),
    ("model", "architecture"),
    ("model", "dropout"),
]
NESTED += [("model", "bias"), ("model", "positions"), ("model", "d_model"), ("model", "norm_eps"), ("decode", "beam")]
NESTED += [("decode", "stop_strings"), ("decode", "temperature"), ("model", "attention"), ("model", "tie")]


@pytest.mark.parametrize("wrong", [*TYPES, "1e9", "text", "null"])
@pytest.mark.parametrize("keys", [*((name,) for name in TOP), *NESTED], ids=".".join)
def test_a_value_of_another_type(
    keys: tuple[str, ...], wrong: str, models: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    kind = "translation"
    folder = copied(models[kind], place / "model")
    change_json(folder / "config.json", keys, (TYPES | WRONG)[wrong])
    reseal(folder)
    how, found = outcome(lambda: load(folder))
    names = keys[0] in ("source", "target", "pooling") and wrong == "text"  # any text is a name
    settings = {(("model", "bias"), "true"), (("decode", "stop_strings"), "text"), (("decode", "temperature"), "1e9")}
    assert how == "line" or found == expected[kind] or names or (keys, wrong) in settings


@pytest.mark.parametrize("name", ["languages.json", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", "null", '{"en": 3}', '{"en": {"a": "x"}}', "\xff"]
)
def test_json_files_of_another_form(name: str, text: str, models: dict[str, Path], place: Path) -> None:
    folder = copied(models["translation"], place / "model")
    (folder / name).write_bytes(text.encode("latin-1"))
    if name != "manifest.json":
        reseal(folder)
    assert outcome(lambda: load(folder))[0] == "line" or (name == "languages.json" and text in ("[]",))


def test_the_card_may_say_anything(models: dict[str, Path], expected: dict[str, Any], place: Path) -> None:
    folder = copied(models["gpt"], place / "model")
    (folder / "README.md").write_text("other")
    reseal(folder)
    assert outcome(lambda: load(folder)) == ("result", expected["gpt"])
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]["README.md"]
    (folder / "README.md").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert outcome(lambda: load(folder)) == ("result", expected["gpt"])
