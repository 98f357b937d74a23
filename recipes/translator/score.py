"""Stage 7: BLEU and chrF on the published tests, in all directions, greedy and by beam search, with their signatures.

    python recipes/translator/score.py MODEL DATA [--beam 5] [--out scores.json] [--device auto] [--weights auto]

MODEL is the folder that pack.py wrote, so that the shipped model is scored. DATA holds tatoeba/ and europarl-en-de/. Chinese
is translated to the script of each test line, and scored in both scripts together and in each alone, on characters. Outputs
are scored without post-processing. Europarl has no test set; its validation set stands in.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--weights", default="auto", help="fp32, bf16, ...; on a CPU also int8, what `regard translate` has"
    )
    given = parser.parse_args()
    translator = regard.load(given.model, given.device, given.weights)
    rows = []
    for test in select_known(translator, read_test_sets(given.data)):
        for beam in sorted({1, given.beam}):
            rows += score_test_set(translator, test, beam)
            print(f"{test.direction} {test.name} beam {beam}: {rows[-1]['bleu']:.2f}", flush=True)
    if not rows:
        sys.exit(f"nothing was scored: {given.model} translates in no direction of the tests")
    print("\n".join(format_table([HEADER, *map(format_row, rows)], 2)))
    print("\n".join(sorted({row[f"{metric}_signature"] for row in rows for metric in ("bleu", "chrf")})))
    if given.out:
        weights = sha256(
            find(Path(given.model)) / "model.safetensors"
        )  # card.py checks which model these scores belong to
        write_text(given.out, json.dumps([row | {"weights": weights} for row in rows], indent=1) + "\n")


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


def read_test_sets(data: Path) -> Iterator[TestSet]:
    """Yield every test in both directions."""
    for lang in ("de", "fr", "zh"):
        sides = {side: list(read_lines(data / "tatoeba" / f"en-{lang}.test.{side}.xz")) for side in ("en", lang)}
        scripts = data / "tatoeba" / "en-zh.test.script.xz"
        own = [SCRIPTS[line] for line in read_lines(scripts)] if lang == "zh" else [lang] * len(sides["en"])
        yield TestSet("tatoeba", sides["en"], sides[lang], f"en>{lang}", own)
        yield TestSet("tatoeba", sides[lang], sides["en"], f"{lang}>en", own)
    sides = {side: list(read_lines(data / "europarl-en-de" / f"val.{side}.xz")) for side in ("en", "de")}
    for source, target in (("en", "de"), ("de", "en")):
        yield TestSet("europarl val", sides[source], sides[target], f"{source}>{target}", ["de"] * len(sides["en"]))


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
