"""S4: a state space whose matrix remembers the past as Legendre polynomials (Gu, Goel and Ré 2022).

HiPPO-LegS is the matrix A_nk = -sqrt(2n+1) sqrt(2k+1) below the diagonal, -(n+1) on it and 0 above, with B_n = sqrt(2n+1).
Its state is the text so far, expanded in Legendre polynomials. A + p p^T with p_n = sqrt(n + 1/2) is normal, with
eigenvalues -1/2 + i w, so in the basis of its eigenvectors A = diag(a) - p p*, diagonal plus rank one. S4 learns a and p.

With g = dt / 2, the bilinear rule is (1 - g A) x[t] = (1 + g A) x[t-1] + 2 g B u[t]. The matrix on the left is diagonal plus
rank one as well, so the Woodbury identity inverts it in O(N): with d = 1 / (1 - g a),

    (1 - g A)^-1 v = d v - d p g <p, d v> / (1 + g <p, d p>).

States are halves of conjugate pairs, so an inner product <p, v> over all states is 2 Re of the sum over the halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.kernels.linear_system import DenseSystem
from regard.layers.mixers.state_space_layer import StateSpaceLayer
from regard.layers.part import Place


def hippo_legs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix A (n, n) and the vector B (n,) of HiPPO-LegS."""
    scale = np.sqrt(2 * np.arange(n) + 1.0)
    return -(np.tril(np.outer(scale, scale), -1) + np.diag(np.arange(n) + 1.0)), scale


class LegsBasis(NamedTuple):
    """HiPPO-LegS in the basis of the eigenvectors of its normal part: the half of each conjugate pair with w > 0."""

    eigenvalues: np.ndarray  # (n/2,) complex, of A + p p^T
    rank_one: np.ndarray  # (n/2,) complex, p
    inputs: np.ndarray  # (n/2,) complex, B


def diagonalize_legs(n: int) -> LegsBasis:
    """Return HiPPO-LegS in that basis. A + p p^T + 1/2 is skew-symmetric, so i times it is Hermitian."""
    matrix, inputs = hippo_legs(n)
    rank_one = np.sqrt(np.arange(n) + 0.5)
    skew = matrix + np.outer(rank_one, rank_one) + 0.5 * np.eye(n)
    values, vectors = np.linalg.eigh(-1j * skew)  # ascending, so the second half is positive
    half = vectors[:, n // 2 :].conj().T  # (n/2, n)
    return LegsBasis(-0.5 + 1j * values[n // 2 :], half @ rank_one, half @ inputs)


def inner(p: Tensor, v: Tensor) -> Tensor:
    """Return <p, v> over all states, from halves of conjugate pairs (..., N/2): (..., 1), real."""
    return 2 * (p.conj() * v).real.sum(-1, keepdim=True)


@register("s4")
class S4(StateSpaceLayer):
    """A structured state space, S4 (Gu et al. 2022): a long convolution in training, a recurrence in decoding."""

    @dataclass(frozen=True)
    class Settings:
        state: int = setting(64, "numbers in the state of each channel", least=2, most=4096)
        dt_min: float = setting(0.001, "smallest initial step size", above=0)
        dt_max: float = setting(0.1, "largest initial step size", above=0)

    no_decay = full_precision = ("log_dt", "log_decay", "frequency", "rank_one", "inputs")

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.rank_one = nn.Parameter(torch.empty(self.width, self.n // 2, 2))  # p
        self.inputs = nn.Parameter(torch.empty(self.width, self.n // 2, 2))  # B
        self.init_weights()

    def init_weights(self) -> None:
        super().init_weights()
        eigenvalues, rank_one, inputs = (torch.from_numpy(x) for x in diagonalize_legs(self.n))
        with torch.no_grad():
            self.log_decay.copy_((-eigenvalues.real).log().expand_as(self.log_decay))
            self.frequency.copy_(eigenvalues.imag.expand_as(self.frequency))
            self.rank_one.copy_(torch.view_as_real(rank_one).expand_as(self.rank_one))
            self.inputs.copy_(torch.view_as_real(inputs).expand_as(self.inputs))

    def system(self, dtype: torch.dtype) -> DenseSystem:
        log_decay, frequency, log_dt, p, inputs, outputs = self.numbers(
            dtype, self.log_decay, self.frequency, self.log_dt, self.rank_one, self.inputs, self.outputs
        )
        a, g = torch.complex(-log_decay.exp(), frequency), log_dt.exp()[:, None] / 2
        d = 1 / (1 - g * a)  # (H, N/2)
        dp = d * p * (g / (1 + g * inner(p, d * p)))

        def solve(v: Tensor) -> Tensor:
            """Multiply (..., H, N/2) by (1 - g A)^-1."""
            return d * v - dp * inner(p, d * v)

        def transition(x: Tensor) -> Tensor:
            """Multiply (..., H, N/2) by (1 - g A)^-1 (1 + g A)."""
            return solve((1 + g * a) * x - g * p * inner(p, x))

        return DenseSystem(transition, solve(2 * g * inputs), outputs)
