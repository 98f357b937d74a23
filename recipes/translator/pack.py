"""Stage 5: from a finished run to the folder that Regard brings along.

    python recipes/translator/pack.py RUN OUT --work WORK

Weights in bytes and profiles of the languages. OUT is regard/pretrained/many. It is scored next (score.py), and its card is
written last (card.py): the scores are those of what is shipped.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from regard import folder
from regard.data.corpus import read_lines
from regard.text.detect import Profiles, learned

MOST = 40e6  # bytes
SAMPLED = 50_000  # sentences a profile is learned from
PLACES = {"en": "en-de", "de": "en-de", "fr": "en-fr"}
CARD = "# {}\n\nNot scored yet: `recipes/translator/score.py`, then `card.py` writes what belongs here.\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    bundle = folder.load(given.run, torch.device("cpu"), "fp32")
    bundle = replace(bundle, languages=profiles(given.work, bundle.directions))
    folder.save(given.out, bundle, CARD.format(given.out.name), small=True)
    for file in given.out.iterdir():
        file.chmod(0o644)  # also for other users, wherever it is installed
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: {size / 1e6:.1f} MB" + (f", more than {MOST / 1e6:.0f}" if size > MOST else ""))


def profiles(work: Path, directions: tuple[str, ...]) -> Profiles:
    """Of the languages that are told apart by their letters; Chinese is by its script."""
    spoken = {language for direction in directions for language in direction.split(">")}
    files = {lang: work / f"{stem}.train.{lang}.xz" for lang, stem in PLACES.items() if lang in spoken}
    return {lang: learned(islice(read_lines(path), SAMPLED)) for lang, path in files.items()}


if __name__ == "__main__":
    main()
