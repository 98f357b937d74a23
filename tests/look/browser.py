"""Helpers for tests of the page in a browser, and documents with random numbers to fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.look.page.document import MASKED, Document
from regard.look.page.html_page import fill_template

Strips = dict[str, dict[str, Any]]


# ---- using a page ----------------------------------------------------------------------------------------------------


def drawn(page: Any) -> None:
    """Wait until the page is there for the first time. (Waiting by a function would need `eval`, which pages forbid.)"""
    page.wait_for_selector("html[data-drawn]", state="attached")


def act(page: Any, do: Callable[[], Any]) -> None:
    """Do something that draws the page anew, and wait for that."""
    before = page.get_attribute("html", "data-drawn")
    do()
    page.wait_for_selector(f'html:not([data-drawn="{before}"])', state="attached")


def press(page: Any, key: str) -> None:
    act(page, lambda: page.keyboard.press(key))


def click(page: Any, selector: str, **options: Any) -> None:
    act(page, lambda: page.click(selector, **options))


def choose(page: Any, key: str) -> None:
    """Press the button with this key, such as "head 1"."""
    click(page, f'main [data-key="{key}"]')


def downloaded(page: Any, kind: str) -> bytes:
    """What the first button that saves as this kind of file gives."""
    with page.expect_download() as download:
        page.click(f'main [data-export="{kind}"] >> nth=0')
    assert download.value.suggested_filename.endswith(f".{kind}")
    return Path(download.value.path()).read_bytes()


def hovered(page: Any, row: int, column: int) -> str:
    """The number that the box beside the pointer says of a cell."""
    page.hover(f'main [data-cell="{row},{column}"] >> nth=0', force=True)
    return page.inner_text("#tip .weight")


# ---- colours, worked out here once more ------------------------------------------------------------------------------

LIGHT = ("#f4f6f8", "#d3e3f1", "#93bfdf", "#4a8fc5", "#1c5c9e", "#08306b")
DARK = ("#23272f", "#27466b", "#2f7391", "#4aa396", "#a3cf7b", "#fdf1a0")
SIGNED = ("#084a8f", "#66a9d4", "#f4f4f2", "#f0a25c", "#9e3a03")


def colour(share: float, stops: Sequence[str] = LIGHT) -> np.ndarray:
    """[r, g, b] on straight lines between the stops."""
    channels = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops])
    at = np.linspace(0, 1, len(stops))
    return np.array([np.interp(share, at, channel) for channel in channels.T])


def rgb(hexadecimal: str) -> np.ndarray:
    return np.array([int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)])


# ---- documents -------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A document under construction, and the weights that are in it by layer."""

    kind: str
    strips: Strips
    seed: int = 0
    document: Document = field(default_factory=Document)
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # (H, T, S)
    parts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def attend(self, name: str, kind: str, queries: str, keys: str, heads: int = 2, **how: Any) -> None:
        """A layer: `levels` rounds its weights as a large document does."""
        layer, causal = int(name.split(".")[1]), kind == "decoder"
        scores = 2 * self.rng.standard_normal((heads, self.length(queries), self.length(keys)))
        if causal:
            scores = np.where(np.tri(*scores.shape[1:]) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
        self.weights[name] = weights
        known = {"name": name, "kind": kind, "layer": layer, "heads": heads, "queries": queries, "keys": keys}
        arrays = {"weights": self.stored(weights, **how), "scores": None, "difference": 1.25e-7, "causal": causal}
        if not how:
            arrays["scores"] = self.document.add(np.maximum(scores, MASKED).astype(np.float32))
        self.parts.setdefault("attention", []).append({**known, **arrays})

    def stored(self, weights: np.ndarray, levels: int | None = None, half: bool = False) -> dict[str, Any]:
        if levels is None:
            return self.document.add(weights.astype(np.float16) if half else weights)
        scale = weights.max(2)
        codes = np.rint(np.sqrt(weights / scale[..., None]) * levels).astype(np.uint8)
        return {**self.document.add(codes), "levels": levels, "scale": self.document.add(scale.astype(np.float32))}

    def length(self, strip: str) -> int:
        return len(self.strips[strip]["ids"])

    def predict(self, strip: str, pieces: Sequence[str]) -> None:
        """The token of each row is one of three candidates, the second."""
        p = self.rng.dirichlet([1.0] * 3, len(pieces))
        for place, piece in enumerate(pieces):
            names = ((7, "seven"), (100 + place, piece), (9, "nine"))
            top = [{"id": id, "piece": name, "p": share} for (id, name), share in zip(names, p[place], strict=True)]
            chosen = {"id": 100 + place, "piece": piece, "log_prob": float(np.log(p[place, 1]))}
            self.parts.setdefault("predictions", []).append(
                {"strip": strip, "place": place, "chosen": chosen, "top": top}
            )

    def view(self, **more: Any) -> dict[str, Any]:
        known = {"title": "a sample", "kind": self.kind, "model": {"name": "sample"}, "input": "in", "output": "out"}
        empty = {
            "changes": [],
            "chain": [],
            "predictions": [],
            "labels": None,
            "tree": None,
            "picture": None,
            "notes": [],
        }
        return {**known, **empty, "strips": self.strips, **self.parts, **more}

    def html(self, *others: dict[str, Any], **more: Any) -> str:
        self.document.views = [self.view(**more), *others]
        return fill_template(self.document)


def strip(label: str, pieces: Sequence[str], words: Sequence[tuple[str, list[int]]] = ()) -> dict[str, Any]:
    """Special are what stands in angle brackets and full stops."""
    special = [int((piece.startswith("<") and piece.endswith(">")) or piece == ".") for piece in pieces]
    alone = [(piece, [place]) for place, piece in enumerate(pieces)]
    ids = list(range(10, 10 + len(pieces)))
    return {"label": label, "ids": ids, "pieces": list(pieces), "words": list(words or alone), "special": special}


SOURCE = ["▁the", "▁app", "le", "▁fell", ".", "<eos>"]
TARGET = ["<sos>", "▁der", "▁Apf", "el", "▁fiel"]


def translation(seed: int = 0, **how: Any) -> Sample:
    """Six tokens of which two are one word, translated to five: two layers of two heads of every kind."""
    source = strip("source (en)", SOURCE, [("the", [0]), ("apple", [1, 2]), ("fell", [3]), (".", [4]), ("<eos>", [5])])
    target = strip("target (de)", TARGET, [("<sos>", [0]), ("der", [1]), ("Apfel", [2, 3]), ("fiel", [4])])
    sample = Sample("translation", {"source": source, "target": target}, seed)
    for layer in range(2):
        sample.attend(f"encoder.{layer}.self", "encoder", "source", "source", **how)
        sample.attend(f"decoder.{layer}.self", "decoder", "target", "target", **how)
        sample.attend(f"decoder.{layer}.cross", "cross", "target", "source", **how)
    sample.predict("target", [*TARGET[1:], "."])
    return sample


def long_text(tokens: int = 512, layers: int = 6, heads: int = 8, kind: str = "encoder") -> Sample:
    """One strip of many tokens, its weights rounded to bytes."""
    sample = Sample("language", {"tokens": strip("text", [f"▁w{i}" for i in range(tokens)])})
    for layer in range(layers):
        sample.attend(f"{kind}.{layer}.self", kind, "tokens", "tokens", heads, levels=255)
    return sample
