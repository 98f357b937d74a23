"""Positional unknown words: `<unk:+2>` stands for a target word that the vocabulary lacks and says where its source word is.

The token of a target word at position i whose source word is at position j is `<unk:d>` with d = i - j, or `<unk:null>`
where the word has no source word or one that is farther away than the vocabulary has tokens for (PosUnk, Luong et al. 2015).
A model learns to write these tokens, and after decoding each is replaced (decode/unknown_words.py). The source words are
found by a word alignment (text/lexical_alignment.py). It is learned from the training corpus, for validation data too: a few
pairs are not enough to learn one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

from regard.data.multilingual import DirectedCorpus
from regard.data.parallel_corpus import ParallelCorpus
from regard.text.lexical_alignment import WordAligner
from regard.text.tokenizer import Tokenizer, Tokenizers

SEPARATOR = "\0"  # no text file has it
ROWS_AT_A_TIME = 4096


class PairedCorpus:
    """A corpus for `prepare_pair_store` whose targets have the source in front, which their tokens depend on."""

    def __init__(self, corpus: ParallelCorpus | DirectedCorpus, aligned_by: PairedCorpus | None = None) -> None:
        """Take the corpus, and the one that its word alignment is learned from, by default itself."""
        self.corpus, self.specs, self.aligned_by = corpus, corpus.specs, aligned_by
        self.has_directions = isinstance(corpus, DirectedCorpus)

    def rows_by_spec(self) -> Iterator[Iterator[tuple[str, ...]]]:
        for rows in self.corpus.rows_by_spec():
            yield ((source, self.join(source, target)) for source, target in rows)

    def join(self, source: str, target: str) -> str:
        """Return both texts as one, without the target language that a `DirectedCorpus` puts in front of the source."""
        text = source.split("\t", 1)[-1] if self.has_directions else source
        return f"{text.replace(SEPARATOR, ' ')}{SEPARATOR}{target}" if target.strip() else ""

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the source and target of all rows that have both."""
        for rows in self.rows_by_spec():
            for _, joined in rows:
                if joined:
                    source, target = joined.split(SEPARATOR, 1)
                    yield source, target

    def fingerprint(self) -> str:
        own = self.corpus.fingerprint()
        other = self.aligned_by.corpus.fingerprint() if self.aligned_by is not None else own
        return f"paired {own}" if other == own else f"paired {own} aligned by {other}"


class PositionalUnknownTokenizer:
    """A tokenizer for the targets of a `PairedCorpus`, with positional tokens in place of unknown words.

    `corpus` is the one that the word alignment is learned from."""

    def __init__(self, tokenizers: Tokenizers, corpus: PairedCorpus) -> None:
        self.tokenizers, self.corpus = tokenizers, corpus
        self.ids = {distance: id for id, distance in tokenizers.target.positional_unknown().items()}

    @cached_property
    def aligner(self) -> WordAligner:
        """The word alignment, learned when the first text is encoded: a corpus in the token cache needs none."""

        def pairs() -> Iterator[tuple[Sequence[str], Sequence[str]]]:
            rows = self.corpus.pairs()
            while some := list(islice(rows, ROWS_AT_A_TIME)):
                sides = [
                    self._words(tokenizer, [row[i] for row in some])
                    for i, tokenizer in enumerate((self.tokenizers.source, self.tokenizers.target))
                ]
                for (_, source), (_, target) in zip(*sides, strict=True):
                    yield source, target

        return WordAligner.train(pairs())

    @staticmethod
    def _words(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[list[int], list[str]]]:
        return [(ids, [word.casefold() for word in words]) for ids, words in tokenizer.split_words(texts)]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        aligner = self.aligner
        parted = [text.split(SEPARATOR, 1) if text else ["", ""] for text in texts]
        sources = self._words(self.tokenizers.source, [source for source, _ in parted])
        targets = self._words(self.tokenizers.target, [target for _, target in parted])
        unknown = self.tokenizers.target.special.unk
        found = []
        for (_, source), (ids, target) in zip(sources, targets, strict=True):
            if unknown in ids:
                places = aligner.align(source, target)
                ids = [self._token(i, places[i]) if id == unknown else id for i, id in enumerate(ids)]
            found.append(ids)
        return found

    def _token(self, i: int, j: int | None) -> int:
        """Return the token of an unknown word at position i whose source word is at position j."""
        return self.ids.get(None if j is None else i - j, self.ids[None])

    def fingerprint(self) -> str:
        both = (self.tokenizers.source.fingerprint(), self.tokenizers.target.fingerprint())
        return " ".join(("positional", *both))

    def __len__(self) -> int:
        return len(self.tokenizers.target)
