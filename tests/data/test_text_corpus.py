"""Plain text in: what a document is, parts that add up to the whole, fingerprints of content."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import text_corpus
from regard.data.text_corpus import TextCorpus
from regard.errors import RegardError

POEM = "one\ntwo words\n\n\n  \nthree\n\nfour\nfive\n"


def corpus(folder: Path, *specs: str, documents: str = "file") -> TextCorpus:
    return TextCorpus(specs, folder, documents)


def read(folder: Path, *specs: str, documents: str = "file") -> list[str]:
    return [row for (row,) in corpus(folder, *specs, documents=documents).rows()]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("file", [POEM]),
        ("line", ["one", "two words", "three", "four", "five"]),
        ("blank", ["one\ntwo words", "three", "four\nfive"]),
    ],
)
def test_documents(tmp_path: Path, documents: str, expected: list[str]) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    assert read(tmp_path, "poem.txt", documents=documents) == expected
    (tmp_path / "poem.txt.xz").write_bytes(lzma.compress(POEM.encode()))
    assert read(tmp_path, "poem.txt.xz", documents=documents) == expected


def test_files_follow_each_other(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"{name} 1\n{name} 2")
    assert read(tmp_path, "b", "a", documents="line") == ["b 1", "b 2", "a 1", "a 2"]
    assert "".join(read(tmp_path, "b", "a")) == "b 1\nb 2\na 1\na 2\n"


@pytest.mark.parametrize("documents", ["file", "line", "blank"])
def test_each_object_of_jsonl_is_a_document(tmp_path: Path, documents: str) -> None:
    texts = ["one\ntwo", "drei\n\nvier", "Fünf"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts))
    assert read(tmp_path, "x.jsonl", documents=documents) == texts
    assert read(tmp_path, "x.jsonl[:67%]", documents=documents) == texts[:2]


def test_jsonl_without_text_is_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(RegardError, match=r"x\.jsonl line 2: no key 'text'"):
        read(tmp_path, "x.jsonl")


LINES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0﻿"), max_size=9), min_size=1)


@given(LINES, st.floats(0.1, 99.9).map(lambda share: f"{share:.2f}"), st.sampled_from(["file", "line", "blank"]))
def test_two_parts_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], share: str, documents: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "whole.txt").write_bytes(("\n".join(lines) + "\n").encode())
    whole = read(folder, "whole.txt", documents=documents)
    first, second = (read(folder, f"whole.txt{part}", documents=documents) for part in (f"[:{share}%]", f"[{share}%:]"))
    if documents == "file":
        assert "".join(first) + "".join(second) == "".join(whole)
        n = len("".join(whole))
        assert abs(len("".join(first)) - float(share) / 100 * n) <= 1
    else:
        assert first + second == whole
        assert abs(len(first) - float(share) / 100 * len(whole)) <= 1


def test_a_part_may_lie_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("0123456789abcdefghi")  # and a line end: 20 characters
    assert read(tmp_path, "digits[25%:50%]") == ["56789"]


def test_long_files_come_in_pieces_that_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    monkeypatch.setattr(text_corpus, "PIECE", 10)
    pieces = read(tmp_path, "poem.txt")
    assert "".join(pieces) == POEM
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)
    assert all(piece[:-1].rfind("\n") < 9 for piece in pieces)  # never a line more than fills it
    assert corpus(tmp_path, "poem.txt").characters() == len(POEM)


@pytest.mark.parametrize("part", ["", "[10%:]"])
def test_a_line_as_long_as_a_file_is_cut_between_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    line = "early working class radicals " * 40  # as text8 is
    (tmp_path / "line.txt").write_text(line)
    monkeypatch.setattr(text_corpus, "PIECE", 50)
    pieces = read(tmp_path, f"line.txt{part}")
    assert "".join(pieces) == (line + "\n")[-sum(map(len, pieces)) :]
    assert len(pieces) > 10
    assert max(map(len, pieces)) < 100
    assert all(piece.endswith(" ") for piece in pieces[:-1])


def test_a_long_line_without_a_space_is_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "line.txt").write_text("x" * 100)
    monkeypatch.setattr(text_corpus, "PIECE", 30)
    assert [len(piece) for piece in read(tmp_path, "line.txt")] == [30, 30, 30, 11]


@pytest.mark.parametrize("part", ["[50%:50%]", "[90%:10%]", "[:101%]", "[:0%]"])
def test_parts_that_cannot_be(tmp_path: Path, part: str) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    with pytest.raises(RegardError, match="is an empty part"):
        read(tmp_path, f"poem.txt{part}")


def test_no_text_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no train text is given: set data\.train"):
        read(tmp_path)
    with pytest.raises(RegardError, match=r"there is no file .*gone\.txt"):
        read(tmp_path, "gone.txt")


def test_a_fingerprint_is_of_what_is_read_not_of_where_it_lies(tmp_path: Path) -> None:
    for name in ("a.txt", "moved.txt"):
        (tmp_path / name).write_text(POEM)
    (tmp_path / "other.txt").write_text(POEM + "six\n")
    same = [corpus(tmp_path, name).fingerprint() for name in ("a.txt", "moved.txt")]
    assert same[0] == same[1]
    others = [
        corpus(tmp_path, "other.txt"),
        corpus(tmp_path, "a.txt", documents="line"),
        corpus(tmp_path, "a.txt[:50%]"),
        corpus(tmp_path, "a.txt[:60%]"),
        corpus(tmp_path, "a.txt", "a.txt"),
    ]
    assert len({same[0], *(other.fingerprint() for other in others)}) == 6
