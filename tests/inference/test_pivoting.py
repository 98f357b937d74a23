"""Translation by way of a third language, glossaries and required words."""

from __future__ import annotations

from typing import Any

import pytest
from fake_translator import Fake
from test_alignment import LINES, translator

from regard import inference
from regard.errors import RegardError
from regard.inference.translator import Translation, Translator
from regard.text.alignment import Link
from regard.text.glossary import Glossary, Term
from regard.text.tokenizer import Tokenizer, TokenizerConfig, Tokenizers

NOTE = "translated by way of English"
WORDS = {"Mann": "Man", "Man": "Homme", "Das Pferd": "The horse", "The horse": "Le cheval"}


class Dictionary(Fake):
    """A translator that replaces words; links are between words at equal places."""

    def one(self, text: str, nbest: int) -> Translation:
        for word, other in WORDS.items():
            if word in text:
                text = text.replace(word, other)
                break
        made = [Translation(text + "!" * i, -1.0 - i, -2.0 - i, (text,), confidence=0.5) for i in range(nbest)]
        return made[0] if nbest == 1 else Translation(**{**vars(made[0]), "nbest": tuple(made)})

    def align_sentences(self, pairs: Any, languages: Any) -> list[list[Link]]:
        self.aligned = list(zip(pairs, languages, strict=True))
        return [[Link(0, 3, 0, 3, 0.5)] for _ in pairs]


def test_a_pair_that_the_model_does_not_have_goes_by_way_of_english() -> None:
    fake = Dictionary()
    found = fake.translate("Mann. Das Pferd.\nhttps://a.b/c", to="fr", source="de")
    assert found.text == "Homme. Le cheval.\nhttps://a.b/c"
    assert (found.source, found.target, found.via, found.notes) == ("de", "fr", "en", (NOTE,))
    assert [to for to, _ in fake.asked] == ["en", "fr"]
    assert fake.said() == ["Mann.", "Das Pferd.", "Man.", "The horse."]
    assert (found.score, found.log_prob) == (-4.0, -8.0)
    assert found.confidence == pytest.approx((5 * 0.25 + 10 * 0.25 + 13) / 28)
    direct = fake.translate("Das Pferd.", to="en", source="de")
    assert (direct.via, direct.notes) == ("", ())


def test_hypotheses_are_those_of_the_second_step() -> None:
    fake = Dictionary()
    found = fake.translate("Das Pferd.", to="fr", source="de", nbest=2)
    assert [t.text for t in found.nbest] == ["Le cheval.", "Le cheval.!"]
    assert [t.score for t in found.nbest] == [-2.0, -3.0]
    assert fake.settings[0]["nbest"] == 1


def test_links_are_composed() -> None:
    fake = Dictionary()
    found = fake.translate("  Das Pferd.", to="fr", source="de", alignment=True)
    assert fake.aligned == [(("Das Pferd.", "The horse."), ("de", "en")), (("The horse.", "Le cheval."), ("en", "fr"))]
    assert found.alignment == (Link(2, 5, 2, 5, 0.25),)


def test_a_sentence_that_is_left_in_the_first_step_stays_in_its_language() -> None:
    fake = Dictionary()
    fake.spoil = str
    own = fake.one
    fake.one = lambda text, nbest: Translation("", 0.0, 0.0, ()) if "Pferd" in text else own(text, nbest)  # type: ignore[method-assign]
    found = fake.translate("Mann. Das Pferd.", to="fr", source="de")
    assert found.text.endswith(" Das Pferd.")
    assert found.notes == (NOTE, "a sentence is left in the source language: its translation is empty")
    assert not any("Pferd" in text for to, texts in fake.asked if to == "fr" for text in texts)


# ---- glossaries ------------------------------------------------------------------------------------------------------


class Forced(Fake):
    """A translator that appends the words that are required of it."""

    def translate_sentences(self, sentences: Any, *, force_words: Any = None, **how: Any) -> list[Translation]:  # type: ignore[override]
        self.forced = force_words
        found = super().translate_sentences(sentences, **how)
        words = force_words or [[]] * len(found)
        texts = [" ".join([*own, each.text]) for own, each in zip(words, found, strict=True)]
        return [Translation(text, -1.0, -2.0, ()) for text in texts]


