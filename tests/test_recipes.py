"""Every recipe, made tiny: from raw files under the names it expects to a saved model that is loaded, used and evaluated."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from command_line import call
from PIL import Image

import regard
from regard.config import Config, DataConfig, recipes
from regard.config.recipes import SHIPPED_FOLDER
from regard.data.parallel_corpus import parse_part
from regard.models.architectures import with_preset

RECIPES = {path.stem: path for path in SHIPPED_FOLDER.glob("*.toml")}
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
SIZES = {
    "n_encoder_layers": 1,
    "n_decoder_layers": 1,
    "d_model": 16,
    "n_heads": 2,
    "n_kv_heads": 2,
    "d_head": 8,
    "d_ff": 16,
}
TRAIN: dict[str, Any] = {
    "steps": 2,
    "warmup": 1,
    "batch_tokens": 512,
    "accumulate": 1,
    "valid_every": 2,
    "save_every": 1,
    "log_every": 1,
}
TRAIN |= {"samples": 1, "device": "cpu", "threads": 1}
SAID = "a man and two dogs see the old red house by water . green bird sat on its roof ! who ate this apple ?"
WORDS = SAID.split()
TEXT = "the old man ."


# ---- tiny corpora ----------------------------------------------------------------------------------------------------


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))


def lines(rng: random.Random, n: int = 60) -> bytes:
    """Return lines of text, some of them blank, so that there are documents of every kind."""
    return "".join(sentence(rng) + ("\n\n" if i % 5 == 0 else "\n") for i in range(n)).encode()


def table(rng: random.Random, data: DataConfig, spec: str, labels: list[str]) -> bytes:
    """Return labelled texts in the columns that the recipe names by name or by number."""
    names = [
        data.text_column or "text",
        *([data.pair_column] if data.pair_column else []),
        data.label_column or "label",
    ]
    rows = [[sentence(rng) for _ in names[1:]] + [labels[i % len(labels)]] for i in range(24)]
    if ".jsonl" in spec:
        return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows).encode()
    if not names[0].isdigit():
        return "".join("\t".join(row) + "\n" for row in [names, *rows]).encode()
    places = [int(name) for name in names]
    wide = [[row[places.index(i)] if i in places else "-" for i in range(1, max(places) + 1)] for row in rows]
    return "".join("\t".join(row) + "\n" for row in wide).encode()


def tagged(rng: random.Random, spec: str) -> bytes:
    rows = [[(word, "B-X" if word in ("man", "dogs") else "O") for word in sentence(rng).split()] for _ in range(24)]
    if ".jsonl" in spec:
        objects = ({"words": [w for w, _ in row], "tags": [t for _, t in row]} for row in rows)
        return "".join(json.dumps(item) + "\n" for item in objects).encode()
    return "\n".join("".join(f"{word}\t{tag}\n" for word, tag in row) for row in rows).encode()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def pictures(name: str) -> bytes:
    draws = np.random.default_rng(0)
    return idx(
        draws.integers(0, 256, (24, 28, 28), np.uint8) if "images" in name else np.arange(24, dtype=np.uint8) % 10
    )


def content(config: Config, spec: str, rng: random.Random) -> bytes:
    if config.task == "image-classification":
        return pictures(spec)
    if config.task == "tagging":
        return tagged(rng, spec)
    if config.task in ("classification", "regression"):
        return table(rng, config.data, spec, ["0", "1"] if config.task == "classification" else ["0.5", "3", "4.75"])
    return lines(rng)


def write_corpora(config: Config, root: Path) -> None:
    """Write every file that the recipe names, compressed as its name says."""
    data = config.data
    languages = (data.source, data.target)
    for spec in {*data.train, *data.valid, *data.test}:
        for name in parse_part(spec)[0].split("|"):
            for file in {name.replace("{lang}", lang) for lang in languages}:
                path = root / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(PACK.get(path.suffix, bytes)(content(config, file, random.Random(0))))


# ---- a run -----------------------------------------------------------------------------------------------------------


def smaller(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """Return overrides for a run of seconds; a run that starts from another model keeps that model's sizes."""
    settings: dict[str, Any] = {f"train.{name}": value for name, value in TRAIN.items()}
    for split in ("train", "valid", "test"):
        specs = getattr(config.data, split)
        settings[f"data.{split}"] = ["toy:60" if spec.startswith("toy:") else spec for spec in specs]
    if not config.train.init_from:
        preset = with_preset(given)
        shrunk = {name: value for name, value in SIZES.items() if preset.get(name, 0) > 1}  # one is small
        recurrent = preset.get("recurrent", {})
        shrunk |= {"recurrent.d_hidden": 16} if recurrent else {}
        if recurrent.get("residual") or recurrent.get("fast_forward"):  # connections between layers need some
            shrunk |= {"n_encoder_layers": 3, "n_decoder_layers": 3}
        settings |= {f"model.{name}": value for name, value in shrunk.items()}
        settings |= {"tokenizer.vocab_size": 400, "model.max_len": min(64, config.model.max_len)}
    return settings


def config_of(name: str) -> tuple[Config, dict[str, Any]]:
    """Return a recipe before its initial model is looked up, and its [model] table."""
    values = recipes.load(RECIPES[name])
    given = values.get("model", {})
    plain = {key: value for key, value in given.items() if not isinstance(value, dict)}  # a preset may choose the parts
    return recipes.build({**values, "model": plain}, Config), given


def borrowed(config: Config) -> dict[str, str]:
    """Return the runs of other recipes that this one needs, by the setting that names them."""
    named = {"train.init_from": config.train.init_from, "tokenizer.file": config.tokenizer.file}
    return {setting: run for setting, run in named.items() if run}


def run_tiny(name: str, folder: Path) -> Path:
    """Train the recipe, after the recipe whose model it starts from."""
    config, given = config_of(name)
    settings = {**smaller(config, given), "data.root": str(folder / name)}
    for setting, other in borrowed(config).items():
        settings[setting] = str(run_tiny(Path(other).name, folder))
    if not config.data.train[0].startswith("toy:"):
        write_corpora(config, folder / name)
    return regard.train(RECIPES[name], folder / "runs" / name, settings=settings, quiet=True)


def use(run: Path, config: Config) -> Any:
    """Use the loaded model for its task; return a result that must not be empty."""
    model = regard.load(run)
    if config.task == "causal-lm":
        return model.generate(TEXT, max_new_tokens=3, min_len=3).tokens
    if config.task == "masked-lm":
        return model.embed([TEXT]).shape == (1, SIZES["d_model"])
    if config.task == "image-classification":
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(run / "picture.png")
        return model.classify([str(run / "picture.png")])[0].label
    if config.task in ("classification", "regression", "tagging"):
        return model.classify([(TEXT, TEXT) if config.data.pair_column else TEXT])[0].label
    return model.translate(TEXT).nbest or model.translate(TEXT).score < 0


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_runs_from_raw_files_to_a_model_in_use(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = config_of(name)
    run = run_tiny(name, tmp_path)
    assert use(run, config)
    if config.data.test:
        code, out, err = call(capfd, monkeypatch, "evaluate", str(run), "--json")
        assert code == 0, err
        assert any(isinstance(value, float) and np.isfinite(value) for value in json.loads(out).values())


def test_recipes_begin_only_with_recipes_that_are_here() -> None:
    assert RECIPES
    for name in RECIPES:
        assert {Path(run).name for run in borrowed(config_of(name)[0]).values()} <= RECIPES.keys(), name
