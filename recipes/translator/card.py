"""Stage 8: the model card of the shipped model: data and their licenses, training, scores and weaknesses.

    python recipes/translator/card.py OUT --work WORK --scores FILE... [--teacher TEACHER] --judged NAME --flops 4.2e17 \\
        --minutes 21 [--gpu "one H200"]

OUT is the folder that pack.py wrote, TEACHER the run or folder of its teacher; without it, OUT is a model that teacher.toml
trained on what people wrote, without distillation. FILEs are what score.py wrote for either of
them; scores of other weights are refused. NAME is what the model is called in judgements.toml. FLOPs and minutes are those
of all trainings and of the teacher's translations together. Only README.md and the checksums of OUT are changed.
"""

from __future__ import annotations

import argparse
import shutil
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from formality import FORMS
from judge import FAILURE, read_judgements, read_sentences

from regard import model_folder
from regard.config import Config, recipes
from regard.data.parallel_corpus import ParallelCorpus, parse_direction
from regard.files import MANIFEST, atomic_folder, read_json, sha256

HERE = Path(__file__).parent
LANGUAGES = ("de", "fr", "zh", "zh-Hant")
KINDS = {  # of sets, in the order of the table
    "tatoeba": "everyday sentences (Tatoeba)",
    "europarl": "speeches (European Parliament)",
    "prose": "stories, news, law, guides",
    "docs": "software documentation",
    "copies": "some of these again, with other names, numbers and placeholders",
    "words": "single words, a lexicon learned from the pairs",
    "titled": "everyday sentences With Some Capitals, from English",
    "formality": "pairs by form of address (du or Sie, tu or vous), from English",
    "distillation": "people's sentences and the teacher's translations",
    "back-translation": "the same pairs, from the teacher's translations to people's sentences",
}
OPUS_MT = {  # published BLEU / chrF, on the first 10,000 sentences at most
    ("en>de", "tatoeba"): "43.7 / 64.4",
    ("en>fr", "tatoeba"): "53.1 / 69.5",
    ("fr>en", "tatoeba"): "60.0 / 74.1",
    ("en>zh", "tatoeba zh"): "34.3 / 29.1",
    ("en>zh", "tatoeba zh-Hant"): "35.3 / 30.1",
}
# Edit these when the model is judged.
WEAKNESSES = (
    "News, medicine, trade and slang are rare in the training data: there it is worse than with everyday sentences, "
    "speeches and software documentation.",
    "Chinese has the least data, and most of it is software documentation: *resolution* of a parliament becomes that of a "
    "screen. Traditional Chinese is, but for everyday sentences, simplified Chinese converted by OpenCC.",
    "Between German, French and Chinese there is no direction of its own: these go by way of English.",
    "Each sentence is translated by itself: a pronoun does not know what it stands for.",
    "Names outside the data may be spelled differently, above all in Chinese.",
    "It repeats what its data says about people, and can be wrong where it sounds sure: do not rely on it where "
    "that matters.",
)
WITH_TEACHER = """A larger model, the teacher, learns from what people wrote. It translates {made:,} sentences:
{from_english:,} from English, whatever corpus they are from, and {to_english:,} to English. The student begins as the
teacher without most of its decoder layers, and is trained further on what people wrote, on the teacher's translations
as targets (sequence-level distillation, Kim and Rush 2016) and on the teacher's translations as sources
(back-translation, Sennrich et al. 2016). {synthetic:.0%} of the pairs that it reads are such translations.
`recipes/translator` in the repository of Regard has all steps."""
WITHOUT_TEACHER = """The model learned from what people wrote, by `recipes/translator/teacher.toml` in the repository of
Regard with the sizes above. It has no teacher: the distillation and back-translation of that recipe were not done for
these weights."""
CARD = """---
language: [{languages}]
license: cc-by-sa-4.0
pipeline_tag: translation
library_name: regard
---
# {name}

One Transformer for {directions}: the bundled translation model of Regard. `regard translate "I ate an apple."` uses it.
{forms}
| | |
|---|---|
| model | {model} |
| vocabulary | {vocabulary:,} byte-level pieces, one token for each target language |
| on disk | int8 weights with a scale for each row; norms and biases in fp16 |
{teacher}| training | {flops:.2g} FLOPs, {minutes:g} minutes of {gpu}{included} |
| license | CC-BY-SA 4.0 ([why](#license)) |

## Training

{trained}

## Data

| pairs of English and | German | French | Chinese | traditional Chinese | share of the pairs read |
|---|---:|---:|---:|---:|---:|
{sets}

- Shares are by the weights of `recipes/translator/{recipe}`; most sets are read in both directions.
{encyclopedia}- No sentence of a test or validation set is trained on, on either side:
  `recipes/translator/check.py` compares whole lines. At least 233 of the 8,926 Chinese test lines of Tatoeba are in the
  training data in the other script, with another English sentence.

### Sources

| source | German | French | Chinese | license | attribution |
|---|---:|---:|---:|---|---|
{sources}

Numbers are pairs before the filters of the recipe. A license with † is from general knowledge; the others were read
where the texts were taken from. SA: some or all of the texts have a license that what is derived from them must have
too.

## License

These weights are offered under CC-BY-SA 4.0: you may use, change and pass them on, also commercially, if you keep the
attributions above and pass changed weights on under the same license. Regard's code has a license of its own, Apache
2.0.

- {copyleft:.0%} of the pairs that people wrote are from sources marked SA. Their licenses (CC-BY-SA 2.5 to 4.0, GPL,
  LGPL, MPL, GFDL) ask for the same license of what is derived from the texts. Whether weights are derived from the
  texts that they were trained on is not settled. Where they are, CC-BY-SA 4.0 is what CC-BY-SA of any version allows.
- It cannot replace the GPL, LGPL, MPL and GFDL: texts under these keep their licenses. This folder holds none of the
  texts.
- The repository of the speeches states no license; the European Parliament allows reuse with acknowledgement.
- To do without a source, leave its lines out of the training data, which name the source of each line, and run the
  recipe again.

## Scores

BLEU / chrF of sacreBLEU. NTREX-128 (news) and Tatoeba (everyday sentences) are tests; `valid` and `val` are validation
sets. Chinese is translated to the script of each line. *OPUS-MT*: the figures that it publishes, on the first 10,000
sentences at most, of models trained on far more text.

{scores}

{signatures}

### A hundred sentences, judged by hand

Business, travel, medicine, law, computing and small talk, from 0 (nonsense) to 5 points (nothing to change).
Sentences, outputs and faults are in the repository: `tests/pretrained/hundred.toml`,
`recipes/translator/judgements.toml`.

| model | mean | {failure} points or fewer |
|---|---:|---:|
{judged}

## Weaknesses

{weaknesses}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--scores", type=Path, nargs="+", required=True, help="files of score.py, of OUT and its teacher"
    )
    parser.add_argument("--teacher", type=Path, help="run or model folder of the teacher, if it has one")
    parser.add_argument("--judged", required=True, help="name of the model in judgements.toml")
    parser.add_argument("--flops", type=float, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--gpu", default="one H200")
    given = parser.parse_args()
    text = CARD.format(
        name=given.out.name,
        **describe_models(given.out, given.teacher),
        **describe_data(given.work, with_teacher=given.teacher is not None),
        **describe_sources(),
        **describe_scores(given.scores, given.out, given.teacher),
        judged=format_judgements(given.judged),
        failure=FAILURE,
        weaknesses="\n".join(f"- {weakness}" for weakness in WEAKNESSES),
        flops=given.flops,
        minutes=given.minutes,
        gpu=given.gpu,
    )
    with atomic_folder(given.out) as draft:
        for name in read_json(given.out / MANIFEST)["sha256"]:
            shutil.copy(given.out / name, draft)
        (draft / "README.md").write_text(text, encoding="utf-8")
    (given.out / MANIFEST).chmod(0o644)
    print(f"{given.out / 'README.md'}: {len(text.splitlines())} lines")


# ---- models ----------------------------------------------------------------------------------------------------------


def describe_models(out: Path, teacher: Path | None) -> dict[str, Any]:
    student = model_folder.load(out, torch.device("cpu"), "fp32")
    larger = model_folder.load(teacher, torch.device("cpu"), "fp32") if teacher else None
    plain = [direction for direction in student.directions if not direction.endswith(FORMS)]
    forms = [direction.split(">")[1] for direction in student.directions if direction.endswith(FORMS)]
    asked = f"The target languages {', '.join(forms)} ask for a form of address.\n" if forms else ""
    return {
        "languages": ", ".join(dict.fromkeys(language for direction in plain for language in direction.split(">"))),
        "directions": ", ".join(plain),
        "forms": asked,
        "vocabulary": student.config.source_vocab,
        "model": format_size(student),
        "teacher": f"| teacher | {format_size(larger)} |\n" if larger else "",
        "included": ", teacher and its translations included" if larger else "",
    }


def format_size(package: model_folder.ModelPackage) -> str:
    parameters, config = sum(p.numel() for p in package.model.parameters()), package.config
    layers = f"{config.n_encoder_layers} encoder and {config.n_decoder_layers} decoder layers of width {config.d_model}"
    return f"{parameters:,} parameters: {layers}, one embedding matrix for everything"


# ---- data ------------------------------------------------------------------------------------------------------------


def describe_data(work: Path, with_teacher: bool) -> dict[str, Any]:
    """Return how the model was trained, and the pairs of each kind of set by language with its share of an epoch."""
    recipe = "student.toml" if with_teacher else "teacher.toml"
    report = {name: counts["kept"] for name, counts in read_json(work / "report.json").items()}
    made = {path.parent.name: read_json(path)["counts"]["kept"] for path in sorted(work.glob("made-*/made.json"))}
    data = recipes.load(HERE / recipe)["data"]
    corpus = ParallelCorpus(recipes.build({"data": data}, Config).data.train, "", "", work)
    pairs: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # of each set, by kind and language
    read = dict.fromkeys(KINDS, 0.0)
    for spec, weight in zip(corpus.specs, corpus.weights, strict=True):
        name, kind, language = classify_corpus(spec)
        amounts = made if name.startswith("made-") else report
        if name not in amounts:
            raise SystemExit(f"{work} has no {name}, which {recipe} reads: run the stages before this one")
        pairs[kind, language][name] = amounts[name]
        read[kind] += weight * amounts[name]
    cells = {
        kind: [f"{sum(pairs[kind, lang].values()):,}" if pairs[kind, lang] else "" for lang in LANGUAGES]
        for kind in KINDS
    }
    total = sum(read.values())
    trained = WITHOUT_TEACHER
    if with_teacher:
        trained = WITH_TEACHER.format(
            synthetic=(read["distillation"] + read["back-translation"]) / total,
            made=sum(made.values()),
            from_english=sum(n for name, n in made.items() if name.startswith("made-en-")),
            to_english=sum(n for name, n in made.items() if name.endswith("-en")),
        )
    encyclopedia = (
        f"- {report['encyclopedia.train']:,} English sentences of an encyclopedia, without translations, are among what the "
        f"teacher translated.\n"
    )
    return {
        "sets": "\n".join(
            format_row(KINDS[kind], *cells[kind], f"{read[kind] / total:.0%}") for kind in KINDS if read[kind]
        ),
        "trained": trained,
        "recipe": recipe,
        "encyclopedia": encyclopedia if with_teacher else "",
    }


def classify_corpus(spec: str) -> tuple[str, str, str]:
    """Return the name of a set in report.json or its folder, its kind and its language beside English."""
    file, direction = parse_direction(spec)
    source, target = direction.split(">")
    language, _, form = (target if source == "en" else source).partition("-")
    language = f"{language}-{form}" if form and form not in FORMS else language
    name = file.split("/")[0].split(".")[0]
    if name.startswith("made-"):
        is_forward = name.startswith(f"made-{source}-{target}")
        return name, "distillation" if is_forward else "back-translation", language
    return f"{name}{f'-{form}' if form in FORMS else ''}.train", name.partition("-")[0], language


def describe_sources() -> dict[str, Any]:
    """Return the table of sources, and the share of the pairs whose source has a copyleft license."""
    sources = tomllib.loads((HERE / "sources.toml").read_text(encoding="utf-8"))["source"]
    pairs = {source["name"]: sum(source.get(lang, 0) for lang in LANGUAGES) for source in sources}
    rows = [
        format_row(
            source["title"] + (", SA" if source["copyleft"] else ""),
            *(f"{source[lang]:,}" if lang in source else "" for lang in LANGUAGES[:3]),
            source["license"] + ("" if source["read"] else " †"),
            source["attribution"],
        )
        for source in sources
    ]
    copyleft = sum(pairs[source["name"]] for source in sources if source["copyleft"])
    return {"sources": "\n".join(rows), "copyleft": copyleft / sum(pairs.values())}


def format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# ---- scores ----------------------------------------------------------------------------------------------------------


def describe_scores(files: list[Path], out: Path, teacher: Path | None) -> dict[str, str]:
    """Return a table with a row for each test and a column for each model, precision and beam, and the signatures."""
    folders = [out, *([teacher] if teacher else [])]
    known = {sha256(model_folder.find(folder) / "model.safetensors"): i for i, folder in enumerate(folders)}
    cells: dict[tuple[str, str, int], dict[tuple[int, str, int], str]] = defaultdict(dict)
    signatures = set()
    for file in files:
        for row in read_json(file):
            if row["weights"] not in known:
                raise SystemExit(
                    f"{file} has scores of other weights than those of {' and '.join(map(str, folders))}: run score.py"
                )
            column = (known[row["weights"]], row.get("precision", ""), row["beam"])
            cells[row["direction"], row["test"], row["sentences"]][column] = f"{row['bleu']:.1f} / {row['chrf']:.1f}"
            signatures |= {row["bleu_signature"], row["chrf_signature"]}
    columns = sorted({column for row in cells.values() for column in row})
    if not any(model == 0 for model, *_ in columns):
        raise SystemExit(f"there are no scores of {out} itself: run score.py")
    names = [
        ", ".join(filter(None, ("teacher" * model, precision, f"beam {beam}"))) for model, precision, beam in columns
    ]
    lines = [
        format_row("direction", "test", "sentences", *names, "OPUS-MT"),
        "|---|---|" + "---:|" * (len(columns) + 2),
    ]
    for (direction, test, sentences), found in cells.items():
        scores = [found.get(column, "") for column in columns]
        lines.append(format_row(direction, test, f"{sentences:,}", *scores, OPUS_MT.get((direction, test), "")))
    return {"scores": "\n".join(lines), "signatures": "\n".join(f"- `{signature}`" for signature in sorted(signatures))}


def format_judgements(name: str) -> str:
    """Return the mean and the failures of the model and of those judged before it, one row each."""
    models, rows = read_judgements(), []
    if name not in models:
        raise SystemExit(f"judgements.toml has no model {name!r}; it has {', '.join(models)}")
    for model, judgements in models.items():
        points = [judgement["points"] for judgement in judgements if "points" in judgement]
        if len(points) == len(read_sentences()):
            label = f"**{model}** (this one)" if model == name else model
            rows.append(format_row(label, f"{mean(points):.2f}", str(sum(p <= FAILURE for p in points))))
        elif model == name:
            raise SystemExit(f"{len(read_sentences()) - len(points)} sentences of {name} are not judged yet: judge.py")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
