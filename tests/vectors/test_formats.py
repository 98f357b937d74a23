"""Files of word vectors as the C program, gensim and GloVe write them: read and written, intact and damaged."""

from __future__ import annotations

import gzip
import lzma
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from regard.errors import RegardError
from regard.files import write_manifest
from regard.vectors import formats as files
from regard.vectors.formats import write_projector
from regard.vectors.word_vectors import WordVectors

ROWS = np.array([[0.5, -1.25], [3.0, 1e-8], [0.1, 2.0]], np.float32)
WORDS = ["the", "naïve", "犬"]


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def saved(folder: Path, content: bytes, name: str = "given") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def same(path: Path, words: list[str] = WORDS, rows: np.ndarray = ROWS) -> None:
    found = WordVectors.load(path)
    assert found.words == words
    assert found.vectors.dtype == np.float32
    np.testing.assert_array_equal(found.vectors, rows)


# ---- as others write them --------------------------------------------------------------------------------------------


def c_text(*lines: bytes) -> bytes:
    return b"3 2\n" + b"".join(lines)


TEXT = c_text(b"the 0.500000 -1.250000 \n", "naïve 3.000000 0.00000001 \n".encode(), "犬 0.100000 2.000000 \n".encode())
RECORDS = [word.encode() + b" " + floats(*row) for word, row in zip(WORDS, ROWS, strict=True)]


def test_text_of_the_c_program_with_a_space_at_each_end(tmp_path: Path) -> None:
    same(saved(tmp_path, TEXT))


def test_text_without_a_last_newline_and_with_windows_line_ends(tmp_path: Path) -> None:
    same(saved(tmp_path, TEXT.rstrip().replace(b" \n", b"\n").replace(b"\n", b"\r\n")))


def test_binary_of_the_c_program_and_of_gensim_with_and_without_newlines(tmp_path: Path) -> None:
    same(saved(tmp_path, b"3 2\n" + b"".join(record + b"\n" for record in RECORDS)))
    same(saved(tmp_path, b"3 2\n" + b"".join(RECORDS)))


def test_glove_text_has_no_first_line(tmp_path: Path) -> None:
    same(saved(tmp_path, TEXT.partition(b"\n")[2].replace(b" \n", b"\n")))


def test_glove_words_with_spaces_and_numbers_for_words(tmp_path: Path) -> None:
    lines = [b"the 1 2 3", b". . . 4 5 6", b"at name@domain.com 7 8 9", b"1 2 3 4", "\u00a0 1 1 1".encode(), b"x 0 0 1"]
    found = WordVectors.load(saved(tmp_path, b"\n".join(lines) + b"\n"))
    assert found.words == ["the", ". . .", "at name@domain.com", "1", "\u00a0", "x"]
    assert found["1"].tolist() == [2, 3, 4]
    assert found["at name@domain.com"].tolist() == [7, 8, 9]


def test_a_word_cut_inside_a_character_is_replaced_ignored_or_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, b"2 1\n" + "né".encode()[:-1] + b" " + floats(1) + b"\nb " + floats(2) + b"\n")
    assert WordVectors.load(path).words == ["n\ufffd", "b"]
    assert WordVectors.load(path, errors="ignore").words == ["n", "b"]
    with pytest.raises(RegardError, match="word 1 is not UTF-8"):
        WordVectors.load(path, errors="strict")
    with pytest.raises(RegardError, match="replace, ignore or strict"):
        WordVectors.load(path, errors="guess")


def test_of_words_that_are_there_twice_the_first_is_kept(tmp_path: Path) -> None:
    same(saved(tmp_path, b"3 1\na 1\nb 2\na 3\n"), ["a", "b"], np.float32([[1], [2]]))


def test_vectors_whose_bytes_are_newlines_and_spaces_are_still_binary(tmp_path: Path) -> None:
    rows = np.frombuffer(b"\n\n \n\n \0\0    \n \n ", np.float32).reshape(2, 2)
    body = b"a " + rows[0].tobytes() + b"\nb " + rows[1].tobytes() + b"\n"
    same(saved(tmp_path, b"2 2\n" + body), ["a", "b"], rows)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_where_blocks_of_a_file_end_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(files, "CHUNK", chunk)
    monkeypatch.setattr("regard.data.parallel_corpus.BLOCK", chunk)
    for content in (TEXT, b"3 2\n" + b"\n".join(RECORDS)):
        same(saved(tmp_path, content))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["words.txt", "words.bin"])
