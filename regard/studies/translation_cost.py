"""`regard study translation-cost`: BLEU against training FLOPs, Table 2 of the Transformer's paper at a small scale.

Systems of the table learn Multi30k, German to English: recurrent ones without and with attention, deep ones (GNMT,
Deep-Att), a mixture of experts, convolutions, Transformers, GNMT and a Transformer fine-tuned on a reward. Then ensembles
and minimum-Bayes-risk decoding translate with models that are there already. FLOPs are counted for every batch of the
training, not estimated from time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from regard.device import pick_device
from regard.files import disk_errors, read_json, write_text
from regard.inference.translator import Translator
from regard.metrics.translation_scores import score_translations
from regard.studies.job_pool import choose, describe_setting
from regard.studies.translation_models import (
    COLOURS,
    MARKERS,
    STARTS_FROM,
    TITLES,
    VALIDATION,
    Pair,
    read_split,
    read_tests,
    train_models,
    translate_pairs,
    translators_folder,
)
from regard.training.metrics_log import print_message

WIDE = ("wide-1", "wide-2", "wide-3")


def seeds(name: str) -> tuple[str, str, str]:
    """Return the three models that differ by their seed alone."""
    return name, f"{name}-seed-1", f"{name}-seed-2"


MODELS = (
    *("lstm", "rnnsearch", "bytenet", *seeds("deep-att"), *seeds("gnmt"), *seeds("gnmt-reward")),
    *(*seeds("convs2s"), "experts", "transformer", "reward", *WIDE),
)
ENSEMBLES = {  # models that translate together
    "deep-att-ensemble": seeds("deep-att"),
    "gnmt-ensemble": seeds("gnmt-reward"),
    "convs2s-ensemble": seeds("convs2s"),
    "ensemble": WIDE,
}
# Rows that translate with trained models in another way: the models, and options of decoding.
DECODED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{name: (members, {}) for name, members in ENSEMBLES.items()},
    "mbr": (("transformer",), {"mbr": 64, "mbr_metric": "bleu"}),
}
TEST = "test_2016_flickr"
KEPT = ("parameters", "steps", "tokens", "flops", "seconds", "curve")  # copied from the result of a training
Rows = Mapping[str, Mapping[str, Any]]  # model -> numbers


def study(
    out: Path,
    data: Path,
    jobs: int = 1,
    device: str = "auto",
    quick: bool = False,
    systems: Sequence[str] | None = None,
) -> Path:
    """Train the models that are missing; write results.json, table.md and translation-cost.png into `out`, and return it.

    `data` is the folder of Multi30k. The models are kept in the folder `translators` beside `out`. `systems` are rows to
    measure, by default all, with those that they use.
    """
    wanted = with_parts(choose("system", systems, (*MODELS, *DECODED)))
    models = [name for name in MODELS if name in wanted]
    found = train_models(models, out, data, jobs, device, quick)
    splits = {"valid": read_split(data, VALIDATION, quick), "test": read_tests(data, quick)[TEST]}
    rows = {name: make_row(found[name], splits) for name in models}
    for name, first in STARTS_FROM.items():  # what the model that it starts from has cost counts too
        if name in rows:
            for key in ("flops", "seconds", "steps", "tokens"):
                rows[name][key] += rows[first][key]
            rows[name]["curve"] = []  # its loss is another one
    for name, (members, options) in DECODED.items():
        if name in wanted:
            translations = decode(name, found, splits, out, options, device, quick)
            costs = {key: sum(rows[member][key] for member in members) for key in KEPT if key != "curve"}
            rows[name] = costs | {"curve": []} | score_row(translations, splits)
    where = describe_setting(str(pick_device(device)), quick)
    results = {"setting": where | {"jobs": jobs}, "rows": rows}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    with disk_errors(out):
        plot_results(results["rows"]).savefig(out / "translation-cost.png", dpi=150)
    return out


def with_parts(systems: Sequence[str]) -> set[str]:
    """Return the names of rows together with the models that they are made of: members, and models to begin with."""
    members = {member for name in systems for member in (DECODED[name][0] if name in DECODED else (name,))}
    return {*systems, *members, *(STARTS_FROM[name] for name in members if name in STARTS_FROM)}


def make_row(found: Mapping[str, Any], splits: Mapping[str, list[Pair]]) -> dict[str, Any]:
    """Return the training cost of a model and its BLEU."""
    translations = {"valid": found["valid"], "test": found["translations"][TEST]["1"]}
    return {key: found[key] for key in KEPT} | score_row(translations, splits)


def decode(
    name: str,
    found: Mapping[str, Mapping[str, Any]],
    splits: Mapping[str, list[Pair]],
    out: Path,
    options: Mapping[str, Any],
    device: str,
    quick: bool,
) -> dict[str, list[str]]:
    """Return the translations by trained models together, or by other options; they are kept in a file beside the models."""
    members, folder = DECODED[name][0], translators_folder(out, quick)
    options = {**options, **({"mbr": 4} if quick and "mbr" in options else {})}
    identity, file = (
        {"models": [found[member]["of"] for member in members], "options": options},
        folder / f"{name}.json",
    )
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if (kept := read_json(file))["of"] == identity:
            return dict(kept["translations"])
    print_message(f"{name}: translating")
    runs = [folder / member for member in members]
    translator = Translator.load(runs if len(runs) > 1 else runs[0], device)
    translations = {split: translate_pairs(translator, pairs, **options) for split, pairs in splits.items()}
    write_text(file, json.dumps({"of": identity, "translations": translations}, indent=1, ensure_ascii=False))
    return translations


def score_row(translations: Mapping[str, list[str]], splits: Mapping[str, list[Pair]]) -> dict[str, float]:
    """Return the BLEU of translations of the validation data and of the test set."""
    found = {}
    for name, pairs in splits.items():
        sources, references = zip(*pairs, strict=True)
        found[name] = score_translations(translations[name], references, sources, "en")
    valid, test = found["valid"], found["test"]
    scores = {"bleu_valid": valid.bleu_lower, "bleu_tokenized": test.bleu_tokenized, "bleu_lower": test.bleu_lower}
    return {name: score.value for name, score in scores.items()}


def format_table(results: Mapping[str, Any]) -> str:
    """Return the Markdown report."""
    head = ["", "parameters", "steps", "training FLOPs", "seconds", "validation", "BLEU, tokenized", "sacreBLEU"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, found in results["rows"].items():
        numbers = [
            f"{found['parameters']:,}",
            f"{found['steps']:,}",
            f"{found['flops']:.2e}",
            f"{found['seconds']:.0f}",
        ]
        scores = (found.get("bleu_valid"), found["bleu_tokenized"], found["bleu_lower"])
        lines.append([TITLES[name], *numbers, *("" if score is None else f"{score:.2f}" for score in scores)])
    where = results["setting"]
    shared = "" if where["jobs"] == 1 else f", {where['jobs']} trainings at a time"
    machine = f"{where['device']}{shared}, torch {where['torch']}, {where['date'][:10]}"
    note = f"BLEU lower-cased: sacreBLEU of the validation data, both of {TEST}. {machine}."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{note}\n\n```\n{where['command']}\n```\n"


def plot_results(rows: Rows) -> Figure:
    """Return the figure: BLEU and validation loss against training FLOPs."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_bleu(left, rows)
    plot_losses(right, rows)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="training FLOPs")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3, which="both")
    return figure


