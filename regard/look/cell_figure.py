"""A figure of a recurrent cell as a graph, from its text (layers/expression_cell.py).

The drawing is layered (Sugiyama, Tagawa and Toda 1981). The nodes stand in columns, each to the right of what it reads. An
edge that passes a column has a place of its own in it, a lane, which is ordered and spaced like a node. Edges run
horizontally inside a column and change their height between two columns only, where no box stands. So no edge touches a box
that it does not belong to. All edges of one node share their lanes and branch off from them.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from regard.layers.expression_cell import CellGraph, GraphNode, parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYMBOLS = {"sigmoid": "σ", "tanh": "tanh", "relu": "relu", "*": "×", "+": "+", "-": "a − b"}
COLOURS = {"state": "#F0E442", "input": "#BBBBBB", "W": "#56B4E9", "U": "#009E73", "function": "#E69F00", "": "#FFFFFF"}
EDGE_COLOURS = {"x": "#777777", "h": "#A08000", "c": "#A0006A"}  # of the edges of the input and of the old states
EDGE_COLOUR = "#222222"  # of all other edges

# Lengths in units of the drawing. The text scales with it.
LETTER, SMALL_LETTER = 0.36, 0.26  # font sizes
BOX_HEIGHT, PADDING = 0.62, 0.2
LANE_HEIGHT = 0.1
CLEARANCE = 0.24  # least distance between neighbours of a column
GAP, STEEPNESS, WIDEST_GAP = 0.7, 0.25, 3.0  # between columns: GAP plus STEEPNESS times the greatest change of height
PORT = 0.15  # height of an operand's end above or below the middle of an operator
ARROW = 0.2
MARGIN = 0.2
SWEEPS, SETTLING_STEPS = 24, 60
INCHES = 0.36  # of one unit in the figure of `draw_cell`


@dataclass(frozen=True)
class Edge:
    """An edge from a node to one that reads it, as the operand number `operand`."""

    before: int
    after: int
    operand: int


@dataclass(frozen=True)
class Layout:
    """The places of boxes and edges; y grows upwards."""

    boxes: list[tuple[float, float, float, float]]  # of each node: left, bottom, width, height
    ends: dict[Edge, tuple[float, float]]  # where each edge arrives at the left side of a box
    routes: dict[Edge, list[tuple[float, float]]]  # of each edge: the ends of its horizontal pieces, from left to right

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """The least and the greatest x, and the least and the greatest y, with a margin."""
        ends = [point for route in self.routes.values() for point in route]
        ends += [(left, bottom) for left, bottom, _, _ in self.boxes]
        ends += [(left + width, bottom + height) for left, bottom, width, height in self.boxes]
        across, up = zip(*ends, strict=True)
        return min(across) - MARGIN, max(across) + MARGIN, min(up) - MARGIN, max(up) + MARGIN


def draw_cell(text: str, title: str = "") -> Figure:
    """Return a figure of the cell that a text describes."""
    from matplotlib.figure import Figure

    graph = parse(text)
    width, height = measure_graph(graph)
    figure = Figure(figsize=(INCHES * width + 0.2, INCHES * height + 0.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    paint_graph(axes, graph)
    axes.set_title(title, fontsize=11)
    return figure


def measure_graph(graph: CellGraph) -> tuple[float, float]:
    """Return width and height of the drawing of a graph, in its own units."""
    left, right, bottom, top = place_graph(*add_ends(graph)).extent
    return right - left, top - bottom


def paint_graph(axes: Any, graph: CellGraph) -> None:
    """Draw a cell from left to right: the input and the old state, its nodes by depth, and the new state.

    Every box has the gid `node I`, and every edge `edge BEFORE AFTER OPERAND`, with the numbers that `add_ends` gives."""
    from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
    from matplotlib.path import Path

    nodes, edges = add_ends(graph)
    layout = place_graph(nodes, edges)
    for edge in edges:
        colour = EDGE_COLOURS.get(nodes[edge.before].op, EDGE_COLOUR)
        route, (x, y) = layout.routes[edge], layout.ends[edge]
        points, codes = [route[0]], [Path.MOVETO]
        for k, (start, end) in enumerate(itertools.pairwise(route)):
            if k % 2:  # between two columns: a curve that begins and ends horizontally
                middle = (start[0] + end[0]) / 2
                points += [(middle, start[1]), (middle, end[1]), end]
                codes += [Path.CURVE4] * 3
            else:
                points.append(end)
                codes.append(Path.LINETO)
        line = PathPatch(Path(points, codes), facecolor="none", edgecolor=colour, linewidth=1.1, zorder=1)
        line.set_gid(f"edge {edge.before} {edge.after} {edge.operand}")
        axes.add_patch(line)
        head = [(x, y), (x - ARROW, y + 0.4 * ARROW), (x - ARROW, y - 0.4 * ARROW)]
        axes.add_patch(Polygon(head, facecolor=colour, edgecolor="none", zorder=2))
    for i, (node, (left, bottom, width, height)) in enumerate(zip(nodes, layout.boxes, strict=True)):
        kind = {"x": "input", "number": "input", "h": "state", "c": "state", "new": "state", "W": "W", "U": "U"}
        colour = COLOURS[kind.get(node.op, "function" if len(node.args) == 1 else "")]
        style = "round,pad=0,rounding_size=0.12"
        box = FancyBboxPatch((left, bottom), width, height, style, facecolor=colour, edgecolor="#333333", linewidth=0.8)
        box.set_zorder(3)
        box.set_gid(f"node {i}")
        axes.add_patch(box)
        letters = letter_width(node)
        paint_text(axes, label(node), LETTER, left + (letters + width) / 2, bottom + height / 2)
        for edge in edges:
            if edge.after == i and letters:  # which end is the first operand
                paint_text(axes, "ab"[edge.operand], SMALL_LETTER, left + 0.16, layout.ends[edge][1])
    left, right, bottom, top = layout.extent
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_aspect("equal")
    axes.axis("off")


def paint_text(axes: Any, text: str, size: float, x: float, y: float) -> None:
    """Draw a text in the units of the drawing, with its middle at (x, y)."""
    from matplotlib.patches import PathPatch
    from matplotlib.textpath import TextPath

    left, right = measure_text(text, size)
    path = TextPath((x - (left + right) / 2, y - 0.365 * size), text, size=size)  # half the height of a capital letter
    patch = PathPatch(path, facecolor="#000000", linewidth=0, zorder=4)
    patch.set_gid(f"text {text}")
    axes.add_patch(patch)


@lru_cache(maxsize=256)
def measure_text(text: str, size: float) -> tuple[float, float]:
    """Return where a text that is drawn at 0 begins and ends."""
    from matplotlib.textpath import TextPath

    extents = TextPath((0, 0), text, size=size).get_extents()
    return float(extents.x0), float(extents.x1)


def label(node: GraphNode) -> str:
    """Return what is written into a node."""
    if node.op == "number":
        return f"{node.number:g}"
    if node.op == "new":
        return ("new h", "new c")[int(node.number or 0)]
    start = "" if node.number is None else f", {node.number:g}"
    return {"W": f"W x + b{start}", "U": f"U{start}"}.get(node.op, SYMBOLS.get(node.op, node.op))


def letter_width(node: GraphNode) -> float:
    """Return the room on the left of a box for the letters that tell its operands apart: only `-` needs them."""
    return 0.24 if node.op == "-" else 0.0


def add_ends(graph: CellGraph) -> tuple[list[GraphNode], list[Edge]]:
    """Return the nodes that are drawn, and the edges between them.

    They are the nodes of the graph, x in front of every W(x), a node for each new state, and a number for each reader."""
    nodes = list(graph.nodes)
    if not graph.adds_input:
        nodes.append(GraphNode("x"))
    x = next(i for i, node in enumerate(nodes) if node.op == "x")
    edges: list[Edge] = []
    shown: set[int] = set()  # numbers that have a reader already
    for i, node in enumerate(graph.nodes):
        for k, arg in enumerate((x,) if node.op == "W" else node.args):
            if arg in shown:
                nodes.append(nodes[arg])
                arg = len(nodes) - 1
            elif nodes[arg].op == "number":
                shown.add(arg)
            edges.append(Edge(arg, i, k))
    for k, i in enumerate(graph.outputs):
        nodes.append(GraphNode("new", (i,), float(k)))
        edges.append(Edge(i, len(nodes) - 1, 0))
    return nodes, edges


# ---- layout ------------------------------------------------------------------------------------------------------------


def place_graph(nodes: Sequence[GraphNode], edges: Sequence[Edge]) -> Layout:
    """Return the places of all boxes, and the routes of all edges."""
    depth = choose_columns(nodes, edges)
    columns: list[list[int]] = [[i for i in range(len(nodes)) if depth[i] == k] for k in range(max(depth) + 1)]
    lanes: dict[tuple[int, int], int] = {}  # (node, column) -> the place that its edges share; numbered after the nodes
    chains: dict[Edge, list[int]] = {}  # the places that an edge visits, one in each column
    for edge in edges:
        chain = [edge.before]
        for k in range(depth[edge.before] + 1, depth[edge.after]):
            if (edge.before, k) not in lanes:
                lanes[edge.before, k] = len(nodes) + len(lanes)
                columns[k].append(lanes[edge.before, k])
            chain.append(lanes[edge.before, k])
        chains[edge] = [*chain, edge.after]
    links = [set[tuple[int, int]]() for _ in columns]  # links[k]: from column k to column k + 1
    for edge, chain in chains.items():
        for k, pair in enumerate(itertools.pairwise(chain), depth[edge.before]):
            links[k].add(pair)
    order_columns(columns, links, nodes, edges)
    y = settle_heights(columns, links, len(nodes))

    ports = dict.fromkeys(edges, 0.0)
    for i in range(len(nodes)):
        arriving = [edge for edge in edges if edge.after == i]
        if len(arriving) == 2:  # the edge that comes from above ends above
            arriving.sort(key=lambda edge: (-y[chains[edge][-2]], edge.operand))
            ports[arriving[0]], ports[arriving[1]] = PORT, -PORT

    widths = [max(text_width(node), BOX_HEIGHT) for node in nodes]
    lefts, rights, x = list[float](), list[float](), 0.0
    for k, column in enumerate(columns):
        lefts.append(x)
        rights.append(x + max([widths[i] for i in column if i < len(nodes)]))
        change = max([abs(y[a] - y[b]) for a, b in links[k]], default=0.0)
        x = rights[-1] + min(GAP + STEEPNESS * change, WIDEST_GAP)

    boxes = []
    for i in range(len(nodes)):
        middle = (lefts[depth[i]] + rights[depth[i]]) / 2
        boxes.append((middle - widths[i] / 2, y[i] - BOX_HEIGHT / 2, widths[i], BOX_HEIGHT))
    ends, routes = {}, {}
    for edge, chain in chains.items():
        left, _, width, _ = boxes[edge.before]
        route = [(left + width, y[edge.before]), (rights[depth[edge.before]], y[edge.before])]
        for k, lane in enumerate(chain[1:-1], depth[edge.before] + 1):
            route += [(lefts[k], y[lane]), (rights[k], y[lane])]
        end = (boxes[edge.after][0], y[edge.after] + ports[edge])
        ends[edge] = end
        # The last horizontal piece is the arrow, which begins in front of the column.
        routes[edge] = [*route, (lefts[depth[edge.after]] - ARROW, end[1]), (end[0] - ARROW / 2, end[1])]
    return Layout(boxes, ends, routes)


def text_width(node: GraphNode) -> float:
    """Return the width of a box that its text needs."""
    left, right = measure_text(label(node), LETTER)
    return right - left + 2 * PADDING + letter_width(node)


def choose_columns(nodes: Sequence[GraphNode], edges: Sequence[Edge]) -> list[int]:
    """Return the column of each node: after all that it reads.

    Numbers, and linear maps of the input and of old states, stand in front of their first reader. New states stand last."""
    depth = [0] * len(nodes)
    for _ in nodes:
        for edge in edges:
            depth[edge.after] = max(depth[edge.after], depth[edge.before] + 1)
    last = max(depth)
    for i, node in enumerate(nodes):
        readers = [depth[edge.after] for edge in edges if edge.before == i]
        of_leaf = node.op in ("W", "U") and all(depth[edge.before] == 0 for edge in edges if edge.after == i)
        if (node.op == "number" or of_leaf) and readers:
            depth[i] = min(readers) - 1
        elif node.op == "new":
            depth[i] = last
    return depth


def order_columns(
    columns: list[list[int]], links: Sequence[set[tuple[int, int]]], nodes: Sequence[GraphNode], edges: Sequence[Edge]
) -> None:
    """Sort each column so that few edges cross: by the means of the neighbours' places, then by swaps of two neighbours."""
    rank: dict[int, int] = {}
    reads: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        reads[edge.after].append(edge.before)

    def visit(i: int) -> None:
        if i not in rank:
            rank[i] = len(rank)
            for before in reads[i]:
                visit(before)

    for i in reversed(range(len(nodes))):  # new states are last
        visit(i)
    before, after = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for pairs in links:
        for a, b in sorted(pairs):
            before[b].append(a)
            after[a].append(b)
    place: dict[int, float] = {}

    def number(column: list[int]) -> None:
        place.update((i, k - (len(column) - 1) / 2) for k, i in enumerate(column))

    for column in columns:
        column.sort(key=lambda i: min(rank[j] for j in reach(i, after, rank)))
        number(column)
    best = [list(column) for column in columns]
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        neighbours = before if forwards else after
        for column in columns if forwards else reversed(columns):
            wish = {i: statistics.mean([place[j] for j in neighbours[i]] or [place[i]]) for i in column}
            column.sort(key=lambda i: wish[i])
            number(column)
        if count_crossings(columns, links) < count_crossings(best, links):
            best = [list(column) for column in columns]
    columns[:] = best
    for column in columns:
        number(column)
    improved = True
    while improved:
        improved = False
        for column in columns:
            for k in range(len(column) - 1):
                i, j = column[k], column[k + 1]
                now, swapped = (
                    sum(place[b] < place[a] for a in side[first] for b in side[second])
                    + sum(place[b] < place[a] for a in other[first] for b in other[second])
                    for side, other, first, second in ((before, after, i, j), (before, after, j, i))
                )
                if swapped < now:
                    column[k : k + 2] = [j, i]
                    number(column)
                    improved = True


