"""Labelled text: what was written comes back, quotation marks and all; what is broken is refused with file and line."""

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens import UNK

from regard.config import TokenizerConfig
from regard.data.labelled_text import (
    ColumnNames,
    Example,
    label_ids,
    label_names,
    label_numbers,
    read_examples,
    read_tagged,
    tag_ids,
    tags_to_pieces,
)
from regard.errors import RegardError
from regard.text.tokenizer import KINDS, Tokenizer

CELL = st.text(st.characters(exclude_characters="\n\0\t", exclude_categories=("Cs",)), max_size=12)
LABEL = CELL.map(str.strip).filter(bool)
WORD = st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="▁"), min_size=1, max_size=8)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(RegardError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    return message


def labelled(*labels: str | None) -> list[Example]:
    return [Example((f"text {i}",), label, line=i) for i, label in enumerate(labels, 1)]


# ---- TSV and JSONL -----------------------------------------------------------------------------------------------


@relaxed
@given(st.lists(st.tuples(CELL, CELL, LABEL), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_what_is_written_is_read(tmp_path: Path, rows: list[tuple[str, str, str]], header: bool, jsonl: bool) -> None:
    """Quotation marks, commas and odd spaces are text; both forms give the same examples, up to line numbers."""
    if jsonl:
        names = ("a", "b", "c")
        path = write(tmp_path / "x.jsonl", "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    else:
        names = ("a", "b", "c") if header else ("1", "2", "3")
        path = write(tmp_path / "x.tsv", "a\tb\tc\r\n" * header + "".join("\t".join(row) + "\r\n" for row in rows))
    examples = list(read_examples(path, ColumnNames(*names, header=header)))
    first = 1 + (header and not jsonl)
    assert [(*e.texts, e.label) for e in examples] == [(a.strip(), b.strip(), c) for a, b, c in rows]
    assert [e.line for e in examples] == list(range(first, first + len(rows)))


def test_quotation_marks_do_not_join_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", 'text\tlabel\n" open\t0\n"" and "closed"\t1\n')
    assert [e.texts[0] for e in read_examples(path, ColumnNames())] == ['" open', '"" and "closed"']


def test_a_single_text_without_label(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", "one\ntwo\n")
    examples = list(read_examples(path, ColumnNames("1", label="", header=False)))
    assert examples == [Example(("one",), line=1), Example(("two",), line=2)]


def test_a_name_wins_over_a_number_and_a_number_works_with_a_header(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", "2\t text\tlabel \nfirst\tsecond\tz\n")
    assert next(read_examples(path, ColumnNames("2"))).texts == ("first",)
    assert next(read_examples(path, ColumnNames("text", pair="1", label="3"))) == Example(
        ("second", "first"), "z", line=2
    )


@pytest.mark.parametrize("name", ["x.tsv.gz", "x.tsv.xz", "x.tsv.zst", "x.jsonl.gz", "X.JSONL.XZ"])
def test_compressed_files_are_read_like_others(tmp_path: Path, name: str) -> None:
    data = b'{"text": "hello", "label": "a"}\n' if "json" in name.lower() else b"text\tlabel\nhello\ta\n"
    pack = {"gz": gzip.compress, "xz": lzma.compress, "st": zstandard.ZstdCompressor().compress}
    (tmp_path / name).write_bytes(pack[name[-2:].lower()](data))
    assert [(e.texts, e.label) for e in read_examples(tmp_path / name, ColumnNames())] == [(("hello",), "a")]


@pytest.mark.parametrize(("value", "label"), [("a", "a"), (3, "3"), (2.5, "2.5"), (True, "true"), (" b ", "b")])
def test_json_labels_may_be_numbers_and_truth_values(tmp_path: Path, value: object, label: str) -> None:
    path = write(tmp_path / "x.jsonl", json.dumps({"text": "t", "label": value}))
    assert next(read_examples(path, ColumnNames())).label == label


@pytest.mark.parametrize(
    ("name", "text", "columns", "says"),
    [
        ("x.tsv", "a\tb\n1\t2\n", ColumnNames("c", label=""), ["line 1", "no column 'c'", "a, b"]),
        ("x.tsv", "a\tb\n1\t2\n", ColumnNames("a", label="3"), ["line 1", "no column '3'", "a, b"]),
        ("x.tsv", "a\tb\n1\t2\n", ColumnNames("a", label="b", header=False), ["without a header", "not 'a'"]),
        ("x.tsv", "1\t2\n", ColumnNames("0", label="", header=False), ["numbers from 1", "not '0'"]),
        ("x.tsv", "a\tb\n1\t2\n3\n", ColumnNames("a", label=""), ["line 3: 1 tab", "the header has 2: a, b"]),
        ("x.tsv", "a\tb\n1\t2\t3\n", ColumnNames("a", label="b"), ["line 2: 3 tab", "the header has 2: a, b"]),
        ("x.tsv", "1\t2\n1\n", ColumnNames("2", label="", header=False), ["line 2: 1 tab", "column 2 is asked for"]),
        ("x.tsv", "a\tb\n1\t \n", ColumnNames("a", label="b"), ["line 2", "label is empty"]),
        ("x.jsonl", '{"a": "x"}\n{"b": "y", "z": 1}', ColumnNames("a", label=""), ["line 2", "no key 'a'", "b, z"]),
        ("x.jsonl", "[1]", ColumnNames(), ["line 1", "not an object", "text, label"]),
        ("x.jsonl", '{"text": "x"', ColumnNames(), ["line 1", "not JSON"]),
        ("x.jsonl", '{"text": null, "label": 1}', ColumnNames(), ["line 1", "'text' is null"]),
        ("x.jsonl", '{"text": "t", "label": [1]}', ColumnNames(), ["line 1", "'label' is [1]"]),
        ("x.jsonl", '{"text": "\\ud800", "label": 1}', ColumnNames(), ["line 1", "'text'", "surrogate"]),
    ],
)
def test_broken_files_are_refused_by_line(
    tmp_path: Path, name: str, text: str, columns: ColumnNames, says: list[str]
) -> None:
    path = write(tmp_path / name, text)
    message = refused(lambda: list(read_examples(path, columns)))
    assert all(part in message for part in [str(path), *says]), message


# ---- tags --------------------------------------------------------------------------------------------------------

TAGGED = [
    Example(("Ann saw Rome",), words=("Ann", "saw", "Rome"), tags=("B-PER", "O", "B-LOC"), line=1),
    Example(("Yes",), words=("Yes",), tags=("O",), line=6),
]


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n"])
def test_tagged_lines_by_hand(tmp_path: Path, end: str) -> None:
    text = "Ann\tB-PER\nsaw\tO\nRome\tB-LOC\n\n\t\nYes\tO" + end
    assert list(read_tagged(write(tmp_path / "x.conll", text))) == TAGGED


def test_tagged_json_by_hand(tmp_path: Path) -> None:
    lines = [json.dumps({"words": e.words, "tags": e.tags, "id": 7}) for e in TAGGED]
    examples = list(read_tagged(write(tmp_path / "x.jsonl", "\n".join(lines))))
    assert [(e.texts, e.words, e.tags) for e in examples] == [(e.texts, e.words, e.tags) for e in TAGGED]
    assert [e.line for e in examples] == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.tsv", "Ann\tB-PER\nsaw O\n", "line 2: not a word, a tab and a tag"),
        ("x.tsv", "Ann\t\n", "line 1: not a word"),
        ("x.tsv", "Ann\tNNP\tB-PER\n", "line 1: not a word"),
        ("x.jsonl", '{"words": ["a", "b"], "tags": ["O"]}', "line 1: words and tags must be two lists"),
        ("x.jsonl", '{"words": "a", "tags": "O"}', "line 1: words and tags must be two lists"),
        ("x.jsonl", '{"words": [], "tags": []}', "line 1: words and tags must be two lists"),
        ("x.jsonl", '{"words": ["a", ""], "tags": ["O", "O"]}', "line 1: a word or tag is empty"),
        ("x.jsonl", '{"words": ["a"], "tag": ["O"]}', "line 1: there is no key 'tags'; its keys are words, tag"),
    ],
)
def test_broken_tagged_files_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = write(tmp_path / name, text)
    assert f"{path} {says}" in refused(lambda: list(read_tagged(path)))


@cache
def trained(kind: str) -> Tokenizer:
    lines = [
        "Ann didn't cross the street .",
        "das Mädchen läßt den Hund schlafen , 7 Äpfel",
        "newest newest widest lower",
    ]
    return Tokenizer.train(lines, TokenizerConfig(kind=kind, vocab_size=300))


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(WORD, min_size=1, max_size=6))
def test_each_word_has_its_tag_once_and_the_ids_are_those_of_the_sentence(kind: str, words: list[str]) -> None:
    tokenizer = trained(kind)
    ids, tags = tags_to_pieces(words, range(len(words)), tokenizer)
    assert ids == tokenizer.encode(" ".join(words))
    assert len(tags) == len(ids)
    assert [tag for tag in tags if tag != -1] == list(range(len(words)))
    ends = [i for i, tag in enumerate(tags) if tag != -1][1:]
    assert ends == [len(tokenizer.encode(" ".join(words[:n]))) for n in range(1, len(words))]


def test_tags_of_pieces_by_hand() -> None:
    tokenizer = Tokenizer.train(
        ["low low low lower newest newest"], TokenizerConfig(kind="wordpiece", vocab_size=5 + 18 + 4)
    )
    ids, tags = tags_to_pieces(["low", "slow", "low"], [3, 0, 2], tokenizer)
    assert tokenizer.pieces(ids)[0] == tokenizer.pieces(ids)[-1] == "low"
    assert tokenizer.pieces(ids)[1] == "s"
    assert tags == [3, 0, *[-1] * (len(ids) - 3), 2]


def test_a_word_that_leaves_no_piece_is_unknown() -> None:
    ids, tags = tags_to_pieces(["the", "\u00a0\t", "street"], [1, 2, 3], trained("wordpiece"))
    assert ids.count(UNK) == 1
    assert [tag for tag in tags if tag != -1] == [1, 2, 3]
    assert tags_to_pieces([], [], trained("wordpiece")) == ([], [])


# ---- labels as numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["pos", "neg", "pos"], ("neg", "pos")),
        (["10", "9", "1", "9"], ("1", "9", "10")),
        (["10", "9", "b"], ("10", "9", "b")),
        (["-1", "0.5", "-2"], ("-2", "-1", "0.5")),
        (["nan", "10", "9"], ("10", "9", "nan")),
        ([None, "a", None], ("a",)),
        ([], ()),
    ],
)
def test_names_are_sorted_numbers_by_value(labels: list[str | None], names: tuple[str, ...]) -> None:
    assert label_names(labelled(*labels)) == names


def test_labels_and_tags_become_indices() -> None:
    assert label_ids(labelled("b", "a", "b"), ("a", "b"), "x.tsv") == [1, 0, 1]
    assert label_names(TAGGED) == ("B-LOC", "B-PER", "O")
    assert tag_ids(TAGGED, ("B-LOC", "B-PER", "O"), "x.tsv") == [[1, 2, 0], [2]]
    assert label_numbers(labelled("2.5", "-1e1", "3"), "x.tsv") == [2.5, -10.0, 3.0]


def test_a_label_that_training_did_not_see_is_refused() -> None:
    message = refused(lambda: label_ids(labelled("a", "c"), ("a", "b"), Path("dev.tsv")))
    assert message == "dev.tsv line 2: label 'c' is not one of the training data's: a, b"
    message = refused(lambda: tag_ids(TAGGED, ("O", "B-PER"), "dev.tsv"))
    assert message == "dev.tsv line 1: label 'B-LOC' is not one of the training data's: O, B-PER"
    many = [str(i) for i in range(25)]
    assert refused(lambda: label_ids(labelled("x"), many, "dev.tsv")).endswith("18, 19 and 5 more")


def test_missing_labels_and_words_for_numbers_are_refused() -> None:
    assert "dev.tsv line 2: the example has no label" in refused(
        lambda: label_ids(labelled("a", None), ("a",), "dev.tsv")
    )
    assert "dev.tsv line 2: label 'good' is not a number" in refused(
        lambda: label_numbers(labelled("1", "good"), "dev.tsv")
    )
    assert "label 'nan' is not a number" in refused(lambda: label_numbers(labelled("nan"), "dev.tsv"))


# ---- real files --------------------------------------------------------------------------------------------------

SENTENCE = ColumnNames("sentence")
TWO = ColumnNames("sentence1", "sentence2")
SCORED = ColumnNames("sentence1", "sentence2", "score")
MRPC = ColumnNames("#1 String", "#2 String", "Quality")


@pytest.mark.parametrize(
    ("name", "columns", "count", "first"),
    [
        ("SST-2.dev", SENTENCE, 872, Example(("it 's a charming and often affecting journey .",), "1", line=2)),
        ("SST-2.test-labeled", SENTENCE, 1821, Example(("uneasy mishmash of styles and genres .",), "0", line=2)),
        ("CoLA.dev", ColumnNames("4", label="2", header=False), 1043,
         Example(("The sailors rode the breeze clear of the rocks.",), "1", line=1)),
        ("CoLA.test", ColumnNames("sentence", label=""), 1063, Example(("Bill whistled past the house.",), line=2)),
        ("STS-B.test-labeled", ColumnNames("6", "7", "5", header=False), 1379,
         Example(("A girl is styling her hair.", "A girl is brushing her hair."), "2.500", line=1)),
        ("STS-B.dev", SCORED, 1500,
         Example(("A man with a hard hat is dancing.", "A man wearing a hard hat is dancing."), "5.000", line=2)),
    ],
)  # fmt: skip
def test_glue_files_as_they_are(data_folder: Path, name: str, columns: ColumnNames, count: int, first: Example) -> None:
    examples = list(read_examples(data_folder / "glue" / f"{name}.tsv.xz", columns))
    assert len(examples) == count
    assert examples[0] == first


@pytest.mark.parametrize(
    ("name", "columns", "names"),
    [
        ("MRPC.train", MRPC, ("0", "1")),
        ("MRPC.dev", MRPC, ("0", "1")),
        ("MRPC.test-labeled", MRPC, ("0", "1")),
        ("RTE.train", TWO, ("entailment", "not_entailment")),
    ],
)
def test_glue_labels_are_what_a_plain_split_counts(
    data_folder: Path, name: str, columns: ColumnNames, names: tuple[str, ...]
) -> None:
    path = data_folder / "glue" / f"{name}.tsv.xz"
    with lzma.open(path) as file:
        lines = file.read().decode("utf-8-sig").split("\n")[1:-1]
    at = 0 if columns is MRPC else -1
    examples = list(read_examples(path, columns))
    assert label_names(examples) == names
    assert Counter(e.label for e in examples) == Counter(line.split("\t")[at] for line in lines)
    assert [e.texts for e in examples] == [tuple(t.strip() for t in line.split("\t")[-2 + at :][:2]) for line in lines]


def test_sts_b_scores_are_numbers_from_0_to_5(data_folder: Path) -> None:
    path = data_folder / "glue" / "STS-B.train.tsv.xz"
    numbers = label_numbers(read_examples(path, SCORED), path)
    assert (len(numbers), min(numbers), max(numbers)) == (5749, 0.0, 5.0)
