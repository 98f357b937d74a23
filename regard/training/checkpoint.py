"""Checkpoints: all that a run needs to resume bit-exactly (weights, optimizer, RNG states, data position); averaging.

    checkpoints/step-00000500/   model.safetensors  optimizer.safetensors  state.json  manifest.json
                                 carried.safetensors, where an objective keeps recurrent state from batch to batch

Saving is atomic (`files.atomic_folder`): a checkpoint is written under a temporary name, synced, sealed with a manifest of
checksums and renamed. So a checkpoint that exists is intact unless the disk failed, and `newest` verifies the checksums.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.data.batches import Cursor
from regard.errors import RegardError
from regard.files import (
    MANIFEST,
    atomic_folder,
    check_regular,
    find_damage,
    read_json,
    remove_atomic_folder,
    remove_drafts,
    remove_folder,
)
from regard.models.weights import load_weights, weights_of

LARGEST_COUNT = 1 << 53  # more tokens than any run trains on


@dataclass
class Progress:
    """The position of a run: steps done, next batch, best validation so far, running sums."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    validated: int = -1  # the last step that was validated
    best_step: int = -1
    best: float | None = None  # the metric there; higher is better
    without_gain: int = 0  # validations since
    tokens: int = 0  # scored target tokens so far
    seconds: float = 0.0  # of training so far
    running: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, nll, tokens since the last log line
    data: str = ""  # the key of the tokenized training data

    @classmethod
    def from_dict(cls, values: dict) -> Progress:
        """Return the progress from the values that `asdict` made of it; impossible ones raise a ValueError."""
        progress = cls(**{**values, "cursor": Cursor(**values["cursor"])})
        numbers = {"step": 0, "validated": -1, "best_step": -1, "without_gain": 0, "tokens": 0}
        places = [(getattr(progress, name), least) for name, least in numbers.items()]
        places += [(progress.cursor.epoch, 0), (progress.cursor.batch, 0)]
        if not all(type(value) is int and least <= value <= LARGEST_COUNT for value, least in places):
            raise ValueError("a number in state.json is none that a run counts to")
        if len(progress.running) != 3 or not all(math.isfinite(x) for x in (progress.seconds, *progress.running)):
            raise ValueError("the sums in state.json are not three finite numbers")
        return progress


FILES = ("model.safetensors", "optimizer.safetensors", "carried.safetensors", "state.json")  # and the manifest


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first; a folder that holds only files of a user does not count."""
        return [
            step for step in self._folders() if any((self.path(step) / name).exists() for name in (*FILES, MANIFEST))
        ]

    def _folders(self) -> list[int]:
        names = (re.fullmatch(r"step-([0-9]{8})", p.name) for p in self.folder.glob("step-*"))
        return sorted(int(m[1]) for m in names if m)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        carried: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Save a checkpoint atomically; `carried` is the recurrent state that the objective keeps."""
        path = self.path(progress.step)
        with atomic_folder(path, FILES) as draft:
            save_file({k: v.cpu() for k, v in weights_of(model).items()}, draft / "model.safetensors")
            save_file(_optimizer_tensors(model, optimizer), draft / "optimizer.safetensors")
            if carried:
                save_file({name: x.cpu() for name, x in carried.items()}, draft / "carried.safetensors")
            state = {"progress": asdict(progress), "rng": _rng_state()}
            (draft / "state.json").write_text(json.dumps(state), encoding="utf-8")
        return path

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        carried: Mapping[str, Tensor] | None = None,
    ) -> Progress:
        """Load weights, optimizer state, `carried` state and random generators in place, and return the progress."""
        path = self.path(step)
        try:
            state = read_json(path / "state.json")
            progress = Progress.from_dict(state["progress"])
            if progress.step != step:
                raise ValueError(f"state.json is of step {progress.step}")
            load_weights(model, load_file(check_regular(path / "model.safetensors")), path)
            _load_optimizer(model, optimizer, load_file(check_regular(path / "optimizer.safetensors")))
            if carried:
                saved = load_file(check_regular(path / "carried.safetensors"))
                for name, x in carried.items():
                    x.copy_(saved[name])
            _set_rng_state(state["rng"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise RegardError(
                f"checkpoint {path} is not one of this run ({what}): remove it, and the one before is used"
            ) from None
        return progress

    def newest(self, warn: Callable[[str], None]) -> int | None:
        """Return the newest step whose checkpoint is intact; `warn` is called with a message for each damaged one."""
        steps = self.steps()
        for step in reversed(steps):
            if self.is_intact(step, warn, "falling back to the one before"):
                return step
        if steps:
            warn(f"no checkpoint in {self.folder} is whole: starting from the beginning")
        return None

    def is_intact(self, step: int, warn: Callable[[str], None], instead: str) -> bool:
        """Return whether every checksum holds; if not, call `warn` with what is wrong and what is done instead."""
        damage = find_damage(self.path(step))
        if damage:
            warn(f"checkpoint {self.path(step)} is damaged ({damage}): {instead}")
        return damage is None

    def prune(self, keep: Iterable[int]) -> None:
        """Remove every checkpoint but those in `keep`, and what interrupted saves left."""
        self.recover()
        for step in set(self._folders()) - set(keep):
            with suppress(OSError):  # a folder that its owner made read-only stays
                remove_atomic_folder(self.path(step), FILES)

    def recover(self) -> None:
        """Clean up after interrupted saves: remove their drafts, and restore a checkpoint that was being replaced."""
        remove_drafts(self.folder, "step-*", own=FILES)

    def remove(self) -> None:
        """Remove all checkpoints; files that a user put beside or into them stay."""
        self.prune(())
        remove_folder(self.folder)

    def average(self, steps: list[int]) -> dict[str, Tensor]:
        """Return the mean of the weights of several checkpoints (checkpoint averaging), summed in fp64."""
        total: dict[str, Tensor] = {}
        for step in steps:
            for name, tensor in load_file(self.path(step) / "model.safetensors").items():
                total[name] = total.get(name, 0) + tensor.double()
        return {name: (tensor / len(steps)).float() for name, tensor in total.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}/{key}": value.detach().cpu().clone()
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore moments and step counts into the state of the optimizer, on the device of their parameters.

    They are copied, since what `load_file` returns is mapped from a file, which is removed with its checkpoint.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameter_name, key = name.rsplit("/", 1)
        parameter = parameters[parameter_name]
        if tensor.ndim and tensor.shape != parameter.shape and key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            raise ValueError(f"{name} is {list(tensor.shape)}, its parameter {list(parameter.shape)}")
        optimizer.state[parameter][key] = tensor.to(parameter.device, copy=True)


def _rng_state() -> dict[str, str]:
    """Return the states of torch's generators; nothing in a training step draws from any other."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {device: bytes(s.tolist()).hex() for device, s in state.items()}


def _set_rng_state(state: dict[str, str]) -> None:
    tensors = {device: torch.tensor(list(bytes.fromhex(s)), dtype=torch.uint8) for device, s in state.items()}
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
