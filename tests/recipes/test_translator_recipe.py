"""What the stages of the translator's recipe decide, on a few sentences."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

import check
import pack
import prepare
import pytest
import score
import synthesise

from regard import folder, recipes
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.corpus import Corpus, read_lines
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.translator import Translation

SIZES = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 64}
FOLDER = Path(prepare.__file__).parent


def write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Corpora of a few lines under the names of the real ones."""
    english = [f"Number {i} is what Tom told me." for i in range(10, 40)]
    others = {
        "de": [f"Nummer {i} ist, was Tom mir sagte." for i in range(10, 40)],
        "fr": [f"Le numéro {i} est ce que Tom m'a dit." for i in range(10, 40)],
        "zh": [f"{i}号是汤姆告诉我的。" if i % 2 else f"{i}號是湯姆告訴我的。" for i in range(10, 40)],
    }
    root = tmp_path / "data"
    for lang, lines in others.items():
        for split, part in (("train", slice(0, 20)), ("val", slice(20, 25)), ("test", slice(25, 30))):
            write(root / "tatoeba" / f"en-{lang}.{split}.en.xz", english[part])
            write(root / "tatoeba" / f"en-{lang}.{split}.{lang}.xz", lines[part])
    write(root / "tatoeba" / "en-zh.test.script.xz", ["cmn_Hans", "cmn_Hant"] * 2 + ["cmn_Hans"])
    for split in ("train", "val"):
        write(
            root / "europarl-en-de" / f"{split}.en.xz",
            [f"The {split} session is open.", "Same.", "NUMBER 36 - is what Tom told me!"],
        )
        write(
            root / "europarl-en-de" / f"{split}.de.xz",
            [f"Die {split} Sitzung ist eröffnet.", "Same.", "Etwas anderes steht hier."],
        )
    return root  # fmt: skip


@pytest.fixture
def work(data: Path, tmp_path: Path) -> Path:
    prepare.main(data, tmp_path / "work")
    return tmp_path / "work"


# ---- check -----------------------------------------------------------------------------------------------------------


def test_sentences_are_folded_to_letters_and_digits() -> None:
    assert check.fold(" Das ist:  GROSS, weiß ich! ") == "dasistgrossweissich"
    assert check.fold("你好，Ｔｏｍ。") == "你好tom"
    assert check.fold("...") == ""


