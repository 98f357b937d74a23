"""The feed-forward sublayer: W2 f(W1 x + b1) + b2 at each position, or gated, W2 (f(W1 x) * W3 x)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register
from regard.kernels.linear_activation import ACTIVATIONS as ACTIVATIONS
from regard.kernels.linear_activation import linear_activation
from regard.kernels.weight_layout import gate_block
from regard.layers.context import Context
from regard.layers.part import FeedForward, Place


@register("dense")
class Dense(FeedForward):
    """Two matrices with an activation between them."""

    tensor_parallel: ClassVar[dict[str, str]] = {"inner": "column", "outer": "row"}
    observed: ClassVar[dict[str, str]] = {"inner": "outer"}

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.inner = nn.Linear(config.d_model, (1 + self.gated) * config.d_ff, bias=config.bias)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.ff_dropout)

    def cut_sizes(self) -> dict[str, int]:
        return {"numbers between its matrices": self.outer.in_features}

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply both matrices and the activation to every token, (..., C) -> (..., C); the inner width is F."""
        return self.outer(self.dropout(linear_activation(x, self.inner, self.activation, self.gated)))

    def fused_step(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None, ctx: Context, kept: Any) -> Tensor:
        """Compute residual + step(norm(x)) of one row by fused kernels, (1, C) -> (1, C)."""
        from regard.kernels.step_linear import project

        inner = project(x, self.inner, norm=norm, activation=self.activation, gated=self.gated)
        return project(inner, self.outer, residual=residual)


@register("gated")
class Gated(Dense):
    """A second projection opens and closes the first: SwiGLU with silu, GEGLU with gelu.

    Both projections are one matrix, in which blocks of gate rows and value rows alternate (kernels/weight_layout.py)."""

    gated: ClassVar[bool] = True

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        d_ff = self.outer.in_features
        return {"inner": (d_ff // gate_block(d_ff), [gate_block(d_ff)] * 2)}

    def cut_sizes(self) -> dict[str, int]:
        d_ff = self.outer.in_features
        return {"blocks of gates": d_ff // gate_block(d_ff)}
