"""Counting words file by file, and sentences of files of every kind."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.vectors.word_counts import MAX_SENTENCE_BYTES, TextFiles, Vocabulary, alias_table, sentences

TEXT = "the cat and the dog\nthe end\n\nand the cat\n"


def rows(text: str) -> list[tuple[str]]:
    return [(line,) for line in text.split("\n")]


def test_words_are_sorted_by_count_and_then_by_the_alphabet() -> None:
    found = Vocabulary.count(rows(TEXT), min_count=1)
    assert found.words == ["the", "and", "cat", "dog", "end"]
    assert found.counts.tolist() == [4, 2, 2, 1, 1]


def test_rare_words_and_those_beyond_the_largest_vocabulary_go() -> None:
    assert Vocabulary.count(rows(TEXT), min_count=2).words == ["the", "and", "cat"]
    assert Vocabulary.count(rows(TEXT), min_count=1, max_vocab=2).words == ["the", "and"]
    assert Vocabulary.count(rows(TEXT), min_count=2).encode_batch(["a dog and the cat"]) == [[1, 0, 2]]


def test_an_empty_vocabulary_says_how_many_words_there_were() -> None:
    with pytest.raises(RegardError, match=r"occurs 9 times.*of 5 words.*'the', occurs 4 times.*smaller min_count"):
        Vocabulary.count(rows(TEXT), min_count=9)
    with pytest.raises(RegardError, match="no words in the text"):
        Vocabulary.count([("",), ("  ",)], min_count=1)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.xz", ".jsonl"])
def test_files_of_every_kind_give_the_same_words(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.split("\n")))
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(TEXT.encode()))
    found = Vocabulary.count(TextFiles((path,)).rows(), min_count=1)
    assert dict(zip(found.words, found.counts, strict=True)) == {"the": 4, "and": 2, "cat": 2, "dog": 1, "end": 1}


def test_a_text_without_line_ends_is_cut_between_words(tmp_path: Path) -> None:
    words = [f"word{i % 977}" for i in range(200_000)]
    path = tmp_path / "text8"
    path.write_text(" ".join(words))
    found = list(sentences(path))
    assert [word for sentence in found for word in sentence.split()] == words
    assert len(found) > 10
    assert max(map(len, found)) <= 3 * MAX_SENTENCE_BYTES


def test_marks_lower_case_and_broken_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfOne Two\r\nth\xffree\n")
    assert [text.split() for (text,) in TextFiles((path,), lowercase=True).rows()] == [
        ["one", "two"],
        ["th\ufffdree"],
        [],
    ]


def test_missing_files_and_none_at_all_are_said(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no file .*nowhere\.txt"):
        list(TextFiles((tmp_path / "nowhere.txt",)).rows())
    with pytest.raises(RegardError, match="at least one file"):
        TextFiles(())


def test_keep_probabilities_follow_both_formulas() -> None:
    vocabulary = Vocabulary(["a", "b", "c"], np.array([900, 99, 1]))
    f = np.array([0.9, 0.099, 0.001])
    t = 0.01
    # word2vec.c: (sqrt(count / (t * N)) + 1) * (t * N) / count
    program = [min(1.0, ((x / t) ** 0.5 + 1) * t / x) for x in f]
    np.testing.assert_allclose(vocabulary.keep_probability(t), program)
    np.testing.assert_allclose(vocabulary.keep_probability(t, "paper"), np.minimum(1, np.sqrt(t / f)))
    assert vocabulary.keep_probability(0).tolist() == [1, 1, 1]


def test_noise_is_counts_to_a_power() -> None:
    vocabulary = Vocabulary(["a", "b"], np.array([16, 1]))
    np.testing.assert_allclose(vocabulary.noise(0.75), [8 / 9, 1 / 9])
    np.testing.assert_allclose(vocabulary.noise(0), [0.5, 0.5])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda weights: sum(weights) > 1e-3))
def test_an_alias_table_holds_exactly_its_distribution(weights: list[float]) -> None:
    p = np.array(weights) / sum(weights)
    share, other = alias_table(p)
    mass = share.astype(np.float64) / len(p)
    np.add.at(mass, other, (1 - share.astype(np.float64)) / len(p))
    np.testing.assert_allclose(mass, p, atol=1e-6)
