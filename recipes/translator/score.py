"""Stage 7: BLEU and chrF on tests or validation sets, in all directions, with their signatures.

    python recipes/translator/score.py MODEL DATA --sets tatoeba,ntrex [--beams 1,4] [--out scores.json] [--weights int8]

MODEL is the folder that pack.py wrote, so that the shipped model is scored. DATA holds tatoeba/, ntrex/, docs-en-XX/ and
europarl-en-de/. Sets are `tatoeba` and `ntrex` (tests: score them once, when the model is final), `valid` (docs-en-XX and
Europarl) and `tatoeba-valid`. Chinese is translated to the script of each test line, and scored in both scripts together and
in each alone, on characters. Sentences are decoded as they are, and outputs scored without post-processing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pair_filters import is_written_in

import regard
from regard.data.parallel_corpus import read_lines
from regard.files import sha256, write_text
from regard.inference.translator import Translator
from regard.metrics.translation_scores import score_translations
from regard.model_folder import find
from regard.terminal import format_table

SCRIPTS = {"cmn_Hans": "zh", "cmn_Hant": "zh-Hant"}


@dataclass(frozen=True)
class TestSet:
    """A test in one direction."""

    name: str
    source: list[str]
    target: list[str]
    direction: str
    languages: list[str]  # the language of each line beside English: de, fr, zh or zh-Hant

    def first(self, lines: int | None) -> TestSet:
        return replace(self, source=self.source[:lines], target=self.target[:lines], languages=self.languages[:lines])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", default="tatoeba", help=f"some of {', '.join(SETS)}")
    parser.add_argument("--beams", default="1,4")
    parser.add_argument("--lines", type=int, help="the first lines of each set alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--weights", default="auto", help="fp32, bf16, ...; on a CPU also int8, what `regard translate` has"
    )
    given = parser.parse_args()
    translator = regard.load(given.model, given.device, given.weights)
    # card.py checks which model these scores belong to.
    facts = {"weights": sha256(find(Path(given.model)) / "model.safetensors")}
    facts["precision"] = given.weights if given.weights != "auto" else get_precision(translator)
    rows: list[dict[str, Any]] = []
    tests = (test for name in given.sets.split(",") for test in SETS[name](given.data))
    for test in select_known(translator, tests):
        test = test.first(given.lines)
        for beam in map(int, given.beams.split(",")):
            rows += score_test_set(translator, test, beam)
            print(f"{test.direction} {test.name} beam {beam}: {rows[-1]['bleu']:.2f}", flush=True)
            if given.out:  # after each set, so that an interruption leaves what is done
                write_text(given.out, json.dumps([row | facts for row in rows], indent=1) + "\n")
    if not rows:
        sys.exit(f"nothing was scored: {given.model} translates in no direction of the tests")
    print("\n".join(format_table([HEADER, *map(format_row, rows)], 2)))
    print("\n".join(sorted({row[f"{metric}_signature"] for row in rows for metric in ("bleu", "chrf")})))


def get_precision(translator: Translator) -> str:
    """Return the precision of the weights that `regard.load` chose for the device."""
    dtype = next(translator.model.parameters()).dtype
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))


HEADER = ("direction", "test", "sentences", "beam", "BLEU", "chrF", "seconds")


def format_row(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = (
        f"{row['sentences']:,}",
        str(row["beam"]),
        f"{row['bleu']:.2f}",
        f"{row['chrf']:.2f}",
        f"{row['seconds']:.1f}" if "seconds" in row else "",
    )
    return row["direction"], row["test"], *numbers


def read_tatoeba(data: Path, split: str = "test") -> Iterator[TestSet]:
    for lang in ("de", "fr", "zh"):
        sides = read_sides(data / "tatoeba", f"en-{lang}.{split}", lang)
        scripts = data / "tatoeba" / f"en-zh.{split}.script.xz"
        written = [lang] * len(sides[lang])
        if lang == "zh" and split == "test":
            written = [SCRIPTS[line] for line in read_lines(scripts)]
        elif lang == "zh":
            written = ["zh" if is_written_in("zh", line) else "zh-Hant" for line in sides["zh"]]
        yield from both_directions("tatoeba" if split == "test" else "tatoeba val", sides, lang, written)


def read_ntrex(data: Path) -> Iterator[TestSet]:
    for lang in ("de", "fr", "zh"):
        yield from both_directions("ntrex", read_sides(data / "ntrex", "ntrex", lang), lang)
    sides = {
        "en": list(read_lines(data / "ntrex" / "ntrex.en.xz")),
        "zh-Hant": list(read_lines(data / "ntrex" / "ntrex.zh-TW.xz")),
    }
    yield from both_directions("ntrex", sides, "zh-Hant")


def read_valid(data: Path) -> Iterator[TestSet]:
    for lang in ("de", "fr", "zh"):
        yield from both_directions("docs valid", read_sides(data / f"docs-en-{lang}", "valid", lang), lang)
    yield from both_directions("europarl val", read_sides(data / "europarl-en-de", "val", "de"), "de")


def read_sides(folder: Path, name: str, lang: str) -> dict[str, list[str]]:
    return {side: list(read_lines(folder / f"{name}.{side}.xz")) for side in ("en", lang)}


def both_directions(
    name: str, sides: dict[str, list[str]], lang: str, languages: list[str] | None = None
) -> Iterator[TestSet]:
    languages = languages or [lang] * len(sides["en"])
    yield TestSet(name, sides["en"], sides[lang], f"en>{lang}", languages)
    yield TestSet(name, sides[lang], sides["en"], f"{lang}>en", languages)


SETS: dict[str, Callable[[Path], Iterator[TestSet]]] = {
    "tatoeba": read_tatoeba,
    "ntrex": read_ntrex,
    "valid": read_valid,
    "tatoeba-valid": partial(read_tatoeba, split="val"),
}


def select_known(translator: Translator, every: Iterator[TestSet]) -> Iterator[TestSet]:
    """Return the tests in the model's directions; a baseline has one."""
    directions = translator.directions or (f"{translator.source}>{translator.target}",)
    return (test for test in every if test.direction in directions)


