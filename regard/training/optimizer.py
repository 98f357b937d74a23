"""The optimizers of a run, and one update that never applies a bad gradient.

AdamW by default, over two groups of parameters; Muon for the matrices inside blocks (muon.py) and weights in bf16
(rounding.py) where they are asked for.

MERGED: The learning rate at each step, as a factor of its peak: linear warm-up, then one of four ways down.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.device import pick_precision
from regard.errors import RegardError
from regard.layers.embedding import Embedding, Head
from regard.layers.part import Part
from regard.layers.positions.scheme import Positions
from regard.layers.stack import Stack
from regard.training.muon import Muon, pieces_of
from regard.training.stochastic_rounding import LOW, RoundedAdamW, weights_to_bf16


def prepare(model: nn.Module, config: TrainConfig) -> None:
    """The model as training wants it: which weights are bf16, and whether its blocks are recomputed."""
    device = next(model.parameters()).device
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if config.activation_checkpointing and not stacks:
        raise RegardError(
            "train.activation_checkpointing is for models of blocks, and this one has none: set it to false"
        )
    if (
        config.activation_checkpointing
        and device.type == "cuda"
        and config.compile
        and any(stack.random for stack in stacks)
    ):
        raise RegardError(
            "train.activation_checkpointing with dropout cannot be recorded on a GPU, where a step's random numbers are drawn only once: "
            "set model.dropout, model.attention_dropout and model.ff_dropout to 0, or train.compile to false"
        )
    for stack in stacks:
        stack.activation_checkpointing = config.activation_checkpointing
    if config.weights == "bf16":
        if pick_precision(config.precision, device) != LOW:
            raise RegardError("train.weights bf16 are for products in bf16: set train.precision to bf16 too")
        weights_to_bf16(model)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of its own parameters, as one: their groups in one list, their state in one place."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def obey(self, found_inf: Tensor, grad_scale: Tensor | None) -> None:
        """All do nothing while the first is 1, and divide gradients by the second."""
        for part in self.parts:
            part.found_inf = found_inf  # type: ignore[attr-defined]
            if grad_scale is not None:
                part.grad_scale = grad_scale  # type: ignore[attr-defined]


def make_optimizer(model: nn.Module, config: TrainConfig) -> CombinedOptimizer:
    """Weight decay on matrices alone: a bias, a norm, a position or a rare word's embedding has no reason to shrink."""
    device = next(model.parameters()).device
    compiled = device.type == "cuda" and config.compile
    lr = torch.tensor(config.lr, device=device)  # one for all
    settings: dict[str, Any] = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": 1e-9}
    pieces = pieces_of(model) if config.optimizer == "muon" else []
    if config.optimizer == "muon" and not pieces:
        raise RegardError("train.optimizer muon is for the matrices inside blocks, and this model has none: use adamw")
    theirs = {id(piece.weight) for piece in pieces}
    by_dtype = split_by_dtype(p for p in model.parameters() if id(p) not in theirs)
    free = {id(p) for m in model.modules() if isinstance(m, (Embedding, Head, Positions)) for p in m.parameters()}
    free |= {id(getattr(m, name)) for m in model.modules() if isinstance(m, Part) for name in m.no_decay}
    parts: list[torch.optim.Optimizer] = []
    for dtype, parameters in by_dtype.items():
        decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in free]
        others = [p for p in parameters if p.dim() < 2 or id(p) in free]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        if dtype == LOW:
            parts.append(RoundedAdamW(groups, **settings, compiled=compiled))
        else:  # capturable: may be recorded into a CUDA graph
            parts.append(torch.optim.AdamW(groups, **settings, fused=True, capturable=device.type == "cuda"))
    return CombinedOptimizer(parts + ([Muon(pieces, lr, config.weight_decay, compiled)] if pieces else []))


def split_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """What is done to many tensors in one launch is done to one dtype at a time."""
    found: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for x in tensors:
        found[x.dtype].append(x)
    return found


class Updater:
    """Clip, check, step. A loss or gradient that is not finite freezes the weights *before* the step, from then on.

    The optimizers skip their work where `found_inf` is set, so the check costs no wait for the device; whoever asks
    `first_bad_step` later learns which step it was, and the weights are still those before it. They also divide by
    `grad_scale` as they read a gradient, so clipping has no pass over the gradients of its own.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, in_place: bool = False) -> None:
        self.in_place = in_place  # gradients stay where they are, for recordings that add to them
        prepare(model, config)
        self.optimizer = make_optimizer(model, config)
        self.parameters = list(model.parameters())
        self.clip = config.clip
        device = self.parameters[0].device
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.frozen = torch.zeros((), device=device)  # 1.0 from the first bad step on
        self.shrink = torch.ones((), device=device)  # what gradients are divided by
        self.optimizer.obey(self.frozen, self.shrink if self.clip > 0 else None)

    def set_lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"].fill_(lr)

    def step(self, loss: Tensor) -> Tensor:
        """One update from the gradients that are there; returns their norm before clipping."""
        gradients = split_by_dtype(p.grad for p in self.parameters if p.grad is not None)
        norm = total_norm(gradients)
        self.frozen.copy_(torch.maximum(self.frozen, (~torch.isfinite(norm + loss)).float()))
        self.good_steps += (self.frozen == 0).to(torch.int64)
        if self.clip > 0:
            self.shrink.copy_(((norm + 1e-6) / self.clip).clamp(min=1))
        self.optimizer.step()
        self._forget(gradients)
        return norm

    def _forget(self, gradients: dict[torch.dtype, list[Tensor]]) -> None:
        """Dropping them saves clearing and adding."""
        for p in self.parameters if not self.in_place else ():
            p.grad = None
        for tensors in gradients.values() if self.in_place else ():
            torch._foreach_zero_(tensors)

    def first_bad_step(self, start: int) -> int | None:
        """The step that was not finite, if one was; `start` is the step this updater began after. Waits for the device."""
        return start + int(self.good_steps) + 1 if self.frozen.item() else None


def total_norm(gradients: dict[torch.dtype, list[Tensor]]) -> Tensor:
    """Of all of them as one vector, in fp32 whatever they are."""
    norms = [x for tensors in gradients.values() for x in torch._foreach_norm(tensors, 2, dtype=torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms))


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1."""
    warmup = max(1, config.warmup)
    if step <= warmup:
        return config.lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, config.steps - warmup))  # 0 .. 1 after warm-up
    factor = {
        "inverse-sqrt": math.sqrt(warmup / step),
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[config.schedule]
    return config.lr * factor
