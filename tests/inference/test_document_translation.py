"""Texts of any length through a model of sentences. The model here is a rule that can be told what to get wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.config import DecodeConfig
from regard.errors import RegardError
from regard.inference.translator import Translation, Translator
from regard.model_folder import ModelPackage
from regard.models.model import TranslationModel
from regard.text.language_identification import learn_profile
from regard.text.placeholders import has_words
from regard.text.special_tokens import EOS_TEMPLATE

TEXTS = {
    "en": "the man who went to the horse of his friend said that I would not come with them hello how are you",
    "de": "der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen wie geht",
    "fr": "le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous bonjour",
}
PROFILES = {language: learn_profile([text]) for language, text in TEXTS.items()}
DIRECTIONS = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))


class Model(TranslationModel):
    """A model of which only the longest row is known."""

    def __init__(self, max_len: int) -> None:
        nn.Module.__init__(self)
        self.config: Any = SimpleNamespace(max_len=max_len)


class Fake(Translator):
    """A translator that returns each sentence in capitals, after `spoil`, and keeps the sentences it was given."""

    def __init__(
        self,
        spoil: Callable[[str], str] = str,
        max_len: int = 50,
        directions: Sequence[str] = DIRECTIONS,
        **settings: Any,
    ):
        tokenizers: Any = SimpleNamespace(source=SimpleNamespace(encode=lambda text: list(text)))
        package = ModelPackage(
            Model(max_len),
            tokenizers,
            "translation",
            DecodeConfig(beam=4),
            "en",
            "de",
            tuple(directions),
            token_template=EOS_TEMPLATE,
            languages=PROFILES,
        )
        super().__init__(package, **settings)
        self.spoil = spoil
        self.asked: list[tuple[str | None, list[str]]] = []

    def translate_sentences(
        self,
        sentences: Sequence[str],
        *,
        to: str | None = None,
        progress: Callable[[int], None] = lambda n: None,
        **options: Any,
    ) -> list[Translation]:
        if not self.directions:
            self.encode_sources([], to)  # refuses another language
        self.asked.append((to, list(sentences)))
        assert all(len(text) <= self.model.config.max_len - 2 for text in sentences)
        progress(len(sentences))
        return [self.one(text, options.get("nbest", 1)) for text in sentences]

    def one(self, text: str, nbest: int) -> Translation:
        """The second hypothesis is `spoil`ed twice, the third three times."""
        found = []
        for i in range(nbest):
            text = self.spoil(text)
            found.append(Translation(text.upper(), -1.0 - i, -2.0 - i, (), ended="endless" not in text))
        return replace(found[0], nbest=tuple(found) if nbest > 1 else ())

    def said(self) -> list[str]:
        return [text for _, texts in self.asked for text in texts]


def translated(translator: Translator, text: str, **how: Any) -> str:
    return translator.translate(text, **how).text


# ---- sentences and what is between them ------------------------------------------------------------------------------


def test_a_text_is_its_sentences_decoded_together_with_its_lines_as_they_were() -> None:
    fake = Fake()
    text = "Hello there.  How are you?\r\n\r\n  - the man\r\n"
    assert translated(fake, text, to="de") == "HELLO THERE.  HOW ARE YOU?\r\n\r\n  - THE MAN\r\n"
    assert fake.asked == [("de", ["Hello there.", "How are you?", "The man."])]


def test_one_text_or_several() -> None:
    fake = Fake()
    assert translated(fake, "the man") == "THE MAN"
    assert [t.text for t in fake.translate(["the man", "", "the friend"])] == ["THE MAN", "", "THE FRIEND"]
    assert fake.translate([]) == []
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
    fake = Fake(max_len=12)
    made = translated(fake, text, to="de", source="en")
    upper = {kept: kept.upper() for kept in ("https://a.b/c", "мир")}
    expected = text.upper()
    for kept, high in upper.items():
        made, expected = made.replace(kept, high), expected.replace(kept, high)
    letters = [re.sub(r"[\s.。,，;]", "", t.upper()) for t in (made, expected)]
    assert letters[0] == letters[1]


def test_what_is_too_long_is_cut_at_commas_and_never_refused() -> None:
    fake = Fake(max_len=23)
    text = "the man, who went to the horse, said nothing."
    assert translated(fake, text, to="de", source="en") == text.upper()
    assert fake.said() == ["The man,", "who went to.", "the horse,", "said nothing."]
    assert translated(fake, "x" * 30, to="de", source="en") == f"{'X' * 15} {'X' * 15}"


def test_how_long_a_sentence_may_be_can_be_said() -> None:
    fake = Fake(max_sentence_tokens=10)
    assert translated(fake, "the man and the horse", source="en") == "THE MAN AND THE HORSE"
    assert fake.said() == ["The man.", "and.", "the horse."]


def test_a_character_may_be_several_tokens() -> None:
    fake = Fake(max_len=24)
    fake.tokenizers.source.encode = lambda text: list(text.encode())
    assert len("我们说汉语，你好。") < fake.max_sentence_tokens < len("我们说汉语，你好。".encode())
    translated(fake, "我们说汉语，你好。", source="zh")
    assert fake.said() == ["我们说汉语，", "你好。"]


def test_a_full_stop_that_was_not_there_is_taken_off() -> None:
    fake = Fake(lambda text: text.rstrip(",") + "." if not text.endswith(".") else text)
    assert translated(fake, "the horse\n\nthe man.", source="en") == "THE HORSE\n\nTHE MAN."


def test_upper_case_is_translated_in_sentence_case_and_restored() -> None:
    fake = Fake(lambda text: {"The man is here.": "der mann ist hier."}[text])
    assert translated(fake, "THE MAN IS HERE.", source="en") == "DER MANN IST HIER."
    fake.one = lambda text, nbest: Translation("Der Mann", 0.0, 0.0, ())  # type: ignore[method-assign]
    assert (
        translated(fake, "the man\nTHE MAN", source="en") == "Der Mann\nDer Mann"
    )  # no word of more than three letters
    assert translated(fake, "THE MANNER", source="en") == "DER MANN"


def test_chinese_has_no_spaces_between_sentences() -> None:
    fake = Fake(lambda text: {"Hello.": "你好。", "How are you?": "你好吗？"}.get(text, text))
    assert translated(fake, "Hello. How are you?\nHello.", to="zh", source="en") == "你好。你好吗？\n你好。"
    fake = Fake(lambda text: {"你好。": "Hello.", "再见。": "Bye."}.get(text, text))
    assert translated(fake, "你好。再见。") == "HELLO. BYE."


def test_quotes_and_spaces_reach_the_model_as_it_knows_them() -> None:
    fake = Fake()
    translated(fake, "I don’t  say\u00a0“hello”", source="en")
    assert fake.said() == ['I don\'t say "hello"']
    translated(fake, "Er sagte „Hallo“", source="de")
    assert fake.said()[-1] == "Er sagte „Hallo“"


# ---- what survives ---------------------------------------------------------------------------------------------------


def test_what_is_kept_goes_through_as_placeholders() -> None:
    fake = Fake()
    text = "See https://a.org/B and Привет or a.b@c.de now."
    assert translated(fake, text, source="en") == "SEE https://a.org/B AND Привет OR a.b@c.de NOW."
    assert fake.said() == ["See ⟦1⟧ and ⟦2⟧ or ⟦3⟧ now."]


@pytest.mark.parametrize(
    "spoil", [lambda t: t.replace("⟦1⟧", ""), lambda t: t.replace("⟦1⟧", "⟦1⟧ ⟦1⟧"), lambda t: t + "⟦7⟧"]
)
def test_around_a_placeholder_that_is_lost_the_parts_are_translated_by_themselves(spoil: Callable[[str], str]) -> None:
    fake = Fake(lambda t: spoil(t) if "⟦" in t else t)
    assert translated(fake, "See https://a.org/B for the rest.", source="en") == "SEE https://a.org/B FOR THE REST."
    assert fake.asked[1] == ("de", ["See.", "for the rest."])


def test_more_than_the_model_knows_goes_in_parts_at_once() -> None:
    fake = Fake()
    assert translated(fake, "a 😀 b 😁 c 😂 d 😃 e 😄 f", source="en") == "A 😀 B 😁 C 😂 D 😃 E 😄 F"
    assert fake.said() == ["A.", "b.", "c.", "d.", "e.", "f."]


def test_a_lost_number_is_tried_again_as_a_placeholder() -> None:
    fake = Fake(lambda t: t.replace("1992", "1929"))
    assert translated(fake, "the year 1992, the man and 77.", source="en") == "THE YEAR 1992, THE MAN AND 77."
    assert fake.said() == ["The year 1992, the man and 77.", "The year ⟦1⟧, the man and 77."]


def test_numbers_beside_one_another_are_one_placeholder() -> None:
    fake = Fake(lambda t: re.sub(r"\d\d", "X", t))
    assert translated(fake, "11 22 33 44 55 66 77 men", source="en") == "11 22 33 44 55 66 77 MEN"
    assert fake.said()[1:] == ["⟦1⟧ men."]


def test_around_a_number_that_is_lost_again_the_parts_are_translated_by_themselves() -> None:
    fake = Fake(lambda t: "nothing" if "⟦" in t else t.replace("1992", "long ago"))
    assert translated(fake, "It was 1992, not 33.", source="en") == "IT WAS 1992, NOT 33."
    assert fake.said()[2:] == ["It was.", ", not 33."]


def test_more_lost_numbers_than_the_model_knows_placeholders_are_gone_around() -> None:
    fake = Fake(lambda t: re.sub(r"\d\d\d", "", t))
    assert translated(fake, "110 a 220 b 330 c 440 d 550 e", source="en") == "110 A 220 B 330 C 440 D 550 E"
    assert fake.said()[1:] == ["a.", "b.", "c.", "d.", "e."]


def test_a_placeholder_that_does_not_fit_is_not_tried() -> None:
    fake = Fake(lambda t: t.replace("12", "twelve"), max_len=23)
    text = "man 12 and the horse"
    assert len(text) == fake.max_sentence_tokens
    assert translated(fake, text, source="en") == "MAN TWELVE AND THE HORSE"
    assert fake.said() == ["Man 12 and the horse."]
    translated(fake, text.replace("the", "a"), source="en")
    assert fake.said()[1:] == ["Man 12 and a horse.", "Man ⟦1⟧ and a horse."]


def test_a_number_in_words_is_not_gone_around() -> None:
    fake = Fake(lambda t: t.replace("30", "thirty").replace("⟦1⟧", ""))
    assert translated(fake, "the last 30 days", source="en") == "THE LAST THIRTY DAYS"
    assert len(fake.said()) == 2


def test_words_inside_tags_and_links_are_translated_by_themselves() -> None:
    fake = Fake()
    text = "See <b>the man</b> in [the horse](https://a.org/b)."
    assert translated(fake, text, source="en") == "SEE <b>THE MAN</b> IN [THE HORSE](https://a.org/b)."
    assert fake.said() == ["See.", "the man.", "in.", "the horse."]


def test_tables_and_code_keep_their_form() -> None:
    fake = Fake()
    text = "| the man | 25 |\n|---|---|\nName\tthe age\n```\nthe code. The end\n```\nthe end"
    expected = "| THE MAN | 25 |\n|---|---|\nNAME\tTHE AGE\n```\nthe code. The end\n```\nTHE END"
    assert translated(fake, text, source="en") == expected


@pytest.mark.parametrize(
    "text", ["12345", "https://a.b/c", "...", "😀", "Привет, мир!", "- 3.5\n— 7", " \n", "", "a@b.de 12:30"]
)
def test_what_has_no_words_stays_as_it_is_and_needs_no_language(text: str) -> None:
    fake = Fake(lambda t: "!")
    assert not has_words(text)
    assert translated(fake, text) == text
    assert fake.said() == []


def test_the_scores_of_a_text_are_the_sums_of_those_of_its_sentences() -> None:
    found = Fake().translate("the man. https://a.org/b\nThe friend.", source="en")
    assert (found.score, found.log_prob, found.ended, found.nbest) == (-2.0, -4.0, True, ())
    assert (found.source, found.target, found.notes) == ("en", "de", ())


# ---- languages -------------------------------------------------------------------------------------------------------


def test_texts_of_one_pair_are_decoded_together() -> None:
    fake = Fake()
    texts = ["the man who went to the horse", "der Mann ging in das Haus und sagte", "the friend of his house"]
    found = fake.translate(texts)
    assert [(m.source, m.target) for m in found] == [("en", "de"), ("de", "en"), ("en", "de")]
    assert [to for to, _ in fake.asked] == ["de", "en"]
    assert str(found[2]) == found[2].text == "THE FRIEND OF HIS HOUSE"


def test_what_cannot_be_read_is_left_with_a_note() -> None:
    fake = Fake()
    found = fake.translate(["the man who went to the horse", "私は学生です。  はい。", "Привет"], to="zh")
    assert [m.text for m in found] == ["THE MAN WHO WENT TO THE HORSE", "私は学生です。  はい。", "Привет"]
    assert [len(m.notes) for m in found] == [0, 1, 1]
    assert len(fake.said()) == 1


def test_chinese_is_left_inside_a_text_where_neither_language_is() -> None:
    fake = Fake()
    assert translated(fake, "the man said 你好 to them", to="de") == "THE MAN SAID 你好 TO THEM"
    translated(fake, "the man said 你好 to them", to="zh")
    assert fake.said() == ["The man said ⟦1⟧ to them.", "The man said 你好 to them."]


def test_a_translation_that_was_cut_is_noted() -> None:
    fake = Fake()
    found = fake.translate(
        ["the man. The endless house.", "the man", "See https://a.b/c" + "<b>endless</b>"], source="en"
    )
    assert [bool(m.notes) for m in found] == [True, False, True]
    assert "cut off at the length limit" in found[0].notes[0]


def test_a_model_of_one_direction_needs_neither_tag_nor_profiles() -> None:
    fake = Fake(directions=())
    assert translated(fake, "the man. The end.") == "THE MAN. THE END."
    assert fake.asked[0][0] is None
    with pytest.raises(RegardError, match="translates from en to de, not to fr"):
        translated(fake, "the man", to="fr")


# ---- several hypotheses ----------------------------------------------------------------------------------------------


def test_several_translations_of_a_sentence() -> None:
    fake = Fake(lambda t: t.replace("man", "xman"))
    (found,) = fake.translate(["- see https://a.org/b, man"], source="en", nbest=2)
    assert fake.said() == ["See ⟦1⟧, man."]
    assert [t.text for t in found.nbest] == ["- SEE https://a.org/b, XMAN", "- SEE https://a.org/b, XXMAN"]
    assert [t.score for t in found.nbest] == [-1.0, -2.0]
    assert (found.source, found.target) == ("en", "de")
    assert found.text == found.nbest[0].text


def test_a_hypothesis_without_its_placeholder_is_left_out() -> None:
    seen = []

    def spoil(text: str) -> str:
        seen.append(text)
        return text.replace("⟦1⟧", "⟦⟧") if len(seen) == 1 else text.replace("⟦⟧", "⟦1⟧ so")

    fake = Fake(spoil)
    (found,) = fake.translate(["See a.org now"], source="en", nbest=3)
    assert [t.text for t in found.nbest] == ["SEE a.org SO NOW"]  # and what is said twice, in other pieces, once
    fake = Fake(lambda t: t.replace("⟦1⟧", ""))  # none has it
    (found,) = fake.translate(["See a.org now"], source="en", nbest=3)
    assert [t.text for t in found.nbest] == ["SEE a.org NOW"]


def test_several_sentences_have_no_several_translations() -> None:
    fake = Fake()
    found = fake.translate(["", "the man who went to the horse", "12", "der Mann ging in das Haus und sagte"], nbest=2)
    assert [len(t.nbest) for t in found] == [1, 1, 1, 1]  # this translator says the same twice
    assert [t.text for t in found] == [
        "",
        "THE MAN WHO WENT TO THE HORSE",
        "12",
        "DER MANN GING IN DAS HAUS UND SAGTE",
    ]
    with pytest.raises(RegardError, match=r"^line 2: .*nbest.* one sentence, not for 'The man\. The house\.'"):
        fake.translate(["the man", "The man. The house."], source="en", nbest=2)
