"""Loading a model from any folder that holds one: a model folder of Regard, or a folder of Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard import model_folder
from regard.config.recipes import to_dict
from regard.device import avoid_cudnn_attention
from regard.files import read_json
from regard.layers.quantization import convert_weights
from regard.model_folder import ModelPackage, find, read_config


def load_model(path: Path, device: torch.device, weights: str = "auto") -> ModelPackage:
    """Load a model folder of Regard or a folder of Hugging Face transformers.

    `weights` is the precision of the weights, as for `model_folder.load`.
    """
    if device.type == "cuda":
        avoid_cudnn_attention()
    folder = find(path)
    if not is_huggingface(folder):
        return model_folder.load(path, device, weights)
    from regard.exchange.huggingface import read_huggingface

    package = read_huggingface(folder, device)[0]
    convert_weights(package.model, weights, device)
    return package


def model_settings(path: Path) -> dict[str, Any]:
    """Return the `[model]` table of the model in a folder."""
    folder = find(path)
    if is_huggingface(folder):
        return to_dict(load_model(folder, torch.device("cpu")).config)
    return dict(read_config(folder)["model"])


def is_huggingface(folder: Path) -> bool:
    """Return whether the configuration in a folder is one of Hugging Face transformers."""
    try:
        return bool(
            {"model_type", "architectures", "vocab_size", "hidden_size"} & set(read_json(folder / "config.json"))
        )
    except (ValueError, TypeError, OSError):
        return False
