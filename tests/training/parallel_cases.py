"""A program that torchrun starts in tests: it trains several small recipes one after the other, in this process group.

    python -m torch.distributed.run --nproc-per-node N tests/training/parallel_cases.py CASES.json

CASES.json is a list of objects: recipe (a file), run (a folder), train (settings of [train]). With fixed_samples, samples of
translations are drawn by no process, but made of their sources, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import regard
from regard.decode.constraints import Hypothesis
from regard.training.reward_objective import RewardObjective


def fixed_samples(self: RewardObjective, sources: list[list[int]], device: torch.device) -> list[list[Hypothesis]]:
    made = ([ids, ids[::-1], ids[: len(ids) // 2 + 1]] for ids in sources)
    return [[Hypothesis(ids, 0.0, 0.0, True) for ids in several] for several in made]


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        torch.set_default_dtype(getattr(torch, case.get("dtype", "float32")))
        torch.manual_seed(0)
        if case.get("fixed_samples"):
            RewardObjective.draw_samples = fixed_samples  # type: ignore[method-assign,assignment]
        settings = {f"train.{name}": value for name, value in case["train"].items()}
        regard.train(case["recipe"], case["run"], settings=settings, quiet=True)


if __name__ == "__main__":
    main()
