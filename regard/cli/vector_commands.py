"""`regard vectors`: word vectors (word2vec) trained, asked, scored, drawn and converted."""

from __future__ import annotations

import json as jsons
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.config import VectorsConfig
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.vectors.word_vectors import WordVectors

vectors_app = typer.Typer(help="Word vectors: train, ask, score, draw and convert them.", no_args_is_help=True)

DEFAULT = VectorsConfig()
HELP = {f.name: f.metadata["help"] for f in fields(VectorsConfig)}


def of(name: str) -> Any:
    """The option of a setting."""
    return typer.Option(help=HELP[name])


@vectors_app.callback()
def vectors(context: typer.Context) -> None:
    if context.obj:
        raise RegardError(
            f"--{next(iter(context.obj))} does not belong here: `regard vectors train --help` lists options"
        )


@vectors_app.command("train")
def vectors_train(
    files: Annotated[list[Path], typer.Argument(help="Text, a sentence a line: plain, .gz/.xz/.zst, or .jsonl.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the vectors go.")] = Path("vectors"),
    model: Annotated[str, of("model")] = DEFAULT.model,
    loss: Annotated[str, of("loss")] = DEFAULT.loss,
    dim: Annotated[int, of("dim")] = DEFAULT.dim,
    window: Annotated[int, of("window")] = DEFAULT.window,
    shrink_windows: Annotated[bool, of("shrink_windows")] = DEFAULT.shrink_windows,
    negatives: Annotated[int, of("negatives")] = DEFAULT.negatives,
    noise_power: Annotated[float, of("noise_power")] = DEFAULT.noise_power,
    min_count: Annotated[int, of("min_count")] = DEFAULT.min_count,
    max_vocab: Annotated[int, of("max_vocab")] = DEFAULT.max_vocab,
    lowercase: Annotated[bool, of("lowercase")] = DEFAULT.lowercase,
    subsample: Annotated[float, of("subsample")] = DEFAULT.subsample,
    subsample_rule: Annotated[str, of("subsample_rule")] = DEFAULT.subsample_rule,
    spread: Annotated[float, of("spread")] = DEFAULT.spread,
    epochs: Annotated[int, of("epochs")] = DEFAULT.epochs,
    lr: Annotated[float, of("lr")] = DEFAULT.lr,
    min_lr_share: Annotated[float, of("min_lr_share")] = DEFAULT.min_lr_share,
    cbow_gradient: Annotated[str, of("cbow_gradient")] = DEFAULT.cbow_gradient,
    threads: Annotated[int, of("threads")] = DEFAULT.threads,
    seed: Annotated[int, of("seed")] = DEFAULT.seed,
    device: Annotated[str, of("device")] = DEFAULT.device,
    batch: Annotated[int, of("batch")] = DEFAULT.batch,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Learn a vector for each word from plain text, words being what white space separates."""
    given = {name: value for name, value in locals().items() if name in HELP}

    from regard.config.recipes import build
    from regard.vectors.formats import check_target
    from regard.vectors.word2vec import train

    check_target(output)  # before the training, which would be lost
    trained = train(files, build(given, VectorsConfig, "vectors."), quiet=quiet)
    trained.word_vectors().save(output)
    print(f"{output}: {trained.describe()}")


# ---- using them --------------------------------------------------------------------------------------------------

Vectors = Annotated[Path, typer.Argument(help="Word vectors: a folder, or a word2vec or GloVe file (.gz/.xz/.zst).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Most = Annotated[int, typer.Option("--words", "-n", help="How many words.")]


@vectors_app.command("nearest")
def vectors_nearest(
    vectors: Vectors,
    words: Annotated[list[str], typer.Argument(help="One or more words, as they are written there.")],
    n: Most = 10,
    json: Json = False,
) -> None:
    """The words nearest to a word, by cosine."""
    loaded = load(vectors)
    found = {word: loaded.nearest(word, n) for word in words}
    if json:
        return print_json({word: pairs(near) for word, near in found.items()})
    for word, near in found.items():
        print_found(near, word if len(words) > 1 else "")


@vectors_app.command("analogy")
def vectors_analogy(
    vectors: Vectors,
    a: Annotated[str, typer.Argument(help="As this word ...")],
    b: Annotated[str, typer.Argument(help="... is to this one,")],
    c: Annotated[str, typer.Argument(help="so is this one to what?")],
    n: Most = 10,
    method: Annotated[str, typer.Option(help="add: nearest to b - a + c; mul: greatest cos b cos c / cos a.")] = "add",
    json: Json = False,
) -> None:
    """What is to C as B is to A: `regard vectors analogy FILE man king woman`."""
    found = load(vectors).analogy(a, b, c, n, method)
    if json:
        return print_json({"a": a, "b": b, "c": c, "method": method, "answers": pairs(found)})
    print_found(found)


@vectors_app.command("similarity")
def vectors_similarity(
    vectors: Vectors,
    a: Annotated[str, typer.Argument(help="A word.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    json: Json = False,
) -> None:
    """The cosine of two words, and which of the words nearest to the first the second is."""
    loaded = load(vectors)
    cosine, rank = loaded.similarity(a, b), loaded.rank(a, b) if a != b else 0
    if json:
        return print_json({"a": a, "b": b, "similarity": cosine, "rank": rank})
    print(f"{cosine:.4f}" + (f"  ({b} is number {rank:,} of the {len(loaded) - 1:,} words near {a})" if rank else ""))


@vectors_app.command("evaluate")
def vectors_evaluate(
    vectors: Vectors,
    analogies: Annotated[list[Path] | None, typer.Option(help="Questions, such as questions-words.txt.")] = None,
    similarity: Annotated[list[Path] | None, typer.Option(help="Pairs: word, word, score, with tabs.")] = None,
    cut: Annotated[
        int, typer.Option(help="Only the first so many words take part; the C program's demonstration has 30000.")
    ] = 300_000,
    method: Annotated[str, typer.Option(help="How analogies are solved: add or mul.")] = "add",
    json: Json = False,
) -> None:
    """Accuracy on analogies and correlation with what people say, case folded; unknown words are counted."""
    from regard.evaluate import word_similarity as score

    if not analogies and not similarity:
        raise RegardError(
            "nothing to evaluate on: give --analogies FILE, --similarity FILE, or both, as often as needed"
        )
    loaded = load(vectors)
    asked = {path.name: score.analogies(loaded, path, cut, method) for path in analogies or []}
    sets = [score.similarity(loaded, path, cut) for path in similarity or []]
    if not json:
        return print(score.table(loaded, cut, asked, sets))
    shown = {name: [s.numbers() for s in [*given, *score.summary(given)]] for name, given in asked.items()}
    about = {"words": len(loaded), "dim": loaded.dim, "cut": min(cut, len(loaded)), "method": method}
    print_json({**about, "analogies": shown, "similarity": [s.numbers() for s in sets]})


@vectors_app.command("plot")
def vectors_plot(
    vectors: Vectors,
    words: Annotated[
        list[str] | None, typer.Argument(help="Words, or man:woman for two with a line; without any, the first ones.")
    ] = None,
    n: Most = 50,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png or .svg file.")] = Path("words.png"),
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object instead.")] = False,
) -> None:
    """Draw words in the two directions in which their vectors differ most."""
    from regard.look.word_vector_plot import plot_words

    if output.suffix.lower() not in (".png", ".svg"):
        raise RegardError(f"a picture is a .png or .svg file, not {output}")
    drawn = plot_words(load(vectors), words or (), n)
    if json:
        return print_json(drawn.numbers())
    drawn.save(output)
    print(output)


@vectors_app.command("convert")
def vectors_convert(
    vectors: Vectors,
    output: Annotated[
        Path,
        typer.Argument(help="words.txt or .vec (word2vec text), words.bin (binary), + .gz/.xz/.zst; else a folder."),
    ],
    kind: Annotated[str, typer.Option(help="text, binary, glove or folder, whatever the name.")] = "",
    errors: Annotated[str, typer.Option(help="Bytes that are not UTF-8: replace, ignore or strict.")] = "replace",
    n: Annotated[int, typer.Option("--words", "-n", help="Only the first so many words; 0 = all.")] = 0,
) -> None:
    """Read word vectors of any kind and write them as another."""
    from regard.vectors.word_vectors import WordVectors

    loaded = WordVectors.load(vectors, errors)
    chosen = loaded.first(n) if n else loaded
    chosen.save(output, kind)
    print(f"{output}: {len(chosen):,} words of {chosen.dim} numbers")


@vectors_app.command("project")
def vectors_project(
    vectors: Vectors,
    output: Annotated[Path, typer.Argument(help="A folder, for `tensorboard --logdir FOLDER`.")],
    n: Most = 10_000,
) -> None:
    """Write what TensorBoard's embedding projector shows."""
    from regard.vectors.formats import project

    print(f"{output}: {project(load(vectors), output, n):,} words; see them with tensorboard --logdir {output}")


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
