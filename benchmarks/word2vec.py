"""Word vectors: words a second and quality beside gensim's, on the same text with the same settings and threads.

    python benchmarks/word2vec.py --text a.txt.xz b.txt.xz --sets FOLDER [--only sg-ns,cbow-ns,sg-hs] [--peers gensim,cpu]
                                  [--seeds 3] [--epochs 5] [--threads 2] [--device cuda] [--lines N] [--json FILE]

FOLDER holds EN-WS-353-ALL, EN-MEN-TR-3k and questions-words (.txt, .txt.xz). Speeds are of training alone, with the
vocabulary built and the text in memory, as ids for Regard and as lists of words for gensim; raw words of the vocabulary
count, before sub-sampling. Seeds alternate between all trainers; the table has the median speed and the mean quality.
With --device cuda, `cpu` is Regard's own training on CPU threads. Settings are the same: gensim's learning rate for CBOW
is set to the C program's, and Regard's initial vectors have the same spread as gensim's.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from common import Report, parser

from regard.config import VectorsConfig
from regard.data import toy
from regard.data.parallel_corpus import read_lines
from regard.data.token_cache import TokenStore
from regard.device import pick_device
from regard.evaluate.word_similarity import evaluate_analogies, evaluate_similarity, sum_sections
from regard.vectors.word2vec import train_ids
from regard.vectors.word_counts import Vocabulary
from regard.vectors.word_vectors import WordVectors

KINDS = {
    "sg-ns": VectorsConfig(spread=1.0),
    "cbow-ns": VectorsConfig(spread=1.0, model="cbow"),
    "sg-hs": VectorsConfig(spread=1.0, loss="hierarchical"),
}
WORD = re.compile(r"[a-z']+|\d+")
Trainer = Callable[["Text", VectorsConfig], tuple[WordVectors, float]]  # -> vectors and words/s


@dataclass(frozen=True)
class Text:
    lines: list[list[str]]
    vocabulary: Vocabulary
    ids: TokenStore

    @classmethod
    def of(cls, lines: list[list[str]], min_count: int) -> Text:
        rows = [" ".join(line) for line in lines]
        vocabulary = Vocabulary.count(((row,) for row in rows), min_count)
        ids = [row for row in vocabulary.encode_batch(rows) if row]
        offsets = np.cumsum([0, *map(len, ids)])
        return cls(lines, vocabulary, TokenStore(np.concatenate([np.array(row, np.uint32) for row in ids]), offsets))

    @property
    def words(self) -> int:
        return len(self.ids.ids)


def read_text(files: list[Path], limit: int, tiny: bool) -> Text:
    """Return lower-cased words by line; --lines samples evenly over the files."""
    if tiny:
        return Text.of([english.lower().split() for english, _ in toy.pairs(300, "train")], 2)
    words = (WORD.findall(line.lower().replace("<unk>", "")) for path in files for line in read_lines(path))
    lines = [line for line in words if line]
    every = max(1, len(lines) // limit) if limit else 1
    return Text.of(list(islice(lines, 0, None, every)), VectorsConfig().min_count)


def by_regard(text: Text, config: VectorsConfig) -> tuple[WordVectors, float]:
    found = train_ids(text.ids, text.vocabulary, config)
    return found.word_vectors(), found.words / found.seconds


def by_threads(text: Text, config: VectorsConfig) -> tuple[WordVectors, float]:
    return by_regard(text, replace(config, device="cpu"))


def by_gensim(text: Text, config: VectorsConfig) -> tuple[WordVectors, float]:
    from gensim.models import Word2Vec

    tree, cbow = config.loss == "hierarchical", config.model == "cbow"
    model = Word2Vec(
        vector_size=config.dim, window=config.window, min_count=int(text.vocabulary.counts[-1]), sample=config.subsample,
        sg=int(not cbow), hs=int(tree), negative=0 if tree else config.negatives, alpha=0.05 if cbow else 0.025,
        epochs=config.epochs, workers=config.threads, seed=config.seed + 1,
    )  # fmt: skip
    model.build_vocab(text.lines)
    begun = time.perf_counter()
    model.train(text.lines, total_examples=len(text.lines), epochs=config.epochs)
    speed = text.words * config.epochs / (time.perf_counter() - begun)
    return WordVectors(model.wv.index_to_key, model.wv.vectors), speed


TRAINERS: dict[str, Trainer] = {"regard": by_regard, "gensim": by_gensim, "cpu": by_threads}


def quality(vectors: WordVectors, sets: Path | None) -> dict[str, float]:
    """Return Spearman's rank correlations and the share of analogies answered correctly, all times 100."""
    if sets is None:
        return {}
    found = {}
    for name, file in (("WS-353", "EN-WS-353-ALL"), ("MEN", "EN-MEN-TR-3k")):
        found[name] = 100 * (evaluate_similarity(vectors, place(sets, file)).spearman or 0.0)
    found["analogies"] = 100 * (
        sum_sections(evaluate_analogies(vectors, place(sets, "questions-words"))).accuracy or 0.0
    )
    return found


def place(folder: Path, name: str) -> Path:
    plain = folder / f"{name}.txt"
    return plain if plain.exists() else folder / f"{name}.txt.xz"


def compare(report: Report, text: Text, name: str) -> None:
    options = report.options
    config = replace(KINDS[name], epochs=options.epochs, threads=options.threads, device=options.device)
    who = ["regard", *report.peers]
    start = Text(text.lines[:50], text.vocabulary, TokenStore(text.ids.ids[:1000], np.array([0, 1000])))
    for peer in set(who) - {"gensim"}:  # compiles before timing
        TRAINERS[peer](start, replace(config, epochs=1))
    speeds: dict[str, list[float]] = {peer: [] for peer in who}
    scores: dict[str, list[dict[str, float]]] = {peer: [] for peer in who}
    for seed in range(options.seeds):
        for peer in who:
            vectors, speed = TRAINERS[peer](text, replace(config, seed=seed))
            speeds[peer].append(speed)
            scores[peer].append(quality(vectors, options.sets))
            shown = ", ".join(f"{what} {value:.1f}" for what, value in scores[peer][-1].items())
            report.note(f"{name}, seed {seed}, {peer}: {speed:,.0f} words/s {shown}")
    for peer in who:
        report.put(name, peer, statistics.median(speeds[peer]), "words/s")
        for what in scores[peer][0]:
            values = [score[what] for score in scores[peer]]
            report.put(f"{name} {what}", peer, statistics.mean(values), "x 100")


def main() -> int:
    made = parser(__doc__, KINDS, ("gensim", "cpu"), "gensim")
    made.add_argument("--text", type=Path, nargs="+", default=[], help="text files")
    made.add_argument("--sets", type=Path, help="folder of the test sets; without it only speeds are measured")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=5)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--lines", type=int, default=0, help="use about N lines, evenly spread; 0 = all")
    made.add_argument("--device", default="cpu")
    options = made.parse_args()
    if options.tiny:
        options.epochs, options.seeds, options.threads = 1, 1, 1
    report = Report(options, pick_device(options.device))
    text = read_text(options.text, options.lines, options.tiny)
    report.note(f"{text.words:,} words, {len(text.vocabulary):,} different ones; {options.threads} threads")
    for name in KINDS:
        report.section(name, lambda report, name=name: compare(report, text, name))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
