"""Statistics of heads and of the residual stream: computed by hand, against the recorder, drawn and printed."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from regard.cli.look_commands import look_statistics
from regard.errors import RegardError
from regard.look.figures import HeatMap, Lines, text_table
from regard.look.model_trace import body_of
from regard.look.record import attention_layers
from regard.look.recorded_forward import RecordedForward, record_forward
from regard.look.statistics_figure import (
    MEASURES,
    RunningMeans,
    Statistics,
    head_measures,
    layer_statistics,
    measure_statistics,
    stream_measures,
    sublayer_statistics,
)
from regard.look.token_sequence import TokenSequence, single_words
from regard.model_folder import ModelPackage

Bundles = dict[str, ModelPackage]
KINDS = ["translation", "post-norm", "gpt", "bert", "classifier", "rnnsearch", "vit"]


def strip(labels: str, special: str = "") -> TokenSequence:
    marks = tuple(letter in special for letter in labels)
    return TokenSequence("token", (), tuple(labels), single_words(labels), marks)


def forward(
    layer: str, weights: Any, queries: TokenSequence, keys: TokenSequence, causal: bool = False
) -> RecordedForward:
    """One layer that looks so: weights (H, T, S)."""
    kept = torch.tensor(weights)[None]
    seen = torch.ones(1, 1, *kept.shape[2:], dtype=torch.bool)
    record = SimpleNamespace(weights=lambda: kept, plan=SimpleNamespace(seen=lambda: seen.tril() if causal else seen))
    kind = "cross" if layer.endswith("cross") else layer.split(".")[0]
    return RecordedForward({layer: record}, {}, {kind: (queries, keys)})  # type: ignore[dict-item]


def of_head(found: RecordedForward, layer: str, head: int = 0) -> dict[str, float]:
    rows = RunningMeans()
    rows.add(layer, head_measures(found, layer))
    ((name, means),) = rows.items()
    made = layer_statistics(name, means)
    return {measure: float(made.measures[measure][head]) for measure in MEASURES} | {"most": made.max_entropy}


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_self_attention_is_measured_as_it_is_worked_by_hand() -> None:
    weights = [
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]],
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],  # a sink
    ]
    text = strip("<x.", "<.")
    found = forward("decoder.0.self", weights, text, text, causal=True)
    assert of_head(found, "decoder.0.self") == pytest.approx(
        {
            "entropy": (0 + math.log(2) + 1.5 * math.log(2)) / 3,
            "distance": (0 + 0.5 + (0.25 * 2 + 0.25)) / 3,
            "first": (1 + 0.5 + 0.25) / 3,
            "special": (1 + 0.5 + 0.75) / 3,
            "itself": (1 + 0.5 + 0.5) / 3,
            "most": (0 + math.log(2) + math.log(3)) / 3,
        }
    )
    sink = of_head(found, "decoder.0.self", head=1)
    assert sink == pytest.approx(
        {
            "entropy": 0,
            "distance": 1,
            "first": 1,
            "special": 1,
            "itself": 1 / 3,
            "most": (math.log(2) + math.log(3)) / 3,
        }
    )


def test_an_encoder_looks_both_ways() -> None:
    text = strip("xy")
    found = forward("encoder.0.self", [[[0.75, 0.25], [0.5, 0.5]]], text, text)
    measures = of_head(found, "encoder.0.self")
    assert measures["distance"] == pytest.approx((0.25 + 0.5) / 2)
    assert measures["most"] == pytest.approx(math.log(2))


def test_cross_attention_has_no_distance_and_no_self() -> None:
    found = forward("decoder.0.cross", [[[0.25, 0.25, 0.5]]], strip("a"), strip("xy.", "."))
    measures = of_head(found, "decoder.0.cross")
    assert math.isnan(measures.pop("distance"))
    assert math.isnan(measures.pop("itself"))
    assert measures == pytest.approx({"entropy": 1.5 * math.log(2), "first": 0.25, "special": 0.5, "most": math.log(3)})


def test_a_mean_counts_every_query_once_however_long_its_text() -> None:
    mean = RunningMeans()
    mean.add("a", np.array([[1.0], [2.0], [3.0]]))
    mean.add("a", np.array([[10.0]]))
    assert [(name, value.tolist()) for name, value in mean.items()] == [("a", [4.0])]


def vectors(**given: Any) -> dict[str, torch.Tensor]:
    return {name.replace("_", "."): torch.tensor(values, dtype=torch.float32) for name, values in given.items()}


def test_a_sublayer_is_compared_with_the_stream_it_was_added_to() -> None:
    found = vectors(
        encoder_input=[[3.0, 4.0]],
        encoder_0_self_output=[[1.0, 1.0]],
        encoder_0_self_stream=[[6.0, 8.0]],
        encoder_0_ff_output=[[2.0, 0.0]],
        encoder_0_ff_stream=[[0.0, 5.0]],
        encoder_output=[[9.0, 9.0]],
    )
    rows = {name: sublayer_statistics(name, values.mean(0)) for name, values in stream_measures(found)}
    assert list(rows) == ["encoder.0.self", "encoder.0.ff"]
    assert rows["encoder.0.self"].length == pytest.approx(10)
    assert rows["encoder.0.self"].output == pytest.approx(1)
    assert rows["encoder.0.self"].share == pytest.approx(1 / math.sqrt(12.5))
    assert rows["encoder.0.ff"].length == pytest.approx(5)
    assert rows["encoder.0.ff"].share == pytest.approx(math.sqrt(2) / math.sqrt(50))


def test_sublayers_side_by_side_are_added_to_one_stream() -> None:
    found = vectors(
        decoder_input=[[3.0, 4.0]],
        decoder_0_self_output=[[1.0, 1.0]],
        decoder_0_ff_output=[[2.0, 2.0]],
        decoder_0_ff_stream=[[6.0, 8.0]],
    )
    rows = {name: sublayer_statistics(name, values.mean(0)) for name, values in stream_measures(found)}
    assert [row.length for row in rows.values()] == pytest.approx([10, 10])
    assert [row.share for row in rows.values()] == pytest.approx([1 / math.sqrt(12.5), 2 / math.sqrt(12.5)])


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_can_be_measured(kind: str, bundles: Bundles, asked: dict[str, str]) -> None:
    found = measure_statistics(bundles[kind], [asked[kind]])
    reader = body_of(bundles[kind].model)
    assert [layer.name for layer in found.layers] == list(attention_layers(reader))
    for layer in found.layers:
        entropy = layer.measures["entropy"]
        assert (entropy >= 0).all()
        assert (entropy <= layer.max_entropy + 1e-6).all()
    sublayers = {"translation": 10, "post-norm": 10, "rnnsearch": 0}.get(kind, 4)
    assert len(found.stream) == sublayers
    assert all(0 < sub.share < 1000 for sub in found.stream)
    json.dumps(found.numbers(), allow_nan=False)
    assert found.layers[-1].name in str(found)


def test_patches_have_no_distance_since_they_lie_in_a_plane(bundles: Bundles, asked: dict[str, str]) -> None:
    found = measure_statistics(bundles["vit"], [asked["vit"]])
    for layer in found.layers:
        assert np.isnan(layer.measures["distance"]).all()
        assert np.isfinite(layer.measures["itself"]).all()
    assert "mean distance of the key (places)" not in [panel.title for panel in found.head_panels()]


def test_the_stream_of_a_pre_norm_model_is_the_sum_of_what_was_returned(
    bundles: Bundles, asked: dict[str, str]
) -> None:
    one = record_forward(bundles["gpt"], asked["gpt"], stream=True)
    x = one.vectors["decoder.input"].double()
    lengths = []
    for name in ("decoder.0.self", "decoder.0.ff", "decoder.1.self", "decoder.1.ff"):
        x = x + one.vectors[f"{name}.output"].double()
        lengths.append(float(x.norm(dim=-1).mean()))
    found = measure_statistics(bundles["gpt"], [asked["gpt"]])
    assert [sub.length for sub in found.stream] == pytest.approx(lengths, rel=1e-5)


def test_several_texts_are_one_mean_over_their_queries(bundles: Bundles) -> None:
    texts = ["the man has", "der Apfel, I!"]
    both, alone_ = (
        measure_statistics(bundles["gpt"], texts),
        [measure_statistics(bundles["gpt"], [text]) for text in texts],
    )
    assert both.texts == 2
    n = [one.tokens["decoder"] for one in alone_]
    assert both.tokens == {"decoder": sum(n)}
    for i, layer in enumerate(both.layers):
        for measure in MEASURES:
            parts = np.stack([one.layers[i].measures[measure] for one in alone_])
            np.testing.assert_allclose(layer.measures[measure], np.average(parts, axis=0, weights=n), rtol=1e-6)
    assert both.stream[0].length == pytest.approx(np.average([one.stream[0].length for one in alone_], weights=n))


def test_what_cannot_be_measured_is_said(bundles: Bundles) -> None:
    with pytest.raises(RegardError, match="nothing to read"):
        measure_statistics(bundles["gpt"], [])
    with pytest.raises(RegardError, match="nothing to read"):
        measure_statistics(bundles["gpt"], ["the man", ""])


# ---- the drawing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured_once(bundles: Bundles, asked: dict[str, str]) -> Statistics:
    return measure_statistics(bundles["translation"], [asked["translation"]])


def test_the_picture_has_a_panel_for_each_measure_and_two_for_the_stream(measured_once: Statistics) -> None:
    heads = measured_once.head_panels()
    assert all(isinstance(panel, HeatMap) for panel in heads)
    figure = measured_once.figure()
    named = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert len(named) == 7
    entropy = named["entropy of the weights (nats)"]
    assert (entropy.get_xlabel(), entropy.get_ylabel()) == ("head", "layer")
    assert [text.get_text() for text in entropy.get_yticklabels()] == [layer.name for layer in measured_once.layers]
    expected = np.stack([layer.measures["entropy"] for layer in measured_once.layers])
    np.testing.assert_allclose(entropy.images[0].get_array(), expected)
    distance = named["mean distance of the key (places)"].images[0].get_array()
    blank = [name.name.endswith("cross") for name in measured_once.layers]
    assert np.isnan(np.ma.filled(distance, np.nan)).all(1).tolist() == blank


def test_the_stream_is_a_line_for_each_kind_of_sublayer(measured_once: Statistics) -> None:
    length, share = measured_once.stream_panels()
    assert isinstance(length, Lines)
    assert isinstance(share, Lines)
    assert length.ticks == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    assert list(length.lines) == ["encoder self", "encoder ff", "decoder self", "decoder cross", "decoder ff"]
    by_name = {sub.name: sub for sub in measured_once.stream}
    assert length.lines["decoder cross"][3] == by_name["decoder.1.cross"].length
    assert share.lines["encoder ff"][0] == by_name["encoder.0.ff"].share
    assert np.isnan(length.lines["encoder ff"][2:]).all()


def test_a_notebook_shows_the_picture(measured_once: Statistics) -> None:
    assert measured_once._repr_png_()[:4] == b"\x89PNG"


def test_a_table_is_as_wide_as_it_must_be() -> None:
    rows = [{"name": "a", "x": 0.123456}, {"name": "long one", "x": None}]
    assert text_table(rows).splitlines() == ["name           x", "a         0.1235", "long one       -"]


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    app = typer.Typer()
    app.command()(look_statistics)
    return CliRunner().invoke(app, [*words], obj={})


def test_the_command_prints_a_table_and_writes_files(folders: dict[str, Path], tmp_path: Path) -> None:
    file, png, numbers = tmp_path / "texts.txt", tmp_path / "s.png", tmp_path / "s.csv"
    file.write_text("the man has\n\nder Apfel\n", encoding="utf-8")
    model = str(folders["gpt"])
    done = call(model, "--file", str(file), "--output", str(png), "--csv", str(numbers))
    assert done.exit_code == 0, done.output
    assert "decoder.1.self" in done.stdout
    assert done.stdout.splitlines()[-2:] == [str(numbers), str(png)]
    assert png.read_bytes()[:4] == b"\x89PNG"
    shown = json.loads(call(model, "--file", str(file), "--json").stdout)
    assert shown["texts"] == 2
    with numbers.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    assert [(row["layer"], int(row["head"])) for row in rows] == [(row["layer"], row["head"]) for row in shown["heads"]]
    assert [float(row["entropy"]) for row in rows] == [row["entropy"] for row in shown["heads"]]


def test_the_command_wants_a_text_or_a_file(folders: dict[str, Path]) -> None:
    for words in ([], ["the man", "--file", "x"]):
        assert "give a text, or --file" in str(call(str(folders["gpt"]), *words).exception)
