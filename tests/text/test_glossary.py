"""Glossary files, and the terms that are found in a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.text.glossary import Glossary, Term


def load(tmp_path: Path, text: str) -> Glossary:
    (tmp_path / "terms.tsv").write_text(text, encoding="utf-8")
    return Glossary.load(tmp_path / "terms.tsv")


def test_a_file_has_terms_comments_and_directions(tmp_path: Path) -> None:
    glossary = load(tmp_path, "# terms\n\nserver\tServer\r\npower supply \tNetzteil\ten>de\nbank\tbanc\ten>fr\n")
    assert glossary.terms == (
        Term("server", "Server"),
        Term("power supply", "Netzteil", "en>de"),
        Term("bank", "banc", "en>fr"),
    )
    assert len(glossary) == 3
    assert glossary.find("The bank has a power  supply.", "en", "de") == ["Netzteil"]
    assert glossary.find("The bank has a power supply.", "en", "fr") == ["banc"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("server", r"terms\.tsv, line 2: a term is source<TAB>target"),
        ("server\t", r"line 2: a term is"),
        ("a\tb\tc\td", r"line 2: a term is"),
        ("a\tb\tgerman", r"line 2: the third column is a direction such as en>de, not 'german'"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RegardError, match=message):
        load(tmp_path, f"good\tgut\n{line}\n")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="cannot read the glossary"):
        Glossary.load(tmp_path / "none.tsv")
    (tmp_path / "bad.tsv").write_bytes(b"a\tb\xff\n")
    with pytest.raises(RegardError, match=r"cannot read the glossary .*bad\.tsv"):
        Glossary.load(tmp_path / "bad.tsv")


@pytest.mark.parametrize(
    ("term", "text", "count"),
    [
        ("port", "The port is open. Port!", 2),
        ("port", "The report, portable, sport.", 0),
        ("port", "serial-port, (port)", 2),
        ("Port", "the port", 1),
        ("USB", "a usb stick", 0),
        ("USB", "a USB stick", 1),
        ("iPhone", "the IPHONE, the iPhone", 1),
        ("C++", "in C++, not C", 1),
        ("端口", "打开端口和端口", 2),
        ("USB端口", "这个USB端口", 1),
        ("straße", "STRASSE und Straße", 1),
    ],
)
def test_terms_are_whole_words_in_any_case_unless_they_have_capitals_inside(term: str, text: str, count: int) -> None:
    assert Glossary({term: "x"}).find(text, "en", "de") == ["x"] * count


def test_a_text_in_capitals_has_terms_in_any_case() -> None:
    glossary = Glossary({"iPhone": "x"})
    assert glossary.find("The iphone is old.", "en", "de", ignore_case=True) == ["x"]
    assert glossary.find("The iphone is old.", "en", "de") == []


def test_the_longest_term_is_taken_and_the_order_is_that_of_the_text() -> None:
    glossary = Glossary({"supply": "Vorrat", "power supply": "Netzteil", "power": "Leistung"})
    assert glossary.find("The supply of power by the power supply", "en", "de") == ["Vorrat", "Leistung", "Netzteil"]


def test_a_term_for_one_direction_goes_before_one_for_all() -> None:
    glossary = Glossary([Term("bank", "Bank"), Term("bank", "banque", "en>fr")])
    assert glossary.find("the bank", "en", "fr") == ["banque"]
    assert glossary.find("the bank", "en", "de") == ["Bank"]
