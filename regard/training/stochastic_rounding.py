"""Stochastic rounding: training with weights and optimizer state in bf16, and AdamW for such weights.

bf16 has 8 significant bits, so an update 512 times smaller than its weight is lost when the sum is rounded to the nearest:
the weight never changes. Stochastic rounding goes up or down with a probability proportional to the distance, so that
E[round_stochastically(x)] = x and small updates count on average.

A parameter takes 8 bytes instead of 16: weight, gradient and both moments in bf16. The moments are rounded stochastically
too, since a step changes the second one by a share of only 1 - beta2. Norms and positions stay fp32: they are few, and a
gain near 1 would move in steps of 1/128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.hashing import UINT32_MAX, hash_bits
from regard.layers.part import full_precision_parameters
from regard.layers.positions.scheme import PositionScheme

BF16 = torch.bfloat16


def weights_to_bf16(model: nn.Module) -> None:
    """Convert all weights of a model to bf16 in place, except those of norms and positions, and what parts keep in fp32."""
    exact = (PositionScheme, nn.LayerNorm, nn.RMSNorm)
    kept = {p for module in model.modules() if isinstance(module, exact) for p in module.parameters()}
    kept |= full_precision_parameters(model)
    for p in model.parameters():
        if p not in kept:
            p.data = p.data.to(BF16)


# ---- rounding ---------------------------------------------------------------------------------------------------------


def draw_seeds(n: int, device: torch.device) -> list[Tensor]:
    """Return a seed (2,) for each of n tensors.

    These are the only numbers taken from torch's generator, which a CUDA graph advances at every replay: each replay of a
    captured step rounds with new random bits.
    """
    return list(torch.randint(UINT32_MAX, (n, 2), device=device))


def random_bits(seed: Tensor, like: Tensor) -> Tensor:
    """Return 32 random bits for each number of `like`, a hash of index and seed: cheaper than torch's generator."""
    index = torch.arange(like.numel(), device=like.device).view(like.shape)
    return hash_bits(hash_bits(index + seed[0]) ^ seed[1])


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers to one of the two neighbouring bf16 numbers, using the lower 16 of 32 random bits.

    bf16 is the upper half of fp32, so adding a uniform 16-bit number to the lower half carries into the upper half with a
    probability proportional to the lower half.
    """
    whole = (x.view(torch.int32).long() + (bits & 0xFFFF)) & ~0xFFFF
    return whole.to(torch.int32).view(torch.float32).to(BF16)


def write_rounded(old: Tensor, new: Tensor, found_inf: Tensor, bits: Tensor | None) -> None:
    """Copy the fp32 `new` into `old`, stochastically rounded if there are random bits; change nothing if `found_inf`."""
    old.copy_(torch.where(found_inf > 0, old, new if bits is None else round_stochastically(new, bits)))


def compile_if(compiled: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, compiled if asked for: one fused kernel for its arithmetic, for tensors of any size."""
    return torch.compile(function, dynamic=True) if compiled else function


# ---- AdamW ------------------------------------------------------------------------------------------------------------


class StochasticRoundingAdamW(torch.optim.Optimizer):
    """AdamW for bf16 weights: fp32 arithmetic, results stochastically rounded.

    `grad_scale` and `found_inf` mean what they mean in torch's fused optimizers: gradients are divided by the first, and a
    step changes nothing while the second is not 0.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float], eps: float, compiled: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.constants = torch.tensor([*betas, eps], device=lr.device)
        self.grad_scale, self.found_inf = torch.ones_like(lr), torch.zeros_like(lr)
        self.update = compile_if(compiled, adamw_update)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = [
            {**group, "params": [p for p in group["params"] if p.grad is not None]} for group in self.param_groups
        ]
        states = {p: self._state(p) for group in groups for p in group["params"]}
        torch._foreach_add_([state["step"] for state in states.values()], [1 - self.found_inf] * len(states))
        seeds = iter(draw_seeds(len(states), self.found_inf.device))
        for group in groups:
            decay = 1 - group["lr"] * group["weight_decay"]
            for p in group["params"]:
                tensors = [x.detach().view(-1) for x in (p, states[p]["exp_avg"], states[p]["exp_avg_sq"])]
                numbers = (states[p]["step"], group["lr"], decay, self.constants, self.grad_scale, self.found_inf)
                self.update(p.grad.reshape(-1), *tensors, *numbers, next(seeds))

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state


def adamw_update(
    g: Tensor,  # (N,), like the next three
    p: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    lr: Tensor,
    decay: Tensor,  # the factor that weight decay leaves
    constants: Tensor,  # beta1, beta2, eps
    grad_scale: Tensor,
    found_inf: Tensor,
    seed: Tensor,
) -> None:
    """Update a weight and its moments in place, all as flat tensors (N,).

    The constants are a tensor, because torch.compile would specialize the function for each value of a Python number.
    """
    beta1, beta2, eps = constants.unbind()
    g = g.float() / grad_scale
    mean = beta1 * m.float() + (1 - beta1) * g
    square = beta2 * v.float() + (1 - beta2) * g * g
    root = (square / (1 - beta2**step)).sqrt() + eps
    weight = decay * p.float() - lr * (mean / (1 - beta1**step)) / root
    bits = random_bits(seed, p)
    write_rounded(p, weight, found_inf, bits)
    write_rounded(m, mean, found_inf, bits >> 16)
    write_rounded(v, square, found_inf, hash_bits(bits))
