"""The systems and the jobs of `regard study long-range`.

A job trains one system on one task and scores it, or measures one system's time and memory against the length of a text.
The systems differ in how they mix tokens. Their depth and width are alike, and the width of their feed-forward layers is
chosen so that they have nearly as many parameters as the model of attention.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import ModelConfig, TrainConfig
from regard.config.recipes import changed_settings
from regard.config.registry import find
from regard.data.batches import Batch
from regard.device import autocast, set_up_device
from regard.files import write_text
from regard.kernels.cuda_graph import GraphedCallable
from regard.models.analysis.cost import Cost
from regard.models.architectures import make_model, preset
from regard.studies.job_pool import describe_machine
from regard.studies.layer_comparison import measure_memory, measure_seconds
from regard.studies.long_range_tasks import Copying, LongRangeTask, Recall, Text
from regard.studies.position_study_jobs import read_text
from regard.training.objective import Objective, make_token_objective
from regard.training.optimizer import Updater, scheduled_learning_rate
from regard.training.training_step import TrainingStep


@dataclass(frozen=True)
class LongRangeSettings:
    """Everything that determines the numbers of the study, apart from the system, the text and the machine."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    length: int = 256
    copied: int = 16  # symbols to copy
    symbols: int = 16  # size of their alphabet
    keys: int = 128  # different keys, and different values, of associative recall
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    batch: int = 128  # rows
    steps: int = 3000
    rates: tuple[float, ...] = (2e-3, 1e-2)  # learning rates to try: the one with the lower loss at the end counts
    text_layers: int = 6  # the character model is larger, about as large as that of the recipe shakespeare-char
    text_width: int = 384
    text_heads: int = 6
    text_dropout: float = 0.2  # of attention weights too
    text_batch: int = 64
    text_steps: int = 2000
    text_rate: float = 1e-3
    text_every: int = 250  # steps between two validations: the lowest loss counts
    tests: int = 512  # test sequences of each kind
    cost_width: int = 512
    cost_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    cost_tokens: int = 65536  # of a training batch, in many short rows or few long ones
    cost_rows: int = 4  # texts that are decoded at once
    cost_repeats: int = 5
    cost_limit: float = 8.0  # seconds: a length whose step would take longer is left out, judged by the length before
    seed: int = 0


ON_CPU = LongRangeSettings(
    width=64, heads=2, length=64, copied=8, keys=32, pairs=(4, 8, 16), batch=64, steps=1500,
    text_layers=4, text_width=128, text_heads=4, text_dropout=0.0, text_batch=32, text_steps=1500, text_rate=2e-3,
    cost_width=64, cost_lengths=(1024, 4096, 16384, 65536), cost_rows=1, cost_repeats=3, cost_limit=10.0,
)  # fmt: skip
QUICK = LongRangeSettings(
    width=16, heads=2, length=24, copied=4, symbols=4, keys=6, pairs=(2, 4), batch=8, steps=3, text_batch=4, text_steps=2,
    text_layers=2, text_width=16, text_heads=2, text_every=1,
    tests=16, cost_width=16, cost_lengths=(32, 64), cost_tokens=64, cost_rows=2, cost_repeats=1, cost_limit=5.0,
)  # fmt: skip

# ---- systems: settings of the model, and the setting that makes its size equal to that of others -------------------------

PLAIN: dict[str, Any] = {"positions": "none"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "attention": {"mixer": "attention", "positions": "rope"},
    "lstm": {"preset": "lstm-small", "layers": 2},  # more layers without residual connections learn badly
    "linear-attention": {"mixer": "linear-attention", "positions": "sinusoidal"},
    "rwkv": {**PLAIN, "mixer": "rwkv", "feedforward": "rwkv-channel-mix"},
    "s4": {**PLAIN, "mixer": "s4"},
    "s4d": {**PLAIN, "mixer": "s4d"},
    # Mamba has no feed-forward layers, but twice as many blocks.
    "mamba": {"preset": "mamba-tiny", "mixer": "mamba", "blocks": 2},
    "mamba2": {"preset": "mamba2-tiny", "mixer": "mamba2", "blocks": 2, "mamba2": {"d_head": 16, "d_state": 64}},
    "gla": {**PLAIN, "mixer": "gla"},
    "based": {  # one block more, so that every kind of mixer is there
        "mixer": ("short-convolution", "based", "attention"),
        **{"positions": "rope", "blocks": 1.5, "attention": {"window": 64}},
    },
}
# Settings of the recipe shakespeare-char that the character models have, too: of those with feed-forward layers, and of
# all trainings.
RECIPE: dict[str, Any] = {"activation": "gelu", "bias": False, "scale_embeddings": False}
TRAINING: dict[str, Any] = {"schedule": "cosine", "beta2": 0.99, "weight_decay": 0.1, "label_smoothing": 0.0}
TITLES = {
    **{"attention": "attention", "lstm": "LSTM", "linear-attention": "linear attention", "rwkv": "RWKV-4", "s4": "S4"},
    **{"s4d": "S4D", "mamba": "Mamba", "mamba2": "Mamba-2", "gla": "GLA", "based": "Based"},
}


