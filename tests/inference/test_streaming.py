"""Lines of a stream in batches, and texts in chunks."""

from __future__ import annotations

import io
import os
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from fake_translation import CapitalTranslator
from hypothesis import given
from hypothesis import strategies as st

from regard.decode.batch_decoding import OverlongSentence
from regard.errors import RegardError
from regard.inference.document_translation import OutputStyle, read_pieces, translate_pieces
from regard.inference.streaming import ChunkTranslator, Line, read_line_batches, read_stream


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        if at < len(data):
            yield data[at : at + size]
        at += size
    if at < len(data):
        yield data[at:]


@given(
    st.lists(st.sampled_from(["a", "é", "你好", " ", "\r", "\r\n", "\n", "\u2028", "word"]), max_size=40),
    st.lists(st.integers(1, 7), max_size=40),
    st.integers(1, 5),
)
def test_no_byte_is_lost_and_batches_depend_on_the_text_alone(pieces: list[str], sizes: list[int], lines: int) -> None:
    data = "".join(pieces).encode()
    found = list(read_line_batches(cut(data, sizes), lines=lines, characters=20))
    assert "".join(line.text + line.end for batch in found for line in batch).encode() == data
    assert all(1 <= len(batch) <= lines for batch in found)
    assert all("\n" not in line.text for batch in found for line in batch)
    assert [line.number for batch in found for line in batch] == list(range(1, sum(map(len, found)) + 1))
    assert found == list(read_line_batches(iter([data] if data else []), lines=lines, characters=20))


def test_line_ends_are_kept() -> None:
    (batch,) = read_line_batches(iter([b"\xef\xbb\xbfa\r\nb\n\r\nc\rd\r"]))
    assert batch == [Line(1, "a", "\r\n"), Line(2, "b", "\n"), Line(3, "", "\r\n"), Line(4, "c\rd\r", "")]


def test_a_batch_ends_when_it_is_long_enough() -> None:
    batches = list(read_line_batches(iter([b"four\n" * 10]), characters=9))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]


def test_a_line_that_has_arrived_does_not_wait_for_the_next() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as stream:
        batches = read_line_batches(*read_stream(stream))
        for text in (b"one\n", b"two\nthree\n", b"fo"):
            os.write(writing, text)
            if text.endswith(b"\n"):
                assert [line.text for line in next(batches)] == text.decode().split()
        os.write(writing, b"ur\nfive")
        assert [line.text for line in next(batches)] == ["four"]
        os.close(writing)
        assert list(batches) == [[Line(5, "five", "")]]


def test_bytes_in_memory_are_a_stream_too() -> None:
    batches = read_line_batches(*read_stream(io.BytesIO(b"a\nb")))
    assert [line.text for batch in batches for line in batch] == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"\xff\n", r"^line 3 of pipe is not UTF-8 \(invalid start byte at byte 1\)$"),
        (b"a\0b\n", "^line 3 of pipe is binary"),
        (b"x" * ((1 << 24) + 1), "^line 3 of pipe is over 16,777,216 bytes long"),
    ],
)
def test_lines_before_a_wrong_one_are_not_lost(wrong: bytes, message: str) -> None:
    batches = read_line_batches(iter([b"a\nb\n" + wrong]), name="pipe")
    assert [line.text for line in next(batches)] == ["a", "b"]
    with pytest.raises(RegardError, match=message):
        next(batches)


def test_two_megabytes_through_a_pipe_need_little_memory() -> None:
    reading, writing = os.pipe()
    line, n = b"The quick brown fox jumps over the lazy dog.\n", 45_000

    def write() -> None:
        with open(writing, "wb", buffering=0) as pipe:
            for _ in range(n // 100):
                pipe.write(line * 100)

    class Forgetful(CapitalTranslator):
        def translate(self, texts: Any, to: Any = None, source: Any = None, **options: Any) -> Any:
            return [self.one(text, "de") for text in texts]

    writer = threading.Thread(target=write)
    writer.start()
    tracemalloc.start()
    try:
        with open(reading, "rb", buffering=0) as stream:
            pieces = read_pieces(read_line_batches(*read_stream(stream)), "lines")
            translator = ChunkTranslator(Forgetful(), has_code_blocks=True)  # type: ignore[arg-type]
            size = sum(len(text) for text in translate_pieces(pieces, translator, OutputStyle()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        writer.join()
    assert size == n * len(line) > 2e6
    assert peak < 1e6


# ---- texts in chunks -------------------------------------------------------------------------------------------------


def test_code_blocks_reach_over_chunks() -> None:
    lines = ["one", "```", "two", "```", "three", "```py", "four"]
    for size in range(1, len(lines) + 1):
        translator = ChunkTranslator(CapitalTranslator(), has_code_blocks=True)  # type: ignore[arg-type]
        chunks = [lines[i : i + size] for i in range(0, len(lines), size)]
        found = [each.text for chunk in chunks for each in translator.translate(chunk)]
        assert found == ["ONE", "```", "two", "```", "THREE", "```py", "four"]


def test_skipped_texts_count() -> None:
    fake = CapitalTranslator()
    translator = ChunkTranslator(fake, has_code_blocks=True)  # type: ignore[arg-type]
    translator.look_ahead(["```", "two"])
    translator.skip(["one", "```"])
    assert [each.text for each in translator.translate(["two", "```", "three"])] == ["two", "```", "THREE"]
    assert fake.detected == ["", "", "one", ""]


def test_a_model_of_one_direction_translates_every_line() -> None:
    fake = CapitalTranslator(directions=())
    translator = ChunkTranslator(fake, has_code_blocks=True)  # type: ignore[arg-type]
    translator.skip(["one"])
    assert [each.text for each in translator.translate(["```", "two"])] == ["```", "TWO"]
    assert fake.detected == []


def test_an_overlong_text_is_refused_by_its_number_in_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def translate(self: Any, texts: Any, *more: Any, **options: Any) -> Any:
        if "long" in texts:
            raise OverlongSentence(texts.index("long") + 1, "has 99 tokens")
        return [self.one(text, "de") for text in texts]

    monkeypatch.setattr(CapitalTranslator, "translate", translate)
    translator = ChunkTranslator(CapitalTranslator(directions=()))  # type: ignore[arg-type]
    translator.skip(["one"])
    translator.translate(["two", "three"])
    with pytest.raises(RegardError, match=r"^sentence 5 has 99 tokens: split it into shorter sentences$"):
        translator.translate(["four", "long"])
