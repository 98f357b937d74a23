"""A model folder: what `load`, `translate` and `evaluate` take, and what a finished run leaves in `runs/NAME/model`.

    config.json   model.safetensors   README.md   manifest.json
    tokenizer.json, or tokenizer.source.json and tokenizer.target.json

Configuration chooses sizes, never code; weights are safetensors, never pickle; checksums are verified on loading.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from regard.config import DecodeConfig, ModelConfig, build
from regard.errors import RegardError
from regard.files import damage, new_folder, read_json
from regard.models.transformer import Transformer
from regard.models.weights import load_weights, weights_of
from regard.text.tokenizer import Tokenizers

FORMAT = 1


@dataclass(frozen=True)
class Bundle:
    """All that a model folder holds."""

    model: Transformer
    tokenizers: Tokenizers
    source: str  # languages
    target: str
    decode: DecodeConfig  # how this model is best decoded


def save(folder: Path, bundle: Bundle, card: str) -> None:
    config = {
        "format": FORMAT,
        "architecture": "transformer",
        "source": bundle.source,
        "target": bundle.target,
        "model": asdict(bundle.model.config),
        "decode": asdict(bundle.decode),
    }
    with new_folder(folder) as draft:
        (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text(card, encoding="utf-8")
        bundle.tokenizers.save(draft)
        save_file({k: v.cpu() for k, v in weights_of(bundle.model).items()}, draft / "model.safetensors")


def load(path: Path, device: torch.device) -> Bundle:
    """A model folder, or a run folder with a finished model in it."""
    folder = find(path)
    _refuse_pickle(folder)
    wrong = damage(folder)
    if wrong:
        raise RegardError(
            f"the model in {folder} is damaged: {wrong}; copy it anew, or make it again with `regard resume`"
        )
    config = _read_config(folder / "config.json")
    tokenizers = Tokenizers.load(folder)
    sizes = build(config["model"], ModelConfig, "model.")
    for side, vocab in (("source", sizes.source_vocab), ("target", sizes.target_vocab)):
        pieces = len(getattr(tokenizers, side))
        if pieces != vocab:
            raise RegardError(
                f"the {side} tokenizer in {folder} has {pieces} pieces but the model was trained with {vocab}: "
                f"put back the tokenizer it was trained with"
            )
    model = Transformer(sizes)
    try:
        load_weights(model, load_file(folder / "model.safetensors"), folder)
    except (SafetensorError, OSError) as error:
        raise RegardError(f"cannot read the weights in {folder}: {error}; copy the folder anew") from None
    decode = build(config["decode"], DecodeConfig, "decode.")
    return Bundle(model.to(device).eval(), tokenizers, config["source"], config["target"], decode)


def find(path: Path) -> Path:
    """The model folder that a user means by `path`."""
    for folder in (path, path / "model"):
        if (folder / "config.json").exists():
            return folder
    if (path / "config.toml").exists():
        raise RegardError(f"the run {path} has no finished model yet: go on with `regard resume {path}`")
    _refuse_pickle(path)
    raise RegardError(
        f"no model at {path}: give a run folder such as runs/toy-en-de, or a model folder with a config.json"
    )


def _refuse_pickle(folder: Path) -> None:
    """Pickled weights run whatever code they contain."""
    pickled = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt", "pkl") for path in folder.glob(f"*.{ending}"))
    if pickled and not (folder / "model.safetensors").exists():
        raise RegardError(
            f"the weights in {folder} are pickled ({pickled[0]}), and loading a pickle can run any code in it: "
            f"Regard reads model.safetensors alone; convert them where you trust them"
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
        dict(config["model"]), dict(config["decode"])
        config["format"], config["source"], config["target"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RegardError(f"{path} is not a model's configuration ({type(error).__name__}: {error})") from None
    if config["format"] != FORMAT or config.get("architecture") != "transformer":
        raise RegardError(
            f"{path} has format {config['format']!r} and architecture {config.get('architecture')!r}; "
            f"this Regard reads format {FORMAT} and architecture 'transformer'"
        )
    return config
