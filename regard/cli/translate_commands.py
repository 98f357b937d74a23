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

from regard.cli.options import Device, Json, Weights, no_collecting, print_result, section_settings, stdin_lines
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
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="A run or model folder; by default the bundled model.")
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="Target language, for a model of several directions.")] = None,
    source: Annotated[str | None, typer.Option("--from", help="Source language; by default it is detected.")] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Translate the lines of this file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 = greedy.")] = None,
    nbest: Annotated[int | None, typer.Option(help="Number of translations of each sentence, with scores.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent a in log p(y) / |y|^a.")] = None,
    min_len: Annotated[int | None, typer.Option(help="Least number of tokens of a translation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 = beam search.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among tokens that hold this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
) -> None:
    """Translate texts, a file, or stdin.

    A model of several languages takes texts of any length, a model of two languages one sentence a line. With --nbest each
    line is: number of the sentence, score, translation. Other decode settings: --decode.max_len_b 50, ...
    """
    options: dict[str, Any] = {"beam": beam, "nbest": nbest, "length_penalty": length_penalty, "min_len": min_len}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options |= section_settings(context, "decode")
    with no_collecting():
        from regard.data.parallel_corpus import read_lines
        from regard.files import write_text
        from regard.inference.translator import load_translator
        from regard.text.sentence_splitting import find_code_lines

    if texts and input:
        raise RegardError("give sentences or --input FILE, not both")
    if not float(options.get("temperature") or 0) and (options.get("top_k") or options.get("top_p")):
        raise RegardError("--top-k and --top-p choose among samples: give a --temperature above 0 too")
    translator = load_translator(*_choose_model(model, device, weights))
    is_text = bool(translator.directions) and options["nbest"] in (None, 1, "1")  # any length, one translation each
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
        if output and not is_interactive:
            write_text(output, written)
        else:
            print(written, end="", flush=is_interactive)


def _choose_model(model: Path | None, device: str, weights: str) -> tuple[Path, str, str]:
    """Return the model asked for, or the bundled model, whose int8 weights stay quantized on a CPU."""
    from regard.device import pick_device
    from regard.pretrained import DEFAULT, bundled_models, bundled_path

    if model is not None:
        return model, device, weights
    if DEFAULT not in bundled_models():
        raise RegardError("no model given: train one (`make toy` makes runs/toy-en-de) and pass it with --model FOLDER")
    on_cpu = pick_device(device).type == "cpu"
    return bundled_path(DEFAULT), device, "int8" if weights == "auto" and on_cpu else weights


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
    specs, target = config.data.test, translator.target
    corpus = ParallelCorpus(specs, translator.source, target, Path(config.data.root), "test")
    with progress_bar("translating") as advance:
        result = evaluation.evaluate(translator, corpus, advance, **dataclasses.asdict(config.decode) | given)
    target = corpus.directions[0].split(">")[1] if corpus.directions else target
    kept = output or run / "hypotheses" / f"{Path(specs[0]).name.split('.')[0].replace(':', '-')}.{target}"
    if json:
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
    """Return the configuration of an evaluation: the run's recipe, if any, with the loaded model and the corpus given."""
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
