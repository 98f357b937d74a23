"""Stage 3: more to learn from, made by the model itself.

    python recipes/translator/synthesise.py MODEL DATA WORK [--part 0/1] [--beam 1] [--limit N] [--floor -1.0] [--back 55]

English everyday sentences are translated to each language, and German, French and Chinese ones to English. WORK gets
made-STEM-LANG/train.{xx}.xz: the real text on one side, the model's on the other. Read towards the real side it is
back-translation ("made-en-de-zh/train.{lang}.xz@zh>en"), read from it self-distillation ("...@en>zh").

Europarl's English, for which there is German alone, is translated to the others. The model is not at home there, and mixes
in German and English words. So only words that someone wrote in the language may be in it; and it is translated back to
English, and kept if it comes back much like the original (chrF).

One job after the other; a job that is there, made with the same model, text and options, is not done again. Half of the
time is spent on text, not on the GPU: several at a time, each with its --part, take less. made.json says what was left out
and why. DATA is asked for its tests alone: nothing made may be one of their sentences.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from check import fold, held_out
from filters import good, written_in
from made import Job, Pair, is_made, jobs, origin, save
from sacrebleu.metrics import CHRF

import regard
from regard.data.parallel_corpus import read_lines
from regard.inference.translator import Translation, Translator

LONGEST = 160  # characters of a speech's sentence
WORD = re.compile(r"[^\W\d_\u3400-\u9fff]+")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth job, from the Ith on")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--limit", type=int, help="sentences of each job at most")
    parser.add_argument("--floor", type=float, default=-1.0, help="mean log-probability of a token that is too low")
    parser.add_argument("--back", type=float, default=55.0, help="least chrF of a speech's sentence that comes back")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    translator, held = regard.load(given.model, given.device), held_out(given.data)
    options = {name: getattr(given, name) for name in ("beam", "limit", "floor", "back")}
    part, parts = map(int, given.part.split("/"))
    for job in jobs()[part::parts]:
        made_with = origin(given.work, job, given.model, options)
        if is_made(given.work, job, made_with):
            print(f"{job.name}: there already")
            continue
        pairs, counts = done(translator, job, real_lines(given.work, job)[: given.limit], held, given)
        if not pairs:
            raise SystemExit(f"{job.name}: nothing good enough was made: {counts}")
        save(given.work, job, pairs, made_with, counts)
        print(f"{job.name}: {counts}", flush=True)


def real_lines(work: Path, job: Job) -> list[str]:
    """Each once; of speeches the shorter sentences."""
    lines = dict.fromkeys(read_lines(job.source(work)))
    return [line for line in lines if len(line) <= LONGEST or not job.returns]


def done(
    translator: Translator, job: Job, texts: list[str], held: set[str], given: argparse.Namespace
) -> tuple[list[Pair], dict[str, int]]:
    """(real, made) of what is good enough, and how many were left out for what."""
    found = translator.translate_sentences(texts, to=job.to, beam=given.beam)
    pairs, counts = chosen(job, texts, found, given.floor, held)
    if not job.returns:
        return pairs, counts
    known = words_in(read_lines(job.written(given.work)))
    spelled = [pair for pair in pairs if words_in([pair[1]]) <= known]
    back = translator.translate_sentences([said for _, said in spelled], to=job.real, beam=given.beam)
    near = returned(spelled, back, given.back)
    lost = {"unknown words": len(pairs) - len(spelled), "comes back differently": len(spelled) - len(near)}
    return near, counts | {"kept": len(near)} | lost


def chosen(
    job: Job, texts: list[str], found: list[Translation], floor: float, held: set[str]
) -> tuple[list[Pair], dict[str, int]]:
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
    if not written_in(job.to, said):
        return "script"
    english, other = (text, said) if job.real == "en" else (said, text)
    return "" if good((english, other), job.to if job.real == "en" else job.real) else "lengths or letters"


def repeats(text: str, chinese: bool, n: int = 4, most: int = 2) -> bool:
    """Whether n words (in Chinese: characters) in a row come more than `most` times, or one more than n times on end."""
    words = list(text) if chinese else text.lower().split()
    rows = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    on_end = any(len(set(words[i : i + n + 1])) == 1 for i in range(len(words) - n))
    return on_end or max(rows.values(), default=0) > most


def words_in(lines: Iterable[str]) -> set[str]:
    """Those in letters; Chinese characters are none."""
    return {word for line in lines for word in WORD.findall(line.lower())}


def returned(pairs: list[Pair], back: list[Translation], least: float) -> list[Pair]:
    """The pairs whose real side is much like what became of it there and back."""
    chrf = CHRF()
    alike = (chrf.sentence_score(made.text, [text]).score for (text, _), made in zip(pairs, back, strict=True))
    return [pair for pair, score in zip(pairs, alike, strict=True) if score >= least]


if __name__ == "__main__":
    main()
