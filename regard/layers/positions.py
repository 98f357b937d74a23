"""Where a token stands. Attention alone is permutation-equivariant: it does not know.

A scheme tells it through any of these hooks, each of which does nothing by default:

- `embed(x, positions)` adds to the embeddings, once, at the bottom (here: linear, sinusoidal, learned);
- `rotation(positions)` turns queries and keys (rotary.py);
- `bias(q, k)` is added to the scores (relative.py);
- `scores(...)` and `values(...)` look at queries, keys and weights themselves (contextual.py).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (B, 1, T, D/2) each


class Positions(nn.Module):
    """Nothing: the model sees a bag of tokens (in a causal decoder, the mask still tells it something)."""

    refuses: ClassVar[dict[str, str]] = {}  # place (encoder, decoder, cross) -> why it makes no sense there
    per_layer: ClassVar[bool] = False  # whether each layer has its own
    relative: ClassVar[bool] = False  # has a `bias`
    toeplitz: ClassVar[bool] = False  # ... which depends on k - q alone
    contextual: ClassVar[bool] = False  # has `scores` and `values`
    scale: float | None = None  # of q k^T; None: 1/sqrt(D)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def rotation(self, positions: Tensor) -> Rotation | None:
        return None

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        """What is added to the scores of queries at positions q and keys at positions k, (H, *their common shape)."""
        raise NotImplementedError

    def table(self, n: int, device: torch.device | None = None) -> Tensor:
        """The bias of every distance k - q from -(n-1) to n-1, (H, 2n-1); only where `toeplitz`."""
        return self.bias(torch.zeros(1, dtype=torch.long, device=device), torch.arange(1 - n, n, device=device))


class NoPositions(Positions):
    """NoPE: in a causal decoder the mask alone breaks the symmetry, and the model can count what it sees."""

    refuses: ClassVar = {
        "encoder": "without positions an encoder sees a bag of tokens; only a causal decoder can do without "
        "(give the decoder alone none: --model.positions none --model.encoder_positions sinusoidal)"
    }


ABSOLUTE_IN_CROSS = "absolute positions are part of the vectors that cross-attention compares; it needs no others"


class Linear(Positions):
    """PE[p] = a p + b, with learned vectors a and b: the counter-example, because it grows with length."""

    refuses: ClassVar = {"cross": ABSOLUTE_IN_CROSS}

    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.max_len = max_len
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.a, std=1 / self.max_len)  # of unit size at max_len
        nn.init.zeros_(self.b)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + (self.a * positions[..., None] + self.b).to(x.dtype)  # (B, T, C)


class Sinusoidal(Positions):
    """PE[p, 2i] = sin(p / base^(2i/C)), PE[p, 2i+1] = cos(the same): a clock with C/2 hands.

    Bounded, unique, and a step of c positions is one rotation whatever the position: P(t+c) = M_c P(t).
    """

    refuses: ClassVar = {"cross": ABSOLUTE_IN_CROSS}
    encoding: Tensor

    def __init__(self, d_model: int, max_len: int, base: float) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("encoding", torch.empty(max_len, d_model), persistent=False)  # (max_len, C)
        self.init_weights()

    def init_weights(self) -> None:
        n, width = self.encoding.shape
        self.encoding.copy_(sinusoids(n, width, self.base))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.encoding[positions.clamp(min=0)].to(x.dtype)  # (B, T, C)


class Learned(Positions):
    """A vector for each position up to max_len."""

    refuses: ClassVar = {"cross": ABSOLUTE_IN_CROSS}

    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        self.encoding = nn.Parameter(torch.empty(max_len, d_model))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.encoding, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.encoding[positions.clamp(min=0)].to(x.dtype)  # (B, T, C)


def sinusoids(n: int, d_model: int, base: float) -> Tensor:
    """The encoding of positions 0..n-1, (n, d_model) fp32, worked in fp64; odd widths end on a sine."""
    position = torch.arange(n, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position / base ** (even / d_model)  # (n, ceil(C/2))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].float()
