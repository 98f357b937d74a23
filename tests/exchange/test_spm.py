"""SentencePiece files written by hand, byte by byte, against a search over all segmentations."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import pytest
import torch
from peers import CPU, PAIR, make

from regard.errors import RegardError
from regard.exchange.huggingface import read_huggingface, write_huggingface
from regard.exchange.legacy_tokenizers import read_spm
from regard.text.special_tokens import SpecialTokens, SpecialTokenTemplate

SOURCE = {
    "▁the": -2.0,
    "▁": -3.0,
    "▁c": -3.5,
    "at": -3.6,
    "a": -5.0,
    "c": -5.1,
    "t": -5.2,
    "h": -5.3,
    "e": -5.4,
    "cat": -7.0,
}
TARGET = {"▁die": -2.0, "▁": -3.0, "a": -4.0, "d": -4.1, "i": -4.2, "e": -4.3, "ä": -4.4, "▁da": -4.5}


def varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def message(*fields: tuple[int, bytes | int | float]) -> bytes:
    parts = []
    for number, value in fields:
        if isinstance(value, bytes):
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
        elif isinstance(value, float):
            parts.append(varint(number << 3 | 5) + struct.pack("<f", value))
        else:
            parts.append(varint(number << 3) + varint(value))
    return b"".join(parts)


def spm(pieces: dict[str, float], model_type: int = 1) -> bytes:
    control = [message((1, b"<unk>"), (2, 0.0), (3, 2)), message((1, b"</s>"), (2, 0.0), (3, 3))]
    normal = [message((1, text.encode()), (2, score)) for text, score in pieces.items()]
    return message(
        *((1, piece) for piece in control + normal), (2, message((3, model_type), (4, 300))), (3, message((1, b"x")))
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source.spm").write_bytes(spm(SOURCE))
    (tmp_path / "target.spm").write_bytes(spm(TARGET))
    words = dict.fromkeys(["</s>", "<unk>", *SOURCE, *TARGET, ">>deu<<", "<pad>"])
    ids = {piece: i for i, piece in enumerate(words)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    sizes = {**PAIR, "vocab_size": len(ids), "decoder_vocab_size": len(ids), "eos_token_id": 0}
    end = len(ids) - 1
    make("MarianMTModel", "MarianConfig", **sizes, pad_token_id=end, decoder_start_token_id=end)().save_pretrained(
        tmp_path
    )
    return tmp_path


def best(word: str, scores: dict[str, float]) -> list[str]:
    """Return the likeliest of all segmentations of a word."""
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, len(word)), n) for n in range(len(word)))
    ways = [[word[i:j] for i, j in itertools.pairwise((0, *cut, len(word)))] for cut in cuts]
    known = [way for way in ways if all(piece in scores for piece in way)]
    return max(known, key=lambda way: sum(scores[piece] for piece in way))


def test_pieces_and_scores_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.spm"
    path.write_bytes(spm(SOURCE))
    found = read_spm(path)
    assert found.pieces[:2] == [("<unk>", 0.0, 2), ("</s>", 0.0, 3)]
    assert {text: pytest.approx(score) for text, score, _ in found.pieces[2:]} == SOURCE
    for broken in (b"\x0a\xff", b"\x0a\x05abc", b"\x07", path.read_bytes()[:-3]):
        path.write_bytes(broken)
        with pytest.raises(RegardError, match="not a SentencePiece model"):
            read_spm(path)
    path.write_bytes(spm(SOURCE, model_type=2))
    with pytest.raises(RegardError, match=r"of merges: save its tokenizer as tokenizer\.json"):
        read_spm(path)


def test_each_language_is_cut_by_its_own_model_with_joint_ids(folder: Path) -> None:
    package, _ = read_huggingface(folder, CPU)
    both = package.tokenizers
    assert both is not None
    ids = json.loads((folder / "vocab.json").read_text())
    for tokenizer, scores, texts in (
        (both.source, SOURCE, ["the cat", "that  tea ", "chat"]),
        (both.target, TARGET, ["die da", "ad ä"]),
    ):
        for text in texts:
            expected = [ids[piece] for word in text.split() for piece in best(f"▁{word}", scores)]
            assert tokenizer.encode(text) == expected
            assert tokenizer.decode(tokenizer.encode(text)) == " ".join(text.split())
    end, pad, unknown = (ids[name] for name in ("</s>", "<pad>", "<unk>"))
    assert package.token_template == SpecialTokenTemplate((), (), (end,), (pad,), (end,))
    assert (
        both.source.special
        == both.target.special
        == SpecialTokens(eos=end, unk=unknown, pad=pad, bos=both.source.special.bos)
    )
    assert both.source.pieces(both.source.encode(">>deu<< the cat")) == [">>deu<<", "▁the", "▁c", "at"]
    assert unknown in both.source.encode("the 漢")
    assert not {end, pad} & set(both.source.encode("the </s> <eos> <pad>"))


def test_two_tokenizers_stay_here(folder: Path, tmp_path: Path) -> None:
    package, _ = read_huggingface(folder, torch.device("cpu"))
    report = write_huggingface(tmp_path / "out", package)
    assert "without tokenizers" in report.summary()
    assert not (tmp_path / "out" / "tokenizer.json").exists()
