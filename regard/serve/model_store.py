"""The models of a server: by name, loaded when they are first asked for, given back when memory is short.

What inference returns from `regard.load` is used as it is; only its decoding goes through a scheduler, so that the sequences
of all requests are decoded together.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.decode.constraints import greedy_options
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import is_huggingface, model_settings
from regard.files import exists, read_json
from regard.inference.classifier import TASKS as CLASSIFICATION_TASKS
from regard.inference.classifier import Classifier
from regard.inference.generator import Generator
from regard.inference.load import load
from regard.inference.translator import Translator
from regard.model_folder import find
from regard.models.architectures import ARCHITECTURES
from regard.pretrained import bundled_models, bundled_path
from regard.serve.decoding_workers import WorkerProcesses
from regard.serve.request_context import Draining
from regard.serve.scheduler import Scheduler, WorkerLimits
from regard.vectors.word_vectors import is_folder

CPU_LIMITS = WorkerLimits(rows=32, tokens=1024)  # a core gains nothing from more, and the memory is bounded
GPU_LIMITS = WorkerLimits(rows=4096)


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be asked for."""

    name: str
    path: Path
    task: str  # translation, generation, classification, images, embedding or vectors


@dataclass
class LoadedModel:
    """A model in memory, with what `regard.load` returned."""

    entry: ModelEntry
    inference: Any
    scheduler: Scheduler | None
    processes: WorkerProcesses | None
    bytes: int
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        if self.processes is not None:
            self.processes.close()


