"""Stage 1: from the corpora to what the translator learns from.

    python recipes/translator/prepare.py DATA WORK

DATA holds tatoeba/ and europarl-en-de/. WORK gets NAME.train.{xx}.xz for each NAME below, NAME.val.{xx}.xz to validate on,
and report.json, which says how many pairs each has and how many were left after each look at them.

- en-de, en-fr, en-zh (simplified), en-zh-Hant (traditional), europarl: pairs that look like translations (filters.py). None
  has a side that is a sentence of any test or validation set: the English of one pair's test is in the training data of
  others (check.py proves that none is left, here and below).
- NAME.copies: some of these once more, with other names, numbers and placeholders (copies.py).
- words-en-de, ...: words by themselves, as sentences (words.py).
- formal-en-de, ...: formal sentences and dates from a phrasebook of our own (phrases.py).
- titled-en-de, ...: some everyday and formal sentences With Capitals in the English (titled.py, phrases.py).
"""

from __future__ import annotations

import json
import lzma
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from check import fold, held_out
from copies import copies, ordinary_words
from filters import by_script, german, good
from phrases import formal
from titled import titled
from words import lexicon

from regard.data.parallel_corpus import read_lines
from regard.text.language_identification import learn_profile

Pair = tuple[str, str]
Sets = dict[str, list[Pair]]
EVERYDAY = ("en-de", "en-fr", "en-zh", "en-zh-Hant")


def main(data: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    held = held_out(data)
    speeches = read(data / "europarl-en-de", "train", "en", "de")
    sets, report = chosen({**tatoeba(data, "train"), "europarl": speeches}, held)
    more = {name: unheld(pairs, held) for name, pairs in derived(sets).items()}
    for name, pairs in {**sets, **more}.items():
        write(work, f"{name}.train", pairs)
        report.setdefault(f"{name}.train", {})["kept"] = len(pairs)
    report["in both scripts"] = {"kept": len(set(sets["en-zh"]) & set(sets["en-zh-Hant"]))}
    for name, pairs in tatoeba(data, "val").items():
        write(work, f"{name}.val", pairs)
        report[f"{name}.val"] = {"kept": len(pairs)}
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(f"{name}: {counts}" for name, counts in report.items()))


def chosen(sets: Sets, held: set[str]) -> tuple[Sets, dict[str, dict[str, int]]]:
    """What is fit to learn from, and how many pairs were left after each look."""
    fresh = {name: unheld(dict.fromkeys(pairs), held) for name, pairs in sets.items()}
    alike = {name: [pair for pair in pairs if good(pair, language(name))] for name, pairs in fresh.items()}
    profiles = {side: learn_profile(pair[i] for pair in alike["en-de"]) for i, side in enumerate(("en", "de"))}
    profiles["fr"] = learn_profile(pair[1] for pair in alike["en-fr"])
    kept = alike | {"europarl": german(alike["europarl"], profiles)}
    steps = {"read": sets, "in no test": fresh, "look like translations": alike}
    return kept, {f"{name}.train": {step: len(of[name]) for step, of in steps.items()} for name in sets}


def derived(sets: Sets) -> Sets:
    """What is made from the sets, beside them."""
    english = ordinary_words(pair[0] for pairs in sets.values() for pair in pairs)
    theirs = {
        lang: ordinary_words(pair[1] for name, pairs in sets.items() if language(name) == lang for pair in pairs)
        for lang in map(language, sets)
    }
    lexical = sets | {"en-de": sets["en-de"] + sets["europarl"]}  # speeches have words that are not everyday's
    return {
        **{f"{n}.copies": copies(sets[n], language(n), english | theirs[language(n)]) for n in sets},
        **{f"words-{n}": lexicon(lexical[n], language(n)) for n in EVERYDAY},
        **{f"formal-{n}": formal(language(n)) for n in EVERYDAY},
        **{f"titled-{n}": titled(sets[n]) + formal(language(n), in_capitals=True) for n in EVERYDAY},
    }


def unheld(pairs: Iterable[Pair], held: set[str]) -> list[Pair]:
    return [pair for pair in pairs if not any(fold(text) in held for text in pair)]


def language(name: str) -> str:
    """The one beside English of "en-de", "words-en-de", "en-de.copies", "europarl" ..."""
    stem = name.split(".")[0]
    return stem.rpartition("en-")[2] if "en-" in stem else "de"


# ---- files -----------------------------------------------------------------------------------------------------------


def tatoeba(data: Path, split: str) -> Sets:
    pairs = {lang: read(data / "tatoeba", f"en-{lang}.{split}", "en", lang) for lang in ("de", "fr", "zh")}
    return {"en-de": pairs["de"], "en-fr": pairs["fr"], **by_script(pairs["zh"])}


def read(folder: Path, name: str, *languages: str) -> list[Pair]:
    sides = (read_lines(folder / f"{name}.{lang}.xz") for lang in languages)
    return [(clean(source), clean(target)) for source, target in zip(*sides, strict=True)]


def clean(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def write(work: Path, name: str, pairs: list[Pair]) -> None:
    for i, side in enumerate(("en", language(name))):
        with lzma.open(work / f"{name}.{side}.xz", "wt", encoding="utf-8", preset=1) as file:
            file.writelines(pair[i] + "\n" for pair in pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
