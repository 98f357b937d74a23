"""`regard tokenizer`: train a tokenizer on text files, and encode and decode with it."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import App, Json, choose_output, stdin_lines
from regard.errors import RegardError

tokenizer_app = App(help="Train and try tokenizers.", no_args_is_help=True)


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[list[Path], typer.Argument(help="Text files, plain or .gz/.xz/.zst.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default tokenizer.json.")
    ] = None,
    kind: Annotated[str, typer.Option(help="char, word, wordpiece, bpe, byte-bpe or unigram.")] = "bpe",
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size, special tokens included.")] = 8000,
    nfc: Annotated[bool, typer.Option(help="Normalize Unicode to NFC.")] = True,
    lowercase: Annotated[bool, typer.Option(help="Lowercase all text.")] = False,
) -> None:
    """Train a tokenizer on text files."""
    from itertools import chain

    from regard.config import TokenizerConfig
    from regard.config.recipes import build
    from regard.data.parallel_corpus import read_lines
    from regard.terminal import count_progress, progress_bar
    from regard.text.tokenizer import Tokenizer

    target = choose_output(output, "tokenizer.json", files)
    values = {"kind": kind, "vocab_size": vocab_size, "nfc": nfc, "lowercase": lowercase}
    config = build(values, TokenizerConfig, "tokenizer.")
    with progress_bar("reading lines") as advance:
        tokenizer = Tokenizer.train(count_progress(chain.from_iterable(map(read_lines, files)), advance), config)
    tokenizer.save(target)
    print(f"{target}: {len(tokenizer):,} pieces")


@tokenizer_app.command("encode")
def tokenizer_encode(
    tokenizer: Annotated[Path, typer.Argument(help="tokenizer.json, or a run or model folder.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; by default the lines of stdin.")] = None,
) -> None:
    """Encode texts to token ids, one line of numbers for each text."""
    loaded = load_tokenizer(tokenizer)
    for text in texts or stdin_lines():
        print(*loaded.encode(text))


@tokenizer_app.command("decode")
def tokenizer_decode(
    tokenizer: Annotated[Path, typer.Argument(help="tokenizer.json, or a run or model folder.")],
    ids: Annotated[list[int] | None, typer.Argument(help="Token ids; by default the lines of stdin.")] = None,
) -> None:
    """Decode token ids to text."""
    loaded = load_tokenizer(tokenizer)
    for line in [ids] if ids else stdin_lines():
        try:
            print(loaded.decode(line if isinstance(line, list) else [int(word) for word in line.split()]))
        except ValueError:
            raise RegardError(f"ids are whole numbers with spaces between them, not {line!r}") from None


@tokenizer_app.command("show")
def tokenizer_show(
    tokenizer: Annotated[Path, typer.Argument(help="tokenizer.json, or a run or model folder.")],
    text: Annotated[str, typer.Argument(help="A sentence.")],
    json: Json = False,
) -> None:
    """Show the subword pieces of a sentence, with their ids."""
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(text)
    result = {"pieces": loaded.pieces(ids), "ids": ids, "decoded": loaded.decode(ids), "vocabulary": len(loaded)}
    if json:
        return print(jsons.dumps(result, ensure_ascii=False))
    widths = [max(len(piece), len(str(i))) for piece, i in zip(result["pieces"], ids, strict=True)]
    print("  ".join(piece.ljust(w) for piece, w in zip(result["pieces"], widths, strict=True)))
    print("  ".join(str(i).ljust(w) for i, w in zip(ids, widths, strict=True)))
    print(f"{len(ids)} tokens of a vocabulary of {len(loaded):,}; decoded: {result['decoded']}")


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a file, a run or a model folder."""
    from regard.pretrained import resolve_name
    from regard.text.tokenizer import Tokenizer

    path = resolve_name(path)
    places = [path / "tokenizer.json", path / "model" / "tokenizer.json", path / "tokenizer.source.json"]
    return Tokenizer.load(next((p for p in places if p.exists()), path / "tokenizer.json") if path.is_dir() else path)
