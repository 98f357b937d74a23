"""The document of a page: arrays are restored as stored, text is never markup, files stay small."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from regard.cli.look_commands import look_app
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, FULL
from regard.layers.attention_kernels import AttentionPlan, reference
from regard.look.interventions import Forbid, Force, Uniform, Zero
from regard.look.model_trace import Activation, AttentionLayer, Trace
from regard.look.page import document as documents
from regard.look.page.document import Document, QuantizedWeights, deflate, make_document, to_number
from regard.look.page.html_page import Page, join_files, page_files, read_file, show
from regard.look.record import AttentionRecord, record
from regard.look.token_sequence import TokenSequence
from regard.look.tracers import trace
from regard.model_folder import ModelPackage

Maker = Callable[..., ModelPackage]
TYPES = {"f32": "<f4", "f16": "<f2", "u8": "u1"}
KINDS = ["translation", "post-norm", "gpt", "bert", "classifier", "vit", "rnnsearch"]


def unpacked(blob: dict[str, Any], blobs: list[bytes]) -> np.ndarray:
    """As a page reads it."""
    stored = np.frombuffer(zlib.decompress(blobs[blob["id"]]), TYPES[blob["type"]]).reshape(blob["shape"])
    if blob["type"] != "u8":
        return stored.astype(np.float64)
    return (stored / blob["levels"]) ** 2 * unpacked(blob["scale"], blobs)[..., None]


def rounding(exact: np.ndarray, levels: int) -> np.ndarray:
    """Half of what lies between two neighbouring levels, where a weight is."""
    scale = exact.max(-1, keepdims=True)
    code = np.sqrt(exact / scale) * levels
    return scale * (code + 0.25) / levels**2


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_small_documents_hold_what_the_recorder_heard_in_float64(kind: str, make: Maker, asked: Any) -> None:
    package = make(kind)
    seen = trace(package, asked[kind])
    made = make_document([seen])
    (view,) = json.loads(made.json())["views"]
    exact = inputs(package, seen)
    with torch.no_grad(), record(package.model.double(), stream=True) as tape:
        package.model(*exact)
    assert [one["name"] for one in view["attention"]] == list(tape)
    for one in view["attention"]:
        (kept,) = tape[one["name"]]
        np.testing.assert_allclose(unpacked(one["weights"], made.blobs), kept.weights()[0], atol=2e-5)
        scores = kept.scores()[0].numpy()
        shown = unpacked(one["scores"], made.blobs)
        hidden = np.isinf(scores)
        assert (shown[hidden] <= -1e29).all()
        np.testing.assert_allclose(shown[~hidden], scores[~hidden], atol=1e-4, rtol=1e-4)
        if kind != "rnnsearch":
            assert one["difference"] < 1e-4
    assert view["notes"] == [*seen.notes]
    for one, stage in zip(view["chain"], seen.activations, strict=True):
        assert one["values"]["type"] == "f32"
        np.testing.assert_array_equal(unpacked(one["values"], made.blobs), stage.values.numpy().astype(np.float64))
    if kind != "rnnsearch":
        (final,) = [one for one in view["chain"] if one["stage"] == "final"][-1:] or [None]
        stack = "encoder" if kind in ("bert", "classifier", "vit") else "decoder"
        if final:
            np.testing.assert_allclose(
                unpacked(final["values"], made.blobs), tape.vectors[f"{stack}.output"][0][0], atol=1e-4
            )


def inputs(package: ModelPackage, seen: Trace) -> list[torch.Tensor]:
    """What the model read, for another forward."""
    if seen.kind == "picture":
        from PIL import Image

        pixels = np.asarray(Image.open(seen.input)) / 255
        return [torch.from_numpy((pixels - 0.5) / 0.25)[None, None]]
    rows = [torch.tensor([seen.sequences[name].ids]) for name in seen.sequences]
    return [*rows, torch.zeros_like(rows[0])] if seen.kind == "classification" else rows


@pytest.mark.parametrize("kind", [*KINDS, "hostile"])
def test_a_document_has_all_that_was_agreed(kind: str, bundles: Any, asked: Any) -> None:
    made = make_document([trace(bundles[kind], asked[kind])])
    tree = json.loads(made.json())
    assert tree["version"] == 1
    (view,) = tree["views"]
    names = "title kind model input output changes strips attention chain predictions labels tree picture notes"
    assert list(view) == names.split()
    ids = []
    for one in view["attention"]:
        assert one["weights"]["shape"] == [
            one["heads"],
            *(len(view["strips"][one[s]]["ids"]) for s in ("queries", "keys")),
        ]
        ids += [one["weights"]["id"], one["scores"]["id"]]
    for one in view["chain"]:
        assert one["values"]["shape"][0] == len(one["tokens"]) == len(view["strips"][one["strip"]]["ids"])
        assert one["heads"] is None or one["values"]["shape"][1] % one["heads"] == 0
        ids.append(one["values"]["id"])
    assert sorted(ids) == list(range(len(made.blobs)))
    for one in view["predictions"]:
        chances = [candidate["p"] for candidate in one["top"]]
        assert len(chances) == min(10, view["model"]["vocabulary"])
        assert chances == sorted(chances, reverse=True)
        assert 0 < sum(chances) <= 1 + 1e-6
        assert math.exp(one["chosen"]["log_prob"]) <= chances[0] + 1e-6
        logits = [candidate["logit"] for candidate in one["top"]]
        odds = [math.exp(logit - one["chosen"]["logit"] + one["chosen"]["log_prob"]) for logit in logits]
        assert odds == pytest.approx(chances, rel=1e-4)
        assert isinstance(one["given"], bool)
    assert view["labels"] is None or sum(one["p"] for one in view["labels"]) == pytest.approx(1, abs=1e-6)
    assert (view["labels"] is not None) == (kind in ("classifier", "vit"))
    assert (view["picture"] is not None) == (kind == "vit")
    assert view["picture"] is None or list(view["picture"]) == ["png", "rows", "columns"]
    assert (view["tree"] is not None) == (view["kind"] in ("translation", "alignment"))


# ---- what formulas need ----------------------------------------------------------------------------------------------

SCALES: dict[str, tuple[str, dict[str, Any], float]] = {  # heads have a width of 8
    "plain": ("translation", {}, 8**-0.5),
    "t5": ("translation", {"positions": "t5"}, 1.0),
    "rope": ("gpt", {"positions": "rope", "n_heads": 2}, 8**-0.5),
    "deberta": ("bert", {"encoder_positions": "disentangled"}, 24**-0.5),
    "alignment": ("rnnsearch", {}, 1.0),
}


@pytest.mark.parametrize("style", SCALES)
def test_a_layer_says_what_its_products_are_multiplied_by(style: str, make: Maker) -> None:
    kind, settings, scale = SCALES[style]
    (view,) = make_document([trace(make(kind, **settings), "the man has")]).views
    own = [one["scale"] for one in view["attention"] if one["kind"] != "cross"]
    assert own == pytest.approx([scale] * len(own))
    cross = [one["scale"] for one in view["attention"] if one["kind"] == "cross"]
    assert cross == pytest.approx([8**-0.5] * len(cross))  # T5's scheme is that of its self-attention


def test_scores_without_positions_are_the_products_times_the_scale(make: Maker) -> None:
    for changes in ([], [Uniform("encoder.0.self", (1,))]):
        seen = trace(make("translation"), "the man has", changes)
        for one in seen.attention:
            products = (one.record.q.double() @ one.record.k.double().mT)[0] * one.scale
            products = products.masked_fill(one.scores().isinf(), -math.inf)
            expected = one.scores()[:1] if changes and one.name == "encoder.0.self" else one.scores()
            torch.testing.assert_close(products[: len(expected)].float(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "scaled"), [("translation", True), ("translation", False), ("bert", True)])
def test_the_embeddings_are_rows_of_their_matrix_times_a_scale(kind: str, scaled: bool, make: Maker) -> None:
    package = make(kind, scale_embeddings=scaled, embedding_norm=False, token_types=0)
    (view,) = (made := make_document([trace(package, "the man has")])).views
    assert view["model"]["embedding scale"] == (4.0 if scaled else 1)
    first = view["chain"][0]
    assert first["stage"] == "embedding"
    matrix = next(p for name, p in package.model.named_parameters() if name.endswith("embedding.weight"))
    rows = matrix.detach().double().numpy()[view["strips"][first["strip"]]["ids"]]
    np.testing.assert_allclose(
        unpacked(first["values"], made.blobs), rows * view["model"]["embedding scale"], atol=1e-5
    )


def shown_as_seen(spans: dict[str, Any], width: int) -> np.ndarray:
    """As a page reads it, (T, S)."""
    seen = np.array(
        [[a <= key <= b for key in range(width)] for a, b in zip(spans["first"], spans["last"], strict=True)]
    )
    for query, key in spans["forbidden"]:
        assert seen[query, key]  # nothing is said twice
        seen[query, key] = False
    return seen


SEEN: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "full": ("bert", {}, []),
    "causal": ("gpt", {}, []),
    "window": ("gpt", {"attention.window": 3}, []),
    "forbidden": ("gpt", {}, [Forbid("decoder.1.self", None, (3, 4), 1)]),
    "forbidden to one head": ("translation", {}, [Forbid("decoder.*.cross", (1,), 2, (0, 3))]),
    "forced": ("bert", {}, [Force("encoder.0.self", None, 2, (0, 3)), Force("encoder.1.self", (0,), 1, 4)]),
    "off": ("translation", {}, [Zero("decoder.0.cross"), Zero("encoder.1.self", (1,))]),
    "alignment": ("rnnsearch", {}, [Forbid("decoder.cross", None, 1, 2)]),
}


@pytest.mark.parametrize("case", SEEN)
def test_a_layer_says_who_may_look_where(case: str, make: Maker) -> None:
    kind, settings, changes = SEEN[case]
    seen = trace(make(kind, **settings), "the man has eaten.", changes)
    (view,) = json.loads(make_document([seen]).json())["views"]
    by_head = 0
    for one, source in zip(view["attention"], seen.attention, strict=True):
        may = ~source.scores().isinf().numpy()  # (H, T, S)
        width = may.shape[2]
        np.testing.assert_array_equal(shown_as_seen(one["seen"], width), may.any(0))
        same = (may == may[0]).all()
        assert ("heads" in one["seen"]) == (not same)
        for spans, head in zip(one["seen"].get("heads", []), may, strict=False):
            np.testing.assert_array_equal(shown_as_seen(spans, width), head)
            by_head += 1
    assert by_head == {"forbidden to one head": 4, "forced": 2, "off": 2}.get(case, 0)
    if case == "causal":
        spans = view["attention"][0]["seen"]
        assert spans["first"] == [0] * len(spans["first"])
        assert spans["last"] == [*range(len(spans["last"]))]
        assert spans["forbidden"] == []
    if case == "forbidden":
        assert view["attention"][1]["seen"]["forbidden"] == [[3, 1], [4, 1]]
    if case == "off":
        (layer_off,) = [one for one in view["attention"] if one["name"] == "decoder.0.cross"]
        assert set(layer_off["seen"]["last"]) == {-1}


# ---- rounding --------------------------------------------------------------------------------------------------------


def layer(
    n: int, name: str = "encoder.0.self", spread: float = 1.0, causal: bool = False, heads: int = 8
) -> AttentionLayer:
    """Scores with a standard deviation of `spread`."""
    torch.manual_seed(zlib.crc32(name.encode()))
    q, k = (torch.randn(1, heads, n, 8) for _ in range(2))
    at = torch.arange(n)[None]
    plan = AttentionPlan(reference, CAUSAL if causal else FULL, at, at, torch.arange(n))
    kept = AttentionRecord(q * spread, k, k, plan)
    return AttentionLayer(
        name, "decoder" if causal else "encoder", int(name.split(".")[1]), "tokens", "tokens", causal, kept
    )


def seen_with(
    layers: list[AttentionLayer], n: int, chain: list[Activation] | None = None, kind: str = "filling"
) -> Trace:
    strip = TokenSequence("text", tuple(range(n)), tuple("a" * n), (("a" * n, tuple(range(n))),), (False,) * n)
    return Trace(kind, "in", "out", {"architecture": "bert"}, {"tokens": strip}, layers, chain or [])


@pytest.mark.parametrize("n", [60, 120, 200, 300])
def test_weights_come_back_within_half_a_level_whatever_they_are_stored_as(n: int) -> None:
    layers = [layer(n, f"encoder.{i}.self") for i in range(2)] + [layer(n, "decoder.1.self", 4.0, causal=True)]
    made = make_document([seen_with(layers, n)])
    (view,) = made.views
    kinds = {one["weights"]["type"] for one in view["attention"]}
    assert kinds == {{60: "f32", 120: "f32", 200: "f16", 300: "u8"}[n]}
    assert (view["attention"][0]["scores"] is not None) == (n == 60)
    said = " ".join(view["notes"])
    assert ("Scores" in said) == (n > 60)
    assert ("fp16" in said) == (n == 200)
    assert ("255 levels" in said) == (n == 300)
    for one, source in zip(view["attention"], layers, strict=True):
        exact, found = source.weights().double().numpy(), unpacked(one["weights"], made.blobs)
        off = np.abs(found - exact)
        if n == 300:
            assert (off <= rounding(exact, 255) * 1.001 + 1e-7).all()
            assert (off > rounding(exact, 255) / 2).any()  # it is really rounded
            np.testing.assert_allclose(unpacked(one["weights"]["scale"], made.blobs), exact.max(2), rtol=1e-6)
            np.testing.assert_allclose(found.sum(2), 1, atol=0.01)
        else:
            np.testing.assert_allclose(found, exact, rtol=1e-6 if n <= 120 else 1e-3, atol=1e-7)


def test_hidden_scores_are_a_number_that_json_and_floats_have() -> None:
    made = make_document([seen_with([layer(5, causal=True, heads=1)], 5)])
    scores = unpacked(made.views[0]["attention"][0]["scores"], made.blobs)[0]
    assert (scores[np.triu_indices(5, 1)] == np.float32(-1e30)).all()
    assert (scores[np.tril_indices(5)] > -100).all()


def test_levels_become_fewer_until_the_weights_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(100, f"encoder.{i}.self", 0.3) for i in range(2)]
    monkeypatch.setattr(documents, "EXACT_SIZE", 1)
    monkeypatch.setattr(documents, "FP16_SIZE", 1)
    sizes = {}
    for room in (10_000_000, 70_000, 45_000, 30_000):
        monkeypatch.setattr(documents, "QUANTIZATIONS", [(levels, room) for levels in (255, 63, 15, 7, 3)])
        made = make_document([seen_with(layers, 100)])
        (levels,) = {one["weights"]["levels"] for one in made.views[0]["attention"]}
        assert f"{levels} levels" in made.views[0]["notes"][0]
        assert made.size <= room or levels == 3
        sizes[levels] = made.size
        exact = layers[0].weights().double().numpy()
        found = unpacked(made.views[0]["attention"][0]["weights"], made.blobs)
        assert (np.abs(found - exact) <= rounding(exact, levels) * 1.001 + 1e-7).all()
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(sizes) >= 3


def test_a_size_is_judged_by_some_heads_and_then_really_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(100, f"encoder.{i}.self", 0.3) for i in range(3)]
    for room in (90_000, 40_000):
        monkeypatch.setattr(documents, "QUANTIZATIONS", [(levels, room) for levels in (255, 63, 15, 7, 3)])
        sizes = [
            sum(len(deflate(QuantizedWeights.of(one.weights(), n).codes.numpy())) for one in layers)
            for n, _ in documents.fitting_quantizations(layers, 1)
        ]
        assert sizes[0] <= 1.05 * room
        assert sizes == sorted(sizes, reverse=True)


def stages(n: int, width: int, count: int = 4) -> list[Activation]:
    torch.manual_seed(0)
    return [Activation("tokens", i, "self", "output", 5 * torch.randn(n, width)) for i in range(count)]


@pytest.mark.parametrize(("kind", "places"), [("filling", [0, 1, 2]), ("language", [5, 6, 7])])
def test_vectors_are_those_of_as_many_tokens_as_fit(
    kind: str, places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = stages(8, 100)
    for room, tokens, stored in [
        (12_800, list(range(8)), "f32"),
        (12_799, list(range(8)), "f16"),
        (2_400, places, "f16"),
    ]:
        monkeypatch.setattr(documents, "VECTORS_SIZE", room)
        made = make_document([seen_with([], 8, chain, kind)])
        (view,) = made.views
        assert [one["tokens"] for one in view["chain"]] == [tokens] * 4
        assert {one["values"]["type"] for one in view["chain"]} == {stored}
        for one, stage in zip(view["chain"], chain, strict=True):
            expected = stage.values[tokens].double().numpy()
            np.testing.assert_allclose(
                unpacked(one["values"], made.blobs), expected, rtol=1e-6 if stored == "f32" else 1e-3
            )
        said = " ".join(view["notes"])
        assert ("3 tokens" in said) == (len(tokens) == 3)
        assert ("fp16" in said) == (stored == "f16")


def test_a_number_too_large_for_fp16_is_the_largest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "VECTORS_SIZE", 1)
    made = make_document(
        [seen_with([], 1, [Activation("tokens", None, None, "input", torch.tensor([[1e6, -1e6, 2.5]]))])]
    )
    assert unpacked(made.views[0]["chain"][0]["values"], made.blobs).tolist() == [[65504.0, -65504.0, 2.5]]


def test_two_views_share_the_room_of_one() -> None:
    one = seen_with([layer(80)], 80)  # 8 * 80 * 80 weights and as many scores: 410 kB
    assert make_document([one]).views[0]["attention"][0]["scores"] is not None
    two = seen_with([layer(130)], 130)  # 1.08 MB
    assert make_document([two]).views[0]["attention"][0]["scores"] is not None
    (first, second) = make_document([two, two]).views
    assert first["attention"][0]["scores"] is second["attention"][0]["scores"] is None


def test_512_tokens_of_6_layers_and_8_heads_on_three_sides_stay_below_15_mb() -> None:
    """Both self-attentions and the one between them, and the vectors of a model of width 512. Flat weights are the worst:
    all are near the largest, and there is nothing to deflate."""
    n, spread = 512, 0.1
    kinds = [("encoder", "self", False), ("decoder", "self", True), ("decoder", "cross", False)]
    layers = [layer(n, f"{stack}.{i}.{kind}", spread, causal) for stack, kind, causal in kinds for i in range(6)]
    made = make_document([seen_with(layers, n, stages(n, 512, 60) + stages(n, 2048, 12))])
    text = 4 / 3 * made.size + len(made.json())
    assert text < 14e6
    assert len(made.views[0]["chain"][0]["tokens"]) > 10


@pytest.mark.parametrize("x", [0.0, 1 / 3, -1e-30, 1234567.0, -math.inf, math.inf])
def test_numbers_keep_seven_digits_and_are_finite(x: float) -> None:
    found = to_number(x)
    assert math.isfinite(found)
    if math.isfinite(x):
        assert found == pytest.approx(x, rel=1e-6)


# ---- text ------------------------------------------------------------------------------------------------------------


class Scripts(HTMLParser):
    """The script elements of a page by their ids, cut as a browser cuts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.open, self.tags = "", 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.tags += 1
            self.open = dict(attrs).get("id") or "code"
            self.found[self.open] = ""

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[self.open] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.open = ""


