"""Streaming detokenization: the text so far is always the decoding so far without an unfinished character."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import EOS, SOS, UNK

from regard.text.streaming_detokenizer import Detokenizer
from regard.text.tokenizer import KINDS, Tokenizer, TokenizerConfig

CORPUS = [
    "The animal didn't cross the street, because it was too tired.",
    "Das Mädchen (7) läßt den  Hund schlafen!",
    "他吃了一个苹果。 😀 👩‍👩‍👧 naïve \ufffd",
]
BROKEN = "\ufffd"
TRICKY = [0x41, 0x80, 0x98, 0x9F, 0xA9, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]


@cache
def trained(kind: str) -> Tokenizer:
    return Tokenizer.train(CORPUS, TokenizerConfig(kind=kind, vocab_size=320))


def check(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Push the ids one by one and compare with the decoding of all ids so far; return the result of each push."""
    stream, pushes = Detokenizer(tokenizer), []
    for n, token in enumerate(ids, start=1):
        pushes.append(stream.push(token))
        assert "".join(pushes) == tokenizer.decode(ids[:n]).removesuffix(BROKEN)
    assert "".join(pushes) + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""
    return pushes


@pytest.mark.parametrize("kind", KINDS)
@given(draws=st.lists(st.integers(0, 10**6), max_size=40))
def test_random_ids(kind: str, draws: list[int]) -> None:
    tokenizer = trained(kind)
    check(tokenizer, [draw % len(tokenizer) for draw in draws])


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from(sorted(set("".join(CORPUS)) | set("😃苺é"))), max_size=40))
def test_real_text(kind: str, text: str) -> None:
    check(trained(kind), trained(kind).encode(text))


@given(data=st.lists(st.sampled_from(TRICKY), max_size=30))
def test_any_bytes(data: list[int]) -> None:
    """Broken UTF-8 with one byte in a token decodes as with Python's own decoder."""
    tokenizer = bytes_only()
    ids = [byte_ids()[byte] for byte in data]
    check(tokenizer, ids)
    assert tokenizer.decode(ids) == bytes(data).decode("utf-8", errors="replace")


@cache
def bytes_only() -> Tokenizer:
    return Tokenizer.train(["a"], TokenizerConfig("byte-bpe", vocab_size=261, nfc=False))


@cache
def byte_ids() -> dict[int, int]:
    """Return the id of each byte, found by its readable form: a character below U+0080, or an escape."""
    pieces = bytes_only().pieces(range(5, 261))
    known = {0x20 if p == "▁" else int(p[2:], 16) if len(p) == 4 else ord(p): i for i, p in enumerate(pieces, start=5)}
    assert sorted(known) == list(range(256))
    return known


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=20))
def test_no_half_characters(text: str) -> None:
    tokenizer = bytes_only()
    pushes = check(tokenizer, tokenizer.encode(text))
    assert not any(BROKEN in push for push in pushes)
    assert [push for push in pushes if push] == list(text)  # each character appears with its last byte


def test_emoji_by_hand() -> None:
    ids = bytes_only().encode("a 😀苹")
    assert len(ids) == 1 + 1 + 4 + 3
    assert check(bytes_only(), ids) == ["a", " ", "", "", "", "😀", "", "", "苹"]


def test_unfinished_character_is_shown_at_the_end() -> None:
    stream = Detokenizer(bytes_only())
    assert [stream.push(i) for i in bytes_only().encode("a😀")[:-1]] == ["a", "", "", ""]
    assert stream.flush() == BROKEN


def test_spaces_by_hand() -> None:
    tokenizer = trained("word")
    ids = tokenizer.encode("the  Hund, tired (7)")
    assert check(tokenizer, ids) == ["the", " ", " Hund", ",", " tired", " ", "(", "7", ")"]


def test_special_tokens_show_nothing() -> None:
    tokenizer = trained("word")
    first, second = tokenizer.encode("the Hund")
    assert check(tokenizer, [SOS, first, UNK, second, EOS, 0]) == ["", "the", "", " Hund", "", ""]


def test_flush_makes_ready_for_another_text() -> None:
    tokenizer, stream = trained("bpe"), Detokenizer(trained("bpe"))
    for text in ("the street", "the Hund"):
        assert "".join(stream.push(i) for i in tokenizer.encode(text)) + stream.flush() == text


@pytest.mark.parametrize("byte", [0x41, 0xFF, 0x80, 0xF0])
def test_cost_does_not_grow(byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, sizes = bytes_only(), []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: sizes.append(len(ids)) or decode(self, ids))
    stream = Detokenizer(tokenizer)
    for _ in range(1000):
        stream.push(byte_ids()[byte])
    assert max(sizes) <= 8
    assert len(sizes) <= 2000
