"""Stage 6: from a finished run to the bundled model, with int8 weights.

    python recipes/translator/pack.py RUN OUT

OUT is regard/pretrained/en-de-fr-zh. It is scored next (score.py), and its card is written last (card.py), so that the
scores are those of the shipped model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from regard import model_folder

MAX_BYTES = 50e6
CARD = "# {}\n\nNot scored yet: `recipes/translator/score.py`, then `card.py` writes what belongs here.\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    package = model_folder.load(given.run, torch.device("cpu"), "fp32")
    model_folder.save(given.out, package, CARD.format(given.out.name), small=True)
    for file in given.out.iterdir():
        file.chmod(0o644)  # readable for all users after installation
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: {size / 1e6:.1f} MB" + (f", more than {MAX_BYTES / 1e6:.0f}" if size > MAX_BYTES else ""))


if __name__ == "__main__":
    main()
