"""What is kept aside while a text is translated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.keep import KEPT, kept_aside, lost_numbers, put_back


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
        ("A user's own ⟦3⟧ stays.", ["⟦3⟧"]),
        ("Ärger, café, naïve, Straße, 100%, 3 < 5, 50 % so.", []),
    ],
)  # fmt: skip
def test_what_is_kept(text: str, kept: list[str]) -> None:
    marked, found = kept_aside(text)
    assert found == kept
    assert marked.count("⟦") == len(kept)
    assert put_back(marked, found) == text


@given(
    st.lists(st.sampled_from(["word ", "https://a.b/c ", "⟦1⟧", "⟦2⟧ ", "мир ", "😀", "x@y.de "]), max_size=8).map(
        "".join
    )
)
def test_what_is_put_back_unchanged_is_the_text(text: str) -> None:
    assert put_back(*kept_aside(text)) == text
    assert not KEPT.search(kept_aside(text)[0].replace("⟦", "").replace("⟧", ""))


@pytest.mark.parametrize("said", ["no mark", "⟦1⟧ and ⟦1⟧ ⟦2⟧", "⟦1⟧", "⟦1⟧ ⟦2⟧ ⟦3⟧", "⟦2⟧ ⟦3⟧"])
def test_a_mark_that_is_gone_or_doubled_or_new_is_noticed(said: str) -> None:
    assert put_back(said, ["a", "b"]) is None


def test_marks_may_change_places() -> None:
    assert put_back("⟦2⟧ vor ⟦1⟧", ["⟦2⟧", "x"]) == "x vor ⟦2⟧"


@pytest.mark.parametrize(
    ("source", "translation", "lost"),
    [
        ("In 1992 and 1993.", "1992 und 1993.", []),
        ("In 1992 and 1993.", "1992.", ["1993"]),
        ("He paid 4,523.50 euros.", "Er zahlte 4.523,50 Euro.", []),
        ("He paid 4,523 euros.", "Il a payé 4 523 euros.", []),
        ("He paid 4,523 euros.", "Er zahlte 4,532 Euro.", ["4,523"]),
        ("At 5:30 on 3/4/2020.", "Um 5.30 am 3.4.2020.", []),
        ("I have 3 cats.", "Ich habe drei Katzen.", []),
        ("I am 25.", "我２５岁。", []),
        ("I am 25.", "Ich bin fünfundzwanzig.", ["25"]),
    ],
)
def test_numbers_that_are_lost(source: str, translation: str, lost: list[str]) -> None:
    assert lost_numbers(source, translation) == lost
