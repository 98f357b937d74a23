"""Additive relative positions: a number for each head and distance, added to the scores.

All but FIRE depend on the distance k - q alone, so a whole (T, S) bias is one vector over 2T - 1 distances per head: one
picture, one look-up in every kernel, and gradients through H x (2T-1) numbers instead of H x T x T. Everything is fp32.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import without_autocast
from regard.layers.positions import Positions


class Relative(Positions):
    relative: ClassVar[bool] = True
    toeplitz: ClassVar[bool] = True
    flat: int | None = None  # beyond this distance all biases on a side are one number

    def theta(self) -> Tensor | None:
        """The two numbers of each head that make its whole curve, (H, 2), where there are such."""
        return None

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        """The bias of distances k - q (integers of any shape), (H, *shape), by those numbers."""
        raise NotImplementedError

    def of(self, distance: Tensor) -> Tensor:
        """The bias of distances k - q, (H, *shape)."""
        theta = self.theta()
        assert theta is not None
        return self.curve(theta, distance)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return self.of(k - q)


class ALiBi(Relative):
    """-m_h |q - k| with fixed slopes: each head has its own horizon."""

    slopes: Tensor

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.empty(n_heads), persistent=False)  # (H,)
        self.init_weights()

    def init_weights(self) -> None:
        self.slopes.copy_(alibi_slopes(len(self.slopes)))

    def of(self, distance: Tensor) -> Tensor:
        return -per_head(self.slopes, distance) * distance.abs()


def alibi_slopes(n_heads: int) -> Tensor:
    """2^(-8h/H), h = 1..H, for a power of two; otherwise the slopes of the power below, and every other of the one above."""
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    slopes += [2 ** (-8 * h / (2 * below)) for h in range(1, 2 * below + 1, 2)]
    return torch.tensor(slopes[:n_heads])


class T5Bias(Relative):
    """A learned number for each head and bucket of distances: exact buckets near by, logarithmic ones to `max_distance`.

    T5 does not divide the scores by sqrt(D); the queries start that much smaller instead (layers/stack.py).
    """

    scale = 1.0

    def __init__(self, n_heads: int, buckets: int, max_distance: int, bidirectional: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.flat = max_distance
        self.weight = nn.Parameter(torch.zeros(n_heads, buckets))

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)

    def of(self, distance: Tensor) -> Tensor:
        bucket = t5_bucket(distance, self.buckets, self.max_distance, self.bidirectional)
        return self.weight.index_select(1, bucket.flatten()).unflatten(1, bucket.shape)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Half of the buckets for each side if bidirectional; otherwise whatever is ahead shares bucket 0."""
    offset: Tensor | int = 0
    if bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        back = distance.abs()
    else:
        back = (-distance).clamp(min=0)
    exact = buckets // 2
    # in fp32 and in this order: distance 64 lies exactly on the edge of a bucket
    ratio = torch.log(back.float().clamp(min=1) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).long()
    return offset + torch.where(back < exact, back, far.clamp(max=buckets - 1))


LEAST = 0.01  # KERPLE's parameters act as at least this


def at_least(x: Tensor, most: float | None = None) -> Tensor:
    """Clamped in value alone: a parameter beyond the edge still hears in which direction to go."""
    return x.detach().clamp(LEAST, most) + (x - x.detach())


class KerpleLog(Relative):
    """-r1 ln(1 + r2 |q - k|), r1 and r2 learned per head."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.r1, self.r2 = (nn.Parameter(torch.empty(n_heads)) for _ in range(2))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.uniform_(self.r1, 0, 2)
        nn.init.uniform_(self.r2)

    def theta(self) -> Tensor:
        return torch.stack([at_least(self.r1), at_least(self.r2)], 1)

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        r1, r2 = (per_head(r, distance) for r in theta.unbind(1))
        return -r1 * torch.log1p(r2 * distance.abs())


class KerplePower(Relative):
    """-a |q - k|^p, 0 < p <= 2, a and p learned per head."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.a, self.p = (nn.Parameter(torch.empty(n_heads)) for _ in range(2))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.uniform_(self.a)
        nn.init.uniform_(self.p, 0, 2)

    def theta(self) -> Tensor:
        return torch.stack([at_least(self.a), at_least(self.p, 2)], 1)

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        a, p = (per_head(x, distance) for x in theta.unbind(1))
        apart = distance.abs()
        # |d|^p has no gradient by p at 0: worked at 1 there, then set to 0
        return -a * torch.where(apart > 0, apart.clamp(min=1) ** p, 0.0)


class FIRE(Positions):
    """f(psi(q - k) / psi(max(L, q))), psi(x) = ln(c x + 1), f a network 1 -> width -> H.

    Distances are seen relative to the query's own position, so all lengths fill the same interval [0, 1]; below the
    threshold L they are not stretched that far. c and L are learned. In an encoder, the later of the two positions takes
    q's place.
    """

    relative: ClassVar[bool] = True
    per_layer: ClassVar[bool] = True
    refuses: ClassVar = {
        "cross": "FIRE measures distances against the query's position, which says nothing of the source's length"
    }

    def __init__(self, n_heads: int, width: int, threshold: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, width), nn.Linear(width, n_heads)
        self.c, self.stretch = (nn.Parameter(torch.empty(())) for _ in range(2))  # stretch: a factor of the threshold
        self.threshold = threshold
        self.init_weights()

    def init_weights(self) -> None:
        self.inner.reset_parameters()
        self.outer.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.stretch)

    def psi(self, x: Tensor) -> Tensor:
        return torch.log1p(self.c.abs() * x)

    def share(self, q: Tensor, k: Tensor) -> Tensor:
        """What f is asked about: from 0 (the same place) to 1 (the beginning, seen from beyond L)."""
        furthest = torch.maximum(q, k).float().maximum((self.threshold * self.stretch).abs())
        return self.psi((q - k).abs().float()) / (self.psi(furthest) + 1e-6)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        with without_autocast(q.device):
            hidden = F.relu(F.linear(self.share(q, k)[..., None], self.inner.weight.float(), self.inner.bias.float()))
            return F.linear(hidden, self.outer.weight.float(), self.outer.bias.float()).movedim(-1, 0)  # (H, ...)


def per_head(x: Tensor, like: Tensor) -> Tensor:
    """(H,) -> (H, 1, 1, ...), to broadcast over `like`."""
    return x.view(-1, *(1,) * like.dim())
