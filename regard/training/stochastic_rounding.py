"""Weights in bf16 that learn nevertheless: stochastic rounding, and AdamW over such weights.

bf16 has 8 binary digits, so a weight does not feel an update 512 times smaller than itself: rounded to the nearest, it
stays where it is for ever. Rounded up or down by chance, to the nearer of the two more often, it arrives on average where
it should: E[rounded(x)] = x.

A parameter takes 8 bytes in place of 16: weight, gradient and both moments in bf16. The moments are rounded in the same way,
without which the second would stand still too, since a step moves it by 1 - beta2. Norms and positions stay fp32: they are
few, and a gain near 1 would jump by whole steps of 1/128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.hashing import UINT32_MAX, hash_bits
from regard.layers.positions.scheme import Positions

LOW = torch.bfloat16


def weights_to_bf16(model: nn.Module) -> None:
    """In place, all but norms and positions."""
    exact = (Positions, nn.LayerNorm, nn.RMSNorm)
    kept = {id(p) for module in model.modules() if isinstance(module, exact) for p in module.parameters()}
    for p in model.parameters():
        if id(p) not in kept:
            p.data = p.data.to(LOW)


# ---- rounding ---------------------------------------------------------------------------------------------------------


def draw_seeds(n: int, device: torch.device) -> list[Tensor]:
    """A seed for each of n tensors, (2,). The only random numbers drawn, so recorded steps draw others each time."""
    return list(torch.randint(UINT32_MAX, (n, 2), device=device))


def random_bits(seed: Tensor, like: Tensor) -> Tensor:
    """32 random bits for each number of `like`: its index, mixed with the seed twice. Far cheaper than torch's generator."""
    index = torch.arange(like.numel(), device=like.device).view(like.shape)
    return hash_bits(hash_bits(index + seed[0]) ^ seed[1])


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to one of its two neighbours in bf16, by the lower 16 of 32 random bits.

    bf16 is the upper half of fp32: what is added to the lower half carries over as often as that half is large.
    """
    whole = (x.view(torch.int32).long() + (bits & 0xFFFF)) & ~0xFFFF
    return whole.to(torch.int32).view(torch.float32).to(LOW)


def write(old: Tensor, new: Tensor, frozen: Tensor, bits: Tensor | None) -> None:
    """The fp32 `new` into `old`, rounded by chance where there are bits for it; nothing at all once `frozen`."""
    old.copy_(torch.where(frozen > 0, old, new if bits is None else rounded(new, bits)))


def fused(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """One kernel for all its arithmetic, for tensors of any size."""
    return torch.compile(function, dynamic=True) if compiled else function


# ---- AdamW ------------------------------------------------------------------------------------------------------------


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW of bf16 weights: arithmetic in fp32, results rounded by chance.

    `grad_scale` and `found_inf` are what torch's fused optimizers know by these names: gradients are divided by the one, and
    the other, where not 0, leaves everything as it is.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float], eps: float, compiled: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.constants = torch.tensor([*betas, eps], device=lr.device)
        self.grad_scale, self.found_inf = torch.ones_like(lr), torch.zeros_like(lr)
        self.update = fused(adamw, compiled)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = [
            {**group, "params": [p for p in group["params"] if p.grad is not None]} for group in self.param_groups
        ]
        states = {p: self._state(p) for group in groups for p in group["params"]}
        torch._foreach_add_([state["step"] for state in states.values()], [1 - self.found_inf] * len(states))
        seeds = iter(draw_seeds(len(states), self.found_inf.device))
        for group in groups:
            kept = 1 - group["lr"] * group["weight_decay"]
            for p in group["params"]:
                tensors = [x.detach().view(-1) for x in (p, states[p]["exp_avg"], states[p]["exp_avg_sq"])]
                numbers = (states[p]["step"], group["lr"], kept, self.constants, self.grad_scale, self.found_inf)
                self.update(p.grad.reshape(-1), *tensors, *numbers, next(seeds))

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state


def adamw(
    g: Tensor,  # (N,), like the next three
    p: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    lr: Tensor,
    kept: Tensor,  # the share of a weight that decay leaves
    constants: Tensor,
    shrink: Tensor,
    frozen: Tensor,
    seed: Tensor,
) -> None:
    """Constants are a tensor too: compiled, numbers that differ would be as many functions."""
    beta1, beta2, eps = constants.unbind()
    g = g.float() / shrink
    mean = beta1 * m.float() + (1 - beta1) * g
    square = beta2 * v.float() + (1 - beta2) * g * g
    root = (square / (1 - beta2**step)).sqrt() + eps
    weight = kept * p.float() - lr * (mean / (1 - beta1**step)) / root
    bits = random_bits(seed, p)
    write(p, weight, frozen, bits)
    write(m, mean, frozen, bits >> 16)
    write(v, square, frozen, hash_bits(bits))
