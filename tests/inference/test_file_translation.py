"""Files in chunks: the output has the same bytes wherever the translation was interrupted."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_translation import CapitalTranslator

from regard.errors import RegardError
from regard.inference import document_translation
from regard.inference.document_translation import (
    Journal,
    OutputStyle,
    TextFile,
    choose_format,
    divide,
    fit_line,
    is_pipe,
    translate_file,
    translate_pieces,
    translation_identity,
)
from regard.inference.streaming import ChunkTranslator

IDENTITY = {"input": "1", "model": "2", "options": "3", "version": "4"}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_translation, "CHUNK_SEGMENTS", 3)


def run(
    folder: Path,
    fake: Any,
    data: bytes | None = None,
    format: str = "lines",
    style: OutputStyle | None = None,
    identity: dict[str, str] = IDENTITY,
) -> Path:
    """Translate `folder/in` to `folder/out`."""
    if data is not None:
        (folder / "in").write_bytes(data)
    translator = ChunkTranslator(fake, has_code_blocks=format == "lines")
    file = TextFile(folder / "in", format)
    translate_file(file, folder / "out", translator, style or OutputStyle(), identity, total=file.count())
    return folder / "out"


class InterruptedTranslator(CapitalTranslator):
    """A translator that is interrupted when it is called for the n-th time."""

    def __init__(self, n: int) -> None:
        super().__init__(before=self.stop)
        self.n = n

    def stop(self, texts: list[str]) -> None:
        if len(self.calls) == self.n:
            raise KeyboardInterrupt


LINES = b"\xef\xbb\xbfone\r\n\r\ntwo???\n```\nthree\n```\nfour\nfive\n" + "sechs \u2028 sieben\n".encode() * 20 + b"end"


@pytest.mark.parametrize("style", [OutputStyle(), OutputStyle(as_json=True), OutputStyle(has_nbest=True)])
def test_an_interrupted_translation_continues_to_the_same_bytes(tmp_path: Path, style: OutputStyle) -> None:
    (tmp_path / "whole").mkdir()
    whole = CapitalTranslator()
    expected = run(tmp_path / "whole", whole, LINES, style=style).read_bytes()
    assert len(whole.calls) == 10
    for n in range(1, len(whole.calls)):
        folder = tmp_path / str(n)
        folder.mkdir()
        first, second = InterruptedTranslator(n), CapitalTranslator()
        with pytest.raises(KeyboardInterrupt, match=rf"after {3 * n} of 29 segments.*out\.partial.* same command"):
            run(folder, first, LINES, style=style)
        assert not (folder / "out").exists()
        assert run(folder, second, style=style).read_bytes() == expected
        assert first.calls + second.calls == whole.calls
        assert sorted(path.name for path in folder.iterdir()) == ["in", "out"]


def test_interrupted_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(LINES)
    for _ in range(9):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, InterruptedTranslator(1))
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", CapitalTranslator(), LINES).read_bytes()
    assert run(tmp_path, CapitalTranslator()).read_bytes() == expected


def test_what_a_killed_process_wrote_in_part_is_translated_again(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", CapitalTranslator(), LINES).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, InterruptedTranslator(4), LINES)
    journal = (tmp_path / "out.partial").read_bytes()
    first = journal.index(b"\n") + 1
    for length in {first, first + 1, len(journal) // 2, len(journal) - 1, len(journal)}:
        (tmp_path / "out.partial").write_bytes(journal[:length])
        assert run(tmp_path, CapitalTranslator()).read_bytes() == expected
        (tmp_path / "out").unlink()
    (tmp_path / "out.partial").write_bytes(journal + b"\0\0\0")
    assert run(tmp_path, CapitalTranslator()).read_bytes() == expected


def test_nothing_is_left_where_nothing_was_translated(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run(tmp_path, InterruptedTranslator(0), LINES)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("what", IDENTITY)
def test_the_journal_of_another_translation_is_neither_used_nor_removed(tmp_path: Path, what: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, InterruptedTranslator(2), LINES)
    before = (tmp_path / "out.partial").read_bytes()
    with pytest.raises(
        RegardError, match=rf"out\.partial is .* another translation \(not the same {what}\).*remove the file"
    ):
        run(tmp_path, CapitalTranslator(), identity=IDENTITY | {what: "other"})
    assert (tmp_path / "out.partial").read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"mine\n", b"[]\n", b'{"kind": "mine"}\n', b"{", b"\xff"])
def test_a_file_in_the_place_of_the_journal_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.partial").write_bytes(content)
    with pytest.raises(RegardError, match=r"out\.partial is in the way"):
        run(tmp_path, CapitalTranslator(), LINES)
    assert (tmp_path / "out.partial").read_bytes() == content


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, InterruptedTranslator(2), LINES)
    with (tmp_path / "out.partial").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RegardError, match=r"another process uses .*out\.partial"):
            run(tmp_path, CapitalTranslator())
    assert run(tmp_path, CapitalTranslator()).exists()


def test_only_the_own_journal_is_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.partial", IDENTITY)
    journal.append([])
    (tmp_path / "out.partial").rename(tmp_path / "moved")
    (tmp_path / "out.partial").write_text("mine")
    journal.remove()
    assert (tmp_path / "out.partial").read_text() == "mine"


def test_an_output_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, InterruptedTranslator(2), LINES)
    assert (tmp_path / "out").read_text() == "old"
    assert run(tmp_path, CapitalTranslator()).read_text(encoding="utf-8") != "old"


def test_lines_keep_their_ends_and_marks(tmp_path: Path) -> None:
    data = "\ufeffone\r\n\r\ntwo\nthree\x0c\u2028\r\nend".encode()
    assert run(tmp_path, CapitalTranslator(), data).read_bytes() == data.decode().upper().encode()


def test_a_large_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a line of text\n" * 10_000)
    sizes = [len(piece.texts) for piece in TextFile(tmp_path / "in", "lines").pieces()]
    assert sum(sizes) == 10_000
    assert max(sizes) <= 256


def test_chunks_depend_on_the_texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_translation, "CHUNK_CHARACTERS", 10)
    texts = ["12345", "12345", "1", "1", "1", "1", "1234567890"]
    assert [texts[chunk] for chunk in divide(texts)] == [texts[:2], texts[2:5], texts[5:]]
    assert list(divide([])) == []


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("a", "A", "A"),
        ("a", "A\nB\n", "A B"),
        ("a", "A\u2028B", "A B"),
        ("a\u2028b", "A\u2028B", "A\u2028B"),
        ("\x0c", "\x0c", "\x0c"),
        ("a\nb", "A\nB", "A\nB"),
        ("", "", ""),
    ],
)
def test_the_translation_of_a_line_is_a_line(source: str, text: str, expected: str) -> None:
    assert fit_line(source, text) == expected


def test_objects_of_json_have_their_line_and_source(tmp_path: Path) -> None:
    path = run(tmp_path, CapitalTranslator(), b"one\n\ntwo???\n", style=OutputStyle(as_json=True))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["line"], row["source"], row["text"]) for row in rows] == [
        (1, "one", "ONE"),
        (2, "", ""),
        (3, "two???", "TWO???"),
    ]
    assert {"from", "to", "confidence", "score", "notes"} <= set(rows[0])
    assert rows[2]["notes"] == ["left as it is"]


def test_what_is_translated_is_observed_once(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"one\ntwo\nthree\nfour\n")
    seen: list[tuple[int, str]] = []
    done: list[int] = []
    known = iter([[{"text": "1", "notes": []}] * 3])
    parts = translate_pieces(
        TextFile(tmp_path / "in", "lines").pieces(),
        ChunkTranslator(CapitalTranslator()),  # type: ignore[arg-type]
        OutputStyle(),
        known=known,
        observe=lambda line, text, each: seen.append((line, text)),
        advance=done.append,
    )
    assert list(parts) == ["1\n1\n1\nFOUR\n"]
    assert (seen, done) == ([(4, "four")], [3, 1])


def test_an_output_that_cannot_be_written_loses_no_translation(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(LINES)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(RegardError, match=r"cannot write .*out: "):
        run(tmp_path, CapitalTranslator())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in",
        "out",
        "out.partial",
    ]  # nothing translated is lost


def test_the_identity_changes_with_every_setting(tmp_path: Path) -> None:
    for name in ("config.json", "manifest.json", "in", "terms.tsv"):
        (tmp_path / name).write_text("{}")

    def identity(style: OutputStyle | None = None, format: str = "lines", **settings: Any) -> tuple[str, ...]:
        own = {name: settings.pop(name) for name in ("weights", "glossary") if name in settings}
        chunks = ChunkTranslator(CapitalTranslator(), **settings)  # type: ignore[arg-type]
        found = translation_identity(tmp_path / "in", tmp_path, chunks, style or OutputStyle(), format, **own)
        return tuple(found.values())

    made = [
        identity(),
        identity(format="text"),
        identity(OutputStyle(as_json=True)),
        identity(to="de"),
        identity(source="de"),
        *(identity(nbest=n) for n in (2, 3)),
        identity(weights="int8"),
        identity(glossary=tmp_path / "terms.tsv"),
    ]
    for name in ("in", "terms.tsv", "manifest.json"):
        (tmp_path / name).write_text("{ }")
        made.append(identity(glossary=tmp_path / "terms.tsv"))
    assert len(set(made)) == len(made)
    assert identity() == identity()


def test_pipes_and_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    assert [is_pipe(tmp_path / name) for name in ("fifo", "file", "missing", ".")] == [True, False, False, False]


# ---- documents -------------------------------------------------------------------------------------------------------

MARKDOWN = """# The apple

