"""Stage 1: filters, data augmentation, and the prepared files."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import augmentation
import pair_filters
import prepare
import pytest

from regard.config import recipes
from regard.data.parallel_corpus import ParallelCorpus, read_lines
from regard.text.language_identification import learn_profile

FOLDER = Path(prepare.__file__).parent


# ---- filters ---------------------------------------------------------------------------------------------------------


def test_chinese_is_split_by_script() -> None:
    either, simplified, traditional = ("Hi.", "你好。"), ("A horse.", "一匹马。"), ("A horse.", "一匹馬。")
    mixed = ("Two horses.", "马和馬。")
    assert pair_filters.split_by_script([either, simplified, traditional, mixed]) == {
        "en-zh": [either, simplified],
        "en-zh-Hant": [either, traditional],
    }
    assert pair_filters.is_written_in("de", "马和馬")


@pytest.mark.parametrize(
    ("pair", "lang", "expected"),
    [
        (("I ate an apple.", "Ich aß einen Apfel."), "de", True),
        (("I ate an apple.", "I ate an apple."), "de", False),
        (("I ate an apple.", ""), "de", False),
        (("Yes.", "Ja, das ist so, wie ich es immer schon gesagt habe."), "de", False),
        (("I ate an apple.", "我吃了一个苹果。"), "zh", True),
        (("I ate an apple.", "我吃了一个苹果。"), "de", False),
        (("I ate an apple.", "Ich aß einen Apfel."), "zh", False),
    ],
)
def test_pairs_that_look_like_translations(pair: tuple[str, str], lang: str, expected: bool) -> None:
    assert pair_filters.is_plausible(pair, lang) is expected


def test_a_side_in_another_language_is_noticed() -> None:
    texts = {"en": "the man went to the garden that he saw there", "de": "der Mann ging in den Garten, den er dort sah"}
    profiles = {lang: learn_profile([text]) for lang, text in texts.items()}
    assert pair_filters.is_language("der Mann ging dort in den Garten", "de", profiles)
    assert not pair_filters.is_language("the man went to the garden there", "de", profiles)
    assert not pair_filters.is_language("Το Κοινοβούλιο", "de", profiles)


def test_the_mean_is_over_the_trigrams() -> None:
    profiles = {"own": {" ja": -1.0, "ja ": -2.0}}
    assert pair_filters.mean_log_prob("Ja.", profiles) == {"own": -1.5}
    assert pair_filters.mean_log_prob("Ja no.", profiles) == {
        "own": (-1 - 2 - 3 - 3) / 4
    }  # " no" and "no " are one below the rarest
    assert pair_filters.mean_log_prob("Ναι.", profiles) == {"own": float("-inf")}


TALK = ["Der Bericht des Ausschusses über den Haushalt ist gut", "Wir haben über die Frage der Kommission beraten"]
DUTCH = ["Het verslag van de heer is zeer goed", "Wij hebben het verslag van de commissie niet"]


def test_speeches_in_languages_without_a_profile_are_left_out() -> None:
    pairs = [(f"Speech {i}.", text) for i in range(5000) for text in TALK]
    foreign = [
        (f"Other {i}.", text) for i in range(2) for text in [*DUTCH, "Wszyscy mają już tę wiedzę", "Ναι, παρακαλώ"]
    ]
    profiles = {"de": learn_profile(TALK), "en": learn_profile(["this and that"])}
    assert pair_filters.filter_german(pairs, profiles) == pairs  # where there is nothing else, nothing is lost
    assert pair_filters.filter_german([*pairs, *foreign], profiles) == pairs


def test_what_is_nearer_to_the_foreign_lines_is_foreign() -> None:
    """A Dutch line of words that German has too is identified by the profile of foreign lines."""
    own, foreign = learn_profile(TALK), learn_profile(DUTCH)
    assert (
        pair_filters.get_margin(pair_filters.mean_log_prob("Wir haben den Bericht", {"own": own, "foreign": foreign}))
        > pair_filters.GERMAN_MARGIN
    )
    assert (
        pair_filters.get_margin(pair_filters.mean_log_prob("Wij hebben de commissie", {"own": own, "foreign": foreign}))
        < pair_filters.GERMAN_MARGIN
    )


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("Tom has 25 cats.", "Tom hat 25 Katzen.", [("25", "25"), ("Tom", "Tom")]),
        ("Tom came.", "湯姆來了。", [("Tom", "湯姆")]),
        ("Tom is 25.", "Tom今年25岁。", [("25", "25"), ("Tom", "Tom")]),
        ("Tom saw Tom.", "Tom sah Tom.", []),
        ("In 1992 or 19.", "1992 oder 19.", [("1992", "1992")]),
        ("Boston has a Theater.", "Bostons Theater.", [("Theater", "Theater")]),  # part of a word
        ("Direct them.", "Directez-les.", []),
        ("Less CO2 is good.", "Weniger CO2 ist gut.", []),
        ("It was 9/11.", "Es war 9/11.", []),
        ("Use WIN7 here.", "这里用WIN7。", []),
        ("Anna-Lena left.", "Anna-Lena ging.", []),
        ("It is Tom's car.", "C'est la voiture de Tom.", [("Tom", "Tom")]),
        ("It is Tom's car.", "Das ist Toms Auto.", []),
        ("Anna's friend left.", "L'amie d'Anna est partie.", []),  # another name might need de
        ("The Union is here.", "Die Union ist da.", []),
    ],
)
def test_whole_names_and_numbers_of_both_sides_can_be_copied(
    source: str, target: str, expected: list[tuple[str, str]]
) -> None:
    assert augmentation.find_shared(source, target, {"the", "union"}) == expected


def test_words_that_are_often_in_lower_case_are_no_names() -> None:
    assert augmentation.find_ordinary_words(["The union.", *["a Trade union"] * 4, "Tom, the tom"]) == {"union"}


def test_what_both_sides_share_is_replaced_on_both() -> None:
    pairs = [(f"Anna has {i} red cats.", f"Anna hat {i} rote Katzen.") for i in range(100, 400)]
    made = augmentation.make_copies(pairs, "zh", set())
    assert 80 < len(made) < 160
    for source, target in made:
        assert sorted(set(source.split()) - {"has", "red", "cats."}) == sorted(
            set(target.split()) - {"hat", "rote", "Katzen."}
        )
    assert any(source.count("⟦") == 2 for source, _ in made)
    assert {mark for source, _ in made for mark in "1234" if f"⟦{mark}⟧" in source} == set("1234")


def test_the_number_of_a_placeholder_is_not_replaced() -> None:
    assert augmentation.replace_words("Tom has 2.", {"Tom": "⟦2⟧", "2": "⟦1⟧"}) == "⟦2⟧ has ⟦1⟧."


# ---- capitals --------------------------------------------------------------------------------------------------------


def test_some_words_get_capitals() -> None:
    rng = random.Random(0)
    made = {augmentation.capitalize_run("Members of the I area, too.", rng) for _ in range(300)}
    runs = ["Of", "Of The", "The", "Area,", "Area, Too.", "Too."]  # none goes past the I, none has the first word
    assert made == {"Members of the I area, too.".replace(run.lower(), run) for run in runs}
    assert augmentation.capitalize_run("Tom.", rng) == "Tom."


def test_a_share_of_the_pairs_is_titled_and_the_other_side_stays() -> None:
    pairs = [(f"This is house {i}.", f"Das ist Haus {i}.") for i in range(1000)]
    made = augmentation.title_case_pairs(pairs)
    assert 30 < len(made) < 80
    assert {(source.capitalize(), target) for source, target in made} <= set(pairs)
    assert all(source.capitalize() != source for source, _ in made)
    assert augmentation.title_case_pairs([("Tom.", "Tom!")] * 1000) == []


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_is_prepared(work: Path) -> None:
    report = json.loads((work / "report.json").read_text())
    assert report["en-de.train"] == {"read": 200, "in no test": 200, "look like translations": 200, "kept": 200}
    assert report["europarl.train"]["in no test"] == 101
    assert report["in both scripts"] == {"kept": 0}
    assert report["en-zh.train"]["kept"] == report["en-zh-Hant.train"]["kept"] == 100
    for name, counts in report.items():
        if name != "in both scripts":
            assert len(list(read_lines(work / f"{name}.en.xz"))) == counts["kept"]
    speeches = list(read_lines(work / "europarl.train.en.xz"))
    assert "Same train." not in speeches
    assert "NUMBER 306 - is what Tom told me!" not in speeches
    assert not list(work.glob("europarl.val*"))
    assert all("⟦" not in line for line in read_lines(work / "en-de.train.en.xz"))
    assert any("⟦" in line for line in read_lines(work / "en-de.copies.train.en.xz"))
    words = zip(*(read_lines(work / f"words-en-de.train.{side}.xz") for side in ("en", "de")), strict=True)
    assert dict(words)["Is."] == "Ist."


def test_the_recipe_reads_what_is_prepared(work: Path) -> None:
    values = recipes.load(FOLDER / "train.toml")
    for split in ("train", "valid"):
        corpus = ParallelCorpus(tuple(values["data"][split]), "en", "de", work, split)
        assert len(corpus.directions) == 8
        assert list(corpus.directed_rows())


def test_how_often_the_recipe_reads_what() -> None:
    specs = Counter(recipes.load(FOLDER / "train.toml")["data"]["train"])
    often = {"en-de": 2, "en-fr": 2, "en-zh": 4, "en-zh-Hant": 4, "europarl": 1}
    often |= {f"{name}.copies": n for name, n in often.items()}
    often |= {f"words-{name}": 2 for name in prepare.EVERYDAY} | {f"formal-{name}": 1 for name in prepare.EVERYDAY}
    both = {
        f"{name}.train.{{lang}}.xz@{direction}": n
        for name, n in often.items()
        for direction in (f"en>{prepare.get_language(name)}", f"{prepare.get_language(name)}>en")
    }
    once = {
        f"titled-{n}.train.{{lang}}.xz@en>{prepare.get_language(n)}": 1 for n in prepare.EVERYDAY
    }  # never to English
    assert specs == both | once