def test_files_are_compressed_by_their_suffix_both_ways(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"{name}{suffix}"
    WordVectors(WORDS, ROWS).save(path)
    assert path.read_bytes()[:2] in (b"\x1f\x8b", b"\xfd7", b"\x28\xb5")
    same(path)


def test_files_compressed_elsewhere_are_read(tmp_path: Path) -> None:
    same(saved(tmp_path, gzip.compress(TEXT), "a.txt.gz"))
    same(saved(tmp_path, lzma.compress(b"3 2\n" + b"".join(RECORDS)), "b.xz"))


def test_the_name_does_not_decide_what_a_file_is(tmp_path: Path) -> None:
    vectors = WordVectors(WORDS, ROWS)
    for kind in ("text", "binary", "glove", "folder"):
        for name in ("a.bin", "a.txt", "a"):
            path = tmp_path / kind / name
            vectors.save(path, kind)
            same(path)


def test_text_is_as_documented(tmp_path: Path) -> None:
    WordVectors(["a", "b"], np.float32([[1, 0.1], [-2.5, 1e-10]])).save(tmp_path / "a.vec")
    assert (tmp_path / "a.vec").read_text() == "2 2\na 1 0.100000001\nb -2.5 1.00000001e-10\n"


def test_binary_is_as_the_c_program_writes_it(tmp_path: Path) -> None:
    WordVectors(WORDS, ROWS).save(tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == b"3 2\n" + b"".join(record + b"\n" for record in RECORDS)


# ---- with gensim -----------------------------------------------------------------------------------------------------


def keyed(words: list[str] = WORDS, rows: np.ndarray = ROWS) -> Any:
    theirs = pytest.importorskip("gensim.models.keyedvectors").KeyedVectors(rows.shape[1])
    theirs.add_vectors(words, rows)
    return theirs


@pytest.mark.parametrize("binary", [False, True])
def test_gensims_files_are_read(tmp_path: Path, binary: bool) -> None:
    keyed().save_word2vec_format(str(tmp_path / "theirs"), binary=binary)
    same(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "how"), [("a.txt", {}), ("a.bin", {"binary": True}), ("a.glove", {"no_header": True})]
)
def test_gensim_reads_ours(tmp_path: Path, name: str, how: dict[str, bool]) -> None:
    theirs = type(keyed())
    WordVectors(WORDS, ROWS).save(tmp_path / name, "glove" if "no_header" in how else "")
    found = theirs.load_word2vec_format(str(tmp_path / name), **how)
    assert found.index_to_key == WORDS
    np.testing.assert_array_equal(found.vectors, ROWS)


# ---- any words and numbers -------------------------------------------------------------------------------------------

letters = st.characters(codec="utf-8", exclude_characters="\0").filter(lambda char: not char.isspace())
some_words = st.text(letters, min_size=1, max_size=8)
some_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def some_vectors(draw: st.DrawFn) -> WordVectors:
    words = draw(st.lists(some_words, min_size=1, max_size=6, unique=True))
    dim = draw(st.integers(2, 5))
    return WordVectors(words, draw(arrays(np.float32, (len(words), dim), elements=some_floats)))


@pytest.mark.parametrize("kind", ["text", "binary", "glove", "folder"])
@given(vectors=some_vectors())
def test_what_is_written_is_read_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, kind: str, vectors: WordVectors
) -> None:
    path = tmp_path_factory.mktemp("any") / "file"
    vectors.save(path, kind)
    found = WordVectors.load(path)
    assert found.words == vectors.words
    np.testing.assert_array_equal(found.vectors, vectors.vectors)


def test_words_with_spaces_can_be_text_but_not_binary(tmp_path: Path) -> None:
    vectors = WordVectors(["new york", "b"], np.eye(2, dtype=np.float32))
    for kind in ("text", "glove", "folder"):
        vectors.save(tmp_path / kind, kind)
        assert WordVectors.load(tmp_path / kind).words == vectors.words
    with pytest.raises(RegardError, match="'new york' cannot stand in a binary file"):
        vectors.save(tmp_path / "a.bin")
    assert not list(tmp_path.glob("*a.bin*"))


@pytest.mark.parametrize("kind", ["text", "binary", "glove", "folder"])
@pytest.mark.parametrize("word", ["", "a\nb"])
def test_words_that_would_not_come_back_are_refused(tmp_path: Path, kind: str, word: str) -> None:
    with pytest.raises(RegardError, match="cannot stand in"):
        WordVectors(["x", word], np.eye(2, dtype=np.float32)).save(tmp_path / "a", kind)


