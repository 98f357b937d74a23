"""`regard translate` and `regard evaluate`."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from collections import Counter
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    Device,
    Json,
    MaxRestarts,
    Nnodes,
    NodeRank,
    NprocPerNode,
    RdzvEndpoint,
    RdzvId,
    Seed,
    To,
    Weights,
    choose_output,
    decode_options,
    decoding,
    no_collecting,
    print_result,
    quiet_end,
    spinner,
    start_ranks,
)
from regard.cli.rank_output import as_rank
from regard.errors import RegardError
from regard.terminal import progress_bar

if TYPE_CHECKING:
    from regard.config import Config
    from regard.inference.translator import Translation
    from regard.model_folder import ModelPackage
    from regard.process_rank import Rank

MAX_WARNINGS = 10  # of a kind; more are counted


class Format(StrEnum):
    """The formats of files that are translated; those of documents are parsed by regard/documents."""

    auto = "auto"
    lines = "lines"
    text = "text"
    markdown = "markdown"
    html = "html"
    srt = "srt"
    vtt = "vtt"
    po = "po"


class Formality(StrEnum):
    """How a translation addresses people."""

    formal = "formal"
    familiar = "familiar"


def translate(
    context: typer.Context,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to translate; by default the lines of stdin.")
    ] = None,
    to: To = None,
    source: Annotated[str | None, typer.Option("--from", help="Source language; by default it is detected.")] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model", "-m", help="A run or model folder; by default the bundled model. Several are an ensemble."
        ),
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Translate this file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    format: Annotated[
        Format, typer.Option("--format", help="Format of the file; by default by its suffix.")
    ] = Format.auto,
    glossary: Annotated[
        Path | None, typer.Option("--glossary", help="File of terms: term, tab, translation on each line.")
    ] = None,
    formality: Annotated[
        Formality | None,
        typer.Option(
            "--formality", help="Sie and vous, or du and tu; by default formal, unless the source is familiar."
        ),
    ] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
    beam: Annotated[int | None, decoding(help="Beam width; 1 = greedy.")] = None,
    nbest: Annotated[int | None, decoding(help="Number of translations of each text.")] = None,
    length_penalty: Annotated[float | None, decoding(help="Exponent a in log p(y) / |y|^a.")] = None,
    min_len: Annotated[int | None, decoding(help="Least number of tokens of a translation.")] = None,
    temperature: Annotated[float | None, decoding(help="Sampling temperature; 0 = beam search.")] = None,
    top_k: Annotated[int | None, decoding(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, decoding(help="Sample among tokens that hold this probability.")] = None,
    seed: Seed = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "regard",
    max_restarts: MaxRestarts = 0,
) -> None:
    """Translate texts, a file, or stdin.

    regard translate "I ate an apple."

    regard translate --to french -i README.md -o LISEZMOI.md

    The bundled model translates between English, German, French and Chinese. It takes texts of any length and detects
    their language. A model of two languages, such as one that you trained, takes one sentence a line. After Ctrl-C, the
    same command continues the translation of a file. With --nbest each line is: number of the text, score, translation.
    All decode settings can be given: --decode.max_len_b 50, ... Several processes share a file:

    regard translate -i FILE -o FILE --nproc-per-node gpu
    """
    if start_ranks(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, max_restarts):
        return
    search = {"beam": beam, "nbest": nbest, "length_penalty": length_penalty, "min_len": min_len}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    with as_rank() as rank, quiet_end():
        options = decode_options(context, **search, **sampling)
        is_interactive = not texts and not input and sys.stdin.isatty()
        if texts and input:
            raise RegardError("give sentences or --input FILE, not both")
        if texts and format != Format.auto:
            raise RegardError("--format is for files and stdin, not for texts on the command line")
        if output and is_interactive:
            raise RegardError("--output needs texts, --input FILE or a pipe: at a terminal translations are printed")
        if not rank.is_alone and not (input and output):
            raise RegardError("several processes share a file: give --input FILE and --output FILE")
        target = choose_output(output, "", [input, glossary]) if output else None
        with spinner("loading the model"):
            with no_collecting():
                from regard.inference import document_translation as files
                from regard.inference.streaming import ChunkTranslator, Line, read_line_batches, read_stream
                from regard.inference.translator import Translator, bundled_translator

                # A group of processes that was stopped may have left its parts to this one.
                is_shared = not rank.is_alone or (target is not None and Path(f"{target}.parts", "plan.json").is_file())
                if is_shared:
                    from regard.inference import shared_work
            if glossary:
                from regard.text.glossary import Glossary

                options["glossary"] = Glossary.load(glossary)
            own_device = shared_work.set_up_rank(device, rank) if is_shared else device
            translator = (
                Translator.load(model, own_device, weights) if model else bundled_translator(own_device, weights)
            )
        samples = any(options.get(name, getattr(translator.options, name)) for name in ("temperature", "mbr"))
        if not samples and (options.get("top_k") or options.get("top_p")):
            raise RegardError("--top-k and --top-p choose among samples: give a --temperature above 0 too")
        if formality:
            options["formality"] = str(formality)
        style = files.OutputStyle(
            json, options.get("nbest", 1) > 1, has_languages=bool(translator.directions) and not source
        )
        with Warnings(is_numbered=not is_interactive and len(texts or ()) != 1) as warnings:
            if texts:
                options |= {"alignment": True} if json else {}
                found = translator.translate(texts, to, source, quiet=False, **options)
                for number, (text, each) in enumerate(zip(texts, found, strict=True), 1):
                    warnings.observe(number, text, each)
                piece = files.line_piece([Line(number, text, "\n") for number, text in enumerate(texts, 1)])
                return files.write_parts([style.render(piece, style.keep_all(texts, found))], target)
            kind = str(format)
            if format == Format.auto:
                kind = files.choose_format(input, bool(translator.directions)) if input else "lines"
            if style.has_nbest and not json and kind != "lines":
                raise RegardError(f"--nbest has a line for each translation: give --json or --format lines, not {kind}")
            chunks = ChunkTranslator(
                translator, to, source, has_code_blocks=kind == "lines", is_document=kind != "lines", **options
            )
            if input and not files.is_pipe(input):
                with spinner("reading the file"):
                    file = files.TextFile(input, kind)
                    chunks.look_ahead(file.first_texts())
                    sizes = file.chunk_sizes()
                    total = sum(sizes)
                stdout = sys.stdout  # a progress bar replaces it, even where it is no terminal
                with progress_bar("translating", total, quiet=not target and stdout.isatty()) as advance:
                    if not target:
                        parts = files.translate_pieces(
                            file.pieces(), chunks, style, observe=warnings.observe, advance=advance
                        )
                        return files.write_parts(parts, None, stdout)
                    identity = files.translation_identity(
                        input, model, chunks, style, kind, device=device, weights=weights, glossary=glossary
                    )
                    seen: dict[str, Any] = {"observe": warnings.observe, "advance": advance}
                    if is_shared:
                        shared_work.translate_shared(file, target, chunks, style, identity, rank, sizes=sizes, **seen)
                    else:
                        files.translate_file(file, target, chunks, style, identity, total=total, **seen)
                return
            if not rank.is_alone:
                raise RegardError(f"{input} can be read only once: write its content to a file that the ranks share")
            if is_interactive:
                print("regard: type a sentence and Enter; Ctrl-D ends", file=sys.stderr)
            stream = input.open("rb", buffering=0) if input else sys.stdin.buffer
            pieces = files.read_pieces(read_line_batches(*read_stream(stream), str(input or "stdin")), kind)
            if kind != "lines":  # a document, which is complete only at the end of the stream
                pieces = iter(whole := list(pieces))
                chunks.look_ahead([text for piece in whole for text in piece.texts])
            files.write_parts(files.translate_pieces(pieces, chunks, style, observe=warnings.observe), target)


class Warnings:
    """Prints the notes of translations on stderr as they are made, at most MAX_WARNINGS of a kind, then how many more.

    That texts are translated by way of another language is printed once.
    """

    def __init__(self, is_numbered: bool) -> None:
        self.is_numbered = is_numbered
        self.counts: Counter[str] = Counter()
        self.pivots: set[str] = set()

    def __enter__(self) -> Warnings:
        return self

    def __exit__(self, *error: object) -> None:
        for note, count in self.counts.items():
            if count > MAX_WARNINGS:
                print(f"regard: {count - MAX_WARNINGS:,} more: {note}", file=sys.stderr)

    def observe(self, line: int, text: str, translation: Translation) -> None:
        """Print the notes of a translation, with the line of its text where it is one of several."""
        from regard.inference.translator import CUT

        pair, notes = f"{translation.source}>{translation.target}", dict.fromkeys(translation.notes)
        for note in notes if translation.ended else {**notes, CUT: None}:
            if translation.via and note.startswith("translated by way of"):
                if pair not in self.pivots:
                    print(f"regard: {pair} is {note}", file=sys.stderr)
                self.pivots.add(pair)
                continue
            self.counts[note] += 1
            if self.counts[note] <= MAX_WARNINGS:
                place = f"line {line}: " if self.is_numbered else ""
                print(f"regard: {place}{note}: {text[:60]!r}", file=sys.stderr)


def evaluate(
    context: typer.Context,
    run: Annotated[list[Path], typer.Argument(help="A run or model folder; several translators are an ensemble.")],
    data: Annotated[
        str | None, typer.Option(help="Corpus to score, as in a recipe; by default the run's data.test.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the corpus; by default the run's data.root.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; by default the model's own.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent a in log p(y) / |y|^a.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the hypotheses.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "regard",
    max_restarts: MaxRestarts = 0,
) -> None:
    """Score a model on a test set, by the metrics of its task.

    Translations: BLEU and chrF with signatures, perplexity, BLEU by length; hypotheses are saved. The columns of labelled
    data may differ from those in training: --data.text_column 6 --data.label_column 5. Several processes share the
    translations: regard evaluate RUN --nproc-per-node gpu
    """
    if start_ranks(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, max_restarts):
        return
    with as_rank() as rank:
        _evaluate(context, run, data, root, beam, length_penalty, output, json, device, weights, rank)


def _evaluate(
    context: typer.Context,
    runs: list[Path],
    data: str | None,
    root: Path | None,
    beam: int | None,
    length_penalty: float | None,
    output: Path | None,
    json: bool,
    device: str,
    weights: str,
    rank: Rank,
) -> None:
    """Score a model on a test set whose translations this rank shares with others."""
    from regard.data.parallel_corpus import ParallelCorpus
    from regard.device import pick_device
    from regard.evaluate import evaluation
    from regard.files import add_file, write_text
    from regard.inference import shared_work
    from regard.inference.document_translation import work_identity
    from regard.inference.ensemble_loading import load_ensemble
    from regard.inference.translator import Translator
    from regard.tasks import evaluate as evaluate_task

    given = {name: v for name, v in (("beam", beam), ("length_penalty", length_penalty)) if v is not None}
    own_device, run = pick_device(shared_work.set_up_rank(device, rank)), runs[0]
    package = load_ensemble(runs, own_device, weights)
    if package.tokenizers is None and package.task != "image-classification":
        raise RegardError(
            f"the model in {run} has no tokenizer, so it can read no text: import it with its tokenizer.json"
        )
    config = _test_config(run, data, root, package, context.obj)
    if package.task != "translation":
        if output or given:
            raise RegardError(
                f"--output, --beam and --length-penalty are for translations; this is a model for {package.task}"
            )
        if not rank.is_first:
            return
        found = evaluate_task(package, config, own_device)
        return print_result({"corpus": ", ".join(config.data.test), "loss": found.loss, **found.scores}, json)
    translator = Translator(package)
    specs, language = config.data.test, translator.target
    corpus = ParallelCorpus(specs, translator.source, language, Path(config.data.root), "test")
    target = choose_output(output, "", corpus.files()) if output else None
    language = corpus.directions[0].split(">")[1] if corpus.directions else language
    name = Path(specs[0]).name.split(".")[0].replace(":", "-") + (".ensemble" if len(runs) > 1 else "")
    kept = target or run / "hypotheses" / f"{name}.{language}"
    options = dataclasses.asdict(config.decode) | given
    folder = shared_work.parts_folder(kept)
    shared = None
    if not rank.is_alone or shared_work.SharedParts.is_begun(folder):
        identity = work_identity(corpus.fingerprint(), runs, device=device, weights=weights, **options)
        shared = translator.decode = shared_work.SharedDecoding(folder, identity, rank)
    try:
        with progress_bar("translating") as advance:
            result = evaluation.evaluate(translator, corpus, advance, **options)
    except shared_work.ShareFinished:
        return
    if json:
        print(
            json_format.dumps({**result.to_dict(), "corpus": list(specs), "hypotheses": str(kept)}, ensure_ascii=False)
        )
    else:
        print(result.table())
    lines = "".join(" ".join(text.splitlines()) + "\n" for text in result.hypotheses)
    if target:
        write_text(kept, lines)
    else:  # entered into a manifest, so that `regard train --overwrite` knows them
        add_file(kept.parent, kept.name, lambda draft: draft.write_text(lines, encoding="utf-8"))
    if shared:
        shared.finish()
    print(f"hypotheses in {kept}", file=sys.stderr)


def _test_config(
    run: Path, data: str | None, root: Path | None, package: ModelPackage, settings: dict[str, str]
) -> Config:
    """Return the configuration of an evaluation: the run's recipe, if any, with the loaded model and the corpus given."""
    from regard.config import Config, recipes

    recipe = run / "config.toml"
    values = recipes.load(recipe) if recipe.exists() else {}
    values["decode"] = dataclasses.asdict(package.decode)
    config = recipes.build(recipes.override(values, settings), Config)
    specs = (data,) if data else config.data.test
    if not specs:
        raise RegardError(f"{run} names no test data: give some with --data, as a recipe's data.test would")
    place = root or Path(config.data.root)
    return replace(
        config, task=package.task, model=package.config, data=replace(config.data, test=specs, root=str(place))
    )
