"""Recurrent cells written as text: a small expression graph, which the setting `model.expression.graph` holds.

    r = sigmoid(W(x) + U(h)); z = sigmoid(W(x) + U(h)); n = tanh(W(x) + r * U(h)); h = z * h + (1 - z) * n

is the GRU. The text is a list of assignments with the meaning that they have in Python:

| written             | meaning                                                                                       |
|---------------------|-----------------------------------------------------------------------------------------------|
| x                   | the input, plus a bias; if it is not as wide as the state, a matrix projects it               |
| h, c                | the state: before its assignment the old one, afterwards the new one; c is optional           |
| W(x), W(x, 1)       | W x + b with a matrix and a bias of its own, which starts at 0, or at the given number        |
| U(v), U(v, 0.9)     | U v with a matrix of its own, which starts orthogonal, or near the given multiple of identity |
| sigmoid, tanh, relu | functions of one vector; identity(v) is v                                                     |
| + - *               | element by element; one operand may be a number                                               |

`parse` reads a text, `to_text` writes a graph, and `to_python` prints a module with the same cell as a class. All products
W(x), and all products U(v) with the same v, are one matrix product each.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.layers.cells import Cell, CellShape, CellState, keep_at_padding
from regard.layers.part import Place

GRU_TEXT = "r = sigmoid(W(x) + U(h)); z = sigmoid(W(x) + U(h)); n = tanh(W(x) + r * U(h)); h = z * h + (1 - z) * n"
LSTM_TEXT = (
    "i = sigmoid(W(x) + U(h)); f = sigmoid(W(x, 1) + U(h)); g = tanh(W(x) + U(h)); o = sigmoid(W(x) + U(h)); "
    "c = f * c + i * g; h = o * tanh(c)"
)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
STATES = ("h", "c")
MOST_NODES = 100
NEAR_IDENTITY = 0.1  # standard deviation, times sqrt(H), of the numbers that U(v, a) adds to a times the identity


# ---- graphs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph: x, h, c, a number, W, U, a function or an operator."""

    op: str
    args: tuple[int, ...] = ()  # numbers of earlier nodes
    number: float | None = None  # a constant, or the second argument of W and U


