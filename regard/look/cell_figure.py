"""A figure of a recurrent cell as a graph, from its text (layers/expression_cell.py)."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from regard.layers.expression_cell import CellGraph, GraphNode, parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYMBOLS = {"sigmoid": "σ", "tanh": "tanh", "relu": "relu", "*": "×", "+": "+", "-": "−"}
COLOURS = {"state": "#F0E442", "input": "#BBBBBB", "W": "#56B4E9", "U": "#009E73", "function": "#E69F00", "": "#FFFFFF"}


def draw_cell(text: str, title: str = "") -> Figure:
    """Return a figure of the cell that a text describes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    paint_graph(axes, parse(text))
    axes.set_title(title, fontsize=11)
    return figure


def paint_graph(axes: Any, graph: CellGraph) -> None:
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


def label(node: GraphNode) -> str:
    """Return what is written into a node."""
    if node.op == "number":
        return f"{node.number:g}"
    if node.op == "new":
        return ("new h", "new c")[int(node.number or 0)]
    start = "" if node.number is None else f", {node.number:g}"
    return {"W": f"W x + b{start}", "U": f"U{start}"}.get(node.op, SYMBOLS.get(node.op, node.op))


def add_ends(graph: CellGraph) -> tuple[list[GraphNode], list[tuple[int, int, float]]]:
    """Return the nodes with x in front of every W(x) and with a node for each new state, and the edges between them."""
    nodes = list(graph.nodes)
    if not graph.adds_input:
        nodes.append(GraphNode("x"))
    x = next(i for i, node in enumerate(nodes) if node.op == "x")
    edges = []
    for i, node in enumerate(graph.nodes):
        args = (x,) if node.op == "W" else node.args
        same = len(args) == 2 and args[0] == args[1]
        edges += [(arg, i, 0.15 * (2 * k - 1) if same else 0.0) for k, arg in enumerate(args)]
    for k, i in enumerate(graph.outputs):
        nodes.append(GraphNode("new", (i,), float(k)))
        edges.append((i, len(nodes) - 1, 0.0))
    return nodes, edges


def place_nodes(nodes: list[GraphNode], edges: list[tuple[int, int, float]]) -> list[tuple[float, float]]:
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
