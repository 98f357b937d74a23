"""S4D: a state space whose matrix is diagonal (Gu et al. 2022), x' = A x + u, y = 2 Re(C x) + D u for each channel.

With a step size dt, zero-order hold gives the discrete system Ab = exp(dt A), Bb = (exp(dt A) - 1) / A; the bilinear rule
gives Ab = (1 + dt A / 2) / (1 - dt A / 2), Bb = dt / (1 - dt A / 2). The convolution kernel is
K[l] = 2 Re sum_n C_n Bb_n Ab_n^l. B is 1, since a product of B and C is all that counts. A starts from one of four lists,
n = 0 .. N/2 - 1:

| init | A_n                                                    |
|------|--------------------------------------------------------|
| lin  | -1/2 + i pi n                                          |
| inv  | -1/2 + i (N / pi) (N / (2n + 1) - 1)                   |
| legs | the eigenvalues of S4's normal matrix (`s4.hippo_legs`) |
| real | -(n + 1)                                               |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.kernels.linear_system import DiagonalSystem
from regard.layers.mixers.s4 import diagonalize_legs
from regard.layers.mixers.state_space_layer import StateSpaceLayer
from regard.layers.part import Place


def initial_diagonal(init: str, n: int) -> np.ndarray:
    """Return the initial A, (n/2,) complex."""
    index = np.arange(n // 2)
    if init == "legs":
        return diagonalize_legs(n).eigenvalues
    if init == "real":
        return -(index + 1.0) + 0j
    return -0.5 + 1j * (np.pi * index if init == "lin" else n / np.pi * (n / (2 * index + 1) - 1))


def discretize_zoh(a: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Ab and Bb by zero-order hold, for A (H, N/2) and step sizes (H, 1).

    The real part of exp(z) - 1 is written as expm1(x) cos(y) - 2 sin(y/2)^2 for z = x + iy, which keeps its digits where z
    is small, and does not overflow where a state decays within one step."""
    z = a * dt
    x, y = z.real, z.imag
    grown = torch.complex(torch.expm1(x) * torch.cos(y) - 2 * torch.sin(y / 2).square(), torch.exp(x) * torch.sin(y))
    return z, grown / a


def discretize_bilinear(a: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Ab and Bb by the bilinear rule, for A (H, N/2) and step sizes (H, 1)."""
    half = a * dt / 2
    return torch.log((1 + half) / (1 - half)), dt / (1 - half)


DISCRETIZATIONS = {"zoh": discretize_zoh, "bilinear": discretize_bilinear}


@register("s4d")
class S4D(StateSpaceLayer):
    """A diagonal state space, S4D (Gu et al. 2022): a long convolution in training, a recurrence in decoding."""

    @dataclass(frozen=True)
    class Settings:
        state: int = setting(64, "numbers in the state of each channel", least=2, most=4096)
        init: str = setting("lin", "how the diagonal starts", choices=("lin", "inv", "legs", "real"))
        discretization: str = setting("zoh", "how a step follows from the equation", choices=tuple(DISCRETIZATIONS))
        dt_min: float = setting(0.001, "smallest initial step size", above=0)
        dt_max: float = setting(0.1, "largest initial step size", above=0)

    no_decay = ("log_dt", "log_decay", "frequency")

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.init, self.discretize = settings.init, DISCRETIZATIONS[settings.discretization]
        self.init_weights()

    def init_weights(self) -> None:
        super().init_weights()
        start = torch.from_numpy(initial_diagonal(self.init, self.n))
        with torch.no_grad():
            self.log_decay.copy_((-start.real).log().expand_as(self.log_decay))
            self.frequency.copy_(start.imag.expand_as(self.frequency))

    def system(self, dtype: torch.dtype) -> DiagonalSystem:
        log_decay, frequency, log_dt, outputs = self.numbers(
            dtype, self.log_decay, self.frequency, self.log_dt, self.outputs
        )
        log_diagonal, inputs = self.discretize(torch.complex(-log_decay.exp(), frequency), log_dt.exp()[:, None])
        return DiagonalSystem(log_diagonal, inputs, outputs)
