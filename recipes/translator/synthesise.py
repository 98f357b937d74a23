"""Stage 3: synthetic pairs, translated by the model itself (back-translation and self-distillation).

    python recipes/translator/synthesise.py MODEL DATA WORK [--part 0/1] [--beam 1] [--limit N] [--floor -1.0] [--back 55]

English everyday sentences are translated to each language, and German, French and Chinese ones to English. Read towards the
real side the pairs are back-translation ("made-en-de-zh/train.{lang}.xz@zh>en"), read from it self-distillation
("...@en>zh").

Europarl's English, for which there is only German, is translated to the other languages too. The model has not learned such
text in them and mixes in German and English words. So a translation is kept only if all its words occur in text that people
wrote in the language, and if translating it back to English gives much the same sentence (chrF).

The result of each job is a folder in WORK, which is complete or not there:

    made-STEM-LANG/train.{xx}.xz    the real text on one side, the model's on the other
    made-STEM-LANG/made.json        the model, texts and options, and how many lines were dropped for which reason
    made-STEM-LANG/manifest.json    checksums

A job whose folder was made with the same model, text and options is skipped. Half of the time is spent on text processing,
so several processes with a --part each are faster. DATA is read for its test sets: no synthetic sentence may be in them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check import fold, read_held_out
from pair_filters import is_plausible, is_written_in
from sacrebleu.metrics import CHRF

import regard
from regard.data.parallel_corpus import read_lines
from regard.files import MANIFEST, atomic_folder, find_damage, read_json, sha256
from regard.inference.translator import Translation, Translator
from regard.model_folder import find

Pair = tuple[str, str]
STEMS = {"en-de": "de", "en-fr": "fr", "en-zh": "zh", "en-zh-Hant": "zh-Hant"}
EUROPARL = "europarl"
LONGEST = 160  # characters of a Europarl sentence
WORD = re.compile(r"[^\W\d_\u3400-\u9fff]+")


@dataclass(frozen=True)
class SynthesisJob:
    """The translation of one side of a set of pairs."""

    stem: str  # the set of pairs whose text is translated
    real: str  # language of the text that people wrote
    to: str  # language that the model translates it to

    @property
    def name(self) -> str:
        return f"made-{self.stem}-{self.to}"

    @property
    def needs_round_trip(self) -> bool:
        """Whether a translation must lead back to the real text: the model has not seen Europarl in these languages."""
        return self.stem == EUROPARL

    def source_file(self, work: Path) -> Path:
        return work / f"{self.stem}.train.{self.real}.xz"

    def monolingual_file(self, work: Path) -> Path:
        """Return the file of text that people wrote in the language that is translated to."""
        return work / f"en-{self.to}.train.{self.to}.xz"


def list_jobs() -> list[SynthesisJob]:
    """Return all jobs, long ones first."""
    europarl = [SynthesisJob(EUROPARL, "en", to) for to in ("fr", "zh", "zh-Hant")]
    everyday = [SynthesisJob(stem, "en", to) for stem in STEMS for to in STEMS.values()]
    return europarl + everyday + [SynthesisJob(stem, lang, "en") for stem, lang in STEMS.items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth job, starting with the Ith")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--limit", type=int, help="most sentences of each job")
    parser.add_argument("--floor", type=float, default=-1.0, help="least mean log-probability of a token")
    parser.add_argument(
        "--back", type=float, default=55.0, help="least chrF of a Europarl sentence after the round trip"
    )
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    translator, held = regard.load(given.model, given.device), read_held_out(given.data)
    options = {name: getattr(given, name) for name in ("beam", "limit", "floor", "back")}
    part, parts = map(int, given.part.split("/"))
    for job in list_jobs()[part::parts]:
        made_with = describe_inputs(given.work, job, given.model, options)
        if is_done(given.work, job, made_with):
            print(f"{job.name}: there already")
            continue
        pairs, counts = synthesise_pairs(translator, job, read_texts(given.work, job)[: given.limit], held, given)
        if not pairs:
            raise SystemExit(f"{job.name}: nothing good enough was made: {counts}")
        save_pairs(given.work, job, pairs, made_with, counts)
        print(f"{job.name}: {counts}", flush=True)


def read_texts(work: Path, job: SynthesisJob) -> list[str]:
    """Return the sentences of a job without duplicates; of Europarl only the shorter ones."""
    lines = dict.fromkeys(read_lines(job.source_file(work)))
    return [line for line in lines if len(line) <= LONGEST or not job.needs_round_trip]


def synthesise_pairs(
    translator: Translator, job: SynthesisJob, texts: list[str], held: set[str], given: argparse.Namespace
) -> tuple[list[Pair], dict[str, int]]:
    """Return (real, synthetic) pairs that are good enough, and how many were dropped for which reason."""
    found = translator.translate_sentences(texts, to=job.to, beam=given.beam)
    pairs, counts = select_pairs(job, texts, found, given.floor, held)
    if not job.needs_round_trip:
        return pairs, counts
    known = collect_words(read_lines(job.monolingual_file(given.work)))
    in_vocabulary = [pair for pair in pairs if collect_words([pair[1]]) <= known]
    back = translator.translate_sentences([output for _, output in in_vocabulary], to=job.real, beam=given.beam)
    kept = keep_round_trips(in_vocabulary, back, given.back)
    dropped = {
        "unknown words": len(pairs) - len(in_vocabulary),
        "comes back differently": len(in_vocabulary) - len(kept),
    }
    return kept, counts | {"kept": len(kept)} | dropped


def select_pairs(
    job: SynthesisJob, texts: list[str], found: list[Translation], floor: float, held: set[str]
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


def find_fault(job: SynthesisJob, text: str, output: str, translation: Translation, floor: float) -> str:
    """Return the fault of a translation, or an empty string."""
    if not output:
        return "empty"
    if not translation.ended:
        return "cut off"
    if fold(output) == fold(text):
        return "copied"
    if is_repetitive(output, job.to.startswith("zh")):
        return "repeats itself"
    if translation.log_prob / (len(translation.tokens) + 1) < floor:
        return "unlikely"
    if not is_written_in(job.to, output):
        return "script"
    english, other = (text, output) if job.real == "en" else (output, text)
    return "" if is_plausible((english, other), job.to if job.real == "en" else job.real) else "lengths or letters"


def is_repetitive(text: str, chinese: bool, n: int = 4, most: int = 2) -> bool:
    """Return whether n words in a row occur more than `most` times, or one word n + 1 times in a row.

    In Chinese, characters are counted instead of words.
    """
    words = list(text) if chinese else text.lower().split()
    ngrams = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    one_repeated = any(len(set(words[i : i + n + 1])) == 1 for i in range(len(words) - n))
    return one_repeated or max(ngrams.values(), default=0) > most


def collect_words(lines: Iterable[str]) -> set[str]:
    """Return the words in letters, in lower case; Chinese characters are not included."""
    return {word for line in lines for word in WORD.findall(line.lower())}


def keep_round_trips(pairs: list[Pair], back: list[Translation], least: float) -> list[Pair]:
    """Return the pairs whose real side is similar to its translation there and back."""
    chrf = CHRF()
    scores = (
        chrf.sentence_score(translation.text, [text]).score for (text, _), translation in zip(pairs, back, strict=True)
    )
    return [pair for pair, score in zip(pairs, scores, strict=True) if score >= least]


# ---- files of a job --------------------------------------------------------------------------------------------------


def describe_inputs(work: Path, job: SynthesisJob, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that determines the result of a job: hashes of the model and the texts, and the options."""
    files = [job.source_file(work), *([job.monolingual_file(work)] if job.needs_round_trip else [])]
    texts = {file.name: sha256(file) for file in files}
    return {"model": sha256(find(Path(model)) / MANIFEST), "texts": texts, "options": options}


def is_done(work: Path, job: SynthesisJob, made_with: dict[str, Any]) -> bool:
    folder = work / job.name
    return find_damage(folder) is None and read_json(folder / "made.json")["made with"] == made_with


def save_pairs(
    work: Path, job: SynthesisJob, pairs: list[Pair], made_with: dict[str, Any], counts: dict[str, int]
) -> None:
    with atomic_folder(work / job.name) as draft:
        for i, side in enumerate((job.real, job.to)):
            with lzma.open(draft / f"train.{side}.xz", "wt", encoding="utf-8", preset=1) as file:
                file.writelines(pair[i] + "\n" for pair in pairs)
        record = {"made with": made_with, "counts": counts}
        (draft / "made.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
