"""Jobs of the study of position schemes: train a model with one scheme on one task, then test it at longer lengths.

The tasks are character-level language modelling and copying a string. A task gives training batches of inputs and labels
(B, T), and measures a model at n times the trained length. Id 0 is padding; labels of 0 are not scored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.config import ModelConfig, TrainConfig
from regard.config.recipes import changed_settings
from regard.data import toy
from regard.data.parallel_corpus import read_lines
from regard.device import autocast, pick_precision, set_up_device
from regard.errors import RegardError
from regard.files import write_text
from regard.models.architectures import preset
from regard.models.gpt import GPT
from regard.studies.job_pool import describe_machine
from regard.text.special_tokens import PAD
from regard.training.optimizer import Updater, scheduled_learning_rate


@dataclass(frozen=True)
class PositionStudySettings:
    """Everything that determines the numbers of the study, apart from the scheme, the text and the machine."""

    length: int = 128  # L, the trained length
    multiples: tuple[int, ...] = (1, 2, 4, 8)  # of L: the tested lengths
    layers: int = 4
    width: int = 256
    heads: int = 4
    d_ff: int = 1024
    lm_dropout: float = 0.1
    copy_dropout: float = 0.0
    batch: int = 64
    steps: int = 2000
    lr: float = 1e-3
    windows: int = 512  # test windows of text
    strings: int = 256  # test strings to copy at each length
    symbols: int = 32  # size of the alphabet of strings
    sentences: int = 20000  # of the embedded corpus, if no text is given
    seed: int = 0


QUICK = PositionStudySettings(
    length=32, layers=2, width=64, heads=2, d_ff=128, batch=16, steps=40, windows=16, strings=16, sentences=2000
)

Batch = tuple[Tensor, Tensor]  # inputs and labels, (B, T) each


class Task(Protocol):
    """A task that is learned at one length and tested at longer ones."""

    vocab: int

    def batches(self, steps: int, device: torch.device) -> Iterator[Batch]:
        """Yield the training batches, which are the same every time."""

    def measure(self, model: GPT, multiple: int) -> dict[str, Any]:
        """Return the scores at `multiple` times the trained length."""


def compute_logits(model: GPT, inputs: Tensor, labels: Tensor, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits (b, T, V) in fp32, labels (b, T)) of a few rows at a time, in training precision, without dropout."""
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // inputs.shape[1])
    model.eval()
    for x, y in zip(inputs.split(rows), labels.split(rows), strict=True):
        with torch.inference_mode(), autocast(device, pick_precision("auto", device)):
            logits = model(x.to(device)).float()
        yield logits, y.to(device)


# ---- character-level language modelling -------------------------------------------------------------------------------

UNKNOWN, FIRST_CHARACTER = 1, 2  # ids of characters that the training text lacks, and of its first character


def read_text(data: Path | None, sentences: int) -> str:
    """Return the text of a file, which may be compressed, or English sentences of the embedded corpus."""
    lines = read_lines(data) if data else (english for english, _ in toy.pairs(sentences))
    return "\n".join(lines)