def test_hostile_text_comes_out_of_a_page_as_it_went_in(bundles: Any, asked: Any) -> None:
    page = Page([trace(bundles["hostile"], asked["hostile"])])
    scripts = Scripts(page.html())
    assert scripts.tags == 2 + len(page.document.blobs)
    (view,) = json.loads(scripts.found["document"])["views"]
    assert view["input"] == asked["hostile"]
    assert view["strips"]["source"]["pieces"] == [*asked["hostile"].split(), "<eos>"]
    assert "alert(1)" not in re.sub(r'<script type="application/json".*?</script>', "", page.html(), flags=re.DOTALL)


@given(st.text(st.characters(codec=None)))
def test_any_text_survives_in_json_and_none_ends_its_element(text: str) -> None:
    made = Document([{"title": text, "notes": [f"</script>{text}<!--"]}])
    inside = made.json()
    assert "<" not in inside
    assert inside.isascii()
    assert json.loads(inside)["views"] == made.views
    assert json.loads(Scripts(f'<script id="document">{inside}</script>').found["document"])["views"] == made.views


# ---- the page --------------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_with_all_arrays_and_scripts_in_order(bundles: Any, asked: Any, tmp_path: Path) -> None:
    page = Page([trace(bundles["gpt"], asked["gpt"])])
    page.save(tmp_path / "new" / "look.html")
    text = (tmp_path / "new" / "look.html").read_text(encoding="utf-8")
    assert text == page.html()
    scripts = Scripts(text).found
    for i, blob in enumerate(page.document.blobs):
        assert base64.b64decode(scripts[f"blob-{i}"]) == blob
    assert json.loads(scripts["document"]) == page.document.tree
    names = sorted(path.name for path in page_files().iterdir() if path.name.endswith(".js"))
    places = [scripts["code"].index(read_file(name).strip()) for name in names]
    assert places == sorted(places)
    assert len(names) > 3
    assert join_files(".css").strip() in text
    assert not re.search(r"<!--(STYLE|DOCUMENT|SCRIPT)-->", text)
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert len(join_files(".js")) < 150_000


