"""The training of many tiny recurrent models at once: several tasks, learning rates and seeds of one cell in one batch.

A model is an embedding, one recurrent layer and an output layer. On a CPU the time of such a model is that of starting
operations, not that of arithmetic, so K models that differ in their numbers alone cost little more than one. Their
parameters are one tensor (K, P); `torch.vmap` runs the cell on all of them, and Adam has a learning rate for each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from regard.config.registry import find
from regard.layers.cells import Cell
from regard.models.initialization import initialize
from regard.studies.cell_tasks import VOCABULARY, make_examples

TRAINING_SEED, TEST_SEED = 0, 1  # of the examples
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)  # the largest is the best for no cell and task here
BETAS, EPSILON, MOST_GRADIENT = (0.9, 0.999), 1e-8, 1.0


@dataclass(frozen=True)
class TrainingSizes:
    """The sizes of models and of their training."""

    width: int = 32  # of the state of a GRU; other cells get the width that makes the parameters as many
    embedding: int = 24
    steps: int = 200
    batch: int = 32
    training_examples: int = 8192
    test_examples: int = 512


@dataclass(frozen=True)
class Trial:
    """One of the models that are trained at once."""

    task: str
    lr: float
    seed: int  # of the initial weights and of the order of examples


class TinyModel(nn.Module):
    """An embedding, one recurrent layer and an output layer."""

    def __init__(self, cell: str, settings: Any, width: int, embedding: int) -> None:
        super().__init__()
        kind: type[Cell] = find("cell", cell)
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, embedding))
        self.cell: Cell = kind(settings or kind.Settings(), embedding, width)
        self.head = nn.Linear(width, VOCABULARY)

    def init_weights(self) -> None:
        nn.init.normal_(self.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of ids (B, T)."""
        gates = self.cell.project(F.embedding(ids, self.embedding).transpose(0, 1))  # (T, B, G*H)
        state = tuple(gates.new_zeros(ids.shape[0], self.cell.d_hidden) for _ in range(self.cell.states))
        outputs = []
        for x in gates.unbind():
            state, _ = self.cell(x, self.cell.weight_hh, None, None, *state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, 1))


def count_parameters(cell: str, settings: Any, width: int, embedding: int) -> int:
    """Return the number of parameters of a tiny model."""
    with torch.device("meta"):
        return sum(p.numel() for p in TinyModel(cell, settings, width, embedding).parameters())


def choose_width(cell: str, settings: Any, sizes: TrainingSizes) -> int:
    """Return the width with which a cell's model has as many parameters as that of a GRU, as nearly as possible."""
    target = count_parameters("gru", None, sizes.width, sizes.embedding)
    count = partial(count_parameters, cell, settings, embedding=sizes.embedding)
    widths = range(1, 10 * sizes.width)  # the wider, the more parameters
    above = bisect_left(widths, target, key=lambda n: count(width=n))
    return min(widths[max(above - 1, 0) : above + 1], key=lambda n: abs(count(width=n) - target))


def train_stacked(
    cell: str, settings: Any, width: int, trials: Sequence[Trial], sizes: TrainingSizes, data: Path | None = None
) -> list[float]:
    """Train a model for each trial, all at once, and return their accuracies on test examples; 0 where it diverged."""
    model = TinyModel(cell, settings, width, sizes.embedding)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    rows = []
    for trial in trials:
        initialize(model, trial.seed)
        rows.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat = torch.stack(rows).requires_grad_()  # (K, P)

    def split(numbers: Tensor) -> dict[str, Tensor]:
        parts = numbers.split([math.prod(shape) for shape in shapes.values()], -1)
        named = zip(shapes.items(), parts, strict=True)
        return {name: part.unflatten(-1, shape) for (name, shape), part in named}

    run = torch.vmap(lambda numbers, ids: functional_call(model, split(numbers), (ids,)))
    training = load_examples(trials, sizes.training_examples, TRAINING_SEED, data)
    generators = {trial.seed: torch.Generator().manual_seed(trial.seed) for trial in trials}
    adam, lrs = StackedAdam(flat), torch.tensor([trial.lr for trial in trials])[:, None]
    for step in range(sizes.steps):
        drawn = {s: torch.randint(sizes.training_examples, (sizes.batch,), generator=g) for s, g in generators.items()}
        picked = [
            (ids[drawn[t.seed]], scored[drawn[t.seed]]) for t, (ids, scored) in zip(trials, training, strict=True)
        ]
        ids, scored = (torch.stack(each) for each in zip(*picked, strict=True))  # (K, B, T + 1), (K, B, T)
        logits = run(flat, ids[..., :-1])  # (K, B, T, V)
        losses = F.cross_entropy(logits.flatten(0, 2), ids[..., 1:].flatten(), reduction="none").view_as(scored)
        loss = (losses * scored).sum((1, 2)) / scored.sum((1, 2))
        (gradient,) = torch.autograd.grad(loss.sum(), flat)
        adam.update(gradient, lrs * (1 - step / sizes.steps))
    return measure_accuracy(run, flat, load_examples(trials, sizes.test_examples, TEST_SEED, data))


