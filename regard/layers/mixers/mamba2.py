"""Mamba-2 (Dao and Gu 2024): a selective state space with one decay a head, which is linear attention with that decay.

    z, x, B, C, dt = W_in u               gate, values, keys, queries, step sizes
    x, B, C = silu(conv(x, B, C))         a short causal convolution over each channel
    dt = softplus(dt + bias)              (H,), limited to the range [dt_least, dt_most]
    S_t = exp(dt A) S_{t-1} + B_t (dt x_t)^T,  y_t = C_t S_t + D x_t      in each head, with A < 0
    out = W_out RMSNorm(y * silu(z))

The H = expand * d_model / d_head heads of x come in `groups` that share B and C of `d_state` numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.layers.context import Context
from regard.layers.decoding_state import Storage
from regard.layers.mixers.linear_recurrence import LinearRecurrence, Recurrence
from regard.layers.mixers.short_convolution import ShortConvolution
from regard.layers.part import Place


@register("mamba2")
class Mamba2(LinearRecurrence):
    """Mamba-2 (Dao and Gu 2024): a selective state space with one decay a head, with its convolution and gate."""

    @dataclass(frozen=True)
    class Settings:
        d_state: int = setting(128, "width of the state: numbers of B and of C in each group", least=1, most=1 << 16)
        d_head: int = setting(64, "channels of a head", least=1, most=1 << 16)
        expand: int = setting(2, "channels of all heads as a multiple of model.d_model", least=1, most=64)
        groups: int = setting(1, "groups of heads, each with its own B and C", least=1, most=1 << 16)
        kernel: int = setting(4, "tokens that the convolution sees, the token itself among them", least=1, most=1 << 10)
        conv_bias: bool = setting(True, "a bias in the convolution")
        dt_least: float = setting(0.0, "smallest step size")
        dt_most: float = setting(0.0, "largest step size; 0 = no limit")
        dt_init_least: float = setting(0.001, "smallest initial step size", above=0)
        dt_init_most: float = setting(0.1, "largest initial step size", above=0)

    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().check(settings, config, place)
        width = settings.expand * config.d_model
        if width % settings.d_head:
            raise RegardError(
                f"model.mamba2.d_head {settings.d_head} does not divide model.mamba2.expand * model.d_model = {width}"
            )
        if width // settings.d_head % settings.groups:
            raise RegardError(
                f"model.mamba2.groups {settings.groups} does not divide the {width // settings.d_head} heads"
            )
        if settings.dt_init_least > settings.dt_init_most:
            raise RegardError(
                f"model.mamba2.dt_init_least {settings.dt_init_least:g} is above model.mamba2.dt_init_most "
                f"{settings.dt_init_most:g}"
            )
        if 0 < settings.dt_most < settings.dt_least:
            raise RegardError(
                f"model.mamba2.dt_least {settings.dt_least:g} is above model.mamba2.dt_most {settings.dt_most:g}"
            )

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.settings = settings
        self.width, self.heads = settings.expand * config.d_model, settings.expand * config.d_model // settings.d_head
        self.groups, keys = settings.groups, settings.groups * settings.d_state
        self.limits = settings.dt_least, settings.dt_most or math.inf
        self.sizes = [self.width, self.width + 2 * keys, self.heads]  # gate, inputs of the convolution, step sizes
        self.parts = [self.width, keys, keys]  # of the convolution: x, B, C
        self.inner = nn.Linear(config.d_model, sum(self.sizes), bias=config.bias)
        self.convolution = ShortConvolution(self.sizes[1], settings.kernel, settings.conv_bias, silu=True)
        self.log_a = nn.Parameter(torch.empty(self.heads))  # A = -exp(log_a)
        self.d = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.norm = nn.RMSNorm(self.width, eps=config.norm_eps)
        self.out = nn.Linear(self.width, config.d_model, bias=config.bias)
        self.set_state(self.heads, settings.d_state, settings.d_head)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw A from U(-16, -1), and step sizes log-uniformly between their initial limits; D = 1."""
        low, high = math.log(self.settings.dt_init_least), math.log(self.settings.dt_init_most)
        with torch.no_grad():
            self.log_a.uniform_(1, 16).log_()
            self.d.fill_(1)
            dt = self.dt_bias.uniform_(low, high).exp_().clamp_(min=1e-4)
            dt.add_(torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        width = settings.expand * config.d_model
        heads, mixed = width // settings.d_head, width + 2 * settings.groups * settings.d_state
        # input; gate, inputs of the convolution and dt; what is convolved; values, o, inputs of norm and `out`; decays
        return 2 * config.d_model + 2 * (width + mixed + heads) + 2 * mixed + 8 * width + 4 * heads

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"inner": (1, [self.width, *self.parts, self.heads])}

    def state(self) -> dict[str, Storage]:
        return {**super().state(), "inputs": self.convolution.storage()}

    def project(self, x: Tensor, ctx: Context, kept: Any) -> Recurrence:
        gate, mixed, dt = self.inner(x).split(self.sizes, -1)
        if x.dim() == 2:
            convolved = self.convolution.step(mixed, kept.inputs)
        else:
            convolved = self.convolution(mixed, ctx.prepared, None if kept is None else kept.inputs)
            if kept is not None:
                self.convolution.store_last(mixed, ctx.positions, kept.inputs)
        values, keys, queries = convolved.split(self.parts, -1)
        values = values.unflatten(-1, (self.heads, -1))
        q, k = (part.unflatten(-1, (self.groups, -1)) for part in (queries, keys))
        dtype = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.limits)  # (..., H)
        v = (values * dt[..., None]).to(values.dtype)
        skipped = values * self.d.to(values.dtype)[:, None]
        return Recurrence(q, k, v, -self.log_a.to(dtype).exp() * dt, (skipped, gate))

    def finish(self, o: Tensor, given: Recurrence) -> Tensor:
        skipped, gate = given.rest
        y = (o + skipped).flatten(-2) * F.silu(gate)
        return self.out(self.norm(y).to(gate.dtype))
