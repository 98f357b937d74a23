"""Sizes: defaults from the preset, derived sizes, and errors in one line."""

from typing import Any

import pytest
from configured import model_config

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.models.gpt import GPT
from regard.models.sizes import resolve_sizes

PRESETS = {
    "a": {"architecture": "gpt", "n_decoder_layers": 3, "d_model": 24, "n_heads": 4, "d_ff": 50},
    "b": {"architecture": "gpt", "d_model": 10, "n_heads": 2},
}


def resolved(**sizes: Any) -> ModelConfig:
    return resolve_sizes(model_config(**{"preset": "a", **sizes}), PRESETS)


def test_what_is_left_open_comes_from_the_preset_and_what_is_given_stays() -> None:
    config = resolved(d_ff=7, **{"attention.window": 5}, positions="alibi")
    assert (config.n_decoder_layers, config.d_model, config.n_heads, config.d_ff) == (3, 24, 4, 7)
    assert (config.value("attention.window"), config.positions) == (5, "alibi")
    assert config.n_encoder_layers == 0  # this preset has none
    assert resolved(preset="b").d_model == 10
    assert resolve_sizes(config, PRESETS) == config


@pytest.mark.parametrize(
    ("given", "expected"),  # d_model, n_heads, n_kv_heads, d_head
    [
        ({}, (24, 4, 4, 6)),
        ({"d_model": 32}, (32, 4, 4, 8)),
        ({"n_heads": 3}, (24, 3, 3, 8)),
        ({"n_kv_heads": 1}, (24, 4, 1, 6)),
        ({"n_kv_heads": 2, "d_head": 16}, (24, 4, 2, 16)),
        ({"n_heads": 5, "d_head": 7}, (24, 5, 5, 7)),  # a width of heads of its own needs no even split
    ],
)
def test_heads(given: dict[str, int], expected: tuple[int, ...]) -> None:
    config = resolved(**given)
    assert (config.d_model, config.n_heads, config.n_kv_heads, config.d_head) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "c"}, r"model\.preset c is not known here: choose one of a, b"),
        ({"n_heads": 5}, r"model\.d_model 24 cannot be split into model\.n_heads 5: .*or give model\.d_head"),
        ({"n_kv_heads": 3}, r"model\.n_heads 4 cannot share model\.n_kv_heads 3 evenly: choose a divisor"),
        ({"n_kv_heads": 8}, r"model\.n_heads 4 cannot share model\.n_kv_heads 8 evenly"),
        ({"n_kv_heads": -1}, r"model\.n_kv_heads must be at least 1, not -1"),
        ({"n_heads": -4}, r"model\.n_heads must be at least 1, not -4"),
        ({"d_head": -6}, r"model\.d_head must be at least 1, not -6"),
        ({"d_ff": -1}, r"model\.d_ff must be at least 0, not -1"),
        ({"positions": "yarn", "yarn.trained_len": 0}, r"'model\.yarn\.trained_len' must be a number from 1 up, not 0"),
        ({"positions": "shaw", "shaw.clip": 0}, r"'model\.shaw\.clip' must be a number from 1 up, not 0"),
        ({"positions": "fire", "fire.width": 0}, r"'model\.fire\.width' must be a number from 1 up, not 0"),
        ({"positions": "t5", "t5.buckets": 3}, r"'model\.t5\.buckets' must be a number from 4 up, not 3"),
        ({"positions": "rope", "rope.factor": 0.5}, r"'model\.rope\.factor' must be a number from 1 up, not 0\.5"),
        ({"positions": "yarn", "yarn.slow": -1.0}, r"'model\.yarn\.slow' must be above 0, not -1\.0"),
        ({"positions": "yarn", "yarn.fast": 0.0}, r"'model\.yarn\.fast' must be above 0, not 0\.0"),
        ({"positions": "fire", "fire.threshold": 0.0}, r"'model\.fire\.threshold' must be above 0, not 0\.0"),
        ({"positions": "rope", "rope.base": 1.0}, r"'model\.rope\.base' must be above 1, not 1\.0"),
        ({"positions": "rope", "rope.base": float("nan")}, r"'model\.rope\.base' must be above 1, not nan"),
        ({"attention_dropout": 1.0}, r"'model\.attention_dropout' must be from 0 to below 1, not 1\.0"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message) as caught:
        resolved(**wrong)
    assert "\n" not in str(caught.value)


def test_what_a_part_refuses_is_refused_before_a_model_is_built() -> None:
    message = r"model\.t5\.max_distance 16 must be above half of model\.t5\.buckets 32"
    with pytest.raises(RegardError, match=message):
        GPT.resolve(model_config(preset="gpt-tiny", target_vocab=9, positions="t5", **{"t5.max_distance": 16}))
    GPT.resolve(model_config(preset="gpt-tiny", target_vocab=9, positions="t5", **{"t5.max_distance": 17}))


@pytest.mark.parametrize(
    ("positions", "edge"),
    [
        ("t5", {"max_distance": 17}),
        ("t5", {"buckets": 4, "max_distance": 3}),
        ("shaw", {"clip": 1}),
        ("fire", {"width": 1}),
        ("yarn", {"trained_len": 1}),
        ("rope", {"factor": 1.0}),
    ],
)
def test_the_edges_of_what_is_possible(positions: str, edge: dict[str, Any]) -> None:
    config = resolved(positions=positions, n_kv_heads=4, **{f"{positions}.{name}": x for name, x in edge.items()})
    assert vars(config.parts[positions]).items() >= edge.items()


def test_tables_are_those_of_the_parts_that_a_model_has() -> None:
    config = resolved(positions="yarn", **{"rope.base": 7.0, "yarn.factor": 2.0})
    assert list(config.parts) == ["yarn", "attention"]
    assert config.value("yarn.factor") == 2.0
    assert config.value("rope.base") == 10000.0  # a table that is not there has its defaults
