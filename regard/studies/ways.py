"""The three ways to read a sequence as layers: their arithmetic, and how far apart they keep two tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import find
from regard.kernels.masks import CAUSAL
from regard.layers.context import Context, Request
from regard.layers.part import Place, make_part
from regard.layers.recurrent import Recurrent
from regard.models.initialization import initialize

WAYS = ("LSTM", "convolution", "attention")
KERNEL = 3  # the default of [model.convolution]


def flops(way: str, n: int, d: int) -> int:
    """Of the forward pass of one row: products alone, attention in full (masked or not), as everywhere in Regard."""
    a_token = {
        "LSTM": 16 * d * d,  # four gates, each of input and state
        "convolution": 4 * KERNEL * d * d,  # to 2d: a gate and what it lets through
        "attention": 8 * d * d + 4 * n * d,  # q, k, v and out; scores and the sum of the values
    }
    return n * a_token[way]


def make_layer(way: str, d: int, dilation: int = 1) -> nn.Module:
    heads = max(1, d // 64)
    config = ModelConfig(
        d_model=d, n_heads=heads, n_kv_heads=heads, d_head=d // heads, mixer=(way,),
        parts={"convolution": find("mixer", "convolution").Settings(kernel=KERNEL, dilations=(dilation,))},
    )  # fmt: skip
    place = Place("decoder", causal=True)
    layer: nn.Module = Recurrent("lstm", d, [d]) if way == "LSTM" else make_part("mixer", way, config, place)
    initialize(layer)
    return layer


def reader(layer: nn.Module, rows: int, n: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The layer as a function of x (rows, n, C) alone."""
    if isinstance(layer, Recurrent):
        return lambda x: layer(x)[0]
    positions = torch.arange(n, device=device).repeat(rows, 1)
    request = Request(positions, positions, CAUSAL, find("positions", "none")(), None, layer.training)
    ctx = Context(positions, layer.prepare(request))  # type: ignore[operator]
    return lambda x: layer(x, ctx)


# ---- path length ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def paths(n: int, d: int = 8) -> dict[str, int]:
    """Through how many steps or layers the first of n tokens must go to reach the last, found by sending a NaN."""
    cpu = torch.device("cpu")
    stacked, looking = reader(make_layer("convolution", d), 1, n, cpu), reader(make_layer("attention", d), 1, n, cpu)
    return {
        "LSTM": hops(recurrent_hop(n, d), torch.zeros(1, n, 2 * d), first=1),
        "convolution": hops(lambda x, _: stacked(x), marked(n, d)),
        "dilated": hops(lambda x, i: reader(make_layer("convolution", d, KERNEL**i), 1, n, cpu)(x), marked(n, d)),
        "attention": hops(lambda x, _: looking(x), marked(n, d)),
    }


def marked(n: int, d: int) -> Tensor:
    """(1, n, d): a NaN is in whatever depends on it, however weakly, where a gradient may round to nothing."""
    x = torch.randn(1, n, d)
    x[:, 0] = torch.nan
    return x


def recurrent_hop(n: int, d: int) -> Callable[[Tensor, int], Tensor]:
    """One step at every position at once, each from the state that its neighbour had after the hop before."""
    layer, x = make_layer("LSTM", d), marked(n, d)[0]
    assert isinstance(layer, Recurrent)

    def hop(states: Tensor, _: int) -> Tensor:
        before = F.pad(states[0, :-1], (0, 0, 1, 0))  # (n, 2d): h and c
        return torch.cat(layer.step(x, before.tensor_split(2, -1))[1], -1)[None]

    return hop


def hops(hop: Callable[[Tensor, int], Tensor], x: Tensor, first: int = 0) -> int:
    """How often until the last position has it; not counting the `first` ones, in which a token is only read."""
    count = 0
    while not x[0, -1].isnan().any():
        x, count = hop(x, count), count + 1
        assert count <= x.shape[1], "no hop leads there"
    return count - first
