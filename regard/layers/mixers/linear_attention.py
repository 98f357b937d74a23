"""Linear attention (Katharopoulos et al. 2020): o_t = phi(q_t) S_t / (phi(q_t) . z_t + eps), phi(x) = elu(x) + 1.

S_t is the sum of phi(k_s) v_s^T and z_t the sum of phi(k_s) over s <= t. It is attention whose weights are
phi(q_t) . phi(k_s) instead of exp(q_t . k_s / sqrt(D)), so that the past fits into a matrix of fixed size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register
from regard.layers.context import Context
from regard.layers.mixers.linear_recurrence import LinearRecurrence, Recurrence, normalize_weights, with_ones
from regard.layers.part import NoSettings, Place

EPS = 1e-6  # added to the sum of weights


def feature_map(x: Tensor) -> Tensor:
    """Return elu(x) + 1, which is positive, computed in fp32 at least."""
    return (F.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1).to(x.dtype)


@register("linear-attention")
class LinearAttention(LinearRecurrence):
    """Linear attention (Katharopoulos et al. 2020), with elu(x) + 1 of queries and keys instead of the softmax."""

    ordered = False
    reads: ClassVar[tuple[str, ...]] = ("n_heads", "d_head")

    def __init__(self, settings: NoSettings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.heads, self.d_head = config.n_heads, config.d_head
        self.width = config.n_heads * config.d_head
        self.qkv = nn.Linear(config.d_model, 3 * self.width, bias=config.bias)
        self.out = nn.Linear(self.width, config.d_model, bias=config.bias)
        self.set_state(self.heads, self.d_head, self.d_head + 1)  # z is the last column

    @classmethod
    def activation_bytes(cls, settings: NoSettings, config: ModelConfig) -> int:
        # input; q, k, v and the input of `out`; features of q and k; v and o with the column of ones
        width = config.n_heads * config.d_head
        return 2 * config.d_model + 8 * width + 4 * width + 4 * (width + config.n_heads)

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"qkv": (1, [self.width] * 3)}

    def project(self, x: Tensor, ctx: Context, kept: object) -> Recurrence:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.d_head)).unbind(-3)
        return Recurrence(feature_map(q), feature_map(k), with_ones(v), None)

    def finish(self, o: Tensor, given: Recurrence) -> Tensor:
        return self.out(normalize_weights(o, EPS).to(o.dtype).flatten(-2))