def load_examples(trials: Sequence[Trial], count: int, seed: int, data: Path | None) -> list[tuple[Tensor, Tensor]]:
    """Return the ids and masks of each trial's task; trials of one task share them."""
    found = {task: make_examples(task, count, seed, data) for task in {trial.task for trial in trials}}
    last = max(np.flatnonzero(each.scored.any(axis=0))[-1] for each in found.values())
    used = int(last) + 1  # columns after it score nothing
    cut = {task: (each.ids[:, : used + 1], each.scored[:, :used]) for task, each in found.items()}
    tensors = {task: tuple(map(torch.from_numpy, pair)) for task, pair in cut.items()}
    return [tensors[trial.task] for trial in trials]  # type: ignore[misc]


@torch.no_grad()
def measure_accuracy(
    run: Callable[..., Tensor], flat: Tensor, examples: Sequence[tuple[Tensor, Tensor]], rows: int = 128
) -> list[float]:
    """Return the share of scored ids that each model predicts."""
    ids, scored = (torch.stack(each) for each in zip(*examples, strict=True))
    right = torch.zeros(len(flat))
    for first in range(0, ids.shape[1], rows):
        part, mask = ids[:, first : first + rows], scored[:, first : first + rows]
        right += ((run(flat, part[..., :-1]).argmax(-1) == part[..., 1:]) & mask).sum((1, 2))
    finite = torch.isfinite(flat).all(1)
    return torch.where(finite, right / scored.sum((1, 2)), 0.0).tolist()


def best_rate(lrs: Sequence[float], accuracies: Sequence[float]) -> float:
    """Return the learning rate of the greatest accuracy; of equal ones the first."""
    return lrs[max(range(len(lrs)), key=lambda k: accuracies[k])]


def name_largest_rates(lrs: Sequence[float], best: Mapping[str, Sequence[float]]) -> str:
    """Return a sentence that says for which tasks the largest learning rate was the best of most trainings.

    Where it was, a larger one might be better still, and the accuracies are too low. `best` has the best rates of a task."""
    at_end = {task: sum(lr == max(lrs) for lr in rates) for task, rates in best.items()}
    named = [f"{task} ({n} of {len(best[task])})" for task, n in at_end.items() if 2 * n > len(best[task])]
    if named:
        return (
            f"The largest learning rate, {max(lrs):g}, was the best for most seeds of these tasks: {', '.join(named)}. "
            "A larger one may be better still."
        )
    count, of = sum(at_end.values()), sum(map(len, best.values()))
    return f"The largest learning rate, {max(lrs):g}, was the best for {count} of {of} seeds, and for most seeds of no task."


class StackedAdam:
    """Adam on a tensor (K, P) whose rows are models, with gradients clipped row by row."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.step = values, 0
        self.mean, self.square = torch.zeros_like(values), torch.zeros_like(values)

    @torch.no_grad()
    def update(self, gradient: Tensor, lrs: Tensor) -> None:
        """Make one step with learning rates (K, 1)."""
        self.step += 1
        gradient = gradient * (MOST_GRADIENT / gradient.norm(dim=1, keepdim=True).clamp(min=MOST_GRADIENT))
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.lerp_(gradient.square(), 1 - BETAS[1])
        bias = math.sqrt(1 - BETAS[1] ** self.step) / (1 - BETAS[0] ** self.step)
        self.values -= lrs * bias * self.mean / (self.square.sqrt() + EPSILON)
