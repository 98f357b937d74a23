"""The optimizer of a run: learning rate schedule, AdamW and Muon with their parameter groups, gradient clipping.

AdamW is the default, over two groups of parameters: with and without weight decay. On request Muon takes the matrices inside
blocks (muon.py), and weights and optimizer state are bf16 (stochastic_rounding.py). An update whose loss or gradient is not
finite is never applied.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.device import pick_precision
from regard.errors import RegardError
from regard.layers.embedding import Embedding, Head
from regard.layers.part import Part
from regard.layers.positions.scheme import PositionScheme
from regard.layers.stack import Stack
from regard.training.muon import Muon, find_matrices
from regard.training.stochastic_rounding import BF16, StochasticRoundingAdamW, weights_to_bf16


def scheduled_learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1: this is the learning rate scheduler.

    It rises linearly (warm-up), then follows one of four schedules, `train.schedule`."""
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


def prepare_model(model: nn.Module, config: TrainConfig) -> None:
    """Set up activation checkpointing and bf16 weights of a model, where the settings ask for them."""
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
        drawing = {part.name for stack in stacks for part in stack.modules() if isinstance(part, Part) and part.random}
        other = ""
        if drawing <= {"switch"}:
            other = ", or model.dropout, model.attention_dropout" + ", model.switch.jitter" * bool(drawing)
            other += " and model.ff_dropout to 0"
        raise RegardError(
            f"train.activation_checkpointing with {' and '.join(sorted(drawing)) or 'dropout'} cannot be captured in a CUDA "
            f"graph, where a step's random numbers are drawn only once: set train.compile to false{other}"
        )
    for stack in stacks:
        stack.activation_checkpointing = config.activation_checkpointing
    if config.param_dtype == "bf16":
        if pick_precision(config.precision, device) != BF16:
            raise RegardError("train.param_dtype bf16 is for products in bf16: set train.precision to bf16 too")
        weights_to_bf16(model)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters as one, with a common list of groups and a common state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def set_scaling(self, found_inf: Tensor, grad_scale: Tensor | None) -> None:
        """Share two tensors among the optimizers: all skip their step while `found_inf` is 1, and divide gradients by
        `grad_scale`."""
        for part in self.parts:
            part.found_inf = found_inf  # type: ignore[attr-defined]
            if grad_scale is not None:
                part.grad_scale = grad_scale  # type: ignore[attr-defined]


def make_optimizer(model: nn.Module, config: TrainConfig) -> CombinedOptimizer:
    """Return the optimizers that the settings ask for.

    Weight decay is for matrices alone: biases, norms, positions and the embeddings of rare words have no reason to shrink.
    """
    device = next(model.parameters()).device
    compiled = device.type == "cuda" and config.compile
    lr = torch.tensor(config.lr, device=device)  # shared by all groups
    settings: dict[str, Any] = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": 1e-9}
    matrices = find_matrices(model) if config.optimizer == "muon" else []
    if config.optimizer == "muon" and not matrices:
        raise RegardError("train.optimizer muon is for the matrices inside blocks, and this model has none: use adamw")
    in_muon = {id(matrix.weight) for matrix in matrices}
    by_dtype = group_by_dtype(p for p in model.parameters() if id(p) not in in_muon)
    undecayed = {
        id(p) for m in model.modules() if isinstance(m, (Embedding, Head, PositionScheme)) for p in m.parameters()
    }
    undecayed |= {id(getattr(m, name)) for m in model.modules() if isinstance(m, Part) for name in m.no_decay}
    parts: list[torch.optim.Optimizer] = []
    for (dtype, _), parameters in by_dtype.items():
        decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in undecayed]
        others = [p for p in parameters if p.dim() < 2 or id(p) in undecayed]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        if dtype == BF16:
            parts.append(StochasticRoundingAdamW(groups, **settings, compiled=compiled))
        else:  # capturable: may be captured in a CUDA graph
            parts.append(torch.optim.AdamW(groups, **settings, fused=True, capturable=device.type == "cuda"))
    return CombinedOptimizer(parts + ([Muon(matrices, lr, config.weight_decay, compiled)] if matrices else []))


Kind = tuple[torch.dtype, Any]  # data type, and how a tensor is cut over processes
Gradients = dict[Kind, list[Tensor]]


def group_by_dtype(tensors: Iterable[Tensor]) -> Gradients:
    """Group tensors by dtype and by how they are cut: torch's multi-tensor kernels (`_foreach_*`) take one kind."""
    found: Gradients = defaultdict(list)
    for x in tensors:
        found[x.dtype, getattr(x, "device_mesh", None)].append(x)
    return found


class Updater:
    """The update of one step: a check, gradient clipping, the optimizers.

    After a loss or gradient that is not finite it changes nothing more. The optimizers skip their step while
    `found_inf` is 1, so the check does not wait for the device; `first_bad_step` tells later which step it was, and the
    weights are still those before it. The optimizers also divide each gradient by `grad_scale` as they read it, so
    clipping needs no pass over the gradients of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        in_place: bool = False,
        agree: Callable[[Tensor], None] = lambda flag: None,
    ) -> None:
        """Prepare the update of a model; `agree` replaces a flag by the largest of all processes."""
        self.in_place = in_place  # gradients keep their memory, for CUDA graphs that add to them
        self.agree = agree
        prepare_model(model, config)
        self.optimizer = make_optimizer(model, config)
        self.parameters = list(model.parameters())
        self.clip = config.clip
        device = self.parameters[0].device
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # 1.0 from the first bad step on
        self.grad_scale = torch.ones((), dtype=torch.float32, device=device)  # what gradients are divided by
        self.optimizer.set_scaling(self.found_inf, self.grad_scale if self.clip > 0 else None)

    def set_lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"].fill_(lr)

    def step(self, loss: Tensor) -> Tensor:
        """Update the weights by the accumulated gradients, clear those, and return their norm before clipping."""
        gradients = group_by_dtype(p.grad for p in self.parameters if p.grad is not None)
        norm = gradient_norm(gradients)
        self.found_inf.copy_(torch.maximum(self.found_inf, (~torch.isfinite(norm + loss)).float()))
        self.agree(self.found_inf)
        self.good_steps += (self.found_inf == 0).to(torch.int64)
        if self.clip > 0:  # gradient clipping, as torch's clip_grad_norm_: a norm above train.clip is scaled to it
            self.grad_scale.copy_(((norm + 1e-6) / self.clip).clamp(min=1))
        self.optimizer.step()
        self._clear(gradients)
        return norm

    def _clear(self, gradients: Gradients) -> None:
        """Drop the gradients, which is faster than zeros to add to; or set them to zero where they keep their memory."""
        for p in self.parameters if not self.in_place else ():
            p.grad = None
        for tensors in gradients.values() if self.in_place else ():
            torch._foreach_zero_(tensors)

    def first_bad_step(self, start: int) -> int | None:
        """Return the first step that was not finite, or None; the updater began after step `start`. Waits for the device."""
        return start + int(self.good_steps) + 1 if self.found_inf.item() else None


def gradient_norm(gradients: Gradients) -> Tensor:
    """Return the norm of all gradients as one vector, at least in fp32, with those that other processes hold."""
    norms: list[Tensor] = []
    for (dtype, mesh), tensors in gradients.items():
        each = torch._foreach_norm(tensors, 2, dtype=torch.promote_types(dtype, torch.float32))
        norms += each if mesh is None else [torch.linalg.vector_norm(torch.stack(each)).full_tensor()]
    return torch.linalg.vector_norm(torch.stack(norms))
