"""What torch.compile is asked for in training: a graph for each kind of block, however many blocks and shapes there are.

A backend that counts graphs and runs them as they are stands in for the compiler; test_gpu.py asks the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from configured import replaced
from torch import Tensor

from regard.models.architectures import make_model, preset
from regard.training.objective import Objective
from regard.training.training_step import compile_blocks

VOCAB = 50
SIZES: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_head": 8, "d_ff": 32, "max_len": 64}
SIZES |= {"source_vocab": VOCAB, "target_vocab": VOCAB}
HYBRID: dict[str, Any] = {"mixer": ("convolution", "attention"), "convolution.dilations": (1, 3)}
SHAPES = [(4, 12), (3, 20), (5, 7)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """All that is compiled in a test."""
    found = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    import torch._dynamo

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    with torch._dynamo.config.patch(specialize_float=True):  # restored afterwards
        yield found
    torch._dynamo.reset()


def rows(sides: int, shape: tuple[int, int]) -> list[Tensor]:
    return [torch.randint(5, VOCAB, shape) for _ in range(sides + 1)]


@pytest.mark.parametrize(
    ("name", "norm", "layers", "kinds"),
    [
        ("gpt-tiny", "pre", {"n_decoder_layers": 4}, 2),
        ("gpt-tiny", "post", {"n_decoder_layers": 4}, 2),
        ("transformer-tiny", "pre", {"n_encoder_layers": 4, "n_decoder_layers": 4}, 4),  # decoders look at the source
    ],
)
def test_blocks_of_a_kind_share_a_graph_whatever_their_shapes(
    name: str, norm: str, layers: dict[str, int], kinds: int, graphs: list[Any]
) -> None:
    """Convolutions of another dilation are no other kind, and neither is the first block. Nothing is compiled after the
    first step."""
    config = replaced(preset(name), norm=norm, **SIZES, **layers, **HYBRID)
    model = make_model(config).train()
    objective = Objective(model, 0.1)
    compile_blocks(objective)
    sides = 1 if name == "gpt-tiny" else 2
    for shape in SHAPES:
        objective(*rows(sides, shape))[0].backward()
        assert len(graphs) == kinds
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_compiled_stack_learns_what_it_does_as_written(graphs: list[Any]) -> None:
    inputs, gradients = rows(1, (3, 9)), []
    for compiled in (False, True):
        config = replaced(preset("gpt-tiny", dropout=0.0), **SIZES, **HYBRID, n_decoder_layers=4)
        torch.manual_seed(0)
        objective = Objective(make_model(config).train())
        if compiled:
            compile_blocks(objective)
        objective(*inputs)[0].backward()
        gradients.append([parameter.grad for parameter in objective.parameters()])
    assert len(graphs) == 2
    for ours, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(ours, expected)
