"""One job of the study: train a model with one position scheme on one task, then test it at longer lengths."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from regard import __version__
from regard.config import ModelConfig, TrainConfig
from regard.config.recipes import changed_settings
from regard.device import autocast, set_up_device
from regard.files import write_text
from regard.models.architectures import preset
from regard.models.gpt import GPT
from regard.studies.tasks import Copy, Settings, Task, Text, read_text
from regard.text.special_tokens import PAD
from regard.training.optimizer import Updater, learning_rate

TASKS = ("lm", "copy")

# What a model trained with a scheme is tested as: the row's name -> what its configuration changes. RoPE's scalings and YaRN
# are ways to read a longer text with the weights that plain RoPE learned.
Changes = Callable[[float, int], dict[str, Any]]  # of a model's settings: factor and trained length -> other settings
ROPE_ROWS: dict[str, Changes] = {
    "rope": lambda factor, length: {},
    "rope + linear": lambda factor, length: {"rope": {"scaling": "linear", "factor": factor}},
    "rope + ntk": lambda factor, length: {"rope": {"scaling": "ntk", "factor": factor}},
    "yarn": lambda factor, length: {"positions": "yarn", "yarn": {"factor": factor, "trained_len": length}},
}


def rows_of(scheme: str) -> dict[str, Changes]:
    return ROPE_ROWS if scheme == "rope" else {scheme: lambda factor, length: {}}


@dataclass(frozen=True)
class Job:
    task: str
    scheme: str
    settings: Settings
    folder: Path  # where its result goes
    data: Path | None = None
    text: str = ""  # SHA-256 of what `data` holds, or of the embedded text
    device: str = "cpu"
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.task}-{self.scheme}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    def identity(self) -> dict[str, Any]:
        """What its numbers depend on, as JSON gives it back."""
        own = {"task": self.task, "scheme": self.scheme, "settings": dataclasses.asdict(self.settings)}
        own |= {"text": self.text} if self.task == "lm" else {}
        return json.loads(json.dumps(own | machine(self.device)))


def machine(device: str) -> dict[str, str]:
    """What runs the study."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"device": name, "torch": torch.__version__, "regard": __version__}


def run_job(job: Job) -> None:
    """Train, test, and write the result."""
    begun = time.perf_counter()
    device, dtype = set_up_device(TrainConfig(device=job.device, threads=job.threads))
    task = make_task(job.task, job.data, job.settings)
    torch.manual_seed(job.settings.seed)
    model = GPT(model_config(job.scheme, task.vocab, job.settings, job.task)).to(device)
    training = train(model, task, job.settings, device, dtype)
    trained = time.perf_counter()
    if isinstance(task, Text):
        training["valid_bits"] = task.bits(model, task.valid, 1).mean().item()
    rows = {row: measure(model, task, changes, job.settings) for row, changes in rows_of(job.scheme).items()}
    training |= {"train_seconds": trained - begun, "test_seconds": time.perf_counter() - trained}
    write_text(job.result, json.dumps({"of": job.identity(), "training": training, "rows": rows}, indent=1))


def make_task(name: str, data: Path | None, s: Settings) -> Task:
    return make_text(data, s) if name == "lm" else Copy(s)


@functools.lru_cache(maxsize=1)
def make_text(data: Path | None, s: Settings) -> Text:
    return Text(read_text(data, s.sentences), s)


def model_config(scheme: str, vocab: int, s: Settings, task: str) -> ModelConfig:
    """The same model for every scheme. Learned positions reach as far as the tests go, but only the first L are trained."""
    tables = {"fire": {"threshold": float(s.length)}, "cope": {"positions": s.length}}
    return preset(
        "gpt-tiny",
        n_decoder_layers=s.layers,
        d_model=s.width,
        n_heads=s.heads,
        d_ff=s.d_ff,
        dropout=s.lm_dropout if task == "lm" else s.copy_dropout,
        positions=scheme,
        target_vocab=vocab,
        max_len=max(s.multiples) * s.length,
        **{name: table for name, table in tables.items() if name == scheme},
    )


def train(model: GPT, task: Task, s: Settings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """AdamW with warm-up and a cosine. Not compiled: at this size, compiling would take as long as the training does."""
    config = TrainConfig(steps=s.steps, lr=s.lr, warmup=s.steps // 10, schedule="cosine")
    updater, losses = Updater(model, config), torch.zeros(s.steps, device=device)
    model.train()
    for step, (inputs, labels) in enumerate(task.batches(s.steps, device), 1):
        with autocast(device, dtype):
            logits = model(inputs)  # (B, T, V)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=PAD)
        loss.backward()
        updater.set_lr(learning_rate(config, step))
        updater.step(loss.detach())
        losses[step - 1] = loss.detach()
    curve = [part.mean().item() for part in losses.cpu().tensor_split(min(s.steps, 50))]
    return {"losses": curve, "first_bad_step": updater.first_bad_step(0)}


def measure(model: GPT, task: Task, changes: Changes, s: Settings) -> dict[str, dict[str, Any]]:
    """Scores by length, of the model as it is or read in another way."""
    return {str(n * s.length): task.measure(read_as(model, changes(float(n), s.length)), n) for n in s.multiples}


def read_as(model: GPT, changes: dict[str, Any]) -> GPT:
    """The same weights in a model of another configuration."""
    if not changes:
        return model
    other = GPT(changed_settings(model.config, **changes))
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).device)
