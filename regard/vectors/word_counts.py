"""Vocabulary of word2vec: words are counted file by file, without loading a whole file, and texts encoded as word ids.

Words are separated by white space, and a line is a sentence. A text without line feeds (such as text8) is split into
sentences of about 64 KiB, between words.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from regard.data.parallel_corpus import BOM, file_digest, json_rows, read_blocks
from regard.errors import RegardError

MAX_SENTENCE_BYTES = 1 << 16
SPACES = b" \t\r\v\f"


@dataclass(frozen=True)
class TextFiles:
    """Text files as rows of one sentence each, in the form that `data.token_cache.prepare_store` reads."""

    files: tuple[Path, ...]
    lowercase: bool = False

    def __post_init__(self) -> None:
        if not self.files:
            raise RegardError("no text is given: name at least one file to learn vectors from")

    @property
    def specs(self) -> tuple[str, ...]:
        return tuple(map(str, self.files))

    def rows(self) -> Iterator[tuple[str]]:
        for path in self.files:
            texts = (text for (text,) in json_rows(path, ("text",))) if ".jsonl" in path.suffixes else sentences(path)
            for text in texts:
                yield (text.lower() if self.lowercase else text,)

    def rows_by_spec(self) -> Iterator[Iterator[tuple[str]]]:
        yield self.rows()

    def fingerprint(self) -> str:
        content = ["sentences", self.lowercase, *map(file_digest, self.files)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def sentences(path: Path) -> Iterator[str]:
    """Yield the lines of a file; long lines are split between words, and invalid UTF-8 becomes U+FFFD."""
    rest, first = b"", True
    for block in read_blocks(path):
        *lines, rest = (rest + (block.removeprefix(BOM) if first else block)).split(b"\n")
        first = False
        if len(rest) > MAX_SENTENCE_BYTES:
            cut = max(rest.rfind(space) for space in map(bytes, zip(SPACES, strict=True))) + 1
            lines, rest = [*lines, rest[:cut]], rest[cut:]
        yield from (line.decode(errors="replace") for line in lines)
        if len(rest) > 16 * MAX_SENTENCE_BYTES:
            raise RegardError(f"{path} has {len(rest):,} bytes without a space: give text with spaces between words")
    yield rest.decode(errors="replace")


@dataclass(frozen=True)
class Vocabulary:
    """Words and their counts, the most frequent first; words of equal counts are in alphabetical order."""

    words: list[str]
    counts: np.ndarray  # (V,) int64

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def count(
        cls,
        rows: Iterable[tuple[str]],
        min_count: int,
        max_vocab: int = 0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Vocabulary:
        """Count the words of all rows; keep those that occur at least `min_count` times, at most `max_vocab` (0: all)."""
        found: Counter[str] = Counter()
        for (text,) in rows:
            found.update(text.split())
            progress(1)
        kept = sorted((item for item in found.items() if item[1] >= min_count), key=lambda item: (-item[1], item[0]))
        if not kept:
            raise RegardError(_empty_message(found, min_count))
        kept = kept[: max_vocab or None]
        return cls([word for word, _ in kept], np.array([n for _, n in kept], np.int64))

    @cached_property
    def index(self) -> dict[str, int]:
        """The id of each word."""
        return {word: i for i, word in enumerate(self.words)}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the word ids of each text; unknown words are removed, so that windows reach across them."""
        index = self.index
        return [[index[word] for word in text.split() if word in index] for text in texts]

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()

    def keep_probability(self, t: float, rule: str = "word2vec") -> np.ndarray:
        """Return the probability that subsampling keeps an occurrence of each word, (V,).

        It is sqrt(t/f) + t/f in the original programs (rule "word2vec") and sqrt(t/f) in the paper, where f is the
        relative frequency of a word.
        """
        if not t:
            return np.ones(len(self))
        ratio = t * self.counts.sum() / self.counts
        return np.minimum(np.sqrt(ratio) + (ratio if rule == "word2vec" else 0), 1)

    def noise(self, power: float = 0.75) -> np.ndarray:
        """Return the noise distribution that negative samples are drawn from, (V,): counts to a power, normalised."""
        weights = self.counts.astype(np.float64) ** power
        return weights / weights.sum()


def _empty_message(found: Counter[str], min_count: int) -> str:
    if not found:
        return "there are no words in the text: give a file with words between spaces"
    word, n = found.most_common(1)[0]
    return (
        f"no word occurs {min_count} times or more: of {len(found):,} words the most frequent, {word!r}, "
        f"occurs {n:,} times; give more text or a smaller min_count"
    )


def alias_table(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables of Walker's alias method for the distribution p (V,): keep (V,) float32 and alias (V,) int32.

    To draw from p, draw i uniformly, return i with probability keep[i], else alias[i]: exact, in two look-ups.
    """
    n = len(p)
    keep, alias = p * n, np.arange(n, dtype=np.int32)
    small, large = [i for i in range(n) if keep[i] < 1], [i for i in range(n) if keep[i] >= 1]
    while small and large:
        below, above = small.pop(), large[-1]
        alias[below] = above
        keep[above] -= 1 - keep[below]
        if keep[above] < 1:
            small.append(large.pop())
    keep[small + large] = 1  # rounding errors
    return keep.astype(np.float32), alias
