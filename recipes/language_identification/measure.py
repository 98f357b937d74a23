"""Measure language identification on text that the profiles were not trained on.

    python recipes/language_identification/measure.py SOURCES

SOURCES is the folder of sources.py with SOURCES/corpora. Each text is given alone to `DirectionDetector.detect`, for a model
of English, German, French and Chinese, as `regard translate` does. Right is, in these languages, a text that is translated
from its language; in others, a text that is left as it is. Sets:

- the validation sentences of the translator (tatoeba, europarl-en-de, docs-en-*). Lines of docs-en-fr that are from Europarl
  are counted apart, since half of them are in other languages than French;
- wesnoth: two campaigns of the game (dialogues), and dolphin: a file manager, which train.py leaves out;
- udhr: the Universal Declaration of Human Rights;
- multi30k: picture captions in Czech.
"""

from __future__ import annotations

import lzma
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from sources import UDHR_TEST, WORDS, read_declarations, read_packages

from regard.text.language_identification import DirectionDetector, identify_language

OWN = ("en", "de", "fr", "zh")
DETECTOR = DirectionDetector([f"{a}>{b}" for x in ("de", "fr", "zh", "zh-Hant") for a, b in (("en", x), (x, "en"))], {})
LENGTHS = ("under 10 letters", "1 word", "2-3 words", "4-6 words", "7+ words")
VALIDATION = {
    "en": ("docs-en-de/valid", "docs-en-fr/valid", "docs-en-zh/valid", "tatoeba/en-de.val", "europarl-en-de/val"),
    "de": ("docs-en-de/valid", "tatoeba/en-de.val", "europarl-en-de/val"),
    "fr": ("docs-en-fr/valid", "tatoeba/en-fr.val"),
    "zh": ("docs-en-zh/valid", "tatoeba/en-zh.val"),
}
Sets = dict[tuple[str, str], list[str]]  # (language, name of the set) -> texts


def main(sources: Path) -> None:
    own, other = read_sets(sources)
    print(f"Right of the texts in the model's languages\n{table_head()}")
    for (language, name), texts in own.items():
        print(table_row(f"{language} {name}", language, texts))
    by_language: defaultdict[str, list[str]] = defaultdict(list)
    for (language, _), texts in other.items():
        by_language[language] += texts
    print(f"\nLeft as they are, of the texts in other languages\n{table_head()}")
    for language, texts in sorted(by_language.items()):
        print(table_row(language, language, texts))
    print(table_row("all", "", [text for texts in by_language.values() for text in texts]))
    report_identification({**own, **other})


def read_sets(sources: Path) -> tuple[Sets, Sets]:
    """Return the texts in the model's languages and those in others."""
    own: Sets = {}
    for language, names in VALIDATION.items():
        for name in names:
            lines = read_lines(sources / f"corpora/{name}.{language}.xz")
            if (language, name) == ("fr", "docs-en-fr/valid"):
                origin = read_lines(sources / "corpora/docs-en-fr/valid.src.xz")
                own["fr", f"{name}, Europarl"] = [t for t, o in zip(lines, origin, strict=True) if o == "europarl"]
                lines = [text for text, o in zip(lines, origin, strict=True) if o != "europarl"]
            own[language, name] = lines
    other: Sets = defaultdict(list)
    other["cs", "multi30k"] = read_lines(sources / "corpora/multi30k/val.cs.xz")
    found = [*read_packages(sources, held_out=True)]
    found += [("udhr", language, text) for language, text in read_declarations(sources, UDHR_TEST)]
    for name, language, text in found:
        (own if language in OWN else other).setdefault((language, name), []).append(text)
    return own, {key: texts for key, texts in other.items() if len(texts) >= 50}


def read_lines(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def length_class(text: str) -> str:
    """Return how long a text is; the empty string where it has no words. A Chinese character counts as a word."""
    words = len(WORDS.findall(re.sub(r"([\u3041-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f])", r"\1 ", text)))
    letters = identify_language(text).letters
    return (
        ""
        if not letters
        else LENGTHS[0]
        if letters < 10
        else LENGTHS[1]
        if words < 2
        else LENGTHS[2]
        if words < 4
        else LENGTHS[3]
        if words < 7
        else LENGTHS[4]
    )


def is_right(language: str, text: str) -> bool:
    """Return whether a text alone is translated from its language, or left where the model does not have the language."""
    source = DETECTOR.detect([text], None, None)[0].source
    return source.split("-")[0] == (language if language in OWN else "")


def table_head() -> str:
    return f"| {' | '.join(['texts', 'number', 'all', *LENGTHS])} |\n{'| --- ' * (3 + len(LENGTHS))}|"


def table_row(name: str, language: str, texts: Iterable[str]) -> str:
    """Return a row with the share of texts that are right, all and by length."""
    found = defaultdict(list)
    for text in texts:
        if length := length_class(text):
            right = is_right(language, text)
            found["all"].append(right)
            found[length].append(right)
    cells = [f"{100 * sum(own) / len(own):.1f} %" if (own := found[key]) else "" for key in ("all", *LENGTHS)]
    return f"| {' | '.join([name, str(len(found['all'])), *cells])} |"


def report_identification(sets: Sets) -> None:
    """Print how often `identify_language` names the right language, by length and by whether it is certain."""
    found = defaultdict(list)
    for (language, _), texts in sets.items():
        for text in texts:
            if length := length_class(text):
                each = identify_language(text)
                found[length, each.is_certain].append(each.language == language)
    print("\nRight language of all, by identify_language\n| length | certain | right of these | right of the others |")
    print("| --- | --- | --- | --- |")
    for length in LENGTHS:
        sure, unsure = found[length, True], found[length, False]
        cells = [f"{100 * sum(own) / len(own):.1f} %" if own else "" for own in (sure, unsure)]
        print(f"| {length} | {100 * len(sure) / (len(sure) + len(unsure)):.1f} % | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