def test_a_notebook_gets_the_page_in_a_frame(bundles: Any, asked: Any) -> None:
    page = Page([trace(bundles["hostile"], asked["hostile"])])
    shown = page._repr_html_()
    (inside,) = re.findall(r'^<iframe srcdoc="([^"]*)"[^<>]*></iframe>$', shown)
    assert html.unescape(inside) == page.html()
    assert trace(bundles["gpt"], asked["gpt"])._repr_html_().startswith("<iframe srcdoc=")


def test_a_page_has_one_view_or_two(bundles: Any, asked: Any) -> None:
    one = trace(bundles["bert"], asked["bert"])
    with pytest.raises(RegardError, match="not 3"):
        Page([one] * 3)
    with pytest.raises(RegardError, match="not 0"):
        Page([])


def test_showing_compares_with_another_model_or_with_changes(bundles: Any, folders: Any, asked: Any) -> None:
    text = asked["translation"]
    alone = show(folders["translation"], text)
    assert [view.name for view in alone.views] == ["translation"]
    two = show(folders["translation"], text, folders["rope"])
    assert [view.name for view in two.views] == ["translation", "rope"]
    assert two.views[0].written == two.views[1].written
    apart = show(folders["translation"], text, folders["rope"], own=True)
    assert apart.views[0].written != apart.views[1].written
    changed = show(folders["translation"], text, changes=[Zero("decoder.*.cross")])
    assert [view.changes for view in changed.views] == [(), ("zero decoder.*.cross",)]
    assert changed.views[1].written == changed.views[0].written
    blobs = [one["weights"]["id"] for view in two.document.views for one in view["attention"]]
    assert len(set(blobs)) == len(blobs)


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str, **settings: str) -> Result:
    return CliRunner().invoke(look_app, list(words), obj={f"decode.{k}": v for k, v in settings.items()})


