"""Parameters counted on models without numbers, against published totals, the lectures' formulas and hand-made numbers."""

from typing import Any

import pytest
import torch
from configured import replaced
from hypothesis import strategies as st
from torch import nn

from regard.config import ModelConfig
from regard.config.registry import PARTS
from regard.models.analysis.cost import Cost, parameter_table
from regard.models.architectures import PRESETS, make_model, preset, resolve

DATA = {"source_vocab": 40, "target_vocab": 40, "n_classes": 7}  # what data would tell, where a preset does not


def known(name: str, **settings: Any) -> ModelConfig:
    """A preset with what data would fill in."""
    return resolve(preset(name, **{**{k: v for k, v in DATA.items() if not PRESETS[name].get(k)}, **settings}))


def trained(name: str, **settings: Any) -> int:
    return Cost(known(name, **settings)).parameters


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
        "prediction_head": draw(st.sampled_from(["none", "sequence", "token"])) if name[0] in "gb" else "none",
        **{field: draw(st.booleans()) for field in ("bias", "embedding_norm")},
    }
    settings["feedforward"] = "gated" if settings["d_ff"] > 0 and draw(st.booleans()) else "dense"
    if convolution:
        settings["convolution.kernel"] = draw(st.sampled_from([1, 3, 5]))
    if name != "conv-lm":
        settings |= {"n_heads": 4, "d_head": 6, "n_kv_heads": draw(st.sampled_from([1, 2, 4]))}
    settings["parallel"] = settings["norm"] == "pre" and draw(st.booleans())
    return resolve(replaced(preset(name, **DATA), **settings))


@st.composite
def recurrent_configs(draw: st.DrawFn) -> ModelConfig:
    name = draw(st.sampled_from(["lstm-small", "sutskever-small", "rnnenc-small", "rnnsearch-small"]))
    heads = ["none", "sequence", "token"] if name == "lstm-small" else ["none"]
    n = draw(st.integers(1, 3))
    settings = {
        **{
            "d_model": 12,
            "n_encoder_layers": n,
            "n_decoder_layers": n,
            "prediction_head": draw(st.sampled_from(heads)),
        },
        "recurrent.d_hidden": draw(st.sampled_from([12, 15])),
        "cell": draw(st.sampled_from([*PARTS["cell"]])),
        "tie": draw(st.sampled_from(["none", "decoder", "inputs", "all"])),
        **{field: draw(st.booleans()) for field in ("recurrent.norm", "head_bias")},
    }
    if name == "rnnsearch-small":
        settings |= {
            "attention_score": draw(st.sampled_from(["additive", "general"])),
            "n_decoder_layers": draw(st.integers(1, 3)),
        }
    settings["recurrent.bidirectional"] = (settings["prediction_head"] != "none" or name == "rnnsearch-small") and draw(
        st.booleans()
    )
    return resolve(preset(name, **settings, **DATA))


CELLS = {  # d inputs, h wide: its matrices by the equations of the lecture, and its biases
    "rnn": lambda d, h: h * d + h * h + h,
    "lstm": lambda d, h: 4 * (h * d + h * h + h),
    "gru": lambda d, h: 3 * (h * d + h * h + h),
    "mut1": lambda d, h: h * d + 2 * h * h + 2 * h * h + 3 * h,  # an input matrix; Wxz, Wxr; Whr, Whh
    "mut2": lambda d, h: h * d + 2 * h * h + 3 * h * h + 3 * h,  # an input matrix; Wxz, Wxh; Whz, Whr, Whh
    "mut3": lambda d, h: 3 * (h * d + h * h + h),
    "nas": lambda d, h: 8 * (h * d + h * h + h),
    "lstm-peephole": lambda d, h: 4 * (h * d + h * h + h) + 3 * h,
    "expression": lambda d, h: 3 * (h * d + h * h + h),  # the GRU, by default
}


@pytest.mark.parametrize("cell", CELLS)
def test_cells_have_what_their_equations_have(cell: str) -> None:
    n = trained("lstm-small", cell=cell, n_decoder_layers=1, d_model=7, tie="none", **{"recurrent.d_hidden": 10})
    assert n == 40 * 7 + CELLS[cell](7, 10) + 40 * 10


@pytest.mark.parametrize(("score", "weights"), [("dot", 0), ("general", 8 * 8), ("additive", 2 * 8 * 8 + 8)])
def test_dot_scores_have_no_matrix_and_general_ones_have_one(score: str, weights: int) -> None:
    small = {"recurrent.bidirectional": False, "recurrent.d_hidden": 8}
    model = Cost(known("rnnsearch-small", attention_score=score, **small)).model
    assert sum(p.numel() for name, p in model.named_parameters() if ".score." in name) == weights


