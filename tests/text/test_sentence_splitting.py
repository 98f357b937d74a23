"""Texts split into sentences and joined again."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.sentence_splitting import Sentence, join_sentences, split_long_sentence, split_sentences

PIECES = st.sampled_from(
    [
        *"aB9 .,;!?…。！？，\n\t\"'”“«»()「」-*#",
        *("\r\n", "\u2028", " \u00a0", "Dr. ", "z.B. ", "3. ", "你好", "😀", "- ", "1. ", "...", "|", "`", "```\n"),
    ]
)  # fmt: skip
TEXTS = st.one_of(st.lists(PIECES, max_size=40).map("".join), st.text(max_size=60))


def said(text: str) -> list[str]:
    return [sentence.text for sentence in split_sentences(text) if not sentence.ends_line]


@given(TEXTS)
def test_nothing_is_lost(text: str) -> None:
    parts = split_sentences(text)
    assert "".join(part.before + part.text for part in parts) == text
    assert all(part.text == part.text.strip() and (part.text != "") != part.ends_line for part in parts)


@given(TEXTS, st.integers(2, 12))
def test_nothing_is_lost_of_what_is_cut_to_fit(text: str, longest: int) -> None:
    parts = [
        clause for s in split_sentences(text) for clause in split_long_sentence(s, lambda part: len(part) <= longest)
    ]
    assert "".join(part.before + part.text for part in parts) == text
    assert all(len(part.text) <= longest for part in parts)


@given(TEXTS)
def test_joined_in_a_language_with_spaces_no_character_of_a_word_is_lost_and_lines_stay(text: str) -> None:
    parts = split_sentences(text)
    made = join_sentences(parts, [part.text for part in parts], spaced=True)
    assert re.sub(r"\s", "", made) == re.sub(r"\s", "", text)
    assert len(made.splitlines()) == len(text.splitlines())
    unspaced = join_sentences(parts, [part.text for part in parts], spaced=False)
    assert re.sub(r"\s", "", unspaced) == re.sub(r"\s", "", text)
    assert len(unspaced.splitlines()) == len(text.splitlines())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I came. I saw.", ["I came.", "I saw."]),
        ("Really?! Yes! Well... Then go.", ["Really?!", "Yes!", "Well...", "Then go."]),
        ("Wait... what? he asked.", ["Wait... what? he asked."]),
        ("Mr. Smith met Dr. Jones. They left.", ["Mr. Smith met Dr. Jones.", "They left."]),
        ("J. R. R. Tolkien wrote it. It is long.", ["J. R. R. Tolkien wrote it.", "It is long."]),
        ("The U.S. Army came. It left.", ["The U.S. Army came.", "It left."]),
        ("He said no. Then he left.", ["He said no.", "Then he left."]),
        ("See No. 5 and fig. 3 there. It is odd.", ["See No. 5 and fig. 3 there.", "It is odd."]),
        ("Give it to me. I like art. Do you?", ["Give it to me.", "I like art.", "Do you?"]),
        ("I am 25. She is 24.", ["I am 25.", "She is 24."]),
        ("In 1992. Then came 1993.", ["In 1992.", "Then came 1993."]),
        ("It costs 3.50 euros. That is much.", ["It costs 3.50 euros.", "That is much."]),
        ("See https://a.b/c. Then go.", ["See https://a.b/c.", "Then go."]),
        ("Er kam am 3. Oktober. Sie nicht.", ["Er kam am 3. Oktober.", "Sie nicht."]),
        ("Das war im 2. Weltkrieg. Ja.", ["Das war im 2. Weltkrieg.", "Ja."]),
        ("Er mag z.B. Berlin und z. B. Wien. Ich auch.", ["Er mag z.B. Berlin und z. B. Wien.", "Ich auch."]),
        ("„Hallo.“ Dann ging er. „Ja.“", ["„Hallo.“", "Dann ging er.", "„Ja.“"]),
        ("Über uns. Äpfel sind gut. Öl auch.", ["Über uns.", "Äpfel sind gut.", "Öl auch."]),
        ('He said "Stop." Then he left. "Why?" "No."', ['He said "Stop."', "Then he left.", '"Why?"', '"No."']),
        ("M. Dupont et Mme. Durand. Ils rient !", ["M. Dupont et Mme. Durand.", "Ils rient !"]),
        ("« Bonjour. » Il part. Ça va ?", ["« Bonjour. »", "Il part.", "Ça va ?"]),
        ("C'est à lui. œuf. Été.", ["C'est à lui. œuf.", "Été."]),
        ("你好。再见！真的吗？是。", ["你好。", "再见！", "真的吗？", "是。"]),
        ("“你好！”他说。“再见。”“好。”", ["“你好！”他说。", "“再见。”", "“好。”"]),
        ("你好!我来了.他走了", ["你好!", "我来了.", "他走了"]),
        ("He said 你好。 Then he left. 再见。", ["He said 你好。", "Then he left.", "再见。"]),
        ("I love it! 😀 See you.", ["I love it!", "😀 See you."]),
        ("- One. Two.\n* Three\n2) Four\n> Five", ["One.", "Two.", "Three", "Four", "Five"]),
        ("+ One\n- [x] Two\n1、三\n（1）四\n> - Five", ["One", "Two", "三", "四", "Five"]),
        ("Name\tThe age. Yes.\t\n\tTom\t25", ["Name", "The age.", "Yes.", "Tom", "25"]),
        ("| Tom | The man. |\n|---|\na | b", ["Tom", "The man.", "---", "a | b"]),
        ("Code:\n```python\nx = 1. Y\n```\nThe end.", ["Code:", "The end."]),
        ("```ls``` lists.\nThe end.", ["```ls``` lists.", "The end."]),
        ("3.5 is more. -5 is less.", ["3.5 is more. -5 is less."]),
        (
            "Er feierte seinen 50. Geburtstag. Beim 3. Versuch.",
            ["Er feierte seinen 50. Geburtstag.", "Beim 3. Versuch."],
        ),
        (
            "Zu ihrem 30. Geburtstag kam er. Er ist 25. Sie ist 24.",
            ["Zu ihrem 30. Geburtstag kam er.", "Er ist 25.", "Sie ist 24."],
        ),
        ("Es kostet 3 Mio. Euro. Ja.", ["Es kostet 3 Mio. Euro.", "Ja."]),
        (
            "Dr. med. Huber und Dipl.-Ing. Rot, Hauptstr. 5. Siehe Abb. 3.",
            ["Dr. med. Huber und Dipl.-Ing. Rot, Hauptstr. 5.", "Siehe Abb. 3."],
        ),
        ("Es war 44 v. Chr. Danach kam er.", ["Es war 44 v. Chr.", "Danach kam er."]),
        ("Evtl. Anna, bzw. Hr. Rot, ggf. Fr. Grün.", ["Evtl. Anna, bzw. Hr. Rot, ggf. Fr. Grün."]),
        (
            "Mt. Everest. Sgt. Pepper, Sen. Roe, Gov. Lee and Rep. Poe.",
            ["Mt. Everest.", "Sgt. Pepper, Sen. Roe, Gov. Lee and Rep. Poe."],
        ),
        ("Approx. 50 men. He is 5 ft. 3 tall.", ["Approx. 50 men.", "He is 5 ft. 3 tall."]),
        (
            "Warner Bros. Pictures aime p. ex. Paris et Ste. Marie.",
            ["Warner Bros. Pictures aime p. ex. Paris et Ste. Marie."],
        ),
        ("I like vitamin C. Do you? So do I. Tom too.", ["I like vitamin C.", "Do you?", "So do I.", "Tom too."]),
        ("It is by J. Smith and I. Asimov.", ["It is by J. Smith and I. Asimov."]),
        (
            "Use `a. B. C` in <a title='x. Y'>this</a>. Then go.",
            ["Use `a. B. C` in <a title='x. Y'>this</a>.", "Then go."],
        ),
        ("No end", ["No end"]),
        ("", []),
        (" \n\t", []),
    ],
)
def test_where_sentences_end(text: str, expected: list[str]) -> None:
    assert said(text) == expected


def test_lines_are_kept_as_they_were() -> None:
    text = "Dear Ann,\r\n\r\n  I came.  I saw.\r\n- one\r\n"
    parts = split_sentences(text)
    assert said(text) == ["Dear Ann,", "I came.", "I saw.", "one"]
    changed = [part.text.upper() for part in parts]
    assert join_sentences(parts, changed, spaced=True) == "DEAR ANN,\r\n\r\n  I CAME.  I SAW.\r\n- ONE\r\n"


def test_chinese_gets_spaces_in_a_language_that_has_them_and_loses_them_in_its_own() -> None:
    parts = split_sentences("你好。再见。\n好。")
    assert join_sentences(parts, ["Hello.", "Goodbye.", "", "Good."], spaced=True) == "Hello. Goodbye.\nGood."
    parts = split_sentences("Hello. Goodbye.\n  Good.")
    assert join_sentences(parts, ["你好。", "再见。", "", "好。"], spaced=False) == "你好。再见。\n  好。"
    parts = split_sentences("See a.de. Go.")
    assert (
        join_sentences(parts, ["看 a.de", "走。"], spaced=False) == "看 a.de 走。"
    )  # a link must not run into what follows


def test_tables_stay_tables_in_a_language_without_spaces() -> None:
    text = "|  Tom.  | Mary |\nTom.\tMary"
    said = {"Tom.": "汤姆。", "Mary": "玛丽"}
    parts = split_sentences(text)
    assert (
        join_sentences(parts, [said.get(part.text, "") for part in parts], spaced=False)
        == "|  汤姆。  | 玛丽 |\n汤姆。\t玛丽"
    )


@pytest.mark.parametrize(
    "text", ["." * 20_000 + "x", "Hello there. " * 10_000, "。" * 20_000 + "”x", "!" * 20_000 + "x"]
)
def test_long_lines_take_no_longer_than_they_are_long(text: str) -> None:
    started = time.perf_counter()
    split_sentences(text)
    assert time.perf_counter() - started < 3  # a tenth of it usually; looking at all that is before each stop: 20 s


@pytest.mark.parametrize(
    ("text", "longest", "expected"),
    [
        ("one two; three four, five six", 20, ["one two;", "three four, five six"]),
        ("one, two, three, four, five six", 20, ["one, two, three,", "four, five six"]),
        ("一二三四，五六七八。", 6, ["一二三四，", "五六七八。"]),
        ("one two three four", 10, ["one two", "three four"]),
        ("abcdefgh", 4, ["abcd", "efgh"]),
        ("1,234,567 is a number that is long", 20, ["1,234,567 is a", "number that is long"]),
        ("short", 9, ["short"]),
    ],
)
def test_what_is_too_long_is_cut_where_it_hurts_least(text: str, longest: int, expected: list[str]) -> None:
    parts = list(split_long_sentence(Sentence("  ", text), lambda part: len(part) <= longest))
    assert [part.text for part in parts] == expected
    assert parts[0].before == "  "
