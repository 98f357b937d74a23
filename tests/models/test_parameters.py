"""Parameters by formula against those of real models, published totals and numbers worked by hand."""

from typing import Any

import pytest
import torch
from configured import replaced
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.config import ModelConfig
from regard.models.architectures import PRESETS, make_model, preset, resolve
from regard.models.counted import Part, counted, matrix_weights, trained
from regard.models.parameters import parts

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
    name = draw(st.sampled_from(["transformer-tiny", "gpt-tiny", "bert-tiny", "vit-tiny", "convs2s-small", "conv-lm"]))
    convolution, encodes = name.startswith("conv"), name not in ("gpt-tiny", "conv-lm")
    schemes = ["none", "linear", "learned"]
    if not convolution:
        schemes += ["shaw", "t5", "rope", "alibi", "kerple-log", "kerple-power", "fire", "cope"]
    reading = [scheme for scheme in schemes if scheme not in ("none", "cope")] + ["disentangled"] * (not convolution)
    settings: dict[str, Any] = {
        "n_encoder_layers": draw(st.integers(1, 3)),
        "n_decoder_layers": draw(st.integers(1, 3)),
        **{"d_model": 20, "max_len": 52, "fire.width": 11},
        "d_ff": draw(st.sampled_from([0, 28])) if convolution else 28,
        "norm": draw(st.sampled_from(["pre", "post"])),
        "norm_kind": draw(st.sampled_from(["layer", "rms"])),
        "tie": draw(st.sampled_from(["none", "decoder", "inputs", "all"])),
        "positions": draw(st.sampled_from(schemes)),
        "encoder_positions": draw(st.sampled_from(reading)) if encodes else "",
        "cross_positions": draw(st.sampled_from(["none", "t5", "kerple-log"])),
        "disentangled.buckets": draw(st.sampled_from([0, 8])),
        "disentangled.reach": 30,
        "token_types": draw(st.integers(0, 2)),
        "answer": draw(st.sampled_from(["none", "row", "token"])) if name[0] in "gb" else "none",
        **{field: draw(st.booleans()) for field in ("bias", "embedding_norm")},
    }
    settings["feedforward"] = "gated" if settings["d_ff"] > 0 and draw(st.booleans()) else "dense"
    if convolution:
        settings["convolution.kernel"] = draw(st.sampled_from([1, 3, 5]))
    if name != "conv-lm":
        settings |= {"n_heads": 4, "d_head": 6, "n_kv_heads": draw(st.sampled_from([1, 2, 4]))}
    settings["parallel"] = settings["norm"] == "pre" and draw(st.booleans())
    return resolve(replaced(preset(name, **DATA), **settings))


@given(configs())
def test_the_formula_holds_for_any_style(config: ModelConfig) -> None:
    agree(config)


@st.composite
def recurrent_configs(draw: st.DrawFn) -> ModelConfig:
    name = draw(st.sampled_from(["lstm-small", "sutskever-small", "rnnenc-small", "rnnsearch-small"]))
    answers = ["none", "row", "token"] if name == "lstm-small" else ["none"]
    n = draw(st.integers(1, 3))
    settings = {
        **{"d_model": 12, "n_encoder_layers": n, "n_decoder_layers": n, "answer": draw(st.sampled_from(answers))},
        "recurrent.d_hidden": draw(st.sampled_from([12, 15])),
        "cell": draw(st.sampled_from(["rnn", "lstm", "gru", "gru-cho", "mut1", "mut2", "mut3"])),
        "tie": draw(st.sampled_from(["none", "decoder", "inputs", "all"])),
        **{field: draw(st.booleans()) for field in ("recurrent.norm", "head_bias")},
    }
    if name == "rnnsearch-small":
        settings |= {
            "score": draw(st.sampled_from(["additive", "general"])),
            "n_decoder_layers": draw(st.integers(1, 3)),
        }
    settings["recurrent.bidirectional"] = (settings["answer"] != "none" or name == "rnnsearch-small") and draw(
        st.booleans()
    )
    return resolve(preset(name, **settings, **DATA))


@given(recurrent_configs())
def test_the_formula_holds_for_any_recurrent_model(config: ModelConfig) -> None:
    agree(config)


