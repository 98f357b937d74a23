"""BLEU by the length of the source: bins, joined sentences, scores by hand, and a tiny study as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_translators import TINY, write_multi30k

from regard.studies import translation_models
from regard.studies.job_pool import load_result
from regard.studies.sentence_length import (
    MODELS,
    bin_by_length,
    format_table,
    score_by_length,
    score_row,
    select_translations,
    study,
)
from regard.studies.translation_models import TEST_SETS, join_sentences, read_tests

Pairs = list[tuple[str, ...]]
PAIRS: Pairs = [(f"quelle {i}", f"source {i}") for i in range(7)]


def test_neighbours_are_joined_and_what_is_left_over_is_left_out() -> None:
    assert join_sentences(PAIRS, 3) == [
        ("quelle 0 quelle 1 quelle 2", "source 0 source 1 source 2"),
        ("quelle 3 quelle 4 quelle 5", "source 3 source 4 source 5"),
    ]
    assert join_sentences(PAIRS, 1) == PAIRS
    assert join_sentences(PAIRS, 8) == []


@given(n=st.integers(1, 9), many=st.integers(0, 30))
def test_joining_changes_no_word(n: int, many: int) -> None:
    pairs: Pairs = [(f"a{i}", f"b{i}") for i in range(many)]
    for side in (0, 1):
        words = " ".join(pair[side] for pair in join_sentences(pairs, n)).split()
        assert words == [pair[side] for pair in pairs[: many // n * n]]


def test_bins_by_hand() -> None:
    assert bin_by_length([1, 7, 8, 9, 20, 19, 300]) == {
        "1 to 7": [0, 1],
        "8 to 9": [2, 3],
        "15 to 19": [5],
        "20+": [4, 6],
    }
    assert bin_by_length([12]) == {"12 to 14": [0]}


@given(st.lists(st.integers(1, 60), min_size=1))
def test_every_sentence_is_in_one_bin(lengths: list[int]) -> None:
    found = bin_by_length(lengths)
    assert sorted(i for chosen in found.values() for i in chosen) == list(range(len(lengths)))
    assert all(found.values())


def test_the_bins_of_multi30k(data_folder: Path) -> None:
    tests = read_tests(data_folder / "multi30k")
    assert [len(tests[test]) for test in TEST_SETS] == [1000, 1000]
    found = bin_by_length([len(source.split()) for test in TEST_SETS for source, _ in tests[test]])
    assert [len(chosen) for chosen in found.values()] == [491, 493, 391, 388, 179, 58]


def test_each_bin_is_scored_by_its_own_sentences() -> None:
    long = "one two three four five six seven eight nine ten"
    pairs: Pairs = [("eins zwei", "one two three four five"), (long, long), ("drei vier", "five four three two one")]
    said = {"good": [target.upper() for _, target in pairs], "bad": [pairs[0][1], "no", pairs[2][1]]}
    short, longer = score_by_length(pairs, said)
    assert (short["label"], short["sources"], short["words"]) == ("1 to 7", 2, 2.0)
    assert short["bleu"] == {"good": pytest.approx(100), "bad": pytest.approx(100)}
    assert (longer["label"], longer["sources"], longer["words"]) == ("10 to 11", 1, 10.0)
    assert longer["bleu"] == {"good": pytest.approx(100), "bad": 0.0}
    assert longer["ratio"] == {"good": 1.0, "bad": 0.1}


def test_words_written_are_counted_as_bleu_counts_them() -> None:
    found = score_row([("Ein Hund.", "A dog, it runs.")], {"m": ["A dog."]})
    assert found["ratio"] == {"m": 3 / 6}  # a dog . | a dog , it runs .


def test_the_test_sets_follow_each_other_as_their_translations_do() -> None:
    result = {"translations": {test: {"2": [f"{test} {i}" for i in range(2)]} for test in reversed(TEST_SETS)}}
    assert select_translations(result, 2) == [f"{test} {i}" for test in TEST_SETS for i in range(2)]


def test_the_table_by_hand() -> None:
    scores = {"bleu": dict.fromkeys(MODELS, 12.345), "ratio": dict.fromkeys(MODELS, 0.987)}
    lines = format_table("words", [{"label": "20+", "sources": 1058, "words": 22.22, **scores}]).splitlines()
    assert lines[0].startswith("| words | sources | mean words | RNNenc")
    assert lines[2] == "| 20+ | 1,058 | 22.2 | 12.3 (0.99) | 12.3 (0.99) | 12.3 (0.99) |"


@pytest.mark.usefixtures("in_this_process")
def test_a_tiny_study_from_files_to_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODELS:
        monkeypatch.setitem(translation_models.MODELS, name, TINY)
    data = write_multi30k(tmp_path)
    out = study(tmp_path / "out", data, device="cpu", quick=True)
    results = json.loads((out / "results.json").read_text())
    assert [found["label"] for found in results["joined"]] == ["1", "2", "3", "4"]
    assert [found["sources"] for found in results["joined"]] == [
        12 + 9,
        6 + 4,
        4 + 3,
        3 + 2,
    ]  # 14 there are, 12 are quick
    assert sum(found["sources"] for found in results["by_length"]) == 12 + 9
    tests = read_tests(data, quick=True)
    words = sum(len(source.split()) for test in TEST_SETS for source, _ in tests[test])
    assert results["joined"][0]["words"] == pytest.approx(words / 21)
    assert results["joined"][1]["words"] > 1.5 * results["joined"][0]["words"]
    text = (out / "table.md").read_text()
    assert "| sentences joined | sources | mean words | RNNenc" in text
    assert "regard" in text
    assert (out / "sentence-length.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_of_other_settings_is_not_used(tmp_path: Path) -> None:
    data = write_multi30k(tmp_path)
    job = translation_models.plan_jobs(["transformer"], tmp_path / "out", data, 1, "cpu", True)[0]
    kept = {"of": job.identity() | {"texts": "others"}, "translations": {}}
    job.folder.mkdir()
    job.result.write_text(json.dumps(kept))
    assert load_result(job) is None
    job.result.write_text(json.dumps(kept | {"of": job.identity()}))
    assert load_result(job) == kept | {"of": job.identity()}