I ate an *apple* and a [pear](pear.html), then `code` and
more on the second line.

```
code that stays
```

- one
- two **bold** words
"""


def test_a_document_keeps_its_markup_and_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", CapitalTranslator(), MARKDOWN.encode(), "markdown").read_text()
    assert "# THE APPLE" in expected
    assert "(pear.html)" in expected
    assert "```\ncode that stays\n```" in expected
    assert expected.count("*") == MARKDOWN.count("*")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, InterruptedTranslator(1), MARKDOWN.encode(), "markdown")
    assert run(tmp_path, CapitalTranslator(), format="markdown").read_text() == expected


PAGE = '<html lang="{}"><title>{}</title><p>{}</p></html>'


@pytest.mark.parametrize(
    ("title", "text", "language"),
    [("One", "two three", "de"), ("ONE", "TWO and THREE", "de"), ("One", "WORDS THAT STAY AS THEY WERE", "en")],
)
def test_a_page_names_the_language_that_most_of_it_is_in_now(
    tmp_path: Path, title: str, text: str, language: str
) -> None:
    found = run(tmp_path, CapitalTranslator(), PAGE.format("en", title, text).encode(), "html").read_text()
    assert found == PAGE.format(language, title.upper(), text.upper())


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("markdown", MARKDOWN),
        ("html", "<p>One <b>two</b> three</p>\n<p>Four</p>\n"),
        ("srt", "1\n00:00:01,000 --> 00:00:02,000\nOne two\n\n2\n00:00:03,000 --> 00:00:04,000\nThree\n"),
        ("text", "A paragraph that is wrapped over\ntwo lines by hand.\n\nThe end.\n"),
    ],
)
def test_documents_keep_their_line_ends(tmp_path: Path, format: str, text: str) -> None:
    data = ("\ufeff" + text).replace("\n", "\r\n").encode()
    found = run(tmp_path, CapitalTranslator(), data, format).read_bytes()
    assert found.startswith(b"\xef\xbb\xbf")
    assert found.count(b"\r\n") == found.count(b"\n") >= 2
    assert found.decode().casefold() == data.decode().casefold()


def test_a_plain_text_is_divided_at_empty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_translation, "PIECE_CHARACTERS", 50)
    text = "".join(f"This is paragraph number {i}.\n\n" for i in range(20))
    (tmp_path / "in").write_text(text)
    pieces = list(TextFile(tmp_path / "in", "text").pieces())
    assert len(pieces) == 10
    assert [line for piece in pieces for line in piece.lines] == list(range(1, 40, 2))
    assert run(tmp_path, CapitalTranslator(), format="text").read_text() == text.upper()


def test_a_translation_without_words_for_its_markup_is_left_with_a_note(tmp_path: Path) -> None:
    class Silent(CapitalTranslator):
        def one(self, text: str, to: str) -> Any:
            return replace(super().one(text, to), text="...")

    path = run(tmp_path, Silent(), b"One *two* three.\n", "markdown", OutputStyle(as_json=True))
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["text"], row["confidence"]) == ("One two three.", 0.0)
    assert row["notes"] == [document_translation.NO_ROOM_FOR_MARKUP]
    assert run(tmp_path, Silent(), format="markdown").read_text() == "One *two* three.\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "x", "text"),
        ("A.MD", "x", "markdown"),
        ("a.md.gz", "x", "markdown"),
        ("page.html", "x", "html"),
        ("test.en", "x", "lines"),
        ("README", "x", "text"),
        ("page", "<!DOCTYPE html><p>x", "html"),
        ("de.po", "x", "po"),
    ],
)
def test_the_suffix_says_what_a_file_is(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    assert choose_format(tmp_path / name, True) == expected
    assert choose_format(tmp_path / name, False) == "lines"
