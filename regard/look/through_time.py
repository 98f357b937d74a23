"""What arrives of a gradient at every step of a recurrent layer: |dL/dh_t|, and |dL/dc_t| of an LSTM.

Of the whole loss every step has a share of its own; of the loss at the last step alone, all that is left at step t has come
back through time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batches import Batch
from regard.layers.cells import Cell
from regard.layers.recurrent import Recurrent
from regard.look.record import swapped
from regard.look.stream import short_name
from regard.text.special_tokens import PAD
from regard.training.objective import Objective

LAST = ", loss at the last step"


def mean_loss(objective: Objective, inputs: Sequence[Tensor], answers: int, seed: int) -> Tensor:
    """The same dropout every time."""
    torch.manual_seed(seed)
    return objective(*inputs)[0] / answers


def through_time(objective: Objective, batch: Batch, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Of every recurrent layer: |dL/dh_t|, and |dL/dc_t| of an LSTM, over the rows of the batch; of the whole loss, and of
    the last step that is scored, where there are several."""
    if not any(isinstance(module, Cell) for module in objective.modules()):
        return {}
    found = states_norms(objective, batch.inputs, batch.tokens, seed, "")
    labels = batch.labels
    if labels.dim() == 2 and (scored := (labels != PAD).any(0).nonzero()).numel() > 1:
        last = torch.full_like(labels, PAD)
        last[:, scored[-1]] = labels[:, scored[-1]]
        answers = max(1, int((last != PAD).sum()))
        for name, lines in states_norms(objective, (*batch.inputs[:-1], last), answers, seed, LAST).items():
            found[name] |= lines
    return found


def states_norms(
    objective: Objective, inputs: Sequence[Tensor], answers: int, seed: int, note: str
) -> dict[str, dict[str, np.ndarray]]:
    with heard_states(objective.model) as states:
        loss = mean_loss(objective, inputs, answers, seed)
    flat = [part for steps in states.values() for state in steps for part in state]
    norms = iter(
        [0.0 if g is None else float(g.double().norm()) for g in torch.autograd.grad(loss, flat, allow_unused=True)]
    )
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, steps in states.items():
        by_part = np.array([[next(norms) for _ in state] for state in steps]).T  # (1 or 2, T)
        by_part = by_part[:, ::-1] if name.endswith("backward") else by_part
        found[name] = {f"|{line}|{note}": values for line, values in zip(("dL/dh", "dL/dc"), by_part, strict=False)}
    return found


@contextmanager
def heard_states(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, ...]]]]:
    """The state after every step of every cell, while all of them run step by step."""
    heard: dict[str, list[tuple[Tensor, ...]]] = {}
    with ExitStack() as entered:
        for attribute in ("fuses", "fuses_padded"):
            layers = {m: False for m in model.modules() if isinstance(m, Recurrent)}
            entered.enter_context(swapped(layers, attribute))
        for path, cell in model.named_modules():
            if isinstance(cell, Cell):
                steps = heard.setdefault(cell_name(path), [])
                hook = cell.register_forward_hook(lambda _, given, result, steps=steps: steps.append(result[0]))
                entered.callback(hook.remove)
        yield heard


def cell_name(path: str) -> str:
    """ "recurrent.layers.0.forward_" is "recurrent.0.forward"."""
    return ".".join(part.rstrip("_") for part in short_name(path).split(".") if part != "layers")


def arriving(lines: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """|dL/ds| from the last step back to the first, of the loss there; all a state hands on is in s. Only of layers that
    write: what an encoder's states are asked for comes from many places at once."""
    if name.startswith("encoder"):
        return np.zeros(0)
    alone = [values for line, values in lines.items() if line.endswith(LAST)]
    whole = np.sqrt(sum((values**2 for values in alone or lines.values()), np.zeros(1)))
    whole = whole if name.endswith("backward") else whole[::-1]
    return whole[whole > 0]
