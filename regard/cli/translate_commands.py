"""`regard translate` and `regard evaluate`."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Device, Json, Weights, no_collecting, print_result, section_settings, stdin_lines
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.config import Config
    from regard.inference.document_translator import Interpreted, Interpreter
    from regard.inference.translator import Translation, Translator
    from regard.model_folder import ModelPackage

NAMED = 10  # lines, in a warning


def translate_command(
    texts: list[str] | None,
    model: Path | None,
    input: Path | None,
    output: Path | None,
    as_json: bool,
    device: str,
    options: dict[str, Any],
    weights: str,
    to: str | None,
    source: str | None,
) -> None:
    with no_collecting():
        from regard.data.parallel_corpus import read_lines
        from regard.files import write_text
        from regard.inference.translator import load

    if texts and input:
        raise RegardError("give sentences or --input FILE, not both")
    if not float(options.get("temperature") or 0) and (options.get("top_k") or options.get("top_p")):
        raise RegardError("--top-k and --top-p choose among samples: give a --temperature above 0 too")
    translate = _way(load(*_chosen(model, device, weights)), to, source, as_json, options)
    if texts or input or not sys.stdin.isatty():
        written = "".join(translate(texts or list(read_lines(input) if input else stdin_lines())))
        write_text(output, written) if output else sys.stdout.write(written)
        return
    print("regard: type a sentence and Enter; Ctrl-D ends", file=sys.stderr)
    for line in stdin_lines():
        print("".join(translate([line])), end="", flush=True)


def _chosen(model: Path | None, device: str, weights: str) -> tuple[Path, str, str]:
    """The model asked for, or the one that Regard brings along, whose weights are bytes on the disk and stay so on a CPU."""
    from regard.device import pick_device
    from regard.pretrained import DEFAULT, bundled_models, bundled_path

    if model is not None:
        return model, device, weights
    if DEFAULT not in bundled_models():
        raise RegardError("no model given: train one (`make toy` makes runs/toy-en-de) and pass it with --model FOLDER")
    on_cpu = pick_device(device).type == "cpu"
    return bundled_path(DEFAULT), device, "int8" if weights == "auto" and on_cpu else weights


def _way(
    translator: Translator, to: str | None, source: str | None, as_json: bool, options: dict[str, Any]
) -> Callable[[list[str]], Iterator[str]]:
    """Lines to what is printed for them: texts through a model of several directions, or sentences through any."""
    from regard.inference.document_translator import Interpreter

    if translator.directions:
        way = _ranked if int(options.get("nbest") or 1) > 1 else _interpreted
        return lambda lines: way(Interpreter(translator), lines, to, source, as_json, options)
    if source not in (None, translator.source):
        raise RegardError(f"this model translates from {translator.source} to {translator.target}, not from {source}")
    return lambda lines: _translated(translator, lines, to, as_json, options)


def _interpreted(
    interpreter: Interpreter, lines: list[str], to: str | None, source: str | None, as_json: bool, options: Any
) -> Iterator[str]:
    from regard.text.sentence_splitting import find_code_lines

    code = find_code_lines(lines)
    texts = ["" if inside else line for line, inside in zip(lines, code, strict=True)]
    found = interpreter.interpret(texts, to, source, quiet=False, **options)
    _warn(lines, found)
    for line, made, inside in zip(lines, found, code, strict=True):
        text = line if inside else made.text
        said = {"source": line, "text": text, "from": made.source, "to": made.target}
        yield (json_format.dumps(said, ensure_ascii=False) if as_json else text) + "\n"


def _warn(lines: list[str], found: list[Interpreted]) -> None:
    """What may be wrong, once for all lines that have it."""
    for note in dict.fromkeys(note for made in found for note in made.notes):
        where = [i for i, made in enumerate(found) if note in made.notes]
        numbers = ", ".join(str(i + 1) for i in where[:NAMED]) + (" ..." if len(where) > NAMED else "")
        place = f"line{'s' * (len(where) > 1)} {numbers}: " if len(lines) > 1 else ""
        print(f"regard: {place}{note}: {lines[where[0]][:60]!r}", file=sys.stderr)


def _ranked(
    interpreter: Interpreter, lines: list[str], to: str | None, source: str | None, as_json: bool, options: Any
) -> Iterator[str]:
    for i, pair in enumerate(zip(lines, interpreter.several(lines, to, source, **options), strict=True)):
        yield _render(i, *pair, as_json)


def _translated(translator: Translator, lines: list[str], to: str | None, as_json: bool, options: Any) -> Iterator[str]:
    from regard.terminal import progress_bar

    with progress_bar("translating", len(lines)) as advance:
        results = translator.translate(lines, progress=advance, to=to, **options)
    for i, pair in enumerate(zip(lines, results, strict=True)):
        yield _render(i, *pair, as_json)


def _render(index: int, source: str, result: Translation, as_json: bool) -> str:
    """What is printed for one sentence; one line for each translation, whatever characters it holds."""
    if not result.ended:
        print(f"regard: cut off at the length limit: {source!r} (--decode.max_len_b N raises it)", file=sys.stderr)
    if as_json:
        return json_format.dumps({"source": source, **dataclasses.asdict(result)}, ensure_ascii=False) + "\n"
    if result.nbest:
        return "".join(f"{index}\t{t.score:.4f}\t{_one_line(t.text)}\n" for t in result.nbest)
    return _one_line(result.text) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def evaluate_command(
    run: Path,
    data: str | None,
    root: Path | None,
    output: Path | None,
    as_json: bool,
    device: str,
    options: dict[str, Any],
    settings: dict[str, str],
    weights: str,
) -> None:
    from regard.data.parallel_corpus import ParallelCorpus
    from regard.device import pick_device
    from regard.evaluate.evaluation import evaluate
    from regard.exchange.loader import load_model
    from regard.files import add_file, write_text
    from regard.inference.translator import Translator
    from regard.tasks import evaluate as evaluate_task
    from regard.terminal import progress_bar

    package = load_model(run, pick_device(device), weights)
    if package.tokenizers is None and package.task != "images":
        raise RegardError(
            f"the model in {run} has no tokenizer, so it can read no text: import it with its tokenizer.json"
        )
    config = _test_config(run, data, root, package, settings)
    if package.task != "translation":
        if output or any(value is not None for value in options.values()):
            raise RegardError(
                f"--output, --beam and --length-penalty are for translations; this is a model for {package.task}"
            )
        found = evaluate_task(package, config, pick_device(device))
        return print_result({"corpus": ", ".join(config.data.test), "loss": found.loss, **found.scores}, as_json)
    translator = Translator(package)
    specs, target = config.data.test, translator.target
    corpus = ParallelCorpus(specs, translator.source, target, Path(config.data.root), "test")
    options = dataclasses.asdict(config.decode) | {name: value for name, value in options.items() if value is not None}
    with progress_bar("translating") as advance:
        result = evaluate(translator, corpus, advance, **options)
    target = corpus.directions[0].split(">")[1] if corpus.directions else target
    kept = output or run / "hypotheses" / f"{Path(specs[0]).name.split('.')[0].replace(':', '-')}.{target}"
    if as_json:
        print(
            json_format.dumps({**result.to_dict(), "corpus": list(specs), "hypotheses": str(kept)}, ensure_ascii=False)
        )
    else:
        print(result.table())
    lines = "".join(_one_line(text) + "\n" for text in result.hypotheses)
    if output:
        write_text(kept, lines)
    else:  # entered into a manifest, so that `regard train --overwrite` knows them
        add_file(kept.parent, kept.name, lambda draft: draft.write_text(lines, encoding="utf-8"))
    print(f"hypotheses in {kept}", file=sys.stderr)


def _test_config(
    run: Path, data: str | None, root: Path | None, package: ModelPackage, settings: dict[str, str]
) -> Config:
    """The run's recipe, if there is one, with the corpus asked for; the model is the one that was loaded."""
    from regard.config import Config, recipes

    wrong = [name for name in settings if not name.startswith(("data.", "decode."))]
    if wrong:
        raise RegardError(
            f"--{wrong[0]} does not belong here: only --data.NAME and --decode.NAME settings can be given"
        )
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


