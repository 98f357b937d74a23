"""Stage 3: more to learn from, made by the model itself.

    python recipes/translator/synthesise.py MODEL DATA WORK [--part 0/1] [--beam 1] [--limit N] [--floor -1.0]

English everyday sentences are translated to each language, and German, French and Chinese ones to English. WORK gets
made-STEM-LANG.train.{xx}.xz: the real text on one side, the model's on the other. Read towards the real side it is
back-translation ("made-en-de-zh.train.{lang}.xz@zh>en"), read from it self-distillation ("...@en>zh").

One job after the other; a job whose files are there is not done again. Half of the time is spent on text, not on the GPU:
several at a time, each with its --part, take less. made-STEM-LANG.json says what was left out and why. DATA is asked for
its tests alone: nothing made may be one of their sentences.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from check import fold, sentences_of
from prepare import good

import regard
from regard.data.corpus import read_lines
from regard.files import write_text
from regard.translator import Translation

STEMS = {"en-de": "de", "en-fr": "fr", "en-zh": "zh", "en-zh-Hant": "zh-Hant"}


@dataclass(frozen=True)
class Job:
    stem: str  # whose real text is translated
    real: str
    to: str

    def path(self, work: Path, side: str) -> Path:
        return work / f"made-{self.stem}-{self.to}.train.{side}.xz"

    @property
    def spec(self) -> str:
        return f"{self.path(Path(), '{lang}').name}@{self.to}>{self.real}"


def jobs() -> list[Job]:
    """Long ones first."""
    english = [Job(stem, "en", to) for stem in STEMS for to in STEMS.values()]
    return english + [Job(stem, lang, "en") for stem, lang in STEMS.items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth job, from the Ith on")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--limit", type=int, help="sentences of each job at most")
    parser.add_argument("--floor", type=float, default=-1.0, help="mean log-probability of a token that is too low")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    translator, held = regard.load(given.model, given.device), sentences_of(given.data, "test")
    held |= sentences_of(given.data, "val")
    part, parts = map(int, given.part.split("/"))
    for job in jobs()[part::parts]:
        if all(job.path(given.work, side).exists() for side in (job.real, job.to)):
            print(f"{job.spec}: there already")
            continue
        texts = real_lines(given.work, job)[: given.limit]
        found = translator.translate(texts, to=job.to, beam=given.beam)
        pairs, counts = chosen(job, texts, found, given.floor, held)
        if not pairs:
            raise SystemExit(f"{job.spec}: nothing good enough was made: {counts}")
        write(given.work, job, pairs)
        write_text(given.work / f"made-{job.stem}-{job.to}.json", json.dumps(counts, indent=1) + "\n")
        print(f"{job.spec}: {counts}", flush=True)


def real_lines(work: Path, job: Job) -> list[str]:
    """Each once, those with placeholders left out."""
    lines = read_lines(work / f"{job.stem}.train.{job.real}.xz")
    return [line for line in dict.fromkeys(lines) if "⟦" not in line]


def chosen(
    job: Job, texts: list[str], found: list[Translation], floor: float, held: set[str]
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(real, made) of what is good enough, and how many were left out for what."""
    counts: Counter[str] = Counter(read=len(texts))
    pairs = []
    for text, made in zip(texts, found, strict=True):
        said = " ".join(made.text.split())
        fault = wrong(job, text, said, made, floor) or ("in a test" if fold(said) in held else "")
        counts[fault or "kept"] += 1
        if not fault:
            pairs.append((text, said))
    return pairs, dict(counts)


def wrong(job: Job, text: str, said: str, made: Translation, floor: float) -> str:
    """What speaks against a translation, or nothing."""
    if not said:
        return "empty"
    if not made.ended:
        return "cut off"
    if fold(said) == fold(text):
        return "copied"
    if repeats(said, job.to.startswith("zh")):
        return "repeats itself"
    if made.log_prob / (len(made.tokens) + 1) < floor:
        return "unlikely"
    english, other = (text, said) if job.real == "en" else (said, text)
    return "" if good((english, other), job.to if job.real == "en" else job.real) else "lengths or letters"


def repeats(text: str, chinese: bool, n: int = 4, most: int = 2) -> bool:
    """Whether n words (in Chinese: characters) in a row come more than `most` times, or one more than n times on end."""
    words = list(text) if chinese else text.lower().split()
    rows = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    on_end = any(len(set(words[i : i + n + 1])) == 1 for i in range(len(words) - n))
    return on_end or max(rows.values(), default=0) > most


def write(work: Path, job: Job, pairs: list[tuple[str, str]]) -> None:
    """Whole files or none."""
    for i, side in enumerate((job.real, job.to)):
        path = job.path(work, side)
        draft = path.with_name(f".{path.name}")
        with lzma.open(draft, "wt", encoding="utf-8", preset=1) as file:
            file.writelines(pair[i] + "\n" for pair in pairs)
        draft.rename(path)


if __name__ == "__main__":
    main()
