"""Sentences of one direction through a model, so that nothing is lost and nothing degenerate is returned.

1. Marks around words (*very*) are removed and put back by alignment (text/inline_marks.py).
2. Links, addresses and foreign scripts are placeholders while the sentence is decoded (text/placeholders.py). Terms of a
   glossary are required words of the translation (decode/constrained_beam_search.py).
3. A sentence whose translation drops a number or a symbol is decoded again with it as a placeholder; where a placeholder or
   a long number is dropped even so, the words around it are translated on their own.
4. A translation that cannot be right (inference/confidence.py: empty, a loop, far too long, ...) is decoded again with a
   wider beam, another length penalty and without repeated n-grams, then clause by clause. If that fails too, the sentence
   is left in the source language, with a note.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from regard.decode.sampling import part_seed
from regard.inference.arguments import TranslateOptions, decode_config
from regard.inference.confidence import (
    COPY,
    EMPTY,
    SCRIPT,
    SHORT,
    coverage_factor,
    find_fault,
    needs_coverage,
    plausibility,
)
from regard.inference.translation_results import (
    Translation,
    concatenate,
    copy_text,
    join_parts,
    keep_space_around,
    map_text,
    restore_hypotheses,
    surround,
)
from regard.text.casing import (
    add_final_punctuation,
    capitalize_first,
    match_final_punctuation,
    normalize_typography,
)
from regard.text.clock_times import to_24_hours
from regard.text.glossary import Glossary
from regard.text.inline_marks import Mark, remove_marks, restore_marks
from regard.text.placeholders import (
    MAX_PLACEHOLDERS,
    add_numbers_to_pattern,
    find_missing_numbers,
    find_missing_symbols,
    has_words,
    insert_placeholders,
    protected_pattern,
    split_protected,
)
from regard.text.sentence_splitting import Sentence, split_long_sentence

if TYPE_CHECKING:
    from regard.inference.translator import Translator

PRIVATE_USE = 0xF0000  # code points of this plane have no meaning in any text
UNSPACED = ("zh", "ja")  # languages without spaces between sentences
RETRY_BEAM, NO_REPEAT = 8, 3  # of the second try: its least beam, and the n-grams of tokens that it may not repeat
LENGTH_PENALTY_STEP = 0.5  # added for a translation that was too short, subtracted for one that was too long
CLAUSE_LENGTH = 20  # characters: shorter parts of a sentence are not taken apart
CLAUSE_SHARES = 0.8, 0.4  # of the length of a sentence: two clauses, and where one of them fails, more
STRAY_EDGES = re.compile(r"([*_]*)(.*?)([*_]*)", re.DOTALL)
LENGTH_OPTIONS = ("max_len_a", "max_len_b", "min_len")
Advance = Callable[[int], None]
Found = dict[int, Translation | None]


def in_parts_note(fault: str) -> str:
    return f"a sentence is translated clause by clause: its translation as a whole {fault}"


def left_note(fault: str) -> str:
    return f"a sentence is left in the source language: its translation {fault}"


class SentenceTranslator:
    """Translates sentences from one language to another with given options."""

    def __init__(
        self,
        translator: Translator,
        pair: tuple[str, str],
        options: TranslateOptions,
        glossary: Glossary | None,
        form: str = "",
    ) -> None:
        """Take the languages, decode settings, terms and the form of address of the translations (text/formality.py)."""
        self.translator, self.pair, self.glossary, self.form = translator, pair, glossary, form
        self.options: dict[str, Any] = {**options}
        self.kept = protected_pattern(*pair)
        chosen = decode_config(translator.options, options)
        self.beam, self.length_penalty = chosen.beam, chosen.length_penalty
        # Samples, and translations whose lengths were asked for, are returned as they are.
        self.retries = chosen.temperature == 0
        self.may_be_cut = any(options.get(name) is not None for name in LENGTH_OPTIONS)
        self.samples = chosen.temperature > 0 or chosen.mbr > 0
        self.upper_case: set[int] = set()
        self.seeds: Sequence[int] = ()
        self.faults: dict[int, str] = {}  # what is wrong with the last translation of a sentence

    def translate(
        self, texts: list[str], advance: Advance, upper_case: Iterable[int] = (), seeds: Sequence[int] = ()
    ) -> list[Translation]:
        """Return the translation of each sentence; `advance` is called with the number of sentences done.

        `upper_case` are the numbers of sentences that were written in capitals before they got standard casing. `seeds`
        are the random seeds of the sentences, which samples need."""
        self.upper_case, self.seeds = set(upper_case), seeds
        edges = [STRAY_EDGES.fullmatch(text) for text in texts]  # asterisks without a partner in the sentence
        plain = [remove_marks(text) for text in texts]
        plain = [
            (edge[2], []) if edge and not own else (text, own) for edge, (text, own) in zip(edges, plain, strict=True)
        ]
        bare = [text for text, _ in plain]
        patterns = {i: self.kept for i, text in enumerate(bare) if has_words(text, self.kept)}
        advance(len(bare) - len(patterns))
        found = self.decode_with_placeholders(bare, patterns, advance)
        found |= self._decode_lost_again(bare, found)
        made = {i: each for i, each in found.items() if each is not None}
        if self.retries:
            made |= self._replace_faulty(bare, made)
        done = [made.get(i) or copy_text(text) for i, text in enumerate(bare)]
        done = self._attend(bare, done, [marks for _, marks in plain])
        return [
            surround(t, edge[1], edge[3]) if edge and not own else t
            for t, edge, (_, own) in zip(done, edges, plain, strict=True)
        ]

    def _attend(self, texts: list[str], found: list[Translation], marks: list[list[Mark]]) -> list[Translation]:
        """Return translations with the marks of their sources, and with confidences that count coverage where it is due."""
        places = [
            i
            for i, (text, each) in enumerate(zip(texts, found, strict=True))
            if marks[i] or (each.confidence < 1 and needs_coverage(text, each.text, each.confidence))
        ]
        pairs = [(texts[i], found[i].text) for i in places]
        links = self.translator.align_sentences(pairs, [self.pair] * len(pairs)) if pairs else []
        for i, own in zip(places, links, strict=True):
            if needs_coverage(texts[i], found[i].text, found[i].confidence) and own:
                value = found[i].confidence * coverage_factor(texts[i], own)
                found[i] = replace(found[i], confidence=value)
            if marks[i]:
                best = restore_marks(texts[i], found[i].text, marks[i], own)
                nbest = tuple(replace(t, text=restore_marks(texts[i], t.text, marks[i], [])) for t in found[i].nbest)
                found[i] = replace(found[i], text=best, nbest=nbest)
            if found[i].nbest:
                first = replace(found[i].nbest[0], text=found[i].text, confidence=found[i].confidence)
                found[i] = replace(found[i], nbest=(first, *found[i].nbest[1:]))
        return found

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def decode_with_placeholders(
        self, texts: list[str], patterns: Mapping[int, re.Pattern[str]], advance: Advance, **settings: Any
    ) -> Found:
        """Translate the sentence at each index of `patterns` with placeholders for what the pattern matches.

        A sentence is None where the model has not enough placeholders or tokens, or loses a placeholder. What is wrong
        with a translation is put into `self.faults`.
        """
        masked = {i: insert_placeholders(texts[i], pattern) for i, pattern in patterns.items()}
        decodable = {
            i: text
            for i, (text, kept) in masked.items()
            if len(kept) <= MAX_PLACEHOLDERS and self.translator.fits(text)
        }
        advance(len(masked) - len(decodable))
        outputs = self._decode(list(decodable.values()), list(decodable), advance, settings)
        found = dict(zip(decodable, outputs, strict=True))
        for i, each in found.items():
            self.faults[i] = find_fault(decodable[i], each.text, each.ended or self.may_be_cut, self.pair[1])
        return {i: restore_hypotheses(found[i], kept) if i in found else None for i, (_, kept) in masked.items()}

    def _decode(
        self, texts: list[str], numbers: list[int], advance: Advance, settings: Mapping[str, Any]
    ) -> list[Translation]:
        """Decode sentences in standard punctuation and return translations with the punctuation of the sentences.

        `numbers` are those of the sentences that the texts are, or are parts of."""
        if not texts:
            return []
        source, target = self.pair
        inputs = [
            add_final_punctuation(normalize_typography(self._numbers_as_read(text), source), source) for text in texts
        ]
        terms: list[list[str]] = []
        if self.glossary:
            capitals = [number in self.upper_case for number in numbers]
            terms = [self.glossary.find(text, *self.pair, own) for text, own in zip(texts, capitals, strict=True)]
        extra: dict[str, Any] = {"force_words": terms} if any(terms) else {}
        if self.samples and self.seeds:
            parts = {i: itertools.count() for i in numbers}
            extra["seeds"] = [part_seed(self.seeds[i], next(parts[i])) for i in numbers]
        to = f"{target}-{self.form}" if self.form else target
        outputs = self.translator.translate_sentences(
            inputs, to=to, progress=advance, **extra, **{**self.options, **settings}
        )
        if any(terms):
            begins = [bool(own) and text[:1].isupper() for text, own in zip(texts, terms, strict=True)]
            outputs = [map_text(t, capitalize_first) if begin else t for t, begin in zip(outputs, begins, strict=True)]
        return [
            weigh(text, map_text(t, partial(match_final_punctuation, text, language=source)))
            for text, t in zip(texts, outputs, strict=True)
        ]

    def _numbers_as_read(self, text: str) -> str:
        """Return a sentence as the model gets it: 12-hour times of English are 24-hour times."""
        return to_24_hours(text) if self.pair[0] == "en" else text

    def _missing_numbers(self, text: str, translation: str) -> list[str]:
        return find_missing_numbers(self._numbers_as_read(text), translation)

    def _decode_lost_again(self, texts: list[str], found: Found) -> Found:
        """Return new translations of sentences that lost a placeholder, a number or a symbol."""
        lost = {
            i: self._missing_numbers(texts[i], each.text) + find_missing_symbols(texts[i], each.text)
            for i, each in found.items()
            if each
        }
        with_numbers = {i: add_numbers_to_pattern(self.kept, numbers) for i, numbers in lost.items() if numbers}
        before = dict(self.faults)
        again = self.decode_with_placeholders(texts, with_numbers, lambda done: None)
        better = {i: each for i, each in again.items() if each and not (self.faults[i] and not before[i])}
        self.faults |= {i: before[i] for i in again if i not in better and i in before}
        merged = found | better
        # A number of one or two digits may have been written in words: no reason to take a sentence apart.
        broken = [
            i
            for i, each in merged.items()
            if each is None
            or any(len(number) > 2 for number in self._missing_numbers(texts[i], each.text))
            or find_missing_symbols(texts[i], each.text)
        ]
        return better | self._decode_fragments(texts, {i: with_numbers.get(i, self.kept) for i in broken})

    def _decode_fragments(self, texts: list[str], patterns: Mapping[int, re.Pattern[str]]) -> Found:
        """Translate, in the sentence at each index of `patterns`, the words between what the pattern matches."""
        parts = {i: split_protected(texts[i], pattern) for i, pattern in patterns.items()}
        places = [(i, k) for i, own in parts.items() for k in range(0, len(own), 2) if has_words(own[k], self.kept)]
        outputs = self._decode([parts[i][k].strip() for i, k in places], [i for i, _ in places], lambda done: None, {})
        found = dict(zip(places, outputs, strict=True))
        for i in parts:
            mine = [(parts[i][k].strip(), found[i, k]) for j, k in places if j == i]
            faults = (find_fault(text, t.text, t.ended or self.may_be_cut, self.pair[1]) for text, t in mine)
            self.faults[i] = next(filter(None, faults), "")
        return {
            i: concatenate(
                [keep_space_around(p, found[i, k]) if (i, k) in found else copy_text(p) for k, p in enumerate(own)]
            )
            for i, own in parts.items()
        }

    # ---- translations that cannot be right ---------------------------------------------------------------------------

    def _replace_faulty(self, texts: list[str], found: Mapping[int, Translation]) -> dict[int, Translation]:
        """Return other translations in place of those that cannot be right."""
        first = {i: self.faults[i] for i in found if self.faults.get(i)}
        made: dict[int, Translation] = {}
        for short in (True, False):
            own = [i for i, fault in first.items() if (fault in (EMPTY, SHORT, COPY, SCRIPT)) == short]
            step = LENGTH_PENALTY_STEP if short else -LENGTH_PENALTY_STEP
            settings = {
                "beam": max(RETRY_BEAM, 2 * self.beam),
                "length_penalty": self.length_penalty + step,
                "repetition_penalty": 1.0,  # not for a beam
                "no_repeat_ngram_size": NO_REPEAT,
            }
            again = self.decode_with_placeholders(texts, dict.fromkeys(own, self.kept), lambda done: None, **settings)
            made |= {i: each for i, each in again.items() if each and self._is_right(texts[i], each, self.faults[i])}
        for share in CLAUSE_SHARES:
            made |= self._decode_clauses(texts, {i: fault for i, fault in first.items() if i not in made}, share)
        left = {i: fault for i, fault in first.items() if i not in made}
        return made | {
            i: replace(copy_text(texts[i]), confidence=0.0, notes=(left_note(fault),)) for i, fault in left.items()
        }

    def _is_right(self, text: str, translation: Translation, fault: str) -> bool:
        lost = self._missing_numbers(text, translation.text)
        return not fault and not any(len(number) > 2 for number in lost)

    def _decode_clauses(self, texts: list[str], faults: Mapping[int, str], share: float) -> dict[int, Translation]:
        """Translate sentences in clauses of at most this share of their length.

        Returned are those of which every clause has a translation without a fault."""

        def split(text: str) -> list[Sentence]:
            most = max(CLAUSE_LENGTH, share * len(text))
            return split_clauses(Sentence("", text), self.kept, lambda part: len(part) <= most)

        clauses = {i: own for i in faults if len(own := split(texts[i])) > 1}
        places = [(i, k) for i, own in clauses.items() for k in range(len(own))]
        parts = [clauses[i][k].text for i, k in places]
        own_options: Any = self.options
        inner = SentenceTranslator(self.translator, self.pair, own_options, self.glossary, self.form)
        inner.upper_case = {n for n, (i, _) in enumerate(places) if i in self.upper_case}
        inner.seeds = [part_seed(self.seeds[i], k) for i, k in places] if self.seeds else ()
        patterns = {n: self.kept for n, part in enumerate(parts) if has_words(part, self.kept)}
        found = inner.decode_with_placeholders(parts, patterns, lambda done: None)
        found |= inner._decode_lost_again(parts, found)
        spaced = not self.pair[1].startswith(UNSPACED)
        made = {}
        for i, own in clauses.items():
            numbers = [n for n, (j, _) in enumerate(places) if j == i]
            if not any(inner.faults.get(n) for n in numbers):
                outputs = [found.get(n) or copy_text(parts[n]) for n in numbers]
                made[i] = replace(join_parts(own, outputs, spaced), notes=(in_parts_note(faults[i]),))
        return made


def weigh(text: str, translation: Translation) -> Translation:
    """Return a translation whose confidences count what is implausible about it as the translation of this text."""
    nbest = tuple(weigh(text, each) for each in translation.nbest)
    return replace(translation, confidence=translation.confidence * plausibility(text, translation.text), nbest=nbest)


def split_clauses(sentence: Sentence, kept: re.Pattern[str], fits: Callable[[str], bool]) -> list[Sentence]:
    """Return a sentence in clauses for which `fits` is true.

    What matches `kept` is one private-use character meanwhile, so that it is never cut, and a placeholder for `fits`.
    """
    aside = dict(enumerate(kept.findall(sentence.text), PRIVATE_USE))
    each = iter(aside)
    whole = kept.sub(lambda _: chr(next(each)), sentence.text)
    parts = split_long_sentence(
        replace(sentence, text=whole), lambda text: fits(text.translate(dict.fromkeys(aside, "⟦1⟧")))
    )
    return [replace(part, text=part.text.translate(aside)) for part in parts]
