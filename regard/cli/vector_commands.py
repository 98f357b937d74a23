"""`regard vectors`: train, query, evaluate, plot and convert word vectors (word2vec).

The options of `train` are the fields of VectorsConfig, whose module imports nothing heavy.
"""

from __future__ import annotations

import json as jsons
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import App, Json, Quiet, choose_output
from regard.config import VectorsConfig
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.vectors.word_vectors import WordVectors

vectors_app = App(help="Train, query, evaluate, plot and convert word vectors.", no_args_is_help=True)

DEFAULT = VectorsConfig()
HELP = {f.name: f.metadata["help"] for f in fields(VectorsConfig)}


def setting(name: str) -> Any:
    """Return the option of a setting of VectorsConfig."""
    return typer.Option(help=HELP[name])


@vectors_app.command("train")
def vectors_train(
    files: Annotated[list[Path], typer.Argument(help="Text, a sentence a line: plain, .gz/.xz/.zst, or .jsonl.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder or file to write; by default vectors.")
    ] = None,
    model: Annotated[str, setting("model")] = DEFAULT.model,
    loss: Annotated[str, setting("loss")] = DEFAULT.loss,
    dim: Annotated[int, setting("dim")] = DEFAULT.dim,
    window: Annotated[int, setting("window")] = DEFAULT.window,
    shrink_windows: Annotated[bool, setting("shrink_windows")] = DEFAULT.shrink_windows,
    negatives: Annotated[int, setting("negatives")] = DEFAULT.negatives,
    noise_power: Annotated[float, setting("noise_power")] = DEFAULT.noise_power,
    min_count: Annotated[int, setting("min_count")] = DEFAULT.min_count,
    max_vocab: Annotated[int, setting("max_vocab")] = DEFAULT.max_vocab,
    lowercase: Annotated[bool, setting("lowercase")] = DEFAULT.lowercase,
    subsample: Annotated[float, setting("subsample")] = DEFAULT.subsample,
    subsample_rule: Annotated[str, setting("subsample_rule")] = DEFAULT.subsample_rule,
    spread: Annotated[float, setting("spread")] = DEFAULT.spread,
    epochs: Annotated[int, setting("epochs")] = DEFAULT.epochs,
    lr: Annotated[float, setting("lr")] = DEFAULT.lr,
    min_lr_share: Annotated[float, setting("min_lr_share")] = DEFAULT.min_lr_share,
    cbow_gradient: Annotated[str, setting("cbow_gradient")] = DEFAULT.cbow_gradient,
    threads: Annotated[int, setting("threads")] = DEFAULT.threads,
    seed: Annotated[int, setting("seed")] = DEFAULT.seed,
    device: Annotated[str, setting("device")] = DEFAULT.device,
    batch: Annotated[int, setting("batch")] = DEFAULT.batch,
    quiet: Quiet = False,
) -> None:
    """Train word vectors on plain text, split at white space."""
    given = {name: value for name, value in locals().items() if name in HELP}
    target = choose_output(output, "vectors", files, folder=True)

    from regard.config.recipes import build
    from regard.vectors.formats import check_target
    from regard.vectors.word2vec import train

    check_target(target)  # before training, whose result would be lost
    trained = train(files, build(given, VectorsConfig, "vectors."), quiet=quiet)
    trained.word_vectors().save(target)
    print(f"{target}: {trained.describe()}")


# ---- trained vectors -------------------------------------------------------------------------------------------------

Vectors = Annotated[Path, typer.Argument(help="Word vectors: a folder, or a word2vec or GloVe file (.gz/.xz/.zst).")]
Most = Annotated[int, typer.Option("--words", "-n", help="Number of words.")]


@vectors_app.command("nearest")
def vectors_nearest(
    vectors: Vectors,
    words: Annotated[list[str], typer.Argument(help="One or more words.")],
    n: Most = 10,
    json: Json = False,
) -> None:
    """Print the words nearest to a word, by cosine similarity."""
    loaded = load(vectors)
    found = {word: loaded.nearest(word, n) for word in words}
    if json:
        return print_json({word: pairs(near) for word, near in found.items()})
    for word, near in found.items():
        print_found(near, word if len(words) > 1 else "")


@vectors_app.command("analogy")
def vectors_analogy(
    vectors: Vectors,
    a: Annotated[str, typer.Argument(help="The first word of the known pair.")],
    b: Annotated[str, typer.Argument(help="The second word of the known pair.")],
    c: Annotated[str, typer.Argument(help="The first word of the other pair.")],
    n: Most = 10,
    method: Annotated[str, typer.Option(help="add: nearest to b - a + c; mul: greatest cos b cos c / cos a.")] = "add",
    json: Json = False,
) -> None:
    """Answer the analogy A : B = C : ?, such as man king woman."""
    found = load(vectors).analogy(a, b, c, n, method)
    if json:
        return print_json({"a": a, "b": b, "c": c, "method": method, "answers": pairs(found)})
    print_found(found)


