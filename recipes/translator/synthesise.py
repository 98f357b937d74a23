"""Stage 3: translations by the teacher, for sequence-level distillation and back-translation.

    python recipes/translator/synthesise.py TEACHER DATA WORK [--part 0/6] [--beam 4] [--scale 1.0]

Each job translates sentences that people wrote from one language to another and writes WORK/made-FROM-TO/train.{xx}.xz.
Read from FROM to TO these pairs are sequence-level distillation (Kim and Rush 2016): the student learns what the teacher
says. Read from TO to FROM they are back-translation (Sennrich et al. 2016): the target is what people wrote. English is
translated to all languages, whatever corpus it is from, so that Chinese gets speeches and an encyclopedia, of which there is
no translation.

Translations are left out that are empty, cut off, copied, repetitive, unlikely, in the wrong script, of implausible length,
or a sentence of a test or validation set. `--part I/N` does every Nth job, starting with the Ith, for several processes at a
time; a job that is done already is not done again. `--scale` multiplies the number of sentences of every job.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check import fold, read_held_out
from pair_filters import is_plausible, is_written_in

import regard
from regard.data.parallel_corpus import read_lines
from regard.files import MANIFEST, atomic_folder, find_damage, read_json, sha256
from regard.inference.translator import Translation
from regard.model_folder import find

Pair = tuple[str, str]
LONGEST = 300  # characters; the teacher's translations of longer sentences are worse
LANGUAGES = ("de", "fr", "zh", "zh-Hant")
# The most sentences that a job reads of each kind of set: of its own language, and of the English of another language.
OWN = {"tatoeba": 60_000, "europarl": 90_000, "prose": 60_000, "docs": 70_000}
OTHER = {"tatoeba": 20_000, "europarl": 90_000, "prose": 40_000, "docs": 25_000, "encyclopedia": 60_000}


@dataclass(frozen=True)
class Job:
    """Sentences of one language, and the language to translate them to."""

    source: str
    target: str
    part: int = 0  # a large job is cut into parts
    parts: int = 1

    @property
    def name(self) -> str:
        return f"made-{self.source}-{self.target}" + (f"-{self.part}" if self.parts > 1 else "")

    def files(self, work: Path) -> dict[Path, int]:
        """Return the files of sentences to translate, and the most sentences of each."""
        if self.source != "en":
            limits = {f"{kind}-en-{self.source}.train.{self.source}.xz": most for kind, most in OWN.items()}
        else:
            limits = {f"{kind}-en-{self.target}.train.en.xz": most for kind, most in OWN.items()}
            limits |= {
                f"{kind}-en-{lang}.train.en.xz": most
                for kind, most in OTHER.items()
                for lang in LANGUAGES[:3]
                if lang != self.target
            }
            limits["encyclopedia.train.en.xz"] = OTHER["encyclopedia"]
        return {work / name: most for name, most in limits.items() if (work / name).exists()}


def list_jobs() -> list[Job]:
    """Return all jobs, long ones first."""
    from_english = [Job("en", lang, i, 3) for i in range(3) for lang in ("zh", "de", "fr")] + [Job("en", "zh-Hant")]
    return from_english + [Job(lang, "en") for lang in LANGUAGES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth job, starting with the Ith")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of sentences")
    parser.add_argument("--floor", type=float, default=-1.0, help="least mean log-probability of a token")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    translator, held = regard.load(given.model, given.device), read_held_out(given.data)
    options = {name: getattr(given, name) for name in ("beam", "scale", "floor")}
    part, parts = map(int, given.part.split("/"))
    for job in list_jobs()[part::parts]:
        made_with = describe_inputs(given.work, job, given.model, options)
        if is_done(given.work, job, made_with):
            print(f"{job.name}: there already")
            continue
        texts = read_texts(given.work, job, given.scale)
        found = translator.translate_sentences(texts, to=job.target, beam=given.beam)
        pairs, counts = select_pairs(job, texts, found, given.floor, held)
        if not pairs:
            raise SystemExit(f"{job.name}: nothing good enough was made: {counts}")
        save_pairs(given.work, job, pairs, made_with, counts)
        print(f"{job.name}: {counts}", flush=True)


def read_texts(work: Path, job: Job, scale: float) -> list[str]:
    """Return the sentences of a job without duplicates."""
    found: dict[str, None] = {}
    for path, most in job.files(work).items():
        lines = [line for line in read_lines(path) if len(line) <= LONGEST]
        found |= dict.fromkeys(random.Random(0).sample(lines, min(round(most * scale), len(lines))))
    return list(found)[job.part :: job.parts]


def select_pairs(
    job: Job, texts: list[str], found: list[Translation], floor: float, held: set[str]
) -> tuple[list[Pair], dict[str, int]]:
    """Return the pairs whose translations have no fault, and counts of the faults."""
    counts: Counter[str] = Counter(read=len(texts))
    pairs = []
    for text, translation in zip(texts, found, strict=True):
        output = " ".join(translation.text.split())
        fault = find_fault(job, text, output, translation, floor) or ("in a test" if fold(output) in held else "")
        counts[fault or "kept"] += 1
        if not fault:
            pairs.append((text, output))
    return pairs, dict(counts)


def find_fault(job: Job, text: str, output: str, translation: Translation, floor: float) -> str:
    """Return the fault of a translation, or an empty string."""
    if not output:
        return "empty"
    if not translation.ended:
        return "cut off"
    if fold(output) == fold(text):
        return "copied"
    if is_repetitive(output, job.target.startswith("zh")):
        return "repeats itself"
    if translation.log_prob / (len(translation.tokens) + 1) < floor:
        return "unlikely"
    if not is_written_in(job.target, output):
        return "script"
    english, other = (text, output) if job.source == "en" else (output, text)
    return (
        "" if is_plausible((english, other), job.target if job.source == "en" else job.source) else "lengths or letters"
    )


def is_repetitive(text: str, chinese: bool, n: int = 4, most: int = 2) -> bool:
    """Return whether n words in a row occur more than `most` times, or one word n + 1 times in a row.

    In Chinese, characters are counted instead of words.
    """
    words = list(text) if chinese else text.lower().split()
    ngrams = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    one_repeated = any(len(set(words[i : i + n + 1])) == 1 for i in range(len(words) - n))
    return one_repeated or max(ngrams.values(), default=0) > most


# ---- files of a job --------------------------------------------------------------------------------------------------


def describe_inputs(work: Path, job: Job, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that determines the result of a job: hashes of the model and the texts, and the options."""
    texts = {file.name: sha256(file) for file in job.files(work)}
    return {"model": sha256(find(Path(model)) / MANIFEST), "texts": texts, "options": options}


def is_done(work: Path, job: Job, made_with: dict[str, Any]) -> bool:
    folder = work / job.name
    return find_damage(folder) is None and read_json(folder / "made.json")["made with"] == made_with


def save_pairs(work: Path, job: Job, pairs: list[Pair], made_with: dict[str, Any], counts: dict[str, int]) -> None:
    with atomic_folder(work / job.name) as draft:
        for i, side in enumerate((job.source, job.target)):
            with lzma.open(draft / f"train.{side}.xz", "wt", encoding="utf-8", preset=0) as file:
                file.writelines(pair[i] + "\n" for pair in pairs)
        record = {"made with": made_with, "counts": counts}
        (draft / "made.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