def seeds_of(name: str, rows: Rows) -> list[Mapping[str, Any]]:
    """Return the rows of a model and of those that differ from it by their seed alone; none unless it is their first."""
    names = WIDE if name in WIDE else seeds(name.split("-seed-")[0])
    found = [each for each in names if each in rows]
    return [rows[each] for each in found] if name == found[0] else []


def style_of(name: str) -> dict[str, Any]:
    """Return colour and marker of a model."""
    first = WIDE[0] if name in WIDE else name.split("-seed-")[0]
    return {"color": COLOURS[name], "marker": MARKERS.get(first, "o")}


def title_of(name: str, n_seeds: int) -> str:
    """Return the title of a model that stands for several seeds."""
    return TITLES[name] if n_seeds == 1 else f"{TITLES[name].split(', seed ')[0]}, {n_seeds} seeds"


def plot_bleu(axes: Axes, rows: Rows) -> None:
    """Plot the BLEU of each model against its training FLOPs: the mean over seeds, and a bar from the least to the most."""
    for name in rows:
        if not (found := seeds_of(name, rows)):
            continue
        scores = [row["bleu_tokenized"] for row in found]
        mean, flops = sum(scores) / len(scores), sum(row["flops"] for row in found) / len(found)
        spread = [[mean - min(scores)], [max(scores) - mean]] if len(found) > 1 else None
        style = {**style_of(name), "markersize": 9, "linestyle": "", "capsize": 3}
        axes.errorbar(flops, mean, yerr=spread, label=title_of(name, len(found)), **style)
    axes.set(title="After training", ylabel="BLEU, tokenized, lower-cased")
    axes.margins(0.15)
    if axes.lines:
        axes.legend(fontsize="x-small")


def plot_losses(axes: Axes, rows: Rows) -> None:
    """Plot the validation loss of one seed of each model that has the common vocabulary: Deep-Att has words."""
    for name, found in rows.items():
        if not seeds_of(name, rows) or not found["curve"] or name.startswith("deep-att"):
            continue
        at, losses = zip(*((point["flops"], point["loss"]) for point in found["curve"]), strict=True)
        axes.plot(at, losses, markersize=4, label=TITLES[name].split(":")[0], **style_of(name))
    if axes.lines:
        axes.legend(fontsize="x-small")
    axes.set(title="During training", ylabel="validation loss, nats a piece")
