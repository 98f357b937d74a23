"""Muon: momentum whose matrix is made orthogonal before it is applied, for the matrices inside blocks.

A gradient of a matrix has few large directions, and AdamW follows them. With U S V^T the momentum, Muon applies U V^T: all
directions alike. The size of such a step is known beforehand, so it is made that of AdamW's, 0.2 a weight on average
(Moonlight), and AdamW's learning rate and weight decay fit both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layers.part import Part
from regard.layers.stack import Stack
from regard.training.stochastic_rounding import LOW, draw_seeds, fused, random_bits, write

SIZE = 0.2  # of AdamW's steps, root mean square


@dataclass(frozen=True)
class Piece:
    """Rows of a weight that are one matrix: the same few of each of so many blocks."""

    weight: Tensor
    blocks: int
    rows: slice

    def of(self, x: Tensor) -> Tensor:
        """Return a view of these rows in a tensor like the weight, (blocks, rows of a block, C)."""
        return x.unflatten(0, (self.blocks, -1))[:, self.rows]


def pieces_of(model: nn.Module) -> list[Piece]:
    """The matrices inside the blocks. Those that share a weight to be one product, queries, keys and values or the two of a
    gated layer, have rows in it by turns (kernels/weight_layout.py) and are a matrix each."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    modules = [module for stack in stacks for module in stack.blocks.modules()]
    joined: dict[nn.Module, tuple[int, list[int]]] = {}  # blocks, and the rows that each matrix has in one
    for module in modules:
        if isinstance(module, Part):
            joined |= {module.get_submodule(name): rows for name, rows in module.fused_matrices().items()}
    found = []
    for module in modules:
        if isinstance(module, nn.Linear):
            start, (blocks, each) = 0, joined.get(module, (1, [module.out_features]))
            for rows in each:
                found.append(Piece(module.weight, blocks, slice(start, start + rows)))
                start += rows
    return found


class Muon(torch.optim.Optimizer):
    """Matrices of one shape (or of its transpose) are made orthogonal together.

    `grad_scale` and `found_inf` are those of torch's fused optimizers: gradients are divided by the one, and the other,
    where not 0, leaves everything as it is.
    """

    def __init__(self, pieces: list[Piece], lr: Tensor, weight_decay: float, compiled: bool) -> None:
        weights = list({id(piece.weight): piece.weight for piece in pieces}.values())
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})
        self.grad_scale, self.found_inf = torch.ones_like(lr), torch.zeros_like(lr)
        self.buckets: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
        for piece in pieces:
            self.buckets[tuple(sorted(piece.of(piece.weight).flatten(0, 1).shape))].append(piece)
        self.look_ahead, self.descend = fused(look_ahead, compiled), fused(descend, compiled)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for bucket in self.buckets.values():
            pieces = [piece for piece in bucket if piece.weight.grad is not None]
            if pieces:
                self._step_together(pieces)

    def _step_together(self, pieces: list[Piece]) -> None:
        group, frozen = self.param_groups[0], self.found_inf
        seeds = iter(self._seeds(pieces))
        ahead = []
        for piece in pieces:
            g, m = (piece.of(x) for x in self._gradient_and_momentum(piece.weight))
            ahead.append(lying(self.look_ahead(g, m, self.grad_scale, frozen, next(seeds)).flatten(0, 1)))
        steps = orthogonal(torch.stack(ahead))  # (N, short, long)
        length = group["lr"] * SIZE * steps.shape[2] ** 0.5
        kept = 1 - group["lr"] * group["weight_decay"]
        for piece, x in zip(pieces, steps, strict=True):
            p = piece.of(piece.weight.detach())
            x = x if p.shape[0] * p.shape[1] <= p.shape[2] else x.mT
            self.descend(p, x.reshape(p.shape), length, kept, frozen, next(seeds))

    def _gradient_and_momentum(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        assert weight.grad is not None
        return weight.grad, state["momentum"]

    def _seeds(self, pieces: list[Piece]) -> list[Tensor] | list[None]:
        """Two for each piece where something is rounded."""
        n, weight = 2 * len(pieces), pieces[0].weight
        return draw_seeds(n, weight.device) if weight.dtype == LOW else [None] * n


def lying(x: Tensor) -> Tensor:
    """No higher than wide: the smaller of the two products X X^T."""
    return x if x.shape[0] <= x.shape[1] else x.mT


def look_ahead(g: Tensor, m: Tensor, shrink: Tensor, frozen: Tensor, seed: Tensor | None) -> Tensor:
    """Take a gradient into the momentum, 0.95 of the old one, and go where it will be after the next (Nesterov)."""
    g = g.float() / shrink
    mean = m.float().lerp(g, 0.05)
    write(m, mean, frozen, None if seed is None else random_bits(seed, m))
    return g.lerp(mean, 0.95).to(LOW if g.is_cuda else torch.float32)


def orthogonal(x: Tensor) -> Tensor:
    """U S V^T -> about U V^T, for each of x (N, short, long).

    Five steps of s -> 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on all singular values at once, which bring those from 1 down to
    about 1/500 into 0.7 ... 1.2: chosen by Jordan for speed, since nothing gains from being nearer to 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(5):
        square = x @ x.mT  # (N, short, short)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def descend(p: Tensor, x: Tensor, length: Tensor, kept: Tensor, frozen: Tensor, seed: Tensor | None) -> None:
    """One step along x; `kept` is the share of a weight that decay leaves."""
    write(p, kept * p.float() - length * x.float(), frozen, None if seed is None else random_bits(seed, p))
