"""Which heads matter: each is zeroed alone, and what that does to the loss, or to BLEU, is measured on a test file.

Every change is measured against the unchanged model on the same sentences, so its error is that of the differences: for the
loss the standard error of a ratio (nats over tokens, sentence by sentence), for BLEU that of resampled sentences. A head
whose change is within twice its error is one that this file does not show to matter; of a hundred such heads a few are
beyond it by chance. Heads may stand in for each other, so what one does not do alone, several together may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.change.changes import Zero, kind_of
from regard.look.change.edits import n_heads
from regard.look.change.intervene import changed
from regard.look.change.scored import Rows, losses_of, memory_of, rows_of
from regard.look.drawn import Drawn
from regard.look.figures import Image, draw
from regard.look.forward import KINDS
from regard.look.record import layers_of
from regard.metrics.translation_scores import UNSPACED
from regard.model_folder import ModelPackage
from regard.models.model import TranslationModel
from regard.terminal import progress_bar
from regard.text.special_tokens import PAD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS = 200  # samples of sentences for the error of BLEU


@dataclass(frozen=True)
class Effect:
    """One head zeroed."""

    layer: str
    head: int
    change: float  # of the metric
    error: float  # the standard error of that

    @property
    def name(self) -> str:
        return f"{self.layer}:{self.head}"

    @property
    def shown(self) -> bool:
        """Whether there is a change at all, as far as the file tells."""
        return abs(self.change) > 2 * self.error


@dataclass(frozen=True)
class Scan(Drawn):
    metric: str  # loss or bleu
    baseline: float  # of the unchanged model: nats a token, or BLEU
    error: float  # its standard error
    sentences: int
    effects: tuple[Effect, ...]
    left_out: int = 0  # pairs that are empty, or too long for the model

    @property
    def ranked(self) -> list[Effect]:
        """Those first whose absence does most harm."""
        return sorted(self.effects, key=lambda e: -e.change if self.metric == "loss" else e.change)

    @property
    def useless(self) -> list[Effect]:
        return [e for e in self.ranked if not e.shown]

    def image(self, kind: str) -> Image:
        """The changes of a kind of attention, (layers, heads); NaN where a layer has fewer heads."""
        layers = dict.fromkeys(e.layer for e in self.effects if kind_of(e.layer) == kind)
        own = {(e.layer, e.head): e.change for e in self.effects}
        width = max(e.head + 1 for e in self.effects if e.layer in layers)
        values = [[own.get((layer, head), np.nan) for head in range(width)] for layer in layers]
        return Image(kind, np.array(values), "head", "layer")

    def figure(self) -> Figure:
        """A panel a kind, all on one scale; dots are on heads that the file shows to matter."""
        kinds = [kind for kind in KINDS if any(kind_of(e.layer) == kind for e in self.effects)]
        what = "loss (nats a token)" if self.metric == "loss" else "BLEU"
        title = f"change of {what} without one head; {self.baseline:.3f} with all; dots: more than twice the error"
        figure = draw(title, [self.image(kind) for kind in kinds], len(kinds))
        most = max(abs(e.change) for e in self.effects) or 1.0
        for kind, axes in zip(kinds, (axes for axes in figure.axes if axes.images), strict=True):
            axes.images[0].set(cmap="RdBu_r", clim=(-most, most))
            rows, columns = axes.images[0].get_array().shape  # type: ignore[union-attr]
            axes.set(xticks=range(columns), yticks=range(rows))
            layers = list(dict.fromkeys(e.layer for e in self.effects if kind_of(e.layer) == kind))
            dots = [(e.head, layers.index(e.layer)) for e in self.effects if e.layer in layers and e.shown]
            axes.scatter([x for x, _ in dots], [y for _, y in dots], s=12, color="black")
        return figure

    def __str__(self) -> str:
        unit = "nats a token" if self.metric == "loss" else "BLEU"
        without = f" ({self.left_out} left out: empty, or too long for this model)" if self.left_out else ""
        value = f"{self.baseline:.4f} {unit} with all heads (standard error {self.error:.4f})"
        first = f"{self.sentences} sentences{without}: {value}"
        shown = [e for e in self.ranked if e.shown]
        wide = max((len(e.name) for e in shown), default=0)
        worst = [f"  {e.name:<{wide}}  {e.change:+.4f}  (error {e.error:.4f})" for e in shown[:10]]
        better = [e.name for e in shown if (e.change < 0) == (self.metric == "loss")]
        rest = [f"better without: {', '.join(better)}"] if better else []
        none = f"{len(self.useless)} of {len(self.effects)} heads change it by no more than twice the error"
        names = ": " + ", ".join(e.name for e in self.useless) if self.useless else ""
        return "\n".join([first, f"{len(shown)} heads change it, these most:", *worst, *rest, none + names])

    def numbers(self) -> dict[str, Any]:
        heads = [{"layer": e.layer, "head": e.head, "change": e.change, "error": e.error} for e in self.effects]
        given = {"metric": self.metric, "baseline": self.baseline, "error": self.error, "sentences": self.sentences}
        return {**given, "left_out": self.left_out, "heads": heads, "useless": [e.name for e in self.useless]}


def heads_of(model: nn.Module) -> list[tuple[str, int]]:
    found = [(name, head) for name, layer in layers_of(model).items() for head in range(n_heads(layer))]
    if not found:
        raise RegardError("this model has no attention, so it has no heads to zero")
    return found


def scan(
    package: ModelPackage,
    source: Sequence[str],
    target: Sequence[str] = (),
    metric: str = "loss",
    to: str | None = None,
    quiet: bool = False,
) -> Scan:
    """Each head of a model zeroed: teacher-forced loss, or BLEU of greedy translations. Texts that are not translated are
    all in `source`; `to` is the language, for a model that translates to several."""
    if metric not in ("loss", "bleu"):
        raise RegardError(f"the metric is loss or bleu, not '{metric}'")
    if isinstance(package.model, TranslationModel) and not target:
        raise RegardError("a model that translates is measured on sentences and their translations: give a target too")
    if not isinstance(package.model, TranslationModel) and (target or metric == "bleu"):
        raise RegardError("only translations have a target and a BLEU: this model is measured by its loss on a text")
    if metric == "loss":
        found = scan_loss(package, rows_of(package, source, target, to), quiet)
        return replace(found, left_out=len(source) - found.sentences if target else 0)
    return scan_bleu(Translator(package), source, target, to, quiet)


# ---- loss -------------------------------------------------------------------------------------------------------------


def scan_loss(package: ModelPackage, batches: Sequence[Rows], quiet: bool) -> Scan:
    """Batch by batch, so that what no decoder head changes is read once."""
    enough(sum(len(rows.wanted) for rows in batches))
    model, heads = package.model, heads_of(package.model)
    base, counts, zeroed = list[float](), list[int](), [list[float]() for _ in heads]
    with progress_bar("heads x batches", len(heads) * len(batches), quiet) as advance:
        for rows in batches:
            memory = memory_of(model, rows)
            base += losses_of(model, rows, memory)
            counts += (rows.wanted != PAD).sum(1).tolist()
            for own, (layer, head) in zip(zeroed, heads, strict=True):
                with changed(model, [Zero(layer, (head,))]):
                    own += losses_of(model, rows, memory_of(model, rows) if kind_of(layer) == "encoder" else memory)
                advance(1)
    n = np.array(counts)
    effects = [Effect(*head, *ratio(np.array(own) - base, n)) for head, own in zip(heads, zeroed, strict=True)]
    return Scan("loss", *ratio(np.array(base), n), len(n), tuple(effects))


def enough(sentences: int) -> None:
    if sentences < 2:
        raise RegardError(f"{sentences} sentence has no error to tell: give two at least that the model can read")


def ratio(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """sum / count over all sentences, and its standard error, if sentences are drawn independently."""
    value = sums.sum() / counts.sum()
    n = len(sums)
    spread = np.sqrt(((sums - value * counts) ** 2).sum() * n / max(1, n - 1)) / counts.sum()
    return float(value), float(spread)


# ---- BLEU -------------------------------------------------------------------------------------------------------------


def scan_bleu(
    translator: Translator, source: Sequence[str], target: Sequence[str], to: str | None, quiet: bool
) -> Scan:
    if len(source) != len(target):
        raise RegardError(
            f"the source has {len(source)} lines and the target {len(target)}: give files that are aligned"
        )
    heads, lines = heads_of(translator.model), list(source)
    enough(len(lines))
    bleu = Bleu(translator, target, to)
    with progress_bar("sentences", (len(heads) + 1) * len(lines), quiet) as advance:

        def counted() -> np.ndarray:
            found = translator.translate_sentences(lines, progress=advance, to=to, beam=1, nbest=1, temperature=0.0)
            return bleu.counts([translation.text for translation in found])

        base, effects = counted(), []
        for layer, head in heads:
            with changed(translator.model, [Zero(layer, (head,))]):
                own = counted()
            error = np.std([bleu.score(own[draw]) - bleu.score(base[draw]) for draw in bleu.draws])
            effects.append(Effect(layer, head, bleu.score(own) - bleu.score(base), float(error)))
    spread = float(np.std([bleu.score(base[draw]) for draw in bleu.draws]))
    return Scan("bleu", bleu.score(base), spread, len(lines), tuple(effects))


class Bleu:
    """sacreBLEU from the counts of sentences, so that it can be had of any sample of them."""

    def __init__(self, translator: Translator, references: Sequence[str], to: str | None = None) -> None:
        from sacrebleu.metrics import BLEU

        tokens = translator.tokenizers.target
        caseless = tokens.encode("Ab") == tokens.encode("aB")  # such a model is not blamed for what it cannot write
        language = (to or translator.target).lower().replace("_", "-").split("-")[0]
        self.metric = BLEU(tokenize=UNSPACED.get(language, "13a"), lowercase=caseless)
        self.references, n = references, len(references)
        self.draws = np.random.default_rng(0).integers(0, n, (DRAWS, n))

    def counts(self, texts: Sequence[str]) -> np.ndarray:
        """(sentences, 10): matches and totals of 1 to 4 words, and both lengths."""
        each = [self.metric.corpus_score([a], [[b]]) for a, b in zip(texts, self.references, strict=True)]
        return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in each])

    def score(self, counts: np.ndarray) -> float:
        *words, said, meant = counts.sum(0).tolist()
        return self.metric.compute_bleu(words[:4], words[4:], said, meant, "exp").score
