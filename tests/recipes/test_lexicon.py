"""A lexicon learned from sentence pairs."""

from __future__ import annotations

import lexicon

APPLES = [
    ("I ate an apple.", "Ich aß einen Apfel."),
    ("The apple is red.", "Der Apfel ist rot."),
    ("An apple a day.", "Ein Apfel am Tag."),
    ("We buy apple juice, TV and all.", "Wir kaufen Saft vom Apfel, TV und alles."),
    ("Whose apple?", "Wessen Apfel?"),
]


def test_words_in_the_same_sentences_belong_together() -> None:
    rest = [(f"The house no{c} is big.", f"Das Haus nu{c} ist groß.") for c in "abcdef"]
    found = lexicon.build_lexicon(APPLES + rest, "de")
    assert ("Apple.", "Apfel.") in found  # Dice 1, in five sentences
    assert ("Is.", "Ist.") in found  # seven
    assert not any(mine == "An." for mine, _ in found)  # in two


def test_the_dice_of_two_words_decides() -> None:
    both, alone = [("yes so", "ja da")] * 5, [("so", "da")] * 4
    assert lexicon.match_words(*sets(both + alone)) == [
        ("so", "da"),
        ("yes", "ja"),
    ]  # 18 / 18 and 10 / 10; 10 / 14 crosswise
    # "odd" is in 5 + 11 sentences and with "neu" in 5, which is in no others: 2 * 5 / (16 + 5) = 0.476, too little
    assert lexicon.match_words(*sets([("odd", "neu")] * 5 + [("odd", "")] * 11)) == []
    assert lexicon.match_words(*sets([("odd", "neu")] * 5 + [("odd", "")] * 10)) == [("odd", "neu")]  # 10 / 20


def sets(pairs: list[tuple[str, str]]) -> list[list[set[str]]]:
    return [[set(pair[i].split()) for pair in pairs] for i in range(2)]


def test_chinese_words_are_the_longest_strings_that_fit() -> None:
    sentences = ("我吃了苹果。", "苹果很红。", "一天一个苹果！", "谁的苹果？", "他买苹果汁")
    pairs = [(mine, theirs) for (mine, _), theirs in zip(APPLES, sentences, strict=True)]
    assert lexicon.build_lexicon(pairs, "zh")[0] == ("Apple.", "苹果。")
    assert list(lexicon.list_candidates("我吃ab饭。", "zh")) == ["我", "吃", "我吃", "饭"]


def test_a_part_of_a_chinese_word_is_no_word_but_a_word_of_one_character_is() -> None:
    baby = [("baby", "婴儿")] * 9 + [("baby", "婴")]  # 婴: Dice 1, which counts 0.8; 婴儿: 18 / 19
    assert lexicon.build_lexicon(baby, "zh") == [("Baby.", "婴儿。")]
    dog = [("dog", "小狗")] * 5 + [("dog", "狗")] * 5  # 狗: 0.8; 小狗: 10 / 15
    assert lexicon.build_lexicon(dog, "zh") == [("Dog.", "狗。")]
    assert lexicon.build_lexicon([("mine", "我的")] * 5, "zh")[0][1] != "我的。"


def test_words_are_written_as_usual() -> None:
    assert lexicon.find_usual_forms(iter(["TV is TV.", "Tv"]))["tv"] == "TV"
    assert lexicon.make_sentence("été") == "Été."
    assert lexicon.make_sentence("TV") == "TV."
    assert lexicon.make_sentence("苹果") == "苹果。"


def test_elided_french_words_are_two_and_english_contractions_none() -> None:
    assert list(lexicon.list_candidates("Aujourd'hui l'homme qu'elle aime", "fr")) == [
        "aujourd'hui",
        "homme",
        "elle",
        "aime",
    ]
    assert list(lexicon.list_candidates("I don't", "en")) == ["i", "don't"]
    assert lexicon.build_lexicon([("don't", "nicht")] * 5, "de") == []


def test_nothing_to_learn_from() -> None:
    assert lexicon.build_lexicon([("Hi.", "你好。")], "zh") == []
