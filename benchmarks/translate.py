"""Speed of translating texts on a CPU: source words a second, and milliseconds of one sentence, by beam width.

    python benchmarks/translate.py FILE [--model en-de-fr-zh] [--model OTHER] [--to de] [--beams 1,2,4] [--lines 400]

FILE has one text a line. Models take turns, so that other load on the machine affects all alike: compare within one run.
What is measured is `Translator.translate`, with everything that it does for texts and its own choice of threads. Loading is
not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path

import regard
from regard.data.parallel_corpus import read_lines
from regard.terminal import format_table

SENTENCE = "I would like to book a table for two tonight."  # ten words
CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", action="append", help="default en-de-fr-zh; may be given several times")
    parser.add_argument("--to", default="de")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--beams", default="1,2,4")
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    texts = list(read_lines(given.file))[: given.lines]
    words = sum(len(text.split()) for text in texts)
    translators = {name: regard.load(name, "cpu", given.weights) for name in given.model or ["en-de-fr-zh"]}
    beams = [int(beam) for beam in given.beams.split(",")]
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    delays: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(given.repeats):
        for name, translator in translators.items():
            for beam in beams:
                translator.translate(SENTENCE, to=given.to, beam=beam)
                start = time.perf_counter()
                translator.translate(texts, to=given.to, beam=beam)
                rates[name, beam].append(words / (time.perf_counter() - start))
                for _ in range(CALLS):
                    start = time.perf_counter()
                    translator.translate(SENTENCE, to=given.to, beam=beam)
                    delays[name, beam].append(time.perf_counter() - start)
    rows = [
        (name, str(beam), f"{statistics.median(own):,.0f}", f"{1000 * statistics.median(delays[name, beam]):.1f}")
        for (name, beam), own in rates.items()
    ]
    print(f"{len(texts)} texts, {words:,} words")
    print("\n".join(format_table([("model", "beam", "words/s", "ms for ten words"), *rows], 1)))


if __name__ == "__main__":
    main()
