"""Sentences of the translator's phrasebook: grammar by hand, and what must not be in it."""

from __future__ import annotations

import random
import re
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import pair_filters
import phrasebook
import pytest

EUROPEAN = {"en": "European", "de": "europäisch/Europäisch", "fr": "européen/européenne", "zh": "欧洲"}
MARKET = {"en": "the labour market", "de": "der Arbeitsmarkt", "fr": "m marché du travail", "zh": "劳动力市场"}
ENERGY = {"en": "solar energy", "de": "die Sonnenenergie", "fr": "f énergie solaire", "zh": "太阳能"}
GERMAN = [
    "Januar",
    "Februar",
    "März",
    "April",
    "Mai",
    "Juni",
    "Juli",
    "August",
    "September",
    "Oktober",
    "November",
    "Dezember",
]
BANK = {"en": "the investment bank", "de": "die Investitionsbank", "fr": "f banque| d'investissement", "zh": "投资银行"}


def test_german_tells_subject_and_object_of_masculine_nouns_apart() -> None:
    market = phrasebook.make_phrase(MARKET, EUROPEAN, in_capitals=False)
    assert (market.de, market.de_object) == ("der europäische Arbeitsmarkt", "den europäischen Arbeitsmarkt")
    energy = phrasebook.make_phrase(ENERGY, EUROPEAN, in_capitals=False)
    assert energy.de == energy.de_object == "die europäische Sonnenenergie"
    assert phrasebook.make_phrase(MARKET, None, in_capitals=False).de_object == "den Arbeitsmarkt"


def test_french_nouns_are_elided_and_adjectives_stand_in_their_place_and_agree() -> None:
    market, energy, bank = (
        phrasebook.make_phrase(term, EUROPEAN, in_capitals=False) for term in (MARKET, ENERGY, BANK)
    )
    assert (market.fr, energy.fr) == ("le marché du travail européen", "l'énergie solaire européenne")
    assert bank.fr == "la banque européenne d'investissement"
    assert phrasebook.make_phrase(BANK, None, in_capitals=False).fr == "la banque d'investissement"
    assert (market.agree("important"), energy.agree("important")) == ("important", "importante")


def test_english_has_an_article_where_the_term_does_and_capitals_on_request() -> None:
    assert phrasebook.make_phrase(MARKET, EUROPEAN, in_capitals=True).en == "the European Labour Market"
    assert phrasebook.make_phrase(ENERGY, EUROPEAN, in_capitals=False).en == "European solar energy"


def test_german_has_capitals_in_the_names_of_institutions_alone() -> None:
    assert phrasebook.make_phrase(BANK, EUROPEAN, in_capitals=True).de == "die Europäische Investitionsbank"
    assert phrasebook.make_phrase(BANK, EUROPEAN, in_capitals=False).de == "die europäische Investitionsbank"
    assert phrasebook.make_phrase(MARKET, EUROPEAN, in_capitals=True).de == "der europäische Arbeitsmarkt"