def test_terms_are_required_words_of_the_sentences_that_have_them() -> None:
    fake = Forced()
    terms = {"man": "kerl", "the horse": "der gaul"}
    found = fake.translate("the man. A friend. THE OLD HORSE AND THE HORSE.", source="en", glossary=terms)
    assert fake.forced == [["kerl"], [], ["der gaul"]]
    assert found.text == "Kerl THE MAN. A FRIEND. DER GAUL THE OLD HORSE AND THE HORSE."
    fake.translate("THE USB STICK IS OLD, but not here.\nTHE USB STICK IS OLD.", source="en", glossary={"USB": "U"})
    assert fake.forced == [["U"], ["U"]]
    fake.translate("See https://man.de/man now.", source="en", glossary=Glossary(terms))
    assert fake.forced is None  # no term inside of what is copied
    with pytest.raises(TypeError, match="glossary takes a Glossary"):
        fake.translate("the man", source="en", glossary=3)  # type: ignore[call-overload]


def test_terms_go_with_the_directions_that_are_used() -> None:
    fake = Forced()
    glossary = Glossary([Term("pferd", "steed", "de>en"), Term("steed", "destrier", "en>fr"), Term("pferd", "x")])
    found = fake.translate("Das Pferd.", to="fr", source="de", glossary=glossary)
    assert "DESTRIER" in found.text.upper()
    assert "X " not in found.text
    assert any("glossary" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["transformer", "rnnsearch"])
def test_required_words_are_in_the_output_of_any_model(kind: str) -> None:
    model = translator(kind)
    words = [["Apfel"], [], ["Mann gegessen", "roten"], ["Mann", "Mann"], ["einen roten Apfel"]]
    sentences = ["a red apple", "the man", "the man has eaten.", "a man and a man", "say I!"]
    found = model.translate_sentences(sentences, force_words=words, nbest=2, max_len_b=6)
    for own, each in zip(words, found, strict=True):
        for hypothesis in each.nbest or (each,):
            said = hypothesis.text.lower()
            for word in own:
                assert word.lower() in said
            assert said.count("mann") >= own.count("Mann")
    glossary = Glossary({"apple": "Apfel"})
    assert "Apfel" in model.translate("a red apple", glossary=glossary).text
    assert model.translate("the man", glossary=glossary) == model.translate("the man")


def with_vocabulary(kind: str) -> Translator:
    """Return an untrained model whose vocabulary has the characters, or the words, of the training lines alone."""
    tokens = Tokenizer.train(LINES, TokenizerConfig(kind=kind, vocab_size=300, lowercase=True))
    model = translator(source_vocab=len(tokens), target_vocab=len(tokens))
    model.tokenizers = Tokenizers(tokens, tokens)
    return model


@pytest.mark.parametrize(("kind", "term"), [("bpe", "Apfel™"), ("word", "Fernseher"), ("char", "™")])
def test_a_term_that_the_vocabulary_cannot_spell_is_refused_by_name(kind: str, term: str) -> None:
    model = with_vocabulary(kind)
    with pytest.raises(
        RegardError, match=f"no tokens for the required words '{term}': take the term out of the glossary"
    ):
        model.translate(["the man", "a red apple"], glossary={"apple": term})
    assert model.translate("the man", glossary={"apple": term}) == model.translate("the man")
    with pytest.raises(RegardError, match=f"'{term}'"):
        model.translate_sentences(["the man"], force_words=[[term]])


def test_a_term_whose_capital_letter_the_vocabulary_lacks_is_written_with_its_small_letter_everywhere() -> None:
    tokens = Tokenizer.train(["der rote apfel", "das haus"], TokenizerConfig(kind="char", vocab_size=60))
    model = translator(source_vocab=len(tokens), target_vocab=len(tokens))
    model.tokenizers = Tokenizers(tokens, tokens)
    assert "apfel" in model.translate_sentences(["das haus"], force_words=[["apfel"]])[0].text


def test_a_search_without_a_result_is_an_empty_translation_that_did_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator()
    monkeypatch.setattr(inference.translator, "decode_constrained", lambda model, sources, *rest: [[] for _ in sources])
    found = model.translate_sentences(["the man", "a red apple"], force_words=[["Mann"], []])
    assert (found[0].text, found[0].ended, found[0].confidence) == ("", False, 0.0)
    assert found[1] == model.translate_sentences(["a red apple"])[0]


def test_no_ngram_of_tokens_is_repeated_where_that_is_asked_for() -> None:
    (found,) = translator().translate_sentences(["the man has eaten"], no_repeat_ngram_size=2, max_len_b=40)
    pairs = list(zip(found.tokens, found.tokens[1:], strict=False))
    assert len(set(pairs)) == len(pairs)
