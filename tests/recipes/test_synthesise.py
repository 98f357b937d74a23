"""Stage 3: synthetic pairs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import synthesise
from synthesise import SynthesisJob

from regard.config import recipes
from regard.data.parallel_corpus import read_lines
from regard.inference.translator import Translation

FOLDER = Path(synthesise.__file__).parent
COUNTS = {"read": 1, "kept": 1}


def said(text: str) -> Translation:
    return Translation(text, -1, -1.0, ("x",) * 9)


def test_the_second_recipe_reads_what_jobs_make_beside_what_the_first_reads() -> None:
    first, second = (
        Counter(recipes.load(FOLDER / f"{name}.toml")["data"]["train"]) for name in ("train", "train_synthetic")
    )
    own = {
        f"{job.name}/train.{{lang}}.xz@{direction}": 1
        for job in synthesise.list_jobs()
        for direction in (f"{job.real}>{job.to}", f"{job.to}>{job.real}")
        if direction != f"{job.real}>en"  # no English but what someone wrote
        if job.stem != "europarl" or direction.endswith(">en")  # made speeches are to be read, not to be written
    }
    assert len(own) == 3 + 2 * 16 + 4
    assert second == first + Counter(own)
    for name in ("tokenizer", "model"):
        assert recipes.load(FOLDER / "train.toml")[name] == recipes.load(FOLDER / "train_synthetic.toml")[name]


def test_each_job_has_a_folder_of_its_own() -> None:
    names = [job.name for job in synthesise.list_jobs()]
    assert len(set(names)) == len(names) == 23
    assert {"made-en-de-zh", "made-en-zh-en", "made-europarl-zh-Hant"} <= set(names)


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
    assert synthesise.is_repetitive(text, chinese) is expected


def test_what_is_made_is_sorted_by_its_faults() -> None:
    texts = ["I ate an apple.", "I ate a pear.", "Go.", "One.", "Two.", "Three.", "It is a house.", "Held."]
    found = [
        said("J'ai mangé une pomme."),
        Translation("", 0, 0.0, ()),
        said("go"),
        said("un un un un un un"),
        Translation("Deux.", -9, -30.0, ("x",) * 2),
        Translation("Trois", -1, -1.0, ("x",) * 9, ended=False),
        said("C'est une maison 我们 是."),
        said("Tenu."),
    ]
    pairs, counts = synthesise.select_pairs(SynthesisJob("en-de", "en", "fr"), texts, found, -1.0, {"tenu"})
    assert pairs == [("I ate an apple.", "J'ai mangé une pomme.")]
    faults = ("empty", "copied", "repeats itself", "unlikely", "cut off", "lengths or letters", "in a test")
    assert counts == {"read": 8, "kept": 1} | dict.fromkeys(faults, 1)


@pytest.mark.parametrize(
    ("to", "text", "expected"),
    [
        ("zh", "我骑马。", ""),
        ("zh", "我騎馬。", "script"),
        ("zh-Hant", "我騎馬。", ""),
        ("zh-Hant", "我骑馬。", "script"),
        ("zh-Hant", "你好。", ""),
    ],
)
def test_chinese_of_the_other_script_is_left_out(to: str, text: str, expected: str) -> None:
    assert synthesise.find_fault(SynthesisJob("en-de", "en", to), "I ride a horse.", text, said(text), -1.0) == expected


def test_english_made_of_chinese_is_fine() -> None:
    apple = "I ate an apple."
    assert synthesise.find_fault(SynthesisJob("en-zh", "zh", "en"), "我吃了一个苹果。", apple, said(apple), -1.0) == ""


# ---- speeches --------------------------------------------------------------------------------------------------------


class There:
    """A translator that gives numbered French and French with a German word, and translates back one right and one wrong."""

    def translate_sentences(self, texts: list[str], to: str, beam: int) -> list[Translation]:
        if to == "fr":
            return [said(f"La commission a parlé {i} fois.") for i in range(2)] + [said("La Kommission a parlé.")]
        assert texts == ["La commission a parlé 0 fois.", "La commission a parlé 1 fois."]
        return [said("The commission has spoken."), said("Nothing to see here.")]


def test_a_speech_must_be_in_known_words_and_come_back(
    tmp_path: Path, write: Callable[[Path, Sequence[str]], None]
) -> None:
    write(tmp_path / "en-fr.train.fr.xz", ["Il a parlé d'une commission.", "La fois"])
    texts = ["The commission has spoken.", "The council, however, did not.", "The commission spoke."]
    given = argparse.Namespace(beam=1, floor=-1.0, back=55.0, work=tmp_path)
    pairs, counts = synthesise.synthesise_pairs(There(), SynthesisJob("europarl", "en", "fr"), texts, set(), given)  # type: ignore[arg-type]
    assert pairs == [(texts[0], "La commission a parlé 0 fois.")]
    assert counts == {"read": 3, "kept": 1, "unknown words": 1, "comes back differently": 1}
    pairs, counts = synthesise.synthesise_pairs(There(), SynthesisJob("en-de", "en", "fr"), texts, set(), given)  # type: ignore[arg-type]
    assert counts == {"read": 3, "kept": 3}


def test_words_are_found_in_any_language() -> None:
    assert synthesise.collect_words(["L'été, 9 fois.", "欧盟的 Kommission说"]) == {"l", "été", "fois", "kommission"}


def test_the_chrf_of_what_comes_back_decides() -> None:
    pairs = [("abcdefgh", "x"), ("abcdefgh", "y")]
    back = [said("abcdefgh"), said("abcdxxxx")]
    assert synthesise.keep_round_trips(pairs, back, 55.0) == pairs[:1]
    # of the n-grams of up to six of "abcdxxxx" 4/8, 3/7, 2/6, 1/5, 0, 0 are right: 24.4 on average, here 0.244 * 100
    assert synthesise.keep_round_trips(pairs, back, 24.0) == pairs
    assert synthesise.keep_round_trips(pairs, back, 25.0) == pairs[:1]


def test_long_sentences_of_speeches_are_not_tried(tmp_path: Path, write: Callable[[Path, Sequence[str]], None]) -> None:
    lines = ["a" * 160, "b" * 161, "a" * 160]
    for stem in ("europarl", "en-de"):
        write(tmp_path / f"{stem}.train.en.xz", lines)
    assert synthesise.read_texts(tmp_path, SynthesisJob("europarl", "en", "fr")) == ["a" * 160]
    assert synthesise.read_texts(tmp_path, SynthesisJob("en-de", "en", "fr")) == ["a" * 160, "b" * 161]


# ---- what is left of a job -------------------------------------------------------------------------------------------


def test_a_job_is_there_if_it_was_made_with_the_same(tmp_path: Path) -> None:
    job, same = (
        SynthesisJob("en-de", "en", "fr"),
        {"model": "a", "texts": {"t": "b"}, "options": {"beam": 1, "limit": None}},
    )
    assert not synthesise.is_done(tmp_path, job, same)
    synthesise.save_pairs(tmp_path, job, [("One.", "Un.")], same, COUNTS)
    assert synthesise.is_done(tmp_path, job, same)
    assert list(read_lines(tmp_path / "made-en-de-fr" / "train.fr.xz")) == ["Un."]
    for key in same:
        assert not synthesise.is_done(tmp_path, job, same | {key: "other"})
    synthesise.save_pairs(tmp_path, job, [("Two.", "Deux.")], same | {"model": "other"}, COUNTS)
    assert synthesise.is_done(tmp_path, job, same | {"model": "other"})
    assert [path.name for path in tmp_path.iterdir()] == ["made-en-de-fr"]
    (tmp_path / "made-en-de-fr" / "train.fr.xz").write_bytes(b"something else")
    assert not synthesise.is_done(tmp_path, job, same | {"model": "other"})


def test_a_job_that_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    job = SynthesisJob("en-de", "en", "fr")

    def kill(*given: object) -> None:
        raise Killed

    monkeypatch.setattr("regard.files.write_manifest", kill)  # all is written, nothing has its name yet
    monkeypatch.setattr("regard.files.remove", lambda path: None)  # and no one clears up
    with pytest.raises(Killed):
        synthesise.save_pairs(tmp_path, job, [("One.", "Un.")], {}, COUNTS)
    assert not (tmp_path / job.name).exists()
    assert not synthesise.is_done(tmp_path, job, {})
    assert list(tmp_path.iterdir())  # a draft, which no recipe names


def test_what_a_job_was_made_with(tmp_path: Path, write: Callable[[Path, Sequence[str]], None]) -> None:
    job = SynthesisJob("en-de", "en", "fr")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "manifest.json"):
        (tmp_path / "model" / name).write_text("{}")
    write(tmp_path / "en-de.train.en.xz", ["One."])
    before = synthesise.describe_inputs(tmp_path, job, str(tmp_path / "model"), {"beam": 1})
    assert before["options"] == {"beam": 1}
    (tmp_path / "model" / "manifest.json").write_text("{ }")
    after = synthesise.describe_inputs(tmp_path, job, str(tmp_path / "model"), {"beam": 1})
    assert [key for key in after if after[key] != before[key]] == ["model"]
    write(tmp_path / "en-de.train.en.xz", ["Two."])
    assert synthesise.describe_inputs(tmp_path, job, str(tmp_path / "model"), {"beam": 1})["texts"] != after["texts"]
    for name in ("europarl.train.en.xz", "en-fr.train.fr.xz"):
        write(tmp_path / name, ["Un."])
    speeches = synthesise.describe_inputs(
        tmp_path, SynthesisJob("europarl", "en", "fr"), str(tmp_path / "model"), {"beam": 1}
    )
    assert list(speeches["texts"]) == ["europarl.train.en.xz", "en-fr.train.fr.xz"]
