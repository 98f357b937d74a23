"""The report of `regard study cell-search`: a table, a picture of the found cell as a graph, and a recipe that trains it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from regard.layers.expression_cell import parse, to_python
from regard.look.cell_figure import measure_graph, paint_graph
from regard.look.figures import save
from regard.studies.stacked_training import name_largest_rates


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown report."""
    ratios = compare(results)
    lines = [["task", "GRU", "LSTM", "found cell", "found / GRU"], ["---", *["---:"] * 4]]
    for task, ratio in ratios.items():
        name = f"{task} (held out)" if task == results["held_out"] else task
        cells = [format_spread(results["accuracies"][cell][task]) for cell in ("GRU", "LSTM", "found")]
        lines.append([name, *cells, f"{ratio:.3f}"])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    where, widths = results["setting"], results["widths"]
    n = len(results["accuracies"]["GRU"][results["held_out"]])
    note = (
        f"Accuracies of {n} seeds that the search did not use: mean, and standard deviation in brackets. Equal numbers of "
        f"parameters: a GRU of width {widths['GRU']}, the found cell of width {widths['found']}. The search evaluated "
        f"{results['cells']:,} cells in {results['rounds']} rounds; {results['scored']:,} of them passed the first task. "
        f"With the comparison it took {results['minutes']:.1f} minutes of {results['jobs']} "
        f"{'process' if results['jobs'] == 1 else 'processes'}. "
        f"{name_largest_rates(results['sizes']['lrs'], gather_rates(results['best_lrs']))} "
        f"CPU, torch {where['torch']}, {where['date'][:10]}."
    )
    if (earlier := results["evaluations"] + 3 * n - results["evaluations_run_now"]) > 0:
        note += f" The results of {earlier:,} evaluations were there from an earlier run, with their times."
    code = to_python(parse(results["graph"]), "found", "A cell that `regard study cell-search` found.")
    found = "The found cell:\n\n```\n" + results["graph"].replace("; ", "\n") + "\n```"
    parts = [judge(results), table, note, found, f"As Python:\n\n```python\n{code}```", f"```\n{where['command']}\n```"]
    return "\n\n".join(parts) + "\n"


def gather_rates(rates: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the best learning rates of each task, those of all cells together."""
    return {task: [lr for cell in rates.values() for lr in cell[task]] for task in rates["GRU"]}


def compare(results: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy of the found cell divided by that of the GRU, for each task."""
    means = {
        cell: {task: statistics.mean(values) for task, values in tasks.items()}
        for cell, tasks in results["accuracies"].items()
    }
    return {task: means["found"][task] / max(means["GRU"][task], 1e-9) for task in means["GRU"]}


def judge(results: dict[str, Any]) -> str:
    """Return whether the found cell is at least as good as the GRU, and where it is not."""
    ratios = compare(results)
    worse = [f"{task} ({ratio:.3f})" for task, ratio in ratios.items() if ratio < 1]
    mean = f"its accuracy is {statistics.mean(ratios.values()):.3f} times the GRU's on average"
    if not worse:
        return f"The found cell is at least as good as the GRU on all tasks; {mean}."
    return f"The found cell is worse than the GRU on {len(worse)} of {len(ratios)} tasks: {', '.join(worse)}; {mean}."


def format_spread(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ({spread:.3f})"


def write_recipe(graph: str) -> str:
    """Return a recipe that trains a character model with a cell, on the text beside it."""
    return f"""# A character model with the cell that `regard study cell-search` found.
#   regard train found-cell.toml
task = "causal-lm"

[data]
root = "{{recipe}}"      # text.txt is beside this file
train = ["text.txt[:90%]"]
valid = ["text.txt[90%:]"]

[tokenizer]
kind = "char"

[model]
preset = "rnn-tiny"
max_len = 64
cell = "expression"

[model.expression]
graph = "{graph}"

[train]
steps = 300
batch_tokens = 2048
lr = 1e-2
warmup = 10
valid_every = 150
"""


# ---- picture -----------------------------------------------------------------------------------------------------------


def draw_search(results: dict[str, Any], path: Path) -> None:
    """Draw the found cell as a graph, above the scores of all evaluations."""
    from matplotlib.figure import Figure

    graph = parse(results["graph"])
    width, height = measure_graph(graph)
    high = min(max(11 / width * height, 2.0), 8.0)  # inches of the graph in a figure of 11 inches
    figure = Figure(figsize=(11, high + 3.5), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[high, 3.2])
    paint_graph(above, graph)
    above.set_title("the found cell", fontsize=11)
    at = [i for i, score in enumerate(results["scores"]) if score is not None]
    scores = [results["scores"][i] for i in at]
    below.plot(at, scores, ".", color="#0072B2", markersize=4, label="score of an evaluated cell")
    below.plot(at, [max(scores[: k + 1]) for k in range(len(at))], color="#D55E00", label="best until then")
    below.axhline(1, color="#999999", linewidth=1, zorder=0)
    below.set_ylim(0, max(1.2, 1.05 * max(scores)))
    below.set_xlabel("evaluation")
    below.set_ylabel("accuracy / the GRU's,\nleast of four tasks")
    below.legend(loc="lower right", fontsize=9)
    below.grid(alpha=0.3)
    save(figure, path)
