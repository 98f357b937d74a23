"""Train the classifiers that identify languages (regard/text/language_profiles.json).

    python recipes/language_identification/sources.py SOURCES
    python recipes/language_identification/train.py SOURCES OUT

SOURCES is the folder of downloaded packages; sources.py says what they are. SOURCES/corpora has the training corpora of the
translator. OUT is the file to write. It takes ten minutes and 6 GB of memory on one core.

For each script that several languages share, a softmax over the summed weights of n-grams is trained on fragments of one to
25 words, most of them short, so that its probabilities hold for short texts. Each language gets the same number of
fragments, the model's languages and their neighbours more. The n-grams of each language that tell it apart best (greatest
contribution to the Kullback-Leibler divergence from the mean of all languages) are kept, and the weights are rounded to
whole multiples of a step after training.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sources import UDHR_TRAIN, read_corpora, read_declarations, read_packages, read_word_frequencies

from regard.text.language_identification import HASH_SHIFT, SCRIPT_NAMES, hash_ngrams, read_letters

LANGUAGES = {
    "Latin": "en de fr es pt it nl sv da nb is fo fi et lv lt pl cs sk sl hr hu ro tr az sq eu ca gl oc ast fur wa br cy ga "
    "gd eo la af nds fy lb li csb hsb id vi tl uz ku tk mg sw ha ig zu xh nso rw mt so ht jv yo se kab ln",
    "Cyrillic": "ru uk be bg mk sr kk ky tg mn tt uz",
    "Arabic": "ar fa ur ps ckb ug sd ks",
    "Devanagari": "hi mr ne mai kok doi brx",
    "Hebrew": "he yi",
    "Bengali": "bn as mni",
}
NGRAMS = {"Latin": 24_000, "Cyrillic": 8000, "Arabic": 4000, "Devanagari": 4000, "Hebrew": 1500, "Bengali": 2000}
STEP = 0.5  # of the rounded weights
FRAGMENTS = 30_000  # of each language at most
MORE_FRAGMENTS = {"en": 4, "de": 4, "fr": 4} | dict.fromkeys(
    ("es", "it", "pt", "nl", "pl", "ru", "uk", "ar", "hi", "bn"), 2
)
# Sentences are weighted above names of menus; else the weight of a source is the square root of its size.
SOURCE_WEIGHTS = {"wesnoth": 3.0, "tatoeba": 4.0, "udhr": 3.0, "parley-data": 2.0, "multi30k": 1.5, "fortunes": 2.0}
CORPUS_WEIGHT = 2.0  # of europarl and docs
WORD_SHARE = 0.3  # of the fragments that are made of single frequent words
FRAGMENT_WORDS = (1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 10, 12, 16, 25)
CHUNK = 20_000  # fragments that are read at once
BATCH, LEARNING_RATE = 4096, 0.05
EPOCHS = {"Latin": 3}  # 12 for the other scripts, which have less text
KEPT = 0.8  # of the n-grams of a fragment; the others are dropped out

Texts = dict[str, dict[str, list[str]]]  # language -> source -> lines
Frequencies = dict[str, list[tuple[str, float]]]


def main(sources: Path, out: Path) -> None:
    torch.manual_seed(0)
    chance = random.Random(1)
    texts: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source, language, text in (*read_packages(sources), *read_corpora(sources / "corpora", 40_000)):
        texts[language][source].append(text)
    for language, text in read_declarations(sources, UDHR_TRAIN):
        texts[language]["udhr"].append(text)
    words = read_word_frequencies(next(sources.glob("wordfreq-*.whl")))
    scripts = {}
    for script, languages in LANGUAGES.items():
        fragments, labels = make_fragments(script, languages.split(), texts, words, chance)
        scripts[script] = train_script(script, languages.split(), fragments, labels)
    comment = "Made by recipes/language_identification from the sources named there."
    out.write_text(json.dumps({"format": 1, "comment": comment, "scripts": scripts}) + "\n", encoding="utf-8")
    print(f"{out}: {out.stat().st_size:,} bytes")


# ---- fragments -------------------------------------------------------------------------------------------------------


def make_fragments(
    script: str, languages: list[str], texts: Texts, words: Frequencies, chance: random.Random
) -> tuple[list[str], NDArray[np.int64]]:
    """Return fragments of all languages in random order, and the number of the language of each.

    Fragments that are not mostly in the script are left out.
    """
    found = [
        (text, number)
        for number, name in enumerate(languages)
        for text in cut_fragments(name, texts[name], words.get(name, []), chance)
    ]
    chance.shuffle(found)
    kept: list[tuple[str, int]] = []
    for start in range(0, len(found), CHUNK):
        part = found[start : start + CHUNK]
        letters = read_letters([text for text, _ in part])
        inside, every = letters.scripts == SCRIPT_NAMES.index(script) + 1, letters.scripts > 0
        own, all_letters = (np.bincount(letters.texts[mask], minlength=len(part)) for mask in (inside, every))
        kept += [each for each, ok in zip(part, (own > 1) & (2 * own > all_letters), strict=False) if ok]
    return [text for text, _ in kept], np.array([number for _, number in kept])


def cut_fragments(
    language: str, texts: dict[str, list[str]], words: list[tuple[str, float]], chance: random.Random
) -> list[str]:
    """Return fragments of one language: some words in a row from random lines, and some frequent words."""
    size = sum(len(line) for lines in texts.values() for line in lines)
    number = min(FRAGMENTS * MORE_FRAGMENTS.get(language, 1), max(4000, size // 8))
    found = []
    if words:
        own = [word for word, _ in words]
        drawn = iter(chance.choices(own, [frequency**0.6 for _, frequency in words], k=3 * number))
        found = [
            " ".join(next(drawn) for _ in range(chance.choice((1, 1, 2, 3)))) for _ in range(int(WORD_SHARE * number))
        ]
    names = [name for name in texts if texts[name]]
    weights = [source_weight(name) * sum(map(len, texts[name])) ** 0.5 for name in names]
    for name in chance.choices(names, weights, k=number - len(found)):
        line = chance.choice(texts[name]).split()
        length = chance.choice(FRAGMENT_WORDS)
        start = chance.randrange(max(1, len(line) - length + 1))
        found.append(" ".join(line[start : start + length]))
    return found


def source_weight(name: str) -> float:
    """Return the weight of a source."""
    own = CORPUS_WEIGHT if name.startswith(("europarl", "docs")) else 1.0
    return SOURCE_WEIGHTS.get(name.split("-")[0], SOURCE_WEIGHTS.get(name, own))


# ---- training --------------------------------------------------------------------------------------------------------


def train_script(script: str, languages: list[str], fragments: list[str], labels: NDArray[np.int64]) -> dict:
    """Train the classifier of one script and return it as it is stored."""
    hashes = select_ngrams(fragments[:350_000], labels[:350_000], len(languages), NGRAMS[script])
    rows, counts = find_rows(fragments, hashes)
    ends = np.concatenate([[0], np.cumsum(counts)])
    weights = torch.zeros(len(hashes), len(languages), requires_grad=True)
    bias = torch.zeros(len(languages), requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=LEARNING_RATE, betas=(0.9, 0.99))
    starts, epochs = range(0, len(labels), BATCH), EPOCHS.get(script, 12)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, epochs * len(starts))
    for epoch in range(epochs):
        correct = 0
        for start in starts:
            wanted = torch.from_numpy(labels[start : start + BATCH])
            owners = torch.from_numpy(np.repeat(np.arange(len(wanted)), counts[start : start + BATCH]))
            used = torch.from_numpy(rows[ends[start] : ends[start + len(wanted)]])
            is_kept = torch.rand(len(used)) < KEPT
            used, number = used[is_kept], torch.bincount(owners[is_kept], minlength=len(wanted))
            sums = torch.nn.functional.embedding_bag(used, weights, number.cumsum(0) - number, mode="sum")
            scores = sums / number.clamp(min=1).sqrt()[:, None] + bias
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, wanted).backward()
            optimizer.step()
            schedule.step()
            correct += int((scores.argmax(1) == wanted).sum())
        print(
            f"{script}: epoch {epoch + 1}, {correct / len(labels):.4f} of {len(labels):,} fragments right", flush=True
        )
    return pack(languages, hashes, weights.detach().numpy(), bias.detach().numpy())


def select_ngrams(fragments: list[str], labels: NDArray[np.int64], languages: int, most: int) -> NDArray[np.uint32]:
    """Return the hashes of the n-grams that tell the languages apart best, the same number for each, in ascending order."""
    pairs = [(hashes, labels[owners]) for hashes, owners in hash_all(fragments)]
    found, places = np.unique(np.concatenate([hashes for hashes, _ in pairs]), return_inverse=True)
    cells = places * languages + np.concatenate([own for _, own in pairs])
    counts = np.bincount(cells, minlength=len(found) * languages).reshape(-1, languages)
    is_frequent = counts.sum(1) >= 10
    found, counts = found[is_frequent], counts[is_frequent]
    shares = counts / counts.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(shares > 0, shares * np.log(shares / shares.mean(1, keepdims=True)), 0)
    ranks = np.argsort(np.argsort(-gain, axis=0, kind="stable"), axis=0)
    best = found[np.argsort(ranks.min(1), kind="stable")]
    _, first = np.unique(best >> HASH_SHIFT, return_index=True)  # one n-gram for each place in the table of hashes
    return np.sort(best[np.sort(first)[:most]])


def hash_all(fragments: list[str]) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
    """Yield the hashes of the n-grams of all fragments, and the number of the fragment of each."""
    for start in range(0, len(fragments), CHUNK):
        hashes, owners = hash_ngrams(read_letters(fragments[start : start + CHUNK]))
        yield hashes, owners + start


def find_rows(fragments: list[str], hashes: NDArray[np.uint32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the rows of the known n-grams of all fragments, one after the other, and how many each fragment has."""
    rows, counts = [], np.zeros(len(fragments), np.int64)
    for own, owners in hash_all(fragments):
        places = np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)
        is_known = hashes[places] == own
        places, owners = places[is_known], owners[is_known]
        rows.append(places[np.argsort(owners, kind="stable")].astype(np.int32))
        counts += np.bincount(owners, minlength=len(fragments))
    return np.concatenate(rows), counts


def pack(languages: list[str], hashes: NDArray, weights: NDArray, bias: NDArray) -> dict:
    """Return a classifier as it is stored. Only differences between languages matter: the median of each row becomes 0."""
    rounded = np.clip(np.round((weights - np.median(weights, 1, keepdims=True)) / STEP), -127, 127).astype(np.int8)
    return {
        "languages": languages,
        "step": STEP,
        "bias": [round(float(value), 3) for value in bias],
        "hashes": encode(np.diff(hashes, prepend=np.uint32(0))),
        "weights": encode(rounded),
    }


def encode(values: NDArray) -> str:
    """Return an array as compressed text."""
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
