"""Numbers that are missing in a translation, and the pattern that makes them placeholders."""

from __future__ import annotations

import re

import pytest

from regard.text.placeholders import add_numbers_to_pattern, find_missing_numbers, insert_placeholders


@pytest.mark.parametrize(
    ("source", "translation", "lost"),
    [
        ("In 1992 and 1993.", "1992 und 1993.", []),
        ("In 1992 and 1993.", "1992.", ["1993"]),
        ("He paid 4,523.50 euros.", "Er zahlte 4.523,50 Euro.", []),
        ("He paid 4,523 euros.", "Il a payé 4 523 euros.", []),
        ("He paid 4,523 euros.", "Er zahlte 4,532 Euro.", ["4,523"]),
        ("Il a payé 1 234,56 euros.", "He paid 1,234.56 euros.", []),
        ("Il a payé 1 234,56 euros.", "He paid 1,234 euros.", ["1 234,56"]),
        ("At 5:30 on 3/4/2020.", "Um 5.30 am 3.4.2020.", []),
        ("At 12:30.", "À 12 h 30.", []),
        ("At 12:30.", "Um 1230.", ["12:30"]),
        ("5.5", "55", ["5.5"]),
        ("192.168.0.1", "192,1,680.1", ["192.168.0.1"]),
        ("3.5 million", "35 Millionen", ["3.5"]),
        ("It was -12 or -5.", "Es war 12 oder 5.", ["-12", "-5"]),
        ("It was -12.", "Es war −12.", []),
        ("It was -12.", "Es war minus 12.", []),
        ("From 10-20 men.", "10 bis 20 Mann.", []),
        ("I have 3 cats.", "Ich habe drei Katzen.", []),
        ("I am 25.", "我２５岁。", []),
        ("I am 25.", "Ich bin fünfundzwanzig.", ["25"]),
        ("I am 25.", "Ich bin 125.", ["25"]),
    ],
)
def test_numbers_that_are_lost(source: str, translation: str, lost: list[str]) -> None:
    assert find_missing_numbers(source, translation) == lost


def test_lost_numbers_are_matched_whole_and_neighbours_together() -> None:
    pattern = add_numbers_to_pattern(re.compile("😀"), ["11", "22", "3"])
    assert insert_placeholders("11 22, 3 and 😀 with 113 or 11.", pattern)[1] == ["11 22, 3", "😀", "11"]