def reach(i: int, after: dict[int, list[int]], rank: dict[int, int]) -> Iterable[int]:
    """Return the nodes that a place stands for: itself, or those that the edges of a lane lead to."""
    return [i] if i in rank else [j for following in after[i] for j in reach(following, after, rank)]


def count_crossings(columns: Sequence[Sequence[int]], links: Sequence[set[tuple[int, int]]]) -> int:
    """Return how many pairs of links between neighbouring columns cross."""
    place = {i: k for column in columns for k, i in enumerate(column)}
    found = 0
    for pairs in links:
        ends = [(place[a], place[b]) for a, b in pairs]
        found += sum(a < c and d < b for a, b in ends for c, d in ends)
    return found


def settle_heights(
    columns: Sequence[Sequence[int]], links: Sequence[set[tuple[int, int]]], count: int
) -> dict[int, float]:
    """Return the height of each place: near its neighbours in other columns, below the one before it in its column.

    Places from `count` on are lanes. Lanes count more than boxes, so that long edges are straight."""
    linked: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pairs in links:
        for a, b in sorted(pairs):
            weight = 1 + 2 * ((a >= count) + (b >= count))
            linked[a].append((b, weight))
            linked[b].append((a, weight))
    size = {i: LANE_HEIGHT if i >= count else BOX_HEIGHT for column in columns for i in column}
    distances = [[(size[a] + size[b]) / 2 + CLEARANCE for a, b in itertools.pairwise(c)] for c in columns]
    down: dict[int, float] = {}
    for column, distance in zip(columns, distances, strict=True):
        down.update(zip(column, keep_distances([0.0] * len(column), distance), strict=True))
    order = list(range(len(columns)))
    for step in range(SETTLING_STEPS):
        for k in order if step % 2 == 0 else reversed(order):
            column = columns[k]
            wishes = []
            for i in column:
                weights = sum(weight for _, weight in linked[i])
                wishes.append(sum(weight * down[j] for j, weight in linked[i]) / weights if weights else down[i])
            down.update(zip(column, keep_distances(wishes, distances[k]), strict=True))
    return {i: -height for i, height in down.items()}


def keep_distances(wishes: Sequence[float], distances: Sequence[float]) -> list[float]:
    """Return the increasing numbers nearest to the wishes, in least squares, that are at least the distances apart.

    This is isotonic regression of the wishes minus the sums of the distances, by pooling of neighbours."""
    offsets = [0.0]
    for distance in distances:
        offsets.append(offsets[-1] + distance)
    pools: list[list[float]] = []
    for wish, offset in zip(wishes, offsets, strict=False):
        pools.append([wish - offset])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    means = [statistics.fmean(pool) for pool in pools for _ in pool]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
