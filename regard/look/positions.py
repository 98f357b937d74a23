"""What a position scheme does, as pictures: a scheme -> arrays.

Every number comes out of the scheme's own hooks, so a picture shows what a model would use. What is learned is drawn as it
starts, or as a trained model has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.contextual import CoPE, Shaw
from regard.layers.positions import NoPositions, Positions
from regard.layers.relative import FIRE, T5Bias, t5_bucket
from regard.layers.rotary import Rotary, frequencies, rotate
from regard.layers.schemes import make_positions, scheme_at
from regard.layers.stack import Stack
from regard.look.drawn import Drawn
from regard.look.figures import Image, Lines, Panel, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMULAS = {  # i: the query's position, j: the key's, heads h from 0
    "linear": r"$x_p \leftarrow x_p + a\,p + b$",
    "sinusoidal": r"$PE_{p,2m} = \sin(p\,/\,N^{2m/C}),\quad PE_{p,2m+1} = \cos(p\,/\,N^{2m/C})$",
    "learned": r"$x_p \leftarrow x_p + E_p$",
    "shaw": r"$e_{ij} = q_i \cdot (k_j + a^K_{j-i})\,/\sqrt{D},\quad z_i = \sum_j \alpha_{ij}\,(v_j + a^V_{j-i})$",
    "t5": r"$q_i \cdot k_j + w_{h,\ \mathrm{bucket}(j-i)}$",
    "rope": r"pairs of $q$ and $k$ turned by $p\,\theta_m,\quad \theta_m = N^{-2m/D}$",
    "yarn": r"$\theta'_m = (1 - g_m)\,\theta_m / s + g_m\,\theta_m,\quad$ scores $\times\,(0.1 \ln s + 1)^2$",
    "alibi": r"$q_i \cdot k_j / \sqrt{D} - m_h\,|i - j|,\quad m_h = 2^{-8(h+1)/H}$",
    "kerple-log": r"$q_i \cdot k_j / \sqrt{D} - r_1 \ln(1 + r_2\,|i - j|)$",
    "kerple-power": r"$q_i \cdot k_j / \sqrt{D} - a\,|i - j|^p,\quad 0 < p \leq 2$",
    "fire": r"$q_i \cdot k_j / \sqrt{D} + f_h(\psi(i-j)\,/\,\psi(\max(L, i))),\quad \psi(x) = \ln(c\,x + 1)$",
    "cope": r"$p_{ij} = \sum_{t=j}^{i} \sigma(q_i \cdot k_t / \sqrt{D}),\quad q_i \cdot (k_j + e[p_{ij}])\,/\sqrt{D}$",
}
DISTANCE = "distance j - i of the key from the query"


@dataclass(frozen=True)
class Picture(Drawn):
    scheme: str
    panels: tuple[Panel, ...]
    columns: int

    def figure(self) -> Figure:
        return draw(f"{self.scheme}:  {FORMULAS[self.scheme]}", self.panels, self.columns)

    def numbers(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "panels": [panel.numbers() for panel in self.panels]}


@torch.no_grad()
def untrained(name: str, config: ModelConfig, n: int) -> Picture:
    """A scheme over n positions of a causal decoder of these (resolved) sizes, as it starts; the seed is always 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scheme = make_positions(config, "decoder", name)
    learned = any(p.any() for p in scheme.parameters())
    panels = describe(scheme, replace(config, positions=name), n, "decoder", "as it starts" if learned else "")
    return Picture(name, panels, len(panels))


@torch.no_grad()
def trained(name: str, model: nn.Module, n: int) -> Picture:
    """A scheme as a model has learned it: each of its places, and each layer where layers have their own."""
    config = model.config
    assert isinstance(config, ModelConfig)
    found = [(place, where, scheme) for used, place, where, scheme in places(model, config) if used == name]
    if not found:
        used = ", ".join(dict.fromkeys(used for used, *_ in places(model, config)))
        raise RegardError(f"this model has no positions '{name}' to draw: it has {used or 'no scheme at all'}")
    if next(found[0][2].parameters(), None) is None:
        found = found[:1]  # nothing is learned: all are alike
    config = replace(config, positions=name)
    groups = [describe(scheme, config, n, place, where) for place, where, scheme in found]
    columns = len(groups[0]) if len(groups[0]) > 1 else min(len(groups), 3)
    return Picture(name, tuple(panel for group in groups for panel in group), columns)


def places(model: nn.Module, config: ModelConfig) -> Iterator[tuple[str, str, str, Positions]]:
    """(name of the scheme, encoder, decoder or cross, where exactly, the scheme) of every scheme in a model."""
    for place, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        for i, scheme in enumerate(stack.schemes):
            assert isinstance(scheme, Positions)
            yield scheme_at(config, place), place, f"{place}.{i}" if scheme.per_layer else place, scheme
        if any("cross" in block.sublayers for block in stack.blocks):  # type: ignore[operator]
            yield scheme_at(config, "cross"), "cross", "cross-attention", stack.cross_scheme


def describe(scheme: Positions, config: ModelConfig, n: int, place: str, where: str) -> tuple[Panel, ...]:
    """The panels of one scheme; `where` stands in their titles."""
    note = f" ({where})" if where else ""
    match scheme:
        case NoPositions():
            raise RegardError("positions 'none' add nothing, so there is nothing to draw")
        case Rotary():
            return hands(scheme, config), products(scheme, config, n)
        case Shaw():
            return vectors(scheme.keys, f"|aK|{note}"), vectors(scheme.added, f"|aV|{note}")
        case CoPE():
            learned = Image(f"the vectors e{note}", array(scheme.vectors), "dimension", "position")
            return (learned,) if scheme.vectors.any() else counting(len(scheme.vectors))
        case T5Bias():
            bias = (biases(scheme, n, place, note),) if scheme.weight.any() else ()
            return (buckets(scheme, n, place, note), *bias)
    if scheme.relative:
        return (biases(scheme, n, place, note),)
    return (encoding(scheme, config, n, note),)


