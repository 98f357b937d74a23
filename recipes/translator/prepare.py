"""Stage 1: from the corpora to the training data of the translator.

    python recipes/translator/prepare.py DATA WORK

DATA holds tatoeba/ and europarl-en-de/. WORK gets NAME.train.{xx}.xz for each NAME below, NAME.val.{xx}.xz for validation,
and report.json with the number of pairs of each set after each filter.

- en-de, en-fr, en-zh (simplified), en-zh-Hant (traditional), europarl: pairs that look like translations (pair_filters.py).
  No side is a sentence of any test or validation set: English sentences of one language's test occur in the training data of
  others (check.py checks this, here and below).
- NAME.copies: some of these again, with other names, numbers and placeholders (augmentation.py).
- words-en-de, ...: single words as sentences (lexicon.py).
- formal-en-de, ...: formal sentences and dates from a phrasebook (phrasebook.py).
- titled-en-de, ...: some everyday and formal sentences with English words in Title Case (augmentation.py, phrasebook.py).
"""

from __future__ import annotations

import json
import lzma
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from augmentation import find_ordinary_words, make_copies, title_case_pairs
from check import fold, read_held_out
from lexicon import build_lexicon
from pair_filters import filter_german, is_plausible, split_by_script
from phrasebook import make_formal_pairs

from regard.data.parallel_corpus import read_lines
from regard.text.language_identification import learn_profile

Pair = tuple[str, str]
Sets = dict[str, list[Pair]]
EVERYDAY = ("en-de", "en-fr", "en-zh", "en-zh-Hant")


def main(data: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    held = read_held_out(data)
    europarl = read_pairs(data / "europarl-en-de", "train", "en", "de")
    sets, report = select_pairs({**read_tatoeba(data, "train"), "europarl": europarl}, held)
    augmented = {name: remove_held_out(pairs, held) for name, pairs in augment(sets).items()}
    for name, pairs in {**sets, **augmented}.items():
        write_pairs(work, f"{name}.train", pairs)
        report.setdefault(f"{name}.train", {})["kept"] = len(pairs)
    report["in both scripts"] = {"kept": len(set(sets["en-zh"]) & set(sets["en-zh-Hant"]))}
    for name, pairs in read_tatoeba(data, "val").items():
        write_pairs(work, f"{name}.val", pairs)
        report[f"{name}.val"] = {"kept": len(pairs)}
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(f"{name}: {counts}" for name, counts in report.items()))


def select_pairs(sets: Sets, held: set[str]) -> tuple[Sets, dict[str, dict[str, int]]]:
    """Return the pairs that are fit for training, and the number of pairs after each filter."""
    unseen = {name: remove_held_out(dict.fromkeys(pairs), held) for name, pairs in sets.items()}
    plausible = {
        name: [pair for pair in pairs if is_plausible(pair, get_language(name))] for name, pairs in unseen.items()
    }
    profiles = {side: learn_profile(pair[i] for pair in plausible["en-de"]) for i, side in enumerate(("en", "de"))}
    profiles["fr"] = learn_profile(pair[1] for pair in plausible["en-fr"])
    kept = plausible | {"europarl": filter_german(plausible["europarl"], profiles)}
    steps = {"read": sets, "in no test": unseen, "look like translations": plausible}
    return kept, {f"{name}.train": {step: len(of[name]) for step, of in steps.items()} for name in sets}


def augment(sets: Sets) -> Sets:
    """Return the sets that are derived from the others."""
    english = find_ordinary_words(pair[0] for pairs in sets.values() for pair in pairs)
    foreign = {
        lang: find_ordinary_words(
            pair[1] for name, pairs in sets.items() if get_language(name) == lang for pair in pairs
        )
        for lang in map(get_language, sets)
    }
    lexical = sets | {"en-de": sets["en-de"] + sets["europarl"]}  # Europarl has other words
    return {
        **{f"{n}.copies": make_copies(sets[n], get_language(n), english | foreign[get_language(n)]) for n in sets},
        **{f"words-{n}": build_lexicon(lexical[n], get_language(n)) for n in EVERYDAY},
        **{f"formal-{n}": make_formal_pairs(get_language(n)) for n in EVERYDAY},
        **{
            f"titled-{n}": title_case_pairs(sets[n]) + make_formal_pairs(get_language(n), in_capitals=True)
            for n in EVERYDAY
        },
    }


def remove_held_out(pairs: Iterable[Pair], held: set[str]) -> list[Pair]:
    return [pair for pair in pairs if not any(fold(text) in held for text in pair)]


def get_language(name: str) -> str:
    """Return the language beside English of "en-de", "words-en-de", "en-de.copies", "europarl" ..."""
    stem = name.split(".")[0]
    return stem.rpartition("en-")[2] if "en-" in stem else "de"


# ---- files -----------------------------------------------------------------------------------------------------------


def read_tatoeba(data: Path, split: str) -> Sets:
    pairs = {lang: read_pairs(data / "tatoeba", f"en-{lang}.{split}", "en", lang) for lang in ("de", "fr", "zh")}
    return {"en-de": pairs["de"], "en-fr": pairs["fr"], **split_by_script(pairs["zh"])}


def read_pairs(folder: Path, name: str, *languages: str) -> list[Pair]:
    sides = (read_lines(folder / f"{name}.{lang}.xz") for lang in languages)
    return [(normalize(source), normalize(target)) for source, target in zip(*sides, strict=True)]


def normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def write_pairs(work: Path, name: str, pairs: list[Pair]) -> None:
    for i, side in enumerate(("en", get_language(name))):
        with lzma.open(work / f"{name}.{side}.xz", "wt", encoding="utf-8", preset=1) as file:
            file.writelines(pair[i] + "\n" for pair in pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
