"""Stage 1b: the vocabulary of the translator, learned from a sample in which languages and kinds of text are balanced.

    python recipes/translator/vocabulary.py WORK

Writes WORK/tokenizer.json, which the recipes of training use.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from regard.config import Config, recipes
from regard.data.multilingual import target_languages
from regard.data.parallel_corpus import ParallelCorpus, read_lines
from regard.text.tokenizer import Tokenizer, Tokenizers

KINDS = ("tatoeba", "europarl", "prose", "docs")
LINES = 60_000  # of the German, French or Chinese side of each set
ENGLISH = 4  # English is in the sets of all four languages: it gets this fraction of the lines of each


def main(work: Path) -> None:
    values = recipes.load(Path(__file__).parent / "teacher.toml")
    config = recipes.build({"data": values["data"], "tokenizer": values["tokenizer"]}, Config)
    directions = ParallelCorpus(config.data.train, "", "", work).directions
    settings = recipes.build(
        {**values["tokenizer"], "language_tokens": target_languages(directions)}, type(config.tokenizer)
    )
    joint = Tokenizer.train(sample_lines(work), settings)
    Tokenizers(joint, joint).save(work)
    print(f"{work / 'tokenizer.json'}: {len(joint):,} pieces")


def sample_lines(work: Path) -> Iterator[str]:
    """Yield lines of every set, at most as many of each, so that all languages have about equal shares."""
    for kind in KINDS:
        for path in sorted(work.glob(f"{kind}-en-*.train.*.xz")):
            lines = list(read_lines(path))
            most = LINES // ENGLISH if path.name.endswith(".en.xz") else LINES
            yield from random.Random(0).sample(lines, min(most, len(lines)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
