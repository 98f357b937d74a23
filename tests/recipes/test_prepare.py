"""Stage 1: filters, data augmentation, the prepared files, and the vocabulary that is learned from them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import augmentation
import pair_filters
import prepare
import pytest
import vocabulary

from regard.config import Config, recipes
from regard.data.parallel_corpus import ParallelCorpus, read_lines
from regard.text.tokenizer import Tokenizers

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


def test_speeches_that_were_not_translated_are_left_out() -> None:
    german = [
        "Der Bericht des Ausschusses über den Haushalt ist gut.",
        "Wir haben über die Frage beraten, Herr Präsident.",
    ]
    other = [
        "Het verslag van de heer is zeer goed, mijnheer de Voorzitter.",
        "Ναι, παρακαλώ, κύριε Πρόεδρε.",
        "Yes, I agree with you.",
    ]
    pairs = [("Speech.", text) for text in [*german, *other, "Ja."]]
    kept = pair_filters.filter_language(pairs, "de")
    assert [pair[1] for pair in kept] == [*german, "Ja."]  # a word alone may be of many languages


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


def test_substitutes_are_placeholders_real_names_made_up_names_and_numbers_of_the_same_form() -> None:
    rng, real = random.Random(0), set(augmentation.REAL_NAMES.split())
    names = [augmentation.make_substitute("Tom", 3, rng) for _ in range(4000)]
    placeholders, known = names.count("⟦3⟧"), sum(name in real for name in names)
    assert 0.25 < placeholders / len(names) < 0.35  # 0.3
    assert 0.3 < known / len(names) < 0.4  # half of the rest
    rest = [name for name in names if name != "⟦3⟧" and name not in real]
    assert all(re.fullmatch("[A-Z][a-z]+", name) for name in rest)
    numbers = {augmentation.make_substitute("1,250.75", 1, rng) for _ in range(300)} - {"⟦1⟧"}
    assert len(numbers) > 100
    assert all(re.fullmatch(r"\d,\d{3}\.\d\d", number) for number in numbers)


def test_real_names_have_what_made_up_names_lack() -> None:
    real = augmentation.REAL_NAMES.split()
    assert len(real) == len(set(real)) > 100
    for sign in ("'", "-", "ß", "ø", "ł", "ç"):
        assert any(sign in name for name in real)
    assert any(name[1:] != name[1:].lower() for name in real)  # McAllister, iPhone


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
    assert report["tatoeba-en-de.train"] == {"read": 200, "in no test": 200, "look like translations": 200, "kept": 200}
    assert report["tatoeba-en-zh.train"]["kept"] == report["tatoeba-en-zh-Hant.train"]["kept"] == 100
    # Two folders and the speeches among the documents; one line is of a test, one is the same in both languages.
    assert report["europarl-en-de.train"]["read"] == 102 + 20 + 10
    assert report["europarl-en-de.train"]["look like translations"] == 130
    assert report["europarl-en-fr.train"]["kept"] == 20 + 10
    for lang in ("de", "fr", "zh"):
        assert report[f"docs-en-{lang}.train"]["kept"] == 39  # one line is of a test
        assert report[f"prose-en-{lang}.train"]["kept"] == 40
        assert report[f"docs-en-{lang}.val"]["kept"] == 4
    for name, counts in report.items():
        if not name.startswith("formality"):
            assert len(list(read_lines(work / f"{name}.en.xz"))) == counts["kept"]
    speeches = list(read_lines(work / "europarl-en-de.train.en.xz"))
    assert "Same train." not in speeches
    assert "NUMBER 306 - is what Tom told me!" not in speeches
    assert all("⟦" not in line for line in read_lines(work / "tatoeba-en-de.train.en.xz"))
    assert any("⟦" in line for line in read_lines(work / "copies-en-de.train.en.xz"))
    assert dict(read_both(work, "words-en-de.train", "en", "de"))["Is."] == "Ist."


def read_both(work: Path, name: str, *sides: str) -> list[tuple[str, str]]:
    return list(zip(*(read_lines(work / f"{name}.{side}.xz") for side in sides), strict=True))


def test_some_documents_are_converted_to_traditional_chinese(work: Path) -> None:
    simplified = dict(read_both(work, "prose-en-zh.train", "en", "zh"))
    traditional = read_both(work, "prose-en-zh-Hant.train", "en", "zh-Hant")
    assert 2 <= len(traditional) <= 25  # about 0.3 of 40
    for english, chinese in traditional:
        assert chinese == simplified[english].replace("马", "馬").replace("这里", "這裡") != simplified[english]


def test_pairs_by_form_of_address_are_prepared(work: Path) -> None:
    for lang, formal, familiar in (("de", "Ihnen", "Du hast"), ("fr", "vous", "Tu as")):
        for form, own, other in (("formal", formal, familiar), ("familiar", familiar, formal)):
            pairs = read_both(work, f"formality-en-{lang}.train", f"en-{form}", f"{lang}-{form}")
            texts = [foreign for _, foreign in pairs]
            assert sum(own in text for text in texts) == (20 if form == "formal" else 40)
            assert not any(other in text for text in texts)
            assert any(own not in text for text in texts)  # a few without a second person


def test_an_encyclopedia_is_split_into_sentences_without_unknown_words(work: Path) -> None:
    expected = ["The river is very long, and deep.", "Here is one more sentence."]
    assert list(read_lines(work / "encyclopedia.train.en.xz")) == expected


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("It is 1 @,@ 000 @-@ year old .", "It is 1,000-year old."),
        ("He didn 't say ( much ) , did he ?", "He didn 't say (much), did he?"),
        ('The " Old Man " \'s boat costs $ 5 .', 'The "Old Man"\'s boat costs $5.'),
    ],
)
def test_tokenized_english_gets_ordinary_spaces(tokens: str, text: str) -> None:
    assert prepare.join_tokens(tokens) == text


# ---- recipes and vocabulary ------------------------------------------------------------------------------------------


def load_corpus(recipe: str, work: Path, split: str = "train") -> ParallelCorpus:
    data = recipes.build({"data": recipes.load(FOLDER / recipe)["data"]}, Config).data
    return ParallelCorpus(data.train if split == "train" else data.valid, "", "", work, split)


def test_the_teacher_reads_everything_that_is_prepared(work: Path) -> None:
    train, valid = load_corpus("teacher.toml", work), load_corpus("teacher.toml", work, "valid")
    plain = {direction for lang in prepare.LANGUAGES for direction in (f"en>{lang}", f"{lang}>en")}
    assert set(valid.directions) == plain
    forms = {f"en>{lang}-{form}" for lang in ("de", "fr") for form in ("formal", "familiar")}
    assert set(train.directions) == plain | forms
    assert set(train.files()) == set(work.glob("*-en-*.train.*.xz"))
    assert all(list(rows) for rows in train.directed_rows_by_spec())
    assert list(valid.directed_rows())


def test_sets_that_change_the_english_side_are_never_translated_to_english(work: Path) -> None:
    for recipe in ("teacher.toml", "student.toml"):
        specs = load_corpus(recipe, work).specs
        assert not [spec for spec in specs if spec.startswith(("titled", "formality")) and spec.endswith(">en")]


def test_the_vocabulary_is_learned_from_as_many_lines_of_every_set(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vocabulary, "LINES", 28)
    lines = list(vocabulary.sample_lines(work))
    # Four languages of tatoeba, prose and docs, two of europarl, and few traditional documents; of English, which is in all
    # of them, a quarter.
    few = [len(read_both(work, f"{kind}-en-zh-Hant.train", "en", "zh-Hant")) for kind in ("prose", "docs")]
    assert len(lines) == (28 + 7) * (4 + 3 + 3 + 2) + sum(min(n, 28) + min(n, 7) for n in few)
    assert lines == list(vocabulary.sample_lines(work))  # the same ones in every run
    assert not any("⟦" in line for line in lines)

    vocabulary.main(work)
    tokenizer = Tokenizers.load(work).source
    assert f"{len(tokenizer):,} pieces" in capsys.readouterr().out
    tags = [f"{lang}{form}" for lang in ("de", "fr") for form in ("", "-familiar", "-formal")] + ["en", "zh", "zh-Hant"]
    assert sorted(tokenizer.language_tokens()) == sorted(tags)
    assert (
        tokenizer.decode(tokenizer.encode("Ⅷ 你好, Zoë!")) == "Ⅷ 你好, Zoë!"
    )  # of bytes, so everything can be written
