"""Language identification by script and trigrams."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest

from regard.text.language_identification import (
    Profiles,
    count_script_characters,
    extract_trigrams,
    is_unknown_language,
    learn_profile,
    score_languages,
)

TEXTS = {
    "en": "the man who went to the home of his friend said that he would not come with them there",
    "de": "der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen würden",
    "fr": "le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous",
}
SMALL: Profiles = {name: learn_profile([text]) for name, text in TEXTS.items()}


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
