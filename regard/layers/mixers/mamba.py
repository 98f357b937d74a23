"""Mamba in the place of self-attention (Gu and Dao 2023): a state space whose step size, input and output tokens choose.

    x, z = W_in X;   x = silu(conv(x));   dt, B, C = W_x x;   dt = softplus(W_dt dt + b)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t;   y_t = C_t . h_t + D x_t;   out = W_out (y * silu(z))

A = -exp(A_log). Every channel has `d_state` states, which a decoding step keeps, together with the last inputs of the
convolution: its memory does not grow with the text. kernels/selective_scan.py computes the recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION
from regard.kernels.selective_scan import TOKENS, decoding_step, selective_scan
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.mixers.short_convolution import ShortConvolution
from regard.layers.part import Mixer, Place

NEVER = -1e4  # softplus of it is 0, and so is dt: the state stays as it is


@register("mamba")
class Mamba(Mixer):
    """A selective state space, as in Mamba (Gu and Dao 2023)."""

    @dataclass(frozen=True)
    class Settings:
        d_state: int = setting(16, "states of a channel", least=1, most=256)
        expand: int = setting(2, "channels, as a multiple of d_model", least=1, most=64)
        kernel: int = setting(4, "tokens that the convolution sees", least=1, most=64)
        dt_rank: int = setting(0, "rank of the projection to step sizes; 0 = d_model / 16, rounded up", most=1 << 20)
        dt_min: float = setting(0.001, "smallest initial step size", above=0)
        dt_max: float = setting(0.1, "largest initial step size", above=0)
        dt_floor: float = setting(1e-4, "initial step sizes are raised to this", above=0)
        conv_bias: bool = setting(True, "whether the convolution has a bias")

    reads: ClassVar[tuple[str, ...]] = ()
    reads_pieces = True
    no_decay: ClassVar[tuple[str, ...]] = ("A_log", "D", "dt_bias")

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            raise RegardError("model.mixer mamba reads forwards only: use it in a gpt")
        if settings.dt_min > settings.dt_max:
            raise RegardError(f"model.mamba.dt_min {settings.dt_min} is above model.mamba.dt_max {settings.dt_max}")

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.width, self.states = settings.expand * config.d_model, settings.d_state
        self.rank = settings.dt_rank or -(-config.d_model // 16)
        self.steps = settings.dt_min, settings.dt_max, settings.dt_floor
        self.inner = nn.Linear(config.d_model, 2 * self.width, bias=config.bias)
        self.convolution = ShortConvolution(self.width, settings.kernel, settings.conv_bias, silu=True)
        self.select = nn.Linear(self.width, self.rank + 2 * self.states, bias=False)
        self.dt = nn.Linear(self.rank, self.width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.width))
        self.A_log = nn.Parameter(torch.empty(self.width, self.states))
        self.D = nn.Parameter(torch.empty(self.width))
        self.out = nn.Linear(self.width, config.d_model, bias=config.bias)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give each channel the decay rates 1, 2, ... and a random step size, which is log-uniform."""
        self.A_log.copy_(torch.arange(1, self.states + 1, device=self.A_log.device).log())
        nn.init.ones_(self.D)
        nn.init.uniform_(self.dt.weight, -(self.rank**-0.5), self.rank**-0.5)
        least, most, floor = self.steps
        nn.init.uniform_(self.dt_bias, math.log(least), math.log(most)).exp_().clamp_(min=floor)
        self.dt_bias.add_(torch.log(-torch.expm1(-self.dt_bias)))  # the inverse of softplus

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        width, n = settings.expand * config.d_model, settings.d_state
        rank = settings.dt_rank or -(-config.d_model // 16)
        # input; x, z, the convolved x, dt and the input of `out`; the small dt; B and C, also in fp32; stored states
        return 2 * config.d_model + 10 * width + 2 * (rank + 2 * n) + 8 * n + 2 * width * n // TOKENS

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"inner": (1, [self.width] * 2), "select": (1, [self.rank, self.states, self.states])}

    def prepare(self, request: PrepareRequest) -> Tensor:
        return request.causal_starts(self.name)

    def scan(
        self, x: Tensor, starts: Tensor, kept: Any = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, T, C), the inputs of the convolution (B, T, D), and the last state (B, D, N)."""
        inputs, z = self.inner(x).chunk(2, -1)  # (B, T, D) each
        value = self.convolution(inputs, starts, None if kept is None else kept.inputs)
        low, b, c = self.select(value).split([self.rank, self.states, self.states], -1)
        u = self.dt(low)
        if real is not None:
            u = u.masked_fill(~real[..., None], NEVER)
        value, initial = value.to(u.dtype), None if kept is None else kept.state
        decay = -self.A_log.to(torch.promote_types(self.A_log.dtype, torch.float32)).exp()
        y, final = selective_scan(value, u, decay, b, c, self.D, self.dt_bias, starts, z, initial)
        return self.out(y), inputs, final

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Mix whole rows, (B, T, C) -> (B, T, C)."""
        return self.scan(x, ctx.prepared)[0]

    def state(self) -> dict[str, Storage]:
        return {"state": PerRow((self.width, self.states)), "inputs": self.convolution.storage()}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix prompts, (B, T, C) -> (B, T, C), from the state that is kept to the one after each row's last token."""
        y, inputs, final = self.scan(x, ctx.prepared, kept, ctx.positions > PAD_POSITION)
        self.convolution.store_last(inputs, ctx.positions, kept.inputs)
        kept.state.copy_(final)
        return y

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix one more token of each row, (N, C) -> (N, C)."""
        inputs, z = self.inner(x).chunk(2, -1)
        value = self.convolution.step(inputs, kept.inputs)
        low, b, c = self.select(value).split([self.rank, self.states, self.states], -1)
        return self.out(decoding_step(kept.state, value, self.dt(low), self.A_log, b, c, self.D, self.dt_bias, z))