def test_dot_scores_have_no_matrix_and_general_ones_have_one() -> None:
    def alignment(score: str) -> list[Part]:
        config = known("rnnsearch-small", score=score, **{"recurrent.bidirectional": False, "recurrent.d_hidden": 8})
        agree(config)
        return [part for part in parts(config) if part.kind == "alignment"]

    assert alignment("dot") == []
    assert alignment("general") == [Part("alignment", (8, 8), 1)]
    assert alignment("additive") == [Part("alignment", (8,), 1), Part("alignment", (8, 8), 2)]


CELLS = {  # d inputs, h wide: its matrices by the equations of the lecture, and its biases
    "rnn": lambda d, h: h * d + h * h + h,
    "lstm": lambda d, h: 4 * (h * d + h * h + h),
    "gru": lambda d, h: 3 * (h * d + h * h + h),
    "mut1": lambda d, h: h * d + 2 * h * h + 2 * h * h + 3 * h,  # an input matrix; Wxz, Wxr; Whr, Whh
    "mut2": lambda d, h: h * d + 2 * h * h + 3 * h * h + 3 * h,  # an input matrix; Wxz, Wxh; Whz, Whr, Whh
    "mut3": lambda d, h: 3 * (h * d + h * h + h),
}


@pytest.mark.parametrize("cell", CELLS)
def test_cells_have_what_their_equations_have(cell: str) -> None:
    config = known("lstm-small", cell=cell, n_decoder_layers=1, d_model=7, **{"recurrent.d_hidden": 10}, tie="none")
    assert trained(parts(config)) == 40 * 7 + CELLS[cell](7, 10) + 40 * 10


def test_awd_lstm_has_the_published_33_6_million_but_for_a_second_bias_in_each_layer() -> None:
    with torch.device("meta"):
        layers = [nn.LSTM(400, 1150), nn.LSTM(1150, 1150), nn.LSTM(1150, 400)]
        output = nn.Linear(400, 33_278)  # its matrix is the embedding
    published = sum(p.numel() for part in (*layers, output) for p in part.parameters())
    assert published == 33_556_078
    second_biases = 4 * (1150 + 1150 + 400)
    assert trained(parts(known("awd-lstm"))) == published - second_biases == 33_545_278


def test_sutskevers_translator_has_384_million_parameters_64_of_them_recurrent() -> None:
    found = parts(known("sutskever", source_vocab=160_000, target_vocab=80_000))
    assert sum(part.total for part in found if part.kind.startswith("cell")) == 64_000_000
    assert trained(found) == 384_000_000 + 2 * 4 * 4 * 1000  # its biases


def test_rnnsearch_is_bahdanaus_but_for_the_width_of_its_readout() -> None:
    n, m, a, out, vocab = 1000, 620, 1000, 500, 30_000  # their l is out
    encoder = 2 * 3 * (n * m + n * n)
    decoder = 3 * (n * m + n * n + n * 2 * n) + n * n  # and s_0 = tanh(W_s h_1)
    alignment = a + a * n + a * 2 * n
    readout = 2 * out * (n + m + 2 * n)
    published = 2 * vocab * m + encoder + decoder + alignment + readout + vocab * out
    assert round(published / 1e6, 1) == 80.4
    wider = 2 * (m - out) * (n + m + 2 * n) + vocab * (m - out)  # ours is as wide as the embeddings
    matrices, _ = matrix_weights(parts(known("rnnsearch", source_vocab=vocab, target_vocab=vocab)))
    assert matrices == published + wider


def test_a_convolution_by_hand() -> None:
    """Width 8, 3 taps, two blocks: 16 outputs of 24 inputs each, for the half that is gated and the half that gates."""
    config = known("conv-lm", n_decoder_layers=2, d_model=8, target_vocab=9)
    assert parts(config) == [
        Part("embedding", (9, 8), 1),
        Part("convolution", (16, 24), 2),
        Part("unembedding", (9, 8), 1, tied=True),
        Part("norm", (8,), 6),
        Part("bias", (16,), 2),
    ]


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
            d_ff=10, feedforward="gated", bias=False, tie="decoder", source_vocab=9, target_vocab=7, positions="learned",
            max_len=5,
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
