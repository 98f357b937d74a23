"""Layers cut as tensor parallelism cuts them: each rank has a contiguous part of every matrix and some of the heads or inner
units, works with the same class, and the sum over ranks is the whole layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_rows import gate_rows, kv_rows, qkv_rows
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.masks import CAUSAL, FULL
from regard.kernels.weight_layout import deinterleave_rows, gate_block, interleave_rows, split_gates
from regard.layers.attention_kernels import make_plan
from regard.layers.context import Context
from regard.layers.mixers.attention import CrossAttention, Prepared
from regard.layers.part import Place, make_part

C, H, D, FF = 24, 8, 4, 384
CONFIG = ModelConfig(d_model=C, n_heads=H, n_kv_heads=H, d_head=D, d_ff=FF, activation="silu", ff_dropout=0.0)
SIZES = ("n_heads", "n_kv_heads", "d_ff")  # what each rank has a share of


def context() -> Context:
    positions = torch.arange(6).expand(3, -1)
    memory = torch.randn(3, 6, C, dtype=torch.float64)
    plans = (make_plan(mask, positions, positions) for mask in (CAUSAL, FULL))
    return Context(positions, Prepared(next(plans)), memory=memory, memory_plan=next(plans))


def part_of(whole: nn.Module, empty: nn.Module, rank: int, world: int) -> nn.Module:
    """Fill the layer of one rank as the class declares: rows of "column" matrices, columns of "row" matrices.

    The bias of a "row" matrix is added once, by rank 0.
    """
    declared: dict[str, str] = whole.tensor_parallel  # type: ignore[assignment]
    weights = {}
    for name, p in whole.named_parameters():
        child, kind = name.split(".")
        if declared[child] == "column":
            weights[name] = p.chunk(world)[rank]
        elif kind == "weight":
            weights[name] = p.chunk(world, dim=1)[rank]
        else:
            weights[name] = p if rank == 0 else torch.zeros_like(p)
    empty.load_state_dict(weights)
    return empty


def mixer(config: ModelConfig) -> nn.Module:
    return make_part("mixer", "attention", config, Place("decoder", causal=True))


def feedforward(config: ModelConfig) -> nn.Module:
    return make_part("feedforward", *config.feedforward, config, Place("decoder", causal=True))


LAYERS = {
    "attention": (mixer, {}),
    "grouped queries": (mixer, {"n_kv_heads": H // 2}),
    "cross-attention": (CrossAttention, {}),
    "cross-attention, grouped queries": (CrossAttention, {"n_kv_heads": H // 2}),
    "dense feed-forward": (feedforward, {}),
    "gated feed-forward": (feedforward, {"feedforward": "gated"}),
    "without biases": (mixer, {"bias": False}),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_the_parts_of_all_ranks_add_up_to_the_whole(name: str, world: int) -> None:
    make, settings = LAYERS[name]
    config = dataclasses.replace(CONFIG, **settings)  # type: ignore[arg-type]
    smaller = dataclasses.replace(config, **{size: getattr(config, size) // world for size in SIZES})
    whole, ctx = make(config).double(), context()
    for p in whole.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(3, 6, C, dtype=torch.float64, requires_grad=True)
    parts = [part_of(whole, make(smaller).double(), rank, world) for rank in range(world)]
    found, expected = sum(part(x, ctx) for part in parts), whole(x, ctx)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-8)  # sums of a few hundred larger numbers


@pytest.mark.parametrize("d_ff", [11008, 13824, 14336, 28672, 2048, 2816, 5120])
def test_the_inner_widths_of_published_models_can_be_cut_in_8(d_ff: int) -> None:
    """A rank's own width has the same blocks as the whole, and a whole number of them."""
    assert gate_block(d_ff // 8) == gate_block(d_ff) == 32


@pytest.mark.parametrize("d_ff", [1, 2, 5, 12, 32, 96, 100])
def test_gates_and_values_are_where_they_are_counted_out(d_ff: int) -> None:
    y = torch.arange(2 * d_ff)
    both = torch.cat([part.flatten() for part in split_gates(y)])
    assert both.tolist() == gate_rows(d_ff)
    assert torch.cat(deinterleave_rows(y, d_ff // gate_block(d_ff), (1, 1))).tolist() == gate_rows(d_ff)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2), (4, 1)])
def test_rows_taken_apart_are_those_that_came_in_turns(heads: int, groups: int) -> None:
    def check(rows: list[int], shares: tuple[int, ...]) -> None:
        parts = deinterleave_rows(torch.arange(len(rows)), groups, shares)
        assert torch.cat(parts).tolist() == rows
        x: Tensor = torch.randn(len(rows), 2)
        assert torch.equal(interleave_rows(deinterleave_rows(x, groups, shares), groups), x)

    check(qkv_rows(heads, groups, 3), (heads // groups, 1, 1))
    check(kv_rows(groups, 3), (1, 1))