def test_what_is_prepared_holds_no_sentence_of_the_tests(
    data: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(data, work) == 0
    assert "none of them is trained on" in capsys.readouterr().out
    assert "NUMBER 36 - is what Tom told me!" not in list(read_lines(work / "europarl.train.en.xz"))


@pytest.mark.parametrize(
    "line", ["number 35 IS what Tom told me", "nummer 36 ist was tom mir sagte?", "x\t37号是汤姆告诉我的"]
)
def test_a_sentence_of_a_test_is_found_on_any_side_of_any_file(
    data: Path, work: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(work / "more" / "made-en-de-fr.train.fr.xz", ["fine", line])
    assert check.main(data, work) == 1
    assert "made-en-de-fr.train.fr.xz line 2" in capsys.readouterr().out


def test_nothing_to_check_is_no_proof(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert check.main(data, tmp_path / "empty") == 1


# ---- prepare ---------------------------------------------------------------------------------------------------------


def test_chinese_is_split_by_script(work: Path) -> None:
    simple, traditional = (list(read_lines(work / f"en-{lang}.train.{lang}.xz")) for lang in ("zh", "zh-Hant"))
    assert all("號" not in line for line in simple)
    assert all("号" not in line for line in traditional)
    assert prepare.by_script(iter([("Hi.", "你好。")])) == {
        "en-zh": [("Hi.", "你好。")],
        "en-zh-Hant": [("Hi.", "你好。")],
    }


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
    assert prepare.good(pair, lang) is expected


def test_a_side_in_another_language_is_noticed() -> None:
    texts = {"en": "the man went to the house that he saw there", "de": "der Mann ging in das Haus, das er dort sah"}
    profiles = {lang: prepare.learned([text]) for lang, text in texts.items()}
    assert prepare.spoken("der Mann ging dort in das Haus", "de", profiles)
    assert not prepare.spoken("the man went to the house there", "de", profiles)
    assert prepare.spoken("Tom.", "de", profiles)


def test_what_both_sides_share_is_replaced_on_both() -> None:
    assert prepare.shared("Tom has 25 cats.", "Tom hat 25 Katzen.") == [("25", "25"), ("Tom", "Tom")]
    assert prepare.shared("Tom came.", "湯姆來了。") == [("Tom", "湯姆")]
    assert prepare.shared("Tom saw Tom.", "Tom sah Tom.") == []
    assert prepare.shared("In 1992 or 19.", "1992 oder 19.") == [("1992", "1992")]
    pairs = [(f"Anna has {i} red cats.", f"Anna hat {i} rote Katzen.") for i in range(100, 400)]
    made = prepare.copies(pairs, "zh")
    assert 80 < len(made) < 160
    for source, target in made:
        assert sorted(set(source.split()) - {"has", "red", "cats."}) == sorted(
            set(target.split()) - {"hat", "rote", "Katzen."}
        )
    assert any(source.count("⟦") == 2 for source, _ in made)
    assert {mark for source, _ in made for mark in "1234" if f"⟦{mark}⟧" in source} == set("1234")


def test_the_recipe_reads_what_is_prepared(work: Path) -> None:
    values = recipes.load(FOLDER / "train.toml")
    for split in ("train", "valid"):
        corpus = Corpus(tuple(values["data"][split]), "en", "de", work, split)
        assert len(corpus.directions) == 8
        assert list(corpus.directed_rows())


# ---- score -----------------------------------------------------------------------------------------------------------


class Parrot:
    """Says the language and the text."""

    def translate(self, texts: list[str], to: str, beam: int) -> list[Translation]:
        return [Translation(f"{to}{beam} {text}", -1.0, -1.0, ()) for text in texts]


def test_tests_are_in_both_directions_and_chinese_is_asked_for_in_the_script_of_the_line(data: Path) -> None:
    tests = list(score.tests(data))
    assert [t.direction for t in tests] == ["en>de", "de>en", "en>fr", "fr>en", "en>zh", "zh>en", "en>de", "de>en"]
    assert len(tests[-1].source) == 2  # one pair was never translated
    chinese = tests[4]
    assert chinese.languages == ["zh", "zh-Hant", "zh", "zh-Hant", "zh"]
    said = score.translated(Parrot(), chinese.source, chinese.languages, 3)  # type: ignore[arg-type]
    assert [line.split()[0] for line in said] == ["zh3", "zh-Hant3", "zh3", "zh-Hant3", "zh3"]
    assert all(line.endswith(text) for line, text in zip(said, chinese.source, strict=True))


def test_rows_have_scores_and_signatures(data: Path) -> None:
    chinese, back = (next(t for t in score.tests(data) if t.direction == d) for d in ("en>zh", "zh>en"))
    rows = score.scored(Parrot(), chinese, 1)  # type: ignore[arg-type]
    assert [(row["test"], row["sentences"]) for row in rows] == [
        ("tatoeba zh-Hant", 2),
        ("tatoeba zh", 3),
        ("tatoeba", 5),
    ]
    assert all("tok:zh" in row["bleu_signature"] and "nc:6" in row["chrf_signature"] for row in rows)
    assert all("tok:13a" in row["bleu_signature"] for row in score.scored(Parrot(), back, 1))  # type: ignore[arg-type]
    assert score.cells(rows[0])[:4] == ("en>zh", "tatoeba zh-Hant", "2", "1")
    assert score.parts(["de", "de"]) == {"": [0, 1]}


# ---- synthesise ------------------------------------------------------------------------------------------------------


def test_jobs_write_what_directions_read() -> None:
    jobs = synthesise.jobs()
    specs = [job.spec for job in jobs]
    assert len(set(specs)) == len(jobs)
    assert "made-en-de-zh.train.{lang}.xz@zh>en" in specs
    assert "made-en-zh-en.train.{lang}.xz@en>zh" in specs
    files = {spec.split("@")[0] for spec in specs}
    assert len(files) == len(jobs)
    used = recipes.load(FOLDER / "again.toml")["data"]["train"]
    assert {spec.split("@")[0] for spec in used if spec.startswith("made-")} == files
    assert set(recipes.load(FOLDER / "train.toml")["data"]["train"]) <= set(used)


@pytest.mark.parametrize(
    ("text", "chinese", "expected"),
    [
        ("a b c d a b c d a b c d", False, True),
        ("a b c d a b c d", False, False),
        ("no no no no no", False, True),
        ("very very very good", False, False),
        ("哈哈哈哈哈", True, True),
        ("我吃了一个苹果。", True, False),
        ("", False, False),
    ],
)
def test_text_that_repeats_itself(text: str, chinese: bool, expected: bool) -> None:
    assert synthesise.repeats(text, chinese) is expected


def test_what_is_made_is_sorted_by_its_faults() -> None:
    job = synthesise.Job("en-de", "en", "fr")
    texts = ["I ate an apple.", "I ate a pear.", "Go.", "One.", "Two.", "Three.", "It is a house.", "Held."]
    said = [
        Translation("J'ai mangé une pomme.", -1, -1.0, ("x",) * 9),
        Translation("", 0, 0.0, ()),
        Translation("go", -1, -1.0, ("x",) * 9),
        Translation("un un un un un un", -1, -1.0, ("x",) * 9),
        Translation("Deux.", -9, -30.0, ("x",) * 2),
        Translation("Trois", -1, -1.0, ("x",) * 9, ended=False),
        Translation("C'est une maison 我们 是.", -1, -1.0, ("x",) * 9),
        Translation("Tenu.", -1, -1.0, ("x",) * 9),
    ]
    pairs, counts = synthesise.chosen(job, texts, said, -1.0, {"tenu"})
    assert pairs == [("I ate an apple.", "J'ai mangé une pomme.")]
    faults = ("empty", "copied", "repeats itself", "unlikely", "cut off", "lengths or letters", "in a test")
    assert counts == {"read": 8, "kept": 1} | dict.fromkeys(faults, 1)
    back = synthesise.Job("en-zh", "zh", "en")
    made = Translation("I ate an apple.", -1, -1.0, ("x",) * 9)
    assert synthesise.wrong(back, "我吃了一个苹果。", "I ate an apple.", made, -1.0) == ""


# ---- the stages one after the other ----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One that learned nothing."""
    directions = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))
    tags = ("de", "en", "fr", "zh", "zh-Hant")
    tokenizer = Tokenizer.train(["Number is what Tom told me"], TokenizerConfig(kind="char", vocab_size=60, tags=tags))
    network = make_model(preset("transformer-tiny", source_vocab=len(tokenizer), target_vocab=len(tokenizer), **SIZES))
    decode = DecodeConfig(max_len_a=0.0, max_len_b=4)
    own = folder.Bundle(network, Tokenizers(tokenizer, tokenizer), "translation", decode, "en", "de", directions)
    folder.save(tmp_path / "model", own, "")
    return tmp_path / "model"


def test_all_stages(
    data: Path,
    work: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(script: object, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        script.main()  # type: ignore[attr-defined]
        return capsys.readouterr().out

    monkeypatch.setattr(synthesise, "wrong", lambda *given: "")  # this model says nothing that is right
    halves = [run(synthesise, model, data, work, "--limit", 3, "--device", "cpu", "--part", f"{i}/2") for i in (0, 1)]
    assert [made.count("'read': 3, 'kept': 3") for made in halves] == [len(synthesise.jobs()) // 2] * 2
    assert run(synthesise, model, data, work, "--device", "cpu").count("there already") == len(synthesise.jobs())
    assert json.loads((work / "made-en-de-zh.json").read_text()) == {"read": 3, "kept": 3}
    assert list(read_lines(work / "made-en-de-zh.train.en.xz")) == list(read_lines(work / "en-de.train.en.xz"))[:3]
    assert check.main(data, work) == 0
    table = run(score, model, data, "--beam", 2, "--out", tmp_path / "scores.json", "--device", "cpu")
    assert "tok:zh" in table
    out = tmp_path / "many"
    words = ["--work", work, "--scores", tmp_path / "scores.json", "--flops", "4.2e17", "--minutes", "21"]
    assert "MB" in run(pack, model, out, *words)
    card = (out / "README.md").read_text()
    for said in (
        "4.2e+17 FLOPs, 21 minutes of one H200",
        "CC-BY 2.0 FR",
        "tatoeba.org",
        "manythings.org/anki",
        "Europarl",
        "Weaknesses",
    ):
        assert said in card
    assert card.count("| en>zh | tatoeba") == 6
    assert set(json.loads((out / "languages.json").read_text())) == {"en", "de", "fr"}
    assert folder.damage(out) is None