def test_the_command_writes_a_page_and_says_where(folders: Any, asked: Any, tmp_path: Path) -> None:
    out = tmp_path / "a" / "page.html"
    done = call(str(folders["translation"]), asked["translation"], "--output", str(out), beam="1")
    assert done.exit_code == 0, done.output
    expected = trace(folders["translation"], asked["translation"], beam=1)
    assert done.stdout.splitlines() == [expected.output, str(out)]
    assert "<script" in out.read_text(encoding="utf-8")
    same = call("page", "--output", str(out), str(folders["translation"]), asked["translation"], beam="1")
    assert same.stdout == done.stdout
    first = call("--output", str(out), str(folders["translation"]), asked["translation"], beam="1")
    assert first.stdout == done.stdout


def test_the_command_opens_a_browser_if_asked(
    folders: Any, asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    out = tmp_path / "a b.html"
    for words in ([], ["--open"]):
        done = call(str(folders["bert"]), asked["bert"], "--output", str(out), *words)
        assert done.exit_code == 0, done.output
    assert opened == [out.as_uri()]


def test_the_command_prints_what_the_page_shows(folders: Any, asked: Any) -> None:
    done = call(str(folders["vit"]), asked["vit"], "--json")
    (view,) = json.loads(done.stdout)["views"]
    assert view["kind"] == "picture"
    assert view["attention"][0]["weights"]["shape"] == [2, 17, 17]


def test_the_command_compares(folders: Any, asked: Any, tmp_path: Path) -> None:
    given = (str(folders["translation"]), asked["translation"], "--json")
    first, second = json.loads(call(*given, "--with", str(folders["rope"])).stdout)["views"]
    assert (first["model"]["positions"], second["model"]["positions"]) == ("sinusoidal", "rope")
    assert first["strips"] == second["strips"]
    _, apart = json.loads(call(*given, "--with", str(folders["rope"]), "--own").stdout)["views"]
    assert apart["strips"]["target"] != first["strips"]["target"]
    words = [
        "--zero",
        "decoder.1.cross:1",
        "--forbid",
        "decoder.0.cross@1>man",
        "--zero",
        "encoder.*",
        "--positions",
        "none",
    ]
    _, changed = json.loads(call(*given, *words).stdout)["views"]
    expected = ["zero decoder.1.cross:1", "zero encoder.*", "forbid decoder.0.cross@1>man", "positions none"]
    assert changed["changes"] == expected
    assert "not understood" in str(call(*given, "--pin", "man").exception)
    assert "there is one view" in str(call(*given, "--own").exception)


def test_the_command_refuses_what_would_be_ignored(folders: Any, asked: Any) -> None:
    bert = (str(folders["bert"]), asked["bert"], "--json")
    assert "--decode.beam has no meaning" in str(call(*bert, beam="3").exception)
    assert "--to has no meaning" in str(call(*bert, "--to", "fr").exception)
    assert "bert (filling) and gpt (language)" in str(call(*bert, "--with", str(folders["gpt"])).exception)
    gpt = (str(folders["gpt"]), asked["gpt"], "--json")
    assert "name a layer, --forbid 'decoder.*.self@man>the'" in str(call(*gpt, "--forbid", "man>the").exception)


def test_the_other_commands_are_still_there_and_what_is_no_model_is_refused() -> None:
    listed = call("--help").stdout
    assert len(look_app.registered_commands) == 11
    for name in [c.name or "" for c in look_app.registered_commands]:
        assert f" {name} " in listed
    assert "no model at nowhere" in str(call("nowhere", "a text").exception)
    assert call("positions", "none").exit_code != 0
