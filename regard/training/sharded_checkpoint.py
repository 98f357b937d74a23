"""Tensors that several processes share, in safetensors files of torch.distributed.checkpoint.

Each process writes the parts that it holds. The header of a file says which part of a tensor it has, so any number of
processes, however they share the tensors, reads what it needs; a single one reads them whole. No file is a pickle.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from regard.training.parallel import SingleProcess

SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # optimizer state with the shape of its parameter


def save_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: SingleProcess) -> Future[Any]:
    """Write this process's parts of tensors into a folder, in the background; all processes must call it.

    The tensors are copied to the host before this returns. The future is done when all processes have written."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    group = ranks.saving  # type: ignore[attr-defined]
    with QuietTorch():
        return dcp.async_save(dict(tensors), storage_writer=writer, process_group=group)  # type: ignore[return-value]


def load_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: SingleProcess) -> None:
    """Load the weights and the optimizer state of a checkpoint, whole or in parts, into a model that may be cut."""
    reader = HuggingFaceStorageReader(str(folder))
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    parameters = dict(model.named_parameters())
    missing = parameters.keys() - saved.keys()
    if missing:
        raise KeyError(f"{min(missing)} is missing")
    wanted: dict[str, Tensor] = {name: p.detach() for name, p in parameters.items()}
    for name, tensor in saved.items():
        path, _, key = name.rpartition("/")
        if path not in parameters:
            continue
        parameter = parameters[path].detach()
        if key in SHAPED:
            made = torch.zeros_like(parameter, dtype=tensor.properties.dtype)
        else:
            made = torch.zeros(tensor.size, dtype=tensor.properties.dtype)
        wanted[name] = made
    with QuietTorch():
        dcp.load(wanted, storage_reader=reader, no_dist=not ranks.is_parallel)
    for name, loaded in wanted.items():
        path, _, key = name.rpartition("/")
        if path in parameters:
            on_device = loaded if key in SHAPED else loaded.to(parameters[path].device)
            optimizer.state[parameters[path]][key] = on_device


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, whole, in this process alone."""
    reader = HuggingFaceStorageReader(str(folder))
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    made = {name: torch.zeros(x.size, dtype=x.properties.dtype) for name, x in saved.items()}
    with QuietTorch():
        dcp.load(made, storage_reader=reader, no_dist=True)
    return made


class QuietTorch(warnings.catch_warnings):
    """A context without the remarks of torch.distributed.checkpoint on how it is used."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
