"""Stage 6: from a finished run to the folder that Regard brings along.

    python recipes/translator/pack.py RUN OUT

The same model with its weights in bytes. OUT is regard/pretrained/en-de-fr-zh. It is scored next (score.py), and its card is
written last (card.py): the scores are those of what is shipped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from regard import model_folder

MOST = 40e6  # bytes
CARD = "# {}\n\nNot scored yet: `recipes/translator/score.py`, then `card.py` writes what belongs here.\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    package = model_folder.load(given.run, torch.device("cpu"), "fp32")
    model_folder.save(given.out, package, CARD.format(given.out.name), small=True)
    for file in given.out.iterdir():
        file.chmod(0o644)  # also for other users, wherever it is installed
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: {size / 1e6:.1f} MB" + (f", more than {MOST / 1e6:.0f}" if size > MOST else ""))


if __name__ == "__main__":
    main()
