"""Judgements by hand of a hundred sentences: the means of each model by domain and direction, and its failures.

    python recipes/translator/judge.py                        # means, and sentences with 2 points or fewer
    python recipes/translator/judge.py translate MODEL NAME   # append the outputs of a model, to be judged

The sentences are in `tests/pretrained/hundred.toml`, the judgements in `judgements.toml` beside this file, whose head has
the scale. `translate` writes outputs without points; the judge adds `points` (0 to 5) and, below 5, `fault`. MODEL is a
folder or the name of a bundled model; NAME is what the model is called in the judgements.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from statistics import mean
from typing import Any

import regard

HERE = Path(__file__).parent
SENTENCES = HERE.parent.parent / "tests" / "pretrained" / "hundred.toml"
JUDGEMENTS = HERE / "judgements.toml"
FAILURE = 2  # points at or below which a translation counts as failed


def read_sentences() -> dict[str, dict[str, str]]:
    """Return the sentences by id, with domain, direction, source, reference and what to watch."""
    return {sentence["id"]: sentence for sentence in tomllib.loads(SENTENCES.read_text(encoding="utf-8"))["sentence"]}


def read_judgements() -> dict[str, list[dict[str, Any]]]:
    """Return the judgements of each model in the order of the file."""
    models: dict[str, list[dict[str, Any]]] = {}
    for judgement in tomllib.loads(JUDGEMENTS.read_text(encoding="utf-8")).get("judgement", []):
        models.setdefault(judgement["model"], []).append(judgement)
    return models


def print_report() -> None:
    """Print a table of means with a column for each model, then the failures of each model."""
    sentences, models = read_sentences(), read_judgements()
    points = {
        name: {judgement["id"]: judgement["points"] for judgement in judgements if "points" in judgement}
        for name, judgements in models.items()
    }
    groups = {"all": list(sentences)}
    for key in ("domain", "direction"):
        for name, sentence in sentences.items():
            groups.setdefault(sentence[key], []).append(name)
    print(f"{'':12}{'sentences':>10}" + "".join(f"{name:>16}" for name in models))
    for group, names in groups.items():
        row = f"{group:12}{len(names):10}"
        for judged in points.values():
            values = [judged[name] for name in names if name in judged]
            row += f"{mean(values):16.2f}" if values else f"{'-':>16}"
        print(row)
    for model, judgements in models.items():
        failures = [judgement for judgement in judgements if judgement.get("points", 5) <= FAILURE]
        missing = len(sentences) - len(points[model])
        print(f"\n{model}: {len(failures)} failures ({FAILURE} points or fewer), {missing} sentences not judged")
        for judgement in failures:
            print(f"  {judgement['points']}  {judgement['id']}: {sentences[judgement['id']]['source']}")
            print(f"     {judgement['output']}\n     {judgement.get('fault', '')}")


def append_outputs(model: str, name: str) -> None:
    """Translate the sentences with `model` as users run it and append the outputs to the judgements as `name`."""
    if name in read_judgements():
        raise SystemExit(f"{JUDGEMENTS.name} already has judgements of {name!r}: choose another name")
    sentences = read_sentences()
    translator = regard.load(model, weights="int8")
    outputs: dict[str, str] = {}
    for direction in dict.fromkeys(sentence["direction"] for sentence in sentences.values()):
        source, target = direction.split(">")
        chosen = {key: sentence["source"] for key, sentence in sentences.items() if sentence["direction"] == direction}
        for key, text in chosen.items():  # one at a time: each sentence is a text of its own
            outputs[key] = str(translator.translate(text, to=target, source=source))
    with JUDGEMENTS.open("a", encoding="utf-8") as file:
        for key in sentences:
            fields = {"model": name, "id": key, "output": outputs[key]}
            lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in fields.items()]
            file.write("\n[[judgement]]\n" + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    translate = commands.add_parser("translate", help="append the outputs of a model, to be judged")
    translate.add_argument("model", help="folder or name of a model")
    translate.add_argument("name", help="what the model is called in the judgements")
    given = parser.parse_args()
    if given.command == "translate":
        append_outputs(given.model, given.name)
    else:
        print_report()


if __name__ == "__main__":
    main()
