"""Figures of position schemes: numbers computed by hand, and drawing."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from configured import SCHEMES, model_config
from matplotlib.image import imread

from regard.config import ModelConfig
from regard.config.recipes import every_setting
from regard.errors import RegardError
from regard.layers.positions.scheme import schemes_for
from regard.look.figures import Image, Lines, draw
from regard.look.position_figures import PositionFigure, draw_trained_scheme, draw_untrained_scheme
from regard.models.architectures import make_model, preset
from regard.models.gpt import GPT
from regard.models.sizes import resolve_sizes
from regard.models.transformer import Transformer

DRAWN = [name for name in SCHEMES if name != "none"]


def config(**settings: object) -> ModelConfig:
    return resolve_sizes(model_config(preset="transformer-tiny", **settings), Transformer.presets)  # type: ignore[arg-type]


def picture(name: str, n: int = 16, **settings: object) -> PositionFigure:
    return draw_untrained_scheme(name, config(positions=name, encoder_positions="sinusoidal", **settings), n)


def lines(shown: PositionFigure, panel: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    drawn = shown.panels[panel]
    assert isinstance(drawn, Lines)
    return drawn.at, drawn.lines


def image(shown: PositionFigure, panel: int = 0) -> np.ndarray:
    drawn = shown.panels[panel]
    assert isinstance(drawn, Image)
    return drawn.values


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_the_sinusoidal_image_has_positions_as_rows() -> None:
    values = image(picture("sinusoidal", 5, d_model=5, n_heads=1))
    golden = [  # a dimension each, positions 0 to 4
        [0, 0.841, 0.909, 0.141, -0.757],
        [1, 0.540, -0.416, -0.990, -0.654],
        [0, 0.025, 0.050, 0.075, 0.100],
        [1, 1, 0.999, 0.997, 0.995],
        [0, 0.001, 0.001, 0.002, 0.003],
    ]
    np.testing.assert_allclose(values.T, golden, atol=6e-4)


def test_alibi_falls_by_its_slope_for_each_key_further_back() -> None:
    at, heads = lines(picture("alibi", 4, d_model=64, n_heads=8))
    assert at.tolist() == [-3, -2, -1, 0]
    assert len(heads) == 8
    assert heads["head 0"].tolist() == [-1.5, -1.0, -0.5, 0.0]
    assert heads["head 7"].tolist() == [-3 / 256, -2 / 256, -1 / 256, 0.0]


def test_rope_shows_wavelengths_and_the_mean_of_its_cosines() -> None:
    shown = picture("rope", 50, d_head=16, **{"rope.base": 100.0})
    theta = 100.0 ** (-np.arange(8) / 8)
    m, wavelengths = lines(shown)
    assert m.tolist() == [*range(8)]
    np.testing.assert_allclose(wavelengths["rope"], 2 * math.pi / theta, rtol=1e-5)
    distance, products = lines(shown, 1)
    expected = np.cos(distance[:, None] * theta).mean(1)
    np.testing.assert_allclose(products["rope"], expected, atol=1e-5)


def test_yarn_keeps_fast_hands_and_slows_the_others_beside_plain_rope() -> None:
    shown = picture("yarn", 8, d_head=64, **{"yarn.factor": 8.0, "yarn.trained_len": 4096})
    _, wavelengths = lines(shown)
    slower = wavelengths["yarn, s = 8"] / wavelengths["plain rope"]
    np.testing.assert_allclose(1 / slower[[0, 5, 15, 20, 25, 31]], [1, 1, 0.663, 0.327, 0.125, 0.125], atol=6e-4)
    assert set(wavelengths["trained length"]) == {4096}
    _, products = lines(shown, 1)
    assert products["plain rope"][0] == pytest.approx(1)
    assert products["yarn, s = 8"][0] == pytest.approx(1.2079442**2)
    assert list(lines(picture("yarn"))[1]) == ["yarn"]  # for once the trained length, it is plain rope


def test_scaled_rope_is_named_by_its_scaling() -> None:
    _, wavelengths = lines(picture("rope", **{"rope.scaling": "linear", "rope.factor": 4.0}))
    assert list(wavelengths) == ["rope, linear scaling, s = 4", "plain rope"]
    np.testing.assert_allclose(wavelengths["rope, linear scaling, s = 4"], 4 * wavelengths["plain rope"], rtol=1e-5)


def test_t5_shows_one_sided_buckets_before_anything_is_learned() -> None:
    shown = picture("t5", 129)
    assert len(shown.panels) == 1
    at, buckets = lines(shown)
    of = dict(zip(at.tolist(), buckets["bucket"].tolist(), strict=True))
    golden = {-128: 31, -64: 26, -20: 17, -16: 16, -15: 15, -1: 1, 0: 0}
    assert {d: of[d] for d in golden} == golden


@pytest.mark.parametrize("name", ["kerple-log", "kerple-power"])
def test_kerple_starts_at_zero_and_falls_with_distance(name: str) -> None:
    _, heads = lines(picture(name, 20))
    assert len(heads) == 4
    for bias in heads.values():
        assert bias[-1] == 0
        assert (np.diff(bias) > 0).all()


def test_fire_is_drawn_for_the_last_query() -> None:
    sizes = {"preset": "gpt-tiny", "n_heads": 2, "target_vocab": 8, "fire.width": 1, "fire.threshold": 4.0}
    model = GPT(model_config(positions="fire", **sizes))  # type: ignore[arg-type]
    with torch.no_grad():
        for scheme in model.decoder.schemes:  # f(x) = (x, -2 x)
            scheme.inner.weight.fill_(1)
            scheme.outer.weight.copy_(torch.tensor([[1.0], [-2.0]]))
            scheme.inner.bias.zero_()
            scheme.outer.bias.zero_()
    shown = draw_trained_scheme("fire", model, 11)
    at, heads = lines(shown)
    assert at[5] == -5
    assert heads["head 0"][5] == pytest.approx(math.log(1.5) / math.log(2), abs=1e-5)  # psi(5) / psi(10)
    assert heads["head 1"][5] == pytest.approx(-2 * math.log(1.5) / math.log(2), abs=2e-5)
    assert [panel.title.split("(")[1] for panel in shown.panels] == [f"decoder.{i})" for i in range(4)]


def test_shaw_shows_sizes_by_distance_and_dimension() -> None:
    shown = picture("shaw", **{"shaw.clip": 3})
    keys = shown.panels[0]
    assert isinstance(keys, Image)
    assert keys.values.shape == (32, 7)
    assert keys.start == -3
    assert keys.values.min() >= 0
    assert not np.array_equal(keys.values, image(shown, 1))


def test_cope_counts_what_each_query_wants_back_from_itself() -> None:
    shown = picture("cope")
    gates, positions = lines(shown)[1], lines(shown, 1)[1]
    assert gates["counts sentences"].round().tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    assert positions["counts sentences"].round().tolist() == [3, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 0]
    summed = gates["counts every word"][::-1].cumsum()[::-1]
    np.testing.assert_allclose(positions["counts every word"], summed, rtol=1e-5)
    assert lines(picture("cope", **{"cope.positions": 3}), 1)[1]["counts every word"].max() == 2


def test_the_same_picture_twice_and_no_random_number_used() -> None:
    torch.manual_seed(1)
    first, before = image(picture("learned")), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert np.array_equal(image(picture("learned")), first)


# ---- trained models --------------------------------------------------------------------------------------------------


def translator(**settings: object) -> Transformer:
    sizes = {"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 2, "max_len": 32}
    return Transformer(model_config(**{**sizes, "source_vocab": 8, "target_vocab": 8, **settings}))  # type: ignore[arg-type]


def test_a_trained_model_shows_each_of_its_places() -> None:
    model = translator(positions="learned")
    shown = draw_trained_scheme("learned", model, 20)
    assert [panel.title for panel in shown.panels] == [f"added to the embeddings ({s})" for s in ("encoder", "decoder")]
    for panel, stack in enumerate((model.encoder, model.decoder)):
        assert np.array_equal(image(shown, panel), stack.schemes[0].encoding[:20].detach().numpy())


def test_a_bias_shows_both_sides_where_a_query_meets_them() -> None:
    model = translator(positions="t5", cross_positions="kerple-log", encoder_positions="alibi")
    with torch.no_grad():
        model.decoder.schemes[0].weight.fill_(0.5)
    assert lines(draw_trained_scheme("alibi", model, 4))[0].tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert lines(draw_trained_scheme("kerple-log", model, 4))[0].tolist() == [-3, -2, -1, 0, 1, 2, 3]
    decoder = draw_trained_scheme("t5", model, 4)
    assert lines(decoder, 0)[0].tolist() == lines(decoder, 1)[0].tolist() == [-3, -2, -1, 0]
    assert set(lines(decoder, 1)[1]["head 0"]) == {0.5}


def test_what_is_not_learned_is_shown_once() -> None:
    assert len(draw_trained_scheme("rope", translator(positions="rope"), 8).panels) == 2
    assert len(draw_trained_scheme("sinusoidal", translator(), 8).panels) == 1


def test_learned_vectors_of_cope_are_shown_layer_by_layer() -> None:
    model = translator(positions="cope", encoder_positions="rope", **{"cope.positions": 5})
    with torch.no_grad():
        for scheme in model.decoder.schemes:
            scheme.vectors.normal_()
    assert [image(draw_trained_scheme("cope", model, 8), i).shape for i in range(2)] == [(5, 32)] * 2


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(RegardError, match="nothing to draw"):
        picture("none")
    with pytest.raises(RegardError, match=r"'model\.positions' must be one of none, .*, not 'rotary'"):
        picture("rotary")
    for name in ("sinusoidal", "learned", "linear"):
        with pytest.raises(RegardError, match="--length 33 is more than the 32 positions"):
            picture(name, 33, max_len=32)
    with pytest.raises(RegardError, match="no positions 'rope' to draw: it has sinusoidal, none"):
        draw_trained_scheme("rope", translator(), 8)
    with pytest.raises(RegardError, match="no positions 'rope' to draw: it has no scheme at all"):
        draw_trained_scheme(
            "rope",
            make_model(
                preset("rnnsearch-small", d_model=8, **{"recurrent.d_hidden": 8}, source_vocab=9, target_vocab=9)
            ),
            8,
        )


# ---- the drawing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_every_scheme_becomes_a_png_and_numbers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / "there.png"
    shown = picture(name, 12)
    shown.save(path)
    pixels = imread(path)
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels[::3, ::3, 0])) > 20  # more than a blank sheet
    numbers = json.loads(json.dumps(shown.numbers(), allow_nan=False))
    assert numbers["scheme"] == name
    assert len(numbers["panels"]) == len(shown.panels)


def test_every_scheme_has_its_formula() -> None:
    assert all(picture(name, 4).formula for name in DRAWN)


def test_panels_are_drawn_with_labels_titles_and_a_line_a_head() -> None:
    heads = {f"head {h}": np.arange(3.0) * h for h in range(5)}
    code = Image("code", np.array([[-0.5, 0, 0], [0, 1, 0]]), "d", "p", start=-1)
    figure = draw("$x^2$", [Lines("bias", np.arange(3), heads, "distance", "score"), code], columns=2)
    left, right, _colour_bar = figure.axes
    assert figure.get_suptitle() == "$x^2$"
    assert [(a.get_title(), a.get_xlabel(), a.get_ylabel()) for a in (left, right)] == [
        ("bias", "distance", "score"),
        ("code", "d", "p"),
    ]
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(heads)
    assert len({(line.get_color(), line.get_linestyle()) for line in left.lines}) == 5
    drawn = right.images[0]
    assert tuple(drawn.get_extent()) == (-1.5, 1.5, 1.5, -0.5)  # columns -1, 0, 1; the first row on top
    assert drawn.get_clim() == (-1, 1)  # 0 is the middle colour


def test_panels_that_show_the_same_many_lines_share_a_legend() -> None:
    lines = {f"system {i}": np.arange(3.0) * i for i in range(9)}
    panels = [Lines(title, np.arange(3), lines, "x", "y", unordered=True) for title in "ab"]
    figure = draw("", panels, columns=2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)
    assert [axes.get_legend() for axes in figure.axes] == [None, None]
    apart = draw("", [panels[0], Lines("c", np.arange(3), {"another": np.arange(3.0)}, "x", "y")], columns=2)
    assert not apart.legends
    assert apart.axes[0].get_legend() is not None


def test_numbers_are_short_and_carry_their_axes() -> None:
    numbers = Image("t", np.array([[1 / 3, 2.0]], dtype=np.float32), "x", "y", start=-1).numbers()
    assert numbers == {"title": "t", "rows": "y", "columns": "x", "at": [-1, 0], "values": [[0.333333, 2.0]]}
    shown = Lines("t", np.arange(2), {"a": np.array([1e-9, 2])}, "x", "y", ticks=("one", "two")).numbers()
    assert shown == {"title": "t", "x": "x", "y": "y", "at": ["one", "two"], "lines": {"a": [1e-9, 2.0]}}


# ---- the page --------------------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "lectures" / "positions.md").read_text(encoding="utf-8")
PLACES = {"encoder": "encoders", "cross": "cross-attention"}


def test_the_page_draws_every_scheme_and_names_only_settings_that_exist() -> None:
    for name in DRAWN:
        assert re.search(rf"regard look positions {name}\b", PAGE)
    named = set(re.findall(r"\bmodel\.\w+(?:\.\w+)?", PAGE))
    known = {name for name, _, _ in every_setting()}
    assert named <= known | {name.rsplit(".", 1)[0] for name in known}
    tables = ("rope.base", "rope.factor", "t5.buckets", "shaw.clip", "cope.positions", "fire.threshold")
    assert {f"model.{name}" for name in tables} <= named


@pytest.mark.parametrize("name", SCHEMES)
def test_the_page_says_where_each_scheme_is_refused(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]]
    refused = {place for place in PLACES if name not in schemes_for(config(), place)}
    assert {place for place, words in PLACES.items() if words in row.split("|")[4]} == refused


def test_a_notebook_shows_the_picture_of_a_scheme() -> None:
    assert picture("rope", 8)._repr_png_()[:4] == b"\x89PNG"


def test_sizes_that_were_left_out_are_filled_in() -> None:
    x, curves = lines(draw_untrained_scheme("rope", preset("gpt-tiny", positions="rope"), 8))
    assert len(x) == GPT.presets["gpt-tiny"]["d_model"] // GPT.presets["gpt-tiny"]["n_heads"] // 2  # pairs of a head
    assert all(len(curve) == len(x) for curve in curves.values())
