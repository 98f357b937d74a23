"""Stage 7: tests and validation sets are scored in every direction that a model has."""

from __future__ import annotations

from pathlib import Path

import score

from regard.inference.translator import Translation


class Parrot:
    """A translator that returns the language, the beam and the source text."""

    directions: tuple[str, ...] = ("en>zh", "zh>en")
    source, target = "en", "zh"

    def translate_sentences(self, texts: list[str], to: str | None, beam: int) -> list[Translation]:
        return [Translation(f"{to}{beam} {text}", -1.0, -1.0, ()) for text in texts]


class Baseline(Parrot):
    directions = ()


def test_tests_are_in_both_directions_and_chinese_is_asked_for_in_the_script_of_the_line(data: Path) -> None:
    tests = list(score.SETS["tatoeba"](data))
    assert [t.direction for t in tests] == ["en>de", "de>en", "en>fr", "fr>en", "en>zh", "zh>en"]
    chinese = tests[4]
    assert chinese.languages == ["zh", "zh-Hant", "zh", "zh-Hant", "zh"]
    said = score.translate_lines(Parrot(), chinese.source, chinese.languages, 3)  # type: ignore[arg-type]
    assert [line.split()[0] for line in said] == ["zh3", "zh-Hant3", "zh3", "zh-Hant3", "zh3"]
    assert all(line.endswith(text) for line, text in zip(said, chinese.source, strict=True))


def test_a_model_of_one_direction_is_scored_in_that(data: Path) -> None:
    tests = list(score.select_known(Baseline(), score.SETS["tatoeba"](data)))  # type: ignore[arg-type]
    assert [t.direction for t in tests] == ["en>zh"]
    said = score.translate_lines(Baseline(), tests[0].source, tests[0].languages, 1)  # type: ignore[arg-type]
    assert [line.split()[0] for line in said] == ["None1"] * 5  # there is nothing to choose from
    assert [t.direction for t in score.select_known(Parrot(), score.SETS["tatoeba"](data))] == ["en>zh", "zh>en"]  # type: ignore[arg-type]


def test_rows_have_scores_and_signatures(data: Path) -> None:
    chinese, back = (next(t for t in score.SETS["tatoeba"](data) if t.direction == d) for d in ("en>zh", "zh>en"))
    rows = score.score_test_set(Parrot(), chinese, 1)  # type: ignore[arg-type]
    assert [(row["test"], row["sentences"]) for row in rows] == [
        ("tatoeba zh-Hant", 2),
        ("tatoeba zh", 3),
        ("tatoeba", 5),
    ]
    assert ["seconds" in row for row in rows] == [False, False, True]  # all lines were translated together
    assert all("tok:zh" in row["bleu_signature"] and "nc:6" in row["chrf_signature"] for row in rows)
    assert all("tok:13a" in row["bleu_signature"] for row in score.score_test_set(Parrot(), back, 1))  # type: ignore[arg-type]
    assert score.format_row(rows[0])[:4] == ("en>zh", "tatoeba zh-Hant", "2", "1")
    assert score.format_row(rows[0])[-1] == ""
    assert score.group_by_language(["de", "de"]) == {"": [0, 1]}


def test_the_sets_by_name(data: Path) -> None:
    found = {
        name: [(test.direction, test.name, len(test.source)) for test in read(data)]
        for name, read in score.SETS.items()
    }
    pairs = [("de", 3), ("fr", 3), ("zh", 3), ("zh-Hant", 3)]
    assert found["ntrex"] == [(d, "ntrex", n) for lang, n in pairs for d in (f"en>{lang}", f"{lang}>en")]
    documents = [(d, "docs valid", 4) for lang in ("de", "fr", "zh") for d in (f"en>{lang}", f"{lang}>en")]
    assert found["valid"] == [*documents, ("en>de", "europarl val", 5), ("de>en", "europarl val", 5)]
    assert [row[1:] for row in found["tatoeba-valid"]] == [("tatoeba val", 5)] * 6
    assert [row[1:] for row in found["tatoeba"]] == [("tatoeba", 5)] * 6


def test_both_sides_of_a_set_are_cut_to_the_first_lines(data: Path) -> None:
    test = list(score.SETS["tatoeba"](data))[4]
    first = test.first(2)
    assert (first.source, first.target, first.languages) == (test.source[:2], test.target[:2], ["zh", "zh-Hant"])
    assert test.first(None) == test
