"""RWKV-4 (Peng et al. 2023): time mix in the place of self-attention, and channel mix in the place of a feed-forward layer.

Both see each token x together with the one before it, x' (zeros at the beginning of a document), mixed by learned shares:

    time mix      k, v, r = W_k (m_k x + (1 - m_k) x'), ...;   out = W_o (sigmoid(r) * wkv(k, v))
    channel mix   k, r = W_k (m_k x + (1 - m_k) x'), ...;      out = sigmoid(r) * W_v relu(k)^2

wkv is a mean of the values so far, weighted by e^k and a decay for each channel (kernels/wkv.py). A decoding step keeps the
last token of each of the two parts, and the state of the mean: its memory does not grow with the text.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register
from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION
from regard.kernels.wkv import step, wkv
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.part import FeedForward, Mixer, Place


def previous_tokens(x: Tensor, positions: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the token before each token, (B, T, C) -> (B, T, C); zeros where a document begins.

    before: (B, C), the token before the first column, if a text continues there; None: zeros."""
    first = torch.zeros_like(x[:, :1]) if before is None else before[:, None].to(x.dtype)
    return torch.cat([first, x[:, :-1]], 1).masked_fill((positions == 0)[..., None], 0)


def store_last(x: Tensor, positions: Tensor, before: Tensor) -> None:
    """Put the last token of each row of prompts x (B, T, C) into `before` (B, C), which holds the one before x."""
    both = torch.cat([before[:, None], x.to(before.dtype)], 1)
    count = (positions > PAD_POSITION).sum(1)
    before.copy_(both[torch.arange(len(x), device=x.device), count])


def mix(x: Tensor, previous: Tensor, share: Tensor) -> Tensor:
    """Return share x + (1 - share) x', in the dtype of x."""
    return torch.lerp(previous, x, share.to(x.dtype))


def shares(width: int, power: float, device: torch.device) -> Tensor:
    """Return (i / width)^power for the channels i, (C,)."""
    return (torch.arange(width, device=device) / width) ** power


