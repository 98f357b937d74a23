"""The summary of a model against closed forms, torch's own counter, and models of every style."""

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
from regard.inference.model_spec import summary
from regard.layers.quantization import quantize_model
from regard.models.analysis.cost import forward_flops, meta_inputs
from regard.models.analysis.summary import LayerSummary, Summary
from regard.models.architectures import make_model, preset

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


def lines(result: Summary) -> dict[str, LayerSummary]:
    return {line.name: line for line in result.lines}


def at(result: Summary, first: str, last: str = "") -> LayerSummary:
    """Return the line whose path begins and ends so."""
    (line,) = (line for line in result.lines if line.name.startswith(first) and line.name.endswith(last))
    return line


# ---- closed forms ------------------------------------------------------------------------------------------------------


def test_a_translator_by_hand() -> None:
    result = found(small("transformer-tiny"))
    line = lines(result)
    projections = 4 * C * C
    assert at(result, "encoder.blocks.1.sublayers.self").flops == B * (2 * S * projections + 2 * 2 * H * S * S * D)
    assert at(result, "decoder.blocks.2.sublayers.self").flops == B * (2 * T * projections + 2 * 2 * H * T * T * D)
    crossed = 2 * T * 2 * C * C + 2 * S * 2 * C * C + 2 * 2 * H * T * S * D  # q and out, k and v, q k^T and a v
    assert at(result, "decoder.blocks.0.sublayers.cross").flops == B * crossed
    assert at(result, "decoder.blocks.0.sublayers.ff").flops == B * T * 2 * 2 * C * F
    assert line["head"].flops == B * T * 2 * C * V
    assert line["source_embedding"].flops == 0
    block = found(small("transformer-tiny"), 2)
    norms = 2 * 2 * C
    assert at(block, "encoder.blocks.0").parameters == projections + 4 * C + 2 * C * F + F + C + norms
    assert line["source_embedding"].output == (B, T, C)
    assert at(result, "encoder.blocks.0.sublayers.self").output == (B, S, C)
    assert at(result, "decoder.blocks.0.sublayers.cross").output == line["decoder.norm"].output == (B, T, C)
    assert line["head"].output == (B, T, V)


def test_shared_keys_by_hand() -> None:
    expected = 2 * T * C * (C + 2 * (2 * D) + C) + 2 * 2 * H * T * T * D  # every head of queries attends
    assert at(found(small("gpt-tiny", n_kv_heads=2)), "decoder.blocks.1.sublayers.self").flops == B * expected


def test_a_picture_by_hand() -> None:
    line = lines(found(small("vit-tiny")))
    assert line["patches"].flops == B * 16 * 2 * C * 4 * 4
    assert line["patches"].output == (B, C, 4, 4)
    assert line["head"].flops == B * 2 * C * 6
    assert line["head"].output == (B, 6)


def test_a_convolution_by_hand() -> None:
    result = found(small("conv-lm", n_heads=1, d_ff=0, **{"convolution.kernel": 5}))
    assert at(result, "decoder.blocks.0.sublayers.self").flops == B * T * 2 * (5 * C) * (2 * C)
    assert not any(name.endswith("ff") for name in lines(result))


def test_lstm_layers_by_hand() -> None:
    line = lines(found(recurrent("lstm-small", tie="none"), 2))
    assert line["recurrent.layers.0"].flops == B * T * 2 * 4 * 24 * (20 + 24)
    assert line["recurrent.layers.1"].flops == B * T * 2 * 4 * 24 * (24 + 24)
    assert line["recurrent.layers.1"].parameters == 4 * 24 * (24 + 24) + 4 * 24
    assert line["embedding"].output == (B, T, 20)


def test_additive_attention_by_hand() -> None:
    result = found(recurrent("rnnsearch-small"), 1)
    scores = T * 24 * 24 + S * 48 * 24 + S * T * 24  # W s, U h, and v . tanh(...)
    means = S * T * (3 * 24 + 48)  # of what annotations bring to the three gates, and of themselves
    cell = 3 * 24 * (T * (20 + 24) + S * 48)
    first, readout = 24 * 24, T * 2 * 20 * (24 + 20 + 48)
    above = T * 3 * 24 * (24 + 24)  # a second layer
    assert lines(result)["decoder"].flops == 2 * B * (scores + means + cell + first + readout + above)
    assert lines(result)["encoder"].output == (B, S, 48)
    assert lines(result)["decoder"].output == (B, T, 20)


DEBERTA = {"encoder_positions": "disentangled", "disentangled.buckets": 0, "disentangled.reach": 6}
POSITIONS: list[tuple[str, dict[str, Any], int]] = [
    ("gpt-tiny", {"positions": "shaw", "shaw.clip": 5}, B * T * 2 * 2 * H * D * 11),
    ("gpt-tiny", {"positions": "cope", "cope.positions": 12}, B * T * 2 * H * D * 12),
    ("gpt-tiny", {"positions": "fire", "fire.width": 11}, T * T * 2 * (11 + 11 * H)),  # once for all rows
    ("gpt-tiny", {"positions": "alibi"}, 0),
    ("bert-tiny", DEBERTA, 12 * 2 * C * 2 * C),
]


