"""The translation of a text, and how those of its sentences become one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from regard.text.alignment import Link
from regard.text.placeholders import restore_placeholders
from regard.text.sentence_splitting import Sentence, join_sentences


@dataclass(frozen=True)
class Translation:
    """The translation of a text. The scores of a text of several sentences are the sums of theirs.

    The confidence of a text is the mean of those of its sentences, weighted by the lengths of the sentences: it compares
    texts of different lengths, where the minimum would fall with every sentence more. A sentence that could not be
    translated has the confidence 0 and a note."""

    text: str
    score: (
        float  # what hypotheses are ranked by: log_prob / tokens^length_penalty, or the expected utility (decode.mbr)
    )
    log_prob: float  # log p(translation | source)
    tokens: tuple[str, ...]  # the subword pieces of the translation
    ended: bool = True  # False: cut off at the length limit
    nbest: tuple[Translation, ...] = ()  # the hypotheses asked for, this one first, where more than one was asked for
    source: str = (
        ""  # language of the text, empty where it is unknown; as the fields below not given for each of `nbest`
    )
    target: str = ""  # language of the translation
    notes: tuple[str, ...] = ()  # warnings about this translation
    confidence: float = 1.0  # from 0 to 1 (inference/confidence.py); given for each of `nbest` too
    alignment: tuple[Link, ...] | None = None  # links between words, where they were asked for
    via: str = ""  # the language between, where no direction of the model leads from `source` to `target`

    def __str__(self) -> str:
        return self.text


def copy_text(text: str) -> Translation:
    """Return a text that needs no translation as its own translation."""
    return Translation(text, 0.0, 0.0, ())


def map_text(translation: Translation, change: Callable[[str], str]) -> Translation:
    """Return a translation with `change` applied to the text of every hypothesis."""
    nbest = tuple(map_text(each, change) for each in translation.nbest)
    return replace(translation, text=change(translation.text), nbest=nbest)


def restore_hypotheses(translation: Translation, kept: list[str]) -> Translation | None:
    """Return a translation with its placeholders replaced by what they stand for.

    Hypotheses that lost a placeholder are left out, and None is returned if all did. Of hypotheses with one text, which
    differ only in their subword pieces, the first is taken.
    """
    whole: dict[str, Translation] = {}
    for each in translation.nbest or (translation,):
        if (text := restore_placeholders(each.text, kept)) is not None:
            whole.setdefault(text, replace(each, text=text))
    found = tuple(whole.values())
    return replace(found[0], nbest=found if translation.nbest else ()) if found else None


def keep_space_around(part: str, translation: Translation) -> Translation:
    """Return a translation with the white space around its source."""
    return surround(translation, part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :])


def surround(translation: Translation, before: str, after: str) -> Translation:
    """Return a translation with these strings before and after the text of every hypothesis."""
    return map_text(translation, lambda text: before + text + after) if before or after else translation


# ---- several parts ---------------------------------------------------------------------------------------------------


def concatenate(found: Sequence[Translation], weights: Sequence[float] = ()) -> Translation:
    """Return the translations of consecutive parts as one, whose tokens are left out: some parts were not translated.

    `weights` are those of the confidences, by default the lengths of the parts."""
    weights = weights or [len(each.text) for each in found]
    total = sum(weights)
    return Translation(
        "".join(each.text for each in found),
        sum((each.score for each in found), 0.0),
        sum((each.log_prob for each in found), 0.0),
        (),
        all(each.ended for each in found),
        notes=tuple(dict.fromkeys(note for each in found for note in each.notes)),
        confidence=sum(w * each.confidence for w, each in zip(weights, found, strict=True)) / total if total else 1.0,
    )


def join_parts(parts: Sequence[Sentence], found: Sequence[Translation], spaced: bool) -> Translation:
    """Return the translation of a text, given those of its sentences."""
    text = join_sentences(parts, [each.text for each in found], spaced)
    tokens = tuple(token for each in found for token in each.tokens)
    weights = [float(len(part.text)) for part in parts]
    return replace(concatenate(found, weights), text=text, tokens=tokens)


def join_nbest(parts: Sequence[Sentence], found: Sequence[Translation], spaced: bool, n: int) -> Translation:
    """Return the translation of a text with its n best hypotheses, which combine hypotheses of its sentences.

    There are fewer only where the sentences have no other combinations; of equal texts the first is taken."""
    choices = [each.nbest or (each,) for each in found]
    ranked: dict[str, Translation] = {}
    for places in best_combinations([[each.score for each in own] for own in choices]):
        chosen = [own[place] for own, place in zip(choices, places, strict=True)]
        made = join_parts(parts, chosen, spaced)
        ranked.setdefault(made.text, made)
        if len(ranked) == n:
            break
    best = tuple(replace(each, notes=()) for each in ranked.values())
    notes = tuple(dict.fromkeys(note for each in found for note in each.notes))
    return replace(best[0], nbest=best, notes=notes)


def best_combinations(scores: Sequence[Sequence[float]]) -> Iterator[tuple[int, ...]]:
    """Yield the places of one score from each list, by the sum of the scores, largest first; each list is sorted so.

    A combination is put on the heap when the one that differs from it by a single step down has been taken, so only as
    many are made as are asked for. (All combinations of 30 sentences with 5 hypotheses each are 5^30.)"""

    def total(places: tuple[int, ...]) -> float:
        return sum((own[place] for own, place in zip(scores, places, strict=True)), 0.0)

    first = (0,) * len(scores)
    heap, seen = [(-total(first), first)], {first}
    while heap:
        _, places = heapq.heappop(heap)
        yield places
        for i, own in enumerate(scores):
            if places[i] + 1 < len(own):
                following = (*places[:i], places[i] + 1, *places[i + 1 :])
                if following not in seen:
                    seen.add(following)
                    heapq.heappush(heap, (-total(following), following))
