"""A held-out validation set: a share of the training data, where a recipe names no validation data.

Examples are chosen by a hash of the seed and of their content. So the choice does not depend on their order, is the same
when a run is resumed, and copies of an example are never on both sides.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from regard.errors import RegardError

MOST_EXAMPLES = 2000  # of a held-out set: validation takes place often
MOST_CHARACTERS = 1_000_000  # of a text that is held out from the end of a file


@dataclass(frozen=True)
class HeldOut:
    """The choice of examples that are held out: those whose hash is in `hashes`."""

    hashes: frozenset[int]
    seed: int
    total: int  # examples of the whole corpus
    count: int  # of these held out

    def holds(self, example: str | bytes) -> bool:
        """Return whether an example is held out."""
        return hash_of(example, self.seed) in self.hashes

    def fingerprint(self) -> str:
        """Return a hash of the choice, which is part of the key of the token cache."""
        return hashlib.sha256(repr((self.seed, sorted(self.hashes))).encode()).hexdigest()

    def describe(self, what: str) -> str:
        """Return a message that says what is held out."""
        return f"data.valid is not given: {self.count:,} of {self.total:,} training {what} are held out for validation"


def hash_of(example: str | bytes, seed: int) -> int:
    """Return a hash of 64 bits."""
    content = example.encode() if isinstance(example, str) else example
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, salt=(seed % (1 << 64)).to_bytes(8, "big")).digest())


def hold_out(examples: Iterable[str | bytes], share: float, seed: int) -> HeldOut:
    """Choose a share of the examples, at least one and at most MOST_EXAMPLES; something is left for training."""
    counts: dict[int, int] = {}  # of the smallest hashes: how many examples have it
    largest: list[int] = []  # a heap of the same hashes, negated, the largest first
    total, has_more = 0, False  # has_more: there are hashes that are not among the smallest
    for example in examples:
        total += 1
        value = hash_of(example, seed)
        if value in counts:
            counts[value] += 1
        elif len(largest) < MOST_EXAMPLES:
            heapq.heappush(largest, -value)
            counts[value] = 1
        else:
            has_more = True
            if value < -largest[0]:
                del counts[-heapq.heapreplace(largest, -value)]
                counts[value] = 1
    if not has_more and len(counts) < 2:
        raise RegardError(
            f"data.valid is not given, and nothing can be held out of {total:,} training examples: give more, or data.valid"
        )
    wanted, count, chosen = max(1, min(MOST_EXAMPLES, round(share * total))), 0, []
    for value in sorted(counts):
        if count + counts[value] <= wanted:  # an example with more copies than are wanted stays in the training data
            chosen.append(value)
            count += counts[value]
    if not chosen:
        chosen = [min(counts, key=lambda value: (counts[value], value))]
    if not has_more and len(chosen) == len(counts):
        chosen.pop()  # something is left for training
    return HeldOut(frozenset(chosen), seed, total, sum(counts[value] for value in chosen))


def held_out_share(characters: int, share: float) -> float:
    """Return the share of a text that is held out from its end."""
    return min(share, MOST_CHARACTERS / max(1, characters))