def mixers_of(system: str) -> set[str]:
    """Return the names of the token mixers of a system; an LSTM has none."""
    names = SYSTEMS[system].get("mixer", ())
    return {names} if isinstance(names, str) else set(names)


def has_fitted_size(system: str) -> bool:
    """Return whether a system has feed-forward or recurrent layers, whose width makes its size equal to that of others."""
    return not mixers_of(system) or "preset" not in SYSTEMS[system]


def text_sizes(s: LongRangeSettings) -> LongRangeSettings:
    """Return the settings with the sizes of the character model in the places of the others."""
    return dataclasses.replace(s, layers=s.text_layers, width=s.text_width, heads=s.text_heads)


def make_model_config(system: str, vocab: int, width: int, s: LongRangeSettings, max_len: int) -> ModelConfig:
    """Return the configuration of a system, with nearly as many parameters as Mamba, whose size follows from its width."""
    wanted = _parameters(_config("mamba", vocab, width, s, max_len, 0))
    if not has_fitted_size(system):
        return _config(system, vocab, width, s, max_len, 0)
    low, high = 1, 64  # multiples of width / 8
    make = functools.partial(_config, system, vocab, width, s, max_len)
    unit = max(2, width // 8)
    while low < high:  # the first size that has as many parameters
        middle = (low + high) // 2
        low, high = (low, middle) if _parameters(make(middle * unit)) >= wanted else (middle + 1, high)
    sizes = [max(1, low - 1) * unit, low * unit]
    return min((make(size) for size in sizes), key=lambda config: abs(_parameters(config) - wanted))


def _config(system: str, vocab: int, width: int, s: LongRangeSettings, max_len: int, size: int) -> ModelConfig:
    """Return the configuration with a given width of its feed-forward layers, or of its recurrent layers."""
    settings = {"preset": "gpt-tiny", **SYSTEMS[system]}
    name = settings.pop("preset")
    layers = settings.pop("layers", None) or round(settings.pop("blocks", 1) * s.layers)
    sizes = {"n_decoder_layers": layers, "d_model": width, "target_vocab": vocab, "max_len": max_len, "dropout": 0.0}
    if not mixers_of(system):
        return preset(name, **sizes, **settings, recurrent={"d_hidden": size})
    if any("n_heads" in find("mixer", mixer).reads for mixer in mixers_of(system)):
        sizes["n_heads"] = s.heads
    if has_fitted_size(system):
        sizes["d_ff"] = size
    return preset(name, **sizes, **settings)


def _parameters(config: ModelConfig) -> int:
    return Cost(config).parameters


# ---- jobs ----------------------------------------------------------------------------------------------------------------

TASKS = ("copying", "selective-copying", "recall", "text")
COST = "cost"
COMMON = ("length", "tests", "seed")  # settings that all jobs but those of costs may read
OF_MEMORY = ("layers", "width", "heads", "batch", "steps", "rates")
OF_COPYING = (*OF_MEMORY, "copied", "symbols")
READ = {  # the other settings that the jobs of a task read
    "copying": OF_COPYING,
    "selective-copying": OF_COPYING,
    "recall": (*OF_MEMORY, "keys", "pairs"),
    "text": tuple(field.name for field in dataclasses.fields(LongRangeSettings) if field.name.startswith("text_")),
    COST: ("layers", "heads", *(f.name for f in dataclasses.fields(LongRangeSettings) if f.name.startswith("cost_"))),
}


@dataclass(frozen=True)
class LongRangeJob:
    """The training and the test of one system on one task, or the measurement of its time and memory."""

    task: str
    system: str
    settings: LongRangeSettings
    folder: Path  # of the result
    data: Path | None = None
    text: str = ""  # SHA-256 of the text in `data`
    device: str = "cpu"
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.task}-{self.system}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    def identity(self) -> dict[str, Any]:
        """Return what the numbers of the job depend on, as JSON values."""
        settings = {name: getattr(self.settings, name) for name in (*COMMON, *READ[self.task])}
        own: dict[str, Any] = {"task": self.task, "system": SYSTEMS[self.system], "settings": settings}
        if self.task == "text":
            own |= {"text": self.text, "recipe": [text_model_settings(self), TRAINING]}
        return json.loads(json.dumps(own | describe_machine(self.device)))


