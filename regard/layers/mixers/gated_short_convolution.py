"""A gated short convolution, as in Based (Arora et al. 2024): y = W_o (silu(conv(W_a x)) * W_b x).

It compares tokens that are next to each other, which linear attention does badly, at next to no cost. Hybrid models such as
`mixer = ["short-convolution", "based", "attention"]` have one in some of their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import Storage
from regard.layers.mixers.short_convolution import ShortConvolution
from regard.layers.part import Mixer, Place


@register("short-convolution")
class GatedShortConvolution(Mixer):
    """A gated depthwise convolution over the last few tokens, for hybrid models such as Based (Arora et al. 2024)."""

    @dataclass(frozen=True)
    class Settings:
        kernel: int = setting(3, "tokens that the convolution sees, the token itself among them", least=1, most=1 << 10)
        expand: int = setting(1, "channels of the convolution as a multiple of model.d_model", least=1, most=64)

    reads: ClassVar[tuple[str, ...]] = ()
    reads_pieces = True

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            raise RegardError(f"model.mixer {cls.name} reads forwards only: use it in a gpt")

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.width = settings.expand * config.d_model
        self.inner = nn.Linear(config.d_model, 2 * self.width, bias=config.bias)
        self.convolution = ShortConvolution(self.width, settings.kernel, silu=True)
        self.out = nn.Linear(self.width, config.d_model, bias=config.bias)

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        return (2 + 6 * settings.expand) * config.d_model  # input; values, gate and the input of `out`

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"inner": (1, [self.width] * 2)}

    def prepare(self, request: PrepareRequest) -> Tensor:
        return request.causal_starts(self.name)

    def state(self) -> dict[str, Storage]:
        return {"inputs": self.convolution.storage()}

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Convolve whole rows, (B, T, C) -> (B, T, C)."""
        values, gate = self.inner(x).chunk(2, -1)
        return self.out(self.convolution(values, ctx.prepared) * gate)

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Convolve prompts, (B, T, C) -> (B, T, C), and keep the last inputs of each row."""
        values, gate = self.inner(x).chunk(2, -1)
        mixed = self.convolution(values, ctx.prepared, kept.inputs)
        self.convolution.store_last(values, ctx.positions, kept.inputs)
        return self.out(mixed * gate)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Convolve one more token of each row with the inputs before it, (N, C) -> (N, C)."""
        values, gate = self.inner(x).chunk(2, -1)
        return self.out(self.convolution.step(values, kept.inputs) * gate)
