"""Language identification by script, by n-grams and by trigram profiles."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest

from regard.text.language_identification import (
    PROFILES_FILE,
    SCRIPTS,
    Profiles,
    count_script_characters,
    extract_trigrams,
    hash_ngrams,
    identify_language,
    identify_languages,
    is_unknown_language,
    learn_profile,
    load_classifiers,
    read_letters,
    score_languages,
    script_table,
)

TEXTS = {
    "en": "the man who went to the home of his friend said that he would not come with them there",
    "de": "der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen würden",
    "fr": "le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous",
}
SMALL: Profiles = {name: learn_profile([text]) for name, text in TEXTS.items()}


# ---- script and n-grams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Καλημέρα", "el"),
        ("สวัสดีครับ", "th"),
        ("안녕하세요", "ko"),
        ("こんにちは", "ja"),
        ("東京へ行きます", "ja"),
        ("我吃了一个苹果。", "zh"),
        ("他用iPhone打电话。", "zh"),
        ("the friend of my brother said 你好 there", "en"),
        ("გამარჯობა", "ka"),
        ("שלום לכולם", "he"),
        ("Wir haben Привет gesagt und sind dann gegangen", "de"),
        ("see https://der.die/das-haus-und-die-strasse-ist-nicht-weit for the whole story", "en"),
    ],
)
def test_the_language_by_script_and_words(text: str, language: str) -> None:
    assert identify_language(text).language == language


@pytest.mark.parametrize("text", ["", " \n", "12 345", "😀", "https://example.org", "ᎠᎢᏍᎩ", "''", "\ud800"])
def test_a_text_without_letters_has_no_language(text: str) -> None:
    found = identify_language(text)
    assert (found.language, found.probability, found.is_certain) == ("", 0.0, False)


def test_a_text_is_judged_by_itself() -> None:
    texts = [
        "Guten Morgen, Herr Müller",
        "",
        "il est là\nce matin",
        "Привет",
        "the friend",
        "你好",
        "the\n\nfriend's home",
    ] * 40
    together = identify_languages(texts)
    assert together == [identify_language(text) for text in texts]
    assert identify_languages([]) == []


def test_probabilities_are_of_all_likely_languages() -> None:
    found = identify_language("Der Mann ging langsam nach Hause.")
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-4)
    assert max(found.probabilities.values()) == found.probability == found.probabilities[found.language]


@pytest.mark.parametrize("text", ["Hello", "Haus", "merci", "你好", "Danke sehr", "ok"])
def test_few_letters_are_not_certain(text: str) -> None:
    assert not identify_language(text).is_certain


def test_a_very_long_text_is_judged_by_its_beginning() -> None:
    assert identify_language("Das ist ein langer Text. " * 40_000).language == "de"


def test_ngrams_are_of_one_word_with_the_space_around_it() -> None:
    def count(text: str) -> int:
        return len(hash_ngrams(read_letters([text]))[0])

    # " ab ": a, b; " a", "ab", "b "; " ab", "ab "; " ab "
    assert count("ab") == 8
    assert count("ab ab") == count("AB, ab!") == 16
    assert count("don't") > count("don t")  # an apostrophe inside a word is a letter
    assert count("'don'") == count("don")
    assert len(set(hash_ngrams(read_letters(["ab"]))[0].tolist())) == 8


def test_ngrams_belong_to_their_texts() -> None:
    texts = ["ab", "", "c d", "e\nf"]
    hashes, owners = hash_ngrams(read_letters(texts))
    for number, text in enumerate(texts):
        own, _ = hash_ngrams(read_letters([text]))
        assert sorted(hashes[owners == number].tolist()) == sorted(own.tolist())


def test_scripts_do_not_overlap() -> None:
    sizes = [
        sum(int(last, 16) - int(first, 16) + 1 for first, last in (part.split("-") for part in ranges.split()))
        for _, ranges in SCRIPTS.values()
    ]
    assert sum(sizes) + 1 == (script_table() > 0).sum()  # and the apostrophe


def test_the_stored_classifiers_are_small_and_whole() -> None:
    assert len(lzma.compress(PROFILES_FILE.read_bytes())) < 1_500_000
    for name, own in load_classifiers().items():
        assert SCRIPTS[name][0] == ""
        assert own.weights.shape == (len(own.hashes), len(own.languages))
        assert len(set(own.languages)) == len(own.languages) == len(own.bias)
        assert (own.hashes[own.rows[own.hashes >> 12]] == own.hashes).all()


# ---- trigram profiles ------------------------------------------------------------------------------------------------


def likeliest(text: str, profiles: Profiles) -> str:
    found = score_languages(text, profiles)
    return max(found, key=found.__getitem__)


def test_trigrams_of_words_with_their_edges() -> None:
    assert extract_trigrams("Ab, c3d!") == [" ab", "ab ", " c ", " d "]
    assert extract_trigrams("12 ...") == []


def test_a_profile_is_the_log_probability_of_each_trigram() -> None:
    assert learn_profile(["ab", "ab", "cb"]) == {
        " ab": round(math.log(2 / 6), 3),
        "ab ": round(math.log(2 / 6), 3),
        " cb": round(math.log(1 / 6), 3),
        "cb ": round(math.log(1 / 6), 3),
    }


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("the friend", "en"),
        ("DER MANN UND SIE", "de"),
        ("il est là", "fr"),
        ("我吃了一个苹果。", "zh"),
        ("他用iPhone打电话。", "zh"),
        ("the friend said 你好 there", "en"),
    ],
)
def test_the_likeliest_language(text: str, language: str) -> None:
    assert likeliest(text, SMALL) == language


def test_scores_add_up_over_trigrams() -> None:
    one, two = score_languages("the", SMALL), score_languages("the the", SMALL)
    assert two == pytest.approx({name: 2 * value for name, value in one.items()})


@pytest.mark.parametrize("text", ["", "12345", "Привет, как дела?", "私は学生です", "한국어", "😀", "qqxz"])
def test_what_is_none_of_them_has_no_scores(text: str) -> None:
    assert score_languages(text, SMALL) == {}


def test_what_is_none_of_them_is_unknown_if_there_is_enough_of_it() -> None:
    assert is_unknown_language("Привет, как дела сегодня вечером?", SMALL)
    assert is_unknown_language("zzz " * 5, SMALL)
    assert not is_unknown_language("zzz " * 4, SMALL)  # too little to judge by
    assert not is_unknown_language(TEXTS["en"], SMALL)
    assert not is_unknown_language("我们今天晚上说汉语说得很好，好不好，好不好？", SMALL)


@pytest.mark.parametrize(
    ("text", "expected"), [("我们说汉语", (4, 0)), ("我們說漢語", (0, 4)), ("你好", (0, 0)), ("abc", (0, 0))]
)
def test_scripts_of_chinese(text: str, expected: tuple[int, int]) -> None:
    assert count_script_characters(text) == expected


def test_short_sentences_of_the_real_corpora_are_told_apart(data_folder: Path) -> None:
    def lines(name: str, most: int) -> list[str]:
        with lzma.open(data_folder / "tatoeba" / name, "rt", encoding="utf-8") as file:
            return [next(file).strip() for _ in range(most)]

    others = {"en": "en-de", "de": "en-de", "fr": "en-fr", "zh": "en-zh"}
    profiles = {
        lang: learn_profile(lines(f"{pair}.train.{lang}.xz", 8000)) for lang, pair in others.items() if lang != "zh"
    }
    for lang, pair in others.items():
        tried = lines(f"{pair}.val.{lang}.xz", 1000)
        right = sum(likeliest(text, profiles) == lang for text in tried)
        assert right >= 970, f"{lang}: {right} of 1000"
    assert len(json.dumps(profiles)) < 300_000