class Always:
    """A random generator that always chooses the first option and returns one fixed number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def choice(self, options: Any) -> Any:
        return options[0]

    def randint(self, least: int, most: int) -> int:
        return least

    def random(self) -> float:
        return self.number


@pytest.fixture
def draw() -> phrasebook.SentenceGenerator:
    """Return a generator with a phrasebook of one entry per kind."""
    draw = phrasebook.SentenceGenerator(random.Random(0), in_capitals=False)
    draw.book = {
        "pact": [{"en": "treaty", "de": "der Vertrag", "fr": "m traité", "zh": "条约"}],
        "topic": [MARKET],
        "origin": [EUROPEAN],
        "verb": [{"en": "suspended", "de": "ausgesetzt", "fr": "suspendu", "zh": "被中止/中止"}],
        "month": [{"en": "February", "de": "Februar", "fr": "février", "zh": "2月"}],
        "body": [{"en": "senate", "de": "der Senat", "fr": "m Sénat", "zh": "参议院"}],
        "event": [{"en": "election", "de": "die Wahl", "fr": "f élection", "zh": "选举"}],
        "person": [{"en": "she", "de": "sie", "fr": "f elle", "zh": "她"}],
        "place": [{"en": "Rome", "de": "Rom", "fr": "Rome", "zh": "罗马"}],
    } | {kind: [] for kind in ("verb.pact", "pact.named", "topic.named")}
    draw.rng = Always(0.0)  # type: ignore[assignment]
    return draw


def test_what_was_done_to_something_about_something(draw: phrasebook.SentenceGenerator) -> None:
    assert draw.passive() == {
        "en": "the European treaty on the European labour market was suspended on 1 February 1850.",
        "de": "der europäische Vertrag über den europäischen Arbeitsmarkt wurde am 1. Februar 1850 ausgesetzt.",
        "fr": "le traité européen sur le marché du travail européen a été suspendu le 1er février 1850.",
        "zh": "关于欧洲劳动力市场的欧洲条约于1850年2月1日被中止。",
    }


def test_patterns_with_less_in_them(draw: phrasebook.SentenceGenerator) -> None:
    draw.rng = Always(1.0)  # type: ignore[assignment]
    assert draw.passive() == {
        "en": "the treaty was suspended on 1 February 1850.",
        "de": "der Vertrag wurde am 1. Februar 1850 ausgesetzt.",
        "fr": "le traité a été suspendu le 1er février 1850.",
        "zh": "条约于1850年2月1日被中止。",
    }
    assert draw.active() == {
        "en": "the senate suspended the treaty.",
        "de": "der Senat hat den Vertrag ausgesetzt.",
        "fr": "le Sénat a suspendu le traité.",
        "zh": "参议院中止了条约。",
    }
    assert draw.importance() == {
        "en": "the labour market is important.",
        "de": "der Arbeitsmarkt ist wichtig.",
        "fr": "le marché du travail est important.",
        "zh": "劳动力市场很重要。",
    }


def test_the_other_patterns(draw: phrasebook.SentenceGenerator) -> None:
    assert draw.active()["zh"] == "欧洲参议院中止了关于欧洲劳动力市场的欧洲条约。"
    assert draw.importance()["de"] == "der europäische Arbeitsmarkt ist wichtig für den europäischen Arbeitsmarkt."
    assert draw.in_force()["fr"].endswith("sur le marché du travail européen entrera en vigueur le 1er février 2026.")
    assert draw.since()["zh"] == "自1950年以来，欧洲劳动力市场发生了变化。"
    assert draw.life() == {
        "en": "she was born on 1 February 1850.",
        "de": "sie wurde am 1. Februar 1850 geboren.",
        "fr": "elle est née le 1er février 1850.",
        "zh": "她出生于1850年2月1日。",
    }
    assert draw.event() == {
        "en": "the European election will take place on 1 February 2026.",
        "de": "die europäische Wahl findet am 1. Februar 2026 statt.",
        "fr": "l'élection européenne aura lieu le 1er février 2026.",
        "zh": "欧洲选举将于2026年2月1日举行。",
    }


def test_dates_are_on_the_calendar_and_the_same_on_both_sides() -> None:
    draw = phrasebook.SentenceGenerator(random.Random(0), in_capitals=False)
    days = set()
    for date in (draw.date(past=past) for past in (False, True) for _ in range(2000)):
        assert len({tuple(re.findall(r"\d{4}", text)) for text in date.values()}) == 1
        if found := re.fullmatch(r"(\d+)年(\d+)月(\d+)日", date["zh"]):
            year, month, day = map(int, found.groups())
            assert datetime(year, month, day).year == year
            assert date["de"] == f"am {day}. {GERMAN[month - 1]} {year}"
            assert f" {day} " in f"{date['en'].replace(',', '')} "
            days.add(day)
    assert days == set(range(1, 32))


@pytest.mark.parametrize("in_capitals", [False, True])
def test_sentences_are_whole(in_capitals: bool) -> None:
    for lang in ("de", "fr", "zh"):
        for source, target in phrasebook.make_formal_pairs(lang, in_capitals)[:2000]:
            assert source[0].isupper()
            assert source[-1] == "."
            assert target[-1] in ".。"
            assert not re.search(r"  |[{}|/]", source + target)


def test_english_in_capitals_has_capitals_and_is_not_there_without() -> None:
    plain, capital = ({source for source, _ in phrasebook.make_formal_pairs("de", which)} for which in (False, True))
    assert len(capital) > 5_000
    assert len(plain & capital) < 0.05 * len(capital)  # Biodiversity is important.


def test_traditional_chinese_has_no_simplified_characters() -> None:
    assert len(phrasebook.SIMPLIFIED) == len(phrasebook.TRADITIONAL) == len(set(phrasebook.SIMPLIFIED))
    for in_capitals in (False, True):
        assert all(
            pair_filters.is_written_in("zh-Hant", target)
            for _, target in phrasebook.make_formal_pairs("zh-Hant", in_capitals)
        )
    assert phrasebook.to_traditional("反对党的计划体制、气候数据网和旅游") == "反對黨的計劃體制、氣候數據網和旅遊"
    assert phrasebook.to_traditional("于1987年批准，制药业和制度") == "於1987年批准，製藥業和制度"


def test_the_sentence_that_the_model_is_shown_with_is_not_learned() -> None:
    for in_capitals in (False, True):
        english = [source.lower() for source, _ in phrasebook.make_formal_pairs("de", in_capitals)]
        assert not any("economic area" in source for source in english)


def test_the_sentences_that_formal_text_is_scored_on_are_not_learned() -> None:
    path = Path(__file__).parents[1] / "pretrained" / "formal.toml"
    scored = {sentence["en"][0].lower() for sentence in tomllib.loads(path.read_text(encoding="utf-8"))["sentence"]}
    for in_capitals in (False, True):
        assert not scored & {source.lower() for source, _ in phrasebook.make_formal_pairs("de", in_capitals)}


def test_the_phrasebook_has_no_entry_twice() -> None:
    for kind, entries in phrasebook.load_phrasebook().items():
        english = [entry["en"] for entry in entries]
        assert len(set(english)) == len(english), kind
