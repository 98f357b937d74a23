"""Attention as a soft dictionary look-up.

A dictionary answers a query with the value of the one key that equals it, `store["order_110"]`. Attention answers with the
mean of all values, weighted by the similarity of each key to the query. As the temperature falls, the weights concentrate on
the best key, and the soft look-up becomes the hard one. All queries are answered in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.layers.attention_stages import many_queries

STORE = {
    "order_100": 12.0,
    "order_101": 250.0,
    "order_110": 130.0,
    "order_200": 7.0,
    "order_211": 40.0,
}  # price of each order
QUERIES = ("order_100", "order_110")
TEMPERATURES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
WIDTH = 64


def run(temperatures: Sequence[float] = TEMPERATURES, seed: int = 0) -> dict[str, Any]:
    """Return weights and answers of both queries at each temperature, and the answers of a dictionary."""
    wrong = [t for t in temperatures if not 0 < t < math.inf]
    if wrong:
        raise RegardError(f"a temperature of {wrong[0]}: give numbers above 0; the smaller, the harder the look-up")
    keys = make_vectors(list(STORE), seed)  # (S, D)
    queries = make_vectors(list(QUERIES), seed)  # (T, D)
    values = torch.tensor(list(STORE.values()), dtype=torch.float64)[:, None]  # (S, 1)
    results = [many_queries(queries / t, keys, values) for t in temperatures]
    return {
        "store": dict(STORE),
        "queries": list(QUERIES),
        "temperatures": list(temperatures),
        "weights": [weights.tolist() for _, weights in results],  # temperature, query, key
        "answers": [context[:, 0].tolist() for context, _ in results],  # temperature, query
        "dictionary": [STORE[query] for query in QUERIES],
    }


def make_vectors(names: list[str], seed: int) -> Tensor:
    """Return a vector for each name, (N, D): the sum of a random vector for each digit at its place.

    Names that share digits are similar. All have the same length, sqrt(D), so a query is most similar to its own key.
    """
    table = torch.randn(3, 10, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    digits = torch.tensor([[int(digit) for digit in name.removeprefix("order_")] for name in names])  # (N, 3)
    sums = table[torch.arange(3), digits].sum(1)  # (N, D)
    return sums / sums.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH)


def show(result: dict[str, Any]) -> str:
    """Return a table with one line for each query at each temperature; the answers of the dictionary come last."""
    names, nothing = list(result["store"]), [""] * len(result["store"])
    lines = ["attention weights on the keys of a store, and the answer that its values add up to", ""]
    lines.append(format_line("temperature", "query", names, "answer"))
    lines.append(format_line("", "", [f"{value:g}" for value in result["store"].values()], ""))
    for t, weights, answers in zip(result["temperatures"], result["weights"], result["answers"], strict=True):
        for query, row, answer in zip(result["queries"], weights, answers, strict=True):
            lines.append(format_line(f"{t:g}", query, [f"{weight:.3f}" for weight in row], f"{answer:.2f}"))
    for query, value in zip(result["queries"], result["dictionary"], strict=True):
        lines.append(format_line("dictionary", query, nothing, f"{value:.2f}"))
    return "\n".join(lines)


def format_line(first: str, query: str, cells: list[str], last: str) -> str:
    return (f"{first:>11} {query:<9}" + "".join(f"{cell:>10}" for cell in cells) + f"{last:>9}").rstrip()
