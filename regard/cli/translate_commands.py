"""`regard translate` and `regard evaluate`."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    Device,
    Json,
    Seed,
    To,
    Weights,
    choose_output,
    decode_options,
    decoding,
    no_collecting,
    print_result,
    stdin_lines,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.config import Config
    from regard.inference.translator import Translation
    from regard.model_folder import ModelPackage

MAX_LINES_NAMED = 10  # in one warning


def translate(
    context: typer.Context,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to translate; by default the lines of stdin.")
    ] = None,
    to: To = None,
    source: Annotated[str | None, typer.Option("--from", help="Source language; by default it is detected.")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="A run or model folder; by default the bundled model.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Translate the lines of this file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
    beam: Annotated[int | None, decoding(help="Beam width; 1 = greedy.")] = None,
    nbest: Annotated[
        int | None, decoding(help="Number of translations of each line, which must be one sentence.")
    ] = None,
    length_penalty: Annotated[float | None, decoding(help="Exponent a in log p(y) / |y|^a.")] = None,
    min_len: Annotated[int | None, decoding(help="Least number of tokens of a translation.")] = None,
    temperature: Annotated[float | None, decoding(help="Sampling temperature; 0 = beam search.")] = None,
    top_k: Annotated[int | None, decoding(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, decoding(help="Sample among tokens that hold this probability.")] = None,
    seed: Seed = None,
) -> None:
    """Translate texts, a file, or stdin.

    regard translate "I ate an apple."

    regard translate --to fr -i letter.txt -o lettre.txt

    The bundled model translates between English and German, French and Chinese. It takes texts of any length and detects
    their language. A model of two languages, such as one that you trained, takes one sentence a line. With --nbest each line
    is: number of the sentence, score, translation. All decode settings can be given: --decode.max_len_b 50, ...
    """
    search = {"beam": beam, "nbest": nbest, "length_penalty": length_penalty, "min_len": min_len}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    with no_collecting():
        from regard.data.parallel_corpus import read_lines
        from regard.files import write_text
        from regard.inference.translator import Translator, bundled_translator
        from regard.text.sentence_splitting import find_code_lines

    options = decode_options(context, **search, **sampling)
    if texts and input:
        raise RegardError("give sentences or --input FILE, not both")
    if not options.get("temperature") and (options.get("top_k") or options.get("top_p")):
        raise RegardError("--top-k and --top-p choose among samples: give a --temperature above 0 too")
    target = choose_output(output, "", [input]) if output else None
    translator = Translator.load(model, device, weights) if model else bundled_translator(device, weights)
    is_text = bool(translator.directions) and options.get("nbest", 1) == 1  # any length, one translation each
    is_interactive = not texts and not input and sys.stdin.isatty()
    if is_interactive:
        print("regard: type a sentence and Enter; Ctrl-D ends", file=sys.stderr)
        batches: Iterator[list[str]] = ([line] for line in stdin_lines())
    else:
        batches = iter([texts or list(read_lines(input) if input else stdin_lines())])
    for lines in batches:
        is_code = find_code_lines(lines) if is_text else [False] * len(lines)
        given = ["" if code else line for line, code in zip(lines, is_code, strict=True)]
        found = translator.translate(given, to, source, quiet=False, **options)
        if is_text:
            found = [replace(t, text=line) if code else t for line, code, t in zip(lines, is_code, found, strict=True)]
            _print_notes(lines, found)
            written = "".join(_render_text(*each, json) for each in zip(lines, found, strict=True))
        else:
            numbered = enumerate(zip(lines, found, strict=True))
            written = "".join(_render_sentence(i, line, t, json) for i, (line, t) in numbered)
        if target and not is_interactive:
            write_text(target, written)
        else:
            print(written, end="", flush=is_interactive)


def _print_notes(lines: list[str], found: list[Translation]) -> None:
    """Print each warning once, with the numbers of the lines that it is about."""
    for note in dict.fromkeys(note for made in found for note in made.notes):
        where = [i for i, made in enumerate(found) if note in made.notes]
        numbers = ", ".join(str(i + 1) for i in where[:MAX_LINES_NAMED])
        numbers += " ..." if len(where) > MAX_LINES_NAMED else ""
        place = f"line{'s' * (len(where) > 1)} {numbers}: " if len(lines) > 1 else ""
        print(f"regard: {place}{note}: {lines[where[0]][:60]!r}", file=sys.stderr)


def _render_text(line: str, found: Translation, as_json: bool) -> str:
    """Return what is printed for a text of any length."""
    if not as_json:
        return found.text + "\n"
    result = {"source": line, "text": found.text, "from": found.source, "to": found.target}
    return json_format.dumps(result, ensure_ascii=False) + "\n"


def _render_sentence(number: int, line: str, found: Translation, as_json: bool) -> str:
    """Return what is printed for a sentence: one line for each translation, whatever characters it holds."""
    if not found.ended:
        print(f"regard: cut off at the length limit: {line!r} (--decode.max_len_b N raises it)", file=sys.stderr)
    if as_json:
        return json_format.dumps({"source": line, **_search_result(found)}, ensure_ascii=False) + "\n"
    if found.nbest:
        return "".join(f"{number}\t{t.score:.4f}\t{_one_line(t.text)}\n" for t in found.nbest)
    return _one_line(found.text) + "\n"


def _search_result(found: Translation) -> dict[str, Any]:
    names = ("text", "score", "log_prob", "tokens", "ended")
    return {name: getattr(found, name) for name in names} | {"nbest": [_search_result(each) for each in found.nbest]}


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def evaluate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run or model folder.")],
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
) -> None:
    """Score a model on a test set, by the metrics of its task.

    Translations: BLEU and chrF with signatures, perplexity, BLEU by length; hypotheses are saved. The columns of labelled
    data may differ from those in training: --data.text_column 6 --data.label_column 5.
    """
    from regard.data.parallel_corpus import ParallelCorpus
    from regard.device import pick_device
    from regard.evaluate import evaluation
    from regard.exchange.loader import load_model
    from regard.files import add_file, write_text
    from regard.inference.translator import Translator
    from regard.tasks import evaluate as evaluate_task
    from regard.terminal import progress_bar

    given = {name: v for name, v in (("beam", beam), ("length_penalty", length_penalty)) if v is not None}
    package = load_model(run, pick_device(device), weights)
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
        found = evaluate_task(package, config, pick_device(device))
        return print_result({"corpus": ", ".join(config.data.test), "loss": found.loss, **found.scores}, json)
    translator = Translator(package)
    specs, language = config.data.test, translator.target
    corpus = ParallelCorpus(specs, translator.source, language, Path(config.data.root), "test")
    target = choose_output(output, "", corpus.files()) if output else None
    with progress_bar("translating") as advance:
        result = evaluation.evaluate(translator, corpus, advance, **dataclasses.asdict(config.decode) | given)
    language = corpus.directions[0].split(">")[1] if corpus.directions else language
    kept = target or run / "hypotheses" / f"{Path(specs[0]).name.split('.')[0].replace(':', '-')}.{language}"
    if json:
        print(
            json_format.dumps({**result.to_dict(), "corpus": list(specs), "hypotheses": str(kept)}, ensure_ascii=False)
        )
    else:
        print(result.table())
    lines = "".join(_one_line(text) + "\n" for text in result.hypotheses)
    if target:
        write_text(kept, lines)
    else:  # entered into a manifest, so that `regard train --overwrite` knows them
        add_file(kept.parent, kept.name, lambda draft: draft.write_text(lines, encoding="utf-8"))
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
