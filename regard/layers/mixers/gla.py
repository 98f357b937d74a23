"""Gated linear attention (GLA, Yang et al. 2024): S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t / sqrt(K).

Every key channel has a decay of its own that depends on the token, alpha_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature),
where W_1 maps to `gate_rank` numbers. Queries and keys are half as wide as the model, values as wide. The output of each
head is normalized, multiplied with silu(W_r x_t), and projected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.layers.context import Context
from regard.layers.mixers.linear_recurrence import LinearRecurrence, Recurrence
from regard.layers.part import Place

NORM_EPS = 1e-5


@register("gla")
class GLA(LinearRecurrence):
    """Gated linear attention (Yang et al. 2024): a matrix as state, and a decay for each key channel and token."""

    @dataclass(frozen=True)
    class Settings:
        gate_rank: int = setting(16, "numbers between the two matrices that compute the decays", least=1, most=1 << 16)
        temperature: float = setting(
            16.0, "divides the logarithm of the decays: larger ones forget more slowly", above=0
        )

    reads: ClassVar[tuple[str, ...]] = ("n_heads",)

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().check(settings, config, place)
        if config.d_model % (2 * config.n_heads):
            raise RegardError(
                f"model.mixer gla splits half of model.d_model {config.d_model} into model.n_heads {config.n_heads}: "
                f"choose a width that is a multiple of {2 * config.n_heads}"
            )

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        width, self.heads, self.temperature = config.d_model, config.n_heads, settings.temperature
        self.sizes = [width // 2, width // 2, width, width]  # queries, keys, values, output gate
        self.qkvg = nn.Linear(width, sum(self.sizes), bias=False)
        self.gate_in = nn.Linear(width, settings.gate_rank, bias=False)
        self.gate_out = nn.Linear(settings.gate_rank, width // 2)
        self.norm = nn.RMSNorm(width // self.heads, eps=NORM_EPS)
        self.out = nn.Linear(width, width, bias=False)
        self.scale = (width // 2 // self.heads) ** -0.5
        self.set_state(self.heads, width // 2 // self.heads, width // self.heads)

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        # input 2, q, k, v and output gate 6, decays before (1) and after (2) the logarithm, o 2, input of `out` 2
        return 15 * config.d_model + 2 * settings.gate_rank

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"qkvg": (1, self.sizes)}

    def project(self, x: Tensor, ctx: Context, kept: object) -> Recurrence:
        *qkv, gate = self.qkvg(x).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in qkv)
        logits = self.gate_out(self.gate_in(x))
        log_decay = F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32))) / self.temperature
        return Recurrence(q, k, v, log_decay.unflatten(-1, (self.heads, -1)), (gate,))

    def finish(self, o: Tensor, given: Recurrence) -> Tensor:
        normal = self.norm(o * self.scale).to(o.dtype).flatten(-2)
        return self.out(normal * F.silu(given.rest[0]))
