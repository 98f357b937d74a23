"""Stage 1: from the corpora to the training data of the translator.

    pip install opencc
    python recipes/translator/prepare.py DATA WORK

DATA holds tatoeba/, docs-en-XX/, europarl-en-de/, europarl-en-de-more/, europarl-en-fr/ and lm/. The guide
`docs/guides/bundled-model.md` says where they are from. WORK gets NAME.train.{xx}.xz for each NAME below, NAME.val.{xx}.xz
for validation, and report.json with the number of pairs of each set after each filter.

- tatoeba-en-XX: everyday sentences; europarl-en-XX: speeches; docs-en-XX: documentation; prose-en-XX: the sources of
  docs-en-XX that are stories, news, law and the like. XX is de, fr, zh (simplified) or zh-Hant (traditional Chinese).
  Only pairs that look like translations are kept (pair_filters.py). No side is a sentence of any test or validation set:
  English sentences of one language's test occur in the training data of others (check.py checks this, here and below).
- docs-en-zh-Hant, prose-en-zh-Hant: a share of the simplified ones, converted to traditional Chinese by OpenCC.
- copies-en-XX: some of all these again, with other names, numbers and placeholders (augmentation.py).
- words-en-XX: single words as sentences (lexicon.py). titled-en-XX: English words in Title Case (augmentation.py).
- formality-en-XX: sentences with a second person, as translations to de-formal, de-familiar, fr-formal and fr-familiar
  (formality.py), so that users can ask for one form of address.
- encyclopedia.train.en.xz: English sentences without translations, for back-translation.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from augmentation import find_ordinary_words, make_copies, title_case_pairs
from check import fold, read_held_out
from formality import FORMS, split_by_formality
from lexicon import build_lexicon
from pair_filters import filter_language, is_plausible, split_by_script

from regard.data.parallel_corpus import read_lines

Pair = tuple[str, str]
Sets = dict[str, list[Pair]]
PROSE = (  # sources of docs-en-XX that are no software documentation
    *("canada-laws", "cataclysm-dda", "debian-website", "ethereum-org", "freeciv", "mozilla-www", "opensource-guide"),
    *("programming-historian", "ud-pud", "wesnoth", "xquad"),
)
LANGUAGES = ("de", "fr", "zh", "zh-Hant")
CONVERTED_SHARE = 0.3  # of the simplified Chinese pairs, that are also converted to traditional Chinese
LEXICON_PAIRS = 100_000  # of Europarl, beside Tatoeba


def main(data: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    held = read_held_out(data)
    sets, report = select_pairs(read_corpora(data), held)
    sets |= {name: remove_held_out(pairs, held) for name, pairs in convert_to_traditional(sets).items()}
    augmented = {name: remove_held_out(pairs, held) for name, pairs in augment(sets).items()}
    for name, pairs in {**sets, **augmented}.items():
        write_pairs(work, f"{name}.train", pairs, get_language(name))
        report.setdefault(f"{name}.train", {})["kept"] = len(pairs)
    for lang, forms in split_by_formality(sets, FORMS).items():
        for form, pairs in forms.items():
            write_pairs(work, f"formality-en-{lang}.train", pairs, f"{lang}-{form}", english=f"en-{form}")
            report[f"formality-en-{lang}-{form}.train"] = {"kept": len(pairs)}
    monolingual = [text for text in read_encyclopedia(data) if fold(text) not in held]
    write_lines(work / "encyclopedia.train.en.xz", monolingual)
    report["encyclopedia.train"] = {"kept": len(monolingual)}
    for name, pairs in read_validation(data).items():
        write_pairs(work, f"{name}.val", pairs, get_language(name))
        report[f"{name}.val"] = {"kept": len(pairs)}
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(f"{name}: {counts}" for name, counts in report.items()))


def select_pairs(sets: Sets, held: set[str]) -> tuple[Sets, dict[str, dict[str, int]]]:
    """Return the pairs that are fit for training, and the number of pairs after each filter."""
    unseen = {name: remove_held_out(dict.fromkeys(pairs), held) for name, pairs in sets.items()}
    plausible = {
        name: [pair for pair in pairs if is_plausible(pair, get_language(name))] for name, pairs in unseen.items()
    }
    speeches = {
        name: filter_language(pairs, get_language(name))
        for name, pairs in plausible.items()
        if name.startswith("europarl")
    }
    kept = plausible | speeches
    steps = {"read": sets, "in no test": unseen, "look like translations": plausible}
    return kept, {f"{name}.train": {step: len(of[name]) for step, of in steps.items()} for name in sets}


def convert_to_traditional(sets: Sets) -> Sets:
    """Return a share of the documents in simplified Chinese, in traditional Chinese with the words of Taiwan."""
    from opencc import OpenCC  # only here: the finished translator does not need it

    convert, rng = OpenCC("s2twp").convert, random.Random(0)
    return {
        f"{kind}-en-zh-Hant": [
            (english, convert(chinese)) for english, chinese in sets[f"{kind}-en-zh"] if rng.random() < CONVERTED_SHARE
        ]
        for kind in ("docs", "prose")
    }


def augment(sets: Sets) -> Sets:
    """Return the sets that are derived from the others."""
    english = find_ordinary_words(pair[0] for pairs in sets.values() for pair in pairs)
    made: Sets = {}
    for lang in LANGUAGES:
        own = {name: pairs for name, pairs in sets.items() if get_language(name) == lang}
        ordinary = english | find_ordinary_words(pair[1] for pairs in own.values() for pair in pairs)
        everyday = own[f"tatoeba-en-{lang}"]
        formal = own.get(f"europarl-en-{lang}") or own[f"prose-en-{lang}"]  # has other words
        made[f"copies-en-{lang}"] = [pair for pairs in own.values() for pair in make_copies(pairs, lang, ordinary)]
        made[f"words-en-{lang}"] = build_lexicon(everyday + formal[:LEXICON_PAIRS], lang)
        made[f"titled-en-{lang}"] = title_case_pairs(everyday)
    return made


def remove_held_out(pairs: Iterable[Pair], held: set[str]) -> list[Pair]:
    return [pair for pair in pairs if not any(fold(text) in held for text in pair)]


def get_language(name: str) -> str:
    """Return the language beside English of "tatoeba-en-de", "words-en-de.train" ..."""
    return name.split(".")[0].rpartition("en-")[2]


# ---- corpora ---------------------------------------------------------------------------------------------------------


def read_corpora(data: Path) -> Sets:
    sets = {f"tatoeba-{name}": pairs for name, pairs in read_tatoeba(data, "train").items()}
    sets["europarl-en-de"] = [
        pair
        for folder in ("europarl-en-de", "europarl-en-de-more")
        for pair in read_pairs(data / folder, "train", "en", "de")
    ]
    sets["europarl-en-fr"] = read_pairs(data / "europarl-en-fr", "train", "en", "fr")
    for lang in ("de", "fr", "zh"):
        folder = data / f"docs-en-{lang}"
        sources = list(read_lines(folder / "train.src.xz"))
        for source, pair in zip(sources, read_pairs(folder, "train", "en", lang), strict=True):
            kind = "europarl" if source == "europarl" else "prose" if source in PROSE else "docs"
            sets.setdefault(f"{kind}-en-{lang}", []).append(pair)
    return sets


def read_validation(data: Path) -> Sets:
    sets = {f"tatoeba-{name}": pairs for name, pairs in read_tatoeba(data, "val").items()}
    sets["europarl-en-de"] = read_pairs(data / "europarl-en-de", "val", "en", "de")
    return sets | {
        f"docs-en-{lang}": read_pairs(data / f"docs-en-{lang}", "valid", "en", lang) for lang in LANGUAGES[:3]
    }


def read_tatoeba(data: Path, split: str) -> Sets:
    pairs = {lang: read_pairs(data / "tatoeba", f"en-{lang}.{split}", "en", lang) for lang in ("de", "fr", "zh")}
    return {"en-de": pairs["de"], "en-fr": pairs["fr"], **split_by_script(pairs["zh"])}


def read_pairs(folder: Path, name: str, *languages: str) -> list[Pair]:
    sides = (read_lines(folder / f"{name}.{lang}.xz") for lang in languages)
    return [(normalize(source), normalize(target)) for source, target in zip(*sides, strict=True)]


def read_encyclopedia(data: Path) -> list[str]:
    """Return the sentences of WikiText-2 that have no unknown word, with spaces as people write them."""
    sentences: list[str] = []
    for line in read_lines(data / "lm" / "wikitext2.train.txt.xz"):
        if line.strip().startswith("="):  # a heading
            continue
        sentences += [
            join_tokens(sentence)
            for sentence in re.split(r"(?<= [.!?]) (?=[A-Z\"'])", line.strip())
            if "<unk>" not in sentence and 5 <= len(sentence.split()) <= 50 and sentence.endswith((".", "!", "?"))
        ]
    return list(dict.fromkeys(sentences))


def join_tokens(text: str) -> str:
    """Return tokenized English with the spaces of ordinary text."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]%]|'s\b|n't\b|'(?:re|ve|ll|d|m)\b)", r"\1", text)
    text = re.sub(r"([(\[$£€]) ", r"\1", text)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    return normalize(text)


def normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def write_pairs(work: Path, name: str, pairs: list[Pair], lang: str, english: str = "en") -> None:
    for i, side in enumerate((english, lang)):
        write_lines(work / f"{name}.{side}.xz", [pair[i] for pair in pairs])


def write_lines(path: Path, lines: list[str]) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=6) as file:
        file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
