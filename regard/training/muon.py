"""The Muon optimizer: momentum that is orthogonalized before it is applied, for the weight matrices inside blocks.

The gradient of a matrix has few large singular values, and AdamW mostly follows those directions. With U S V^T the momentum,
Muon applies U V^T: all directions with the same length. The root mean square of such an update is known beforehand, so it is
scaled to that of AdamW, 0.2 a weight (Moonlight), and the learning rate and weight decay of AdamW fit both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layers.part import Part
from regard.layers.stack import Stack
from regard.training.stochastic_rounding import BF16, compile_if, draw_seeds, random_bits, write_rounded

UPDATE_RMS = 0.2  # root mean square of an AdamW update, in units of the learning rate


@dataclass(frozen=True)
class WeightMatrix:
    """The rows of a weight that form one matrix: the same `rows` of each of `blocks` equal blocks of rows."""

    weight: Tensor
    blocks: int
    rows: slice
    expert: int | None = None  # which of the stacked weights (E, R, C) of experts it is in

    def view(self, x: Tensor) -> Tensor:
        """Return a view of these rows in a tensor shaped like the weight, (blocks, rows of a block, C)."""
        own = x if self.expert is None else x[self.expert]
        return own.unflatten(0, (self.blocks, -1))[:, self.rows]


def find_matrices(model: nn.Module) -> list[WeightMatrix]:
    """Return the matrices of all linear layers and experts inside the blocks.

    Matrices that share a fused weight (queries, keys and values, or the two of a gated layer) have interleaved rows in it
    (kernels/weight_layout.py); each of them counts as a matrix of its own, and so does each of a stack of experts.
    """
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    modules = [module for stack in stacks for module in stack.blocks.modules()]
    joined: dict[nn.Module, tuple[int, list[int]]] = {}  # blocks, and the number of rows of each matrix in a block
    found: list[WeightMatrix] = []

    def add(weight: Tensor, blocks: int, each: list[int], expert: int | None = None) -> None:
        ends = [*itertools.accumulate(each, initial=0)]
        found.extend(WeightMatrix(weight, blocks, slice(*rows), expert) for rows in itertools.pairwise(ends))

    for module in modules:
        for name, rows in module.fused_matrices().items() if isinstance(module, Part) else ():
            if isinstance(stacked := getattr(module, name), nn.Parameter):
                for expert in range(len(stacked)):
                    add(stacked, *rows, expert)
            else:
                joined[module.get_submodule(name)] = rows
    for module in modules:
        if isinstance(module, nn.Linear):
            add(module.weight, *joined.get(module, (1, [module.out_features])))
    return found


class Muon(torch.optim.Optimizer):
    """Muon over weight matrices; those of one shape (or of its transpose) are orthogonalized in one batched product.

    `grad_scale` and `found_inf` mean what they mean in torch's fused optimizers: gradients are divided by the first, and a
    step changes nothing while the second is not 0.
    """

    def __init__(self, matrices: list[WeightMatrix], lr: Tensor, weight_decay: float, compiled: bool) -> None:
        weights = list({id(matrix.weight): matrix.weight for matrix in matrices}.values())
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})
        self.grad_scale, self.found_inf = torch.ones_like(lr), torch.zeros_like(lr)
        self.buckets: dict[tuple[int, ...], list[WeightMatrix]] = defaultdict(list)
        for matrix in matrices:
            self.buckets[tuple(sorted(matrix.view(matrix.weight).flatten(0, 1).shape))].append(matrix)
        self.nesterov_momentum = compile_if(compiled, nesterov_momentum)
        self.apply_update = compile_if(compiled, apply_update)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for bucket in self.buckets.values():
            matrices = [matrix for matrix in bucket if matrix.weight.grad is not None]
            if matrices:
                self._step_together(matrices)

    def _step_together(self, matrices: list[WeightMatrix]) -> None:
        """Update matrices that have one shape, up to transposition."""
        group, found_inf = self.param_groups[0], self.found_inf
        seeds = iter(self._seeds(matrices))
        updates = []
        for matrix in matrices:
            g, m = (matrix.view(x) for x in self._gradient_and_momentum(matrix.weight))
            x = self.nesterov_momentum(g, m, self.grad_scale, found_inf, next(seeds)).flatten(0, 1)
            updates.append(x if x.shape[0] <= x.shape[1] else x.mT)  # the short side first: X X^T is smaller than X^T X
        steps = orthogonalize(torch.stack(updates))  # (N, short, long)
        length = group["lr"] * UPDATE_RMS * steps.shape[2] ** 0.5
        decay = 1 - group["lr"] * group["weight_decay"]
        for matrix, x in zip(matrices, steps, strict=True):
            p = matrix.view(matrix.weight.detach())
            x = x if p.shape[0] * p.shape[1] <= p.shape[2] else x.mT
            self.apply_update(p, x.reshape(p.shape), length, decay, found_inf, next(seeds))

    def _gradient_and_momentum(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        assert weight.grad is not None
        return weight.grad, state["momentum"]

    def _seeds(self, matrices: list[WeightMatrix]) -> list[Tensor] | list[None]:
        """Return two seeds for each bf16 matrix (its momentum and its weight are rounded), or None for fp32 ones."""
        n, weight = 2 * len(matrices), matrices[0].weight
        return draw_seeds(n, weight.device) if weight.dtype == BF16 else [None] * n


def nesterov_momentum(g: Tensor, m: Tensor, grad_scale: Tensor, found_inf: Tensor, seed: Tensor | None) -> Tensor:
    """Add a gradient to the momentum `m` (decay 0.95, in place), and return the Nesterov look-ahead of it."""
    g = g.float() / grad_scale
    mean = m.float().lerp(g, 0.05)
    write_rounded(m, mean, found_inf, None if seed is None else random_bits(seed, m))
    return g.lerp(mean, 0.95).to(BF16 if g.is_cuda else torch.float32)


def orthogonalize(x: Tensor) -> Tensor:
    """Return about U V^T for each matrix U S V^T of x (N, short, long), by Newton-Schulz iteration.

    Five steps of s -> 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on all singular values at once bring those between about 1/500 and
    1 into 0.7 ... 1.2. Jordan chose the coefficients for fast convergence: being nearer to 1 does not help training.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(5):
        square = x @ x.mT  # (N, short, short)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def apply_update(p: Tensor, x: Tensor, length: Tensor, decay: Tensor, found_inf: Tensor, seed: Tensor | None) -> None:
    """Set the weight `p` to decay * p - length * x, in place."""
    write_rounded(p, decay * p.float() - length * x.float(), found_inf, None if seed is None else random_bits(seed, p))
