"""Heat-maps of attention: their numbers, axes and files, for every kind of model."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread
from tokens import EOS, MASK, SOS
from typer.testing import CliRunner, Result

from regard.cli.look_commands import look_attention
from regard.errors import RegardError
from regard.look.attention_figure import AttentionFigure, LayerWeights, draw_attention
from regard.look.figures import HeatMap, draw_small_multiples
from regard.look.model_trace import body_of
from regard.look.record import AttentionRecord, attention_layers, record
from regard.look.recorded_forward import record_forward
from regard.look.token_sequence import TokenSequence, single_words
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.alignment import merge_weights

Bundles = dict[str, ModelPackage]
KINDS = ["translation", "post-norm", "rope", "gpt", "bert", "classifier", "rnnsearch", "vit"]


def strip(labels: str, special: str = "", name: str = "token") -> TokenSequence:
    """Places named by letters."""
    marks = tuple(letter in special for letter in labels)
    return TokenSequence(name, (), tuple(labels), single_words(labels), marks)


def drawn(weights: Any, queries: TokenSequence, keys: TokenSequence, **given: Any) -> AttentionFigure:
    weights = np.array(weights, float)
    return AttentionFigure(
        "a text",
        "",
        (LayerWeights("decoder.0.cross", tuple(range(len(weights))), weights, queries, keys, 0.0),),
        **given,
    )


def maps_of(figure: Figure) -> list[Any]:
    """The axes that hold a map; the colour bar stands last."""
    return [axes for axes in figure.axes if axes.images]


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_every_kind_of_model_is_drawn_with_a_place_for_each_token(
    kind: str, bundles: Bundles, asked: dict[str, str]
) -> None:
    layers = list(attention_layers(body_of(bundles[kind].model)))
    for layer in layers:
        found = draw_attention(bundles[kind], asked[kind], layer)
        (kept,) = found.maps
        assert kept.layer == layer
        assert kept.weights.shape == (len(kept.heads), len(kept.queries.pieces), len(kept.keys.pieces))
        np.testing.assert_allclose(kept.weights.sum(-1), 1, atol=1e-6)
        assert kept.off < 1e-6
    assert [kept.layer for kept in draw_attention(bundles[kind], asked[kind]).maps] == layers[
        -1:
    ]  # in a decoder that is cross


@pytest.mark.parametrize(("kind", "layer"), [("translation", "decoder.1.cross"), ("rnnsearch", "decoder.cross")])
def test_cross_attention_is_that_of_the_translation_by_what_was_written(
    kind: str, layer: str, bundles: Bundles, asked: dict[str, str]
) -> None:
    package = bundles[kind]
    assert package.tokenizers is not None
    pieces = package.tokenizers.target
    found = draw_attention(package, asked[kind], layer)
    (kept,) = found.maps
    vocabulary = pieces.pieces(range(len(pieces)))
    written = [SOS, *(vocabulary.index(label) for label in kept.queries.pieces)]
    source = [*package.tokenizers.source.encode(asked[kind]), EOS]
    with torch.no_grad(), record(package.model, layer) as tape:
        package.model(torch.tensor([source]), torch.tensor([written[:-1]]))
    np.testing.assert_allclose(kept.weights, tape.weights(layer)[0].numpy(), atol=1e-6)
    assert kept.keys.pieces == tuple(pieces.pieces(source))
    assert pieces.decode(written) == found.output
    assert found.axes == ("query: target token (as written)", "key: source token")


def test_each_side_has_its_own_axes(bundles: Bundles, asked: dict[str, str]) -> None:
    text = asked["translation"]
    encoder = draw_attention(bundles["translation"], text, kind="encoder")
    assert encoder.axes == ("query: source token", "key: source token")
    decoder = draw_attention(bundles["translation"], text, kind="decoder")
    assert decoder.axes == ("query: target token (as read)", "key: target token (as read)")
    assert decoder.maps[0].queries.pieces[0] == "<sos>"
    assert np.triu(decoder.maps[0].weights[0], 1).max() == 0
    assert draw_attention(bundles["gpt"], asked["gpt"]).axes == ("query: token", "key: token")


def test_a_language_model_reads_the_text_and_no_more(bundles: Bundles, asked: dict[str, str]) -> None:
    package = bundles["gpt"]
    assert package.tokenizers is not None
    ids = [SOS, *package.tokenizers.target.encode(asked["gpt"])]
    (kept,) = draw_attention(package, asked["gpt"], "decoder.0.self").maps
    assert kept.queries.pieces == tuple(package.tokenizers.target.pieces(ids))
    with torch.no_grad(), record(package.model, "decoder.0.self") as tape:
        package.model(torch.tensor([ids]))
    np.testing.assert_allclose(kept.weights, tape.weights("decoder.0.self")[0].numpy(), atol=1e-6)


def test_a_mask_in_a_text_is_that_token_and_a_pair_has_two_types(bundles: Bundles) -> None:
    (kept,) = draw_attention(bundles["bert"], "the <mask> apple").maps
    assert kept.keys.pieces.count("<mask>") == 1
    assert bundles["bert"].tokenizers is not None
    assert bundles["bert"].tokenizers.source.pieces([MASK]) == ["<mask>"]
    one, two = (draw_attention(bundles["classifier"], text).maps[0] for text in ("the man say", "the man\tsay"))
    assert one.keys.pieces.count("<eos>") == 1
    assert two.keys.pieces.count("<eos>") == 2


def test_one_head_can_be_chosen(bundles: Bundles, asked: dict[str, str]) -> None:
    (all_heads,) = draw_attention(bundles["translation"], asked["translation"]).maps
    (one,) = draw_attention(bundles["translation"], asked["translation"], head=1).maps
    assert one.heads == (1,)
    assert np.array_equal(one.weights, all_heads.weights[1:])


def test_pieces_become_words_where_that_is_asked(bundles: Bundles, asked: dict[str, str]) -> None:
    by_pieces = draw_attention(bundles["translation"], asked["translation"])
    by_word = draw_attention(bundles["translation"], asked["translation"], words=True)
    (pieces,), (words,) = by_pieces.maps, by_word.maps
    assert words.keys.pieces == ("the", "man", "has", "eaten", "a", "red", "apple", ".", "<eos>")
    assert by_word.axes == ("query: target word (as written)", "key: source word")
    for i, (_, rows) in enumerate(pieces.queries.words):
        for j, (_, columns) in enumerate(pieces.keys.words):
            block = pieces.weights[:, rows][:, :, columns]
            np.testing.assert_allclose(words.weights[:, i, j], block.sum(2).mean(1))


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 6))
def test_merging_keeps_what_rows_sum_to_whatever_the_words(seed: int, t: int, s: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(s), (2, 3, t))
    cut = [np.split(np.arange(n), np.sort(rng.choice(n, rng.integers(0, n), replace=False))) for n in (t, s)]
    target, source = ([("w", part.tolist()) for part in parts if len(part)] for parts in cut)
    merged = merge_weights(weights, target, source)
    assert merged.shape == (2, 3, len(target), len(source))
    np.testing.assert_allclose(merged.sum(-1), 1)
    (_, rows), (_, columns) = target[-1], source[0]
    np.testing.assert_allclose(merged[1, 2, -1, 0], weights[1, 2][np.ix_(rows, columns)].sum(1).mean())


# ---- sinks -----------------------------------------------------------------------------------------------------------


def test_hiding_sinks_leaves_weights_as_they_were_or_lets_rows_sum_to_one_again() -> None:
    kept = LayerWeights(
        "encoder.0.self", (0,), np.array([[[0.9, 0.04, 0.06], [1.0, 0.0, 0.0]]]), strip("ab"), strip(".xy", "."), 0.0
    )
    plain, again = kept.hide_sinks(renormalize=False), kept.hide_sinks(renormalize=True)
    assert plain.keys.pieces == ("x", "y")
    np.testing.assert_allclose(plain.weights, [[[0.04, 0.06], [0, 0]]])
    np.testing.assert_allclose(again.weights, [[[0.4, 0.6], [0, 0]]])  # who looked nowhere else looks nowhere
    with pytest.raises(RegardError, match="nothing is left"):
        replace(kept, keys=strip(".,:", ".,:")).hide_sinks(renormalize=False)


@pytest.mark.parametrize("words", [False, True])
def test_special_tokens_and_punctuation_are_hidden_and_the_picture_says_so(
    words: bool, bundles: Bundles, asked: dict[str, str]
) -> None:
    found = draw_attention(bundles["translation"], asked["translation"], words=words, hide_sinks=True)
    assert not {"<eos>", "."} & set(found.maps[0].keys.pieces)
    assert {"<eos>", "."} <= set(
        draw_attention(bundles["translation"], asked["translation"], words=words).maps[0].keys.pieces
    )
    hidden, _, how = found.note.partition(";")
    assert {".", "<eos>"} <= set(hidden.removeprefix("hidden keys:").split()) <= {".", "<eos>", "▁"}
    assert how == " weights are as they were, rows sum to 1 or less"
    assert "hidden keys: " in found.figure().get_suptitle()
    again = draw_attention(bundles["translation"], asked["translation"], words=words, hide_sinks=True, renormalize=True)
    np.testing.assert_allclose(again.maps[0].weights.sum(-1), 1)
    assert "rows are made to sum to 1 again" in again.note


def test_what_a_language_model_begins_with_is_a_sink_whatever_it_is(bundles: Bundles) -> None:
    for first in (False, True):
        made = TokenSequence("token", (9, 8, 7), tuple("a.b"), single_words("a.b"), (False, True, False), first)
        assert made.special == (False, True, False)
        assert made.sinks.tolist() == [first, True, False]
    bare = replace(bundles["gpt"], token_template=replace(bundles["gpt"].token_template, before=()))
    assert record_forward(bare, "the man").tokens["decoder"][1].sinks[0]
    _, keys = record_forward(bundles["bert"], "the man.").tokens["encoder"]
    assert {keys.pieces[i] for i in np.flatnonzero(keys.sinks)} >= {"<sos>", ".", "<eos>"}


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_map_shows_its_weights_under_the_names_of_both_sides() -> None:
    weights = [[[0.9, 0.1, 0.0], [0.25, 0.25, 0.5]]]
    figure = drawn(weights, strip("ab", name="target token"), strip("xyz", name="source token")).figure()
    (axes,) = maps_of(figure)
    assert figure.get_supxlabel() == "key: source token"
    assert figure.get_supylabel() == "query: target token"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["x", "y", "z"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]
    image = axes.images[0]
    np.testing.assert_allclose(image.get_array(), weights[0])
    assert [*image.get_extent()] == [-0.5, 2.5, 1.5, -0.5]  # the first query on top
    assert image.get_clim() == (0, 0.9)
    assert axes.get_title() == "decoder.0.cross, head 0"
    assert "rows sum to 1" in figure.get_suptitle()
    assert figure.axes[-1].get_ylabel() == "attention weight"


def test_all_heads_of_all_layers_of_a_kind_share_one_scale(bundles: Bundles, asked: dict[str, str]) -> None:
    found = draw_attention(bundles["translation"], asked["translation"], kind="cross")
    axes = maps_of(found.figure())
    titles = [f"decoder.{layer}.cross, head {head}" for layer in range(2) for head in range(2)]
    assert [one.get_title() for one in axes] == titles
    assert {one.images[0].get_clim() for one in axes} == {(0, max(kept.weights.max() for kept in found.maps))}
    specs = [one.get_subplotspec() for one in axes]
    assert [(spec.rowspan.start, spec.colspan.start) for spec in specs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [len(one.get_yticks()) > 0 for one in axes] == [True, False, True, False]  # names at the left and the bottom
    assert [len(one.get_xticks()) > 0 for one in axes] == [False, False, True, True]


def test_names_that_look_like_formulas_are_text(tmp_path: Path) -> None:
    found = drawn(
        [[[0.5, 0.5]]],
        strip("_"),
        TokenSequence("token", (), ("$\\\\frac$", "a_{$"), single_words("ab"), (False, False)),
    )
    found = replace(found, text="costs $5 and $\\x$")
    (axes,) = maps_of(found.figure())
    assert [text.get_parse_math() for text in axes.get_xticklabels()] == [False, False]
    found.save(tmp_path / "a.svg")
    found.save(tmp_path / "a.png")


def test_letters_without_a_glyph_are_drawn_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    drawn([[[1.0]]], strip("漢"), strip("字"))._repr_png_()
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_of_many_tokens_as_many_are_named_as_there_is_room_for() -> None:
    names = tuple(f"t{i}" for i in range(400))
    figure = draw_small_multiples("", [HeatMap("", np.eye(400), names, names, "x", "y", 1.0)] * 4, 2, "weight")
    ticks = maps_of(figure)[2].get_xticks()
    assert 10 < len(ticks) < 200
    assert [names[int(i)] for i in ticks] == [text.get_text() for text in maps_of(figure)[2].get_xticklabels()]


def test_long_names_are_cut_and_pictures_stay_small() -> None:
    names = ("a" * 30, "b" * 240)
    figure = draw_small_multiples("", [HeatMap("", np.eye(2), names, names, "x", "y", 1.0)], 1, "weight")
    (axes,) = maps_of(figure)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a" * 30, "b" * 29 + "…"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a" * 30, "b" * 29 + "…"]
    assert max(figure.get_size_inches()) < 8


@pytest.mark.parametrize("name", ["a.pdf", "a.jpg", "a.png.gz"])
def test_a_picture_is_not_written_under_the_name_of_another_format(name: str, tmp_path: Path) -> None:
    made = drawn([[[1.0]]], strip("a"), strip("b"))
    with pytest.raises(RegardError, match=r"PNG or SVG, so let the name end in \.png or \.svg"):
        made.save(tmp_path / name)
    for other in ("a", "a.PNG"):
        made.save(tmp_path / other)
        assert (tmp_path / other).read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / name).exists()


def test_where_the_summary_token_looks_is_laid_over_the_picture(bundles: Bundles, picture: Path) -> None:
    found = draw_attention(bundles["vit"], str(picture))
    assert found.maps[0].weights.shape == (2, 17, 17)
    figure = found.figure()
    assert "where the summary token looks" in figure.get_suptitle()
    axes = maps_of(figure)
    assert len(axes) == 2
    assert [text.get_text() for text in axes[0].get_xticklabels()] == ["1", "2", "3", "4"]
    for one, weights in zip(axes, found.maps[0].weights, strict=True):
        below, above = one.images
        np.testing.assert_allclose(above.get_array(), weights[0, 1:].reshape(4, 4))
        assert above.get_clim() == (0, found.maps[0].weights[:, 0, 1:].max())
        assert [*below.get_extent()] == [*above.get_extent()] == [-0.5, 3.5, 3.5, -0.5]
        np.testing.assert_allclose(below.get_array(), np.round(imread(picture) * 255))
    hidden = draw_attention(bundles["vit"], str(picture), hide_sinks=True)
    np.testing.assert_allclose(
        maps_of(hidden.figure())[1].images[1].get_array().ravel(), found.maps[0].weights[1, 0, 1:]
    )
    assert maps_of(hidden.figure())[0].images[1].get_clim() == (0, found.maps[0].weights[:, 0, 1:].max())
    assert hidden.note.startswith("hidden keys: summary;")


def test_a_notebook_shows_the_picture_by_itself() -> None:
    png = drawn([[[1.0]]], strip("a"), strip("b"))._repr_png_()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert to_rgba("#fde725")[:3] == pytest.approx(colour_of_the_middle(png), abs=0.01)  # the brightest of its scale


def colour_of_the_middle(png: bytes) -> tuple[float, ...]:
    """The commonest colour that is not white."""
    import io

    pixels = imread(io.BytesIO(png))[..., :3].reshape(-1, 3)
    colours, counts = np.unique(pixels[(pixels < 0.99).any(1)], axis=0, return_counts=True)
    return tuple(colours[counts.argmax()])


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_rows_that_do_not_sum_to_one_are_an_error_that_is_said(
    bundles: Bundles, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = AttentionRecord.weights
    monkeypatch.setattr(
        AttentionRecord, "weights", lambda self: whole(self) * (1 - 0.01 * torch.eye(2)[0].view(1, 2, 1, 1))
    )
    with pytest.raises(
        RegardError, match=r"row \d+ of head 0 in decoder\.1\.cross sums to 0\.99 and not to 1.*error in Regard"
    ):
        draw_attention(bundles["translation"], asked["translation"])


def test_what_cannot_be_drawn_is_said(bundles: Bundles) -> None:
    package = bundles["translation"]
    for asked, message in [
        ({"layer": "decoder.7.cross"}, r"no layer is called 'decoder\.7\.cross'.*encoder\.0\.self"),
        (
            {"layer": "encoder.*", "kind": "cross"},
            r"no layer is called 'encoder\.\*' and of the kind cross: the layers",
        ),
        ({"kind": "self"}, "--kind must be one of encoder, decoder, cross, not 'self'"),
        ({"layer": "*"}, "'\\*' names layers that look at different things"),
        ({"head": 2}, "2 heads, counted from 0"),
        ({"renormalize": True}, "--renormalize is for --hide-sinks"),
    ]:
        with pytest.raises(RegardError, match=message):
            draw_attention(package, "the man", **asked)  # type: ignore[arg-type]
    with pytest.raises(RegardError, match="no layer is of the kind cross"):
        draw_attention(bundles["gpt"], "the man", kind="cross")
    with pytest.raises(RegardError, match="give a sentence"):
        draw_attention(package, " ")
    with pytest.raises(RegardError, match=r"decode\.beam is for models that translate"):
        draw_attention(bundles["gpt"], "the man", beam=2)
    with pytest.raises(RegardError, match="at most 64"):
        draw_attention(bundles["gpt"], "the man " * 60)
    recurrent = make_model(preset("rnn-tiny", d_model=8, **{"recurrent.d_hidden": 8}, source_vocab=9, target_vocab=9))
    with pytest.raises(RegardError, match="has no attention"):
        draw_attention(replace(bundles["gpt"], model=recurrent), "the man")


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str, **settings: str) -> Result:
    app = typer.Typer()
    app.command()(look_attention)
    return CliRunner().invoke(app, [*words], obj={f"decode.{k}": v for k, v in settings.items()})


def test_the_command_writes_what_it_is_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    model, text = str(folders["translation"]), "the man has"
    paths = [tmp_path / "made" / f"a.{suffix}" for suffix in ("csv", "npz", "svg")]
    names = ["--csv", str(paths[0]), "--npz", str(paths[1]), "--output", str(paths[2])]
    done = call(model, text, "--kind", "cross", *names, beam="2")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1:] == [str(path) for path in paths]
    numbers = json.loads(call(model, text, "--kind", "cross", "--json", beam="2").stdout)
    assert numbers["output"] == done.stdout.splitlines()[0]
    assert b"<svg" in paths[2].read_bytes()[:1000]
    arrays = np.load(paths[1])
    for kept in numbers["maps"]:
        np.testing.assert_allclose(arrays[kept["layer"]], kept["weights"], rtol=1e-5, atol=1e-9)
        assert arrays[f"{kept['layer']}/queries"].tolist() == kept["queries"]
    with paths[0].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(np.size(kept["weights"]) for kept in numbers["maps"])
    for row in rows[:: len(rows) // 7]:
        kept = next(kept for kept in numbers["maps"] if kept["layer"] == row["layer"])
        at = [int(row[name]) for name in ("head", "query", "key")]
        assert float(row["weight"]) == pytest.approx(np.array(kept["weights"])[tuple(at)], rel=1e-5, abs=1e-9)
        assert (row["query token"], row["key token"]) == (kept["queries"][at[1]], kept["keys"][at[2]])


def test_the_command_draws_one_picture_by_default(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(str(folders["gpt"]), "the man", "--head", "1", "--words", "--hide-sinks", "--renormalize")
    assert done.exit_code == 0, done.output
    assert done.stdout == "attention.png\n"
    assert Path("attention.png").read_bytes()[:4] == b"\x89PNG"
    assert "decode.beam is for models that translate" in str(call(str(folders["gpt"]), "the man", beam="2").exception)
