"""`regard look mixers`: the influence of earlier tokens, against mixers whose influence is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.cli.look_commands import mixers_picture
from regard.cli.main import main
from regard.config import ModelConfig
from regard.config.registry import PARTS
from regard.errors import RegardError
from regard.layers.part import Mixer
from regard.layers.positions.scheme import NoPositions
from regard.look.mixer_figure import draw_trained_mixers, draw_untrained_mixers, influence_by_distance
from regard.models.architectures import make_model, preset

RATE = 0.7


class Falling(Mixer):
    """A sum of earlier tokens whose weights fall geometrically with distance."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.out = nn.Linear(6, 6).double()

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        apart = ctx.positions[0][:, None] - ctx.positions[0]
        weights = torch.where(apart >= 0, RATE ** apart.double().clamp(min=0), 0.0)
        return self.out(weights @ x)


def test_influence_of_a_weighted_sum_is_its_weights() -> None:
    torch.manual_seed(0)
    found = influence_by_distance(Falling(), NoPositions(), 6, 12)
    weights = RATE ** np.arange(12)
    np.testing.assert_allclose(found, weights / weights.sum(), rtol=1e-9)


def test_a_convolution_sees_no_farther_than_its_kernel() -> None:
    config = ModelConfig(preset="gpt-tiny", positions="none", target_vocab=8)
    shares = draw_untrained_mixers(["convolution"], config, 10).shares["convolution"]
    assert (shares[:3] > 0).all()
    assert (shares[3:] == 0).all()


def test_every_mixer_of_the_registry_is_drawn() -> None:
    config = ModelConfig(preset="gpt-tiny", positions="none", target_vocab=8, d_model=64)
    drawn = draw_untrained_mixers([*PARTS["mixer"]], config, 12)
    assert set(drawn.shares) == set(PARTS["mixer"])
    for share in drawn.shares.values():
        assert share.sum() == pytest.approx(1)
        assert (share >= 0).all()
    figure = drawn.figure()
    (legend,) = figure.legends  # below the panel, where it hides no line
    assert [text.get_text() for text in legend.get_texts()] == list(drawn.shares)
    assert figure.axes[0].get_legend() is None
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == len(drawn.shares)


def test_blocks_of_a_model_are_drawn_in_order() -> None:
    model = make_model(
        preset("gpt-tiny", n_decoder_layers=2, mixer=("convolution", "attention"), target_vocab=9, d_model=32)
    )
    assert list(draw_trained_mixers(model, 8).shares) == ["block 1: convolution", "block 2: attention"]


def test_a_model_without_a_decoder_is_refused() -> None:
    model = make_model(preset("bert-tiny", n_encoder_layers=1, source_vocab=9, d_model=32))
    with pytest.raises(RegardError, match="decoders"):
        draw_trained_mixers(model, 8)


def test_the_command_writes_numbers_or_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["regard", "look", "mixers", "attention,convolution", "--json", "--length", "4"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert {name: len(share) for name, share in json.loads(capsys.readouterr().out).items()} == {
        "attention": 4,
        "convolution": 4,
    }


def look_mixers(names: str, settings: dict[str, str]) -> dict[str, list[float]]:
    numbers = mixers_picture(names, None, settings, 4).numbers()
    return {name: list(share) for name, share in numbers.items()}


def test_settings_are_those_of_the_drawn_mixers() -> None:
    assert look_mixers("mamba", {"mamba.d_state": "4"}) != look_mixers("mamba", {})
    both = look_mixers("mamba,gla", {"n_heads": "2", "d_model": "32"})  # Mamba has no heads
    assert both["mamba"] == look_mixers("mamba", {"d_model": "32"})["mamba"]
    assert look_mixers("attention", {"n_decoder_layers": "2", "feedforward": "dense,switch"}).keys() == {"attention"}
    sizes = {"preset": "llama-7b", "d_model": "64", "n_heads": "4", "n_kv_heads": "4"}
    assert look_mixers("attention", {**sizes, "feedforward": "rwkv-channel-mix"}).keys() == {"attention"}
    with pytest.raises(RegardError, match=r"model\.n_heads would do nothing here"):
        look_mixers("mamba", {"n_heads": "2"})
    with pytest.raises(RegardError, match=r"--model\.mixer does not belong here: .* regard look mixers gla"):
        look_mixers("", {"mixer": "gla"})
