"""`regard generate`, `chat` and `score` for language models, `embed` for models of text, `classify` for classifiers."""

from __future__ import annotations

import dataclasses
import hashlib
import json as jsons
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    Device,
    Json,
    MaxRestarts,
    Model,
    Nnodes,
    NodeRank,
    NprocPerNode,
    RdzvEndpoint,
    RdzvId,
    Seed,
    choose_output,
    decode_options,
    decoding,
    section_settings,
    start_ranks,
    stdin_lines,
)
from regard.cli.rank_output import as_rank
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.inference.generator import Conversation, Generator, Ranked, TextScore
    from regard.process_rank import Rank

Temperature = Annotated[float | None, decoding(help="Sampling temperature; 0 = greedy decoding.")]
TopK = Annotated[int | None, decoding(help="Sample among the k likeliest tokens.")]
TopP = Annotated[float | None, decoding(help="Sample among tokens that hold this probability.")]
MinP = Annotated[float | None, decoding(help="Sample among tokens with this share of the top probability.")]
Penalty = Annotated[float | None, decoding(help="Penalty above 1 for tokens that are already in the text.")]
NewTokens = Annotated[int | None, decoding(help="Greatest number of new tokens.")]
Stop = Annotated[list[str] | None, decoding(help="Stop before this string; may be repeated.")]
Texts = Annotated[list[str] | None, typer.Argument(help="Texts; by default the lines of stdin.")]


# ---- language models -------------------------------------------------------------------------------------------------