@dataclass(frozen=True)
class CellGraph:
    """A cell as a graph: its nodes, each after its arguments, and the nodes that are the new h and, if there is one, c."""

    nodes: tuple[GraphNode, ...]
    outputs: tuple[int, ...]

    @cached_property
    def input_products(self) -> list[int]:
        """The nodes W(x), in the order of the rows of weight_ih."""
        return [i for i, node in enumerate(self.nodes) if node.op == "W"]

    @cached_property
    def products(self) -> list[tuple[int, list[int]]]:
        """The products with weight_hh: for each the node that it reads, h first, and the nodes U(v) that it computes."""
        found: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.op == "U":
                found.setdefault(node.args[0], []).append(i)
        h = next((i for i in found if self.nodes[i].op == "h"), -1)
        return [(h, found.pop(h, [])), *found.items()]

    @cached_property
    def adds_input(self) -> bool:
        return any(node.op == "x" for node in self.nodes)

    @cached_property
    def shape(self) -> CellShape:
        n = len(self.input_products)
        products = tuple(len(nodes) for _, nodes in self.products)
        return CellShape(len(self.outputs), n + self.adds_input, n, products, self.adds_input)

    def run(
        self, gates: Sequence[Tensor], product: Callable[[int, Tensor], Sequence[Tensor]], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the new states, and the inputs of the products after the first.

        `gates` are W(x) for each of `input_products`, and x itself if the graph reads it; `product(k, v)` computes the k-th
        of `products`."""
        values: list[Any] = []
        inner: dict[int, Tensor] = dict(zip(self.input_products, gates, strict=False))
        for i, node in enumerate(self.nodes):
            if node.op in STATES:
                values.append(states[STATES.index(node.op)])
            elif node.op == "x":
                values.append(gates[-1])
            elif node.op == "number":
                values.append(node.number)
            elif node.op in ("W", "U"):
                if i not in inner:
                    k = next(k for k, (_, nodes) in enumerate(self.products) if i in nodes)
                    inner.update(zip(self.products[k][1], product(k, values[node.args[0]]), strict=True))
                values.append(inner[i])
            elif node.op in FUNCTIONS:
                values.append(FUNCTIONS[node.op](values[node.args[0]]))
            else:
                values.append(OPERATORS[node.op](*(values[arg] for arg in node.args)))
        return [values[i] for i in self.outputs], [values[read] for read, _ in self.products[1:]]


def make_graph(nodes: Sequence[GraphNode], outputs: Sequence[int]) -> CellGraph:
    """Return a graph without nodes that nothing reads, and with one node for each of x, h, c and each number.

    Refuse what is no cell."""
    order: list[GraphNode] = []
    places: dict[int, int] = {}
    leaves: dict[GraphNode, int] = {}
    needed = set(outputs)
    for i in reversed(range(len(nodes))):
        if i in needed:
            needed.update(nodes[i].args)
    for i in sorted(needed):
        node = replace(nodes[i], args=tuple(places[arg] for arg in nodes[i].args))
        if node.op in (*STATES, "x", "number") and node in leaves:
            places[i] = leaves[node]
            continue
        places[i] = len(order)
        leaves[node] = len(order)
        order.append(node)
    graph = CellGraph(tuple(order), tuple(places[i] for i in outputs))
    check_graph(graph)
    return graph


def check_graph(graph: CellGraph) -> None:
    """Raise a RegardError where a graph is no cell."""
    nodes = graph.nodes
    faults = {
        "it has no W(x)": not graph.input_products,
        "it has no product U(v)": not any(node.op == "U" for node in nodes),
        "it reads c, but does not assign it": len(graph.outputs) == 1 and any(node.op == "c" for node in nodes),
        "it computes with numbers alone": any(
            node.args and all(nodes[arg].op == "number" for arg in node.args) for node in nodes
        ),
        "a state is a number": any(nodes[i].op == "number" for i in graph.outputs),
        f"it has more than {MOST_NODES} nodes": len(nodes) > MOST_NODES,
        "a number is not finite": any(node.number is not None and not math.isfinite(node.number) for node in nodes),
    }
    for fault, found in faults.items():
        if found:
            raise RegardError(f"model.expression.graph is no cell: {fault}")


# ---- text --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def parse(text: str) -> CellGraph:
    """Return the graph of a text."""
    try:
        return GraphParser().read(ast.parse(text.strip()).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        raise RegardError(f"model.expression.graph is no list of assignments: {error}") from None


class GraphParser:
    """The nodes that were read so far, and what each name stands for."""

    def __init__(self) -> None:
        self.nodes = [GraphNode("x"), *(GraphNode(state) for state in STATES)]
        self.names = {node.op: i for i, node in enumerate(self.nodes)}
        self.assigned: set[str] = set()

    def read(self, statements: Sequence[ast.stmt]) -> CellGraph:
        for statement in statements:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise self.fault(statement, 'every statement must be an assignment such as "h = tanh(W(x) + U(h))"')
            target, value = statement.targets[0], statement.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            targets = target.elts if several else [target]  # type: ignore[attr-defined]
            values = value.elts if several else [value]  # type: ignore[attr-defined]
            if len(targets) != len(values) or not all(isinstance(each, ast.Name) for each in targets):
                raise self.fault(statement, "only names can be assigned")
            found = [self.expression(each) for each in values]
            for each, i in zip(targets, found, strict=True):
                if each.id in ("x", "W", "U", *FUNCTIONS):
                    raise self.fault(statement, f"{each.id} cannot be assigned")
                self.names[each.id] = i
                self.assigned.add(each.id)
        if "h" not in self.assigned:
            raise RegardError("model.expression.graph assigns no new state: its last statement should be h = ...")
        return make_graph(self.nodes, [self.names[state] for state in STATES if state in self.assigned])

    def add(self, *node: Any) -> int:
        if len(self.nodes) > 4 * MOST_NODES:
            raise RegardError(f"model.expression.graph has more than {MOST_NODES} nodes")
        self.nodes.append(GraphNode(*node))
        return len(self.nodes) - 1

    def expression(self, e: ast.expr) -> int:
        """Add the nodes of an expression; return the number of the last."""
        signs: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
        match e:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in signs:
                return self.add(signs[type(sign)], (self.expression(left), self.expression(right)))
            case ast.Call(func=ast.Name(id="W"), args=[ast.Name(id="x"), *more], keywords=[]) if len(more) < 2:
                return self.add("W", (), self.number(more[0]) if more else None)
            case ast.Call(func=ast.Name(id="U"), args=[value, *more], keywords=[]) if len(more) < 2:
                return self.add("U", (self.expression(value),), self.number(more[0]) if more else None)
            case ast.Call(func=ast.Name(id="identity"), args=[value], keywords=[]):
                return self.expression(value)
            case ast.Call(func=ast.Name(id=name), args=[value], keywords=[]) if name in FUNCTIONS:
                return self.add(name, (self.expression(value),))
            case ast.Constant() | ast.UnaryOp():
                return self.add("number", (), self.number(e))
        raise self.fault(e, "allowed are x, h, c, names, numbers, W(x), U(v), + - * and " + ", ".join(FUNCTIONS))

    def number(self, e: ast.expr) -> float:
        match e:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return float(value)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self.number(inner)
        raise self.fault(e, "a number is expected here")

    @staticmethod
    def fault(where: ast.AST, what: str) -> RegardError:
        return RegardError(f'model.expression.graph cannot read "{ast.unparse(where)}": {what}')


def to_text(graph: CellGraph) -> str:
    """Return the text of a graph; nodes that are read several times get names v1, v2, ..."""
    lines, outputs = GraphWriter(graph).write()
    return "; ".join([*lines, f"{', '.join(STATES[: len(outputs)])} = {', '.join(outputs)}"])


def canonical(graph: CellGraph) -> CellGraph:
    """Return a graph whose order of nodes is that of its text."""
    return parse(to_text(graph))


def simplify(graph: CellGraph) -> CellGraph:
    """Return the same cell without products with 1, which mutations leave behind."""
    kept: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        others = [arg for arg in node.args if graph.nodes[arg] != GraphNode("number", (), 1.0)]
        kept[i] = kept[others[0]] if node.op == "*" and len(others) == 1 else i
    nodes = [replace(node, args=tuple(kept[arg] for arg in node.args)) for node in graph.nodes]
    return canonical(make_graph(nodes, [kept[i] for i in graph.outputs]))


class GraphWriter:
    """Writes a graph as assignments: those of the text, or statements of `forward` in Python."""

    def __init__(self, graph: CellGraph, python: bool = False) -> None:
        self.graph, self.python = graph, python
        self.count = [0] * len(graph.nodes)  # how often each node is read
        for i in (*graph.outputs, *(arg for node in graph.nodes for arg in node.args)):
            self.count[i] += 1
        self.lines: list[str] = []
        self.named = 0
        self.texts: dict[int, tuple[str, int]] = {}  # with a strength: 0 for + and -, 1 for *, 2 for names and calls

    def write(self) -> tuple[list[str], list[str]]:
        """Return the assignments, and an expression for each output."""
        read_by_products = {read for read, _ in self.graph.products} if self.python else set()
        for i, node in enumerate(self.graph.nodes):
            if i in self.texts:
                continue
            if self.python and node.op == "U":
                self.write_product(i)
                continue
            text, strength = self.express(node)
            if (self.count[i] > 1 or i in read_by_products) and node.op not in (*STATES, "x", "number"):
                self.named += 1
                self.lines.append(f"v{self.named} = {text}")
                text, strength = f"v{self.named}", 2
            self.texts[i] = text, strength
        return self.lines, [self.texts[i][0] for i in self.graph.outputs]

    def express(self, node: GraphNode) -> tuple[str, int]:
        args = [self.texts[arg] for arg in node.args]
        if node.op == "number":
            assert node.number is not None
            text = format_number(node.number)
            return (f"({text})" if node.number < 0 else text), 2
        if node.op in OPERATORS:
            strength = int(node.op == "*")
            left, right = (
                text if its > strength or (its == strength and k == 0) else f"({text})"
                for k, (text, its) in enumerate(args)
            )
            return f"{left} {node.op} {right}", strength
        if node.op in FUNCTIONS:
            return f"{'torch.' * self.python}{node.op}({args[0][0]})", 2
        if node.op in ("W", "U"):
            second = "" if node.number is None else f", {format_number(node.number)}"
            return f"{node.op}({args[0][0] if args else 'x'}{second})", 2
        return node.op, 2

    def split(self, letter: str, first: int, nodes: Sequence[int], value: str) -> None:
        """Write an assignment that splits a tensor into the values of nodes."""
        names = [f"{letter}{first + k}" for k in range(len(nodes))]
        self.lines.append(f"{', '.join(names)} = {value}" + (f".chunk({len(names)}, -1)" if len(names) > 1 else ""))
        self.texts.update((i, (name, 2)) for i, name in zip(nodes, names, strict=True))

    def write_product(self, i: int) -> None:
        """Write the product with weight_hh that computes node i."""
        k = next(k for k, (_, nodes) in enumerate(self.graph.products) if i in nodes)
        read, nodes = self.graph.products[k]
        first = 1 + sum(len(others) for _, others in self.graph.products[:k])
        self.split("u", first, nodes, f"self.recurrent_product({k}, {self.texts[read][0]}, weight, offset)")


def format_number(number: float) -> str:
    """Return the shortest text of a number."""
    return repr(int(number)) if number == int(number) else repr(number)


# ---- Python ------------------------------------------------------------------------------------------------------------


def to_python(graph: CellGraph, name: str = "found", note: str = "A recurrent cell, printed by Regard.") -> str:
    """Return a module that registers the cell `name`, which computes what the graph does with the same parameters."""
    shape, writer = graph.shape, GraphWriter(graph, python=True)
    direct = [i for i, node in enumerate(graph.nodes) if node.op == "x"]
    writer.split("x", 1, [*graph.input_products, *direct], "x")
    lines, outputs = writer.write()
    states = STATES[: shape.states]
    kept = [f"keep_at_padding(real, {out}, {state})" for out, state in zip(outputs, states, strict=True)]
    others = [f"{writer.texts[read][0]}.detach()" for read, _ in graph.products[1:]]
    lines.append(f"return {write_tuple(kept)}, {write_tuple(others)}")
    parts = [f"    states, gates, inputs, hidden, adds_input = {', '.join(map(repr, shape))}"]
    if shape.adds_input:
        parts.append("    def add_input(self, y, x):\n        return torch.cat([y, x.to(y.dtype)], -1)")
    if starts := write_initial_values(graph):
        parts.append(
            "    @torch.no_grad()\n    def init_weights(self):\n" + indent(["super().init_weights()", *starts])
        )
    parts.append(f"    def forward(self, x, weight, offset, real, {', '.join(states)}):\n" + indent(lines))
    equations = to_text(graph).replace("; ", "\n    ")
    head = (
        f'"""{note}"""\n\nimport torch\n\nfrom regard.config.registry import register\n'
        "from regard.layers.cells import Cell, keep_at_padding\n\n\n"
        f'@register("{name}")\nclass {name.title().replace("-", "")}(Cell):\n    """A cell.\n\n    {equations}\n    """\n\n'
    )
    return head + "\n\n".join(parts) + "\n"


def write_tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def indent(lines: Sequence[str]) -> str:
    return "\n".join(f"        {line}" for line in lines)


def write_initial_values(graph: CellGraph) -> list[str]:
    """Return the statements of `init_weights` for the numbers that W(x, a) and U(v, a) name."""
    biases, near = graph_starts(graph)
    lines = [f"self.bias.view({graph.shape.gates}, -1)[{k}] = {a!r}" for k, a in biases.items()]
    if near:
        lines += [
            "n = self.d_hidden",
            "eye, matrices = torch.eye(n, device=self.bias.device), self.weight_hh.view(-1, n, n)",
        ]
    return lines + [
        f"matrices[{k}] = {a!r} * eye + {NEAR_IDENTITY!r} * n**-0.5 * torch.randn_like(eye)" for k, a in near.items()
    ]


def graph_starts(graph: CellGraph) -> tuple[dict[int, float], dict[int, float]]:
    """Return the numbers that biases start at, and those of matrices near the identity, by their places."""
    rows = [i for _, nodes in graph.products for i in nodes]
    found = ({k: graph.nodes[i].number for k, i in enumerate(nodes)} for nodes in (graph.input_products, rows))
    biases, near = ({k: a for k, a in part.items() if a is not None} for part in found)
    return biases, near


# ---- the cell ----------------------------------------------------------------------------------------------------------


@register("expression")
class Expression(Cell):
    """A cell that is written as a text, such as one that `regard study cell-search` found; by default the GRU."""

    @dataclass(frozen=True)
    class Settings:
        graph: str = setting(GRU_TEXT, "assignments of x, h, c, W(x), U(v), sigmoid, tanh, relu, + - *")

    def __init__(self, settings: Settings, d_in: int, d_hidden: int, norm: bool = False) -> None:
        super().__init__(settings, d_in, d_hidden, norm)
        self.graph = parse(settings.graph)

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        parse(settings.graph)

    @classmethod
    def shape(cls, settings: Any) -> CellShape:
        return parse(settings.graph).shape

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as other cells, but for the numbers that the text gives."""
        super().init_weights()
        biases, near = graph_starts(self.graph)
        for k, a in biases.items():
            self.bias.view(self.gates, -1)[k] = a
        n = self.d_hidden
        eye, matrices = torch.eye(n, device=self.bias.device), self.weight_hh.view(-1, n, n)
        for k, a in near.items():
            matrices[k] = a * eye + NEAR_IDENTITY * n**-0.5 * torch.randn_like(eye)

    def add_input(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.cat([y, x.to(y.dtype)], -1) if self.adds_input else y

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, *states: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and the states (B, H each); return the new state, and the inputs of products after
        the first."""

        def product(k: int, v: Tensor) -> Sequence[Tensor]:
            return self.recurrent_product(k, v, weight, offset).chunk(self.hidden[k], -1)

        new, read = self.graph.run(x.chunk(self.gates, -1), product, states)
        kept = tuple(keep_at_padding(real, *pair) for pair in zip(new, states, strict=True))
        return kept, tuple(value.detach() for value in read)