def translate(
    context: typer.Context,
    texts: Annotated[list[str] | None, typer.Argument(help="Sentences; without any, lines of stdin.")] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="A run or model folder; by default the one that Regard brings along."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Language to translate to, of a model that knows several.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Language of the text; by default it is found out.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Translate the lines of a file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write there instead of stdout.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 = greedy.")] = None,
    nbest: Annotated[int | None, typer.Option(help="Translations for each sentence, with scores.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="a in log p(y) / |y|^a.")] = None,
    min_len: Annotated[int | None, typer.Option(help="Least tokens of a translation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0: sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among tokens that hold this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
) -> None:
    """Translate sentences, a file, or stdin, one sentence a line; with a model of several languages also longer texts.

    With --nbest each line is: number of the sentence, score, translation. Other settings: --decode.max_len_b 50, ...
    """
    options = {"beam": beam, "nbest": nbest, "length_penalty": length_penalty, "min_len": min_len}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    chosen = options | section_settings(context, "decode")
    translate_command(texts, model, input, output, json, device, chosen, weights, to, source)


def evaluate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run or model folder.")],
    data: Annotated[
        str | None, typer.Option(help="Corpus to score, as in a recipe; by default the run's data.test.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the corpus; by default the run's data.root.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; by default the model's own.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="a in log p(y) / |y|^a.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where the hypotheses go.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
) -> None:
    """Score a model on a test set, by the measures of its task.

    Translations: BLEU and chrF with signatures, perplexity, BLEU by length; hypotheses are saved. The columns of labelled
    data may differ from those in training: --data.text 6 --data.label 5.
    """
    options = {"beam": beam, "length_penalty": length_penalty}
    evaluate_command(run, data, root, output, json, device, options, context.obj, weights)
