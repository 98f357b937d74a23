"""`regard generate`, `chat`, `score` and `embed` as a user meets them: stdout, stderr, exit codes, a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from test_generator import LINES, bert_bundle, taught

from regard import model_folder
from regard.cli import main, options
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator


class Said(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`regard WORDS` in this process."""

    def run(*words: str | Path, stdin: str = "") -> Said:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        rest, settings = options.split_settings([str(word) for word in words])
        with pytest.raises(SystemExit) as stop, main.readable_errors():
            raise SystemExit(main.app(rest, obj=settings, standalone_mode=False) or 0)
        return Said(int(stop.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "gpt"
    model_folder.save(path, taught(), "a card")
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bert"
    model_folder.save(path, bert_bundle(), "a card")
    return path


# ---- generate --------------------------------------------------------------------------------------------------------


def test_a_text_is_continued(call: Call, gpt: Path) -> None:
    assert call("generate", gpt, "You were") == (0, "You were eating soup.\n", "")
    assert call("generate", gpt, "You were", "--stream").out == "You were eating soup.\n"
    assert call("generate", gpt, "You were", "--stop", "soup", "--stop", "x").out == "You were eating \n"
    assert call("generate", gpt, "You were", "--max-new-tokens", "1").out == "You were eating\n"
    assert call("generate", gpt, "You were", "--decode.max_new_tokens", "1").out == "You were eating\n"


def test_prompts_may_come_from_stdin_and_results_are_told_apart(call: Call, gpt: Path) -> None:
    said = call("generate", gpt, stdin="You were\nI was reading\n")
    assert said.out == "You were eating soup.\n---\nI was reading a book.\n"


def test_samples_as_json_are_those_of_the_generator(call: Call, gpt: Path) -> None:
    words = ("-n", "3", "--temperature", "1.5", "--seed", "7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01")
    said = call("generate", gpt, "I was", *words, "--repetition-penalty", "1.1", "--json")
    options = {"n": 3, "temperature": 1.5, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    found = Generator(taught()).generate("I was", repetition_penalty=1.1, **options)
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["text"] for row in rows] == [one.text for one in found.samples]
    assert [row["ended"] for row in rows] == [one.ended for one in found.samples]
    assert {row["prompt"] for row in rows} == {"I was"}


def test_a_text_that_fills_the_context_is_said_to_be_cut(call: Call, gpt: Path) -> None:
    said = call("generate", gpt, "I was", "--decode.min_len", "500", "--max-new-tokens", "500")
    assert said.code == 0
    assert "cut off at the model's 96 tokens (model.max_len): 'I was'" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("I was " * 60,), "the model was built for at most 96"),
        (("I", "-n", "2"), "at temperature 0 are all the same"),
        (("I", "-n", "2", "--temperature", "1", "--stream"), "--stream shows one text"),
        (("I", "--min-p", "2"), "min_p must be from 0 to 1"),
        (("I", "--model.n_heads", "2"), "--model.n_heads does not belong here"),
        (("I", "--decode.beam_stop", "likely"), "--decode.beam_stop is for beam search"),
        ((), "no prompt given"),
    ],
)
def test_mistakes_are_said_in_one_line(call: Call, gpt: Path, words: tuple[str, ...], message: str) -> None:
    said = call("generate", gpt, *words)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_model_of_another_kind_is_refused(call: Call, bert: Path) -> None:
    for verb in ("generate", "score", "chat"):
        said = call(verb, bert, *(["I was"] if verb != "chat" else []), stdin="I\n")
        assert said.code == 2
        assert "writing needs a language model (architecture gpt or rnn), and this one is a bert" in said.err


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_a_conversation_line_by_line(call: Call, gpt: Path) -> None:
    assert call("chat", gpt, stdin="Hello\n\nBye\n") == (0, "Good day to you.\nSee you soon.\n", "")


def test_reset_forgets_what_was_said(call: Call, gpt: Path) -> None:
    said = call("chat", gpt, stdin="Hello\n/reset\nHello\n")
    assert said.out == "Good day to you.\nGood day to you.\n"


def test_a_question_that_is_too_long_does_not_end_the_conversation(call: Call, gpt: Path) -> None:
    said = call("chat", gpt, "--max-new-tokens", "20", stdin="I was " * 60 + "\nHello\n")
    assert (said.code, said.out) == (0, "Good day to you.\n")
    assert "shorten it" in said.err


