"""Confidence in the translation of a sentence, and what is wrong with one that cannot be right.

The confidence is the geometric mean of the probabilities of the tokens, exp(log p / tokens), times a factor from 0 to 1 for
each of these, which is 1 where nothing is unusual. (`Translator.translate_sentences`, which takes any strings, does without
these factors.)

- length: shorter than 0.6 or longer than 1.7 times the source (999 of 1,000 reference translations between the
  languages of the bundled model lie between 0.5 and 2);
- repetition: the share of trigrams of words that occur before in the translation, less that of the source;
- copies: the share of the words that are ordinary words of the source, above one in five;
- coverage, where it was computed: the share of the words of the source that any word of the translation attends to,
  below 0.7. It costs a forward pass, so it is computed only for translations that are short or unlikely.

So the confidence never rises with a fault, and without any it is the model's own probability.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from regard.text.alignment import Link, word_spans
from regard.text.casing import WORD
from regard.text.placeholders import NUMBER, PLACEHOLDER

HAN = re.compile("[\u3005\u3007\u3400-\u9fff]")
HAN_LENGTH = 3  # letters that a Chinese character is worth
SHORT_TEXT = 12  # added to lengths, because short texts vary more
USUAL_RATIO = 0.6, 1.7  # length of a translation / length of its source
POSSIBLE_RATIO = 0.4, 2.5
COPIED_SHARE, COVERED_SHARE = 0.2, 0.7
CHECK_RATIO, CHECK_CONFIDENCE = 0.7, 0.2  # below one of these, coverage is computed
EMPTY, CUT, LOOP = "is empty", "is cut off at the length limit", "repeats itself"
SHORT, LONG, COPY, SCRIPT = "is too short", "is too long", "is a copy of the source", "is in another script"


def token_probability(log_prob: float, tokens: int) -> float:
    """Return the geometric mean of the probabilities of tokens, the end token included."""
    return math.exp(min(0.0, log_prob / max(1, tokens)))


def plausibility(source: str, text: str) -> float:
    """Return the product of the factors for length, repetition and copies in the translation of a sentence."""
    ratio = length_ratio(source, text)
    length = min(1.0, ratio / USUAL_RATIO[0], USUAL_RATIO[1] / ratio)
    repeated = min(1.0, 1.0 - repeated_share(text) + repeated_share(source))
    copied = min(1.0, 1.0 - copied_share(source, text) + COPIED_SHARE)
    return length * max(0.0, repeated) * copied


def needs_coverage(source: str, text: str, value: float) -> bool:
    """Return whether a translation is so short or so unlikely that its coverage is worth a forward pass."""
    return value < CHECK_CONFIDENCE or length_ratio(source, text) < CHECK_RATIO


def coverage_factor(source: str, links: Sequence[Link]) -> float:
    """Return the factor for coverage: 1 where most words of a sentence are linked to words of its translation."""
    words = [span for span in word_spans(source) if source[span[0]].isalnum()]
    linked = {(link.source_begin, link.source_end) for link in links}
    share = sum(span in linked for span in words) / len(words) if words else 1.0
    return min(1.0, share / COVERED_SHARE)


def find_fault(source: str, text: str, ended: bool, target: str) -> str:
    """Return what is wrong with a translation that cannot be right, as the end of a sentence about it, or nothing.

    `source` has words to translate; `target` is the language of the translation."""
    letters, chinese = sum(map(len, WORD.findall(PLACEHOLDER.sub("", text)))), len(HAN.findall(text))
    if not letters and not NUMBER.search(PLACEHOLDER.sub("", text)):
        return EMPTY
    if longest_loop(text) > longest_loop(source):
        return LOOP
    if not ended:
        return CUT
    ratio = length_ratio(source, text)
    if not POSSIBLE_RATIO[0] <= ratio <= POSSIBLE_RATIO[1]:
        return SHORT if ratio < 1 else LONG
    ordinary = ordinary_words(source)
    if len(ordinary) > 2 and WORD.findall(text) == WORD.findall(source):
        return COPY
    if target.startswith("zh"):
        return SCRIPT if letters and not chinese and len(ordinary) > 2 else ""
    return SCRIPT if 5 * chinese > letters else ""


def length_ratio(source: str, text: str) -> float:
    """Return how much longer a translation is than its source."""
    return (text_length(text) + SHORT_TEXT) / (text_length(source) + SHORT_TEXT)


def text_length(text: str) -> int:
    """Return the number of characters of a text; a Chinese character counts as several."""
    return len(text) if text.isascii() else len(text) + (HAN_LENGTH - 1) * len(HAN.findall(text))


def repeated_share(text: str) -> float:
    """Return which share of the trigrams of words of a text occur before in it."""
    words = WORD.findall(text.lower())
    count = len(words) - 2
    if count < 2 or len(set(words)) == len(words):
        return 0.0
    return 1.0 - len(set(zip(words, words[1:], words[2:], strict=False))) / count


def ordinary_words(text: str) -> set[str]:
    """Return the words of a text that are no names: those in lower case, of more than three letters."""
    return {word for word in WORD.findall(text) if len(word) > 3 and word.islower()}


def copied_share(source: str, text: str) -> float:
    """Return the share of the words of a translation that are ordinary words of the source."""
    words = WORD.findall(text)
    copies = ordinary_words(text) & ordinary_words(source)
    return sum(word in copies for word in words) / len(words) if copies else 0.0


def longest_loop(text: str) -> int:
    """Return how often in a row any sequence of up to eight words stands in a text; 1 if that is not unusual.

    Usual are two equal sequences, and up to four equal words, as in "very, very, very good"."""
    words = WORD.findall(text.lower()) if not HAN.search(text) else [text[b:e] for b, e in word_spans(text.lower())]
    if len(words) - len(set(words)) < 4:
        return 1
    most = 1
    for period in range(1, min(8, len(words) // 3) + 1):
        run = longest = 0
        for before, word in zip(words, words[period:], strict=False):
            run = run + 1 if before == word else 0
            longest = max(longest, run)
        times = longest // period + 1
        most = max(most, times if times > (4 if period == 1 else 2) else 1)
    return most
