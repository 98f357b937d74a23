"""Placeholders for what a translation must not change."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.placeholders import (
    PROTECTED,
    has_words,
    insert_placeholders,
    protected_pattern,
    restore_placeholders,
    split_protected,
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("See https://a.org/b?c=d,e#f.", ["https://a.org/b?c=d,e#f"]),
        ("(see www.a.de/b)", ["www.a.de/b"]),
        ("Go to tatoeba.org, or github.com/a/b.", ["tatoeba.org", "github.com/a/b"]),
        ("请访问https://example.com/x。谢谢", ["https://example.com/x"]),
        ("请写信到info@example.com吧", ["info@example.com"]),
        ("Mail a.b+c@d-e.co.uk!", ["a.b+c@d-e.co.uk"]),
        ("Press `a  b` in <b>bold</b> {name} %s", ["`a  b`", "<b>", "</b>", "{name}", "%s"]),
        ("Write to @anna about the #weekend", ["@anna", "#weekend"]),
        ("if a < b and c > d", []),
        ("He said Привет, мир to me.", ["Привет, мир"]),
        ("ありがとう means thanks, 감사합니다 too.", ["ありがとう", "감사합니다"]),
        ("约翰・史密斯来了。", []),
        ("I love you 👩‍👩‍👧🇩🇪 ❤️!", ["👩‍👩‍👧🇩🇪", "❤️"]),
        ("A user's own ⟦3⟧ stays, and ⟧ too.", ["⟦3⟧", "⟧"]),
        ("No \ue000 and \U000f0001 here", ["\ue000", "\U000f0001"]),
        ("See https://en.wikipedia.org/wiki/Foo_(bar) now", ["https://en.wikipedia.org/wiki/Foo_(bar)"]),
        ("(see https://a.org/b).", ["https://a.org/b"]),
        ("ftp://a.b/c, mailto:a@b.de: a.co.uk or t.co!", ["ftp://a.b/c", "mailto:a@b.de", "a.co.uk", "t.co"]),
        ("访问tatoeba.org和file.py吧", ["tatoeba.org", "file.py"]),
        ("C:\\temp\\a.txt, /usr/local/bin and ./file.py.", ["C:\\temp\\a.txt", "/usr/local/bin", "./file.py"]),
        ("{{ name }} has $HOME and ${USER}", ["{{ name }}", "$HOME", "${USER}"]),
        ("Set --verbose for foo_bar_baz at 3f2a9bc", ["--verbose", "foo_bar_baz", "3f2a9bc"]),
        ("Tom&nbsp;&#38; Mary", ["&nbsp;", "&#38;"]),
        ("See [the docs](https://a.org/b_(c)) now", ["[", "](https://a.org/b_(c))"]),
        ("192.168.0.1 runs v2.0.1 or 1.2.3", ["192.168.0.1", "v2.0.1", "1.2.3"]),
        ("ISBN 978-3-16-148410-0 of 2020-03-04", ["978-3-16-148410-0", "2020-03-04"]),
        ("+49 30 1234567, (030) 123-4567, 01 23 45 67 89", ["+49 30 1234567", "(030) 123-4567", "01 23 45 67 89"]),
        ("1.234.567 euros on 3.4.2020, 24/7, he/she, $100, 10-20", []),
        ("Ärger, café, naïve, Straße, 100%, 3 < 5, 50 % so.", []),
    ],
)  # fmt: skip
def test_what_is_protected(text: str, kept: list[str]) -> None:
    marked, found = insert_placeholders(text)
    assert found == kept
    assert marked.count("⟦") == len(kept)
    assert restore_placeholders(marked, found) == text


@given(
    st.lists(st.sampled_from(["word ", "https://a.b/c ", "⟦1⟧", "⟦2⟧ ", "мир ", "😀", "x@y.de "]), max_size=8).map(
        "".join
    )
)
def test_what_is_put_back_unchanged_is_the_text(text: str) -> None:
    assert restore_placeholders(*insert_placeholders(text)) == text
    assert not PROTECTED.search(insert_placeholders(text)[0].replace("⟦", "").replace("⟧", ""))


@pytest.mark.parametrize("said", ["no mark", "⟦1⟧ and ⟦1⟧ ⟦2⟧", "⟦1⟧", "⟦1⟧ ⟦2⟧ ⟦3⟧", "⟦2⟧ ⟦3⟧"])
def test_a_mark_that_is_gone_or_doubled_or_new_is_noticed(said: str) -> None:
    assert restore_placeholders(said, ["a", "b"]) is None


def test_marks_may_change_places() -> None:
    assert restore_placeholders("⟦2⟧ vor ⟦1⟧", ["⟦2⟧", "x"]) == "x vor ⟦2⟧"


def test_a_broken_mark_is_noticed() -> None:
    assert restore_placeholders("Or ⟦1⟧ der 2024⟧ der Welt", ["#12345"]) is None
    assert restore_placeholders("⟦ ⟦1⟧", ["x"]) is None


def test_chinese_is_protected_where_neither_language_is() -> None:
    text = "Say 你好，世界 or Привет"
    assert insert_placeholders(text, protected_pattern("en", "de"))[1] == ["你好，世界", "Привет"]
    for pair in (("en", "zh-Hant"), ("zh", "en")):
        assert insert_placeholders(text, protected_pattern(*pair))[1] == ["Привет"]
    assert has_words("你好")
    assert not has_words("你好", protected_pattern("de", "en"))


def test_protected_parts_stand_between_the_rest() -> None:
    assert split_protected("See a.org or b.org", PROTECTED) == ["See ", "a.org", " or ", "b.org", ""]
    assert split_protected("no link", PROTECTED) == ["no link"]


@pytest.mark.parametrize("piece", ["x", "a.", "a@", "a_", "`", "[a", "/a", "1.", "01 ", "https://(", "<a ", "к "])
def test_matching_is_fast_on_any_text(piece: str) -> None:
    started = time.perf_counter()
    PROTECTED.sub("", piece * 20_000)
    assert time.perf_counter() - started < 2  # a hundredth of it usually; a square of the length is minutes
