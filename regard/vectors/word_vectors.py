"""Word vectors: nearest words, analogies and similarities, all by cosine similarity.

Look-up is case-sensitive: "Paris" and "paris" are two words, each with its own vector or none. Only the test sets
(evaluate/word_similarity.py) ignore case. Vectors are stored as they were read; a normalised copy is made when first
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from regard.config import VectorsConfig
from regard.config.recipes import build
from regard.errors import RegardError
from regard.files import read_json

EPSILON = 1e-3  # of 3CosMul (Levy and Goldberg 2014)
METHODS = ("add", "mul")
FOLDER_KIND = "word-vectors"  # "kind" in the config.json of a folder of word vectors
SUGGESTION_WORDS = 200_000  # spellings are suggested from the first, that is, most frequent words only

Neighbours = list[tuple[str, float]]  # words and their scores, best first


class VectorOptions(TypedDict, total=False):
    """Keyword arguments of `WordVectors.train`; `regard vectors train --help` says what they mean."""

    model: str  # skipgram or cbow
    loss: str  # negative, hierarchical or softmax
    dim: int  # size of the vectors
    window: int  # context words on each side, at most
    shrink_windows: bool  # draw the size of each window
    negatives: int  # negative samples for each prediction
    noise_power: float
    min_count: int  # words that occur less often are removed
    max_vocab: int
    lowercase: bool
    subsample: float
    subsample_rule: str
    epochs: int  # passes over the text
    lr: float
    min_lr_share: float
    spread: float
    cbow_gradient: str
    threads: int
    seed: int
    device: str
    batch: int


@dataclass(frozen=True)
class WordVectors:
    """Words, most frequent first where counts are known, and one vector for each.

    `WordVectors.train` trains some with word2vec; `regard.load` and `WordVectors.load` read the files of word2vec and GloVe.

    Examples:
        >>> import numpy as np
        >>> from regard import WordVectors
        >>> words = ["king", "man", "woman", "queen", "apple"]
        >>> vectors = np.array([[1, 1, 0], [0, 1, 0], [0, 1, 1], [1, 1, 1], [-1, 0, 0]], np.float32)
        >>> loaded = WordVectors(words, vectors)
        >>> [word for word, cosine in loaded.nearest("king", n=2)]
        ['queen', 'man']
        >>> loaded.analogy("man", "king", "woman", n=1)[0][0]
        'queen'
        >>> round(loaded.similarity("king", "apple"), 3)
        -0.707
        >>> "pear" in loaded, loaded["king"].shape, len(loaded)
        (False, (3,), 5)

    Attributes:
        words: The words, most frequent first where counts are known.
        vectors: Their vectors, (V, D).
        counts: How often each word occurred, or None.
        dim: D, the number of components of a vector.
    """

    words: list[str]
    vectors: np.ndarray  # (V, D) float32
    counts: np.ndarray | None = None  # (V,)
    outside: np.ndarray | None = None  # (V', D), output vectors: one per word, or per inner node of a Huffman tree
    about: dict[str, Any] = field(default_factory=dict)  # how they were trained; stored in their folder

    def __post_init__(self) -> None:
        shape = self.vectors.shape
        if not self.words or len(shape) != 2 or shape[0] != len(self.words) or not shape[1]:
            raise RegardError(f"{len(self.words):,} words and vectors of shape {shape} do not go together")
        if self.counts is not None and len(self.counts) != len(self.words):
            raise RegardError(f"{len(self.words):,} words and {len(self.counts):,} counts do not go together")

    @classmethod
    def train(
        cls, files: str | Path | Iterable[str | Path], quiet: bool = True, **settings: Unpack[VectorOptions]
    ) -> WordVectors:
        """Train word vectors with word2vec on text files, a sentence a line, split at white space.

        Args:
            files: A text file, or several; they may be compressed.
            quiet: False shows a progress bar on a terminal.
            settings: Settings of `regard vectors train`, such as dim=100, window=5, epochs=5, model="cbow".
        """
        from regard.vectors.word2vec import train

        given = [files] if isinstance(files, (str, Path)) else list(files)
        return train([Path(file) for file in given], build(dict(settings), VectorsConfig), quiet).word_vectors()

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.index

    def __getitem__(self, word: str) -> np.ndarray:
        return self.vectors[self.row(word)]

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of each word; the first one of a word that occurs twice."""
        return {word: row for row, word in zip(reversed(range(len(self))), reversed(self.words), strict=True)}

    @cached_property
    def unit(self) -> np.ndarray:
        """The vectors scaled to length 1, (V, D); a vector of zeros stays zero, and so do its similarities."""
        lengths = np.linalg.norm(self.vectors, axis=1, keepdims=True)
        return (self.vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32, copy=False)

    def row(self, word: str) -> int:
        """Return the row of a word; the error for an unknown word suggests similar spellings."""
        found = self.index.get(word)
        if found is None:
            raise RegardError(
                f"{word!r} is not among the {len(self):,} words{_hint(similar_spellings(word, self.words))}"
            )
        return found

    def similarity(self, a: str, b: str) -> float:
        """Return the cosine similarity of two words, -1 to 1."""
        return float(self.unit[self.row(a)] @ self.unit[self.row(b)])

    def nearest(self, word: str | np.ndarray, n: int = 10) -> Neighbours:
        """Return the n words nearest to a word (itself excluded) or to a vector (D,), with their cosines."""
        if isinstance(word, str):
            row = self.row(word)
            return self._best(self.unit @ self.unit[row], n, [row])
        vector = np.asarray(word, np.float32)
        if vector.shape != (self.dim,):
            raise RegardError(f"a vector of shape {vector.shape} cannot be compared with vectors of {self.dim} numbers")
        length = np.linalg.norm(vector)
        return self._best(self.unit @ (vector / (length or 1.0)), n, [])

    def analogy(self, a: str, b: str, c: str, n: int = 10, method: str = "add") -> Neighbours:
        """Return the words that are to c as b is to a, these three excluded: `analogy("man", "king", "woman")`.

        `add` (3CosAdd) finds the words nearest to b - a + c, vectors of length 1; `mul` (3CosMul) those with the
        largest cos(b) cos(c) / cos(a), where no single term can dominate.
        """
        rows = [self.row(word) for word in (a, b, c)]
        va, vb, vc = self.unit[rows][:, None]  # (1, D) each
        return self._best(analogy_scores(self.unit, va, vb, vc, method)[0], n, rows)

    def rank(self, word: str, other: str) -> int:
        """Return the rank of `other` among the words nearest to `word`: 1 for the nearest."""
        row, wanted = self.row(word), self.row(other)
        if row == wanted:
            raise RegardError(f"{word!r} has no rank among the words nearest to itself: give two words")
        scores = self.unit @ self.unit[row]
        scores[row] = -np.inf
        return int((scores > scores[wanted]).sum()) + 1

    def _best(self, scores: np.ndarray, n: int, without: list[int]) -> Neighbours:
        if n < 1:
            raise RegardError(f"at least 1 word must be asked for, not {n}")
        scores[without] = -np.inf
        rows = top_indices(scores, min(n, len(self) - len(set(without))))
        return [(self.words[row], float(scores[row])) for row in rows]

    def first(self, n: int) -> WordVectors:
        """Return the first n words and their vectors."""
        counts = None if self.counts is None else self.counts[:n]
        return WordVectors(self.words[:n], self.vectors[:n], counts, about=self.about)

    def save(self, path: str | Path, kind: str = "") -> None:
        """Save to a file by its suffix (.txt, .vec: text; .bin: binary; also with .gz, .xz, .zst), else to a folder."""
        from regard.vectors.formats import write_vectors

        write_vectors(self, Path(path), kind)

    @classmethod
    def load(cls, path: str | Path, errors: str = "replace") -> WordVectors:
        """Load a folder, or a word2vec or GloVe file; `errors` for invalid UTF-8 is replace, ignore or strict."""
        from regard.vectors.formats import read_vectors

        return read_vectors(Path(path), errors)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder of word vectors."""
    try:
        return bool(read_json(path / "config.json").get("kind") == FOLDER_KIND)
    except (OSError, ValueError, AttributeError):
        return False


def analogy_scores(unit: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, method: str = "add") -> np.ndarray:
    """Return the score of each word as the answer to each analogy a : b :: c : ?, (Q, V).

    The words `unit` are (V, D), the questions a, b and c (Q, D), all of length 1. `add` gives cosines with b - a + c,
    scaled to length 1; `mul` combines cosines mapped to 0 ... 1.
    """
    if method == "add":
        target = b - a + c
        return target / np.maximum(np.linalg.norm(target, axis=1, keepdims=True), 1e-30) @ unit.T
    if method == "mul":
        near_a, near_b, near_c = ((1 + x @ unit.T) / 2 for x in (a, b, c))
        return near_b * near_c / (near_a + EPSILON)
    raise RegardError(f"unknown way to solve analogies {method!r}: choose {' or '.join(METHODS)}")


def top_indices(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n largest scores, largest first, ties in their order."""
    if n < len(scores):
        least = np.partition(scores, -n)[-n] if n else np.inf
        indices = np.flatnonzero(scores >= least)
    else:
        indices = np.arange(len(scores))
    return indices[np.argsort(-scores[indices], kind="stable")][:n]


def similar_spellings(word: str, words: Sequence[str], n: int = 3) -> list[str]:
    """Return up to n words spelt like an unknown one; only words of nearly its length and letters are compared."""
    likely = islice(_similar_letters(word.casefold(), words), 20_000)
    matcher = SequenceMatcher(b=word.casefold(), autojunk=False)
    found = []
    for other in likely:
        matcher.set_seq1(other.casefold())
        if matcher.quick_ratio() >= 0.6 and (ratio := matcher.ratio()) >= 0.6:
            found.append((ratio, other))
    return [other for _, other in sorted(found, key=lambda pair: -pair[0])[:n]]


def _similar_letters(word: str, words: Sequence[str]) -> Iterable[str]:
    letters, size = set(word), len(word)
    for other in islice(words, SUGGESTION_WORDS):
        if abs(len(other) - size) <= 2 and len(letters.symmetric_difference(other.casefold())) <= 3:
            yield other


def _hint(found: list[str]) -> str:
    if not found:
        return "; words are looked up as they are written, case included"
    *most, last = map(repr, found)
    return f": did you mean {', '.join(most)}{' or ' if most else ''}{last}?"
