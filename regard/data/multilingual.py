"""Several directions in one model: a source begins with a special token that names the language to translate to.

A corpus says the direction of each of its parts (`train.{lang}.xz@en>de`), the vocabulary has a token `<to-de>` for each
target language, and from there on that token is one of the source's: batches, models and searches know nothing of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from regard.data.parallel_corpus import Corpus, direction_of
from regard.data.shards import Filters, Store, cache_folder, prepare_store
from regard.errors import RegardError
from regard.text.language_identification import Profiles, learn_profile
from regard.text.tokenizer import Tokenizer, Tokenizers

SAMPLED = 20_000  # lines of each language that its profile is learned from


def target_languages(directions: tuple[str, ...]) -> tuple[str, ...]:
    """The languages that there must be tokens for."""
    return tuple(dict.fromkeys(direction.split(">")[1] for direction in directions))


def language_token(tokenizer: Tokenizer, language: str) -> int:
    tags = tokenizer.tags()
    if language not in tags:
        known = ", ".join(tags) or "no language"
        raise RegardError(f"this vocabulary has no token for the language '{language}': it translates to {known}")
    return tags[language]


def prepare_pair_store(
    corpus: Corpus, tokenizers: Tokenizers, filters: Filters, progress: Callable[[int], None] = lambda done: None
) -> Store:
    """The corpus as token ids, with the tokens of its directions if it has any."""
    if not corpus.directions:
        return prepare_store(corpus, (tokenizers.source, tokenizers.target), filters, cache_folder(), progress)
    return prepare_store(
        Directed(corpus), (Tagging(tokenizers.source), tokenizers.target), filters, cache_folder(), progress
    )


def language_profiles(corpus: Corpus) -> Profiles:
    """By which the languages of a corpus of several directions are told apart, where their script does not do it."""
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for spec in corpus.specs if corpus.directions else ():
        languages = direction_of(spec)[1].split(">")
        if any(len(lines[language]) < SAMPLED for language in languages):
            for row in islice(replace(corpus, specs=(spec,)).rows(), SAMPLED):
                for language, text in zip(languages, row, strict=True):
                    lines[language].append(text)
    return {name: learn_profile(islice(own, SAMPLED)) for name, own in lines.items() if not name.startswith("zh")}


class Directed:
    """A corpus for `prepare` whose sources say where they go: "de" and a tab before the text."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus, self.specs = corpus, corpus.specs

    def rows(self) -> Iterator[tuple[str, ...]]:
        for direction, source, target in self.corpus.directed_rows():
            yield f"{direction.split('>')[1]}\t{source}", target

    def fingerprint(self) -> str:
        return "directed " + self.corpus.fingerprint()


class Tagging:
    """A tokenizer for such sources: the token of the language, then those of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        languages, bare = zip(*(text.split("\t", 1) for text in texts), strict=True)
        encoded = self.tokenizer.encode_batch(bare)
        tags = {language: language_token(self.tokenizer, language) for language in set(languages)}
        rows = zip(languages, bare, encoded, strict=True)
        return [[tags[language], *ids] if text.strip() else [] for language, text, ids in rows]

    def fingerprint(self) -> str:
        return "tagging " + self.tokenizer.fingerprint()

    def __len__(self) -> int:
        return len(self.tokenizer)
