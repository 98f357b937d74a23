"""A program that torchrun starts in tests: it trains several small recipes one after the other, in this process group.

    python -m torch.distributed.run --nproc-per-node N tests/training/parallel_cases.py CASES.json

CASES.json is a list of objects: recipe (a file), run (a folder), train (settings of [train]).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import regard


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        torch.set_default_dtype(getattr(torch, case.get("dtype", "float32")))
        torch.manual_seed(0)
        settings = {f"train.{name}": value for name, value in case["train"].items()}
        regard.train(case["recipe"], case["run"], settings=settings, quiet=True)


if __name__ == "__main__":
    main()