def score_test_set(translator: Translator, test: TestSet, beam: int) -> list[dict[str, Any]]:
    """Return the scores of all lines together and, if there are several scripts, of each alone (without its time)."""
    start = time.time()
    english = test.direction.endswith(">en")
    translations = translate_lines(
        translator, test.source, ["en"] * len(test.source) if english else test.languages, beam
    )
    seconds = time.time() - start
    rows = []
    for name, chosen in group_by_language(test.languages).items():
        lines = [[side[i] for i in chosen] for side in (translations, test.target, test.source)]
        found = score_translations(*lines, "en" if english else test.languages[0])
        rows.append(
            {"direction": test.direction, "test": f"{test.name} {name}".strip(), "sentences": len(chosen), "beam": beam}
            | {"bleu": found.bleu.value, "bleu_signature": found.bleu.signature}
            | {"chrf": found.chrf.value, "chrf_signature": found.chrf.signature}
            | ({} if name else {"seconds": seconds})
        )
    return rows[::-1]  # all lines together come last


def group_by_language(languages: list[str]) -> dict[str, list[int]]:
    """Return the line numbers of all lines and, if there are several languages, of each language."""
    every = {"": list(range(len(languages)))}
    several = dict.fromkeys(languages) if len(set(languages)) > 1 else {}
    return every | {name: [i for i, own in enumerate(languages) if own == name] for name in several}


def translate_lines(translator: Translator, texts: list[str], languages: list[str], beam: int) -> list[str]:
    translations = [""] * len(texts)
    for language in dict.fromkeys(languages):
        chosen = [i for i, own in enumerate(languages) if own == language]
        to = language if translator.directions else None  # a baseline has a single direction
        found = translator.translate_sentences([texts[i] for i in chosen], to=to, beam=beam)
        for i, translation in zip(chosen, found, strict=True):
            translations[i] = " ".join(translation.text.splitlines())
    return translations


if __name__ == "__main__":
    main()
