"""Head ablation: each attention head is zeroed alone, and the change of the loss, or of BLEU, is measured on a test file.

Every change is measured against the unchanged model on the same sentences, so its error is that of the differences: for
the loss the standard error of a ratio (nats over tokens, sentence by sentence), for BLEU a bootstrap over sentences. If
the change of a head is within twice its error, the file does not show that the head matters; of a hundred such heads a
few are beyond it by chance. Heads may replace each other, so several together may matter where one alone does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.noise import mask_tokens
from regard.decode.constraints import greedy_options, pad_rows
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.figures import Drawable, Image, draw
from regard.look.intervention_hooks import intervene, n_heads
from regard.look.interventions import LAYER_KINDS, Zero, layer_kind
from regard.look.record import attention_layers
from regard.metrics.translation_scores import UNSPACED
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.model import TranslationModel
from regard.terminal import progress_bar
from regard.text.special_tokens import PAD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESAMPLES = 200  # bootstrap samples of sentences for the error of BLEU
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}
TOKENS_PER_LOGITS = 1024  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class Effect:
    """The change of the metric when one head is ablated (zeroed)."""

    layer: str
    head: int
    change: float  # of the metric
    error: float  # the standard error of the change

    @property
    def name(self) -> str:
        return f"{self.layer}:{self.head}"

    @property
    def is_significant(self) -> bool:
        """Whether the change is more than twice its error."""
        return abs(self.change) > 2 * self.error


@dataclass(frozen=True)
class HeadImportance(Drawable):
    """The effects of zeroing each head of a model, on one test file."""

    metric: str  # loss or bleu
    baseline: float  # of the unchanged model: nats a token, or BLEU
    error: float  # the standard error of the baseline
    sentences: int
    effects: tuple[Effect, ...]
    left_out: int = 0  # pairs that are empty, or too long for the model

    @property
    def ranked(self) -> list[Effect]:
        """The effects, most harmful first."""
        return sorted(self.effects, key=lambda e: -e.change if self.metric == "loss" else e.change)

    @property
    def useless(self) -> list[Effect]:
        """The effects that are not significant."""
        return [e for e in self.ranked if not e.is_significant]

    def image(self, kind: str) -> Image:
        """Return the changes of one kind of attention, (layers, heads); NaN where a layer has fewer heads."""
        layers = dict.fromkeys(e.layer for e in self.effects if layer_kind(e.layer) == kind)
        own = {(e.layer, e.head): e.change for e in self.effects}
        width = max(e.head + 1 for e in self.effects if e.layer in layers)
        values = [[own.get((layer, head), np.nan) for head in range(width)] for layer in layers]
        return Image(kind, np.array(values), "head", "layer")

    def figure(self) -> Figure:
        """Draw one panel per kind of attention, all on one scale; dots mark significant effects."""
        kinds = [kind for kind in LAYER_KINDS if any(layer_kind(e.layer) == kind for e in self.effects)]
        what = "loss (nats a token)" if self.metric == "loss" else "BLEU"
        title = f"change of {what} without one head; {self.baseline:.3f} with all; dots: more than twice the error"
        figure = draw(title, [self.image(kind) for kind in kinds], len(kinds))
        most = max(abs(e.change) for e in self.effects) or 1.0
        for kind, axes in zip(kinds, (axes for axes in figure.axes if axes.images), strict=True):
            axes.images[0].set(cmap="RdBu_r", clim=(-most, most))
            rows, columns = axes.images[0].get_array().shape  # type: ignore[union-attr]
            axes.set(xticks=range(columns), yticks=range(rows))
            layers = list(dict.fromkeys(e.layer for e in self.effects if layer_kind(e.layer) == kind))
            dots = [(e.head, layers.index(e.layer)) for e in self.effects if e.layer in layers and e.is_significant]
            axes.scatter([x for x, _ in dots], [y for _, y in dots], s=12, color="black")
        return figure

    def __str__(self) -> str:
        unit = "nats a token" if self.metric == "loss" else "BLEU"
        without = f" ({self.left_out} left out: empty, or too long for this model)" if self.left_out else ""
        value = f"{self.baseline:.4f} {unit} with all heads (standard error {self.error:.4f})"
        first = f"{self.sentences} sentences{without}: {value}"
        shown = [e for e in self.ranked if e.is_significant]
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


def all_heads(model: nn.Module) -> list[tuple[str, int]]:
    """Return the layer and index of every attention head of a model."""
    found = [(name, head) for name, layer in attention_layers(model).items() for head in range(n_heads(layer))]
    if not found:
        raise RegardError("this model has no attention, so it has no heads to zero")
    return found


def scan_heads(
    package: ModelPackage,
    source: Sequence[str],
    target: Sequence[str] = (),
    metric: str = "loss",
    to: str | None = None,
    quiet: bool = False,
) -> HeadImportance:
    """Zero each head of a model in turn, and measure the teacher-forced loss, or the BLEU of greedy translations.

    A model that does not translate is measured on the texts of `source`; `to` is the target language of a model that
    knows several."""
    if metric not in ("loss", "bleu"):
        raise RegardError(f"the metric is loss or bleu, not '{metric}'")
    if isinstance(package.model, TranslationModel) and not target:
        raise RegardError("a model that translates is measured on sentences and their translations: give a target too")
    if not isinstance(package.model, TranslationModel) and (target or metric == "bleu"):
        raise RegardError("only translations have a target and a BLEU: this model is measured by its loss on a text")
    if metric == "loss":
        found = scan_loss(package, make_batches(package, source, target, to), quiet)
        return replace(found, left_out=len(source) - found.sentences if target else 0)
    return scan_bleu(Translator(package), source, target, to, quiet)


# ---- loss -------------------------------------------------------------------------------------------------------------


def scan_loss(package: ModelPackage, batches: Sequence[ScoredBatch], quiet: bool) -> HeadImportance:
    """Measure the loss batch by batch, so that the encoder runs once for all heads of the decoder."""
    check_enough(sum(len(batch.labels) for batch in batches))
    model, heads = package.model, all_heads(package.model)
    base, counts, zeroed = list[float](), list[int](), [list[float]() for _ in heads]
    with progress_bar("heads x batches", len(heads) * len(batches), quiet) as advance:
        for batch in batches:
            memory = encode_sources(model, batch)
            base += losses_of(model, batch, memory)
            counts += (batch.labels != PAD).sum(1).tolist()
            for own, (layer, head) in zip(zeroed, heads, strict=True):
                with intervene(model, [Zero(layer, (head,))]):
                    changed = encode_sources(model, batch) if layer_kind(layer) == "encoder" else memory
                    own += losses_of(model, batch, changed)
                advance(1)
    n = np.array(counts)
    effects = [Effect(*head, *ratio(np.array(own) - base, n)) for head, own in zip(heads, zeroed, strict=True)]
    return HeadImportance("loss", *ratio(np.array(base), n), len(n), tuple(effects))


@dataclass(frozen=True)
class ScoredBatch:
    """Some texts and the tokens that are scored: the next token, or for BERT the masked one; PAD where none is."""

    inputs: Tensor  # (B, T)
    labels: Tensor  # (B, T)
    source: Tensor | None = None  # (B, S)


@torch.inference_mode()
def encode_sources(model: nn.Module, batch: ScoredBatch) -> Any:
    """Return the encoder's memory of the sources; None for a model that does not translate."""
    return model.encode(batch.source) if isinstance(model, TranslationModel) and batch.source is not None else None


