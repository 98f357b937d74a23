"""Stage 8: the model card of the shipped model, with its scores.

    python recipes/translator/card.py OUT --work WORK --scores scores.json --flops 4.2e17 --minutes 21 [--gpu "one H200"]

OUT is the folder that pack.py wrote and score.py scored; scores of other weights are refused. Only README.md and the
checksums are changed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from phrasebook import load_phrasebook

from regard import model_folder
from regard.config import recipes
from regard.data.parallel_corpus import parse_direction
from regard.files import MANIFEST, atomic_folder, read_json, sha256

Amounts = Mapping[str, int]  # pairs of each set
SETS = ("en-de", "en-fr", "en-zh", "en-zh-Hant", "europarl")
SCORE = "| {direction} | {test} | {sentences:,} | {beam} | {bleu:.1f} | {chrf:.1f} |"
CARD = """---
language: [{languages}]
license: cc-by-2.0
pipeline_tag: translation
library_name: regard
---
# {name}

One Transformer for {directions}: the bundled translation model of Regard. `regard translate "I ate an apple."` uses it.

| | |
|---|---|
| parameters | {parameters:,}: {encoder} encoder and {decoder} decoder layers of width {width}, one embedding for all |
| vocabulary | {vocabulary:,} byte-level pieces, one token for each target language |
| on disk | int8 weights with a scale for each row; norms and biases in fp16 |
| trained | {flops:.2g} FLOPs, {minutes:g} minutes of {gpu} |

## Data

| set | pairs | copies with other names, numbers and placeholders | words | formal | English with capitals |
|---|---|---|---|---|---|
{amounts}

- {both:,} Chinese sentences have no character that tells the scripts apart: these pairs are in both Chinese sets.
- Words are a lexicon learned from the pairs. Formal sentences and dates are put together from a phrasebook of our own,
  a dozen patterns with {terms} entries (`recipes/translator/phrasebook.tsv`).
- Made by the model itself, after its first training: {forth:,} pairs of English that someone wrote ({speeches:,} from
  Europarl) and its own German, French or Chinese, read in that direction (self-distillation) and towards the English
  (back-translation), and {back:,} pairs of its own English and what someone wrote in the other language, read towards
  that (back-translation). They are {share:.0%} of the pairs that the second training reads in one pass.
- Tatoeba sentences are CC-BY 2.0 FR; attribution: tatoeba.org and manythings.org/anki (pair files), and the Tatoeba
  Challenge of Helsinki-NLP (Chinese, tests).
- Europarl: proceedings of the European Parliament (Multilingual Parallel Direct Europarl, Amponsah-Kaakyire et al. 2021),
  sentences aligned anew. Its source states no licence.
- A third and last training reads what people wrote, and the phrasebook, alone.
- No sentence of the tests was trained on, on either side: `recipes/translator/check.py` compares whole lines. At least 233
  of the 8,926 Chinese test lines are in the training data in the other script, with another English sentence.

## Scores

| direction | test | sentences | beam | BLEU | chrF |
|---|---|---|---|---|---|
{scores}

{signatures}

## Weaknesses

- It learned short everyday sentences and speeches of a parliament; in French and Chinese, of these speeches only what it
  made itself, and beside them a phrasebook of formal sentences. Formal text beyond its patterns and terms is often wrong
  there. Technical, legal, medical and colloquial text is worse, and so are long sentences: `regard translate` cuts them at
  commas.
- Between German, French and Chinese there is no direction of its own.
- Each sentence is translated by itself: a pronoun does not know what it stands for, and "you" may change between du and Sie.
- Names outside the data may be spelled anew, above all in Chinese. Links, addresses and other scripts are kept aside.
- It repeats what its data says about people, and can be wrong where it sounds sure: do not rely on it where that matters.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--flops", type=float, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--gpu", default="one H200")
    given = parser.parse_args()
    scores = read_json(given.scores)
    if {row["weights"] for row in scores} != {sha256(given.out / "model.safetensors")}:
        raise SystemExit(f"{given.scores} does not hold scores of {given.out} alone: score it with score.py")
    training = {"flops": given.flops, "minutes": given.minutes, "gpu": given.gpu}
    text = CARD.format(
        name=given.out.name,
        **describe_model(given.out),
        **describe_data(given.work),
        **format_scores(scores),
        **training,
    )
    with atomic_folder(given.out) as draft:
        for name in read_json(given.out / MANIFEST)["sha256"]:
            shutil.copy(given.out / name, draft)
        (draft / "README.md").write_text(text, encoding="utf-8")
    (given.out / MANIFEST).chmod(0o644)
    print(f"{given.out / 'README.md'}: {len(scores)} scores")


def describe_model(out: Path) -> dict[str, Any]:
    package = model_folder.load(out, torch.device("cpu"), "fp32")
    config = package.config
    return {
        "languages": ", ".join(dict.fromkeys(language for d in package.directions for language in d.split(">"))),
        "directions": ", ".join(package.directions),
        "parameters": sum(p.numel() for p in package.model.parameters()),
        "vocabulary": config.source_vocab,
        "encoder": config.n_encoder_layers,
        "decoder": config.n_decoder_layers,
        "width": config.d_model,
    }


def format_scores(scores: list[dict[str, Any]]) -> dict[str, str]:
    signatures = sorted({f"- `{row[m + '_signature']}`" for row in scores for m in ("bleu", "chrf")})
    return {"scores": "\n".join(SCORE.format(**row) for row in scores), "signatures": "\n".join(signatures)}


# ---- the data --------------------------------------------------------------------------------------------------------


def describe_data(work: Path) -> dict[str, Any]:
    """Return how many pairs were prepared and how many are synthetic."""
    report = {name: counts["kept"] for name, counts in read_json(work / "report.json").items()}
    synthetic = {path.parent.name: read_json(path)["counts"]["kept"] for path in sorted(work.glob("made-*/made.json"))}
    back = sum(n for name, n in synthetic.items() if name.endswith("-en"))
    return {
        "amounts": "\n".join(format_row(name, report) for name in SETS),
        "both": report["in both scripts"],
        "terms": sum(map(len, load_phrasebook().values())),
        "forth": sum(synthetic.values()) - back,
        "speeches": sum(n for name, n in synthetic.items() if name.startswith("made-europarl")),
        "back": back,
        "share": get_synthetic_share(report, synthetic),
    }


def format_row(name: str, report: Amounts) -> str:
    kinds = [f"{name}.train", f"{name}.copies.train"] + [
        f"{kind}-{name}.train" for kind in ("words", "formal", "titled")
    ]
    return " | ".join([f"| {name}", *(f"{report[kind]:,}" if kind in report else "" for kind in kinds)]) + " |"


def get_synthetic_share(report: Amounts, synthetic: Amounts) -> float:
    """Return the share of synthetic pairs among those that train_synthetic.toml reads in one epoch."""
    specs = recipes.load(Path(__file__).parent / "train_synthetic.toml")["data"]["train"]
    names = [parse_direction(spec)[0].removesuffix(".{lang}.xz").removesuffix("/train") for spec in specs]
    own = sum(synthetic[name] for name in names if name.startswith("made-"))
    return own / (own + sum(report[name] for name in names if not name.startswith("made-")))


if __name__ == "__main__":
    main()