def run_job(job: LongRangeJob) -> None:
    """Train and test a system, or measure its time and memory, and write the result."""
    device, dtype = set_up_device(TrainConfig(device=job.device, threads=job.threads))
    torch.manual_seed(job.settings.seed)
    run = measure_costs if job.task == COST else train_and_test
    write_text(job.result, json.dumps({"of": job.identity(), **run(job, device, dtype)}, indent=1))


def make_task(job: LongRangeJob) -> LongRangeTask:
    """Return the task of a job."""
    s = job.settings
    if job.task == "text":
        assert job.data is not None
        return load_text(job.data, s.length)
    if job.task == "recall":
        return Recall(s.length, s.keys, s.pairs)
    return Copying(s.length, s.copied, s.symbols, scattered=job.task == "selective-copying")


@functools.lru_cache(maxsize=1)
def load_text(data: Path, length: int) -> Text:
    return Text(read_text(data, 0), length)


def hash_text(data: Path) -> str:
    """Return the SHA-256 of a text, which may be compressed."""
    return hashlib.sha256(read_text(data, 0).encode()).hexdigest()


# ---- training ------------------------------------------------------------------------------------------------------------


def train_and_test(job: LongRangeJob, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Train a system with each learning rate; return losses and scores of the one whose loss is the lowest at the end."""
    begun = time.perf_counter()
    if job.task == "text":
        return train_on_text(job, device, dtype) | {"seconds": time.perf_counter() - begun}
    tried = [train_once(job, lr, device, dtype) for lr in job.settings.rates]
    best = min(tried, key=lambda found: (math.isnan(found["losses"][-1]), found["losses"][-1]))
    last = {str(found["lr"]): found["losses"][-1] for found in tried}
    return best | {"last_losses": last, "seconds": time.perf_counter() - begun}


def train_once(job: LongRangeJob, lr: float, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Train a system on batches that are made on the way, and return its losses and scores."""
    s, task = job.settings, make_task(job)
    torch.manual_seed(s.seed)
    model = make_model(make_model_config(job.system, task.vocab, s.width, s, s.length)).to(device)
    config = TrainConfig(steps=s.steps, lr=lr, warmup=max(1, s.steps // 10), schedule="cosine")
    updater, losses = Updater(model, config), torch.zeros(s.steps, device=device)
    step = GraphedStep(model, updater, device, dtype)
    generator = torch.Generator(device).manual_seed(s.seed)
    model.train()
    for i in range(s.steps):
        updater.set_lr(scheduled_learning_rate(config, i + 1))
        step(*task.batch(s.batch, generator))
        losses[i] = step.loss
    scores = task.measure(model, s.tests, torch.Generator(device).manual_seed(s.seed + 1))
    curve = [part.mean().item() for part in losses.cpu().tensor_split(min(s.steps, 50))]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "scores": scores,
        "losses": curve,
        "lr": lr,
        "first_bad_step": updater.first_bad_step(0),
    }


def train_on_text(job: LongRangeJob, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Train a character model as `regard train shakespeare-char` does; return its validation losses and the lowest."""
    s, task = job.settings, make_task(job)
    torch.manual_seed(s.seed)
    config = make_model_config(job.system, task.vocab, s.text_width, text_sizes(s), s.length)
    model = make_model(changed_settings(config, **text_model_settings(job))).to(device)
    plain = copy.deepcopy(model)  # for validation: not compiled
    training = TrainConfig(steps=s.text_steps, lr=s.text_rate, warmup=min(100, s.text_steps), **TRAINING)
    step = TrainingStep(make_token_objective(model.train(), training), training, device, dtype)
    generator, valid = torch.Generator(device).manual_seed(s.seed), {}
    for i in range(1, s.text_steps + 1):
        inputs, labels = task.batch(s.text_batch, generator)
        step([Batch((inputs, labels), labels.numel())], scheduled_learning_rate(training, i))
        if i % s.text_every == 0 or i == s.text_steps:
            plain.load_state_dict(model.state_dict())
            valid[i] = task.measure(plain, s.tests, generator)["loss"]
    best = min(valid, key=lambda i: (math.isnan(valid[i]), valid[i]))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "scores": {"loss": valid[best]},
        "step": best,
        "valid": valid,
        "first_bad_step": step.updater.first_bad_step(0),
    }


def text_model_settings(job: LongRangeJob) -> dict[str, Any]:
    """Return the settings that the character model has beside its sizes: those of the recipe, and dropout everywhere."""
    p = job.settings.text_dropout
    if not mixers_of(job.system):  # recurrent layers
        return {"dropout": p, "recurrent.hidden_dropout": p, "recurrent.output_dropout": p}
    settings = {"dropout": p, **(RECIPE if has_fitted_size(job.system) else {})}
    return settings | ({"attention_dropout": p} if "attention" in mixers_of(job.system) else {})


class GraphedStep:
    """A training step, on a GPU in a CUDA graph. The model is not compiled, which would take longer than its training."""

    def __init__(self, model: nn.Module, updater: Updater, device: torch.device, dtype: torch.dtype) -> None:
        self.objective, self.updater, self.device, self.dtype = Objective(model), updater, device, dtype
        self.loss = torch.zeros((), device=device)
        self.run: Callable[..., None] = GraphedCallable(self.step) if device.type == "cuda" else self.step

    def __call__(self, inputs: Tensor, labels: Tensor) -> None:
        self.run(inputs, labels)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        with autocast(self.device, self.dtype):
            sums = self.objective(inputs, labels)
        loss = sums[0] / sums[2]
        loss.backward()
        self.updater.step(loss.detach())
        self.loss.copy_(loss.detach())


# ---- time and memory -----------------------------------------------------------------------------------------------------

COST_VOCAB = 256


def measure_costs(job: LongRangeJob, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return time and memory of a training step and of a decoded token at each length, as far as they are within limits."""
    s = job.settings
    config = make_model_config(job.system, COST_VOCAB, s.cost_width, s, max(s.cost_lengths) + 16)
    found: dict[str, Any] = {"parameters": _parameters(config)}
    for kind, measure in (("training", measure_training), ("decoding", measure_decoding)):
        rows: list[dict[str, Any]] = []
        for n in s.cost_lengths:
            try:
                rows.append({"length": n, **measure(make_model(config).to(device), n, s, device, dtype)})
            except torch.OutOfMemoryError:
                rows.append({"length": n, "left_out": "memory"})
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            slow = rows[-1].get("pass_seconds", 0) * 2 > s.cost_limit
            if "left_out" in rows[-1] or slow:
                why = rows[-1].get("left_out", "time")
                rows += [{"length": more, "left_out": why} for more in s.cost_lengths if more > n]
                break
        found[kind] = rows
    return found


def measure_training(
    model: nn.Module, n: int, s: LongRangeSettings, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the time of a training step over `cost_tokens` tokens in rows of n, and its memory."""
    ids = torch.randint(3, COST_VOCAB, (max(1, s.cost_tokens // n), n + 1), device=device)
    objective = Objective(model)
    parameters = [*model.parameters()]

    def work() -> None:
        with autocast(device, dtype):
            sums = objective(ids[:, :-1], ids[:, 1:])
        torch.autograd.grad(sums[0] / sums[2], parameters)

    taken = time_pass(work, device)
    if taken < 10 * s.cost_limit:  # the first pass loads kernels, so it says little
        taken = time_pass(work, device)
    memory = measure_memory(work, device)
    seconds = measure_seconds(work, device, s.cost_repeats) if taken < s.cost_limit else taken
    return {"seconds": seconds, "bytes": memory, "rows": len(ids), "pass_seconds": taken}


@torch.no_grad()
def measure_decoding(
    model: nn.Module, n: int, s: LongRangeSettings, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the time of one more token of `cost_rows` texts after n tokens each, and the memory of their state.

    A CUDA graph repeats the step at one length: it writes the same place of a cache again."""
    model.eval()
    ids = torch.randint(3, COST_VOCAB, (s.cost_rows, n), device=device)
    kept: list[Any] = []

    def read() -> None:
        with autocast(device, dtype):
            kept[:] = [model.begin(ids)[1]]  # type: ignore[operator]

    taken = time_pass(read, device)

    def work() -> None:
        with autocast(device, dtype):
            model.step(ids[:, 0], kept[0])  # type: ignore[operator]

    work()
    memory = kept[0].nbytes()
    seconds = measure_seconds(work, device, s.cost_repeats)
    return {"seconds": seconds, "bytes": memory, "rows": s.cost_rows, "pass_seconds": taken}


def time_pass(work: Callable[[], None], device: torch.device) -> float:
    """Return the wall-clock time of one eager run."""
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
