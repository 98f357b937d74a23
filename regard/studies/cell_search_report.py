"""The report of `regard study cell-search`: a table, a picture of the found cell as a graph, and a recipe that trains it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from regard.layers.expression_cell import Graph, Node, parse, to_python
from regard.look.figures import save

SYMBOLS = {"sigmoid": "σ", "tanh": "tanh", "relu": "relu", "*": "×", "+": "+", "-": "−"}
COLOURS = {"state": "#F0E442", "input": "#BBBBBB", "W": "#56B4E9", "U": "#009E73", "function": "#E69F00", "": "#FFFFFF"}


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
        f"{results['cells']:,} cells, {results['scored']:,} of which passed the first task, in {results['minutes']:.1f} "
        f"minutes of {results['jobs']} processes. CPU, torch {where['torch']}, {where['date'][:10]}."
    )
    code = to_python(parse(results["graph"]), "found", "A cell that `regard study cell-search` found.")
    found = "The found cell:\n\n```\n" + results["graph"].replace("; ", "\n") + "\n```"
    parts = [judge(results), table, note, found, f"As Python:\n\n```python\n{code}```", f"```\n{where['command']}\n```"]
    return "\n\n".join(parts) + "\n"


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

    figure = Figure(figsize=(11, 8.5), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[1.7, 1])
    draw_graph(above, parse(results["graph"]))
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


def draw_graph(axes: Any, graph: Graph) -> None:
    """Draw a cell from left to right: the input and the old state, its nodes by depth, and the new state."""
    nodes, edges = add_ends(graph)
    places = place_nodes(nodes, edges)
    for before, after, curve in edges:
        style = {"arrowstyle": "-|>", "color": "#666666", "shrinkA": 13, "shrinkB": 13, "linewidth": 1.0}
        axes.annotate("", places[after], places[before], arrowprops={**style, "connectionstyle": f"arc3,rad={curve}"})
    for i, node in enumerate(nodes):
        kind = {"x": "input", "number": "input", "h": "state", "c": "state", "new": "state", "W": "W", "U": "U"}
        colour = COLOURS[kind.get(node.op, "function" if len(node.args) == 1 else "")]
        box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "#333333", "linewidth": 0.8}
        axes.text(*places[i], label(node), ha="center", va="center", fontsize=9, bbox=box, zorder=3)
    across, up = zip(*places, strict=True)
    axes.set_xlim(min(across) - 0.5, max(across) + 0.5)
    axes.set_ylim(min(up) - 0.6, max(up) + 0.6)
    axes.axis("off")


def label(node: Node) -> str:
    if node.op == "number":
        return f"{node.number:g}"
    if node.op == "new":
        return ("new h", "new c")[int(node.number or 0)]
    start = "" if node.number is None else f", {node.number:g}"
    return {"W": f"W x + b{start}", "U": f"U{start}"}.get(node.op, SYMBOLS.get(node.op, node.op))


def add_ends(graph: Graph) -> tuple[list[Node], list[tuple[int, int, float]]]:
    """Return the nodes with x in front of every W(x) and with a node for each new state, and the edges between them."""
    nodes = list(graph.nodes)
    if not graph.adds_input:
        nodes.append(Node("x"))
    x = next(i for i, node in enumerate(nodes) if node.op == "x")
    edges = []
    for i, node in enumerate(graph.nodes):
        args = (x,) if node.op == "W" else node.args
        same = len(args) == 2 and args[0] == args[1]
        edges += [(arg, i, 0.15 * (2 * k - 1) if same else 0.0) for k, arg in enumerate(args)]
    for k, i in enumerate(graph.outputs):
        nodes.append(Node("new", (i,), float(k)))
        edges.append((i, len(nodes) - 1, 0.0))
    return nodes, edges


def place_nodes(nodes: list[Node], edges: list[tuple[int, int, float]]) -> list[tuple[float, float]]:
    """Return where to draw each node: columns by depth, and in a column near the nodes that it is connected with."""
    depth = [0] * len(nodes)
    for _ in nodes:
        for before, after, _ in edges:
            depth[after] = max(depth[after], depth[before] + 1)
    last = max(depth)
    for i, node in enumerate(nodes):  # numbers stand in front of their first reader, new states at the end
        readers = [depth[after] for before, after, _ in edges if before == i]
        if node.op == "number" and readers:
            depth[i] = min(readers) - 1
        elif node.op == "new":
            depth[i] = last
    columns = [[i for i in range(len(nodes)) if depth[i] == k] for k in range(last + 1)]
    height = {i: float(k) for column in columns for k, i in enumerate(column)}
    neighbours: dict[int, list[int]] = {i: [] for i in range(len(nodes))}
    for before, after, _ in edges:
        neighbours[before].append(after)
        neighbours[after].append(before)
    for _ in range(30):
        for column in columns:
            wish = {i: statistics.mean([height[j] for j in neighbours[i]] or [height[i]]) for i in column}
            column.sort(key=lambda i: (wish[i], i))
            middle = statistics.mean(wish.values()) if column else 0.0
            for k, i in enumerate(column):
                height[i] = middle + (k - (len(column) - 1) / 2)
    return [(float(depth[i]), -height[i]) for i in range(len(nodes))]
