"""Stage 4: from a finished run to the folder that Regard brings along.

    python recipes/translator/pack.py RUN OUT --work WORK --scores scores.json --flops 4.2e17 --minutes 21 [--gpu "one H200"]

Weights in bytes, profiles of the languages, and a card. OUT is regard/pretrained/many.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from regard import folder
from regard.data.corpus import read_lines
from regard.text.detect import Profiles, learned

MOST = 40e6  # bytes
SAMPLED = 50_000  # sentences a profile is learned from
PLACES = {"en": "en-de", "de": "en-de", "fr": "en-fr"}
SCORE = "| {direction} | {test} | {sentences:,} | {beam} | {bleu:.1f} | {chrf:.1f} |"
CARD = """---
language: [{languages}]
license: cc-by-2.0
pipeline_tag: translation
library_name: regard
---
# {name}

One Transformer for {directions}: the translator that comes with Regard. `regard translate "I ate an apple."` uses it.

| | |
|---|---|
| parameters | {parameters:,}: {encoder} encoder and {decoder} decoder layers of width {width}, one embedding for all |
| vocabulary | {vocabulary:,} byte-level pieces, one token for each target language |
| on disk | weights of a byte each, with a step for each row; norms and biases in halves |
| trained | {flops:.2g} FLOPs, {minutes:g} minutes of {gpu} |

## Data

{amounts}

- Tatoeba sentences are CC-BY 2.0 FR; attribution: tatoeba.org and manythings.org/anki (pair files), and the Tatoeba
  Challenge of Helsinki-NLP (Chinese, tests).
- Europarl: proceedings of the European Parliament (Multilingual Parallel Direct Europarl, Amponsah-Kaakyire et al. 2021),
  sentences aligned anew.
- No sentence of the tests was trained on, on either side: `recipes/translator/check.py`.

## Scores

| direction | test | sentences | beam | BLEU | chrF |
|---|---|---|---|---|---|
{scores}

{signatures}

## Weaknesses

- It learned short everyday sentences and speeches of a parliament. Technical, legal, medical and colloquial text is worse,
  and so are long sentences: `regard translate` cuts them at commas.
- Between German, French and Chinese there is no direction of its own.
- Each sentence is translated by itself: a pronoun does not know what it stands for, and "you" may change between du and Sie.
- Names outside the data may be spelled anew, above all in Chinese. Links, addresses and other scripts are kept aside.
- It repeats what its data says about people, and can be wrong where it sounds sure: do not rely on it where that matters.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--flops", type=float, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--gpu", default="one H200")
    given = parser.parse_args()
    bundle = folder.load(given.run, torch.device("cpu"), "fp32")
    bundle = replace(bundle, languages=profiles(given.work, bundle.directions))
    told = {"flops": given.flops, "minutes": given.minutes, "gpu": given.gpu}
    counts = json.loads((given.work / "report.json").read_text())
    folder.save(
        given.out, bundle, card(given.out.name, bundle, counts, json.loads(given.scores.read_text()), told), small=True
    )
    for file in given.out.iterdir():
        file.chmod(0o644)  # also for other users, wherever it is installed
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: {size / 1e6:.1f} MB" + (f", more than {MOST / 1e6:.0f}" if size > MOST else ""))


def profiles(work: Path, directions: tuple[str, ...]) -> Profiles:
    """Of the languages that are told apart by their letters; Chinese is by its script."""
    spoken = {language for direction in directions for language in direction.split(">")}
    files = {lang: work / f"{stem}.train.{lang}.xz" for lang, stem in PLACES.items() if lang in spoken}
    return {lang: learned(islice(read_lines(path), SAMPLED)) for lang, path in files.items()}


def card(
    name: str, bundle: folder.Bundle, counts: dict[str, int], scores: list[dict[str, Any]], told: dict[str, Any]
) -> str:
    config = bundle.config
    languages = dict.fromkeys(language for d in bundle.directions for language in d.split(">"))
    sizes = {"encoder": config.n_encoder_layers, "decoder": config.n_decoder_layers, "width": config.d_model}
    return CARD.format(
        name=name,
        languages=", ".join(languages),
        directions=", ".join(bundle.directions),
        parameters=sum(p.numel() for p in bundle.model.parameters()),
        vocabulary=config.source_vocab,
        amounts=amounts(counts),
        scores="\n".join(SCORE.format(**row) for row in scores),
        signatures="\n".join(sorted({f"- `{row[m + '_signature']}`" for row in scores for m in ("bleu", "chrf")})),
        **sizes,
        **told,
    )


def amounts(counts: dict[str, int]) -> str:
    """What prepare.py kept, as a table."""
    names = [key.removesuffix(".train kept") for key in counts if key.endswith(".train kept")]
    rows = [f"| {n} | {counts[f'{n}.train kept']:,} | {counts.get(f'{n}.train added', 0):,} |" for n in names]
    return "\n".join(["| set | pairs | copies with other names, numbers and placeholders |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
