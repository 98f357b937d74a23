"""Relative positions: a bias for each head and distance, added to the scores.

All but FIRE depend on the distance k - q alone, so that a (T, S) bias is a vector of 2T - 1 distances for each head: kernels
look it up, and gradients pass through H x (2T-1) numbers instead of H x T x T. Everything is fp32.
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
from regard.device import without_autocast
from regard.errors import RegardError
from regard.layers.part import Curves, Matrix, Place
from regard.layers.positions.scheme import DISTANCE, PositionScheme


class Relative(PositionScheme):
    """Base class of schemes whose bias depends on the distance k - q alone."""

    relative: ClassVar[bool] = True
    toeplitz: ClassVar[bool] = True
    flat: int | None = None  # beyond this distance the bias is constant on each side

    def theta(self) -> Tensor | None:
        """Return the two parameters of each head's bias curve, (H, 2), or None if it is no such curve."""
        return None

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        """Return the bias of distances k - q (integers of any shape) for parameters theta, (H, *shape)."""
        raise NotImplementedError

    def bias_at(self, distance: Tensor) -> Tensor:
        """Return the bias of distances k - q, (H, *shape)."""
        theta = self.theta()
        assert theta is not None
        return self.curve(theta, distance)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return self.bias_at(k - q)


@register("alibi")
class ALiBi(Relative):
    """ALiBi: -m_h |q - k| with fixed slopes, so that each head has its own horizon (Press et al. 2022)."""

    @dataclass(frozen=True)
    class Settings:
        max_exponent: float = setting(8.0, "slopes are 2^(-max_exponent h / n_heads), h = 1 .. n_heads", above=0)

    formula = r"$q_i \cdot k_j / \sqrt{D} - m_h\,|i - j|,\quad m_h = 2^{-8(h+1)/H}$"
    slopes: Tensor

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.max_exponent = settings.max_exponent
        self.register_buffer("slopes", torch.empty(config.n_heads), persistent=False)  # (H,)
        self.init_weights()

    def init_weights(self) -> None:
        self.slopes.copy_(alibi_slopes(len(self.slopes), self.max_exponent))

    def bias_at(self, distance: Tensor) -> Tensor:
        return -per_head(self.slopes, distance) * distance.abs()


def alibi_slopes(n_heads: int, most: float = 8.0) -> Tensor:
    """Return the slopes 2^(-most h/H), h = 1..H, if H is a power of two.

    Otherwise they are the slopes of the next lower power of two, followed by every other slope of the next higher one."""
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-most * h / below) for h in range(1, below + 1)]
    slopes += [2 ** (-most * h / (2 * below)) for h in range(1, 2 * below + 1, 2)]
    return torch.tensor(slopes[:n_heads])


@register("t5")
class T5Bias(Relative):
    """T5: a learned number for each head and bucket of distances, buckets being exact near by and logarithmic further away.

    T5 does not divide the scores by sqrt(D); the initial query weights are divided instead (layers/stack.py).
    """

    @dataclass(frozen=True)
    class Settings:
        buckets: int = setting(32, "buckets of distances", least=4, most=1 << 20)
        max_distance: int = setting(128, "distances beyond this share one bucket", most=1 << 24)

    formula = r"$q_i \cdot k_j + w_{h,\ \mathrm{bucket}(j-i)}$"
    scale = 1.0

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.buckets, self.max_distance, self.bidirectional = settings.buckets, settings.max_distance, not place.causal
        self.flat = settings.max_distance
        self.weight = nn.Parameter(torch.empty(config.n_heads, settings.buckets))
        self.init_weights()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if settings.max_distance <= settings.buckets // 2:
            raise RegardError(
                f"model.t5.max_distance {settings.max_distance} must be above half of model.t5.buckets {settings.buckets}"
            )

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)

    def bias_at(self, distance: Tensor) -> Tensor:
        bucket = t5_bucket(distance, self.buckets, self.max_distance, self.bidirectional)
        return self.weight.index_select(1, bucket.flatten()).unflatten(1, bucket.shape)

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return the bucket of each distance, and the bias unless all weights are zero."""
        at = self.key_offsets(n)
        bucket = {"bucket": t5_bucket(at, self.buckets, self.max_distance, self.bidirectional)}
        buckets = Curves("bucket of each distance", at, bucket, DISTANCE, "bucket")
        return (buckets, self.describe_bias(n)) if self.weight.any() else (buckets,)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bucket of each distance k - q.

    If bidirectional, each side has half of the buckets; otherwise all later keys share bucket 0."""
    offset: Tensor | int = 0
    if bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        back = distance.abs()
    else:
        back = (-distance).clamp(min=0)
    exact = buckets // 2
    # fp32 and this order of operations matter: distance 64 lies exactly on the edge of a bucket.
    ratio = torch.log(back.float().clamp(min=1) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).long()
    return offset + torch.where(back < exact, back, far.clamp(max=buckets - 1))


