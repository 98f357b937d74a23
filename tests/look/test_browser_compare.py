"""Two views in one page, in a real browser."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from browser import SIGNED, Sample, act, choose, click, colour, downloaded, hovered, press, rgb, translation

from regard.look.page.html_page import show
from regard.model_folder import ModelPackage

pytest_plugins = "chromium"
Open = Callable[..., Any]
CROSS = "decoder.1.cross"


def pair(**changes: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """A page with two documents of the same tokens, and the weights of both where it opens."""
    first, second = translation(0), translation(1)
    second.document = first.document  # one page, one list of arrays
    second.parts.clear()
    second.rng = np.random.default_rng(5)
    fill(second)
    known = {"model": {"name": "other"}, "output": "der Apfel stürzte .", "changes": ["zero decoder.1.cross:0"]}
    html = first.html(second.view(**{**known, **changes}), output="der Apfel fiel .")
    return html, first.weights[CROSS], second.weights[CROSS]


def fill(sample: Sample) -> None:
    for layer in range(2):
        sample.attend(f"encoder.{layer}.self", "encoder", "source", "source")
        sample.attend(f"decoder.{layer}.self", "decoder", "target", "target")
        sample.attend(f"decoder.{layer}.cross", "cross", "target", "source")


def fills(page: Any, card: int) -> np.ndarray:
    found = page.eval_on_selector_all(
        f"main .card:has(.cells) >> nth={card} >> .cells rect", "all => all.map(one => one.getAttribute('fill'))"
    )
    return np.array([rgb(fill) for fill in found]).reshape(5, 6, 3)


def expected(shares: np.ndarray, *stops: Any) -> np.ndarray:
    return np.array([[colour(share, *stops) for share in row] for row in shares])


def test_both_are_drawn_on_one_scale_and_their_difference_in_two_colours(open_page: Open) -> None:
    html, a, b = pair()
    page = open_page(html, "tab=compare")
    np.testing.assert_allclose(fills(page, 0), expected(a[0]), atol=1.1)
    np.testing.assert_allclose(fills(page, 1), expected(b[0]), atol=1.1)
    np.testing.assert_allclose(fills(page, 2), expected(0.5 + (b[0] - a[0]) / 2, SIGNED), atol=1.1)
    act(page, lambda: page.select_option('main [data-key="scale"]', "max"))
    most = max(a[0].max(), b[0].max())
    np.testing.assert_allclose(fills(page, 0), expected(a[0] / most), atol=1.1)
    np.testing.assert_allclose(fills(page, 1), expected(b[0] / most), atol=1.1)
    end = np.abs(b[0] - a[0]).max()
    np.testing.assert_allclose(fills(page, 2), expected(0.5 + (b[0] - a[0]) / end / 2, SIGNED), atol=1.1)
    assert "B minus A" in page.inner_text("main .card:has(.cells) >> nth=2")


def test_the_largest_differences_are_listed_and_pinned_by_a_click(open_page: Open) -> None:
    html, a, b = pair()
    page = open_page(html, "tab=compare&head=1")
    rows = page.eval_on_selector_all(
        "main .largest tbody tr", "all => all.map(row => [...row.children].map(cell => cell.innerText))"
    )
    difference = (b[1] - a[1]).ravel()
    order = np.argsort(-np.abs(difference), kind="stable")[: len(rows)]
    assert len(rows) == 12
    for row, i in zip(rows, order, strict=True):
        values = [float(text.replace("−", "-")) for text in row[1:]]
        np.testing.assert_allclose(values, [a[1].ravel()[i], b[1].ravel()[i], difference[i]], atol=6e-5)
    click(page, "main .largest tbody tr >> nth=0")
    assert page.evaluate("location.hash").count("=") >= 4
    assert page.locator("main .card:has(.cells) >> nth=2 >> .pin").count() == 2


def test_the_largest_differences_are_reached_by_the_keyboard(open_page: Open) -> None:
    page = open_page(pair()[0], "tab=compare")
    page.focus("main .largest tbody tr >> nth=0")
    page.keyboard.press("Tab")
    press(page, "Enter")
    assert page.locator("main .card:has(.cells) >> nth=2 >> .pin").count() == 2
    assert page.evaluate("document.activeElement.dataset.key") == "largest 1"


def test_hovering_a_difference_says_both_numbers(open_page: Open) -> None:
    html, a, b = pair()
    page = open_page(html, "tab=compare")
    page.hover('main .card:has(.cells) >> nth=2 >> [data-cell="3,2"]', force=True)
    difference, *_, first, second = page.inner_text("#tip").replace("−", "-").split("\n")
    assert difference == f"{b[0, 3, 2] - a[0, 3, 2]:.6f}"
    assert (first, second) == (f"A {a[0, 3, 2]:.6f}", f"B {b[0, 3, 2]:.6f}")


def test_the_difference_is_saved_as_numbers(open_page: Open) -> None:
    html, a, b = pair()
    page = open_page(html, "tab=compare")
    with page.expect_download() as download:
        page.click('main .card:has(.cells) >> nth=2 >> [data-export="csv"]')
    _, *rows = csv.reader(io.StringIO(download.value.path().read_text(encoding="utf-8")))
    np.testing.assert_allclose(np.array([row[1:] for row in rows], float), b[0] - a[0], atol=1e-7)
    assert downloaded(page, "png")[1:4] == b"PNG"


def test_words_that_only_one_of_them_wrote_are_marked(open_page: Open) -> None:
    page = open_page(pair()[0], "tab=compare")
    assert page.locator("main .output >> nth=0 >> .changed").all_inner_texts() == ["fiel"]
    assert page.locator("main .output >> nth=1 >> .changed").all_inner_texts() == ["stürzte"]
    assert "zero decoder.1.cross:0" in page.inner_text("main .output >> nth=1")


def test_where_tokens_differ_there_is_no_difference_and_the_page_says_why(open_page: Open) -> None:
    other = translation(3).strips
    other["source"]["pieces"][0] = "▁a"
    page = open_page(pair(strips=other)[0], "tab=compare")
    assert page.locator("main .cells").count() == 2
    assert "other tokens as keys" in page.inner_text("main")
    press(page, "t")  # its queries and keys are the source too
    assert "other tokens as queries and keys" in page.inner_text("main")


def deeper(kind: str = "cross") -> str:
    """A first model of two layers and two heads beside a second of one layer and one head."""
    first, second = translation(0), translation(1)
    second.document, second.parts = first.document, {}
    second.attend("decoder.0.cross", kind, "target", "source", heads=1)
    other = second.view(model={"name": "small"}, notes=["a note of B"])
    return first.html(other, notes=["a note of A"])


@pytest.mark.parametrize("kind", ["cross", "alignment"])
def test_models_of_other_depth_are_compared_by_the_last_layer_that_each_has(open_page: Open, kind: str) -> None:
    page = open_page(deeper(kind), "tab=compare&head=1")
    assert page.locator("main .cells").count() == 3
    said = page.inner_text("main")
    assert "do not have the same layers and heads: here are decoder.1.cross, head 1 and decoder.0.cross." in said
    assert "difference of decoder.1.cross, head 1 and decoder.0.cross" in said
    choose(page, "kind encoder")
    assert "Only one of the two has encoder self-attention." in page.inner_text("main")


def test_the_notes_of_both_are_there(open_page: Open) -> None:
    page = open_page(deeper(), "tab=compare")
    summaries = page.locator("header summary")
    assert summaries.all_inner_texts() == ["A: Model and notes", "B: Model and notes"]
    summaries.nth(1).click()
    assert page.locator("header details >> nth=1").inner_text().endswith("a note of B")
    press(page, "c")
    opened = page.eval_on_selector_all("header details", "all => all.map(one => one.open)")
    assert opened == [False, True]  # also after it is drawn anew
    summaries.nth(0).click()
    assert "a note of A" in page.inner_text("header")


def test_where_all_keys_are_hidden_there_is_nothing_to_compare(open_page: Open) -> None:
    first = translation()
    first.strips["source"]["special"] = [1] * 6
    page = open_page(first.html(first.view()), "tab=compare&sinks=hide")
    assert "All keys are hidden" in page.inner_text("main")


def test_a_difference_is_hidden_only_where_neither_may_look(open_page: Open) -> None:
    first, second = translation(0), translation(1)
    second.document, second.parts = first.document, {}
    fill(second)
    for sample, forbidden in ((first, [[1, 2], [3, 3]]), (second, [[1, 2], [4, 0]])):
        sample.parts["attention"][-1]["seen"] = {"first": [0] * 5, "last": [5] * 5, "forbidden": forbidden}
    page = open_page(first.html(second.view()), "tab=compare")
    read = "all => all.map(one => one.dataset.masked)"
    holes = [page.locator("main .cells").nth(i).locator("[data-masked]").evaluate_all(read) for i in range(3)]
    assert holes == [["1,2", "3,3"], ["1,2", "4,0"], ["1,2"]]


def test_the_name_of_the_queries_has_room_or_is_cut_at_its_end(open_page: Open) -> None:
    for label in ("patch (row, column)", "a source with a name much longer than any of its tokens"):
        sample = translation()
        sample.strips["target"]["label"] = label
        page = open_page(sample.html(sample.view()), "tab=compare")
        title = page.locator("main .heat-corner text >> nth=1")
        assert title.bounding_box()["x"] >= page.locator("main .heat-corner >> nth=0").bounding_box()["x"]
        said = title.text_content()
        assert said == label or (len(label) > 30 and said.endswith("…") and label.startswith(said[:-1]))


def test_a_long_output_leaves_room_for_the_maps(open_page: Open) -> None:
    page = open_page(pair(output="word " * 2000)[0], "tab=compare")
    assert page.locator("main .output .written").nth(1).bounding_box()["height"] < 300


def test_other_tabs_show_one_of_the_two(open_page: Open) -> None:
    html, a, b = pair()
    page = open_page(html)
    assert hovered(page, 1, 1) == f"{a[0, 1, 1]:.6f}"
    choose(page, "view 1")
    assert hovered(page, 1, 1) == f"{b[0, 1, 1]:.6f}"
    assert "other" in page.inner_text("h1")


def test_two_models_on_one_sentence(open_page: Open, bundles: dict[str, ModelPackage], asked: dict[str, str]) -> None:
    made = show(bundles["translation"], asked["translation"], bundles["rope"])
    page = open_page(made.html(), "tab=compare&words=1")
    assert page.locator("main .cells").count() == 3
    first, second = (view.output for view in made.views)
    said = page.locator("main .output .written").all_inner_texts()
    assert [text.split() for text in said] == [first.split(), second.split()]
    assert first == second or "B also read what A wrote" in page.inner_text("main")
