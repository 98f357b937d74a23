"""Stage 3: translations by the teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import synthesise
from synthesise import Job

from regard.config import Config, recipes
from regard.data.parallel_corpus import ParallelCorpus, read_lines
from regard.inference.translator import Translation

FOLDER = Path(synthesise.__file__).parent
COUNTS = {"read": 1, "kept": 1}
Write = Callable[[Path, Sequence[str]], None]


def said(text: str) -> Translation:
    return Translation(text=text, score=-1, log_prob=-1.0, tokens=("x",) * 9)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_the_student_reads_what_the_teacher_reads_and_every_job_in_both_directions() -> None:
    teacher, student = (
        ParallelCorpus(recipes.build({"data": recipes.load(FOLDER / name)["data"]}, Config).data.train, "", "", Path())
        for name in ("teacher.toml", "student.toml")
    )
    made = {
        f"{job.name}/train.{{lang}}.xz@{direction}"
        for job in synthesise.list_jobs()
        for direction in (f"{job.source}>{job.target}", f"{job.target}>{job.source}")
    }
    assert len(student.specs) == len(set(student.specs))  # weights, not files listed twice
    assert set(student.specs) == set(teacher.specs) | made
    assert student.directions == teacher.directions
    assert (
        recipes.load(FOLDER / "teacher.toml")["data"]["valid"] == recipes.load(FOLDER / "student.toml")["data"]["valid"]
    )


def test_each_job_has_a_folder_of_its_own() -> None:
    names = [job.name for job in synthesise.list_jobs()]
    assert len(set(names)) == len(names) == 3 * 3 + 1 + 4
    assert {"made-en-de-0", "made-en-zh-2", "made-en-zh-Hant", "made-zh-Hant-en", "made-fr-en"} <= set(names)


def test_english_is_translated_whatever_corpus_it_is_from(work: Path) -> None:
    files = {path.name: most for path, most in Job("en", "fr").files(work).items()}
    own, other = synthesise.OWN, synthesise.OTHER
    expected = {f"{kind}-en-fr.train.en.xz": most for kind, most in own.items()}
    expected |= {f"{kind}-en-de.train.en.xz": other[kind] for kind in own}
    expected |= {f"{kind}-en-zh.train.en.xz": other[kind] for kind in own if kind != "europarl"}  # there is none
    assert files == expected | {"encyclopedia.train.en.xz": other["encyclopedia"]}
    chinese = {path.name for path in Job("zh-Hant", "en").files(work)}
    assert chinese == {f"{kind}-en-zh-Hant.train.zh-Hant.xz" for kind in ("tatoeba", "prose", "docs")}


def test_parts_of_a_job_have_every_sentence_once(work: Path) -> None:
    whole = synthesise.read_texts(work, Job("en", "de"), 1.0)
    parts = [synthesise.read_texts(work, Job("en", "de", i, 3), 1.0) for i in range(3)]
    assert sorted(text for part in parts for text in part) == sorted(whole)
    assert len(whole) == len(set(whole))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_long_sentences_and_repeated_ones_are_left_out_and_the_scale_limits_all(tmp_path: Path, write: Write) -> None:
    lines = ["a" * 300, "b" * 301, "a" * 300, *map(str, range(97))]
    write(tmp_path / "tatoeba-en-de.train.de.xz", lines)
    found = synthesise.read_texts(tmp_path, Job("de", "en"), 1.0)
    assert sorted(found) == sorted({"a" * 300, *map(str, range(97))})
    few = synthesise.read_texts(tmp_path, Job("de", "en"), 20 / synthesise.OWN["tatoeba"])
    assert 19 <= len(few) <= 20  # one of them may be drawn twice
    assert set(few) < set(found)


# ---- faults ----------------------------------------------------------------------------------------------------------


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


def test_translations_are_sorted_by_their_faults() -> None:
    texts = ["I ate an apple.", "I ate a pear.", "Go.", "One.", "Two.", "Three.", "It is a house.", "Held."]
    found = [
        said("J'ai mangé  une pomme."),
        said(""),
        said("go"),
        said("un un un un un un"),
        Translation(text="Deux.", score=-9, log_prob=-30.0, tokens=("x",) * 2),
        Translation(text="Trois", score=-1, log_prob=-1.0, tokens=("x",) * 9, ended=False),
        said("C'est une maison 我们 是."),
        said("Tenu."),
    ]
    pairs, counts = synthesise.select_pairs(Job("en", "fr"), texts, found, -1.0, {"tenu"})
    assert pairs == [("I ate an apple.", "J'ai mangé une pomme.")]
    faults = ("empty", "copied", "repeats itself", "unlikely", "cut off", "lengths or letters", "in a test")
    assert counts == {"read": 8, "kept": 1} | dict.fromkeys(faults, 1)


def test_the_floor_is_of_the_mean_over_the_tokens_and_the_end() -> None:
    job, made = Job("en", "fr"), Translation(text="Deux.", score=-9, log_prob=-6.0, tokens=("x",) * 3)
    assert synthesise.find_fault(job, "Two.", "Deux.", made, -1.5) == ""  # -6 / 4 is the floor itself
    assert synthesise.find_fault(job, "Two.", "Deux.", made, -1.4) == "unlikely"


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
    assert synthesise.find_fault(Job("en", to), "I ride a horse.", text, said(text), -1.0) == expected


def test_english_made_of_chinese_is_fine() -> None:
    apple = "I ate an apple."
    assert synthesise.find_fault(Job("zh", "en"), "我吃了一个苹果。", apple, said(apple), -1.0) == ""


# ---- files of a job --------------------------------------------------------------------------------------------------


def test_a_job_is_done_if_it_was_made_with_the_same(tmp_path: Path) -> None:
    job, same = Job("en", "fr", 0, 3), {"model": "a", "texts": {"t": "b"}, "options": {"beam": 1, "scale": 1.0}}
    assert not synthesise.is_done(tmp_path, job, same)
    synthesise.save_pairs(tmp_path, job, [("One.", "Un.")], same, COUNTS)
    assert synthesise.is_done(tmp_path, job, same)
    assert list(read_lines(tmp_path / "made-en-fr-0" / "train.fr.xz")) == ["Un."]
    for key in same:
        assert not synthesise.is_done(tmp_path, job, same | {key: "other"})
    synthesise.save_pairs(tmp_path, job, [("Two.", "Deux.")], same | {"model": "other"}, COUNTS)
    assert synthesise.is_done(tmp_path, job, same | {"model": "other"})
    assert [path.name for path in tmp_path.iterdir()] == ["made-en-fr-0"]
    (tmp_path / "made-en-fr-0" / "train.fr.xz").write_bytes(b"something else")
    assert not synthesise.is_done(tmp_path, job, same | {"model": "other"})


def test_a_job_that_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    job = Job("en", "fr")

    def kill(*given: object) -> None:
        raise Killed

    monkeypatch.setattr("regard.files.write_manifest", kill)  # all is written, nothing has its name yet
    monkeypatch.setattr("regard.files.remove", lambda path: None)  # and no one clears up
    with pytest.raises(Killed):
        synthesise.save_pairs(tmp_path, job, [("One.", "Un.")], {}, COUNTS)
    assert not (tmp_path / job.name).exists()
    assert not synthesise.is_done(tmp_path, job, {})
    assert list(tmp_path.iterdir())  # a draft, which no recipe names


def test_what_a_job_was_made_with(tmp_path: Path, write: Write) -> None:
    job = Job("en", "fr")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "manifest.json"):
        (tmp_path / "model" / name).write_text("{}")
    write(tmp_path / "tatoeba-en-fr.train.en.xz", ["One."])
    before = synthesise.describe_inputs(tmp_path, job, str(tmp_path / "model"), {"beam": 1})
    assert before["options"] == {"beam": 1}
    assert list(before["texts"]) == ["tatoeba-en-fr.train.en.xz"]
    (tmp_path / "model" / "manifest.json").write_text("{ }")
    after = synthesise.describe_inputs(tmp_path, job, str(tmp_path / "model"), {"beam": 1})
    assert [key for key in after if after[key] != before[key]] == ["model"]
    write(tmp_path / "tatoeba-en-fr.train.en.xz", ["Two."])
    assert synthesise.describe_inputs(tmp_path, job, str(tmp_path / "model"), {"beam": 1})["texts"] != after["texts"]