def test_awd_lstm_has_the_published_33_6_million_but_for_a_second_bias_in_each_layer() -> None:
    with torch.device("meta"):
        layers = [nn.LSTM(400, 1150), nn.LSTM(1150, 1150), nn.LSTM(1150, 400)]
        output = nn.Linear(400, 33_278)  # its matrix is the embedding
    published = sum(p.numel() for part in (*layers, output) for p in part.parameters())
    assert published == 33_556_078
    second_biases = 4 * (1150 + 1150 + 400)
    assert trained("awd-lstm") == published - second_biases == 33_545_278


def test_sutskevers_translator_has_384_million_parameters_64_of_them_recurrent() -> None:
    cost = Cost(known("sutskever", source_vocab=160_000, target_vocab=80_000))
    recurrent = [p for name, p in cost.model.named_parameters() if name.endswith(("weight_ih", "weight_hh"))]
    assert sum(p.numel() for p in recurrent) == 64_000_000
    assert cost.parameters == 384_000_000 + 2 * 4 * 4 * 1000  # its biases


def test_rnnsearch_is_bahdanaus_but_for_the_width_of_its_readout() -> None:
    n, m, a, out, vocab = 1000, 620, 1000, 500, 30_000  # their l is out
    encoder = 2 * 3 * (n * m + n * n)
    decoder = 3 * (n * m + n * n + n * 2 * n) + n * n  # and s_0 = tanh(W_s h_1)
    alignment = a + a * n + a * 2 * n
    readout = 2 * out * (n + m + 2 * n)
    published = 2 * vocab * m + encoder + decoder + alignment + readout + vocab * out
    assert round(published / 1e6, 1) == 80.4
    wider = 2 * (m - out) * (n + m + 2 * n) + vocab * (m - out)  # ours is as wide as the embeddings
    cost = Cost(known("rnnsearch", source_vocab=vocab, target_vocab=vocab))
    biases = sum(p.numel() for name, p in cost.model.named_parameters() if name.endswith("bias"))
    assert cost.parameters - biases == published + wider


def test_gpt3_has_the_175_181_291_520_weights_in_27_938_matrices_that_the_lecture_counts() -> None:
    """The table of docs/guides/cost.md: query, key and value of a head are a matrix each; the unembedding is another."""
    c, f, layers, heads, vocab = 12_288, 49_152, 96, 96, 50_257
    lecture = {
        "embedding": ((vocab, c), 1),
        "query": ((128, c), heads * layers),
        "key": ((128, c), heads * layers),
        "value": ((128, c), heads * layers),
        "output": ((c, c), layers),
        "up": ((f, c), layers),
        "down": ((c, f), layers),
        "unembedding": ((vocab, c), 1),
    }
    assert sum(n for _, n in lecture.values()) == 2 + 96 * (96 * 3 + 3) == 27_938
    weights = sum(n * shape[0] * shape[1] for shape, n in lecture.values())
    assert weights == 175_181_291_520
    cost = Cost(known("gpt3"))
    assert cost.active == weights - vocab * c  # a look-up is no product
    # everything, tied once: learned positions, two norms a block and one above, a bias for every output of a projection
    vectors = 2048 * c + (2 * layers + 1) * 2 * c + layers * (3 * c + c + f + c)
    assert cost.parameters == weights - vocab * c + vectors


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
    assert trained(name) == PUBLISHED[name]


def test_blocks_that_are_alike_are_one_line_of_the_table() -> None:
    """Width 8, 4 heads of 3, one of keys and values, gated: q, k and v lie in one tensor, gate and up in another."""
    model = make_model(
        preset(
            *("gpt-tiny",), n_decoder_layers=2, d_model=8, n_heads=4, n_kv_heads=1, d_head=3, d_ff=10, feedforward="gated",
            bias=False, tie="decoder", target_vocab=7, positions="learned", max_len=5,
        )
    )  # fmt: skip
    rows = parameter_table(model)
    found = [(tuple(row["shape"]), row["number"], row["total"], row["tied"]) for row in rows]
    assert sorted(found) == sorted(
        [
            ((7, 8), 1, 56, False),
            ((18, 8), 2, 288, False),  # q of 4 heads, k and v of one
            ((8, 12), 2, 192, False),
            ((20, 8), 2, 320, False),
            ((8, 10), 2, 160, False),
            ((8,), 2, 16, False),
            ((8,), 2, 16, False),
            ((8,), 1, 8, False),
            ((5, 8), 1, 40, False),
            ((7, 8), 1, 56, True),
        ]
    )
    assert [row["name"] for row in rows if row["tied"]] == ["head.weight"]
    assert sum(row["total"] for row in rows if not row["tied"]) == sum(p.numel() for p in model.parameters())
    assert all(("*" in row["name"]) == (row["number"] == 2 or row["shape"] == [5, 8]) for row in rows)


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_of_every_preset_adds_up(name: str) -> None:
    cost = Cost(known(name))
    assert sum(row["total"] for row in parameter_table(cost.model) if not row["tied"]) == cost.parameters
    assert 0 < cost.active <= cost.multiplied <= cost.parameters
