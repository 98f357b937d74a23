"""`regard study sentence-length`: BLEU by the length of the source, with one context vector or with attention.

RNNenc compresses every source into one vector; RNNsearch and the Transformer attend to all of it. Multi30k has few long
sentences, so length is varied in two ways: sentences as they are, in bins; and neighbouring sentences joined to one source.
The same sentences are scored at every number joined; the models were trained on single ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.device import pick_device
from regard.files import disk_errors, write_text
from regard.metrics.translation_scores import score_translations, tokenize_lower
from regard.studies.job_pool import describe_setting
from regard.studies.translation_models import (
    COLOURS,
    JOINS,
    TEST_SETS,
    TITLES,
    Pair,
    join_sentences,
    read_tests,
    train_models,
)

MODELS = ("rnnenc", "rnnsearch", "transformer")
BOUNDS = (0, 7, 9, 11, 14, 19)  # words: each bin is above one bound up to the next; the last one is open
ScoreRow = dict[str, Any]  # the scores of some sources


def study(out: Path, data: Path, jobs: int = 1, device: str = "auto", quick: bool = False) -> Path:
    """Train the models that are missing; write results.json, table.md and sentence-length.png into `out`, and return it.

    `data` is the folder of Multi30k. The models are kept in the folder `translators` beside `out`.
    """
    found = train_models(MODELS, out, data, jobs, device, quick)
    tests = read_tests(data, quick)
    translations = {n: {name: select_translations(result, n) for name, result in found.items()} for n in JOINS}
    pairs = {n: [pair for test in TEST_SETS for pair in join_sentences(tests[test], n)] for n in JOINS}
    results = {
        "setting": describe_setting(str(pick_device(device)), quick),
        "by_length": score_by_length(pairs[1], translations[1]),
        "joined": [{"label": str(n), **score_row(pairs[n], translations[n])} for n in JOINS],
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_tables(results))
    with disk_errors(out):
        plot_results(results).savefig(out / "sentence-length.png", dpi=150)
    return out


def select_translations(result: Mapping[str, Any], n: int) -> list[str]:
    return [text for test in TEST_SETS for text in result["translations"][test][str(n)]]


# ---- numbers ----------------------------------------------------------------------------------------------------------


def bin_by_length(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Return {range of words: indices of the sentences in it}, without empty bins."""
    found = {}
    for above, longest in pairwise((*BOUNDS, max(*BOUNDS, *lengths) + 1)):
        label = f"{above + 1}+" if above == BOUNDS[-1] else f"{above + 1} to {longest}"
        found[label] = [i for i, length in enumerate(lengths) if above < length <= longest]
    return {label: chosen for label, chosen in found.items() if chosen}


def score_by_length(pairs: Sequence[Pair], translations: Mapping[str, Sequence[str]]) -> list[ScoreRow]:
    """Return the scores of each bin of sentences."""
    rows = []
    for label, chosen in bin_by_length([len(source.split()) for source, _ in pairs]).items():
        texts = {name: [hypotheses[i] for i in chosen] for name, hypotheses in translations.items()}
        rows.append({"label": label, **score_row([pairs[i] for i in chosen], texts)})
    return rows


def score_row(pairs: Sequence[Pair], translations: Mapping[str, Sequence[str]]) -> ScoreRow:
    """Return the BLEU of each model, tokenized and lower-cased, and its number of words per word of the references."""
    sources, references = zip(*pairs, strict=True)
    scores = {
        name: score_translations(hypotheses, references, sources, "en") for name, hypotheses in translations.items()
    }
    return {
        "sources": len(pairs),
        "words": mean(len(source.split()) for source in sources),
        "bleu": {name: found.bleu_tokenized.value for name, found in scores.items()},
        "bleu_lower": {name: found.bleu_lower.value for name, found in scores.items()},
        "ratio": {name: count_words(hypotheses) / count_words(references) for name, hypotheses in translations.items()},
    }


def count_words(texts: Sequence[str]) -> int:
    return sum(len(tokenize_lower(text, "en").split()) for text in texts)


# ---- tables and plot --------------------------------------------------------------------------------------------------


def format_tables(results: Mapping[str, Any]) -> str:
    """Return the Markdown report."""
    where = results["setting"]
    parts = [
        "## BLEU by the length of the source",
        format_table("source words", results["by_length"]),
        "## BLEU of neighbouring sentences joined to one source",
        format_table("sentences joined", results["joined"]),
        "In brackets: words written for each word of the references. BLEU tokenized and lower-cased, on "
        f"{' and '.join(TEST_SETS)}. {where['device']}, torch {where['torch']}, {where['date'][:10]}.",
        f"```\n{where['command']}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def format_table(what: str, rows: Sequence[ScoreRow]) -> str:
    """Return a Markdown table of BLEU and length ratio of each model."""
    head = [what, "sources", "mean words", *(TITLES[name] for name in MODELS)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for found in rows:
        scores = [f"{found['bleu'][name]:.1f} ({found['ratio'][name]:.2f})" for name in MODELS]
        lines.append([found["label"], f"{found['sources']:,}", f"{found['words']:.1f}", *scores])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot_results(results: Mapping[str, Any]) -> Figure:
    """Return the figure: BLEU against source length, by bins and by joined sentences."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    plot_models(left, results["by_length"])
    left.set(title="Sentences as they are", ylabel="BLEU, tokenized, lower-cased")
    left.legend()
    plot_models(right, results["joined"])
    right.set(title=f"{JOINS[0]} to {JOINS[-1]} neighbouring sentences joined")
    return figure


def plot_models(axes: Axes, rows: Sequence[ScoreRow]) -> None:
    """Plot the BLEU of every model against the mean length of the sources."""
    for name in MODELS:
        scores = [found["bleu"][name] for found in rows]
        axes.plot([found["words"] for found in rows], scores, marker="o", color=COLOURS[name], label=TITLES[name])
    axes.set(xlabel="words in the source", ylim=(0, None))
    axes.grid(alpha=0.3)
