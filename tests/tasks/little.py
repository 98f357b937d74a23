"""Corpora so small and regular that a tiny model learns them in a second or two, and the runs that do."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.config import Config
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config

CYCLE = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
FILLER = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "hill", "saw", "red", "big"]
ENCODER, DECODER = {"n_encoder_layers": 1}, {"n_decoder_layers": 1}
SIZES = {"d_model": 32, "n_heads": 2, "d_ff": 64, "max_len": 32, "dropout": 0.0, "attention_dropout": 0.0}
TRAIN = {"steps": 60, "batch_tokens": 256, "lr": 5e-3, "warmup": 10, "schedule": "cosine", "label_smoothing": 0.0}
TRAIN |= {"valid_every": 1000, "save_every": 1000, "log_every": 20, "samples": 0, "device": "cpu", "threads": 1}
TEXT = {"train": ["cycle.txt[:90%]"], "valid": ["cycle.txt[90%:]"], "test": ["cycle.txt[90%:]"]}


def write_all(folder: Path) -> None:
    (folder / "cycle.txt").write_text((" ".join(CYCLE) + "\n") * 150)
    rng = random.Random(0)
    rows = [rng.choices(FILLER, k=rng.randint(3, 7)) for _ in range(120)]
    write_table(folder / "film.tsv", ["sentence", "label"], [with_verdict(row, i, rng) for i, row in enumerate(rows)])
    pairs = [(" ".join(row), " ".join(rng.choices(FILLER, k=3)), f"{worth(row):.2f}") for row in rows]
    write_table(folder / "worth.tsv", ["first", "second", "score"], pairs)
    objects = [{"words": row, "tags": ["B-PET" if word in ("cat", "dog") else "O" for word in row]} for row in rows]
    (folder / "pets.jsonl").write_text("".join(json.dumps(item) + "\n" for item in objects))
    write_pictures(folder)


def with_verdict(row: list[str], i: int, rng: random.Random) -> tuple[str, str]:
    """One word says it all."""
    row = row.copy()
    row.insert(rng.randint(0, len(row)), ("awful", "lovely")[i % 2])
    return " ".join(row), ("bad", "good")[i % 2]


def worth(row: list[str]) -> float:
    """Each word has its own, and they add up."""
    return sum(FILLER.index(word) for word in row) / 20


def write_table(path: Path, header: list[str], rows: Sequence[tuple[str, ...]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in [tuple(header), *rows]))


def write_pictures(folder: Path) -> None:
    """A bright square above, or below."""
    labels = (np.arange(60) % 2).astype(np.uint8)
    images = np.zeros((60, 8, 8), np.uint8)
    images[labels == 0, 1:3, 3:6] = images[labels == 1, 5:7, 2:5] = 255
    for name, array in (("pictures.idx", images), ("classes.idx", labels)):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(head + array.tobytes())


# ---- one run a task --------------------------------------------------------------------------------------------------


def same(spec: str, **columns: Any) -> dict[str, Any]:
    return {"train": [spec], "valid": [spec], "test": [spec], **columns}


WORDS = {"kind": "word", "vocab_size": 60}
BERT = {"preset": "bert-tiny", **ENCODER, "positions": "rope"}
PAIR = {**ENCODER, **DECODER}
TASKS: dict[str, dict[str, Any]] = {
    "causal-lm": {"data": TEXT, "model": {"preset": "gpt-tiny", **DECODER}},
    "masked-lm": {"data": TEXT, "model": BERT},
    "span-corruption": {
        "data": TEXT,
        "model": {"preset": "transformer-tiny", **PAIR},
        "tokenizer": {"vocab_size": 160},
    },
    "denoising": {"data": TEXT, "model": {"preset": "transformer-tiny", **PAIR}},
    "classification": {"data": same("film.tsv", text_column="sentence"), "model": BERT},
    "regression": {
        "data": same("worth.tsv", text_column="first", pair_column="second", label_column="score"),
        "model": {**BERT, "token_types": 2},
    },
    "tagging": {"data": same("pets.jsonl"), "model": BERT},
    "image-classification": {
        "data": same("pictures.idx|classes.idx"),
        "model": {"preset": "vit-tiny", **ENCODER, "positions": "learned"},
    },
}


def values_of(folder: Path, task: str) -> dict[str, Any]:
    own = TASKS[task]
    return {
        "name": task,
        "task": task,
        "data": {"root": str(folder), **own["data"]},
        "tokenizer": {**WORDS, **own.get("tokenizer", {})},
        "model": {**SIZES, **own["model"]},
        "train": TRAIN,
    }


def config_of(folder: Path, task: str, **changes: Any) -> Config:
    """Changes are `{"train.steps": 3}`."""
    return make_config(values_of(folder, task), changes)


def tuning(folder: Path, task: str, init: Path, **changes: Any) -> Config:
    """A run that begins with another model and has its sizes."""
    values = values_of(folder, task)
    del values["model"], values["tokenizer"]
    return make_config(values, {"train.init_from": str(init), **changes})


def learn(config: Config, run: Path) -> Path:
    return train(config, run, quiet=True)


def last_validation(run: Path) -> dict[str, Any]:
    """The last line of metrics that is one."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "valid"][-1]