class ModelStore:
    """The models of a server; all methods may be called from any thread."""

    def __init__(
        self,
        models: Mapping[str, Path],
        *,
        device: str = "auto",
        weights: str = "auto",
        workers: int = 0,
        queue_tokens: int = 1 << 16,
        memory_limit: int | None = None,
    ) -> None:
        """Take the folders of models by name; the first is the default.

        `workers` is the number of processes that decode on a CPU, 0 for one per core. `memory_limit` is a number of bytes of
        weights: beyond it, the models that were not used for the longest time are given back."""
        if not models:
            raise RegardError("no model to serve: name a folder, or leave it out for the bundled model")
        self.device, self.weights = pick_device(device), weights
        self.workers = workers or torch.get_num_threads()
        self.queue_tokens, self.memory_limit = queue_tokens, memory_limit
        self.entries = {name: ModelEntry(name, path, find_task(path)) for name, path in models.items()}
        self.lock = threading.Lock()
        self.loading: dict[str, threading.Lock] = {name: threading.Lock() for name in self.entries}
        self.loaded: dict[str, LoadedModel] = {}
        self.is_draining = False
        self.loads = 0

    @property
    def default(self) -> str:
        return next(iter(self.entries))

    def get(self, name: str | None = None) -> LoadedModel:
        """Return a model, which is loaded if it is not in memory; an unknown name is a KeyError."""
        name = name or self.default
        entry = self.entries[name]
        with self.loading[name]:  # two requests for the same model load it once
            with self.lock:
                found = self.loaded.get(name)
                if found is not None:
                    found.last_used = time.monotonic()
                    return found
            made = self._load(entry)
            with self.lock:
                self.loaded[name] = made
                self.loads += 1
                unused = self._beyond_limit(made)
            for one in unused:
                one.close()
            gc.collect()
            gc.freeze()  # later collections need not visit the objects of models and modules, while all requests wait
            return made

    @contextlib.contextmanager
    def lease(self, name: str | None = None) -> Iterator[LoadedModel]:
        """Return a model that is not given back inside of the context."""
        if self.is_draining:
            raise Draining("the server is stopping and takes no new requests")
        while True:
            found = self.get(name)
            with self.lock:
                if self.loaded.get(found.entry.name) is found:  # not given back in between
                    found.users += 1
                    break
        try:
            yield found
        finally:
            with self.lock:
                found.users -= 1
                found.last_used = time.monotonic()

    def _load(self, entry: ModelEntry) -> LoadedModel:
        on_cpu = self.device.type == "cpu"
        weights = self.weights
        if weights == "auto" and on_cpu and entry.name in bundled_models():
            weights = "int8"
        inference: Any = load(entry.path, str(self.device), weights)
        model = getattr(inference, "model", None)
        size = (
            sum(p.nbytes for p in [*model.parameters(), *model.buffers()]) if isinstance(model, torch.nn.Module) else 0
        )
        scheduler = processes = None
        if isinstance(inference, Translator | Generator):
            if on_cpu:
                processes = WorkerProcesses(entry.path, weights)
                scheduler = Scheduler(processes.make_worker, self.workers, self.queue_tokens, CPU_LIMITS)
            else:
                processes = WorkerProcesses(entry.path, weights, str(self.device))
                scheduler = Scheduler(processes.make_worker, 1, self.queue_tokens, GPU_LIMITS)
                size *= 2  # the process has the weights once more
            if isinstance(inference, Translator):
                inference.decode = scheduler.decode
            else:
                inference.steps = scheduler.generation_steps
        return LoadedModel(entry, inference, scheduler, processes, size)

    def _beyond_limit(self, made: LoadedModel) -> list[LoadedModel]:
        """Take models out of memory that are not in use, the least recently used first, until the limit is kept."""
        if self.memory_limit is None:
            return []
        unused = sorted(
            (one for one in self.loaded.values() if not one.users and one is not made), key=lambda one: one.last_used
        )
        gone = []
        while unused and sum(one.bytes for one in self.loaded.values()) > self.memory_limit:
            gone.append(unused.pop(0))
            del self.loaded[gone[-1].entry.name]
        return gone

    # ---- operation -----------------------------------------------------------------------------------------------------

    def check(self, name: str | None = None) -> float:
        """Run a model on a short text, through its workers, and return the seconds it took."""
        start = time.monotonic()
        with self.lease(name) as loaded:
            inference = loaded.inference
            if isinstance(inference, Translator):
                short: dict[str, Any] = {**greedy_options(), "max_len_b": 1, "max_len_a": 0.0}
                inference.translate_sentences(["a"], to=first_target(inference), **short)
            elif isinstance(inference, Generator):
                inference.generate("a", max_new_tokens=1)
            elif isinstance(inference, Classifier):
                if inference.model is not None and loaded.entry.task == "classification":
                    inference.classify(["a"])
            elif hasattr(inference, "embed"):
                inference.embed(["a"])
        return time.monotonic() - start

    def statistics(self) -> dict[str, Any]:
        """Return numbers for metrics: of all loaded models together, and by model."""
        with self.lock:
            loaded = dict(self.loaded)
        by_model = {name: one.scheduler.statistics() for name, one in loaded.items() if one.scheduler}
        names = ("queued_tokens", "queued_sequences", "running_sequences", "workers", "lost_workers", "done_sequences")
        total = {key: sum(own[key] for own in by_model.values()) for key in names}
        return {
            **total,
            "queue_tokens_limit": self.queue_tokens,
            "loaded_models": len(loaded),
            "loads": self.loads,
            "bytes": sum(one.bytes for one in loaded.values()),
            "models": by_model,
        }

    def drain(self, seconds: float) -> bool:
        """Take no new requests and wait until those that are there are answered; return whether they all are."""
        self.is_draining = True
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self.lock:
                busy = any(one.users for one in self.loaded.values())
            if not busy:
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        """Give back all models and end their workers."""
        with self.lock:
            loaded, self.loaded = list(self.loaded.values()), {}
        for one in loaded:
            one.close()


def first_target(translator: Translator) -> str | None:
    """Return a language that a model translates to, or None for a model of one direction."""
    return translator.directions[0].split(">")[1] if translator.directions else None


def find_task(path: Path) -> str:
    """Return what a model is for, without loading it."""
    if str(path) in bundled_models():
        path = bundled_path(str(path))
    if (exists(path) and path.is_file()) or is_folder(path):
        return "vectors"
    folder = find(path)
    task = "" if is_huggingface(folder) else read_json(folder / "config.json")["task"]
    if task in CLASSIFICATION_TASKS:
        return "images" if task.startswith("image") else "classification"
    kind = ARCHITECTURES[model_settings(folder)["architecture"]]
    return "translation" if kind.translates else "generation" if kind.generates else "embedding"