@torch.inference_mode()
def losses_of(model: nn.Module, batch: ScoredBatch, memory: Any) -> list[float]:
    """Return the sum of -log p over the scored tokens of each row."""
    translates = isinstance(model, TranslationModel)
    hidden = model.read_target(memory, batch.inputs) if translates else model.head_input(batch.inputs)  # type: ignore[operator]
    scored = batch.labels != PAD
    n = TOKENS_PER_LOGITS
    pieces = zip(hidden[scored].split(n), batch.labels[scored].split(n), strict=True)
    losses = [F.cross_entropy(model.head(h).float(), w, reduction="none") for h, w in pieces]  # type: ignore[operator]
    result = torch.zeros(len(batch.inputs), dtype=torch.float64, device=batch.inputs.device)
    return result.index_add(0, scored.nonzero()[:, 0], torch.cat(losses).double()).tolist()


def check_enough(sentences: int) -> None:
    if sentences < 2:
        raise RegardError(f"{sentences} sentence has no error to tell: give two at least that the model can read")


def ratio(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return sum / count over all sentences, and its standard error for independent sentences."""
    value = sums.sum() / counts.sum()
    n = len(sums)
    spread = np.sqrt(((sums - value * counts) ** 2).sum() * n / max(1, n - 1)) / counts.sum()
    return float(value), float(spread)


# ---- BLEU -------------------------------------------------------------------------------------------------------------


def scan_bleu(
    translator: Translator, source: Sequence[str], target: Sequence[str], to: str | None, quiet: bool
) -> HeadImportance:
    """Measure BLEU of greedy translations without each head."""
    if len(source) != len(target):
        raise RegardError(
            f"the source has {len(source)} lines and the target {len(target)}: give files that are aligned"
        )
    heads, lines = all_heads(translator.model), list(source)
    check_enough(len(lines))
    bleu = ResampledBleu(translator, target, to)
    with progress_bar("sentences", (len(heads) + 1) * len(lines), quiet) as advance:

        def counted() -> np.ndarray:
            found = translator.translate_sentences(lines, progress=advance, to=to, **greedy_options())
            return bleu.counts([translation.text for translation in found])

        base, effects = counted(), []
        for layer, head in heads:
            with intervene(translator.model, [Zero(layer, (head,))]):
                own = counted()
            error = np.std([bleu.score(own[draw]) - bleu.score(base[draw]) for draw in bleu.draws])
            effects.append(Effect(layer, head, bleu.score(own) - bleu.score(base), float(error)))
    spread = float(np.std([bleu.score(base[draw]) for draw in bleu.draws]))
    return HeadImportance("bleu", bleu.score(base), spread, len(lines), tuple(effects))


class ResampledBleu:
    """BLEU computed from the n-gram counts of sentences, so that any sample of them has one."""

    def __init__(self, translator: Translator, references: Sequence[str], to: str | None = None) -> None:
        from sacrebleu.metrics import BLEU

        tokens = translator.tokenizers.target
        caseless = tokens.encode("Ab") == tokens.encode("aB")  # a lowercased model is scored without case
        language = (to or translator.target).lower().replace("_", "-").split("-")[0]
        self.metric = BLEU(tokenize=UNSPACED.get(language, "13a"), lowercase=caseless)
        self.references, n = references, len(references)
        self.draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))

    def counts(self, texts: Sequence[str]) -> np.ndarray:
        """Return (sentences, 10): matches and totals of 1- to 4-grams, and both lengths."""
        each = [self.metric.corpus_score([a], [[b]]) for a, b in zip(texts, self.references, strict=True)]
        return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in each])

    def score(self, counts: np.ndarray) -> float:
        *words, length, reference_length = counts.sum(0).tolist()
        return self.metric.compute_bleu(words[:4], words[4:], length, reference_length, "exp").score


# ---- texts to measure the loss on -------------------------------------------------------------------------------------


def make_batches(
    package: ModelPackage, source: Sequence[str], target: Sequence[str] = (), to: str | None = None
) -> list[ScoredBatch]:
    """Return all texts in batches, the longest first."""
    device = next(package.model.parameters()).device
    texts = [text for text in texts_of(package, source, target, to) if any(id != PAD for id in text[1])]
    if not texts:
        raise RegardError("there is no text to measure the loss on: give a file with some lines")
    batches = []
    for group in group_by_tokens(texts, TOKENS_PER_BATCH["cuda" if device.type == "cuda" else "cpu"]):
        inputs, labels, sources = (pad_rows([text[i] for text in group], device) for i in range(3))
        batches.append(ScoredBatch(inputs, labels, sources if target else None))
    return batches


Text = tuple[list[int], list[int], list[int]]  # inputs, labels, source


def group_by_tokens(texts: list[Text], tokens: int) -> Iterator[list[Text]]:
    order = sorted(texts, key=lambda text: -len(text[0]) - len(text[2]))
    while order:
        size = max(1, tokens // (len(order[0][0]) + len(order[0][2])))
        yield order[:size]
        order = order[size:]


def texts_of(package: ModelPackage, source: Sequence[str], target: Sequence[str], to: str | None) -> Iterator[Text]:
    """Yield texts as the model is trained on them: translations, continued texts or masked tokens."""
    if isinstance(package.model, TranslationModel):
        return translation_texts(Translator(package), source, target, to)
    kind = architecture_of(package.config)
    classifies = kind.gives_classes(package.config)
    if (kind.generates or kind.fills_blanks) and not classifies and package.tokenizers is not None:
        lines = (package.tokenizers.target.encode(line) for line in source if line.strip())
        return (language_model_texts if kind.generates else masked_texts)(package, lines)
    raise RegardError("heads are scanned in models that translate, write or fill in blanks; this one does not")


def translation_texts(
    translator: Translator, source: Sequence[str], target: Sequence[str], to: str | None
) -> Iterator[Text]:
    """Yield the pairs that are neither empty nor too long for the model."""
    if len(source) != len(target):
        raise RegardError(
            f"the source has {len(source)} lines and the target {len(target)}: give files that are aligned"
        )
    template, most = translator.token_template, translator.model.config.max_len
    sources, _ = translator.encode_sources(source, to)
    for read, written in zip(sources, translator.tokenizers.target.encode_batch(target), strict=True):
        text = (
            [*template.start, *written],
            [*[PAD] * (len(template.start) - 1), *written, *template.end],
            template.wrap(read),
        )
        if read and written and max(map(len, text)) <= most:
            yield text


def language_model_texts(package: ModelPackage, lines: Iterator[list[int]]) -> Iterator[Text]:
    """Yield lines with their special tokens; without special tokens, windows of all lines joined."""
    template, most = package.token_template, package.config.max_len + 1
    rows = [template.wrap(ids) for ids in lines] if template.wrap(()) else [[id for ids in lines for id in ids]]
    given = max(0, len(template.before) - 1)
    for ids in (row[i : i + most] for row in rows for i in range(0, len(row), most - 1)):
        if len(ids) > 1 + given:
            yield ids[:-1], [*[PAD] * given, *ids[1 + given :]], []


def masked_texts(package: ModelPackage, lines: Iterator[list[int]]) -> Iterator[Text]:
    """Yield lines with masked tokens, the same ones in every scan."""
    assert package.tokenizers is not None
    rng, template = np.random.default_rng(0), package.token_template
    for ids in lines:
        framed = np.array(template.wrap(ids[: package.config.max_len - len(template.wrap(()))]))
        inputs, labels = mask_tokens(framed, rng, package.config.source_vocab, package.tokenizers.source.special)
        yield inputs.tolist(), labels.tolist(), []