# ---- added to the embeddings -----------------------------------------------------------------------------------------


def encoding(scheme: Positions, config: ModelConfig, n: int, note: str) -> Image:
    if n > config.max_len:
        raise RegardError(
            f"--length {n} is more than the {config.max_len} positions of model.max_len: draw fewer, or raise it"
        )
    added = scheme.embed(torch.zeros(1, n, config.d_model), torch.arange(n)[None])[0]  # (n, C)
    return Image(f"added to the embeddings{note}", array(added), "dimension", "position")


# ---- turned ----------------------------------------------------------------------------------------------------------


def hands(scheme: Rotary, config: ModelConfig) -> Lines:
    """How many tokens each hand of the clock needs for one turn."""
    turns = {name: 2 * math.pi / array(turn.turn) for name, turn in against_plain(scheme, config).items()}
    m = np.arange(len(scheme.turn))
    if len(turns) > 1 and config.positions == "yarn":
        turns["trained length"] = np.full(len(m), config.trained_len)
    return Lines("wavelength of each hand", m, turns, "hand m", "tokens for a whole turn", log=True)


def products(scheme: Rotary, config: ModelConfig, n: int) -> Lines:
    """q . k of the same vector (all ones, of length 1) at two places: what the turning alone makes of a distance."""
    q = torch.full((1, 1, 1, config.d_head), config.d_head**-0.5)  # (B, H, T, D)
    lines = {}
    for name, turn in against_plain(scheme, config).items():
        k = rotate(q.expand(-1, -1, n, -1), turn.rotation(torch.arange(n)[None]))
        lines[name] = array((rotate(q, turn.rotation(torch.zeros(1, 1))) * k).sum(-1)[0, 0])
    return Lines("equal vectors, turned apart", np.arange(n), lines, "distance |i - j|", "q . k")


def against_plain(scheme: Rotary, config: ModelConfig) -> dict[str, Rotary]:
    """The scheme, beside plain rope where it differs."""
    plain = Rotary(frequencies(config.d_head, config.position_base))
    if torch.equal(plain.turn, scheme.turn):
        return {config.positions: scheme}
    kind = "yarn" if config.positions == "yarn" else f"rope, {config.rope_scaling} scaling"
    return {f"{kind}, s = {config.rope_factor:g}": scheme, "plain rope": plain}


# ---- added to the scores ---------------------------------------------------------------------------------------------


def biases(scheme: Positions, n: int, place: str, note: str) -> Lines:
    """What a query at position n - 1 adds to the scores of the keys around it."""
    at = distances(n, place)
    bias = array(scheme.bias(torch.tensor([n - 1]), at + n - 1))  # (H, keys)
    title = f"bias of a query at position {n - 1}" if isinstance(scheme, FIRE) else "bias"
    lines = {f"head {h}": row for h, row in enumerate(bias)}
    return Lines(title + note, array(at), lines, DISTANCE, "added to the score")


def buckets(scheme: T5Bias, n: int, place: str, note: str) -> Lines:
    at = distances(n, place)
    which = t5_bucket(at, scheme.buckets, scheme.max_distance, scheme.bidirectional)
    return Lines(f"bucket of each distance{note}", array(at), {"bucket": array(which)}, DISTANCE, "bucket")


def distances(n: int, place: str) -> Tensor:
    """j - i of all the keys that a query can meet: in a decoder, only those before it."""
    return torch.arange(1 - n, 1 if place == "decoder" else n)


# ---- inside the softmax ----------------------------------------------------------------------------------------------


def vectors(x: Tensor, title: str) -> Image:
    """Vectors (2 clip + 1, D) for the distances -clip .. clip, as sizes of their entries."""
    return Image(title, array(x.abs().T), DISTANCE, "dimension", start=-(len(x) // 2))


STORY = ("The", "cat", "sat", "<eos>", "It", "slept", "<eos>", "Then", "it", "woke", "<eos>", "Who")
COUNTED = {"counts sentences": lambda word: word == "<eos>", "counts every word": lambda word: True}


def counting(n_positions: int) -> tuple[Lines, Lines]:
    """A worked example: two queries at the last word, one of which finds only ends of sentences worth counting.

    The positions come out of the layer itself: where e[p] = p and q = 1, the score gains p.
    """
    wanted = torch.tensor([[6.0 if counts(word) else -6.0 for word in STORY] for counts in COUNTED.values()])
    layer = CoPE(1, n_positions)
    layer.vectors.copy_(torch.arange(n_positions)[:, None])
    scores = wanted[None, :, None]  # (B, H, T, S): a query a head
    seen = torch.ones(1, 1, 1, len(STORY), dtype=torch.bool)
    nowhere = torch.zeros(1, 1), torch.zeros(1, 1)
    counted = layer.scores(scores, torch.ones(1, len(wanted), 1, 1), seen, nowhere, torch.empty(0)) - scores
    at, key = np.arange(len(STORY)), "key j; the query is the last word"
    gates = dict(zip(COUNTED, array(wanted.sigmoid()), strict=True))
    position = dict(zip(COUNTED, array(counted[0, :, 0]), strict=True))
    return (
        Lines("gates: what two queries find worth counting", at, gates, key, "gate", ticks=STORY),
        Lines("positions: the gates, summed back from the query", at, position, key, "position p_ij", ticks=STORY),
    )


def array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
