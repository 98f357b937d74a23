"""What `regard translate` and `regard evaluate` do."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from regard import config as configs
from regard.cli import stdin_lines
from regard.data.corpus import Corpus, read_lines
from regard.errors import RegardError
from regard.evaluate.report import evaluate, save_hypotheses
from regard.files import write_text
from regard.progress import progress_bar
from regard.translator import Translation, load


def translate_command(
    texts: list[str] | None,
    model: Path | None,
    input: Path | None,
    output: Path | None,
    as_json: bool,
    device: str,
    options: dict[str, Any],
) -> None:
    if model is None:
        raise RegardError(
            "no model given: train one (`make demo` makes runs/toy-en-de) and pass it with --model FOLDER"
        )
    if texts and input:
        raise RegardError("give sentences or --input FILE, not both")
    translator = load(model, device)
    lines = texts or list(read_lines(input) if input else stdin_lines())
    with progress_bar("translating", len(lines)) as advance:
        results = translator.translate(lines, progress=advance, **options)
    written = "".join(_render(line, result, as_json) for line, result in zip(lines, results, strict=True))
    for line, result in zip(lines, results, strict=True):
        if not result.ended:
            print(f"regard: cut off at the length limit: {line!r} (raise decode.max_len_b)", file=sys.stderr)
    if output:
        write_text(output, written)
    else:
        sys.stdout.write(written)


def _render(source: str, result: Translation, as_json: bool) -> str:
    if as_json:
        return json.dumps({"source": source, **dataclasses.asdict(result)}, ensure_ascii=False) + "\n"
    if result.nbest:
        return "".join(f"{t.score:.4f}\t{t.text}\n" for t in result.nbest)
    return result.text + "\n"


def evaluate_command(
    run: Path,
    data: str | None,
    root: Path | None,
    output: Path | None,
    as_json: bool,
    device: str,
    options: dict[str, Any],
) -> None:
    translator = load(run, device)
    specs, folder = _test_corpus(run, data, root)
    corpus = Corpus(specs, translator.source, translator.target, folder, "test")
    count = sum(1 for _ in corpus.pairs())
    with progress_bar("translating", count) as advance:
        result = evaluate(translator, corpus, advance, **options)
    kept = output or run / "hypotheses" / f"{Path(specs[0]).name.split('.')[0].replace(':', '-')}.{translator.target}"
    save_hypotheses(kept, result.hypotheses)
    if as_json:
        print(json.dumps({**result.to_dict(), "corpus": list(specs), "hypotheses": str(kept)}, ensure_ascii=False))
    else:
        print(result.table())
        print(f"hypotheses in {kept}", file=sys.stderr)


def _test_corpus(run: Path, data: str | None, root: Path | None) -> tuple[tuple[str, ...], Path]:
    """The corpus asked for, else the one the run's recipe names."""
    recipe = run / "config.toml"
    settings = (
        configs.build(configs.load(recipe), configs.Config).data if recipe.exists() else configs.DataConfig(test=())
    )
    specs = (data,) if data else settings.test
    if not specs:
        raise RegardError(f"{run} names no test corpus: give one with --data, such as --data 'test.{{lang}}.xz'")
    return specs, root or Path(settings.root if not data or recipe.exists() else ".")