def test_wrong_settings_are_said_before_the_first_question(call: Call, gpt: Path) -> None:
    said = call("chat", gpt, "--decode.temprature", "1", stdin="Hello\n")
    assert (said.code, said.out) == (2, "")
    assert "did you mean" in said.err


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(
    gpt: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: Iterator[str | type[BaseException]] = iter(["Hello", KeyboardInterrupt, "Bye", EOFError])

    def input_(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", input_)
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO()))
    stream, turns = Generator.stream, []

    def interrupted(generator: Generator, prompt: str, **options: object) -> Iterator[str]:
        turns.append(prompt)
        if len(turns) > 1:  # whatever it would say to this
            yield "So long."
            return
        yield next(stream(generator, prompt, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", interrupted)
    with pytest.raises(SystemExit) as stop, main.readable_errors():
        raise SystemExit(main.app(["chat", str(gpt)], obj={}, standalone_mode=False) or 0)
    out, err = capfd.readouterr()
    assert not stop.value.code
    first, second = out.splitlines()[:2]
    assert "Good day to you.".startswith(first)
    assert first != "Good day to you."
    assert turns[1] == f"User: Hello\nAssistant: {first}\nUser: Bye\nAssistant:"
    assert second == "So long."
    assert "Ctrl-D ends" in err


# ---- score -----------------------------------------------------------------------------------------------------------


def test_scores_token_by_token(call: Call, gpt: Path) -> None:
    expected = Generator(taught()).score("I was eating")
    lines = call("score", gpt, "I was eating").out.splitlines()
    assert len(lines) == len(expected.tokens) + 1
    for line, token, value in zip(lines, expected.tokens, expected.log_probs, strict=False):
        number, name = line.split()
        assert (name, float(number)) == (token, pytest.approx(value, abs=1e-3))
    assert f"perplexity {expected.perplexity:.2f}" in lines[-1]


def test_scores_of_stdin_as_json(call: Call, gpt: Path) -> None:
    said = call("score", gpt, "--json", stdin="I was eating\nYou were\n")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["text"] for row in rows] == ["I was eating", "You were"]
    assert rows[0]["total"] == pytest.approx(sum(rows[0]["log_probs"]))


def test_continuations_best_first(call: Call, gpt: Path) -> None:
    said = call("score", gpt, "I was eating", "--continuations", " a book.| an apple.")
    best, other = said.out.splitlines()
    assert best.endswith("an apple.")
    assert other.endswith("a book.")
    rows = [
        json.loads(line)
        for line in call(
            "score", gpt, "I was eating", "--continuations", " a book.| an apple.", "--json"
        ).out.splitlines()
    ]
    assert [row["text"] for row in rows] == [" an apple.", " a book."]
    assert f"{rows[0]['probability']:.2%}" in best


# ---- embed -----------------------------------------------------------------------------------------------------------


def test_vectors_as_numbers_json_and_a_file(call: Call, bert: Path, tmp_path: Path) -> None:
    expected = Embedder(bert_bundle()).embed(LINES[:2])
    plain = call("embed", bert, *LINES[:2]).out.splitlines()
    np.testing.assert_allclose([[float(x) for x in line.split()] for line in plain], expected, atol=1e-4)
    (tmp_path / "lines.txt").write_text("\n".join(LINES[:2]) + "\n")
    rows = [json.loads(line) for line in call("embed", bert, "-i", tmp_path / "lines.txt", "--json").out.splitlines()]
    assert [row["text"] for row in rows] == LINES[:2]
    np.testing.assert_allclose([row["vector"] for row in rows], expected, atol=1e-5)
    said = call("embed", bert, "--output", tmp_path / "x.npy", "--no-normalize", "--pooling", "first", stdin=LINES[0])
    assert said.out == f"{tmp_path / 'x.npy'}\n"
    raw = Embedder(bert_bundle()).embed(LINES[:1], pooling="first", normalize=False)
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), raw, atol=1e-5)


def test_embedding_says_what_is_wrong(call: Call, bert: Path, tmp_path: Path) -> None:
    long = "I was eating " * 30
    assert "cut it with truncate" in call("embed", bert, long).err
    assert call("embed", bert, long, "--truncate").code == 0
    assert "not both" in call("embed", bert, "I", "-i", "x").err
    assert "does not belong here" in call("embed", bert, "I", "--decode.seed", "1").err
    (tmp_path / "file").write_text("")
    missing = call("embed", bert, "I", "-o", tmp_path / "file" / "x.npy")
    assert missing.code == 2
    assert "cannot write" in missing.err
