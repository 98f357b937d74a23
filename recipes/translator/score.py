"""Stage 7: scores on the published tests: BLEU and chrF in all directions, greedy and by beam, each with its signature.

    python recipes/translator/score.py MODEL DATA [--beam 5] [--out scores.json] [--device auto] [--weights auto]

MODEL is what pack.py made: what is scored is what is shipped. DATA holds tatoeba/ and europarl-en-de/. Chinese is asked for
in the script that a line of the test is in, and scored in both scripts together and in each alone, on characters. What the
model says is scored as it is. Europarl has no test; its validation set stands in.
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
class Test:
    name: str
    source: list[str]
    target: list[str]
    direction: str
    languages: list[str]  # of each line, beside English: de, fr, zh or zh-Hant


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
    for test in known(translator, tests(given.data)):
        for beam in sorted({1, given.beam}):
            rows += scored(translator, test, beam)
            print(f"{test.direction} {test.name} beam {beam}: {rows[-1]['bleu']:.2f}", flush=True)
    if not rows:
        sys.exit(f"nothing was scored: {given.model} translates in no direction of the tests")
    print("\n".join(format_table([HEADER, *map(cells, rows)], 2)))
    print("\n".join(sorted({row[f"{metric}_signature"] for row in rows for metric in ("bleu", "chrf")})))
    if given.out:
        weights = sha256(find(Path(given.model)) / "model.safetensors")  # card.py asks whose scores these are
        write_text(given.out, json.dumps([row | {"weights": weights} for row in rows], indent=1) + "\n")


HEADER = ("direction", "test", "sentences", "beam", "BLEU", "chrF", "seconds")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = (
        f"{row['sentences']:,}",
        str(row["beam"]),
        f"{row['bleu']:.2f}",
        f"{row['chrf']:.2f}",
        f"{row['seconds']:.1f}" if "seconds" in row else "",
    )
    return row["direction"], row["test"], *numbers


def tests(data: Path) -> Iterator[Test]:
    """Both directions of each."""
    for lang in ("de", "fr", "zh"):
        sides = {side: list(read_lines(data / "tatoeba" / f"en-{lang}.test.{side}.xz")) for side in ("en", lang)}
        scripts = data / "tatoeba" / "en-zh.test.script.xz"
        own = [SCRIPTS[line] for line in read_lines(scripts)] if lang == "zh" else [lang] * len(sides["en"])
        yield Test("tatoeba", sides["en"], sides[lang], f"en>{lang}", own)
        yield Test("tatoeba", sides[lang], sides["en"], f"{lang}>en", own)
    sides = {side: list(read_lines(data / "europarl-en-de" / f"val.{side}.xz")) for side in ("en", "de")}
    for source, target in (("en", "de"), ("de", "en")):
        yield Test("europarl val", sides[source], sides[target], f"{source}>{target}", ["de"] * len(sides["en"]))


def known(translator: Translator, every: Iterator[Test]) -> Iterator[Test]:
    """Those in the model's directions; a baseline has one."""
    directions = translator.directions or (f"{translator.source}>{translator.target}",)
    return (test for test in every if test.direction in directions)


def scored(translator: Translator, test: Test, beam: int) -> list[dict[str, Any]]:
    """All lines together, and those of each script alone where there are several; these were not timed by themselves."""
    begun = time.time()
    english = test.direction.endswith(">en")
    said = translated(translator, test.source, ["en"] * len(test.source) if english else test.languages, beam)
    seconds = time.time() - begun
    rows = []
    for name, chosen in parts(test.languages).items():
        lines = [[side[i] for i in chosen] for side in (said, test.target, test.source)]
        found = score_translations(*lines, "en" if english else test.languages[0])  # type: ignore[arg-type, call-arg]
        rows.append(
            {"direction": test.direction, "test": f"{test.name} {name}".strip(), "sentences": len(chosen), "beam": beam}
            | {"bleu": found.bleu.value, "bleu_signature": found.bleu.signature}
            | {"chrf": found.chrf.value, "chrf_signature": found.chrf.signature}
            | ({} if name else {"seconds": seconds})
        )
    return rows[::-1]  # all of them last


def parts(languages: list[str]) -> dict[str, list[int]]:
    """Line numbers: of all, and of each language if there are several."""
    every = {"": list(range(len(languages)))}
    several = dict.fromkeys(languages) if len(set(languages)) > 1 else {}
    return every | {name: [i for i, own in enumerate(languages) if own == name] for name in several}


def translated(translator: Translator, texts: list[str], languages: list[str], beam: int) -> list[str]:
    said = [""] * len(texts)
    for language in dict.fromkeys(languages):
        chosen = [i for i, own in enumerate(languages) if own == language]
        to = language if translator.directions else None  # a baseline knows but one
        found = translator.translate_sentences([texts[i] for i in chosen], to=to, beam=beam)
        for i, translation in zip(chosen, found, strict=True):
            said[i] = " ".join(translation.text.splitlines())
    return said


if __name__ == "__main__":
    main()
