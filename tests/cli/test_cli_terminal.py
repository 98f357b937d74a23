"""Control characters in text of models and files: visible on a terminal and on stderr, exact in pipes and files."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokens import SETTINGS
from torch import nn

from regard import model_folder
from regard.cli import main
from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.terminal import EscapingStream, escape_controls, progress_bar
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.metrics_log import ProgressDisplay, print_message

TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window
SIZES = {"n_decoder_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8, "max_len": 32, "head_bias": True, **SETTINGS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["ab\x1b\x9b", "ab\x1b\x9b"], TokenizerConfig(kind="char", vocab_size=50))


def saying(model: nn.Module, id: int) -> nn.Module:
    """Make a model write one token alone: all weights are 0, and the head's bias prefers it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.bias[id] = 50.0  # type: ignore[union-attr,index,operator]
    return model.eval()


@pytest.fixture(scope="module")
def models(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator, a language model and a classifier that all say control characters, and their tokenizer."""
    root, v = tmp_path_factory.mktemp("models"), len(tokenizer)
    both = Tokenizers(tokenizer, tokenizer)
    torch.manual_seed(0)
    pair = Transformer(ModelConfig(**SIZES, n_encoder_layers=1, source_vocab=v, target_vocab=v))  # type: ignore[arg-type]
    limits = DecodeConfig(beam=1, max_len_a=0, max_len_b=4, max_new_tokens=4)
    model_folder.save(
        root / "pair",
        ModelPackage(saying(pair, tokenizer.encode("a\x9b")[-1]), both, "translation", limits, "en", "de"),
        "",
    )
    lm = GPT(ModelConfig(architecture="gpt", preset="gpt-tiny", **SIZES, target_vocab=v))  # type: ignore[arg-type]
    model_folder.save(
        root / "lm", ModelPackage(saying(lm, tokenizer.encode("a\x1b")[-1]), both, "causal-lm", limits), ""
    )
    labels = (f"{TITLE}one", f"{TITLE}two")
    sizes = SIZES | {"head_bias": False, "target_vocab": v, "prediction_head": "sequence", "n_classes": 2}
    classes = make_model(ModelConfig(architecture="gpt", preset="gpt-tiny", **sizes)).eval()  # type: ignore[arg-type]
    model_folder.save(root / "classes", ModelPackage(classes, both, "classification", labels=labels), "")
    tokenizer.save(root / "tokenizer.json")
    return root


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def called(monkeypatch: pytest.MonkeyPatch, kind: type[io.TextIOWrapper], *words: object) -> tuple[str, str]:
    """`regard WORDS` in this process: what stdout and stderr got, each a stream of this kind."""
    streams = kind(io.BytesIO(), newline=""), kind(io.BytesIO(), newline="")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["regard", *map(str, words)])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit):
            main.main()
        assert (sys.stdout, sys.stderr) == streams
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return out, err


VERBS: dict[str, tuple[str, ...]] = {
    "translate": ("translate", "-m", "{root}/pair", "ab"),
    "nbest": ("translate", "-m", "{root}/pair", "--beam", "2", "--nbest", "2", "ab"),
    "translate --json": ("translate", "-m", "{root}/pair", "--json", "ab"),
    "generate": ("generate", "{root}/lm", "ab"),
    "streamed": ("generate", "{root}/lm", "--stream", "ab"),
    "score": ("score", "{root}/lm", "a\x1b"),
    "classify": ("classify", "{root}/classes", "ab"),
    "tokenizer decode": ("tokenizer", "decode", "{root}/tokenizer.json", "{ids}"),
    "tokenizer show": ("tokenizer", "show", "{root}/tokenizer.json", "a\x1bb"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_results_are_escaped_on_a_terminal_and_exact_elsewhere(
    verb: str, models: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = str(tokenizer.encode("a\x1b")[-1])
    words = [word.format(root=models, ids=ids) for word in VERBS[verb]]
    exact, _ = called(monkeypatch, io.TextIOWrapper, *words)
    shown, progress = called(monkeypatch, Terminal, *words)
    assert shown == escape_controls(exact)
    assert shown != exact
    assert "\x1b]" not in progress  # the bar's own sequences begin otherwise


def test_json_on_a_terminal_is_still_json(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("translate", "-m", models / "pair", "--json", "ab")
    exact, shown = (called(monkeypatch, kind, *words)[0] for kind in (io.TextIOWrapper, Terminal))
    assert json.loads(exact) == json.loads(shown)


def test_an_output_file_gets_the_exact_text(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exact, _ = called(monkeypatch, io.TextIOWrapper, "translate", "-m", models / "pair", "ab")
    called(monkeypatch, Terminal, "translate", "-m", models / "pair", "-o", tmp_path / "out", "ab")
    assert (tmp_path / "out").read_bytes().decode() == exact


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
def test_an_error_that_quotes_a_file_is_one_escaped_line(
    kind: type[io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"{TITLE}\nregard: all is well"
    _, err = called(monkeypatch, kind, "translate", "-m", tmp_path / name, "x")
    err = err.rpartition("\x1b[2K")[2]  # behind the sequence that erases "loading the model"
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "\\x1b]0;owned\\x07\\nregard: all is well" in err


def test_help_keeps_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for words in (("--help",), ("translate", "--help")):
        out, _ = called(monkeypatch, Terminal, *words)
        assert "\x1b[1m" in out
        assert "\\x1b" not in out


def test_a_bar_is_drawn_through_an_escaping_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", EscapingStream(stream))
    with progress_bar("reading", 2) as advance:
        advance(1)
    stream.flush()
    drawn = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "\x1b[" in drawn
    assert "\\x1b" not in drawn


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
def test_samples_of_training_are_always_escaped(kind: type[io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = kind(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", stream)
    screen = ProgressDisplay(0, 10)
    screen.say(f"  a -> {TITLE}b")
    screen.close()
    print_message(f"of {TITLE}")
    stream.flush()
    shown = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert shown.count("\\x1b]0;owned\\x07") == 2


def test_a_real_terminal_gets_no_control_character(models: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "regard", "classify", str(models / "classes"), "ab"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert b"\\x1b]0;owned\\x07" in shown
    assert b"\x1b" not in shown
    assert b"\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("a\tb\n", "a\tb\n"),
        ("\r\x00\x08", "\\x0d\\x00\\x08"),
        ("\x7f\x80\x9b\x9f\xa0", "\\u007f\\u0080\\u009b\\u009f\xa0"),
        ("\u202a\u202e\u2066\u2069", "\\u202a\\u202e\\u2066\\u2069"),
        ("می\u200cخواهم 👩\u200d👩 \u200e\u200f", "می\u200cخواهم 👩\u200d👩 \u200e\u200f"),
    ],
)
def test_escape_controls(text: str, expected: str) -> None:
    assert escape_controls(text) == expected
    assert escape_controls(expected) == expected


def test_pieces_are_escaped_one_by_one() -> None:
    stream = io.StringIO()
    write: Callable[[str], int] = EscapingStream(stream).write
    assert [write(piece) for piece in ("a\x1b", "]0;", "\x07")] == [2, 3, 1]
    assert stream.getvalue() == "a\\x1b]0;\\x07"