def generate(
    context: typer.Context,
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; by default the lines of stdin.")] = None,
    n: Annotated[int | None, decoding("-n", help="Number of samples of each prompt.")] = None,
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
        typer.Option("--stream/--no-stream", help="Print text while it is generated; default at a terminal."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Generate text from a prompt.

    regard generate runs/gpt "Once upon a time" --temperature 0.8 -n 3

    A line of --- separates several results. All decode settings can be given: --decode.min_len 5, ...
    """
    from regard.inference.generator import Generator

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    limits = {"repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens, "n": n, "stop": stop}
    chosen = generation_options(context, **sampling, **limits)
    generator = Generator.load(model, device)
    texts = prompts or list(stdin_lines())
    if not texts:
        raise RegardError("no prompt given: pass a text, or lines on stdin")
    alone = len(texts) == 1 and generator.decode_options(**chosen).nbest == 1 and not json
    if stream and not alone:
        raise RegardError("--stream shows one text: give one prompt, without -n and --json")
    if alone and (sys.stdout.isatty() if stream is None else stream):
        print_stream(generator.stream(texts[0], **chosen), texts[0])
    else:
        print_generations(generator, texts, chosen, json)


def generation_options(context: typer.Context, **given: Any) -> dict[str, Any]:
    """Return the decode options that were given, by their own names or as --decode.NAME."""
    if section_settings(context, "decode").keys() & {"stop", "beam_stop"}:
        raise RegardError("--decode.beam_stop is for beam search: a text ends before a string with --stop STRING")
    return decode_options(context, **given)


def print_stream(pieces: Iterator[str], before: str = "") -> None:
    """Print text while it is generated."""
    print(before, end="", flush=True)
    with closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def print_generations(generator: Generator, prompts: list[str], options: dict[str, Any], as_json: bool) -> None:
    """Generate from each prompt and print the results."""
    from regard.terminal import progress_bar

    with progress_bar("writing", len(prompts)) as advance:
        found = generator.generate(prompts, progress=advance, **options)
    samples = [one for result in found for one in result.samples or (result,)]
    for number, one in enumerate(samples):
        if one.end == "context":
            most = generator.model.config.max_len
            print(f"regard: cut off at the model's {most} tokens (model.max_len): {one.prompt!r}", file=sys.stderr)
        if as_json:
            values = dataclasses.asdict(dataclasses.replace(one, samples=()))
            print(jsons.dumps({**values, "ended": one.ended}, ensure_ascii=False))
        else:
            print(("---\n" if number else "") + one.prompt + one.text)


def chat(
    context: typer.Context,
    model: Model,
    system: Annotated[str, typer.Option(help="System prompt, before the conversation.")] = "",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    max_new_tokens: NewTokens = None,
    seed: Seed = None,
    device: Device = "auto",
) -> None:
    """Chat with a language model: Ctrl-C stops an answer, /reset starts anew."""
    from regard.inference.generator import Generator

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    limits = {"repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens}
    chosen = generation_options(context, **sampling, **limits)
    conversation = Generator.load(model, device).chat(system, **chosen)
    conversation.generator.decode_options(**chosen)  # refuse wrong settings before the first question
    if sys.stdin.isatty():
        print("regard: Ctrl-C stops an answer, /reset begins again, Ctrl-D ends", file=sys.stderr)
    for line in read_questions():
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            print_answer(conversation, line)


def read_questions() -> Iterator[str]:
    """Yield the lines of stdin, with a prompt at a terminal, where Ctrl-C only discards the line."""
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


def print_answer(conversation: Conversation, line: str) -> None:
    """Print the answer to a question while it is generated; Ctrl-C stops it."""
    try:
        print_stream(conversation.stream(line))
    except KeyboardInterrupt:
        print()
    except RegardError as error:  # a question that is too long is no reason to end the conversation
        print(f"regard: {error}", file=sys.stderr)


def score(
    model: Model,
    texts: Texts = None,
    continuations: Annotated[
        str | None, typer.Option(help="Rank these continuations, with | between: ' an apple| a stone'.")
    ] = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Print log-probabilities of texts, or rank continuations of a text."""
    from regard.inference.generator import Generator

    generator = Generator.load(model, device)
    given = texts or list(stdin_lines())
    if continuations is None:
        return print_results(generator.score(given), score_table, json)
    for text in given:
        print_results(generator.rank(text, continuations.split("|")), rank_line, json)


def print_results(results: list[Any], render: Callable[[Any], str], as_json: bool) -> None:
    for result in results:
        print(jsons.dumps(dataclasses.asdict(result), ensure_ascii=False) if as_json else render(result))


def score_table(result: TextScore) -> str:
    """Return a line for each token, and one for the text."""
    lines = [f"{value:9.3f}  {token}" for token, value in zip(result.tokens, result.log_probs, strict=True)]
    total = f"{result.total:9.3f}  log p of {len(result.tokens)} tokens"
    return "\n".join(
        [*lines, f"{total}; perplexity {result.perplexity:.2f}, {result.bits_per_character:.3f} bits a character"]
    )


def rank_line(result: Ranked) -> str:
    return f"{result.log_prob:9.3f}  {result.probability:7.2%}  {result.per_token:7.3f} a token  {result.text}"


# ---- vectors and classes ---------------------------------------------------------------------------------------------


def embed(
    model: Model,
    texts: Texts = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Embed the lines of this file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all vectors to this .npy file.")] = None,
    json: Json = False,
    pooling: Annotated[str | None, typer.Option(help="mean or first token; by default the model's own.")] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")] = False,
    device: Device = "auto",
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "regard",
    max_restarts: MaxRestarts = 0,
) -> None:
    """Embed texts as vectors: a line of numbers each, or one .npy file.

    Several processes share a file: regard embed MODEL -i FILE -o FILE.npy --nproc-per-node gpu
    """
    if start_ranks(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, max_restarts):
        return
    with as_rank() as rank:
        _embed(model, texts, input, output, json, pooling, normalize, truncate, device, rank)


def _embed(
    model: Path,
    texts: list[str] | None,
    input: Path | None,
    output: Path | None,
    json: bool,
    pooling: str | None,
    normalize: bool,
    truncate: bool,
    device: str,
    rank: Rank,
) -> None:
    """Embed texts that this rank shares with others."""
    from regard.data.parallel_corpus import read_lines
    from regard.inference.embedder import Embedder
    from regard.terminal import progress_bar

    if texts and input:
        raise RegardError("give texts or --input FILE, not both")
    if not rank.is_alone and not (input and output):
        raise RegardError("several processes share a file: give --input FILE and --output FILE")
    target = choose_output(output, "", [input]) if output else None
    is_shared = not rank.is_alone or (target is not None and Path(f"{target}.parts", "plan.json").is_file())
    if is_shared:
        from regard.inference import shared_work

        device_of_rank = shared_work.set_up_rank(device, rank)
    embedder = Embedder.load(model, device_of_rank if is_shared else device)
    given = texts or list(read_lines(input) if input else stdin_lines())
    parts = None
    with progress_bar("embedding", len(given)) as advance:
        if is_shared and target:
            from regard.inference.document_translation import work_identity

            digest = hashlib.sha256("\n".join(given).encode()).hexdigest()
            identity = work_identity(digest, model, pooling=pooling, truncate=truncate, device=device)
            folder = shared_work.parts_folder(target)
            try:
                vectors, parts = shared_work.embed_shared(
                    embedder, given, pooling, normalize, truncate, folder, identity, rank, progress=advance
                )
            except shared_work.ShareFinished:
                return
        else:
            vectors = embedder.embed(given, pooling, normalize, truncate, progress=advance)
    if target:
        import numpy as np

        from regard.files import disk_errors

        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                np.save(file, vectors)
        if parts:
            parts.remove()
        if not json:
            return print(target)
    for text, vector in zip(given, vectors.tolist(), strict=True):
        line = jsons.dumps({"text": text, "vector": vector}, ensure_ascii=False) if json else None
        print(line or " ".join(f"{x:.6g}" for x in vector))


def classify(
    model: Model,
    items: Annotated[
        list[str] | None, typer.Argument(help="Texts, pairs (with a tab between) or picture files; by default stdin.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Classify the lines of this file.")] = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Classify texts or pictures, and print one line each.

    A line has the class and its probability, or a number, or the tag of each word, by what the model has learned.
    """
    from regard.data.parallel_corpus import read_lines
    from regard.inference.classifier import Classifier
    from regard.terminal import progress_bar

    if items and input:
        raise RegardError("give texts or --input FILE, not both")
    classifier = Classifier.load(model, device)
    lines = items or list(read_lines(input) if input else stdin_lines())
    parts = [(first, second) if tab else first for first, tab, second in (line.partition("\t") for line in lines)]
    with progress_bar("classifying", len(lines)) as advance:
        predictions = classifier.classify(parts)
        advance(len(lines))
    for line, prediction in zip(lines, predictions, strict=True):
        if json:
            print(jsons.dumps({"text": line, **dataclasses.asdict(prediction)}, ensure_ascii=False))
        else:
            print(f"{prediction}\t{prediction.probability:.4f}" if prediction.probabilities else prediction)
