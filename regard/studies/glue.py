"""Sentences with labels, as GLUE gives them: what is trained on, what is looked at while training, and what is reported.

The last tenth of the training file chooses the checkpoint; the number that counts is taken once, on the labelled test where
there is one, else on the development set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Glue:
    task: str
    metric: str
    test: str  # its file
    columns: dict[str, str]
    steps: int
    test_columns: dict[str, str] | None = None  # where they differ

    def data(self, name: str, root: str) -> dict[str, Any]:
        train = f"{name}.train.tsv.xz"
        return {
            "root": root,
            "train": [f"{train}[:90%]"],
            "valid": [f"{train}[90%:]"],
            "test": [self.test],
            **self.columns,
        }


PAIR = {"text": "sentence1", "pair": "sentence2"}
TASKS = {
    "SST-2": Glue("classification", "accuracy", "SST-2.test-labeled.tsv.xz", {"text": "sentence", "label": "label"}, 1500),
    "CoLA": Glue("classification", "matthews", "CoLA.dev.tsv.xz", {"text": "4", "label": "2"}, 800),
    "MRPC": Glue(
        "classification", "f1", "MRPC.test-labeled.tsv.xz",
        {"text": "#1 String", "pair": "#2 String", "label": "Quality"}, 600,
    ),
    "STS-B": Glue(
        "regression", "spearman", "STS-B.test-labeled.tsv.xz", {**PAIR, "label": "score"}, 800,
        {"text": "6", "pair": "7", "label": "5"},
    ),
    "RTE": Glue("classification", "accuracy", "RTE.dev.tsv.xz", {**PAIR, "label": "label"}, 500),
}  # fmt: skip
