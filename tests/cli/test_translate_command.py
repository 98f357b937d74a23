"""`regard translate` in a pipe and with files, as a process of its own: what is written when, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from fake_translation import CapitalTranslator, start

import regard.inference.translator as translator_module
from regard.inference import document_translation
from regard.inference.translator import Translation

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> CapitalTranslator:
    """The translator that `regard translate` uses in this process."""
    found = CapitalTranslator()
    monkeypatch.setattr(translator_module, "bundled_translator", lambda *a: found)
    return found


@pytest.fixture
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- pipes -----------------------------------------------------------------------------------------------------------


def test_each_line_is_answered_before_the_next_is_sent() -> None:
    with start("translate") as process:
        assert process.stdin and process.stdout  # noqa: PT018
        for line in (b"one\n", b"two\r\n", b"\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert (
                process.stdout.readline() == line.upper()
            )  # waits until the time limit of the test where there is none
        process.stdin.write(b"end")
        process.stdin.close()
        assert process.stdout.read() == b"END"
    assert process.returncode == 0


def test_lines_that_wait_are_translated_together(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    lines = [f"line {i}" for i in range(600)]
    code, out, err = call(capfd, monkeypatch, "translate", stdin="\n".join(lines).encode())
    assert (code, out, err) == (0, "\n".join(lines).upper(), "")
    assert [len(texts) for texts in fake.calls] == [256, 256, 88]


def test_the_end_of_the_reader_is_the_end() -> None:
    with start("translate") as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ONE\n"
        process.stdout.close()
        process.stdin.write(b"two\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_ctrl_c_ends_a_stream_without_a_traceback() -> None:
    with start("translate") as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ONE\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""


def test_a_wrong_line_is_an_error_after_the_lines_before_it(
    fake: CapitalTranslator, capfd: Capture, monkeypatch: Any
) -> None:
    code, out, err = call(capfd, monkeypatch, "translate", stdin=b"good\n\xff\nlost\n")
    assert (code, out) == (2, "GOOD\n")
    assert err == "regard: line 2 of stdin is not UTF-8 (invalid start byte at byte 1)\n"


@pytest.mark.usefixtures("_in_a_new_folder")
def test_a_stream_can_be_written_to_a_file(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    assert call(capfd, monkeypatch, "translate", "-o", "out", stdin=b"one\r\ntwo")[:2] == (0, "")
    assert Path("out").read_bytes() == b"ONE\r\nTWO"


@pytest.mark.usefixtures("_in_a_new_folder")
def test_a_fifo_is_read_once(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    os.mkfifo("fifo")
    with subprocess.Popen([sys.executable, "-c", "open('fifo', 'w').write('one\\ntwo\\n')"]):
        assert call(capfd, monkeypatch, "translate", "-i", "fifo") == (0, "ONE\nTWO\n", "")


def test_at_a_terminal_lines_are_answered_and_not_written_to_a_file(tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    with start("translate", stdin=side, cwd=tmp_path) as process:
        assert process.stdout
        for line in (b"one\n", b"two\n"):
            os.write(terminal, line)
            assert process.stdout.readline() == line.upper()
        os.write(terminal, b"\x04")  # Ctrl-D
        assert process.wait(timeout=60) == 0
    with start("translate", "-o", "out", stdin=side, cwd=tmp_path) as process:
        assert process.stderr
        assert b"--output needs texts, --input FILE or a pipe" in process.stderr.read()
        assert process.wait(timeout=60) == 2
    os.close(terminal)
    os.close(side)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_and_the_same_command_give_the_same_file(tmp_path: Path) -> None:
    lines = "".join(f"This is line {i}.\r\n" for i in range(3000))
    (tmp_path / "in").write_bytes(lines.encode())
    words = ("translate", "-i", "in", "-o", "out")
    with start(*words, seconds=0.3, cwd=tmp_path) as process:
        journal = tmp_path / "out.partial"
        for _ in range(600):
            if journal.exists() and journal.read_bytes().count(b"\n") > 2:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr
        said = process.stderr.read().decode()
    assert said.startswith("regard: stopped after ")
    assert "of 3,000 segments, which are kept in out.partial: the same command continues" in said
    assert not (tmp_path / "out").exists()
    with start(*words, cwd=tmp_path) as process:
        assert process.wait(timeout=60) == 0
        assert process.stderr
        assert process.stderr.read() == b""
    assert (tmp_path / "out").read_bytes() == lines.upper().encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.usefixtures("_in_a_new_folder")
def test_other_options_do_not_continue_a_translation(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    monkeypatch.setattr(document_translation, "CHUNK_SEGMENTS", 1)
    Path("in").write_text("one\ntwo\nthree\n")

    def stop(texts: list[str]) -> None:
        if len(fake.calls) == 2:
            raise KeyboardInterrupt

    fake.before = stop
    words = ("translate", "-i", "in", "-o", "out", "--to", "de")
    assert call(capfd, monkeypatch, *words)[0] == 130
    fake.before = lambda texts: None
    for other, what in ((("--beam", "2"), "options"), (("--to", "fr"), "options"), (("--json",), "options")):
        code, _, err = call(capfd, monkeypatch, *words, *other)
        assert (code, f"(not the same {what})" in err) == (2, True), err
    Path("in").write_text("one\ntwo\nfour\n")
    assert "(not the same input)" in call(capfd, monkeypatch, *words)[2]
    Path("in").write_text("one\ntwo\nthree\n")
    assert call(capfd, monkeypatch, *words)[0] == 0
    assert Path("out").read_text() == "ONE\nTWO\nTHREE\n"
    assert fake.calls == [["one"], ["two"], ["three"]]


@pytest.mark.usefixtures("_in_a_new_folder")
def test_a_file_without_an_output_is_printed(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    Path("in").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert call(capfd, monkeypatch, "translate", "-i", "in") == (0, "ONE\r\nTWO", "")
    assert [path.name for path in Path().iterdir()] == ["in"]


@pytest.mark.usefixtures("_in_a_new_folder")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-i", "."], ". is a folder; give a file"),
        (["-i", "none"], "there is no file none"),
        (["-i", "in", "x"], "not both"),
        (["--format", "html", "x"], "--format is for files and stdin"),
        (["-i", "in", "--format", "pdf"], "'pdf' is not one of"),
        (["-i", "in", "--format", "html", "--nbest", "2"], "give --json or --format lines, not html"),
        (["-i", "in", "-o", "in"], "would be replaced"),
        (["-i", "in", "-o", "in", "--glossary", "none.tsv"], "would be replaced"),
    ],
)
def test_errors_of_files(
    words: list[str], message: str, fake: CapitalTranslator, capfd: Capture, monkeypatch: Any
) -> None:
    Path("in").write_text("one\n")
    code, out, err = call(capfd, monkeypatch, "translate", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_progress_bar_leaves_stdout_alone(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("one???\ntwo\n" * 300)
    terminal, side = pty.openpty()
    with start("translate", "-i", "in", cwd=tmp_path, stderr=side, TERM="xterm") as process:
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while block := os.read(terminal, 4096):
                shown += block
        assert process.stdout
        assert process.stdout.read() == b"ONE???\nTWO\n" * 300
    os.close(terminal)
    assert b"loading the model" in shown
    assert b"translating" in shown
    assert b"line 19: left as it is" in shown
    assert b"290 more" in shown


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_in_a_new_folder")
def test_warnings_name_their_lines_and_end_after_ten(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    Path("in").write_text("fine\n" + "what???\n" * 30)
    for words, stdin in ((("-i", "in", "-o", "out"), b""), ((), Path("in").read_bytes())):
        code, _, err = call(capfd, monkeypatch, "translate", *words, stdin=stdin)
        assert code == 0
        said = err.splitlines()
        assert said[:10] == [f"regard: line {i}: left as it is: 'what???'" for i in range(2, 12)]
        assert said[10:] == ["regard: 20 more: left as it is"]
    assert call(capfd, monkeypatch, "translate", "what???")[2] == "regard: left as it is: 'what???'\n"


def test_a_language_between_is_named_once(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    note = "translated by way of English"
    found = Translation("X", -1.0, -1.0, (), source="de", target="fr", notes=(note,), via="en", ended=False)
    monkeypatch.setattr(fake, "one", lambda text, to: found)
    said = call(capfd, monkeypatch, "translate", stdin=b"a\nb\n")[2].splitlines()
    assert said[0] == "regard: de>fr is translated by way of English"
    assert [line[:30] for line in said[1:]] == ["regard: line 1: cut off at the", "regard: line 2: cut off at the"]


def test_objects_of_json(fake: CapitalTranslator, capfd: Capture, monkeypatch: Any) -> None:
    code, out, _ = call(capfd, monkeypatch, "translate", "--json", "--to", "fr", "one", "two\nlines")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["line"], row["source"], row["text"], row["to"]) for row in rows] == [
        (1, "one", "ONE", "fr"),
        (2, "two\nlines", "TWO\nLINES", "fr"),
    ]
    assert (
        call(capfd, monkeypatch, "translate", "--json", "--to", "fr", stdin=b"one\n")[1] == out.splitlines()[0] + "\n"
    )


@pytest.mark.parametrize(("own", "refused"), [({"temperature": 0.8}, False), ({"mbr": 4}, False), ({}, True)])
def test_top_k_needs_samples_by_the_options_or_by_the_model(
    own: dict[str, Any], refused: bool, fake: CapitalTranslator, capfd: Capture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fake, "options", replace(fake.options, **own))
    code, out, err = call(capfd, monkeypatch, "translate", "--top-k", "5", "one")
    assert (code, out) == ((2, "") if refused else (0, "ONE\n"))
    assert ("give a --temperature" in err) == refused
    assert call(capfd, monkeypatch, "translate", "--top-k", "5", "--temperature", "1", "one")[0] == 0
