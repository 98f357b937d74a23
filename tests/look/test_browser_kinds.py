"""Every kind of model as a page in a real browser: the numbers on it are those of the model."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import choose, click, downloaded, hovered, press

from regard.look.model_trace import Trace
from regard.look.page.html_page import Page, fill_template
from regard.look.tracers import trace
from regard.model_folder import ModelPackage

pytest_plugins = "chromium"
Open = Callable[..., Any]
See = Callable[[str], Trace]
KINDS = (
    "translation",
    "gpt",
    "classifier",
    "vit",
    "rnnsearch",
)  # to a page, models of other styles are like one of these
TABS = {
    "translation": "attention chain predictions tree",
    "gpt": "attention chain predictions",
    "bert": "attention chain predictions",
    "classifier": "attention chain predictions",
    "vit": "picture attention chain predictions",
    "rnnsearch": "attention chain predictions tree",
}


@pytest.fixture(scope="session")
def seen(bundles: dict[str, ModelPackage], asked: dict[str, str]) -> See:
    """What a tiny model of a kind did, looked at once."""
    known: dict[str, Trace] = {}

    def of(kind: str) -> Trace:
        if kind not in known:
            known[kind] = trace(bundles[kind], asked[kind])
        return known[kind]

    return of


def weights_of(view: Trace) -> dict[str, np.ndarray]:
    return {one.name: one.weights().numpy() for one in view.attention}


def title(page: Any) -> str:
    return page.inner_text("main .card h2 >> nth=0")


def tabs(page: Any) -> list[str]:
    return [
        key.removeprefix("tab ")
        for key in page.eval_on_selector_all("#tabs .tab", "all => all.map(one => one.dataset.key)")
    ]


def rows_of(text: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text.decode("utf-8"))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_shows_the_weights_of_its_model(open_page: Open, seen: See, kind: str) -> None:
    view = seen(kind)
    page = open_page(Page([view]).html(), "tab=attention")
    known = weights_of(view)
    for key in (None, "ArrowRight", "["):
        if key:
            press(page, key)
        name, _, which = title(page).partition(", ")
        head = int(which.removeprefix("head ")) if which.startswith("head") else 0
        last = known[name].shape[1] - 1
        for r, c in ((0, 0), (last, 0), (last, 1)):
            assert float(hovered(page, r, c).replace("−", "-")) == pytest.approx(known[name][head, r, c], abs=6e-7)
        assert "row sum 1.0000" in page.inner_text("#tip")
    click(page, f'main text[data-r="{last}"]')
    bars = [float(said) for said in page.locator("main .bars .bar-label").all_inner_texts()]
    np.testing.assert_allclose(bars, known[name][head, last], atol=6e-5)


@pytest.mark.parametrize("kind", TABS)
def test_every_tab_that_a_kind_has_can_be_opened(open_page: Open, seen: See, kind: str) -> None:
    view = seen(kind)
    page = open_page(Page([view]).html())
    assert tabs(page) == TABS[kind].split()
    for i, tab in enumerate(TABS[kind].split(), 1):
        if i > 1:
            press(page, str(i))
        assert page.get_attribute(f'[data-key="tab {tab}"]', "aria-current") == "page"
        assert page.locator("main .card, main .chain").count() > 0
    said = page.inner_text("header")
    if kind != "vit":
        assert view.input in said
    assert view.output.strip() in said
    page.click("summary")
    assert f"{view.model['parameters']:,}" in page.inner_text("header .model")


# ---- the chain -------------------------------------------------------------------------------------------------------


def stages(page: Any) -> list[str]:
    return page.eval_on_selector_all("main .step", "all => all.map(one => one.dataset.stage)")


PRE = ["norm", "query", "key", "value", "scores", "mix", "output", "residual"]
FEED = ["norm", "inner", "output", "residual"]


def test_the_chain_of_a_pre_norm_decoder_goes_from_the_token_to_the_candidates(open_page: Open, seen: See) -> None:
    page = open_page(Page([seen("translation")]).html(), "tab=chain&queries=2")
    cross = [stage for stage in PRE if stage not in ("key", "value")]
    first = ["token", "embedding", "position", "input", "passed"]
    assert stages(page) == [*first, *PRE, *cross, *FEED, "final", "logits"]
    said = page.inner_text("main .chain")
    for line in ("q = x W_q 16 → 2 × 8", "h = f(x W_1) 16 → 24", "y = h W_2 24 → 16", "x = e + p 16", "÷ √8"):
        assert line in " ".join(said.split())


def test_the_chain_of_a_post_norm_encoder_normalises_after_the_sum(open_page: Open, seen: See) -> None:
    page = open_page(Page([seen("post-norm")]).html(), "tab=chain&kind=encoder&layer=0")
    assert stages(page) == ["token", "embedding", "position", "input", *PRE[1:], "norm", *FEED[1:], "norm", "passed"]


def test_models_that_normalise_their_embeddings_say_so(open_page: Open, seen: See) -> None:
    page = open_page(Page([seen("bert")]).html(), "tab=chain")
    assert "x = norm(e + p + …)" in page.inner_text('main [data-stage="input"]')


@pytest.mark.parametrize("kind", ["post-norm", "gpt", "vit", "rnnsearch"])
def test_the_vectors_of_a_token_are_those_of_the_model(open_page: Open, seen: See, kind: str) -> None:
    view = seen(kind)
    page = open_page(Page([view]).html(), "tab=chain&queries=1")
    strip = view.attention[-1].queries
    own = [
        one
        for one in view.activations
        if one.sequence == strip and (one.sublayer != "cross" or one.stage not in ("key", "value"))
    ]
    _, *rows = rows_of(downloaded(page, "csv"))
    assert [row[2] for row in rows] == [one.stage for one in own]
    for row, one in zip(rows, own, strict=True):
        np.testing.assert_allclose(np.array(row[3:], float), one.values[1].numpy(), rtol=1e-5, atol=1e-6)


def test_a_strip_says_the_number_under_the_pointer_and_its_norm(open_page: Open, seen: See) -> None:
    view = seen("translation")
    page = open_page(Page([view]).html(), "tab=chain&queries=1")
    values = next(
        one.values[1] for one in view.activations if one.stage == "embedding" and one.sequence == "target"
    ).numpy()
    canvas = page.locator('main [data-stage="embedding"] canvas')
    box = canvas.bounding_box()
    for i in (0, 5, 15):
        canvas.hover(position={"x": (i + 0.5) / 16 * box["width"], "y": 5})
        assert page.inner_text("#tip strong").replace("−", "-") == f"{values[i]:.6f}"
    norm = page.inner_text('main [data-stage="embedding"] .faint >> nth=-1').split("= ")[1].split(",")[0]
    assert float(norm) == pytest.approx(np.linalg.norm(values), rel=6e-3)


def test_the_scores_of_a_query_are_its_products_with_every_key(open_page: Open, seen: See) -> None:
    view = seen("gpt")  # two heads share a key, and positions turn queries and keys
    page = open_page(Page([view]).html(), "tab=chain&queries=3&head=1&layer=1")
    part = {
        one.stage: one.values.double().numpy() for one in view.activations if one.layer == 1 and one.sublayer == "self"
    }
    query, keys = part["query"][3].reshape(4, 4)[1], part["key"].reshape(-1, 2, 4)[:, 0]
    weights = weights_of(view)["decoder.1.self"][1, 3]
    cells = page.eval_on_selector_all(
        'main [data-stage="scores"] tbody tr', "all => all.map(row => [...row.children].map(cell => cell.innerText))"
    )
    assert len(cells) == len(keys)
    for place, cell in enumerate(cells):
        said = [text.replace("−", "-") for text in cell]
        assert said[0] == view.sequences["tokens"].pieces[place]
        assert float(said[2]) == pytest.approx(query @ keys[place], rel=6e-3, abs=1e-3)
        assert float(said[3]) == pytest.approx(query @ keys[place] / 2, rel=6e-3, abs=1e-3)
        assert (said[4] == "masked") == (place > 3)
        assert float(said[5]) == pytest.approx(weights[place], abs=6e-5)


@pytest.mark.parametrize(
    ("scale", "said", "times"), [(1.0, "not scaled", 1), (24**-0.5, "÷ √24", 24**-0.5), (0.3, "× 0.3", 0.3)]
)
def test_scores_are_scaled_as_the_layer_says(open_page: Open, seen: See, scale: float, said: str, times: float) -> None:
    document = Page([seen("gpt")]).document
    for layer in document.views[0]["attention"]:
        layer["scale"] = scale
    page = open_page(fill_template(document), "tab=chain&queries=3")
    assert page.locator('main [data-stage="scores"] thead th').all_inner_texts()[3] == said
    cells = page.locator('main [data-stage="scores"] tbody tr >> nth=0 >> td').all_inner_texts()
    product, scaled = (float(text.replace("−", "-")) for text in cells[1:3])
    assert scaled == pytest.approx(times * product, rel=0.02)


def test_formulas_have_the_sizes_and_the_scale_of_the_model(open_page: Open, seen: See) -> None:
    document = Page([seen("translation")]).document
    view = document.views[0]
    view["model"]["embedding scale"] = 128**0.5
    mixes = [one for one in view["chain"] if one["stage"] == "mix"]
    for one in mixes:
        narrow = np.zeros((len(one["tokens"]), 12), np.float32)
        one["values"] = document.add(narrow)  # as where heads are narrower than the model
    page = open_page(fill_template(document), "tab=chain")
    said = " ".join(page.inner_text("main .chain").split())
    assert "e = E[id] × 11.3 id → 16" in said
    assert "y = mix W_o 12 → 16" in said
    view["model"]["embedding scale"] = 1
    again = open_page(fill_template(document), "tab=chain")
    assert "e = E[id] id → 16" in " ".join(again.inner_text("main .chain").split())


def test_a_token_and_another_layer_are_chosen_in_the_chain(open_page: Open, seen: See) -> None:
    page = open_page(Page([seen("translation")]).html(), "tab=chain")
    choose(page, "token 3")
    assert "place 3" in page.inner_text('main [data-stage="token"]')
    click(page, "main .passed button")
    assert page.get_attribute('main [data-stage="query"] >> nth=0', "data-layer") == "0"


# ---- predictions and the tree ----------------------------------------------------------------------------------------


def test_candidates_are_shown_with_their_probabilities_and_the_taken_one_marked(open_page: Open, seen: See) -> None:
    view = seen("translation")
    page = open_page(Page([view]).html(), "tab=predictions")
    assert page.locator("main .place").count() == len(view.predictions)
    for one in view.predictions[:3]:
        place = page.locator(f'main [data-place="{one.place}"]')
        assert place.locator(".bar-name").all_inner_texts()[:10] == [candidate.piece for candidate in one.top]
        shares = place.locator(".bar").evaluate_all("all => all.map(one => Number(one.title.slice(4)))")
        np.testing.assert_allclose(shares[:10], np.exp([candidate.log_prob for candidate in one.top]), rtol=1e-5)
        widths = place.locator(".bar-fill").evaluate_all("all => all.map(one => parseFloat(one.style.width))")
        np.testing.assert_allclose(widths, 100 * np.array(shares), atol=6e-3)
        assert place.locator(".chosen .bar-name").all_inner_texts() == [one.chosen.piece]
    total = sum(one.chosen.log_prob for one in view.predictions)
    assert f"{total:.4f}".replace("-", "−") in page.inner_text("main")


def test_candidates_have_their_logits(open_page: Open, seen: See) -> None:
    document = Page([seen("translation")]).document
    for one in document.views[0]["predictions"]:
        one["top"] = [{**candidate, "logit": 3.25 - rank} for rank, candidate in enumerate(one["top"])]
        one["chosen"]["logit"] = -7.5
    page = open_page(fill_template(document), "tab=predictions")
    place = page.locator('main [data-place="1"]')
    assert place.locator(".logit").all_inner_texts()[:10] == [f"{3.25 - i:.2f}".replace("-", "−") for i in range(10)]
    assert place.locator("li.faint").inner_text().split() == ["token", "probability", "logit"]
    rows = rows_of(downloaded(page, "csv"))
    assert [float(row[rows[0].index("logit")]) for row in rows[1:11]] == [3.25 - i for i in range(10)]
    click(page, '[data-key="tab chain"]')
    assert page.locator('main [data-stage="logits"] .logit').count() >= 10


def test_what_was_given_is_no_part_of_what_the_model_wrote(open_page: Open, seen: See) -> None:
    document = Page([seen("gpt")]).document
    predictions = document.views[0]["predictions"]
    for i, one in enumerate(predictions):
        one["given"] = i < 2
    page = open_page(fill_template(document), "tab=predictions")
    for i, one in enumerate(predictions):
        said = page.inner_text(f'main [data-place="{one["place"]}"] .chosen .bar-label')
        assert said.endswith("given" if i < 2 else "taken")
    total = sum(one["chosen"]["log_prob"] for one in predictions[2:])
    said = page.inner_text("main .card .faint >> nth=0")
    assert f"the {len(predictions) - 2} that were taken have a log-probability of" in said
    assert f"{total:.4f}".replace("-", "−") in said


def test_tokens_that_a_model_could_see_have_no_sum(open_page: Open, seen: See) -> None:
    document = Page([seen("bert")]).document
    predictions = document.views[0]["predictions"]
    for one in predictions:
        one["given"] = True
    assert "Together" not in open_page(fill_template(document), "tab=predictions").inner_text("main")
    predictions[1]["given"] = False
    page = open_page(fill_template(document), "tab=predictions")
    assert f"{predictions[1]['chosen']['log_prob']:.4f}".replace("-", "−") in page.inner_text(
        "main .card .faint >> nth=0"
    )


def test_arrows_scroll_the_tree_and_choose_no_head(open_page: Open, seen: See) -> None:
    page = open_page(Page([seen("translation")]).html(), "tab=tree", viewport={"width": 420, "height": 800})
    page.focus('main [data-key="tree"]')
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.scrollLeft") > 0
    assert "head" not in page.evaluate("location.hash")
    press(page, "1")  # other keys do what they do everywhere
    assert title(page).endswith("head 0")


def test_a_classifier_shows_its_labels(open_page: Open, seen: See) -> None:
    view = seen("classifier")
    page = open_page(Page([view]).html(), "tab=predictions")
    assert page.locator("main .bar-name").all_inner_texts() == [label for label, _ in view.labels or []]
    rows = rows_of(downloaded(page, "csv"))[1:]
    np.testing.assert_allclose([float(p) for _, p in rows], [p for _, p in view.labels or []], rtol=1e-5)


@pytest.mark.parametrize("kind", ["translation", "rnnsearch"])
def test_the_tree_has_every_hypothesis_and_marks_the_one_that_survived(open_page: Open, seen: See, kind: str) -> None:
    view = seen(kind)
    steps = view.tree or []
    page = open_page(Page([view]).html(), "tab=tree")
    every = [(s, i) for s, step in enumerate(steps) for i, _ in enumerate(step)]
    nodes = page.eval_on_selector_all("main [data-node]", "all => all.map(one => [one.dataset.node, one.dataset.best])")
    assert {node for node, _ in nodes} == {f"{s},{i}" for s, i in every}
    assert {node for node, best in nodes if best == "1"} == {f"{s},{i}" for s, i in every if steps[s][i].best}
    assert page.locator("main [data-edge]").count() == sum(steps[s][i].parent is not None for s, i in every if s)
    last = next((s, i) for s, i in reversed(every) if steps[s][i].best)
    page.hover(f'main [data-node="{last[0]},{last[1]}"]')
    node = steps[last[0]][last[1]]
    said = re.search(r"log-probability (\S+)", page.inner_text("#tip"))
    assert said is not None
    assert float(said[1].replace("−", "-")) == pytest.approx(node.log_prob, abs=1e-4)  # four digits of a rounded number
    assert ElementTree.fromstring(downloaded(page, "svg")).tag.endswith("svg")
    saved = {(int(row[0]), int(row[1])): float(row[5]) for row in rows_of(downloaded(page, "csv"))[1:]}
    assert saved == pytest.approx({(s, i): steps[s][i].log_prob for s, i in every}, rel=1e-5)


# ---- pictures --------------------------------------------------------------------------------------------------------


def opacities(page: Any) -> np.ndarray:
    read = "all => all.map(one => Number(one.getAttribute('fill-opacity')))"
    return np.array(page.eval_on_selector_all("main .card >> nth=0 >> [data-patch]", read))


def test_a_picture_glows_where_the_summary_looks_and_where_a_clicked_patch_looks(open_page: Open, seen: See) -> None:
    view = seen("vit")
    weights = weights_of(view)["encoder.1.self"]
    page = open_page(Page([view]).html())
    assert "the summary token" in title(page)
    row = weights[0, 0, 1:]
    np.testing.assert_allclose(opacities(page), 0.85 * row / row.max(), atol=1e-4)
    click(page, 'main .card >> nth=0 >> [data-patch="5"]')
    assert "patch (row 2, column 2)" in title(page)
    row = weights[0, 6, 1:]
    np.testing.assert_allclose(opacities(page), 0.85 * row / row.max(), atol=1e-4)
    page.hover('main .card >> nth=0 >> [data-patch="7"]')
    assert f"weight {row[7]:.6f}" in page.inner_text("#tip")
    choose(page, "head 1")
    choose(page, "scale one")
    np.testing.assert_allclose(opacities(page), 0.85 * weights[1, 6, 1:], atol=1e-4)


def test_patches_are_reached_by_arrow_keys_and_saved(open_page: Open, seen: See) -> None:
    view = seen("vit")
    page = open_page(Page([view]).html(), "queries=6")
    page.focus('main [data-key="picture"]')
    press(page, "ArrowDown")
    press(page, "ArrowRight")
    assert "patch (row 3, column 3)" in title(page)
    saved = np.array(rows_of(downloaded(page, "csv")), float)
    np.testing.assert_allclose(saved.ravel(), weights_of(view)["encoder.1.self"][0, 11, 1:], rtol=1e-6)
    root = ElementTree.fromstring(downloaded(page, "svg"))
    (image,) = root.iter("{http://www.w3.org/2000/svg}image")
    assert image.get("href").startswith("data:image/png;base64,")
    assert downloaded(page, "png")[1:4] == b"PNG"


# ---- text is never markup --------------------------------------------------------------------------------------------


def test_hostile_text_goes_through_a_model_and_stays_text(open_page: Open, seen: See) -> None:
    view = seen("hostile")
    page = open_page(Page([view]).html(), "tab=attention")
    assert "</script><script>alert(1)</script>" in page.inner_text("header")
    labels = page.eval_on_selector_all("main .heat text[data-c]", "all => all.map(one => one.textContent)")
    assert labels[:5] == ["</script><script>…", "<!--", '"double"', "'single'", "&amp;"]
    assert page.evaluate("document.scripts.length") == 2 + len(Page([view]).document.blobs)
    for tab in ("chain", "predictions", "tree"):
        click(page, f'[data-key="tab {tab}"]')


def test_a_notebook_shows_a_page_inside_its_own(open_page: Open, seen: See) -> None:
    inside = Page([seen("gpt")])._repr_html_()
    html = f'<!doctype html><html data-drawn="1"><body>{inside}</body></html>'
    page = open_page(html)
    token_template = page.frame_locator("iframe")
    token_template.locator("main .cells rect").first.wait_for()
    token_template.locator('main [data-key="head 2"]').click()
    token_template.locator("main h2", has_text="head 2").wait_for()
