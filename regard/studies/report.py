"""The study's numbers as Markdown tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from regard.files import disk_errors, write_text

Scores = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Scores]]  # row -> length -> scores

# Colour: the row. Line: its family (added to the embeddings, rotation, bias, contextual).
STYLES = {
    "none": ("#000000", ":"),
    "linear": ("#a6761d", "--"),
    "sinusoidal": ("#e7298a", "--"),
    "learned": ("#7f7f7f", "--"),
    "rope": ("#08306b", "-"),
    "rope + linear": ("#2b7bba", "-"),
    "rope + ntk": ("#00a6c8", "-"),
    "yarn": ("#7bb3e0", "-"),
    "t5": ("#b30000", "-."),
    "alibi": ("#ff7f00", "-."),
    "kerple-log": ("#c7b000", "-."),
    "kerple-power": ("#1b9e3e", "-."),
    "fire": ("#8bc34a", "-."),
    "shaw": ("#6a3d9a", (0, (5, 1, 1, 1, 1, 1))),
    "cope": ("#c39bd3", (0, (5, 1, 1, 1, 1, 1))),
}
MARKERS = "osD^vP*XhpdH<>8"


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
    lines = {line.get_label(): line for axes in (lm, copy) for line in axes.get_lines() if line.get_label() in STYLES}
    ordered = [row for row in STYLES if row in lines]
    legend.legend([lines[row] for row in ordered], ordered, ncols=2, loc="center", handlelength=4, fontsize=11)
    return figure


def style(row: str) -> dict[str, Any]:
    colour, line = STYLES[row]
    return {"color": colour, "linestyle": line, "label": row, "linewidth": 1.7}


def by_length(axes: Axes, rows: Rows, s: Mapping[str, Any], score: str) -> None:
    lengths = [n * s["length"] for n in s["multiples"]]
    for row, scores in rows.items():
        marker = MARKERS[list(STYLES).index(row)]
        axes.plot(lengths, [scores[str(n)][score] for n in lengths], marker=marker, markersize=6, **style(row))
    axes.set_xscale("log", base=2)
    axes.xaxis.set(major_locator=FixedLocator(lengths), major_formatter=FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel(f"tested length (trained: {s['length']})")
    axes.grid(alpha=0.3)


def along_window(axes: Axes, rows: Rows, s: Mapping[str, Any]) -> None:
    """Bits per character against the place in the longest window; the trained length is marked."""
    longest, step = max(s["multiples"]) * s["length"], s["length"] // 4
    places = [step * i + step / 2 for i in range(longest // step)]
    for row, scores in rows.items():
        axes.plot(places, scores[str(longest)]["along"], **style(row))
    axes.axvline(s["length"], color="#999999", linewidth=1)
    axes.set(title=f"Text: along windows of {longest}", xlabel="position", ylabel="bits per character", yscale="log")
    axes.grid(alpha=0.3)


def plain_log_axis(axes: Axes) -> None:
    """Bits differ by factors between schemes, but are read as numbers."""
    axes.yaxis.set(
        major_locator=MaxNLocator(8), minor_locator=NullLocator(), major_formatter=FuncFormatter(lambda y, _: f"{y:g}")
    )
