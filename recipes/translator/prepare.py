"""Stage 1: from the corpora to what the translator learns from.

    python recipes/translator/prepare.py DATA WORK

DATA holds tatoeba/ and europarl-en-de/. WORK gets NAME.train.{xx}.xz and NAME.val.{xx}.xz for the names below, and
report.json.

- Chinese is split by script: zh (simplified) and zh-Hant (traditional), by the characters that only GB2312 or only Big5 has;
  sentences without any go to both.
- Pairs are left out whose sides do not look like their language or like each other (lengths, letters, sides that are equal),
  and those of which a side is a sentence of any test or validation set: the English of one pair's test is in the training
  data of others (check.py proves that none is left).
- Copies are added in which a name or number that both sides share is another one, or a placeholder: what should be copied is
  then learned as something to copy, whatever it says. `regard.text.keep` puts placeholders in place of links and the like.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from check import fold, sentences_of

from regard.data.corpus import read_lines
from regard.text.detect import HAN, Profiles, learned, scores, script

Pair = tuple[str, str]
LETTER = re.compile(r"[^\W\d_]")
NUMBER, NAME = re.compile(r"\d[\d.,:]*\d|\d"), re.compile(r"\b[A-Z][a-z]{2,}\b")
NAMES = {  # that Chinese writes in its own characters
    **{
        "Tom": ("汤姆", "湯姆"),
        "Mary": ("玛丽", "瑪麗", "瑪莉"),
        "John": ("约翰", "約翰"),
        "Boston": ("波士顿", "波士頓"),
    },
    **{"Japan": ("日本",), "Tokyo": ("东京", "東京"), "China": ("中国", "中國"), "America": ("美国", "美國")},
}
SHARE, SHARE_ZH = 0.1, 0.4  # of the pairs with something to copy that are added once more; Chinese has few of these
LONGEST = 400  # characters
SURE = 15.0  # of log-probability


def main(data: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    found: Counter[str] = Counter()
    held = sentences_of(data, "test") | sentences_of(data, "val")
    for split in ("train", "val"):
        tatoeba = {lang: read(data / "tatoeba", f"en-{lang}.{split}", "en", lang) for lang in ("de", "fr", "zh")}
        sets = {"en-de": [*tatoeba["de"]], "en-fr": [*tatoeba["fr"]], **by_script(tatoeba["zh"])}
        sets["europarl"] = [*read(data / "europarl-en-de", split, "en", "de")]
        for name, pairs in sets.items():
            lang = name.removeprefix("en-") if name != "europarl" else "de"
            kept, added = pairs, []
            if split == "train":
                fresh = [pair for pair in dict.fromkeys(pairs) if not any(fold(text) in held for text in pair)]
                kept = [pair for pair in fresh if good(pair, lang)]
                if name == "europarl":  # later speeches were left in the language they were held in
                    profiles = {side: learned(pair[i] for pair in sets["en-de"]) for i, side in enumerate(("en", "de"))}
                    profiles["fr"] = learned(pair[1] for pair in sets["en-fr"])
                    kept = [pair for pair in kept if spoken(pair[1], "de", profiles)]
                added = [pair for pair in copies(kept, lang) if not any(fold(text) in held for text in pair)]
                found[f"{name}.{split} in no test"] = len(fresh)
            found |= {
                f"{name}.{split} read": len(pairs),
                f"{name}.{split} kept": len(kept),
                f"{name}.{split} added": len(added),
            }
            write(work, f"{name}.{split}", lang, kept + added)
    (work / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def read(folder: Path, name: str, *languages: str) -> Iterator[Pair]:
    for source, target in zip(*(read_lines(folder / f"{name}.{lang}.xz") for lang in languages), strict=True):
        yield clean(source), clean(target)


def clean(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def write(work: Path, name: str, lang: str, pairs: list[Pair]) -> None:
    for i, side in enumerate(("en", lang)):
        with lzma.open(work / f"{name}.{side}.xz", "wt", encoding="utf-8", preset=1) as file:
            file.writelines(pair[i] + "\n" for pair in pairs)


# ---- Chinese ---------------------------------------------------------------------------------------------------------


def by_script(pairs: Iterator[Pair]) -> dict[str, list[Pair]]:
    sets: dict[str, list[Pair]] = {"en-zh": [], "en-zh-Hant": []}
    for pair in pairs:
        simple, traditional = script(pair[1])
        if simple >= traditional:
            sets["en-zh"].append(pair)
        if traditional >= simple:
            sets["en-zh-Hant"].append(pair)
    return sets


# ---- filters ---------------------------------------------------------------------------------------------------------


def good(pair: Pair, lang: str) -> bool:
    source, target = pair
    if not source or not target or source == target or max(map(len, pair)) > LONGEST:
        return False
    chinese = lang.startswith("zh")
    ratio = len(target) / len(source)
    if not (0.1 if chinese else 0.35) < ratio < (1.5 if chinese else 3.0) and max(map(len, pair)) > 20:
        return False
    return in_script(source, False) and in_script(target, chinese)


def spoken(text: str, language: str, profiles: Profiles) -> bool:
    """Whether no other language is far likelier."""
    found = scores(text, profiles)
    return not found or found[language] > max(found.values()) - SURE


def in_script(text: str, chinese: bool) -> bool:
    """Half of its letters at least."""
    letters, han = len(LETTER.findall(text)), len(HAN.findall(text))
    return letters > 0 and (2 * han >= letters if chinese else han == 0)


# ---- what is copied --------------------------------------------------------------------------------------------------


def copies(pairs: list[Pair], lang: str) -> list[Pair]:
    """Some pairs once more, with one or two names or numbers of both sides as others, or as placeholders."""
    rng, made = random.Random(0), []
    for source, target in pairs:
        found = shared(source, target)
        if found and rng.random() < (SHARE_ZH if lang.startswith("zh") else SHARE):
            marks = rng.sample(range(1, 5), 2)
            for (mine, theirs), mark in zip(
                rng.sample(found, min(len(found), rng.choice((1, 1, 2)))), marks, strict=False
            ):
                new = other(mine, mark, rng)
                source, target = source.replace(mine, new), target.replace(theirs, new)
            made.append((source, target))
    return made


def shared(source: str, target: str) -> list[Pair]:
    """Names and numbers that are once on either side, as each writes them; none is a part of another."""
    words = [word for pattern in (NUMBER, NAME) for word in dict.fromkeys(pattern.findall(source))]
    both = [
        (word, theirs)
        for word in words
        for theirs in (word, *NAMES.get(word, ()))
        if once(word, theirs, source, target)
    ]
    return [pair for pair in both if not any(pair != rest and pair[0] in rest[0] for rest in both)]


def once(word: str, theirs: str, source: str, target: str) -> bool:
    return source.count(word) == 1 and target.count(theirs) == 1


def other(word: str, mark: int, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"⟦{mark}⟧"
    if word[0].isdigit():
        return re.sub(r"\d", lambda _: str(rng.randrange(10)), word)
    syllables = ("ka", "ro", "min", "tel", "da", "su", "vor", "lin", "be", "xa", "jo", "wen", "pri", "gu", "ny")
    return "".join(rng.choice(syllables) for _ in range(rng.randrange(2, 4))).capitalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
