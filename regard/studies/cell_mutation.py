"""Random changes of a cell that is written as an expression graph (layers/expression_cell.py).

As in Jozefowicz et al. (2015), a change replaces an activation or an operator, inserts or removes one, or links a node to an
earlier one. The linear maps of the paper, whose matrices start near a multiple of the identity, are U(v, a) here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from regard.errors import RegardError
from regard.layers.expression_cell import FUNCTIONS, OPERATORS, CellGraph, GraphNode, canonical, make_graph, to_text

MOST_CHANGES = 3  # of one mutation
LARGEST = 40  # nodes of a mutated cell
MOST_PRODUCTS = 8  # W(x) and U(v) of a mutated cell, of each
BIAS_STARTS = (None, 1.0, 2.0, -1.0)  # a in W(x, a)
MATRIX_STARTS = (None, 0.9, 1.0, 1.1)  # a in U(v, a)
ATTEMPTS = 1000


def mutate(graph: CellGraph, rng: random.Random) -> CellGraph:
    """Return a cell that one to three random changes turn a cell into; it differs from the cell and reads all it needs."""
    before = to_text(graph)
    for _ in range(ATTEMPTS):
        found = graph
        try:
            for _ in range(rng.randint(1, MOST_CHANGES)):
                found = change(found, rng)
            found = canonical(found)
        except RegardError:  # no cell
            continue
        if to_text(found) != before and is_sensible(found):
            return found
    raise RegardError(f"no change of this cell is a cell: {before}")


def is_sensible(graph: CellGraph) -> bool:
    """Return whether a cell is small enough, its new h depends on every old state, and every new state on the input."""
    needs: list[set[str]] = []  # of each node, the leaves that it depends on
    for node in graph.nodes:
        own = {"x" if node.op == "W" else node.op} if not node.args else set()
        needs.append(own.union(*(needs[arg] for arg in node.args)))
    counts = [sum(node.op == op for node in graph.nodes) for op in ("W", "U")]
    states = {"h", "c"} if len(graph.outputs) == 2 else {"h"}
    return (
        len(graph.nodes) <= LARGEST
        and max(counts) <= MOST_PRODUCTS
        and states <= needs[graph.outputs[0]]
        and all("x" in needs[i] for i in graph.outputs)
    )


def change(graph: CellGraph, rng: random.Random) -> CellGraph:
    """Return a graph with one random change."""
    nodes = list(graph.nodes)
    i = rng.choice([i for i, node in enumerate(nodes) if node.op not in ("x", "h", "c")])
    node, earlier = nodes[i], range(i)

    def insert(new: GraphNode) -> int:
        nodes.append(new)
        return len(nodes) - 1

    def another(options: Sequence[object], now: object) -> object:
        return rng.choice([option for option in options if option != now])

    changes = ["wrap", "join"]
    if node.args:
        changes += ["drop", "link"]
    if node.op in FUNCTIONS or node.op in OPERATORS:
        changes += ["replace"] * 2
    if node.op in ("W", "U"):
        changes += ["start"]
    match rng.choice(changes):
        case "replace":
            options = [*(FUNCTIONS if node.op in FUNCTIONS else OPERATORS)]
            nodes[i] = replace(node, op=str(another(options, node.op)))
        case "start":
            starts = BIAS_STARTS if node.op == "W" else MATRIX_STARTS
            nodes[i] = replace(node, number=another(starts, node.number))  # type: ignore[arg-type]
        case "wrap":  # an activation or a linear map between a node and its readers
            op = rng.choice([*FUNCTIONS, "U"])
            redirect(nodes, i, lambda: insert(GraphNode(op, (i,), rng.choice(MATRIX_STARTS) if op == "U" else None)))
        case "join":  # an operator with an earlier node, a number or the input
            kind = rng.choice(["earlier", "number", "W", "x"])
            if kind == "earlier" and earlier:
                other = rng.choice(earlier)
            else:
                other = insert(
                    GraphNode("number", (), 1.0) if kind == "number" else GraphNode("x" if kind == "x" else "W")
                )
            pair = (i, other) if rng.random() < 0.5 else (other, i)
            redirect(nodes, i, lambda: insert(GraphNode(rng.choice([*OPERATORS]), pair)))
        case "drop":  # its readers read one of its arguments instead
            arg = rng.choice(node.args)
            outputs = tuple(arg if out == i else out for out in graph.outputs)
            nodes = [replace(each, args=tuple(arg if a == i else a for a in each.args)) for each in nodes]
            return make_graph(*in_order(nodes, outputs))
        case "link":
            place = rng.randrange(len(node.args))
            args = list(node.args)
            args[place] = rng.choice(earlier)
            nodes[i] = replace(node, args=tuple(args))
    swapped = {i: len(nodes) - 1} if len(nodes) > len(graph.nodes) and i in nodes[-1].args else {}
    outputs = tuple(swapped.get(out, out) for out in graph.outputs)
    return make_graph(*in_order(nodes, outputs))


def redirect(nodes: list[GraphNode], i: int, insert: object) -> None:
    """Let all readers of node i read the node that `insert` adds instead."""
    count = len(nodes)
    new = insert()  # type: ignore[operator]
    for k in range(count):
        if i in nodes[k].args and k != new:
            nodes[k] = replace(nodes[k], args=tuple(new if arg == i else arg for arg in nodes[k].args))


def in_order(nodes: Sequence[GraphNode], outputs: Sequence[int]) -> tuple[list[GraphNode], list[int]]:
    """Return the nodes that the outputs need, each after its arguments, and the new places of the outputs."""
    order: list[GraphNode] = []
    places: dict[int, int] = {}

    def visit(i: int) -> None:
        if i not in places:
            for arg in nodes[i].args:
                visit(arg)
            places[i] = len(order)
            order.append(replace(nodes[i], args=tuple(places[arg] for arg in nodes[i].args)))

    for i in outputs:
        visit(i)
    return order, [places[i] for i in outputs]