@vectors_app.command("similarity")
def vectors_similarity(
    vectors: Vectors,
    a: Annotated[str, typer.Argument(help="A word.")],
    b: Annotated[str, typer.Argument(help="Another word.")],
    json: Json = False,
) -> None:
    """Print the cosine similarity of two words, and the second's rank."""
    loaded = load(vectors)
    cosine, rank = loaded.similarity(a, b), loaded.rank(a, b) if a != b else 0
    if json:
        return print_json({"a": a, "b": b, "similarity": cosine, "rank": rank})
    print(f"{cosine:.4f}" + (f"  ({b} is number {rank:,} of the {len(loaded) - 1:,} words near {a})" if rank else ""))


@vectors_app.command("evaluate")
def vectors_evaluate(
    vectors: Vectors,
    analogies: Annotated[
        list[Path] | None, typer.Option(help="A file of questions, such as questions-words.txt.")
    ] = None,
    similarity: Annotated[
        list[Path] | None, typer.Option(help="A file of word, word, score, separated by tabs.")
    ] = None,
    cut: Annotated[
        int, typer.Option(help="Use only the first so many words; the demo of word2vec.c uses 30000.")
    ] = 300_000,
    method: Annotated[str, typer.Option(help="How analogies are solved: add or mul.")] = "add",
    json: Json = False,
) -> None:
    """Evaluate on analogies and on human similarity judgements.

    Words are compared without case; questions with unknown words are counted.
    """
    from regard.evaluate import word_similarity as score

    if not analogies and not similarity:
        raise RegardError(
            "nothing to evaluate on: give --analogies FILE, --similarity FILE, or both, as often as needed"
        )
    loaded = load(vectors)
    asked = {path.name: score.evaluate_analogies(loaded, path, cut, method) for path in analogies or []}
    sets = [score.evaluate_similarity(loaded, path, cut) for path in similarity or []]
    if not json:
        return print(score.format_table(loaded, cut, asked, sets))
    shown = {name: [s.to_dict() for s in [*given, *score.summarize(given)]] for name, given in asked.items()}
    about = {"words": len(loaded), "dim": loaded.dim, "cut": min(cut, len(loaded)), "method": method}
    print_json({**about, "analogies": shown, "similarity": [s.to_dict() for s in sets]})


@vectors_app.command("plot")
def vectors_plot(
    vectors: Vectors,
    words: Annotated[
        list[str] | None, typer.Argument(help="Words, or man:woman for a connected pair; by default the first words.")
    ] = None,
    n: Most = 50,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png or .svg file; by default words.png.")
    ] = None,
    json: Json = False,
) -> None:
    """Plot words on the first two principal components of their vectors."""
    from regard.look.word_vector_plot import plot_words

    if output and output.suffix.lower() not in (".png", ".svg"):
        raise RegardError(f"a picture is a .png or .svg file, not {output}")
    drawn = plot_words(load(vectors), words or (), n)
    if output or not json:
        target = choose_output(output, "words.png", [vectors])
        drawn.save(target)
    if json:
        return print_json(drawn.numbers())
    print(target)


@vectors_app.command("convert")
def vectors_convert(
    vectors: Vectors,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write: .txt, .vec (text), .bin (binary), + .gz/.xz/.zst; else a folder."
        ),
    ],
    kind: Annotated[str, typer.Option(help="text, binary, glove or folder; by default chosen by the name.")] = "",
    errors: Annotated[str, typer.Option(help="How to treat invalid UTF-8: replace, ignore or strict.")] = "replace",
    n: Annotated[int, typer.Option("--words", "-n", help="Keep only the first so many words; 0 = all.")] = 0,
) -> None:
    """Convert word vectors to another file format."""
    from regard.vectors.word_vectors import WordVectors

    loaded = WordVectors.load(vectors, errors)
    chosen = loaded.first(n) if n else loaded
    target = choose_output(output, "", [vectors], folder=True)
    chosen.save(target, kind)
    print(f"{target}: {len(chosen):,} words of {chosen.dim} numbers")


@vectors_app.command("project")
def vectors_project(
    vectors: Vectors,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for `tensorboard --logdir`; by default projector.")
    ] = None,
    n: Most = 10_000,
) -> None:
    """Write files for TensorBoard's embedding projector."""
    from regard.vectors.formats import write_projector

    target = choose_output(output, "projector", [vectors], folder=True)
    print(f"{target}: {write_projector(load(vectors), target, n):,} words; see them with tensorboard --logdir {target}")


def load(path: Path) -> WordVectors:
    from regard.vectors.word_vectors import WordVectors

    return WordVectors.load(path)


def pairs(found: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"word": word, "score": score} for word, score in found]


def print_found(found: list[tuple[str, float]], title: str = "") -> None:
    if title:
        print(f"{title}:")
    for word, score in found:
        print(f"{score:.4f}  {word}")


def print_json(result: dict[str, Any]) -> None:
    print(jsons.dumps(result, ensure_ascii=False))
