"""Texts of any length through a model of sentences. The model here is a rule that can be told what to get wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fake_translator import Fake
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.inference.translator import Translation, Translator
from regard.text.placeholders import has_words


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
    fake.one = lambda text, nbest: Translation("WE SPEAK", -1.0, -2.0, ())  # type: ignore[method-assign]
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


def test_marks_around_words_are_not_shown_to_the_model_and_come_back() -> None:
    fake = Fake()
    text = "See <b>the man</b> in [the horse](https://a.org/b).\n*Very* _good_ **friend**."
    expected = "SEE <b>THE MAN</b> IN [THE HORSE](https://a.org/b).\n*VERY* _GOOD_ **FRIEND**."
    assert translated(fake, text, source="en") == expected
    assert fake.said() == ["See the man in the horse.", "Very good friend."]


def test_asterisks_without_a_partner_stay_at_the_ends_of_their_sentences() -> None:
    fake = Fake()
    assert translated(fake, "*The man. The horse.* The _end", source="en") == "*THE MAN. THE HORSE.* THE _END"
    assert fake.said() == ["The man.", "The horse.", "The ⟦1⟧end."]


def test_an_asterisk_is_never_shown_to_the_model() -> None:
    fake = Fake()
    for text in ("5 * 3 is the man", "the man* and **the horse", "*** the man", "the _ man __ x"):
        translated(fake, text, source="en")
    assert fake.said()
    assert not any(char in said for said in fake.said() for char in "*_")


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
    asked = fake.translate("the endless house", source="en", max_len_b=3)  # a limit that was asked for is kept
    assert asked.text == "THE ENDLESS HOUSE"
    assert asked.notes == ("cut off at the length limit (--decode.max_len_b N raises it)",)


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


def test_a_text_of_several_sentences_has_the_best_combinations() -> None:
    """Each sentence has hypotheses with the scores -1, -2, -3, so the three best sums of two are -2, -3, -3."""
    fake = Fake(lambda t: t.replace("man", "xman").replace("horse", "xhorse"))
    found = fake.translate("- the man.\r\nThe horse. 12", source="en", nbest=3)
    first = "- THE XMAN.\r\nTHE XHORSE. 12"
    others = {"- THE XXMAN.\r\nTHE XHORSE. 12", "- THE XMAN.\r\nTHE XXHORSE. 12"}
    assert found.text == found.nbest[0].text == first
    assert {t.text for t in found.nbest[1:]} == others
    assert [t.score for t in found.nbest] == [-2.0, -3.0, -3.0]


def test_there_are_fewer_translations_only_where_there_are_no_others() -> None:
    fake = Fake()
    found = fake.translate(["", "the man who went to the horse", "12", "der Mann ging in das Haus und sagte"], nbest=2)
    assert [len(t.nbest) for t in found] == [1, 1, 1, 1]  # this translator says the same twice
    assert [t.text for t in found] == [
        "",
        "THE MAN WHO WENT TO THE HORSE",
        "12",
        "DER MANN GING IN DAS HAUS UND SAGTE",
    ]
    fake = Fake(lambda t: t.replace("man", "xman"))
    assert len(fake.translate("the man. The man.", source="en", nbest=4).nbest) == 4
    assert len(fake.translate("the man. The horse.", source="en", nbest=4).nbest) == 4


# ---- what texts keep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "  the man \r\n\tthe horse\r\n\r\n",
        "1. the man\n2) the horse\na) the friend\n(b) the house\n• the man\n◦ the horse\n1.2. the man",
        "the man 😀 said 👍🏽 hello",
        "It is 50 € or €20 for John O'Neill, 10\u00a0000 $.",
        "the price: 5 % (§ 3)",
    ],
)
def test_texts_survive_a_model_that_changes_only_the_case(text: str) -> None:
    made = translated(Fake(), text, source="en")
    assert "".join(made.upper().split()) == "".join(text.upper().split())
    assert re.findall(r"[\r\n\t]", made) == re.findall(r"[\r\n\t]", text)
    assert [made[:1].isspace(), made[-1:].isspace()] == [text[:1].isspace(), text[-1:].isspace()]


def test_a_lost_symbol_is_tried_again_as_a_placeholder_with_its_number() -> None:
    fake = Fake(lambda t: t.replace("€", ""))
    assert translated(fake, "the man has 50 € now.", source="en") == "THE MAN HAS 50 € NOW."
    assert fake.said() == ["The man has 50 € now.", "The man has ⟦1⟧ now."]


def test_the_result_for_a_text_does_not_depend_on_its_neighbours() -> None:
    texts = ["the man. The horse", "see https://a.b/c", "*the* friend", "THE HOUSE IS OLD"]
    together = [t.text for t in Fake().translate(texts, source="en")]
    assert together == [translated(Fake(), text, source="en") for text in texts]


def test_what_is_copied_stays_as_it_was_written() -> None:
    class Copy(Fake):
        def one(self, text: str, nbest: int) -> Translation:
            return Translation(text, -1.0, -2.0, ())

    assert Copy().translate("en", to="de", source="en").text == "en"
    assert Copy().translate("On 3 May", to="de", source="en").text == "On 3 May"
