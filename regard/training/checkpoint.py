"""Checkpoints: all that a run needs to resume bit-exactly (weights, optimizer, RNG states, data position); averaging.

    checkpoints/step-00000500/   model.safetensors  optimizer.safetensors  state.json  manifest.json
                                 carried.safetensors, where an objective keeps recurrent state from batch to batch
                                 shard-*.safetensors instead of the first two, where processes share the parameters

Both forms hold the same tensors under the same names, and both are loaded by any number of processes, however they share
the parameters (torch.distributed.checkpoint). With several processes a checkpoint is written in the background.

Saving is atomic (`files.atomic_folder`): a checkpoint is written under a temporary name, synced, sealed with a manifest of
checksums and renamed. So a checkpoint that exists is intact unless the disk failed, and `newest` verifies the checksums.
"""

from __future__ import annotations

import json
import math
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
from regard.training.parallel import SingleProcess
from regard.training.sharded_checkpoint import load_shards, read_shards, save_shards

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
    # Since the last log line: sums of the objective, and tokens by layer and expert.
    running: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    expert_loads: list[float] = field(default_factory=list)
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
        sums = (progress.seconds, *progress.running, *progress.expert_loads)
        if len(progress.running) < 3 or not all(math.isfinite(x) for x in sums):
            raise ValueError("the sums in state.json are not three or more finite numbers")
        return progress


FILES = ("model.safetensors", "optimizer.safetensors", "carried.safetensors", "state.json")  # and the manifest


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: Future[None] | None = None  # a checkpoint that is written in the background

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
        ranks: SingleProcess | None = None,
        rows: int = 0,
    ) -> Path:
        """Save a checkpoint atomically; `carried` is the recurrent state that the objective keeps, of so many `rows`.

        With several processes, every one must call it, and it is written in the background: `wait` returns when it is
        complete."""
        ranks, path = ranks or SingleProcess(), self.path(progress.step)
        self.wait()
        kept = {name: ranks.all_rows(x, rows).cpu() for name, x in (carried or {}).items()}
        state: dict[str, Any] = {"progress": asdict(progress), "rng": _rng_state()}
        if ranks.is_parallel:
            state["rank_rng"] = ranks.gather(_rng_state())
        weights, moments = weights_of(model), _optimizer_tensors(model, optimizer)
        if not ranks.is_sharded:
            if ranks.is_first:
                write = partial(self._write, path, self._plain_files(weights, moments, ranks.is_parallel), kept, state)
                self._run(write, in_background=ranks.is_parallel)
            return path
        drafts: queue.SimpleQueue[Path | BaseException] = queue.SimpleQueue()
        written: Future[None] = Future()
        if ranks.is_first:

            def wait_for_shards(draft: Path) -> None:
                drafts.put(draft)
                written.result()

            self._run(partial(self._write, path, wait_for_shards, kept, state), True, drafts.put)
        draft = ranks.from_first(lambda: str(_get(drafts)))
        future = save_shards(Path(draft), {**weights, **moments}, ranks)
        future.add_done_callback(lambda done: copy_outcome(done, written))
        if not ranks.is_first:
            self._pending = written
        return path

    @staticmethod
    def _plain_files(
        weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], copies: bool
    ) -> Callable[[Path], None]:
        """Return a function that writes whole tensors into a folder; they are copied before, if training does not wait."""
        model = {name: x.to("cpu", copy=copies) for name, x in weights.items()}

        def write(draft: Path) -> None:
            save_file(model, draft / "model.safetensors")
            save_file(dict(moments), draft / "optimizer.safetensors")

        return write

    @staticmethod
    def _write(path: Path, write_tensors: Callable[[Path], None], carried: Mapping[str, Tensor], state: Any) -> None:
        with atomic_folder(path, FILES) as draft:
            write_tensors(draft)
            if carried:
                save_file(dict(carried), draft / "carried.safetensors")
            (draft / "state.json").write_text(json.dumps(state), encoding="utf-8")

    def _run(
        self, write: Callable[[], None], in_background: bool, on_error: Callable[[BaseException], None] | None = None
    ) -> None:
        """Write a checkpoint, now or in the background."""
        if not in_background:
            return write()
        self._pending = Future()

        def work(pending: Future[None]) -> None:
            try:
                write()
                pending.set_result(None)
            except BaseException as error:
                if on_error is not None:
                    on_error(error)
                pending.set_exception(error)

        threading.Thread(target=work, args=(self._pending,), name="checkpoint").start()

    def wait(self) -> None:
        """Wait until a checkpoint that is written in the background is complete; raise the error if it is not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        carried: Mapping[str, Tensor] | None = None,
        ranks: SingleProcess | None = None,
    ) -> Progress:
        """Load weights, optimizer state, `carried` state and random generators in place, and return the progress.

        It may have been saved by another number of processes."""
        ranks, path = ranks or SingleProcess(), self.path(step)
        try:
            state = read_json(path / "state.json")
            progress = Progress.from_dict(state["progress"])
            if progress.step != step:
                raise ValueError(f"state.json is of step {progress.step}")
            if ranks.is_sharded or not (path / "model.safetensors").exists():
                load_shards(path, model, optimizer, ranks)
            else:
                load_weights(model, load_file(check_regular(path / "model.safetensors")), path)
                _load_optimizer(model, optimizer, load_file(check_regular(path / "optimizer.safetensors")))
            if carried:
                saved = load_file(check_regular(path / "carried.safetensors"))
                for name, x in carried.items():
                    x.copy_(ranks.own_rows(saved[name]))
            _set_rng_state(_rng_of_rank(state, ranks))
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
            for name, tensor in self._weights(step).items():
                total[name] = total.get(name, 0) + tensor.double()
        return {name: (tensor / len(steps)).float() for name, tensor in total.items()}

    def _weights(self, step: int) -> dict[str, Tensor]:
        """Return the weights of a checkpoint, whole."""
        path = self.path(step)
        if (path / "model.safetensors").exists():
            return load_file(path / "model.safetensors")
        others = load_file(path / "carried.safetensors").keys() if (path / "carried.safetensors").exists() else ()
        return {name: x for name, x in read_shards(path).items() if "/" not in name and name not in others}


def _get(drafts: queue.SimpleQueue[Path | BaseException]) -> Path:
    found = drafts.get()
    if isinstance(found, BaseException):
        raise found
    return found


def copy_outcome(done: Future[Any], written: Future[None]) -> None:
    """Let one future end as another has."""
    error = done.exception()
    written.set_exception(error) if error is not None else written.set_result(None)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}/{key}": value.detach() if hasattr(value, "full_tensor") else value.detach().cpu().clone()
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


def _rng_of_rank(state: dict[str, Any], ranks: SingleProcess) -> dict[str, str]:
    """Return the states of the generators of this process; one that the checkpoint does not have gets a state of its own."""
    saved = state.get("rank_rng", [state["rng"]])
    index = getattr(ranks, "rank", None)
    own = 0 if index is None else index.index
    if own < len(saved):
        return saved[own]
    torch.manual_seed(own)
    return _rng_state()


def _set_rng_state(state: dict[str, str]) -> None:
    tensors = {device: torch.tensor(list(bytes.fromhex(s)), dtype=torch.uint8) for device, s in state.items()}
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
