"""Blocks computed again in the backward pass: the same numbers from less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_run, fit, write_corpus
from test_optimizer import batch, transformer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.config import TrainConfig
from regard.errors import RegardError
from regard.layers.block import Block
from regard.models.transformer import Transformer
from regard.training.objective import Objective
from regard.training.optimizer import Updater, prepare_model


def model(recompute: bool, **changes: Any) -> Transformer:
    net = transformer(**changes).train()
    prepare_model(net, TrainConfig(activation_checkpointing=recompute))
    return net


def loss(net: nn.Module, rows: int = 6) -> Tensor:
    torch.manual_seed(5)
    return Objective(net, 0.1)(*batch(rows, seed=3).inputs)[0]


STYLES: list[dict[str, Any]] = [
    {},
    {"norm": "post", "positions": "rope"},
    {"positions": "t5", "cross_positions": "t5"},
    {"positions": "shaw"},
    {"positions": "fire", "parallel": True},
]


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_the_same(style: dict[str, Any], dropout: float, dtype: torch.dtype) -> None:
    drops = {"dropout": dropout, "attention_dropout": dropout, "ff_dropout": dropout}
    found = []
    for recompute in (False, True):
        net = model(recompute, n_encoder_layers=2, n_decoder_layers=2, **drops, **style)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            value = loss(net)
        value.backward()
        found.append((value, {name: p.grad for name, p in net.named_parameters()}, torch.rand(1)))
    (a, gradients, drawn), (b, again, drawn_again) = found
    assert torch.equal(a, b)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert torch.equal(gradient, again[name]), name  # type: ignore[arg-type]
    assert torch.equal(drawn, drawn_again)  # and the random numbers go on as if nothing had been computed twice


def kept_bytes(net: nn.Module, rows: int) -> int:
    """What autograd keeps for the backward pass, beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = loss(net, rows)
        kept[0] = value  # alive until all is counted
    return sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in weights)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_block_keeps_only_what_enters_it(dropout: float) -> None:
    rows = 40
    found = {}
    for recompute in (False, True):
        few, many = (
            kept_bytes(model(recompute, n_encoder_layers=n, n_decoder_layers=n, dropout=dropout), rows) for n in (1, 5)
        )
        found[recompute] = (many - few) / 8  # for each block more
    entering = 2 * rows * 8 * 8 * 4  # the stream and what is to be added to it, (B, T, C) each, in fp32
    assert found[False] > 4 * entering
    assert found[True] <= entering


def count_runs(net: nn.Module) -> list[int]:
    runs = [0]
    for module in net.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    return runs


def test_nothing_is_computed_twice_where_nothing_is_learned() -> None:
    net = model(True)
    runs = count_runs(net)
    loss(net).backward()
    assert runs == [4]  # two blocks, twice
    with torch.no_grad():
        loss(net)
    assert runs == [6]
    value = loss(net.eval())
    value.backward()
    assert runs == [8]


def test_training_says_whether(tmp_path: Path) -> None:
    net = transformer()
    Updater(net, TrainConfig(activation_checkpointing=True))
    assert net.encoder.activation_checkpointing
    assert net.decoder.activation_checkpointing
    Updater(net, TrainConfig())
    assert not net.encoder.activation_checkpointing


def test_a_run_that_recomputes_is_the_same_run(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    fit(tmp_path / "plain")
    fit(tmp_path / "again", **{"train.activation_checkpointing": True})
    assert_same_run(tmp_path / "again", tmp_path / "plain")


@pytest.mark.parametrize("drop", ["dropout", "attention_dropout", "ff_dropout"])
def test_captured_dropout_is_refused(drop: str) -> None:
    """Refused only where steps are captured in a CUDA graph: on a GPU, which is faked here."""
    with FakeTensorMode():
        there = nn.Parameter(torch.empty(1, device="cuda"))
    for p, compile, refused in ((0.1, True, True), (0.1, False, False), (0.0, True, False)):
        net = nn.Module()
        net.there, net.model = there, transformer(**{drop: p})
        config = TrainConfig(activation_checkpointing=True, compile=compile)
        if refused:
            with pytest.raises(RegardError, match=r"with dropout .*compile to false, or model\.dropout.* to 0$"):
                prepare_model(net, config)
        else:
            prepare_model(net, config)


@pytest.mark.parametrize(
    ("part", "advice"),
    [
        ("noisy-experts", r"with noisy-experts .*compile to false$"),
        ("switch", r"with switch .*model\.switch\.jitter .*to 0$"),
    ],
)
def test_parts_that_draw_random_numbers_are_named(part: str, advice: str) -> None:
    with FakeTensorMode():
        there = nn.Parameter(torch.empty(1, device="cuda"))
    net = nn.Module()
    net.there, net.model = there, transformer(feedforward=part, bias=False)
    with pytest.raises(RegardError, match=advice):
        prepare_model(net, TrainConfig(activation_checkpointing=True))
