"""The words of a text, counted file by file without loading one, and the text as their numbers.

Words are what white space separates, and a line is a sentence. A text without line ends (text8 is one) is cut into
sentences of 64 KiB, between words.
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

from regard.config import VectorsConfig
from regard.data.parallel_corpus import BOM, file_digest, json_rows, read_blocks
from regard.errors import RegardError

LONGEST = 1 << 16  # bytes of a sentence
SPACES = b" \t\r\v\f"


@dataclass(frozen=True)
class Texts:
    """Files as sentences, one a row."""

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

    def fingerprint(self) -> str:
        content = ["sentences", self.lowercase, *map(file_digest, self.files)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def sentences(path: Path) -> Iterator[str]:
    """The lines of a file, longer ones in pieces; bytes that are no UTF-8 become the sign for that."""
    rest, first = b"", True
    for block in read_blocks(path):
        *lines, rest = (rest + (block.removeprefix(BOM) if first else block)).split(b"\n")
        first = False
        if len(rest) > LONGEST:
            cut = max(rest.rfind(space) for space in map(bytes, zip(SPACES, strict=True))) + 1
            lines, rest = [*lines, rest[:cut]], rest[cut:]
        yield from (line.decode(errors="replace") for line in lines)
        if len(rest) > 16 * LONGEST:
            raise RegardError(f"{path} has {len(rest):,} bytes without a space: give text with spaces between words")
    yield rest.decode(errors="replace")


@dataclass(frozen=True)
class Vocabulary:
    """Words and how often they occur, the most frequent first; equally frequent ones in the order of the alphabet."""

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
        """Of the words that occur at least `min_count` times."""
        found: Counter[str] = Counter()
        for (text,) in rows:
            found.update(text.split())
            progress(1)
        kept = sorted((item for item in found.items() if item[1] >= min_count), key=lambda item: (-item[1], item[0]))
        if not kept:
            raise RegardError(_nothing_left(found, min_count))
        kept = kept[: max_vocab or None]
        return cls([word for word, _ in kept], np.array([n for _, n in kept], np.int64))

    @cached_property
    def index(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Rare words are left out, so that windows reach over the gap."""
        index = self.index
        return [[index[word] for word in text.split() if word in index] for text in texts]

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()

    def keep_probability(self, t: float, rule: str = "word2vec") -> np.ndarray:
        """Sub-sampling: how likely an occurrence of each word stays.  # (V,)

        The programs use sqrt(t/f) + t/f, the paper writes sqrt(t/f); f is a word's share of the text.
        """
        if not t:
            return np.ones(len(self))
        ratio = t * self.counts.sum() / self.counts
        return np.minimum(np.sqrt(ratio) + (ratio if rule == "word2vec" else 0), 1)

    def noise(self, power: float = 0.75) -> np.ndarray:
        """What negatives are drawn from.  # (V,)"""
        weights = self.counts.astype(np.float64) ** power
        return weights / weights.sum()


def _nothing_left(found: Counter[str], min_count: int) -> str:
    if not found:
        return "there are no words in the text: give a file with words between spaces"
    word, n = found.most_common(1)[0]
    return (
        f"no word occurs {min_count} times or more: of {len(found):,} words the most frequent, {word!r}, "
        f"occurs {n:,} times; give more text or a smaller min_count"
    )


def alias_table(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's method: draw i evenly, keep it with probability share[i], else take other[i]; exact, in two look-ups.

    Returns share (V,) float32 and other (V,) int32.
    """
    n = len(p)
    share, other = p * n, np.arange(n, dtype=np.int32)
    small, large = [i for i in range(n) if share[i] < 1], [i for i in range(n) if share[i] >= 1]
    while small and large:
        poor, rich = small.pop(), large[-1]
        other[poor] = rich
        share[rich] -= 1 - share[poor]
        if share[rich] < 1:
            small.append(large.pop())
    share[small + large] = 1  # what rounding left
    return share.astype(np.float32), other


def configured(texts: Texts, config: VectorsConfig, progress: Callable[[int], None] = lambda done: None) -> Vocabulary:
    """The vocabulary that a configuration asks for."""
    return Vocabulary.count(texts.rows(), config.min_count, config.max_vocab, progress)
