"""Parameters by formula against those of real models, published totals and numbers worked by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.models.architectures import PRESETS, make_model, preset, resolve
from regard.models.parameters import Part, counted, matrix_weights, parts, trained

DATA = {"source_vocab": 40, "target_vocab": 40, "n_classes": 7}  # what data would tell, where a preset does not


def without_memory(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return make_model(config)


def known(name: str, **settings: Any) -> ModelConfig:
    """A preset with what data would fill in."""
    return resolve(preset(name, **{**{k: v for k, v in DATA.items() if not PRESETS[name].get(k)}, **settings}))


def agree(config: ModelConfig) -> None:
    model = without_memory(config)
    assert parts(config) == counted(model)
    assert trained(parts(config)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_of_every_preset_is_what_its_model_has(name: str) -> None:
    agree(known(name))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Models of every architecture and style that can be built; widths differ, so that none passes for another."""
    name = draw(st.sampled_from(["transformer-tiny", "gpt-tiny", "bert-tiny", "vit-tiny"]))
    schemes = ["none", "linear", "learned", "shaw", "t5", "rope", "alibi", "kerple-log", "kerple-power", "fire", "cope"]
    settings = {
        "n_encoder_layers": draw(st.integers(1, 3)),
        "n_decoder_layers": draw(st.integers(1, 3)),
        **{"d_model": 20, "n_heads": 4, "d_head": 6, "d_ff": 28, "max_len": 52, "fire_width": 11},
        "n_kv_heads": draw(st.sampled_from([1, 2, 4])),
        "norm": draw(st.sampled_from(["pre", "post"])),
        "norm_kind": draw(st.sampled_from(["layer", "rms"])),
        "tie": draw(st.sampled_from(["none", "decoder", "inputs", "all"])),
        "positions": draw(st.sampled_from(schemes)),
        "encoder_positions": draw(st.sampled_from(["", *schemes, "disentangled"])),
        "cross_positions": draw(st.sampled_from(["none", "t5", "kerple-log"])),
        "disentangled_buckets": draw(st.sampled_from([0, 8])),
        "disentangled_reach": 30,
        "token_types": draw(st.integers(0, 2)),
        "answer": draw(st.sampled_from(["none", "row", "token"])) if name[0] in "gb" else "none",
        **{field: draw(st.booleans()) for field in ("bias", "gated", "embedding_norm")},
    }
    settings["parallel"] = settings["norm"] == "pre" and draw(st.booleans())
    return preset(name, **settings, **DATA)


@given(configs())
def test_the_formula_holds_for_any_style(config: ModelConfig) -> None:
    try:
        config = resolve(config)
    except RegardError:
        return  # positions that make no sense there
    agree(config)


def test_gpt3_has_175_181_291_520_weights_in_27_938_matrices() -> None:
    config = known("gpt3")
    table = {part.kind: part for part in parts(config) if part.matrix}
    c, layers = 12_288, 96
    expected = {
        "embedding": ((50_257, c), 1, 617_558_016),
        "query": ((128, c), 96 * layers, 14_495_514_624),
        "key": ((128, c), 96 * layers, 14_495_514_624),
        "value": ((128, c), 96 * layers, 14_495_514_624),
        "output": ((c, c), layers, 14_495_514_624),
        "up": ((49_152, c), layers, 57_982_058_496),
        "down": ((c, 49_152), layers, 57_982_058_496),
        "unembedding": ((50_257, c), 1, 617_558_016),
    }
    assert {kind: (part.shape, part.number, part.total) for kind, part in table.items()} == expected
    assert matrix_weights(parts(config)) == (175_181_291_520, 27_938)
    assert 27_938 == 2 + 96 * (96 * 3 + 3)
    # everything, tied once: learned positions, two norms a block and one above, a bias for every output of a projection
    vectors = 2048 * c + (2 * layers + 1) * 2 * c + layers * (3 * c + c + 49_152 + c)
    assert trained(parts(config)) == 175_181_291_520 - 617_558_016 + vectors


PUBLISHED = {  # parameters of the published checkpoints
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "bloom": 176_247_271_424,
    "t5-small": 60_506_624,
    "vit-base-16": 86_567_656,
    "bart-base": 139_420_416 - 2 * 2 * 768,  # two rows of its position tables are for no position
    "bert-base": 110_106_428 - (2 * 768 + 2),  # without the head that tells the next sentence
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    assert trained(parts(known(name))) == PUBLISHED[name]


def test_a_small_model_taken_apart_by_hand() -> None:
    """Width 8, 4 heads of 3, one of keys and values, gated: q, k and v lie in one tensor, gate and up in another."""
    model = make_model(
        preset(
            *("transformer-tiny",), n_encoder_layers=1, n_decoder_layers=1, d_model=8, n_heads=4, n_kv_heads=1, d_head=3,
            d_ff=10, gated=True, bias=False, tie="decoder", source_vocab=9, target_vocab=7, positions="learned", max_len=5,
        )
    )  # fmt: skip
    assert counted(model) == [
        Part("embedding", (7, 8), 1),
        Part("embedding", (9, 8), 1),
        Part("query", (3, 8), 8),
        Part("key", (3, 8), 2),
        Part("value", (3, 8), 2),
        Part("output", (8, 12), 2),
        Part("cross query", (3, 8), 4),
        Part("cross key", (3, 8), 1),
        Part("cross value", (3, 8), 1),
        Part("cross output", (8, 12), 1),
        Part("gate", (10, 8), 2),
        Part("up", (10, 8), 2),
        Part("down", (8, 10), 2),
        Part("unembedding", (7, 8), 1, tied=True),
        Part("positions", (5, 8), 2),
        Part("norm", (8,), 7),
    ]