# ---- broken ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"3 2\nthe 1 2\na 1 2\n", "cut short: it ends after 2 of the 3 words"),
        (b"1 2\nthe 1 2\na 1 2\n", "line 3: more than the 1 words"),
        (b"2 2\nthe 1 2\na 1\n", "line 3: 1 numbers after a word, where 2 were expected"),
        (b"2 2\nthe 1 2\na 1 x\n", "line 3: 2 numbers were expected after a word, not '1 x'"),
        (b"the 1 2\na 1 2\nb 3\n", "line 3: 1 numbers after a word, where 2 were expected"),
        (b"2 2\nthe " + floats(1, 2) + b"\nb " + floats(1, 2)[:-3], "cut short: it ends inside word 2 of 2 .byte 24"),
        (b"2 2\nthe " + floats(1, 2) + b"\n", "cut short: it ends inside word 2 of 2"),
        (b"1 2\nthe " + floats(1, 2) + b"\nb " + floats(1, 2), "byte 16: more than the 1 words"),
        (b"2 1\nthe " + floats(1, 2) + b"\nb " + floats(1, 2) + b"\n", "are there 1 numbers to a word"),
        (b"2 1\na 1\nb nan\n", "the vector of 'b' .word 2. holds NaN or infinity"),
        (b"0 5\n", "nothing to read"),
        (b"hello there\nthis is a letter\n", "holds no word vectors"),
        (gzip.compress(TEXT, mtime=0), "is compressed: give it a name that ends in .gz"),
        (b"", "empty"),
    ],
)
def test_a_broken_file_is_named_with_the_place_and_what_was_expected(tmp_path: Path, content: bytes, said: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(RegardError, match=said) as error:
        WordVectors.load(path)
    assert str(path) in str(error.value)


def test_what_is_not_there_or_no_folder_of_vectors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="there is no file"):
        WordVectors.load(tmp_path / "nothing.bin")
    with pytest.raises(RegardError, match="no folder of word vectors"):
        WordVectors.load(tmp_path)


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    saved(tmp_path, b"precious")
    with pytest.raises(RegardError, match="not replaced"):
        WordVectors(WORDS, ROWS).save(tmp_path)
    assert (tmp_path / "given").read_bytes() == b"precious"


def test_a_folder_with_a_word_too_few_is_an_error(tmp_path: Path) -> None:
    WordVectors(WORDS, ROWS).save(tmp_path / "v")
    (tmp_path / "v" / "words.txt").write_text("the\n")
    with pytest.raises(RegardError, match=r"words\.txt does not match its checksum"):
        WordVectors.load(tmp_path / "v")
    (tmp_path / "v" / "manifest.json").unlink()
    write_manifest(tmp_path / "v")
    with pytest.raises(RegardError, match="1 words and vectors of shape"):
        WordVectors.load(tmp_path / "v")


def test_names_and_kinds_that_make_no_sense_are_errors(tmp_path: Path) -> None:
    vectors = WordVectors(WORDS, ROWS)
    with pytest.raises(RegardError, match="cannot tell what"):
        vectors.save(tmp_path / "words.gz")
    with pytest.raises(RegardError, match="choose text, binary, glove, folder"):
        vectors.save(tmp_path / "words", "pickle")


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def test_the_projector_gets_tensors_one_column_of_words_and_its_configuration(tmp_path: Path) -> None:
    assert write_projector(WordVectors(WORDS, ROWS), tmp_path, most=2) == 2
    table = [line.split("\t") for line in (tmp_path / "tensors.tsv").read_text().splitlines()]
    np.testing.assert_array_equal(np.array(table, np.float32), ROWS[:2])
    assert (tmp_path / "metadata.tsv").read_text(encoding="utf-8") == "the\nnaïve\n"


def test_tables_that_are_not_the_projectors_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "metadata.tsv").write_text("mine")
    with pytest.raises(RegardError, match=r"metadata\.tsv is not of a projector"):
        write_projector(WordVectors(WORDS, ROWS), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("metadata.tsv", "mine")]
    for _ in range(2):
        write_projector(WordVectors(WORDS, ROWS), tmp_path / "new")


def test_tensorboard_understands_the_configuration(tmp_path: Path) -> None:
    config = pytest.importorskip("tensorboard.plugins.projector").ProjectorConfig()
    text_format = pytest.importorskip("google.protobuf.text_format")
    write_projector(WordVectors(WORDS, ROWS), tmp_path)
    text_format.Parse((tmp_path / "projector_config.pbtxt").read_text(), config)
    (embedding,) = config.embeddings
    assert (embedding.tensor_path, embedding.metadata_path) == ("tensors.tsv", "metadata.tsv")


def test_a_binary_file_whose_first_number_begins_with_a_line_break(tmp_path: Path) -> None:
    """0.08 is the bytes 0A D7 A3 3D, and 0A ends a line of text."""
    path = tmp_path / "file.bin"
    values = np.array([0.08, 0.08], "<f4")
    path.write_bytes(b"1 2\n0 " + values.tobytes() + b"\n")
    found = WordVectors.load(path)
    assert list(found.words) == ["0"]
    assert np.array_equal(found.vectors, values[None])
