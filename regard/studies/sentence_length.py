"""`regard study sentence-length`: BLEU by the length of the source, with one vector for all of it or with attention.

RNNenc must press every source into one vector, RNNsearch and the Transformer look at all of it. Multi30k has few long
sentences, so there are two readings of length: the sentences as they are, in bins; and neighbouring sentences joined to one
source. At every number joined it is the same sentences that are scored, only the models, trained on single ones, see them
otherwise.
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
from regard.studies.finetuning import setting
from regard.studies.translators import COLOURS, JOINS, TESTS, TITLES, Pair, joined, read_tests, train_all

MODELS = ("rnnenc", "rnnsearch", "transformer")
BOUNDS = (0, 7, 9, 11, 14, 19)  # words: a bin goes from above one to the next, the last one has no end
Row = dict[str, Any]  # some sources and what became of them


def study(out: Path, data: Path, jobs: int = 1, device: str = "auto", quick: bool = False) -> Path:
    """Train what is not there yet and write results.json, table.md and sentence-length.png into `out`, which is returned.

    `data` is the folder of Multi30k. The models are kept in the folder `translators` beside `out`."""
    found = train_all(MODELS, out, data, jobs, device, quick)
    tests = read_tests(data, quick)
    said = {n: {name: translated(result, n) for name, result in found.items()} for n in JOINS}
    pairs = {n: [pair for test in TESTS for pair in joined(tests[test], n)] for n in JOINS}
    results = {
        "setting": setting(str(pick_device(device)), quick),
        "by_length": by_length(pairs[1], said[1]),
        "joined": [{"label": str(n), **row(pairs[n], said[n])} for n in JOINS],
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", tables(results))
    with disk_errors(out):
        picture(results).savefig(out / "sentence-length.png", dpi=150)
    return out


def translated(result: Mapping[str, Any], n: int) -> list[str]:
    return [text for test in TESTS for text in result["translations"][test][str(n)]]


# ---- numbers ------------------------------------------------------------------------------------------------------------


def bins(lengths: Sequence[int]) -> dict[str, list[int]]:
    """{words: which sentences have so many}, of the bins that have any."""
    found = {}
    for above, longest in pairwise((*BOUNDS, max(*BOUNDS, *lengths) + 1)):
        label = f"{above + 1}+" if above == BOUNDS[-1] else f"{above + 1} to {longest}"
        found[label] = [i for i, length in enumerate(lengths) if above < length <= longest]
    return {label: chosen for label, chosen in found.items() if chosen}


def by_length(pairs: Sequence[Pair], said: Mapping[str, Sequence[str]]) -> list[Row]:
    rows = []
    for label, chosen in bins([len(source.split()) for source, _ in pairs]).items():
        texts = {name: [hypotheses[i] for i in chosen] for name, hypotheses in said.items()}
        rows.append({"label": label, **row([pairs[i] for i in chosen], texts)})
    return rows


def row(pairs: Sequence[Pair], said: Mapping[str, Sequence[str]]) -> Row:
    """BLEU of each model, tokenised and lower-cased, and how many words it writes for each of the reference."""
    sources, references = zip(*pairs, strict=True)
    scores = {name: score_translations(hypotheses, references, sources, "en") for name, hypotheses in said.items()}
    return {
        "sources": len(pairs),
        "words": mean(len(source.split()) for source in sources),
        "bleu": {name: found.bleu_tokenised.value for name, found in scores.items()},
        "bleu_lower": {name: found.bleu_lower.value for name, found in scores.items()},
        "ratio": {name: words(hypotheses) / words(references) for name, hypotheses in said.items()},
    }


def words(texts: Sequence[str]) -> int:
    return sum(len(tokenize_lower(text, "en").split()) for text in texts)


# ---- tables and picture -------------------------------------------------------------------------------------------------


def tables(results: Mapping[str, Any]) -> str:
    where = results["setting"]
    parts = [
        "## BLEU by the length of the source",
        table("source words", results["by_length"]),
        "## BLEU of neighbouring sentences joined to one source",
        table("sentences joined", results["joined"]),
        "In brackets: words written for each word of the references. BLEU tokenised and lower-cased, on "
        f"{' and '.join(TESTS)}. {where['device']}, torch {where['torch']}, {where['date'][:10]}.",
        f"```\n{where['command']}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def table(what: str, rows: Sequence[Row]) -> str:
    head = [what, "sources", "mean words", *(TITLES[name] for name in MODELS)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for found in rows:
        scores = [f"{found['bleu'][name]:.1f} ({found['ratio'][name]:.2f})" for name in MODELS]
        lines.append([found["label"], f"{found['sources']:,}", f"{found['words']:.1f}", *scores])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def picture(results: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, results["by_length"])
    left.set(title="Sentences as they are", ylabel="BLEU, tokenised, lower-cased")
    left.legend()
    draw(right, results["joined"])
    right.set(title=f"{JOINS[0]} to {JOINS[-1]} neighbouring sentences joined")
    return figure


def draw(axes: Axes, rows: Sequence[Row]) -> None:
    for name in MODELS:
        scores = [found["bleu"][name] for found in rows]
        axes.plot([found["words"] for found in rows], scores, marker="o", color=COLOURS[name], label=TITLES[name])
    axes.set(xlabel="words in the source", ylim=(0, None))
    axes.grid(alpha=0.3)
