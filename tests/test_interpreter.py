"""Texts of any length through a model of sentences. The model here is a rule that can be told what to spoil."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.interpreter import Interpreter, same_end, translatable
from regard.text.detect import learned
from regard.text.frame import OWN
from regard.translator import Translation

PROFILES = {
    "en": learned(["the man who went to the house of his friend said that I would not come with them hello how are you"]),
    "de": learned(["der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen wie geht"]),
    "fr": learned(["le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous bonjour"]),
}  # fmt: skip
DIRECTIONS = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))


class Fake:
    """A translator that says the same in capitals, after `spoil`; it remembers what it was asked."""

    def __init__(self, spoil: Callable[[str], str] = str, max_len: int = 50, directions: Sequence[str] = DIRECTIONS):
        self.spoil, self.directions, self.languages, self.frame = spoil, tuple(directions), PROFILES, OWN
        self.source, self.target = "en", "de"
        self.model = SimpleNamespace(config=SimpleNamespace(max_len=max_len))
        self.tokenizers = SimpleNamespace(source=SimpleNamespace(encode=lambda text: list(text)))
        self.asked: list[tuple[str | None, list[str]]] = []

    def translate(
        self, texts: list[str], progress: Callable[[int], None] = lambda n: None, to: str | None = None, **options: Any
    ) -> list[Translation]:
        self.asked.append((to, list(texts)))
        assert all(len(text) <= self.model.config.max_len - 2 for text in texts)
        progress(len(texts))
        return [Translation(self.spoil(text).upper(), 0.0, 0.0, ()) for text in texts]

    def said(self) -> list[str]:
        return [text for _, texts in self.asked for text in texts]


def interpreter(spoil: Callable[[str], str] = str, **how: Any) -> tuple[Interpreter, Fake]:
    fake = Fake(spoil, **how)
    return Interpreter(fake), fake  # type: ignore[arg-type]


# ---- sentences and what is between them ------------------------------------------------------------------------------


def test_a_text_is_its_sentences_decoded_together_with_its_lines_as_they_were() -> None:
    ours, fake = interpreter()
    text = "Hello there.  How are you?\r\n\r\n  - the man\r\n"
    assert ours.translate(text, to="de") == "HELLO THERE.  HOW ARE YOU?\r\n\r\n  - THE MAN\r\n"
    assert fake.asked == [("de", ["Hello there.", "How are you?", "The man."])]


def test_one_text_or_several() -> None:
    ours, fake = interpreter()
    assert ours.translate("the man") == "THE MAN"
    assert ours.translate(["the man", "", "the friend"]) == ["THE MAN", "", "THE FRIEND"]
    assert ours.translate([]) == []
    assert fake.asked[1] == ("de", ["The man.", "The friend."])


@given(
    st.lists(
        st.sampled_from([*"abc .,;\n", "the ", "man ", "，", "。", "你", "⟦1⟧", "https://a.b/c ", "12", "😀", "мир"]),
        max_size=60,
    )
)
def test_every_text_is_taken_and_no_letter_is_lost(pieces: list[str]) -> None:
    """With a model that changes nothing but the case, whatever is cut, kept and joined."""
    text = "".join(pieces)
    ours, _ = interpreter(max_len=12)
    made = ours.translate(text, to="de", source="en")
    upper = {kept: kept.upper() for kept in ("https://a.b/c", "мир")}
    expected = text.upper()
    for kept, high in upper.items():
        made, expected = made.replace(kept, high), expected.replace(kept, high)
    letters = [re.sub(r"[\s.。,，;]", "", t.upper()) for t in (made, expected)]
    assert letters[0] == letters[1]


def test_what_is_too_long_is_cut_at_commas_and_never_refused() -> None:
    ours, fake = interpreter(max_len=23)
    text = "the man, who went to the house, said nothing."
    assert ours.translate(text, to="de", source="en") == text.upper()
    assert fake.said() == ["The man,", "who went to.", "the house,", "said nothing."]
    assert ours.translate("x" * 99, to="de", source="en") == " ".join(
        re.findall("X+", ours.translate("x" * 99, source="en"))
    )
    assert ours.translate("x" * 99, to="de", source="en").replace(" ", "") == "X" * 99


def test_a_full_stop_that_was_not_there_is_taken_off() -> None:
    ours, _ = interpreter(lambda text: text.rstrip(",") + "." if not text.endswith(".") else text)
    assert ours.translate("the house\n\nthe man.", source="en") == "THE HOUSE\n\nTHE MAN."
    assert same_end("one,", "eins.") == "eins,"
    assert same_end("why", "warum...") == "warum..."
    assert same_end("why?", "warum.") == "warum."


def test_what_is_shouted_is_said_and_shouted_again() -> None:
    ours, fake = interpreter(lambda text: {"The man is here.": "der mann ist hier."}[text])
    assert ours.translate("THE MAN IS HERE.", source="en") == "DER MANN IST HIER."
    fake.translate = lambda texts, **how: [Translation("Der Mann", 0.0, 0.0, ()) for _ in texts]  # type: ignore[method-assign]
    assert ours.translate("the man\nTHE MAN", source="en") == "Der Mann\nDer Mann"  # no word of more than three letters
    assert ours.translate("THE MANNER", source="en") == "DER MANN"


def test_chinese_has_no_spaces_between_sentences() -> None:
    ours, _ = interpreter(lambda text: {"Hello.": "你好。", "How are you?": "你好吗？"}.get(text, text))
    assert ours.translate("Hello. How are you?\nHello.", to="zh", source="en") == "你好。你好吗？\n你好。"
    ours, _ = interpreter(lambda text: {"你好。": "Hello.", "再见。": "Bye."}.get(text, text))
    assert ours.translate("你好。再见。") == "HELLO. BYE."


def test_quotes_and_spaces_reach_the_model_as_it_knows_them() -> None:
    ours, fake = interpreter()
    ours.translate("I don’t  say\u00a0“hello”", source="en")
    assert fake.said() == ['I don\'t say "hello"']
    ours.translate("Er sagte „Hallo“", source="de")
    assert fake.said()[-1] == "Er sagte „Hallo“"


# ---- what survives ---------------------------------------------------------------------------------------------------


def test_what_is_kept_goes_through_as_placeholders() -> None:
    ours, fake = interpreter()
    text = "See https://a.org/B and Привет or a.b@c.de now."
    assert ours.translate(text, source="en") == "SEE https://a.org/B AND Привет OR a.b@c.de NOW."
    assert fake.said() == ["See ⟦1⟧ and ⟦2⟧ or ⟦3⟧ now."]


@pytest.mark.parametrize(
    "spoil", [lambda t: t.replace("⟦1⟧", ""), lambda t: t.replace("⟦1⟧", "⟦1⟧ ⟦1⟧"), lambda t: t + "⟦7⟧"]
)
def test_around_a_placeholder_that_is_lost_the_parts_are_translated_by_themselves(spoil: Callable[[str], str]) -> None:
    ours, fake = interpreter(lambda t: spoil(t) if "⟦" in t else t)
    assert ours.translate("See https://a.org/B for the rest.", source="en") == "SEE https://a.org/B FOR THE REST."
    assert fake.asked[1] == ("de", ["See.", "for the rest."])


def test_more_than_the_model_knows_goes_in_parts_at_once() -> None:
    ours, fake = interpreter()
    assert ours.translate("a 😀 b 😁 c 😂 d 😃 e 😄 f", source="en") == "A 😀 B 😁 C 😂 D 😃 E 😄 F"
    assert fake.said() == ["A.", "b.", "c.", "d.", "e.", "f."]


def test_a_lost_number_is_tried_again_as_a_placeholder() -> None:
    ours, fake = interpreter(lambda t: t.replace("1992", "1929"))
    assert ours.translate("the year 1992, the man and 77.", source="en") == "THE YEAR 1992, THE MAN AND 77."
    assert fake.said() == ["The year 1992, the man and 77.", "The year ⟦1⟧, the man and 77."]


def test_of_two_tries_the_one_that_keeps_more_numbers_is_taken() -> None:
    ours, _ = interpreter(lambda t: "nothing" if "⟦" in t else t.replace("1992", "long ago"))
    assert ours.translate("It was 1992.", source="en") == "IT WAS LONG AGO."


@pytest.mark.parametrize(
    "text", ["12345", "https://a.b/c", "...", "😀", "Привет, мир!", "- 3.5\n— 7", " \n", "", "a@b.de 12:30"]
)
def test_what_has_no_words_stays_as_it_is_and_needs_no_language(text: str) -> None:
    ours, fake = interpreter(lambda t: "!")
    assert not translatable(text)
    assert ours.translate(text) == text
    assert fake.said() == []


# ---- languages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "to", "expected"),
    [
        ("the man said that", None, ("en", "de")),
        ("der Mann und das Haus", None, ("de", "en")),
        ("nous sommes à la maison", None, ("fr", "en")),
        ("我们说汉语。", None, ("zh", "en")),
        ("我們說漢語。", None, ("zh-Hant", "en")),
        ("the man said that", "zh-Hant", ("en", "zh-Hant")),
        ("12", "fr", ("", "fr")),
    ],
)
def test_languages_are_found_out(text: str, to: str | None, expected: tuple[str, str]) -> None:
    ours, _ = interpreter()
    made = ours.interpret([text], to)[0]
    assert (made.source, made.target) == expected
    assert str(made) == made.text


def test_texts_of_several_languages_go_where_each_belongs() -> None:
    ours, fake = interpreter()
    texts = ["the man said that", "der Mann und das Haus", "the friend of his"]
    assert [m.target for m in ours.interpret(texts)] == ["de", "en", "de"]
    assert fake.asked == [("de", ["The man said that.", "The friend of his."]), ("en", ["Der Mann und das Haus."])]


def test_a_word_that_says_little_is_in_the_language_of_the_rest_or_in_one_that_fits() -> None:
    ours, _ = interpreter()
    rest = ["der Mann ging in das Haus und sagte nicht"]
    assert [m.source for m in ours.interpret(["a", *rest])] == ["de", "de"]
    assert ours.interpret(["a"], to="de")[0].source == "en"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"texts": "der Mann und das Haus", "to": "fr"}, "from de to fr: it knows en>de, de>en, .*say --from"),
        ({"texts": "the man", "source": "en", "to": "ru"}, "from en to ru: it knows en>de"),
        ({"texts": "the man", "source": "xx"}, "from xx to en: it knows en>de"),
        ({"texts": "私は学生です。", "to": "en"}, "cannot tell whether this is"),
    ],
)
def test_pairs_that_there_are_not_are_refused_with_those_that_there_are(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RegardError, match=said):
        interpreter()[0].translate(**arguments)


def test_without_profiles_the_language_must_be_said() -> None:
    ours, _ = interpreter()
    ours.languages = {}
    with pytest.raises(RegardError, match=r"no languages\.json.*--from"):
        ours.translate("the man")
    assert ours.translate("the man", source="en") == "THE MAN"


def test_a_model_of_one_direction_needs_neither_tag_nor_profiles() -> None:
    ours, fake = interpreter(directions=())
    assert ours.translate("the man. The end.") == "THE MAN. THE END."
    assert fake.asked[0][0] is None
    with pytest.raises(RegardError, match="from en to fr: it knows en>de"):
        ours.translate("the man", to="fr")