class TextTask:
    """Character-level language modelling: 90% of the text for training, 5% for validation, 5% for the test.

    Windows of every tested length end at the same places, and the blocks of L characters at their ends do not overlap: the
    same characters are predicted at every length, from more or fewer characters before them.
    """

    def __init__(self, text: str, s: PositionStudySettings) -> None:
        self.s, self.sha256 = s, hashlib.sha256(text.encode()).hexdigest()
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        cuts = [len(codes) * 90 // 100, len(codes) * 95 // 100]
        longest = max(s.multiples) * s.length
        if min(np.diff([*cuts, len(codes)])) <= longest:
            least = 20 * (longest + 1)  # 5% of it must hold a window and the character after it
            raise RegardError(f"the text has {len(codes):,} characters: give one of at least {least:,}")
        known = np.unique(codes[: cuts[0]])
        place = np.searchsorted(known, codes).clip(max=len(known) - 1)
        ids = np.where(known[place] == codes, place + FIRST_CHARACTER, UNKNOWN)
        self.vocab = len(known) + FIRST_CHARACTER
        self.train, self.valid, self.test = (torch.from_numpy(part) for part in np.split(ids, cuts))

    def batches(self, steps: int, device: torch.device) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.s.seed)
        begins = torch.randint(len(self.train) - self.s.length, (steps, self.s.batch, 1), generator=generator).to(
            device
        )
        text, within = self.train.to(device), torch.arange(self.s.length + 1, device=device)
        for begin in begins:
            ids = text[begin + within]  # (B, L + 1)
            yield ids[:, :-1], ids[:, 1:]

    def windows(self, text: Tensor, multiple: int) -> Batch:
        """Return inputs and labels (W, multiple * L) of windows that end at the same places whatever the multiple."""
        length, longest = self.s.length, max(self.s.multiples) * self.s.length
        fit = (len(text) - 1 - longest) // length + 1
        chosen = torch.linspace(0, fit - 1, min(fit, self.s.windows)).round().long()
        within = torch.arange(-multiple * length, 1)
        ids = text[(longest + chosen * length)[:, None] + within]
        return ids[:, :-1], ids[:, 1:]

    def measure(self, model: GPT, multiple: int) -> dict[str, Any]:
        """Return bits per character over whole windows, over their last L characters, and along the window by L/4."""
        bits = self.bits(model, self.test, multiple)
        along = bits.mean(0).view(-1, self.s.length // 4).mean(1)
        return {"last": bits[:, -self.s.length :].mean().item(), "whole": bits.mean().item(), "along": along.tolist()}

    def bits(self, model: GPT, text: Tensor, multiple: int) -> Tensor:
        """Return -log2 p of each character of each window, (W, multiple * L) fp64."""
        inputs, labels = self.windows(text, multiple)
        parts = [
            F.cross_entropy(logits.transpose(1, 2), y, reduction="none").double().cpu()
            for logits, y in compute_logits(model, inputs, labels, self.s.batch * self.s.length)
        ]
        return torch.cat(parts) / math.log(2)


# ---- copying ----------------------------------------------------------------------------------------------------------

SEPARATOR, FIRST_SYMBOL = 1, 2


def make_copies(lengths: Tensor, width: int, symbols: int, generator: torch.Generator) -> Batch:
    """Return inputs and labels: m random symbols, a separator, the same m symbols, padding to `width`.

    `lengths` (B,) are the values of m. Only the second m symbols are scored.
    """
    m, at = lengths[:, None], torch.arange(width + 1)
    string = torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + symbols, (len(lengths), width + 1), generator=generator)
    ids = string.gather(
        1, torch.where(at < m, at, at - m - 1).clamp(min=0)
    )  # the value at the separator is replaced below
    ids = ids.masked_fill(at == m, SEPARATOR).masked_fill(at > 2 * m, PAD)
    return ids[:, :-1], ids[:, 1:].masked_fill(at[:-1] < m, PAD)


