"""The attention tab in a real browser, on documents whose numbers are known."""

from __future__ import annotations

import csv
import io
import re
import struct
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import (
    DARK,
    LIGHT,
    Sample,
    act,
    choose,
    click,
    colour,
    downloaded,
    hovered,
    long_text,
    press,
    rgb,
    strip,
    translation,
)

pytest_plugins = "chromium"
Open = Callable[..., Any]
CROSS = "decoder.1.cross"  # where a translation opens


def title(page: Any) -> str:
    return page.inner_text("main .card h2 >> nth=0")


def fills(page: Any) -> np.ndarray:
    """(rows, columns, 3), the colours of all cells of an SVG."""
    found = page.eval_on_selector_all(
        "main .cells rect", "all => all.map(one => [one.dataset.cell, one.getAttribute('fill')])"
    )
    places = {tuple(map(int, where.split(","))): rgb(fill) for where, fill in found}
    rows, columns = (max(place[i] for place in places) + 1 for i in (0, 1))
    return np.array([[places.get((r, c), [-1] * 3) for c in range(columns)] for r in range(rows)])


def expected(shares: np.ndarray, stops: tuple[str, ...] = LIGHT) -> np.ndarray:
    return np.array([[colour(share, stops) for share in row] for row in shares])


def numbers(text: bytes) -> tuple[list[str], list[str], np.ndarray]:
    """Columns, rows and values of a matrix as CSV."""
    head, *rows = csv.reader(io.StringIO(text.decode("utf-8")))
    return head[1:], [row[0] for row in rows], np.array([[float(x) for x in row[1:]] for row in rows])


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_every_cell_has_the_colour_of_its_weight(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    assert title(page) == f"{CROSS}, head 0"
    np.testing.assert_allclose(fills(page), expected(sample.weights[CROSS][0]), atol=1.1)


def test_hovering_a_cell_says_its_weight_its_tokens_and_the_sum_of_its_row(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    for r, c in ((0, 0), (2, 3), (4, 5)):
        assert hovered(page, r, c) == f"{sample.weights[CROSS][0, r, c]:.6f}"
    said = page.inner_text("#tip")
    assert "▁fiel" in said
    assert "<eos>" in said
    assert "row sum 1.000000" in said
    assert page.inner_text("main .readout").endswith("wrote .")


def test_axes_say_who_looks_at_whom(open_page: Open) -> None:
    page = open_page(translation().html())
    labels = page.eval_on_selector_all("main .heat .axis text", "all => all.map(one => one.textContent)")
    assert "key: source (en) →" in labels
    assert labels[:3] == ["query:", "target (de)", "↓"]
    assert [label for label in labels if label in ("▁the", "▁app", "le", "▁fell", ".", "<eos>")] == [
        "▁the", "▁app", "le", "▁fell", ".", "<eos>"
    ]  # fmt: skip
    assert "▁Apf → el" in labels  # the step that read one token wrote the next


def test_what_may_not_be_seen_is_no_weight_of_zero(open_page: Open) -> None:
    page = open_page(translation().html(), "kind=decoder")
    holes = page.eval_on_selector_all("main [data-masked]", "all => all.map(one => one.dataset.masked)")
    assert sorted(holes) == sorted(f"{r},{c}" for r in range(5) for c in range(r + 1, 5))
    assert (fills(page)[0, 1:] == -1).all()


def test_the_scale_is_fixed_or_ends_at_the_maximum_and_says_which(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    legend = "main .legend >> nth=0"
    assert "fixed from 0 to 1" in page.inner_text(legend)
    act(page, lambda: page.select_option('main [data-key="scale"]', "max"))
    shares = sample.weights[CROSS][0] / sample.weights[CROSS][0].max()
    np.testing.assert_allclose(fills(page), expected(shares), atol=1.1)
    assert "to the maximum" in page.inner_text(legend)
    assert f"{sample.weights[CROSS][0].max():.3g}" in page.inner_text(legend)


def test_a_logarithmic_scale_tells_small_weights_apart(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html(), "scale=log")
    shares = 1 + np.log10(sample.weights[CROSS][0]) / 4
    np.testing.assert_allclose(fills(page), expected(shares), atol=1.1)
    assert "logarithmic from 0.0001 to 1" in page.inner_text("main .legend >> nth=0")


def test_dark_colours_come_from_the_system_or_from_the_switch(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html(), color_scheme="dark")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 22, 26)"
    np.testing.assert_allclose(fills(page), expected(sample.weights[CROSS][0], DARK), atol=1.1)
    click(page, '[data-key="theme"]')
    assert page.evaluate(background) == "rgb(247, 247, 245)"
    np.testing.assert_allclose(fills(page), expected(sample.weights[CROSS][0]), atol=1.1)
    press(page, "d")
    assert page.evaluate(background) == "rgb(20, 22, 26)"


@pytest.mark.parametrize("how", [{"levels": 255}, {"levels": 15}, {"half": True}])
def test_rounded_weights_are_shown_with_what_is_known_of_them(open_page: Open, how: dict[str, Any]) -> None:
    sample = translation(**how)
    page = open_page(sample.html(), "head=1")
    weights = sample.weights[CROSS][1]
    for r, c in ((0, 0), (2, 3), (4, 5)):
        said, digits = hovered(page, r, c).split(" ± ")
        most = weights[r].max()
        error = (
            np.sqrt(weights[r, c] * most) / how["levels"] + most / (4 * how["levels"] ** 2)
            if "levels" in how
            else weights[r, c] * 2**-11
        )
        assert abs(float(said) - weights[r, c]) <= error + 0.5 * 10 ** -len(said.split(".")[1])
        assert float(digits) == pytest.approx(error, rel=0.4)


def with_weights(weights: np.ndarray, **how: Any) -> Sample:
    """A translation whose last layer has these weights (2, 5, 6)."""
    sample = translation(**how)
    sample.weights[CROSS] = weights
    sample.parts["attention"][-1]["weights"] = sample.stored(weights, **how)
    return sample


@pytest.mark.parametrize("state", ["head=mean", "sinks=renormalize", "head=mean&sinks=renormalize&words=1"])
def test_what_is_worked_out_of_rounded_weights_is_no_further_off_than_it_says(open_page: Open, state: str) -> None:
    weights = np.random.default_rng(3).dirichlet([0.2] * 6, (2, 5)).astype(np.float32)
    exact, rounded = (open_page(with_weights(weights, **how).html(), state) for how in ({}, {"levels": 3}))
    shape = numbers(downloaded(exact, "csv"))[2].shape
    true, shown = (numbers(downloaded(page, "csv"))[2] for page in (exact, rounded))
    assert np.abs(true - shown).max() > 0.02  # it is really rounded
    for r, c in np.ndindex(*shape):
        digits = float(hovered(rounded, r, c).split(" ± ")[1])
        assert abs(true[r, c] - shown[r, c]) <= digits * 1.5  # one digit is shown: 1.49 is 1


def test_a_head_that_is_switched_off_looks_nowhere(open_page: Open) -> None:
    weights = translation().weights[CROSS].copy()
    weights[1] = 0
    page = open_page(with_weights(weights).html(), "head=1&scale=max")
    np.testing.assert_array_equal(fills(page), expected(np.zeros((5, 6))))
    assert "sum to 0: this head is switched off" in page.inner_text("main")
    press(page, "v")
    assert page.locator("main .bipartite").count() == 1
    assert page.locator("main [data-link]").count() == 0
    press(page, "ArrowLeft")
    assert "Its weights sum to 1." in page.inner_text("main")


def test_what_rows_sum_to_is_said_as_it_is(open_page: Open) -> None:
    weights = translation().weights[CROSS].copy()
    weights[0, 2] = 0
    weights[0, 3] /= 4
    page = open_page(with_weights(weights).html())
    assert "Its weights sum to 0 … 1." in page.inner_text("main")
    press(page, "h")
    sums = weights[0, :, :4].sum(1)
    assert f"Its weights sum to 0 … {sums.max():.3g}." in page.inner_text("main")


def test_a_layer_says_itself_what_may_be_seen(open_page: Open) -> None:
    sample = translation()
    first, last = [0, 0, 1, 2, 5], [5, 1, 3, 4, 4]  # the last query may see nothing
    sample.parts["attention"][-1]["seen"] = {"first": first, "last": last, "forbidden": [[0, 2], [2, 1]]}
    page = open_page(sample.html())
    seen = np.array([[first[r] <= c <= last[r] for c in range(6)] for r in range(5)])
    seen[[0, 2], [2, 1]] = False
    read = "all => all.map(one => one.dataset.masked)"
    holes = {f"{r},{c}" for r, c in np.argwhere(~seen)}
    assert set(page.eval_on_selector_all("main [data-masked]", read)) == holes
    assert "Tokens it may not see have no colour" in page.inner_text("main")
    page.hover('main [data-masked="0,2"]', force=True)
    assert page.inner_text("#tip .weight") == "masked"
    choose(page, "words")  # hidden is what no piece may see of any
    merged = {
        f"{r},{c}" for r, q in enumerate(WORDS[0]) for c, k in enumerate(WORDS[1]) if not seen[np.ix_(q, k)].any()
    }
    assert set(page.eval_on_selector_all("main [data-masked]", read)) == merged
    press(page, "ArrowLeft")
    choose(page, "layer 0")
    assert page.locator("main [data-masked]").count() == 0


def test_heads_may_see_other_tokens_than_one_another(open_page: Open) -> None:
    sample = translation()
    heads = [{"first": [0] * 5, "last": [last] * 5, "forbidden": [[1, 0]]} for last in (2, 4)]
    sample.parts["attention"][-1]["seen"] = {**heads[1], "heads": heads}
    page = open_page(sample.html())
    for key, hidden in (("head 0", 16), ("head 1", 6), ("head -1", 6)):
        if key != "head 0":
            choose(page, key)
        assert page.locator("main [data-masked]").count() == hidden


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_kind_layer_and_head_are_chosen_by_mouse(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    for key, name, head in (
        ("head 1", CROSS, 1),
        ("layer 0", "decoder.0.cross", 1),
        ("kind encoder", "encoder.0.self", 1),
    ):
        choose(page, key)
        assert title(page) == f"{name}, head {head}"
        assert hovered(page, 1, 0) == f"{sample.weights[name][head, 1, 0]:.6f}"
    choose(page, "head -1")
    assert hovered(page, 1, 0) == f"{sample.weights['encoder.0.self'][:, 1, 0].mean():.6f}"


def test_kind_layer_and_head_are_chosen_by_keyboard(open_page: Open) -> None:
    page = open_page(translation().html())
    steps = {"ArrowRight": f"{CROSS}, head 1", "[": "decoder.0.cross, head 1", "ArrowLeft": "decoder.0.cross, head 0",
             "]": f"{CROSS}, head 0", "t": "encoder.1.self, head 0"}  # fmt: skip
    for key, said in steps.items():
        press(page, key)
        assert title(page) == said
    press(page, "ArrowLeft")
    assert title(page).endswith("mean of heads")


def test_a_small_picture_of_a_head_chooses_it_and_has_its_colours(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html(), "show=grid")
    page.wait_for_selector('.thumb[aria-label="layer 0, head 1"] canvas[data-drawn]')
    canvas = page.query_selector('.thumb[aria-label="layer 0, head 1"] canvas')
    width, height = canvas.evaluate("one => [one.width, one.height]")
    weights = sample.weights["decoder.0.cross"][1]
    for r, c in ((0, 0), (3, 4), (4, 5)):
        x, y = int((c + 0.5) * width / 6), int((r + 0.5) * height / 5)
        pixel = canvas.evaluate("(one, [x, y]) => [...one.getContext('2d').getImageData(x, y, 1, 1).data]", [x, y])
        np.testing.assert_allclose(pixel[:3], colour(weights[r, c]), atol=1.5)
    click(page, '.thumb[aria-label="layer 0, head 1"]')
    assert title(page) == "decoder.0.cross, head 1"


def test_cells_are_read_by_arrow_keys_and_pinned_by_enter(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    page.focus("main .cells")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert f"{sample.weights[CROSS][0, 1, 1]:.6f}" in page.inner_text("main .readout")
    press(page, "Enter")
    assert page.evaluate("document.activeElement.className") == "cells"  # the focus stays
    assert "▁der" in page.inner_text("main .bars h3")
    assert page.locator("main .cells .pin").count() == 1


def cursor(page: Any) -> list[float]:
    """Where the cursor's middle is, in cells down and across."""
    box, cells = (page.locator(f"main {name}").bounding_box() for name in (".cursor", ".cells"))
    size = box["width"]
    return [round((box[axis] - cells[axis]) / size) for axis in ("y", "x")]


def test_the_cursor_stays_where_it_is_when_something_is_pinned(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    page.focus("main .cells")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    press(page, "Enter")
    assert cursor(page) == [1, 1]
    page.keyboard.press("ArrowDown")
    assert f"{sample.weights[CROSS][0, 2, 1]:.6f}" in page.inner_text("main .readout")
    press(page, "Shift+K")
    assert page.locator("main .cells .pin").count() == 2
    assert "▁app" in page.inner_text("main .bars >> nth=1 >> h3")
    assert title(page) == f"{CROSS}, head 0"  # K means a layer only elsewhere


def test_the_cursor_stays_in_sight_when_it_moves_by_keys(open_page: Open) -> None:
    page = open_page(long_text(70, 1, 1).html(), "zoom=8")
    page.focus("main .cells")
    page.keyboard.press("ArrowRight")

    def inside() -> bool:
        box, heat, top, left = (
            page.locator(f"main {name}").bounding_box() for name in (".cursor", ".heat", ".heat-top", ".heat-left")
        )
        across = left["x"] + left["width"] - 1 <= box["x"] <= heat["x"] + heat["width"] - box["width"] + 1
        down = top["y"] + top["height"] - 1 <= box["y"] <= heat["y"] + heat["height"] - box["height"] + 1
        return across and down

    for key, times in (("ArrowRight", 60), ("ArrowDown", 60), ("ArrowLeft", 50), ("ArrowUp", 50)):
        for _ in range(times):
            page.keyboard.press(key)
        assert inside()
    for key in ("ArrowRight", "ArrowDown") * 30:
        page.keyboard.press(key)
    press(page, "Enter")
    assert inside()


def test_tokens_beside_lines_are_reached_by_the_keyboard(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html(), "show=lines")
    page.focus('main .bipartite text[data-c="3"]')
    read = "all => all.map(one => one.dataset.link)"
    wanted = {f"{r},3" for r in np.flatnonzero(sample.weights[CROSS][0, :, 3] >= 0.01)}
    assert set(page.eval_on_selector_all("main [data-link]", read)) == wanted
    press(page, "Enter")
    assert "Who looks at ▁fell" in page.inner_text("main .bars h3")
    assert page.evaluate("document.activeElement.dataset.c") == "3"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.c") == "4"


def test_a_link_opens_the_same_view(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    choose(page, "head 1")
    click(page, 'main text[data-r="2"]')
    press(page, "w")
    state = page.evaluate("location.hash.slice(1)")
    again = open_page(sample.html(), state)
    assert title(again) == f"{CROSS}, head 1"
    assert again.inner_text("main .bars h3") == page.inner_text("main .bars h3")
    np.testing.assert_array_equal(fills(again), fills(page))


@pytest.mark.parametrize(
    "state", ["layer=99&head=77&queries=4,400,x&kind=nothing&tab=none&sinks=maybe&view=5", "%%%&=&&"]
)
def test_a_link_that_means_nothing_here_opens_what_there_is(open_page: Open, state: str) -> None:
    page = open_page(translation().html(), state)
    assert re.fullmatch(r"(encoder\.1\.self|decoder\.1\.cross), head [01]", title(page))


# ---- pinned tokens ---------------------------------------------------------------------------------------------------


def bars(page: Any) -> list[float]:
    return [float(said) for said in page.locator("main .bars .bar-label").all_inner_texts()]


def test_a_clicked_token_shows_its_row_and_several_are_averaged(open_page: Open) -> None:
    sample = translation()
    weights = sample.weights[CROSS][0]
    page = open_page(sample.html())
    click(page, 'main text[data-r="2"]')
    np.testing.assert_allclose(bars(page), weights[2], atol=6e-5)
    click(page, 'main text[data-r="3"]')
    np.testing.assert_allclose(bars(page), weights[2:4].mean(0), atol=6e-5)
    assert "mean of 2 queries" in page.inner_text("main .bars h3")
    click(page, 'main text[data-r="2"]')
    np.testing.assert_allclose(bars(page), weights[3], atol=6e-5)
    press(page, "Escape")
    assert bars(page) == []


def test_a_clicked_key_shows_who_looks_at_it_and_several_are_summed(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    click(page, 'main text[data-c="1"]')
    click(page, 'main text[data-c="2"]')
    np.testing.assert_allclose(bars(page), sample.weights[CROSS][0][:, 1:3].sum(1), atol=6e-5)
    assert "sum of 2 keys" in page.inner_text("main .bars h3")


def test_lines_are_as_strong_as_their_weights_and_pinned_ones_alone(open_page: Open) -> None:
    sample = translation()
    weights = sample.weights[CROSS][0]
    page = open_page(sample.html(), "show=lines")
    read = "all => all.map(one => [one.dataset.link, Number(one.getAttribute('stroke-opacity'))])"
    drawn = dict(page.eval_on_selector_all("main [data-link]", read))
    assert set(drawn) == {f"{r},{c}" for r, c in np.argwhere(weights >= 0.01)}
    for where, opacity in drawn.items():
        r, c = map(int, where.split(","))
        assert opacity == pytest.approx(0.08 + 0.87 * weights[r, c], abs=1e-3)
    act(page, lambda: page.select_option('main [data-key="scale"]', "max"))
    drawn = dict(page.eval_on_selector_all("main [data-link]", read))
    assert set(drawn) == {f"{r},{c}" for r, c in np.argwhere(weights >= 0.01 * weights.max())}
    assert max(drawn.values()) == pytest.approx(0.95)
    click(page, 'main .bipartite text[data-r="2"]')
    links = page.eval_on_selector_all("main [data-link]", "all => all.map(one => one.dataset.link)")
    page.mouse.move(0, 0)
    assert {link.split(",")[0] for link in links} == {"2"}


# ---- words and sinks -------------------------------------------------------------------------------------------------

WORDS = (([0], [1], [2, 3], [4]), ([0], [1, 2], [3], [4], [5]))  # places of queries and keys


def by_words(weights: np.ndarray) -> np.ndarray:
    return np.array([[weights[np.ix_(q, k)].sum(1).mean() for k in WORDS[1]] for q in WORDS[0]])


def test_pieces_become_words_and_rows_still_sum_to_one(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    choose(page, "words")
    merged = by_words(sample.weights[CROSS][0].astype(np.float64))
    np.testing.assert_allclose(merged.sum(1), 1, atol=1e-6)
    columns, rows, values = numbers(downloaded(page, "csv"))
    assert (columns, rows) == (["the", "apple", "fell", ".", "<eos>"], ["<sos>", "der", "Apfel", "fiel"])
    np.testing.assert_allclose(values, merged, atol=1e-6)
    assert float(hovered(page, 2, 1)) == pytest.approx(merged[2, 1], abs=1.1e-6)
    assert "row sum 1.000000" in page.inner_text("#tip")
    assert "summed over keys, averaged over queries" in page.inner_text("main")


def test_sinks_are_hidden_with_or_without_renormalising_and_it_says_which(open_page: Open) -> None:
    sample = translation()
    left = sample.weights[CROSS][0][:, :4].astype(np.float64)
    page = open_page(sample.html())
    press(page, "h")
    columns, _, values = numbers(downloaded(page, "csv"))
    assert columns == ["▁the", "▁app", "le", "▁fell"]
    np.testing.assert_allclose(values, left, atol=1e-7)
    assert "2 likely sinks" in page.inner_text("main")
    assert "nothing is renormalised: rows sum to less than 1" in page.inner_text("main")
    act(page, lambda: page.select_option('main [data-key="sinks"]', "renormalize"))
    np.testing.assert_allclose(numbers(downloaded(page, "csv"))[2], left / left.sum(1, keepdims=True), atol=1e-6)
    assert "each row is renormalised" in page.inner_text("main")


def test_a_row_that_only_looked_at_sinks_stays_empty(open_page: Open) -> None:
    sample = translation()
    weights = np.zeros((2, 5, 6), np.float32)
    weights[:, :, 5] = 1
    sample.parts["attention"][-1]["weights"] = sample.document.add(weights)
    page = open_page(sample.html(), "sinks=renormalize")
    assert hovered(page, 2, 0) == "0.000000"


@pytest.mark.parametrize("show", ["heat", "lines", "grid"])
def test_where_all_keys_are_hidden_the_page_says_so(open_page: Open, show: str) -> None:
    sample = translation()
    sample.strips["source"] = strip("source", ["<a>", "<b>", "<c>", "<d>", ".", "<eos>"])
    page = open_page(sample.html(), f"show={show}&kind=encoder")
    press(page, "h")
    page.wait_for_timeout(200)  # small pictures are drawn a little later
    assert show == "grid" or "All keys are hidden" in page.inner_text("main")
    press(page, "ArrowRight")
    press(page, "h")
    press(page, "h")
    assert title(page).startswith("encoder")


# ---- leaving the page ------------------------------------------------------------------------------------------------


def test_csv_has_the_matrix_that_is_shown(open_page: Open) -> None:
    sample = translation()
    columns, rows, values = numbers(downloaded(open_page(sample.html()), "csv"))
    assert columns == sample.strips["source"]["pieces"]
    assert rows == sample.strips["target"]["pieces"]
    np.testing.assert_allclose(values, sample.weights[CROSS][0], rtol=1e-6)


def test_svg_stands_alone_and_has_the_colours_and_labels(open_page: Open) -> None:
    sample = translation()
    root = ElementTree.fromstring(downloaded(open_page(sample.html()), "svg"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    boxes = {box.get("data-cell"): box.get("fill") for box in root.iter(f"{space}rect") if box.get("data-cell")}
    assert len(boxes) == 30
    np.testing.assert_allclose(rgb(boxes["2,3"]), colour(sample.weights[CROSS][0, 2, 3]), atol=1.1)
    said = {"".join(text.itertext()) for text in root.iter(f"{space}text")}
    assert {f"{CROSS}, head 0", "key: source (en) →", "▁the", "▁Apf → el", "weight, fixed from 0 to 1"} <= said
    assert "class=" not in ElementTree.tostring(root, encoding="unicode")  # no style sheet goes with it


def image(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_png_is_the_same_picture_twice_as_large(open_page: Open) -> None:
    sample = translation()
    page = open_page(sample.html())
    root = ElementTree.fromstring(downloaded(page, "svg"))
    png = downloaded(page, "png")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    size = struct.unpack(">II", png[16:24])
    assert size == tuple(round(2 * float(root.get(side))) for side in ("width", "height"))
    box = next(one for one in root.iter() if one.get("data-cell") == "4,5")
    spot = next(one for one in root.iter() if one.get("data-cell") == "0,0")
    (x0, y0) = page.evaluate(  # where the cells begin, from the picture itself
        "svg => { const root = new DOMParser().parseFromString(svg, 'image/svg+xml').documentElement;"
        " document.body.append(root); const cell = root.querySelector('[data-cell]').getBoundingClientRect();"
        " const whole = root.getBoundingClientRect(); root.remove(); return [cell.x - whole.x, cell.y - whole.y]; }",
        ElementTree.tostring(root, encoding="unicode"),
    )
    pixels = image(png)
    for one in (box, spot):
        x, y = (round(2 * (start + float(one.get(axis)) + 3)) for start, axis in ((x0, "x"), (y0, "y")))
        np.testing.assert_allclose(pixels[y, x], rgb(one.get("fill")), atol=2)


@pytest.mark.parametrize("show", ["lines", "grid"])
def test_lines_and_all_heads_can_be_saved_too(open_page: Open, show: str) -> None:
    page = open_page(translation().html(), f"show={show}")
    root = ElementTree.fromstring(downloaded(page, "svg"))
    inside = {"lines": "path", "grid": "image"}[show]
    assert len(list(root.iter(f"{{http://www.w3.org/2000/svg}}{inside}"))) >= 4
    pixels = image(downloaded(page, "png"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5


# ---- long texts ------------------------------------------------------------------------------------------------------


def test_a_long_text_is_a_canvas_with_a_pixel_a_cell(open_page: Open) -> None:
    sample = long_text(70, 1, 2, "decoder")
    page = open_page(sample.html(), "scale=one")
    weights = sample.weights["decoder.0.self"][0]
    pixels = page.eval_on_selector(
        "main .cells canvas", "one => [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data]"
    )
    drawn = np.array(pixels).reshape(70, 70, 4)
    seen = np.tri(70) > 0
    assert (drawn[..., 3] == 255 * seen).all()
    step = weights.max() / 255
    rounded = np.rint(weights / step) * step
    np.testing.assert_allclose(drawn[seen][:, :3], [colour(share) for share in rounded[seen]], atol=2)


def test_a_cell_of_a_canvas_is_read_and_its_row_pinned(open_page: Open) -> None:
    sample = long_text(70, 1, 2)
    page = open_page(sample.html())
    box = page.locator("main .cells").bounding_box()
    cell = box["width"] / 70
    spot = (box["x"] + 30.5 * cell, box["y"] + 20.5 * cell)
    page.mouse.move(*spot)
    weights = sample.weights["encoder.0.self"][0]
    said = page.inner_text("#tip .weight").split(" ± ")[0]
    assert float(said) == pytest.approx(weights[20, 30], abs=float(weights.max()) / 510 + 6e-4)
    assert "▁w20" in page.inner_text("#tip")
    assert "▁w30" in page.inner_text("#tip")
    act(page, lambda: page.mouse.click(*spot))
    assert "▁w20" in page.inner_text("main .bars h3")
    assert "The 40 largest of 70" in page.inner_text("main .bars")


def test_zooming_makes_cells_larger_and_keeps_labels_in_sight(open_page: Open) -> None:
    page = open_page(long_text(70, 1, 1).html())
    before = page.locator("main .cells").bounding_box()["width"]
    choose(page, "zoom 4")
    assert page.locator("main .cells").bounding_box()["width"] == pytest.approx(4 * before)
    page.evaluate("document.querySelector('main .heat').scrollTo(400, 400)")
    label = page.locator("main .heat-left").bounding_box()
    box = page.locator("main .heat").bounding_box()
    assert label["x"] == pytest.approx(box["x"] + 2, abs=3)


def test_pictures_of_a_canvas_are_saved_sharp(open_page: Open) -> None:
    sample = long_text(70, 1, 1)
    page = open_page(sample.html(), "scale=one")
    root = ElementTree.fromstring(downloaded(page, "svg"))
    (inside,) = root.iter("{http://www.w3.org/2000/svg}image")
    assert inside.get("href").startswith("data:image/png;base64,")
    pixels = image(downloaded(page, "png"))
    weights = sample.weights["encoder.0.self"][0]
    there = {tuple(pixel) for pixel in pixels.reshape(-1, 3)[::7].tolist()}
    wanted = np.array([colour(share) for share in weights[weights > 0.25]])
    assert len(wanted) > 30
    assert all(np.abs(np.array([*there]) - one).max(1).min() <= 3 for one in wanted)


def test_512_tokens_of_six_layers_and_eight_heads_open_and_react(open_page: Open) -> None:
    page = open_page(long_text().html())
    assert page.evaluate("performance.now()") < 10_000  # a benchmark says how fast; this only says that it works
    press(page, "ArrowRight")
    press(page, "[")
    assert title(page) == "encoder.4.self, head 1"
    page.wait_for_selector('.thumb[aria-label="layer 5, head 7"] canvas[data-drawn]')


# ---- other windows, other texts --------------------------------------------------------------------------------------


def test_a_narrow_window_scrolls_nothing_sideways_but_pictures(open_page: Open) -> None:
    for tab in ("attention", "chain", "predictions"):
        page = open_page(translation().html(), f"tab={tab}", viewport={"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


HOSTILE = [
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "\"'&amp;<b>", "▁שלום", "مرحبا", "👩‍🚀", "null",
    "undefined", "", " ", "\n", "\t", "\x00", "a\u202eb", "${1+1}", "%s", "__proto__", "constructor", "▁", "\u200b",
]  # fmt: skip


def test_hostile_tokens_are_text_and_none_is_invisible(open_page: Open) -> None:
    sample = translation()
    sample.strips["source"] = strip("<i>source</i>", HOSTILE)
    sample.parts["attention"].clear()
    sample.attend("decoder.0.cross", "cross", "target", "source")
    more = {"input": "<b>in</b>", "output": "a\u202eb", "title": "<u>title</u>", "notes": ["<s>note</s>"]}
    page = open_page(sample.html(model={"name": "<em>x</em>", "<th>": {"<td>": "<p>"}}, **more))
    click(page, 'main text[data-c="0"]')
    for c in range(1, len(HOSTILE)):
        click(page, f'main text[data-c="{c}"]')
    shown = page.eval_on_selector_all("main .heat text[data-c]", "all => all.map(one => one.textContent)")
    assert shown[0] == "<script>alert(1)<…"
    assert [shown[i] for i in (2, 3, 5, 6, 7)] == [HOSTILE[i] for i in (2, 3, 5, 6, 7)]
    assert shown[8:14] == ["∅", "␣", "⏎", "⇥", "\\u0000", "a\\u202eb"]
    assert shown[19] == "\\u200b"
    assert HOSTILE[0] in page.inner_text("main .bars h3")
    assert page.eval_on_selector_all("b, i, u, s, em, img, main script, header p", "all => all.length") == 0
    assert page.inner_text("h1") == "<em>x</em>"
    assert page.eval_on_selector_all("bdi[dir=auto]", "all => all.length") > len(HOSTILE)


def test_hostile_tokens_are_fields_of_a_csv(open_page: Open) -> None:
    sample = translation()
    sample.strips["source"] = strip("source", ['a"b', "c,d", "e\nf", "g", "=1+1", "<eos>"])
    columns, _, values = numbers(downloaded(open_page(sample.html()), "csv"))
    assert columns == ['a"b', "c,d", "e⏎f", "g", "=1+1", "<eos>"]
    assert values.shape == (5, 6)


def test_controls_have_names_and_are_reached_by_the_keyboard(open_page: Open) -> None:
    page = open_page(translation().html())
    unnamed = page.eval_on_selector_all(
        "button, select, [role=img], [role=group], canvas[role]",
        "all => all.filter(one => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length)).length",
    )
    assert unnamed == 0
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.key"))
    assert {
        "tab attention",
        "theme",
        "kind cross",
        "layer 0",
        "head 1",
        "show lines",
        "sinks",
        "scale",
        "cells",
    } <= reached
