"""Oracle of attention tests: masks by double loops, and attention with every position scheme as in its paper.

It computes one query at a time in float64, and shares nothing with the code under test but the names of parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from configured import model_config
from torch import Tensor

H, D = 4, 8
# Small enough that short rows reach every corner: clipped distances, far buckets, queries beyond L, CoPE's last position.
SETTINGS = model_config(
    d_model=H * D,
    n_heads=H,
    n_kv_heads=H,
    d_head=D,
    max_len=300,
    **{
        "rope.base": 100.0,
        "yarn.base": 100.0,
        "sinusoidal.base": 100.0,
        "rope.factor": 4.0,
        "yarn.factor": 4.0,
        "rope.scaling": "linear",
        "yarn.trained_len": 64,
        "yarn.fast": 8.0,
        "shaw.clip": 2,
        "t5.buckets": 8,
        "t5.max_distance": 11,
        "fire.width": 6,
        "fire.threshold": 4.0,
        "cope.positions": 4,
        "disentangled.buckets": 0,
        "disentangled.reach": 3,
    },
)

Places = Sequence[Sequence[int]]  # positions of a batch, row by row


def ragged(*lengths: int, width: int = 0) -> Tensor:
    """Positions of rows of these lengths, padded on the right."""
    width = max(width, *lengths)
    return torch.tensor([[i if i < n else -1 for i in range(width)] for n in lengths])


def packed(*rows: Sequence[int]) -> Tensor:
    """Positions of rows that hold documents of these lengths, padded on the right."""
    counted = [[i for n in row for i in range(n)] for row in rows]
    width = max(map(len, counted))
    return torch.tensor([row + [-1] * (width - len(row)) for row in counted])


def visible(
    q: Places,
    k: Places,
    back: int | None = None,
    ahead: int | None = None,
    prefix: int | Sequence[int] = 0,
    documents: bool = False,
) -> Tensor:
    """(B, T, S): whether the query at q[b][t] may see the key at k[b][s], pair by pair."""
    seen = torch.zeros(len(q), len(q[0]), len(k[0]), dtype=torch.bool)
    for b, t, s in product(*map(range, seen.shape)):
        here, there = q[b][t], k[b][s]
        near = (back is None or here - there <= back) and (ahead is None or there - here <= ahead)
        early = there < (prefix if isinstance(prefix, int) else prefix[b])
        together = not documents or t - here == s - there
        seen[b, t, s] = there >= 0 and here >= 0 and (near or early) and together
    return seen


# ---- additive biases: (parameters, query position, key position) -> one number for each head -----------------------------

Parameters = dict[str, Tensor]


def alibi(p: Parameters, i: int, j: int) -> Tensor:
    return torch.tensor([-(2.0 ** (-8 * (h + 1) / H)) * abs(i - j) for h in range(H)]).double()


def t5(p: Parameters, i: int, j: int) -> Tensor:
    return p["weight"][:, bucket(j - i, 8, 11)]


def t5_two_sided(p: Parameters, i: int, j: int) -> Tensor:
    return p["weight"][:, bucket(-abs(j - i), 4, 11) + (4 if j > i else 0)]


def bucket(distance: int, buckets: int, furthest: int) -> int:
    """In whole numbers: far bucket m begins where (n / exact)^far >= (furthest / exact)^m."""
    n, exact, far = max(-distance, 0), buckets // 2, buckets - buckets // 2
    return min(n, exact) + sum(n**far * exact**m >= furthest**m * exact**far for m in range(1, far))


def kerple_log(p: Parameters, i: int, j: int) -> Tensor:
    return -p["r1"] * torch.log(1 + p["r2"] * abs(i - j))


def kerple_power(p: Parameters, i: int, j: int) -> Tensor:
    return -p["a"] * abs(i - j) ** p["p"] if i != j else 0 * p["a"] * p["p"]


def fire(p: Parameters, i: int, j: int) -> Tensor:
    threshold, c = (4.0 * p["stretch"]).abs(), p["c"].abs()
    furthest = torch.maximum(threshold, torch.tensor(float(max(i, j))))
    share = torch.log(1 + c * abs(i - j)) / (torch.log(1 + c * furthest) + 1e-6)
    hidden = (share * p["inner.weight"][:, 0] + p["inner.bias"]).relu()
    return p["outer.weight"] @ hidden + p["outer.bias"]


BIASES: dict[str, Callable[[Parameters, int, int], Tensor]] = {
    "alibi": alibi,
    "t5": t5,
    "t5-two-sided": t5_two_sided,
    "kerple-log": kerple_log,
    "kerple-power": kerple_power,
    "fire": fire,
}


# ---- rotations -------------------------------------------------------------------------------------------------------


def frequencies(name: str) -> tuple[list[float], float]:
    """Return the angle per position of each pair, and the factor of rotated vectors."""
    plain = [100.0 ** (-2 * m / D) for m in range(D // 2)]
    if name == "rope":  # stretched evenly
        return [theta / 4 for theta in plain], 1.0
    low, high = (D * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(100.0)) for turns in (8.0, 1.0))
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    kept = [1 - min(max((m - low) / (high - low), 0.0), 1.0) for m in range(D // 2)]
    return [(1 - g) * theta / 4 + g * theta for theta, g in zip(plain, kept, strict=True)], 0.1 * math.log(4.0) + 1


def turned(x: Tensor, places: Places, name: str) -> Tensor:
    """Pairs of neighbours as complex numbers, times e^(i p theta)."""
    theta, size = frequencies(name)
    angle = torch.tensor(places)[:, None, :, None] * torch.tensor(theta).double()  # (B, 1, T, D/2)
    z = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.full_like(angle, size), angle)
    return torch.stack([z.real, z.imag], -1).flatten(-2)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    name: str, p: Parameters, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, q_at: Places, k_at: Places
) -> Tensor:
    """(B, H, T, D); zeros for queries that see nothing."""
    if name in ("rope", "yarn"):
        q, k = turned(q, q_at, name), turned(k, k_at, name)
    share = q.shape[1] // k.shape[1]  # heads of queries to a head of keys
    bias = functools.cache(functools.partial(BIASES[name], p)) if name in BIASES else None
    rows = []
    for b, h, t in product(*map(range, q.shape[:3])):
        which = seen[b, t].nonzero()[:, 0].tolist()
        i, at = q_at[b][t], [k_at[b][s] for s in which]
        biases = torch.stack([bias(i, j)[h] for j in at]) if bias and which else 0.0
        keys, values = k[b, h // share][which], v[b, h // share][which]
        if name == "disentangled":
            biases = disentangled(p, q[b, h, t], keys, h, [min(max(i - j, -3), 2) + 3 for j in at])
        rows.append(row(name, p, q[b, h, t], keys, values, i, at, biases) if which else 0 * q[b, h, t])
    return torch.stack(rows).view_as(q)


def row(
    name: str, p: Parameters, q: Tensor, keys: Tensor, values: Tensor, i: int, at: list[int], bias: Tensor | float
) -> Tensor:
    """One query of one head at position i, over the keys it sees, which stand at positions `at`."""
    root = math.sqrt(3 * len(q) if name == "disentangled" else len(q))
    scores = keys @ q / (1.0 if name.startswith("t5") else root) + bias
    if name == "shaw":
        clipped = [min(max(j - i, -2), 2) + 2 for j in at]
        scores, values = scores + p["keys"][clipped] @ q / root, values + p["added"][clipped]
    if name == "cope":
        scores = scores + torch.stack([contextual(p["vectors"], q, scores[s:]) for s in range(len(at))]) / root
    return scores.softmax(0) @ values


def disentangled(p: Parameters, q: Tensor, keys: Tensor, h: int, rows: list[int]) -> Tensor:
    """q . K[i-j] + Q[i-j] . k_j, over sqrt(3 D)."""
    projected = p["distances.table"][rows] @ p["projection.weight"].T + p["projection.bias"]
    of_queries, of_keys = projected[:, 2 * h * D : 2 * (h + 1) * D].chunk(2, 1)  # head by head
    return (of_keys @ q + (of_queries * keys).sum(1)) / math.sqrt(3 * D)


def contextual(vectors: Tensor, q: Tensor, scores: Tensor) -> Tensor:
    """q . e[p], where p counts the gates of the key and of those after it; between whole positions, the straight line."""
    place = scores.sigmoid().sum().clamp(max=len(vectors) - 1)
    below = int(place)
    above = min(below + 1, len(vectors) - 1)
    return q @ (vectors[below] + (place - below) * (vectors[above] - vectors[below]))
