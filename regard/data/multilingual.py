"""Multilingual translation: every source begins with a token of the target language, `<to-de>`.

A corpus names the direction of each of its parts (`train.{lang}.xz@en>de`), and the vocabulary has a language token for each
target language. It is prepended when the corpus is tokenized (data/pair_store.py): batches, models and search need not know
of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from regard.data.parallel_corpus import ParallelCorpus, parse_direction
from regard.errors import RegardError
from regard.text.formality import split_form
from regard.text.language_identification import Profiles, learn_profile
from regard.text.tokenizer import Tokenizer

PROFILE_LINES = 20_000  # of each language, to learn its profile from


def target_languages(directions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the target languages of some directions, which need a token each."""
    return tuple(dict.fromkeys(direction.split(">")[1] for direction in directions))


def language_token(tokenizer: Tokenizer, language: str) -> int:
    """Return the id of the token that asks for a translation to `language`."""
    tokens = tokenizer.language_tokens()
    if language not in tokens:
        known = ", ".join(tokens) or "no language"
        raise RegardError(f"this vocabulary has no token for the language '{language}': it translates to {known}")
    return tokens[language]


def language_profiles(corpus: ParallelCorpus) -> Profiles:
    """Learn trigram profiles, which identify the languages of a multilingual corpus that share a script."""
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for spec in corpus.specs if corpus.directions else ():
        languages = parse_direction(spec)[1].split(">")
        if any(len(lines[split_form(language)[0]]) < PROFILE_LINES for language in languages):
            for row in islice(replace(corpus, specs=(spec,)).rows(), PROFILE_LINES):
                for language, text in zip(languages, row, strict=True):
                    lines[split_form(language)[0]].append(text)
    return {name: learn_profile(islice(own, PROFILE_LINES)) for name, own in lines.items() if not name.startswith("zh")}


class DirectedCorpus:
    """A corpus for `prepare_pair_store` whose sources begin with the target language and a tab: "de\\tGood morning."."""

    def __init__(self, corpus: ParallelCorpus) -> None:
        self.corpus, self.specs = corpus, corpus.specs

    def rows(self) -> Iterator[tuple[str, ...]]:
        for rows in self.rows_by_spec():
            yield from rows

    def rows_by_spec(self) -> Iterator[Iterator[tuple[str, ...]]]:
        for rows in self.corpus.directed_rows_by_spec():
            yield ((f"{direction.split('>')[1]}\t{source}", target) for direction, source, target in rows)

    def fingerprint(self) -> str:
        return "directed " + self.corpus.fingerprint()


class DirectedTokenizer:
    """A tokenizer for the sources of a `DirectedCorpus`: the language token, then the tokens of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        languages, bare = zip(*(text.split("\t", 1) for text in texts), strict=True)
        encoded = self.tokenizer.encode_batch(bare)
        tokens = {language: language_token(self.tokenizer, language) for language in set(languages)}
        rows = zip(languages, bare, encoded, strict=True)
        return [[tokens[language], *ids] if text.strip() else [] for language, text, ids in rows]

    def fingerprint(self) -> str:
        return "tagging " + self.tokenizer.fingerprint()

    def __len__(self) -> int:
        return len(self.tokenizer)