class CopyTask:
    """Copying: strings of 4 to L/2 - 1 symbols in training, of half the tested length less one in the test (2m + 1 ids)."""

    def __init__(self, s: PositionStudySettings) -> None:
        self.s, self.vocab = s, FIRST_SYMBOL + s.symbols

    def batches(self, steps: int, device: torch.device) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.s.seed)
        for _ in range(steps):
            lengths = torch.randint(4, self.s.length // 2, (self.s.batch,), generator=generator)
            inputs, labels = make_copies(lengths, self.s.length, self.s.symbols, generator)
            yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def measure(self, model: GPT, multiple: int) -> dict[str, Any]:
        """Return the shares of symbols and of whole strings predicted correctly, with teacher forcing."""
        width, generator = multiple * self.s.length, torch.Generator().manual_seed(self.s.seed + 1)
        lengths = torch.full((self.s.strings,), width // 2 - 1)
        inputs, labels = make_copies(lengths, width, self.s.symbols, generator)
        right = torch.cat(
            [
                (logits.argmax(-1) == y)[y != PAD].view(len(y), -1).cpu()
                for logits, y in compute_logits(model, inputs, labels, self.s.batch * self.s.length)
            ]
        )  # (strings, m)
        return {"symbols": right.double().mean().item(), "strings": right.all(1).double().mean().item()}


# ---- jobs -------------------------------------------------------------------------------------------------------------

TASKS = ("lm", "copy")

# The configurations in which a trained model is tested: row of the table -> changed settings. RoPE's scalings and YaRN read
# longer texts with the weights that plain RoPE learned.
Changes = Callable[[float, int], dict[str, Any]]  # factor and trained length -> changed settings
ROPE_ROWS: dict[str, Changes] = {
    "rope": lambda factor, length: {},
    "rope + linear": lambda factor, length: {"rope": {"scaling": "linear", "factor": factor}},
    "rope + ntk": lambda factor, length: {"rope": {"scaling": "ntk", "factor": factor}},
    "yarn": lambda factor, length: {"positions": "yarn", "yarn": {"factor": factor, "trained_len": length}},
}


def list_rows(scheme: str) -> dict[str, Changes]:
    return ROPE_ROWS if scheme == "rope" else {scheme: lambda factor, length: {}}


@dataclass(frozen=True)
class PositionStudyJob:
    """The training and the tests of one scheme on one task."""

    task: str
    scheme: str
    settings: PositionStudySettings
    folder: Path  # of the result
    data: Path | None = None
    text: str = ""  # SHA-256 of the text in `data`, or of the embedded corpus
    device: str = "cpu"
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.task}-{self.scheme}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    def identity(self) -> dict[str, Any]:
        """Return what the numbers of the job depend on, as JSON values."""
        own = {"task": self.task, "scheme": self.scheme, "settings": dataclasses.asdict(self.settings)}
        own |= {"text": self.text} if self.task == "lm" else {}
        return json.loads(json.dumps(own | describe_machine(self.device)))


def run_job(job: PositionStudyJob) -> None:
    """Train a model, test it, and write the result."""
    begun = time.perf_counter()
    device, dtype = set_up_device(TrainConfig(device=job.device, threads=job.threads))
    task = make_task(job.task, job.data, job.settings)
    torch.manual_seed(job.settings.seed)
    model = GPT(make_model_config(job.scheme, task.vocab, job.settings, job.task)).to(device)
    training = train(model, task, job.settings, device, dtype)
    trained = time.perf_counter()
    if isinstance(task, TextTask):
        training["valid_bits"] = task.bits(model, task.valid, 1).mean().item()
    rows = {row: measure_lengths(model, task, changes, job.settings) for row, changes in list_rows(job.scheme).items()}
    training |= {"train_seconds": trained - begun, "test_seconds": time.perf_counter() - trained}
    write_text(job.result, json.dumps({"of": job.identity(), "training": training, "rows": rows}, indent=1))


def make_task(name: str, data: Path | None, s: PositionStudySettings) -> Task:
    return load_text_task(data, s) if name == "lm" else CopyTask(s)


@functools.lru_cache(maxsize=1)
def load_text_task(data: Path | None, s: PositionStudySettings) -> TextTask:
    return TextTask(read_text(data, s.sentences), s)


def make_model_config(scheme: str, vocab: int, s: PositionStudySettings, task: str) -> ModelConfig:
    """Return the configuration of the model, which differs between schemes in the scheme alone.

    The table of learned positions covers the longest test, but only its first L rows are trained.
    """
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


def train(model: GPT, task: Task, s: PositionStudySettings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Train with AdamW, warm-up and a cosine schedule.

    The model is not compiled: at this size compiling would take as long as the training.
    """
    config = TrainConfig(steps=s.steps, lr=s.lr, warmup=s.steps // 10, schedule="cosine")
    updater, losses = Updater(model, config), torch.zeros(s.steps, device=device)
    model.train()
    for step, (inputs, labels) in enumerate(task.batches(s.steps, device), 1):
        with autocast(device, dtype):
            logits = model(inputs)  # (B, T, V)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=PAD)
        loss.backward()
        updater.set_lr(scheduled_learning_rate(config, step))
        updater.step(loss.detach())
        losses[step - 1] = loss.detach()
    curve = [part.mean().item() for part in losses.cpu().tensor_split(min(s.steps, 50))]
    return {"losses": curve, "first_bad_step": updater.first_bad_step(0)}


def measure_lengths(model: GPT, task: Task, changes: Changes, s: PositionStudySettings) -> dict[str, dict[str, Any]]:
    """Return the scores by length, of the model with its settings changed for each length."""
    return {str(n * s.length): task.measure(reconfigure(model, changes(float(n), s.length)), n) for n in s.multiples}


def reconfigure(model: GPT, changes: dict[str, Any]) -> GPT:
    """Return a model with the same weights and changed settings."""
    if not changes:
        return model
    other = GPT(changed_settings(model.config, **changes))
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).device)
