"""The verbs of language models: `generate`, `chat`, `score`; and `embed`, for models of text of any kind.

MERGED: `regard classify`: answers of a trained classifier.
"""

from __future__ import annotations

import dataclasses
import json as jsons
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.inference.generator import Conversation, Generation, Generator, Ranked, TextScore


Model = Annotated[Path, typer.Argument(help="A run or model folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Temperature = Annotated[float | None, typer.Option(help="Above 0: sample; 0 = always the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among tokens that hold this probability.")]
MinP = Annotated[float | None, typer.Option(help="Sample among tokens this many times as likely as the likeliest.")]
Penalty = Annotated[float | None, typer.Option(help="Above 1: tokens already in the text lose.")]
NewTokens = Annotated[int | None, typer.Option(help="Tokens written, at most.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be given again.")]
Seed = Annotated[int | None, typer.Option(help="Of the samples.")]


def generate(
    context: typer.Context,
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Beginnings; without any, lines of stdin.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="Samples of each prompt.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    max_new_tokens: NewTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    json: Json = False,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show words while they are written; by default at a terminal."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Go on with a text. Several results have a line of --- between them; other settings: --decode.min_len 5, ..."""
    from regard.cli.options import stdin_lines
    from regard.inference.generator import load_generator

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    options |= {"repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens}
    chosen = decode_settings(context, options | {"n": n, "stop": stop})
    writer = load_generator(model, device)
    texts = prompts or list(stdin_lines())
    if not texts:
        raise RegardError("no prompt given: pass a text, or lines on stdin")
    alone = len(texts) == 1 and writer.decode_options(**chosen).nbest == 1 and not json
    if stream and not alone:
        raise RegardError("--stream shows one text: give one prompt, without -n and --json")
    if alone and (sys.stdout.isatty() if stream is None else stream):
        show(writer.stream(texts[0], **chosen), texts[0])
    else:
        print_generations(writer, texts, chosen, json)


def decode_settings(context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, by their own names or as --decode.NAME."""
    from regard.cli.options import section_settings

    settings = section_settings(context, "decode")
    if "stop" in settings:
        raise RegardError("--decode.stop is for beam search: a text ends before a string with --stop STRING")
    return {name: value for name, value in given.items() if value not in (None, [])} | settings


def show(pieces: Iterator[str], before: str = "") -> None:
    """Print text while it is written."""
    print(before, end="", flush=True)
    with closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def print_generations(writer: Generator, prompts: list[str], options: dict[str, Any], as_json: bool) -> None:
    from regard.terminal import progress_bar

    with progress_bar("writing", len(prompts)) as advance:
        found = writer.generate(prompts, progress=advance, **options)
    samples = [one for result in found for one in result.samples or (result,)]
    for number, one in enumerate(samples):
        note_cut(one, writer.model.config.max_len)
        if as_json:
            print(
                jsons.dumps(
                    {**dataclasses.asdict(dataclasses.replace(one, samples=())), "ended": one.ended}, ensure_ascii=False
                )
            )
        else:
            print(("---\n" if number else "") + one.prompt + one.text)


def note_cut(one: Generation, max_len: int) -> None:
    if one.end == "context":
        print(f"regard: cut off at the model's {max_len} tokens (model.max_len): {one.prompt!r}", file=sys.stderr)


def chat(
    context: typer.Context,
    model: Model,
    system: Annotated[str, typer.Option(help="What the model reads before the conversation.")] = "",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    max_new_tokens: NewTokens = None,
    seed: Seed = None,
    device: Device = "auto",
) -> None:
    """Talk with a language model. Ctrl-C stops an answer, /reset begins again, Ctrl-D ends."""
    from regard.inference.generator import load_generator

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    options |= {"repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens}
    chosen = decode_settings(context, options)
    talk = load_generator(model, device).chat(system, **chosen)
    talk.writer.decode_options(**chosen)  # wrong settings are said before the first question
    if sys.stdin.isatty():
        print("regard: Ctrl-C stops an answer, /reset begins again, Ctrl-D ends", file=sys.stderr)
    for line in questions():
        if line.strip() == "/reset":
            talk.reset()
        elif line.strip():
            answer(talk, line)


def questions() -> Iterator[str]:
    """Lines of stdin; at a terminal asked for one by one, where Ctrl-C only forgets the line."""
    from regard.cli.options import stdin_lines

    if not sys.stdin.isatty():
        yield from stdin_lines()
        return
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\nregard: Ctrl-D ends", file=sys.stderr)
        except EOFError:
            return print()


def answer(talk: Conversation, line: str) -> None:
    try:
        show(talk.stream(line))
    except KeyboardInterrupt:
        print()
    except RegardError as error:  # a question that is too long is no reason to end the conversation
        print(f"regard: {error}", file=sys.stderr)


def score(
    context: typer.Context,
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of stdin.")] = None,
    continuations: Annotated[
        str | None, typer.Option(help="Compare these ends of the text, with | between: ' an apple| a stone'.")
    ] = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """How likely texts are under a language model, token by token; or which of some ends is likeliest."""
    from regard.cli.options import no_settings, stdin_lines
    from regard.inference.generator import load_generator

    no_settings(context)
    writer = load_generator(model, device)
    given = texts or list(stdin_lines())
    if continuations is None:
        return print_each(writer.score(given), score_table, json)
    for text in given:
        print_each(writer.rank(text, continuations.split("|")), ranked_line, json)


def print_each(results: list[Any], render: Callable[[Any], str], as_json: bool) -> None:
    for result in results:
        print(jsons.dumps(dataclasses.asdict(result), ensure_ascii=False) if as_json else render(result))


def score_table(result: TextScore) -> str:
    lines = [f"{value:9.3f}  {token}" for token, value in zip(result.tokens, result.log_probs, strict=True)]
    total = f"{result.total:9.3f}  log p of {len(result.tokens)} tokens"
    return "\n".join(
        [*lines, f"{total}; perplexity {result.perplexity:.2f}, {result.bits_per_character:.3f} bits a character"]
    )


def ranked_line(result: Ranked) -> str:
    return f"{result.log_prob:9.3f}  {result.probability:7.2%}  {result.per_token:7.3f} a token  {result.text}"


def embed(
    context: typer.Context,
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of stdin.")] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Embed the lines of a file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all vectors there, as .npy.")] = None,
    json: Json = False,
    pooling: Annotated[str | None, typer.Option(help="mean or first token; by default the model's own.")] = None,
    normalise: Annotated[bool, typer.Option(help="Vectors of length 1.")] = True,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")] = False,
    device: Device = "auto",
) -> None:
    """Texts as vectors, a line of numbers each, or all in one file."""
    from regard.cli.options import no_settings, stdin_lines
    from regard.data.parallel_corpus import read_lines
    from regard.inference.embedder import load_embedder
    from regard.terminal import progress_bar

    no_settings(context)
    if texts and input:
        raise RegardError("give texts or --input FILE, not both")
    embedder = load_embedder(model, device)
    given = texts or list(read_lines(input) if input else stdin_lines())
    with progress_bar("embedding", len(given)) as advance:
        vectors = embedder.embed(given, pooling, normalise, truncate, progress=advance)
    if output:
        return save_vectors(output, vectors)
    for text, vector in zip(given, vectors.tolist(), strict=True):
        line = jsons.dumps({"text": text, "vector": vector}, ensure_ascii=False) if json else None
        print(line or " ".join(f"{x:.6g}" for x in vector))


def save_vectors(path: Path, vectors: Any) -> None:
    import numpy as np

    from regard.files import disk_errors

    with disk_errors(path), path.open("wb") as file:
        np.save(file, vectors)
    print(path)


def classify(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder.")],
    items: Annotated[
        list[str] | None, typer.Argument(help="Texts (a tab between those of a pair) or pictures; without any, stdin.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Classify the lines of a file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, with all probabilities.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Say the class, number or tags of each text or picture: one line each, with its probability."""
    from regard.cli.options import no_settings, stdin_lines
    from regard.data.parallel_corpus import read_lines
    from regard.inference.classifier import load_classifier
    from regard.terminal import progress_bar

    no_settings(context)
    if items and input:
        raise RegardError("give texts or --input FILE, not both")
    labeller = load_classifier(model, device)
    lines = items or list(read_lines(input) if input else stdin_lines())
    parts = [(first, second) if tab else first for first, tab, second in (line.partition("\t") for line in lines)]
    with progress_bar("classifying", len(lines)) as advance:
        answers = labeller.classify(parts)
        advance(len(lines))
    for line, answer in zip(lines, answers, strict=True):
        if json:
            print(jsons.dumps({"text": line, **dataclasses.asdict(answer)}, ensure_ascii=False))
        else:
            print(f"{answer}\t{answer.probability:.4f}" if answer.probabilities else answer)
