"""The study's numbers as Markdown tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from regard.config.registry import PARTS, find
from regard.files import disk_errors, write_text
from regard.studies.job import rows_of

Scores = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Scores]]  # row -> length -> scores

# Colour and marker: the row. Line: the hook by which its scheme acts.
LINES: dict[str, Any] = {"none": ":", "embed": "--", "rotation": "-", "bias": "-.", "scores": (0, (5, 1, 1, 1, 1, 1))}
COLOURS = (
    *("#000000", "#a6761d", "#e7298a", "#7f7f7f", "#08306b", "#2b7bba", "#00a6c8", "#7bb3e0", "#b30000", "#ff7f00"),
    *("#c7b000", "#1b9e3e", "#8bc34a", "#6a3d9a", "#c39bd3", "#5f9ea0", "#8b4513", "#ff69b4", "#556b2f", "#4b0082"),
)
MARKERS = "osD^vP*XhpdH<>8"


def styles() -> dict[str, dict[str, Any]]:
    """How each row of the study is drawn, for every scheme that there is."""
    rows = {row: find("positions", name) for name in PARTS["positions"] for row in rows_of(name)}
    return {
        row: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[scheme.hook()],
            "label": row,
        }
        for i, (row, scheme) in enumerate(rows.items())
    }


def write(out: Path, results: Mapping[str, Any]) -> None:
    """table.md and positions.png."""
    write_text(out / "table.md", tables(results))
    with disk_errors(out):
        picture(results).savefig(out / "positions.png", dpi=150)


# ---- tables -----------------------------------------------------------------------------------------------------------


def tables(results: Mapping[str, Any]) -> str:
    setting = results["setting"]
    s = setting["settings"]
    model = f"{s['layers']} layers, width {s['width']}, {s['heads']} heads"
    training = f"{s['steps']:,} steps of {s['batch']} x {s['length']} tokens, seed {s['seed']}"
    lengths = [str(n * s["length"]) for n in s["multiples"]]
    last = f"over the last {s['length']} characters of each window, the same ones at every length"
    parts = [
        f"# Position schemes, trained at length {s['length']}",
        f"Decoder-only models ({model}), one of each; {training}. {setting['device']}, torch {setting['torch']}.",
        f"## Bits per character, {last}",
        table(results["lm"], lengths, lambda scores: f"{scores['last']:.3f}"),
        "## Bits per character, over whole windows",
        table(results["lm"], lengths, lambda scores: f"{scores['whole']:.3f}"),
        "## Copying: symbols right, and in brackets whole strings right, in percent",
        table(results["copy"], lengths, lambda scores: f"{scores['symbols']:.1%} ({scores['strings']:.1%})"),
        *remarks(results),
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: Rows, lengths: list[str], cell: Callable[[Scores], str]) -> str:
    lines = [["positions", *lengths], ["---", *("---:" for _ in lengths)]]
    lines += [[row, *(cell(scores[length]) for length in lengths)] for row, scores in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(results: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables must know: missing rows, and trainings that broke off."""
    found = [f"{name} failed: {reason}" for name, reason in results["failed"].items()]
    for name, training in results["training"].items():
        if training["first_bad_step"]:
            step = training["first_bad_step"]
            found.append(f"{name}: the loss was not finite at step {step}; tested with the weights before it")
    return ["\n".join(f"- {remark}" for remark in found)] if found else []


# ---- picture ----------------------------------------------------------------------------------------------------------


def picture(results: Mapping[str, Any]) -> Figure:
    s = results["setting"]["settings"]
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    (lm, copy), (along, legend) = figure.subplots(2, 2)
    by_length(lm, results["lm"], s, "last")
    lm.set(title=f"Text: the last {s['length']} characters of a window", ylabel="bits per character", yscale="log")
    by_length(copy, results["copy"], s, "symbols")
    copy.set(title="Copy: symbols right", ylabel="share", ylim=(-0.03, 1.03))
    along_window(along, results["lm"], s)
    for axes in (lm, along):
        plain_log_axis(axes)
    legend.axis("off")
    known = styles()
    lines = {line.get_label(): line for axes in (lm, copy) for line in axes.get_lines() if line.get_label() in known}
    ordered = [row for row in known if row in lines]
    legend.legend([lines[row] for row in ordered], ordered, ncols=2, loc="center", handlelength=4, fontsize=11)
    return figure


def by_length(axes: Axes, rows: Rows, s: Mapping[str, Any], score: str) -> None:
    lengths = [n * s["length"] for n in s["multiples"]]
    known = styles()
    for row, scores in rows.items():
        axes.plot(lengths, [scores[str(n)][score] for n in lengths], markersize=6, linewidth=1.7, **known[row])
    axes.set_xscale("log", base=2)
    axes.xaxis.set(major_locator=FixedLocator(lengths), major_formatter=FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel(f"tested length (trained: {s['length']})")
    axes.grid(alpha=0.3)


def along_window(axes: Axes, rows: Rows, s: Mapping[str, Any]) -> None:
    """Bits per character against the place in the longest window; the trained length is marked."""
    longest, step = max(s["multiples"]) * s["length"], s["length"] // 4
    places = [step * i + step / 2 for i in range(longest // step)]
    known = styles()
    for row, scores in rows.items():
        axes.plot(places, scores[str(longest)]["along"], linewidth=1.7, **{**known[row], "marker": ""})
    axes.axvline(s["length"], color="#999999", linewidth=1)
    axes.set(title=f"Text: along windows of {longest}", xlabel="position", ylabel="bits per character", yscale="log")
    axes.grid(alpha=0.3)


def plain_log_axis(axes: Axes) -> None:
    """Bits differ by factors between schemes, but are read as numbers."""
    axes.yaxis.set(
        major_locator=MaxNLocator(8), minor_locator=NullLocator(), major_formatter=FuncFormatter(lambda y, _: f"{y:g}")
    )
