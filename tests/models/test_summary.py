"""A model layer by layer: against closed forms written here, torch's own counter, and models of every style."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from test_cost_recurrent import scanned
from test_parameters import configs, recurrent_configs
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.packed import packed
from regard.models import summary as summaries
from regard.models.architectures import make_model, preset
from regard.models.cost import activations, forward_flops
from regard.models.flops import count, example, hollow
from regard.models.summary import Line, Summary, summary

B, S, T = 3, 9, 7
C, H, D, F, V = 32, 4, 8, 40, 50  # width, heads and theirs, feed-forward, vocabulary
SIZES = {"d_model": C, "n_heads": H, "d_ff": F, "n_encoder_layers": 2, "n_decoder_layers": 3}
DATA = {"source_vocab": V, "target_vocab": V, "n_classes": 6, "max_len": 64}


def small(name: str, **style: Any) -> nn.Module:
    torch.manual_seed(0)
    return make_model(preset(name, **{**SIZES, **DATA, **style}))


def recurrent(name: str, **style: Any) -> nn.Module:
    sizes = {"d_model": 20, "recurrent.d_hidden": 24, "n_encoder_layers": 2, "n_decoder_layers": 2}
    return make_model(preset(name, **{**sizes, **DATA, **style}))


def found(model: nn.Module, depth: int = 3) -> Summary:
    """Rows of S tokens to rows of T, or rows of T."""
    source = S if model.config.architecture in ("transformer", "seq2seq") else None  # type: ignore[union-attr]
    return summary(model, batch=B, length=17 if hasattr(model, "patches") else T, source_length=source, depth=depth)


def lines(result: Summary) -> dict[str, Line]:
    return {line.name: line for line in result.lines}


# ---- closed forms ------------------------------------------------------------------------------------------------------


def test_a_translator_by_hand() -> None:
    line = lines(found(small("transformer-tiny")))
    projections = 4 * C * C
    assert line["encoder.1.self"].flops.counted == B * (2 * S * projections + 2 * 2 * H * S * S * D)
    assert line["decoder.2.self"].flops.counted == B * (2 * T * projections + 2 * 2 * H * T * T * D)
    crossed = 2 * T * 2 * C * C + 2 * S * 2 * C * C + 2 * 2 * H * T * S * D  # q and out, k and v, q k^T and a v
    assert line["decoder.0.cross"].flops.counted == B * crossed
    assert line["decoder.0.ff"].flops.counted == B * T * 2 * 2 * C * F
    assert line["head"].flops.counted == B * T * 2 * C * V
    assert line["embedding"].flops.counted == 0
    assert line["encoder.0.self"].parameters.counted == projections + 4 * C + 2 * C  # biases, and a norm
    assert line["encoder.0.ff"].parameters.counted == 2 * C * F + F + C + 2 * C
    assert line["embedding"].output == (B, T, C)
    assert line["encoder.0.self"].output == (B, S, C)
    assert line["decoder.0.cross"].output == line["decoder.norm"].output == (B, T, C)
    assert line["head"].output == (B, T, V)


def test_shared_keys_by_hand() -> None:
    line = lines(found(small("gpt-tiny", n_kv_heads=2)))
    expected = 2 * T * C * (C + 2 * (2 * D) + C) + 2 * 2 * H * T * T * D  # all heads of queries look
    assert line["decoder.1.self"].flops.counted == B * expected


def test_a_picture_by_hand() -> None:
    line = lines(found(small("vit-tiny")))
    assert line["patches"].flops.counted == B * 16 * 2 * C * 4 * 4
    assert line["patches"].output == (B, C, 4, 4)
    assert line["head"].flops.counted == B * 2 * C * 6
    assert line["head"].output == (B, 6)


def test_a_convolution_by_hand() -> None:
    line = lines(found(small("conv-lm", n_heads=1, d_ff=0, **{"convolution.kernel": 5})))
    assert line["decoder.0.self"].flops.counted == B * T * 2 * (5 * C) * (2 * C)
    assert "decoder.0.ff" not in line


def test_lstm_layers_by_hand() -> None:
    line = lines(found(recurrent("lstm-small", tie="none")))
    assert line["recurrent.0"].flops.counted == B * T * 2 * 4 * 24 * (20 + 24)
    assert line["recurrent.1"].flops.counted == B * T * 2 * 4 * 24 * (24 + 24)
    assert line["recurrent.1"].parameters.counted == 4 * 24 * (24 + 24) + 4 * 24
    assert line["recurrent.0"].output == (B, T, 24)
    assert line["embedding"].output == (B, T, 20)


def test_additive_attention_by_hand() -> None:
    line = lines(found(recurrent("rnnsearch-small")))
    scores = T * 24 * 24 + S * 48 * 24 + S * T * 24  # W s, U h, and v . tanh(...)
    means = S * T * (3 * 24 + 48)  # of what annotations bring to the three gates, and of themselves
    assert line["decoder.0.attention"].flops.counted == 2 * B * (scores + means)
    assert line["decoder.0.cell"].flops.counted == 2 * B * 3 * 24 * (T * (20 + 24) + S * 48)
    assert line["decoder.0.attention"].output == (B, T, S)
    assert line["encoder.1"].output == (B, S, 48)
    assert line["decoder.0.cell"].output == (B, T, 24)


DEBERTA = {"encoder_positions": "disentangled", "disentangled.buckets": 0, "disentangled.reach": 6}
POSITIONS: list[tuple[str, dict[str, Any], int]] = [
    ("gpt-tiny", {"positions": "shaw", "shaw.clip": 5}, B * T * 2 * 2 * H * D * 11),
    ("gpt-tiny", {"positions": "cope", "cope.positions": 12}, B * T * 2 * H * D * 12),
    ("gpt-tiny", {"positions": "fire", "fire.width": 11}, T * T * 2 * (11 + 11 * H)),  # once for all rows
    ("gpt-tiny", {"positions": "alibi"}, 0),
    ("bert-tiny", DEBERTA, 12 * 2 * C * 2 * C),
]


@pytest.mark.parametrize(("name", "style", "flops"), POSITIONS)
def test_what_positions_multiply_has_a_line_and_is_left_out_of_the_usual_count(
    name: str, style: dict[str, Any], flops: int
) -> None:
    model = small(name, **style)
    result = found(model)
    side, n = ("decoder", 3) if name == "gpt-tiny" else ("encoder", 2)
    crossed = 2 * B * T * 2 * H * D * 12 if "encoder_positions" in style else 0  # DeBERTa's products are in its scores
    assert (lines(result)[f"{side}.0.positions"].flops.counted if flops else 0) == flops
    assert result.positions == n * (flops + crossed)
    at = (0, T) if side == "decoder" else (T, 0)
    usual = forward_flops(model.config, B, *at)  # type: ignore[arg-type]
    assert result.total.flops.counted == usual + result.positions
    assert ("of positions" in str(result)) == bool(flops)


# ---- torch's counter ---------------------------------------------------------------------------------------------------


def torch_counts(model: nn.Module) -> int:
    at = (S, T) if model.config.architecture in ("transformer", "seq2seq") else (T, T)  # type: ignore[union-attr]
    inputs = example(model.config, B, *((17, 0) if hasattr(model, "patches") else at), next(model.parameters()))  # type: ignore[arg-type]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return counter.get_total_flops()


STYLES: list[tuple[str, dict[str, Any]]] = [
    ("transformer-tiny", {"positions": "t5", "norm": "post", "tie": "none"}),
    ("transformer-tiny", {"parallel": True, "feedforward": "gated", "embedding_norm": True, "attention.window": 3}),
    ("convs2s-small", {"d_ff": 0}),
    ("gpt-tiny", {"positions": "shaw", "n_kv_heads": 1}),
    ("gpt-tiny", {"answer": "token"}),
    ("bert-tiny", {"token_types": 2}),
    ("bert-tiny", {"answer": "row"}),
    ("bert-tiny", {"encoder_positions": "disentangled"}),
    ("vit-tiny", {}),
]


@pytest.mark.parametrize(("name", "style"), STYLES)
def test_the_count_is_torchs_where_attention_is_made_of_plain_products(name: str, style: dict[str, Any]) -> None:
    model = small(name, **style)
    assert found(model).total.flops.counted == torch_counts(model)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("lstm-small", {}),
        ("gru-small", {"answer": "row", "recurrent.bidirectional": True}),
        ("sutskever-small", {"n_decoder_layers": 2}),
        ("rnnenc-small", {"n_encoder_layers": 1, "n_decoder_layers": 1}),
        ("rnnsearch-small", {"score": "general", "n_decoder_layers": 3}),
    ],
)
def test_the_count_is_torchs_where_cells_go_step_by_step(name: str, style: dict[str, Any]) -> None:
    assert found(recurrent(name, **style)).total.flops.counted == torch_counts(scanned(name, **style))


def test_fused_attention_on_a_cpu_is_counted_though_torch_takes_it_for_nothing() -> None:
    model = small("gpt-tiny")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.ones(B, T, dtype=torch.long))
    unseen = 3 * B * 2 * 2 * H * T * T * D
    assert found(model).total.flops.counted == counter.get_total_flops() + unseen


# ---- formula and count -------------------------------------------------------------------------------------------------


@given(configs())
@settings(max_examples=40)
def test_formula_and_count_agree_in_every_line_of_any_style(config: ModelConfig) -> None:
    both = config.architecture == "transformer"
    result = summary(make_model(config), batch=2, length=5, source_length=6 if both else None, depth=3)
    assert result.differences == []


@given(recurrent_configs())
@settings(max_examples=30)
def test_formula_and_count_agree_in_every_line_of_any_recurrent_model(config: ModelConfig) -> None:
    both = config.architecture == "seq2seq"
    result = summary(make_model(config), batch=2, length=3, source_length=4 if both else None, depth=3)
    assert result.differences == []


@pytest.mark.parametrize("name", ["gpt3", "deberta-v3-base", "vit-base-16", "awd-lstm"])
def test_models_that_fit_nowhere_are_counted_without_their_numbers(name: str) -> None:
    result = summary(name, length=197 if name.startswith("vit") else 12)
    assert result.differences == []
    assert result.total.parameters.counted == result.total.weights // 4


@pytest.mark.parametrize("name", ["transformer-tiny", "gpt-tiny", "bert-tiny", "vit-tiny", "conv-lm"])
def test_a_model_without_numbers_counts_the_same(name: str) -> None:
    model = small(name, d_ff=F, **({"n_heads": 1} if name == "conv-lm" else {}))
    at = (17, 0) if name == "vit-tiny" else (S, T)
    real, without = (count(m, B, *at) for m in (model, hollow(model.config)))  # type: ignore[arg-type]
    assert real.flops == without.flops
    assert real.shapes == without.shapes


@pytest.mark.parametrize(
    "name", ["t5-small", "convs2s-small", "bert-tiny", "vit-tiny", "lstm-small", "rnnsearch-small"]
)
def test_lines_of_every_depth_add_up_to_the_models_totals(name: str) -> None:
    result = {depth: summary(name, length=5, depth=depth) for depth in (1, 3)}
    assert result[1].total == result[3].total
    assert len(result[1].lines) < len(result[3].lines)
    config = result[1].config
    s, t = result[1].source_length, result[1].target_length
    assert result[1].total.activations == activations(config, s, t)
    assert result[1].total.flops.formula == forward_flops(config, 1, s, t) + result[1].positions


def test_tied_weights_are_counted_once_and_marked() -> None:
    once, twice = (found(small("gpt-tiny", tie=tie), 2) for tie in ("all", "none"))
    assert once.total.parameters.counted == twice.total.parameters.counted - V * C
    head = lines(once)["head"]
    assert (head.parameters.counted, head.tied, head.weights) == (0, V * C, 0)
    assert "head (tied)" in str(once)
    assert "(tied)" not in str(twice)
    assert lines(twice)["head"].weights == 4 * V * C


def test_where_formula_and_count_differ_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    right = summaries.place_flops
    monkeypatch.setattr(
        summaries, "place_flops", lambda *at: {k: n + (k == "decoder.1.ff") for k, n in right(*at).items()}
    )
    result = found(small("gpt-tiny"), 2)
    ff = lines(result)["decoder.1"].flops
    assert ff.formula == ff.counted + B
    assert f"! decoder.1: {ff.formula:,} FLOPs by formula, {ff.counted:,} counted" in str(result)
    assert "agree in every line" not in str(result)
    assert result._repr_html_().count("color:red") == 2  # that line, and the total


def test_a_parameter_that_no_formula_knows_is_said() -> None:
    model = small("gpt-tiny")
    model.head.bias = nn.Parameter(torch.zeros(V))  # type: ignore[union-attr]
    assert found(model).differences[0] == f"head: 0 parameters by formula, {V} counted"


# ---- use ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformer-tiny", "rnnsearch-small"])
def test_a_model_is_the_same_after_it_was_counted(name: str) -> None:
    model = small(name) if name == "transformer-tiny" else recurrent(name)
    modules = [*model.modules()]
    before = [vars(module).copy() for module in modules]
    model.train()
    found(model)
    assert all(module.training for module in modules)
    assert [vars(module) for module in modules] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@pytest.mark.parametrize("name", ["gpt-tiny", "vit-tiny"])
def test_bf16_weights_take_half_the_bytes(name: str) -> None:
    model = small(name)
    full, half = found(model).total, found(model.bfloat16()).total
    assert half.weights * 2 == full.weights == 4 * full.parameters.counted


def test_it_shows_itself_in_a_notebook_as_text_and_never_as_markup() -> None:
    result = regard.summary(small("gpt-tiny"), length=5)
    html = Summary(**{**vars(result), "model": "<script>"})._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert html.count("<tr>") == 1 + len(result.lines) + 1


def test_whatever_holds_a_model_has_a_summary() -> None:
    class Holder:
        model = small("gpt-tiny")

    assert summary(Holder(), length=5).total == summary(Holder.model, length=5).total


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("gpt-tiny", {"depth": 0}, "--depth"),
        ("gpt-tiny", {"length": 0}, "--length 0"),
        ("gpt-tiny", {"length": 2000}, "model.max_len 1024"),
        ("gpt-tiny", {"batch": 0}, "--batch 0"),
        ("gpt-tiny", {"source_length": 5}, "--source-length is for translators"),
        ("transformer-tiny", {"source_length": 0}, "--length 0"),
        ("vit-tiny", {"length": 1}, "at least 2"),
        ("nothing", {}, "is no preset"),
        (3, {}, "a model of Regard"),
        (nn.Linear(2, 2), {}, "a model of Regard"),
        (packed(small("gpt-tiny"), "int8"), {}, "rounded weights"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        summary(what, **options)
