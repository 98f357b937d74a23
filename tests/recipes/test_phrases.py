"""Sentences of the translator's phrasebook: grammar by hand, and what must not be in it."""

from __future__ import annotations

import random
import re

import pytest

phrases = pytest.importorskip("phrases")

EUROPEAN = {"en": "European", "de": "europäisch/Europäisch", "fr": "européen/européenne", "zh": "欧洲"}
MARKET = {"en": "the labour market", "de": "der Arbeitsmarkt", "fr": "m marché du travail", "zh": "劳动力市场"}
ENERGY = {"en": "solar energy", "de": "die Sonnenenergie", "fr": "f énergie solaire", "zh": "太阳能"}


def test_german_tells_subject_and_object_of_masculine_nouns_apart() -> None:
    market = phrases.noun(MARKET, EUROPEAN, in_capitals=False)
    assert (market.de, market.de_object) == ("der europäische Arbeitsmarkt", "den europäischen Arbeitsmarkt")
    energy = phrases.noun(ENERGY, EUROPEAN, in_capitals=False)
    assert energy.de == energy.de_object == "die europäische Sonnenenergie"
    assert phrases.noun(MARKET, None, in_capitals=False).de_object == "den Arbeitsmarkt"


def test_french_nouns_are_elided_and_adjectives_follow_and_agree() -> None:
    market, energy = (phrases.noun(term, EUROPEAN, in_capitals=False) for term in (MARKET, ENERGY))
    assert (market.fr, energy.fr) == ("le marché du travail européen", "l'énergie solaire européenne")
    assert (market.agreed("important"), energy.agreed("important")) == ("important", "importante")


def test_english_has_an_article_where_the_term_does_and_capitals_on_request() -> None:
    named = phrases.noun(MARKET, EUROPEAN, in_capitals=True)
    assert (named.en, named.de) == ("the European Labour Market", "der Europäische Arbeitsmarkt")
    assert phrases.noun(ENERGY, EUROPEAN, in_capitals=False).en == "European solar energy"


def test_a_pattern_says_the_same_in_every_language() -> None:
    draw = phrases.Draw(random.Random(0), in_capitals=False)
    draw.book = {
        **draw.book,
        "pact": [{"en": "treaty", "de": "der Vertrag", "fr": "m traité", "zh": "条约"}],
        "text": [],
        "topic": [MARKET],
        "topic.named": [],
        "origin": [EUROPEAN],
        "verb": [],
        "verb.pact": [{"en": "suspended", "de": "ausgesetzt", "fr": "suspendu", "zh": "被暂停/暂停"}],
        "month": [{"en": "May", "de": "Mai", "fr": "mai", "zh": "5月"}],
        "body": [{"en": "senate", "de": "der Senat", "fr": "m sénat", "zh": "参议院"}],
    }
    draw.rng = Always()
    assert draw.done_about() == {
        "en": "the European treaty on the European labour market was suspended on 1 May 1850.",
        "de": "der europäische Vertrag über den europäischen Arbeitsmarkt wurde am 1. Mai 1850 ausgesetzt.",
        "fr": "le traité européen sur le marché du travail européen a été suspendu le 1er mai 1850.",
        "zh": "关于欧洲劳动力市场的欧洲条约于1850年5月1日被暂停。",
    }
    assert draw.does()["zh"] == "欧洲参议院暂停了关于欧洲劳动力市场的欧洲条约。"


class Always:
    """Not so random: the first of all."""

    def choice(self, options: list[object]) -> object:
        return options[0]

    def randint(self, least: int, most: int) -> int:
        return least

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize("in_capitals", [False, True])
def test_numbers_are_the_same_on_both_sides_and_sentences_are_whole(in_capitals: bool) -> None:
    for lang in ("de", "fr", "zh"):
        for source, target in phrases.formal(lang, in_capitals)[:3000]:
            assert source[0].isupper()
            assert source[-1] == "."
            assert target[-1] in ".。"
            years = [re.findall(r"\d{4}", text) for text in (source, target)]
            assert years[0] == years[1]
            assert "  " not in source + target
            assert "{" not in source + target


def test_traditional_chinese_has_no_simplified_characters() -> None:
    written = pytest.importorskip("filters").written_in
    assert len(phrases.SIMPLIFIED) == len(phrases.TRADITIONAL) == len(set(phrases.SIMPLIFIED))
    pairs = phrases.formal("zh-Hant")
    assert all(written("zh-Hant", target) for _, target in pairs)
    assert phrases.traditional("准则于1987年批准，制药业和制度") == "準則於1987年批准，製藥業和制度"


def test_the_sentence_that_the_model_is_shown_with_is_not_learned() -> None:
    for lang in ("de", "fr", "zh", "zh-Hant"):
        for in_capitals in (False, True):
            english = {source.lower() for source, _ in phrases.formal(lang, in_capitals)}
            assert len(english) > 5_000
            assert not any("economic area" in source for source in english)


def test_the_phrasebook_has_no_entry_twice() -> None:
    for kind, entries in phrases.phrasebook().items():
        english = [entry["en"] for entry in entries]
        assert len(set(english)) == len(english), kind