@pytest.mark.parametrize(("name", "style", "flops"), POSITIONS)
def test_what_positions_multiply_is_counted_too(name: str, style: dict[str, Any], flops: int) -> None:
    plain = {"encoder_positions": "sinusoidal"} if "encoder_positions" in style else {"positions": "none"}
    with_positions, without = (found(small(name, **each)).total.flops for each in (style, plain))
    n = 3 if name == "gpt-tiny" else 2
    crossed = 2 * B * T * 2 * H * D * 12 if "encoder_positions" in style else 0  # DeBERTa's products are in its scores
    assert with_positions - without == n * (flops + crossed)


# ---- torch's counter ---------------------------------------------------------------------------------------------------


def torch_counts(model: nn.Module) -> int:
    at = (17, 0) if hasattr(model, "patches") else (S, T) if hasattr(model, "encode") else (T, T)
    inputs = [torch.ones_like(x, device="cpu") for x in meta_inputs(model, B, *at)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return counter.get_total_flops()


STYLES: list[tuple[str, dict[str, Any]]] = [
    ("transformer-tiny", {"positions": "t5", "norm": "post", "tie": "none"}),
    ("transformer-tiny", {"parallel": True, "feedforward": "gated", "embedding_norm": True, "attention.window": 3}),
    ("convs2s-small", {"d_ff": 0}),
    ("gpt-tiny", {"positions": "shaw", "n_kv_heads": 1}),
    ("gpt-tiny", {"prediction_head": "token"}),
    ("bert-tiny", {"token_types": 2}),
    ("bert-tiny", {"prediction_head": "sequence"}),
    ("bert-tiny", {"encoder_positions": "disentangled"}),
    ("vit-tiny", {}),
]


@pytest.mark.parametrize(("name", "style"), STYLES)
def test_the_count_is_torchs_where_attention_is_made_of_plain_products(name: str, style: dict[str, Any]) -> None:
    model = small(name, **style)
    assert found(model).total.flops == torch_counts(model)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("lstm-small", {}),
        ("gru-small", {"prediction_head": "sequence", "recurrent.bidirectional": True}),
        ("sutskever-small", {"n_decoder_layers": 2}),
        ("rnnenc-small", {"n_encoder_layers": 1, "n_decoder_layers": 1}),
        ("rnnsearch-small", {"attention_score": "general", "n_decoder_layers": 3}),
    ],
)
def test_the_count_is_torchs_where_cells_go_step_by_step(name: str, style: dict[str, Any]) -> None:
    assert found(recurrent(name, **style)).total.flops == torch_counts(scanned(name, **style))


def test_fused_attention_on_a_cpu_is_counted_though_torch_takes_it_for_nothing() -> None:
    model = small("gpt-tiny")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.ones(B, T, dtype=torch.long))
    unseen = 3 * B * 2 * 2 * H * T * T * D
    assert found(model).total.flops == counter.get_total_flops() + unseen


# ---- lines ------------------------------------------------------------------------------------------------------------


@given(configs() | recurrent_configs())
@settings(max_examples=40)
def test_models_of_any_style_are_counted_as_they_are_without_their_numbers(config: ModelConfig) -> None:
    model = make_model(config)
    result = summary(model, batch=1, length=5)
    assert result.total.parameters == sum(p.numel() for p in model.parameters())
    s, t = result.source_length, result.target_length
    assert result.total.flops == forward_flops(config, 1, s, t)


@pytest.mark.parametrize("name", ["gpt3", "deberta-v3-base", "vit-base-16", "awd-lstm"])
def test_models_that_fit_nowhere_are_counted_without_their_numbers(name: str) -> None:
    result = summary(name, length=197 if name.startswith("vit") else 12)
    assert result.total.parameters == result.total.weights // 4


@pytest.mark.parametrize(
    "name", ["t5-small", "convs2s-small", "bert-tiny", "vit-tiny", "lstm-small", "rnnsearch-small"]
)
def test_lines_of_every_depth_add_up_to_the_models_totals(name: str) -> None:
    result = {depth: summary(name, length=5, depth=depth) for depth in (1, 3)}
    assert result[1].total == result[3].total
    assert len(result[1].lines) < len(result[3].lines)
    config = result[1].config
    s, t = result[1].source_length, result[1].target_length
    assert result[1].total.flops == forward_flops(config, 1, s, t)


def test_tied_weights_are_counted_once_and_marked() -> None:
    once, twice = (found(small("gpt-tiny", tie=tie), 2) for tie in ("all", "none"))
    assert once.total.parameters == twice.total.parameters - V * C
    head = lines(once)["head"]
    assert (head.parameters, head.tied, head.weights) == (0, V * C, 0)
    assert "head (tied)" in str(once)
    assert "(tied)" not in str(twice)
    assert lines(twice)["head"].weights == 4 * V * C


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
    assert half.weights * 2 == full.weights == 4 * full.parameters


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
        (quantize_model(small("gpt-tiny"), "int8"), {}, "rounded weights"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        summary(what, **options)
