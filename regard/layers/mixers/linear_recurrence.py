"""The base class of causal token mixers whose state is a matrix for each head (kernels/gated_linear_attention.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.gated_linear_attention import gated_linear_attention, step
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.part import Mixer, Place


class Recurrence(NamedTuple):
    """What a mixer computes from its input for the recurrence; in a decoding step, all of it without the axis of tokens."""

    q: Tensor  # (B, T, G, K)
    k: Tensor  # (B, T, G, K)
    v: Tensor  # (B, T, H, V)
    log_decay: Tensor | None  # (B, T, H), (B, T, H, K), or None without decay
    rest: tuple[Tensor, ...] = ()  # for `finish`


class LinearRecurrence(Mixer):
    """Base class of mixers with S_t = diag(alpha_t) S_{t-1} + k_t v_t^T and o_t = q_t S_t in each head.

    A subclass calls `set_state` in its constructor and writes `project` and `finish`; the forms for whole rows, prompts and
    decoding steps follow from them."""

    reads_pieces = True

    def set_state(self, heads: int, keys: int, values: int) -> None:
        """Declare the size of the state: (heads, keys, values) for a row."""
        self.state_shape = (heads, keys, values)

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            raise RegardError(f"model.mixer {cls.name} reads forwards only: use it in a gpt")

    def prepare(self, request: PrepareRequest) -> Tensor:
        return request.causal_starts(self.name)

    def project(self, x: Tensor, ctx: Context, kept: Any) -> Recurrence:
        """Return queries, keys, values and decays of whole rows x (B, T, C), or of one token of each row (N, C).

        `kept` is None in training; a mixer that keeps more than the state of the recurrence reads and updates it here."""
        raise NotImplementedError

    def finish(self, o: Tensor, given: Recurrence) -> Tensor:
        """Return the result (..., C) from the output of the recurrence, (..., H, V)."""
        raise NotImplementedError

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Mix the tokens of whole rows, (B, T, C) -> (B, T, C)."""
        given = self.project(x, ctx, None)
        return self.finish(gated_linear_attention(*given[:4], ctx.prepared)[0], given)

    def state(self) -> dict[str, Storage]:
        return {"matrix": PerRow(self.state_shape)}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix the tokens of prompts, (B, T, C) -> (B, T, C), and keep the state after the last token of each row."""
        given = self.project(x, ctx, kept)
        real = ctx.real[..., None, None]  # padding leaves the state as it is: k = 0, alpha = 1
        k, decay = given.k.where(real, 0), given.log_decay
        if decay is not None:
            decay = decay.where(real if decay.dim() == 4 else real[..., 0], 0)
        o, last = gated_linear_attention(given.q, k, given.v, decay, ctx.prepared, kept.matrix)
        kept.matrix.copy_(last)
        return self.finish(o, given)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix one more token of each row with the state, (N, C) -> (N, C)."""
        given = self.project(x, ctx, kept)
        return self.finish(step(*given[:4], kept.matrix).to(x.dtype), given)


def with_ones(v: Tensor) -> Tensor:
    """Return values with a last column of ones, (..., V) -> (..., V + 1), whose output is the sum of the weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def normalize_weights(o: Tensor, eps: float) -> Tensor:
    """Divide the output by the sum of its weights, which is its last column, (..., V + 1) -> (..., V)."""
    o = o.to(torch.promote_types(o.dtype, torch.float32))
    return o[..., :-1] / (o[..., -1:] + eps)
