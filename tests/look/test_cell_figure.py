"""The figure of a cell: what is drawn is read back from the figure, and must be the graph."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from regard.layers.expression_cell import GRU_TEXT, LSTM_TEXT, parse, to_text
from regard.look.cell_figure import add_ends, draw_cell, keep_distances, place_graph
from regard.studies.cell_mutation import mutate

NAS_TEXT = "; ".join(
    [
        *(f"a{k} = W(x) {'*' if k == 3 else '+'} U(h)" for k in range(8)),
        "c = tanh(tanh(sigmoid(a0) * relu(a1)) + c) * tanh(sigmoid(a2) + relu(a3))",
        "h = tanh(c * tanh(tanh(tanh(a4) * sigmoid(a5)) + sigmoid(tanh(a6) + sigmoid(a7))))",
    ]
)


def mutated_cells(count: int, seed: int) -> list[str]:
    """Return cells after one to twelve mutations of the GRU and the LSTM."""
    rng, found = random.Random(seed), []
    for k in range(count):
        graph = parse((GRU_TEXT, LSTM_TEXT)[k % 2])
        for _ in range(1 + k % 12):
            graph = mutate(graph, rng)
        found.append(to_text(graph))
    return found


SQUARES = ["h = (W(x) + U(h)) * h - 1; h = h * h", "v = W(x) - U(h); h = (v - v) * (1 - v) + (v - 1) * 1"]
CELLS = [NAS_TEXT, GRU_TEXT, LSTM_TEXT, *SQUARES, *mutated_cells(60, 0)]


def read_figure(figure: Figure) -> tuple[dict[int, Any], dict[tuple[int, int, int], np.ndarray]]:
    """Return the boxes and the edges that a figure shows: extents, and points (N, 2) along the line."""
    boxes, lines = {}, {}
    for patch in figure.axes[0].patches:
        match (patch.get_gid() or "").split():
            case ["node", i]:
                boxes[int(i)] = patch.get_path().get_extents()
            case ["edge", *numbers]:
                before, after, operand = map(int, numbers)
                (flat,) = patch.get_path().to_polygons(closed_only=False)
                ends = itertools.pairwise(np.asarray(flat))
                lines[before, after, operand] = np.concatenate([np.linspace(a, b, 20) for a, b in ends])
    return boxes, lines


@pytest.mark.parametrize("text", CELLS)
def test_no_edge_touches_a_box_that_it_does_not_belong_to(text: str) -> None:
    boxes, lines = read_figure(draw_cell(text))
    for (before, after, _), points in lines.items():
        for i, box in boxes.items():
            margin = 0.0 if i in (before, after) else 0.1  # clear of other boxes, and not inside its own
            inside = (points > np.array([box.x0, box.y0]) - margin + 1e-6) & (
                points < np.array([box.x1, box.y1]) + margin - 1e-6
            )
            assert not inside.all(1).any(), f"the edge from node {before} to {after} touches node {i}"


@pytest.mark.parametrize("text", CELLS)
def test_the_figure_shows_the_nodes_and_the_edges_of_the_graph(text: str) -> None:
    """Every edge starts at the box of its operand and ends at that of its reader; two operands end at two places."""
    graph = parse(text)
    boxes, lines = read_figure(draw_cell(text))
    nodes, edges = add_ends(graph)
    assert set(boxes) == set(range(len(nodes)))
    assert set(lines) == {(edge.before, edge.after, edge.operand) for edge in edges}
    for i, node in enumerate(graph.nodes):
        read = [nodes[edge.before] for edge in sorted(edges, key=lambda e: e.operand) if edge.after == i]
        assert [each.op for each in read] == (["x"] if node.op == "W" else [graph.nodes[arg].op for arg in node.args])
    for (before, after, _), points in lines.items():
        assert points[0] == pytest.approx([boxes[before].x1, (boxes[before].y0 + boxes[before].y1) / 2])
        assert 0 < boxes[after].x0 - points[-1][0] < 0.2  # the head of the arrow is between
        assert boxes[after].y0 < points[-1][1] < boxes[after].y1
    for edge, other in itertools.combinations(lines, 2):
        if edge[1] == other[1]:
            assert abs(lines[edge][-1][1] - lines[other][-1][1]) > 0.2


@pytest.mark.parametrize("text", CELLS)
def test_edges_of_different_nodes_do_not_run_upon_each_other(text: str) -> None:
    """In a column, the horizontal pieces of edges of different nodes have different heights."""
    layout = place_graph(*add_ends(parse(text)))
    routes = list(layout.routes.items())
    for (one, first), (other, second) in itertools.combinations(routes, 2):
        if one.before == other.before:
            continue
        for k, j in itertools.product(range(0, len(first), 2), range(0, len(second), 2)):
            (a, y), (b, _) = first[k : k + 2]
            (c, z), (d, _) = second[j : j + 2]
            assert min(b, d) <= max(a, c) or abs(y - z) > 0.1, f"edges {one} and {other}"


@pytest.mark.parametrize("text", CELLS)
def test_everything_is_inside_the_figure(text: str) -> None:
    figure = draw_cell(text)
    axes = figure.axes[0]
    boxes, lines = read_figure(figure)
    points = np.concatenate([*lines.values(), *(box.get_points() for box in boxes.values())])
    assert (points > [axes.get_xlim()[0], axes.get_ylim()[0]]).all()
    assert (points < [axes.get_xlim()[1], axes.get_ylim()[1]]).all()


def test_the_operands_of_a_difference_are_told_apart() -> None:
    for text, first in (("h = tanh(W(x) - U(h))", "W"), ("h = tanh(U(h) - W(x))", "U")):
        graph = parse(text)
        nodes, edges = add_ends(graph)
        ends = {"ab"[e.operand]: place_graph(nodes, edges).ends[e][1] for e in edges if nodes[e.after].op == "-"}
        letters = {
            str(p.get_gid())[5:]: p for p in draw_cell(text).axes[0].patches if p.get_gid() in ("text a", "text b")
        }
        assert {nodes[e.before].op for e in edges if nodes[e.after].op == "-" and e.operand == 0} == {first}
        for letter, patch in letters.items():  # each letter stands where its operand arrives
            extents = patch.get_path().get_extents()
            assert extents.y0 < ends[letter] < extents.y1
        assert set(letters) == {"a", "b"}
    texts = [patch.get_gid() for patch in draw_cell(GRU_TEXT.replace("1 -", "1 +")).axes[0].patches]
    assert "text a" not in texts  # sums and products need no letters


@pytest.mark.parametrize("text", CELLS[:20])
def test_a_graph_is_drawn_from_left_to_right_without_overlaps(text: str) -> None:
    nodes, edges = add_ends(parse(text))
    boxes = place_graph(nodes, edges).boxes
    assert all(boxes[edge.before][0] + boxes[edge.before][2] < boxes[edge.after][0] for edge in edges)
    for (a, b, w, h), (c, d, v, g) in itertools.combinations(boxes, 2):
        assert a + w < c or c + v < a or b + h < d or d + g < b


def test_numbers_are_moved_apart_as_little_as_possible() -> None:
    """Values worked by hand: two that are too near move equally, and three that collide share the mean of what they want."""
    assert keep_distances([0.0, 5.0], [1.0]) == [0.0, 5.0]
    assert keep_distances([2.0, 1.0], [1.0]) == [1.0, 2.0]
    assert keep_distances([0.0, 0.0, 0.0, 9.0], [1.0, 2.0, 1.0]) == pytest.approx([-4 / 3, -1 / 3, 5 / 3, 9.0])