KERPLE_MIN = 0.01  # lower bound of KERPLE's parameters


def clamp_straight_through(x: Tensor, most: float | None = None) -> Tensor:
    """Return x clamped by a straight-through estimator: outside of the bounds the gradient still passes."""
    return x.detach().clamp(KERPLE_MIN, most) + (x - x.detach())


@register("kerple-log")
class KerpleLog(Relative):
    """KERPLE, logarithmic: -r1 ln(1 + r2 |q - k|), r1 and r2 learned per head (Chi et al. 2022)."""

    formula = r"$q_i \cdot k_j / \sqrt{D} - r_1 \ln(1 + r_2\,|i - j|)$"

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.r1 = nn.Parameter(torch.empty(config.n_heads))
        self.r2 = nn.Parameter(torch.empty(config.n_heads))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.uniform_(self.r1, 0, 2)
        nn.init.uniform_(self.r2)

    def theta(self) -> Tensor:
        return torch.stack([clamp_straight_through(self.r1), clamp_straight_through(self.r2)], 1)

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        r1, r2 = (per_head(r, distance) for r in theta.unbind(1))
        return -r1 * torch.log1p(r2 * distance.abs())


@register("kerple-power")
class KerplePower(Relative):
    """KERPLE, by a power: -a |q - k|^p, 0 < p <= 2, a and p learned per head (Chi et al. 2022)."""

    formula = r"$q_i \cdot k_j / \sqrt{D} - a\,|i - j|^p,\quad 0 < p \leq 2$"

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.a = nn.Parameter(torch.empty(config.n_heads))
        self.p = nn.Parameter(torch.empty(config.n_heads))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.uniform_(self.a, 0, 1)
        nn.init.uniform_(self.p, 0, 2)

    def theta(self) -> Tensor:
        return torch.stack([clamp_straight_through(self.a), clamp_straight_through(self.p, 2)], 1)

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        a, p = (per_head(x, distance) for x in theta.unbind(1))
        apart = distance.abs()
        # d(|d|^p)/dp is NaN at distance 0: compute at 1 there, then set it to 0.
        return -a * torch.where(apart > 0, apart.clamp(min=1) ** p, 0.0)


@register("fire")
class FIRE(PositionScheme):
    """FIRE: f(psi(q - k) / psi(max(L, q))), psi(x) = ln(c x + 1), f a network 1 -> width -> H (Li et al. 2023).

    Distances are normalized by the query's position, so that all lengths fill the same interval [0, 1], or by the threshold
    L if that is larger. c and L are learned. In an encoder, the larger of the two positions replaces q.
    """

    @dataclass(frozen=True)
    class Settings:
        width: int = setting(32, "hidden units of its network", least=1, most=1 << 20)
        threshold: float = setting(512.0, "L, below which positions are not stretched; its factor is learned", above=0)

    formula = r"$q_i \cdot k_j / \sqrt{D} + f_h(\psi(i-j)\,/\,\psi(\max(L, i))),\quad \psi(x) = \ln(c\,x + 1)$"
    relative: ClassVar[bool] = True
    per_layer: ClassVar[bool] = True

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.inner, self.outer = nn.Linear(1, settings.width), nn.Linear(settings.width, config.n_heads)
        self.c = nn.Parameter(torch.empty(()))
        self.stretch = nn.Parameter(torch.empty(()))  # a learned factor of the threshold
        self.threshold = settings.threshold
        self.init_weights()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if place.side == "cross":
            why = "FIRE measures distances against the query's position, which says nothing of the source's length"
            cls.refuse(place, why)

    def init_weights(self) -> None:
        self.inner.reset_parameters()
        self.outer.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.stretch)

    def psi(self, x: Tensor) -> Tensor:
        return torch.log1p(self.c.abs() * x)

    def relative_distance(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the input of f: 0 for the query itself, up to 1 for the first token if the query is beyond L."""
        furthest = torch.maximum(q, k).float().maximum((self.threshold * self.stretch).abs())
        return self.psi((q - k).abs().float()) / (self.psi(furthest) + 1e-6)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        with without_autocast(q.device):
            hidden = F.relu(
                F.linear(self.relative_distance(q, k)[..., None], self.inner.weight.float(), self.inner.bias.float())
            )
            return F.linear(hidden, self.outer.weight.float(), self.outer.bias.float()).movedim(-1, 0)  # (H, ...)


def per_head(x: Tensor, like: Tensor) -> Tensor:
    """Return x (H,) as (H, 1, 1, ...), which broadcasts over `like`."""
    return x.view(-1, *(1,) * like.dim())