@register("rwkv")
class TimeMix(Mixer):
    """A decaying mean of earlier values, weighted by keys: the time mix of RWKV-4 (Peng et al. 2023)."""

    reads: ClassVar[tuple[str, ...]] = ()
    reads_pieces = True
    no_decay: ClassVar[tuple[str, ...]] = ("decay", "bonus", "mix_k", "mix_v", "mix_r")

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            raise RegardError("model.mixer rwkv reads forwards only: use it in a gpt")

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        width = self.width = config.d_model
        self.depth = place.depth, max(config.n_decoder_layers, place.depth + 1)
        self.key, self.value, self.receptance, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.decay, self.bonus, self.mix_k, self.mix_v, self.mix_r = (
            nn.Parameter(torch.empty(width)) for _ in range(5)
        )
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give the channels different decays and shares of the token before, by the number of the block."""
        depth, layers = self.depth
        ratio, left = depth / max(1, layers - 1), 1 - depth / layers
        channel = torch.arange(self.width, device=self.decay.device)
        self.decay.copy_(-5 + 8 * (channel / max(1, self.width - 1)) ** (0.7 + 1.3 * ratio))
        self.bonus.copy_(torch.tensor(0.3).log() + 0.5 * ((channel + 1) % 3 - 1))
        plain = shares(self.width, left, channel.device)
        self.mix_k.copy_(plain)
        self.mix_v.copy_(plain + 0.3 * ratio)
        self.mix_r.copy_(shares(self.width, left / 2, channel.device))

    @classmethod
    def activation_bytes(cls, settings: Any, config: ModelConfig) -> int:
        return 18 * config.d_model  # input; inputs of three products; k, v, gate; wkv; the input of `out`

    def prepare(self, request: PrepareRequest) -> Tensor:
        return request.causal_starts(self.name)

    def project(self, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and the gate, each (..., C)."""
        k, v = self.key(mix(x, previous, self.mix_k)), self.value(mix(x, previous, self.mix_v))
        return k, v, torch.sigmoid(self.receptance(mix(x, previous, self.mix_r)))

    def rates(self) -> tuple[Tensor, Tensor]:
        """Return the decay and the bonus of each channel, at least in fp32."""
        exact = torch.promote_types(self.decay.dtype, torch.float32)
        return self.decay.to(exact).exp(), self.bonus.to(exact)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Mix whole rows, (B, T, C) -> (B, T, C)."""
        k, v, gate = self.project(x, previous_tokens(x, ctx.positions))
        return self.out(gate * wkv(k, v, *self.rates(), ctx.prepared)[0])

    def state(self) -> dict[str, Storage]:
        return {"mean": PerRow((3, self.width)), "previous": PerRow((self.width,))}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix prompts, (B, T, C) -> (B, T, C), from the state that is kept to the one after each row's last token."""
        k, v, gate = self.project(x, previous_tokens(x, ctx.positions, kept.previous))
        count = (ctx.positions > PAD_POSITION).sum(1)
        y, final = wkv(k, v, *self.rates(), ctx.prepared, kept.mean, count)
        store_last(x, ctx.positions, kept.previous)
        kept.mean.copy_(final)
        return self.out(gate * y)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix one more token of each row, (N, C) -> (N, C)."""
        k, v, gate = self.project(x, kept.previous.to(x.dtype))
        kept.previous.copy_(x)
        exact = kept.mean.dtype
        state, y, _ = step(kept.mean, k.to(exact), v.to(exact), *(rate.to(exact) for rate in self.rates()))
        kept.mean.copy_(state)
        return self.out(gate * y.to(gate.dtype))


@register("rwkv-channel-mix")
class ChannelMix(FeedForward):
    """A layer of squared ReLUs with a gate, which also sees the token before: the channel mix of RWKV-4."""

    reads: ClassVar[tuple[str, ...]] = ()
    no_decay: ClassVar[tuple[str, ...]] = ("mix_k", "mix_r")
    observed: ClassVar[dict[str, str]] = {"inner": "outer"}

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            raise RegardError("model.feedforward rwkv-channel-mix reads forwards only: use it in a gpt")

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        width = self.width = config.d_model
        self.left = 1 - place.depth / max(config.n_decoder_layers, place.depth + 1)
        self.inner = nn.Linear(width, config.d_ff, bias=False)
        self.outer = nn.Linear(config.d_ff, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(config.ff_dropout)
        self.mix_k, self.mix_r = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give the channels different shares of the token before, by the number of the block."""
        for share in (self.mix_k, self.mix_r):
            share.copy_(shares(self.width, self.left, share.device))

    @classmethod
    def activation_bytes(cls, settings: Any, config: ModelConfig) -> int:
        inside = 4 * config.d_ff + (3 * config.d_ff if config.ff_dropout else 0)  # before and after the square
        return inside + 8 * config.d_model  # and the inputs of two products, both factors of the result

    def transform(self, x: Tensor, previous: Tensor) -> Tensor:
        """Transform tokens (..., C), each with the one before it."""
        k = torch.relu(self.inner(mix(x, previous, self.mix_k))).square()
        return torch.sigmoid(self.receptance(mix(x, previous, self.mix_r))) * self.outer(self.dropout(k))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Transform whole rows, (B, T, C) -> (B, T, C)."""
        return self.transform(x, previous_tokens(x, ctx.positions))

    def state(self) -> dict[str, Storage]:
        return {"previous": PerRow((self.width,))}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Transform prompts, (B, T, C) -> (B, T, C), and keep each row's last token."""
        y = self.transform(x, previous_tokens(x, ctx.positions, kept.previous))
        store_last(x, ctx.positions, kept.previous)
        return y

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Transform one more token of each row, (N, C) -> (N, C)."""
        y = self.transform(x, kept.previous.to(x.dtype))
        kept.previous.copy_(x)
        return y
