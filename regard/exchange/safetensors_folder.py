"""Safetensors files of a folder, one or several with an index: shapes by name, and tensors read one at a time."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.config.recipes import format_value
from regard.errors import RegardError
from regard.files import check_regular, exists, read_json, refuse_pickle

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """The tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}  # name of a tensor -> the open file that holds it
        for path in weight_files(folder):
            try:
                file = safe_open(check_regular(path), "pt")
                self.files |= dict.fromkeys(file.keys(), file)
            except (SafetensorError, OSError) as error:
                raise RegardError(f"cannot read the weights in {path}: {error}; copy the file anew") from None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, from the headers of the files."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self.files.items()}

    def check_rows(self, rows: int, what: str) -> None:
        """Refuse a number of rows that is larger than every dimension of every tensor: no table can have so many."""
        largest = max((size for shape in self.shapes.values() for size in shape), default=0)
        if rows > largest:
            raise RegardError(
                f"config.json has {what} {format_value(rows)}, but no tensor in {self.folder} is that long"
            )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in fp32, in whatever precision it is stored."""
        return self.files[name].get_tensor(name).to(torch.float32)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: the single one, or those that the index names."""
    if exists(folder / SINGLE):
        return [folder / SINGLE]
    if not exists(folder / INDEX):
        refuse_pickle(folder)
        raise RegardError(f"no weights in {folder}: Regard reads {SINGLE}, or {INDEX} with the files it names")
    try:
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise RegardError(f"cannot read {folder / INDEX} ({type(error).__name__}: {error})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RegardError(f"{folder / INDEX} names {name!r}, which is not a file of safetensors in its folder")
    return [folder / name for name in names]
