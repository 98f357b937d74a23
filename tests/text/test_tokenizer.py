"""Tokenizers: hand-worked vocabularies, round trips, special tokens, determinism and bad input."""

import itertools
import json
import os
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import EOS, MASK, SOS, UNK

from regard.errors import RegardError
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, SPECIAL_TOKEN_NAMES, SpecialTokens
from regard.text.tokenizer import KINDS, Tokenizer, TokenizerConfig

CLASSIC = ["low low low low low", "lower lower", "newest newest newest newest newest newest", "widest widest widest"]
CORPUS = [
    "The animal didn't cross the street because it was too tired.",
    "I ate an apple. Ich habe einen Apfel gegessen!",
    "Das Mädchen (7) läßt den Hund schlafen, weil es müde ist.",
    "I  like tea - and 3% of <b>coffee</b>; 他吃了一个苹果。 😀",
    *CLASSIC,
]
LOSSLESS = ("char", "bpe", "unigram", "byte-bpe")
CHARACTERS = sorted(set("".join(CORPUS)))
WORDS = ["I", "ate", "an", "apple", "low", "newest", "Mädchen", "Apfel"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
ASSIGNED_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60)


@cache
def trained(kind: str, nfc: bool = True, lowercase: bool = False) -> Tokenizer:
    return Tokenizer.train(iter(CORPUS), TokenizerConfig(kind=kind, vocab_size=400, nfc=nfc, lowercase=lowercase))


# ---- vocabularies worked out by hand ----


def test_bpe_merges_by_hand() -> None:
    # low x5, lower x2, newest x6, widest x3, each after "▁". Counts: es 9 = st 9, then est 9, then ▁l = lo = ow 7, ...
    # Of equals the pair with the lower ids wins, and the alphabet is numbered by code point (d e i l n o r s t w ▁).
    tokenizer = Tokenizer.train(CLASSIC, TokenizerConfig("bpe", vocab_size=5 + 11 + 9))
    merges = ["es", "est", "lo", "▁lo", "▁low", "ew", "new", "▁new", "▁newest"]
    assert tokenizer.pieces(range(len(tokenizer))) == [*SPECIAL_TOKEN_NAMES.values(), *"deilnorstw▁", *merges]
    assert tokenizer.pieces(tokenizer.encode("lowest newer newest")) == ["▁low", "est", "▁new", "e", "r", "▁newest"]


def test_wordpiece_vocabulary_by_hand() -> None:
    # The same merges with the mark of a word's beginning numbered first; " l" and " n" are in the alphabet already.
    tokenizer = Tokenizer.train(CLASSIC, TokenizerConfig("wordpiece", vocab_size=5 + 20 + 7))
    merges = ["##es", "##est", "##ow", "low", "##ew", "new", "newest"]
    alphabet = "deilnorstw"
    assert tokenizer.pieces(range(len(tokenizer))) == [
        *SPECIAL_TOKEN_NAMES.values(),
        *alphabet,
        *(f"##{c}" for c in alphabet),
        *merges,
    ]
    assert tokenizer.pieces(tokenizer.encode("lowest  newer, ")) == ["low", "##est", "new", "##e", "##r", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("lowest  newer, newest")) == "lowest newer newest"


def test_wordpiece_spacing_is_by_rule() -> None:
    tokenizer = trained("wordpiece")
    assert tokenizer.decode(tokenizer.encode("I  ate an apple .")) == "I ate an apple."
    assert tokenizer.decode(tokenizer.encode("Apfel (7)")) == "Apfel ( 7 )"  # the known loss


def test_word_vocabulary_by_hand() -> None:
    # By count, then by code point: "newest" 6, "low" 5, "widest" 3, and no room for "lower".
    tokenizer = Tokenizer.train(CLASSIC, TokenizerConfig("word", vocab_size=8))
    assert tokenizer.pieces(range(8)) == [*SPECIAL_TOKEN_NAMES.values(), "▁newest", "▁low", "▁widest"]
    assert tokenizer.encode("low lower newest") == [6, UNK, 5]
    assert tokenizer.decode([6, UNK, 5]) == "low newest"


def test_char_is_one_character_a_piece() -> None:
    tokenizer = Tokenizer.train(["ab é", "b\na"], TokenizerConfig("char", vocab_size=10))
    assert tokenizer.pieces(range(len(tokenizer))) == [*SPECIAL_TOKEN_NAMES.values(), "\n", "a", "b", "é", "▁"]
    assert tokenizer.pieces(tokenizer.encode("bé  a\n")) == ["▁", "b", "é", "▁", "▁", "a", "\n"]


@pytest.mark.parametrize("word", ["▁lowest", "▁animal", "▁wider", "▁Apfelstrudel", "▁schlafen"])
def test_unigram_finds_the_best_of_all_segmentations(word: str, tmp_path: Path) -> None:
    trained("unigram").save(tmp_path / "tokenizer.json")
    scores = dict(json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    best = float("-inf")
    for cuts in itertools.product([False, True], repeat=len(word) - 1):
        edges = [0, *(i for i, cut in enumerate(cuts, start=1) if cut), len(word)]
        pieces = [word[a:b] for a, b in itertools.pairwise(edges)]
        if all(piece in scores for piece in pieces):
            best = max(best, sum(scores[piece] for piece in pieces))
    found = trained("unigram").pieces(trained("unigram").encode(word[1:]))
    assert "".join(found) == word
    assert sum(scores[piece] for piece in found) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_punctuation_is_a_piece_of_its_own(kind: str) -> None:
    pieces = trained(kind).pieces(trained(kind).encode("apple."))
    assert pieces[-1] == "."
    assert "".join(pieces) == "▁apple."


def test_byte_pieces_are_readable() -> None:
    tokenizer = Tokenizer.train(["low low low"], TokenizerConfig("byte-bpe", vocab_size=261 + 3))
    assert tokenizer.pieces(tokenizer.encode("low low é\n")) == ["low", "▁low", "▁", "\\xc3", "\\xa9", "\n"]
    assert tokenizer.pieces([0, UNK]) == ["<pad>", "<unk>"]


# ---- layout ----


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_come_first(kind: str) -> None:
    tokenizer = trained(kind)
    assert tokenizer.special == DEFAULT_SPECIAL_TOKENS == SpecialTokens(bos=1, eos=2, unk=3, mask=4, pad=0)
    pieces = tokenizer.pieces(range(len(tokenizer)))
    assert tuple(pieces[:5]) == tuple(SPECIAL_TOKEN_NAMES.values()) == ("<pad>", "<sos>", "<eos>", "<unk>", "<mask>")
    assert len(tokenizer) == len(set(pieces)) <= 400
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.decode([SOS, *tokenizer.encode("I ate"), EOS, 0, 0]) == "I ate"


@pytest.mark.parametrize(
    ("kind", "fewest"), [("char", 9), ("bpe", 9), ("unigram", 9), ("wordpiece", 11), ("word", 6), ("byte-bpe", 261)]
)
def test_smallest_vocabulary(kind: str, fewest: int) -> None:
    # "low wool": the characters l, o, w and ▁; WordPiece has l, o, w twice and no ▁; byte-bpe has 256 bytes.
    assert len(Tokenizer.train(["low wool"], TokenizerConfig(kind, vocab_size=fewest))) == fewest
    for size in (fewest - 1, 5, 0, -1):
        with pytest.raises(RegardError, match=rf"vocab_size {size} is too small .* at least {fewest}\b"):
            Tokenizer.train(["low wool"], TokenizerConfig(kind, vocab_size=size))


# ---- round trips ----


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=st.text(st.sampled_from(CHARACTERS), max_size=60))
def test_round_trip_of_known_characters(kind: str, text: str) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert UNK not in ids


@given(words=st.lists(st.sampled_from([*WORDS, "(", "."]), max_size=12))
def test_round_trip_of_known_words(words: list[str]) -> None:
    text = " ".join(words)
    assert trained("word").decode(trained("word").encode(text)) == text
    assert len(trained("word").encode(text)) == len(words) + sum(word in "(." for word in words)  # "▁" and "("


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
def test_wordpiece_round_trip_of_words(words: list[str]) -> None:
    text = " ".join(words)
    assert trained("wordpiece").decode(trained("wordpiece").encode(text)) == text


@given(text=ANY_TEXT)
def test_byte_level_is_lossless_for_every_string(text: str) -> None:
    tokenizer = trained("byte-bpe", nfc=False)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids.intersection(ids)


@given(text=ASSIGNED_TEXT)
def test_byte_level_with_nfc_gives_nfc(text: str) -> None:
    tokenizer = trained("byte-bpe")
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(ANY_TEXT, max_size=4))
def test_any_text_has_ids_and_batches_agree(kind: str, texts: list[str]) -> None:
    tokenizer = trained(kind)
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode(text) for text in texts]
    assert all(0 <= i < len(tokenizer) for ids in batch for i in ids)
    assert tokenizer.decode_batch(batch) == [tokenizer.decode(ids) for ids in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_composed_and_decomposed(kind: str) -> None:
    composed, decomposed = "Mädchen", "Ma\u0308dchen"
    assert composed != decomposed
    assert trained(kind).encode(composed) == trained(kind).encode(decomposed)
    assert trained(kind).decode(trained(kind).encode(decomposed)) == composed
    plain = trained(kind, nfc=False)
    assert plain.encode(composed) != plain.encode(decomposed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [False, True])
def test_a_tokenizer_knows_whether_it_lower_cases(kind: str, lowercase: bool, tmp_path: Path) -> None:
    tokenizer = trained(kind, lowercase=lowercase)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert tokenizer.lowercases is Tokenizer.load(tmp_path / "tokenizer.json").lowercases is lowercase


@pytest.mark.parametrize("kind", KINDS)
def test_lower_casing(kind: str) -> None:
    tokenizer = trained(kind, lowercase=True)
    assert tokenizer.encode("MÄDCHEN low") == tokenizer.encode("mädchen LOW")
    assert tokenizer.decode(tokenizer.encode("MÄDCHEN Low")) == "mädchen low"
    assert trained(kind).decode(trained(kind).encode("Mädchen")) == "Mädchen"


# ---- special tokens cannot be typed ----


@pytest.mark.parametrize("kind", KINDS)
@given(
    parts=st.lists(
        st.sampled_from([*SPECIAL_TOKEN_NAMES.values(), " ", "a", "low", "<", ">", "pad", "<EOS>"]), max_size=10
    )
)
def test_text_never_becomes_a_special_token(kind: str, parts: list[str]) -> None:
    for lowercase in (False, True):
        ids = trained(kind, lowercase=lowercase).encode("".join(parts))
        assert not {0, SOS, EOS, MASK}.intersection(ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "split"])
def test_special_text_stays_text_after_training_on_it_and_loading(kind: str, tmp_path: Path) -> None:
    lines = ["a <eos> b", "<eos><eos>", "<pad>"] * 5
    Tokenizer.train(lines, TokenizerConfig(kind, vocab_size=300)).save(tmp_path / "t.json")
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    for text in ("<eos>", "a <eos> b", "<pad><eos>"):
        ids = tokenizer.encode(text)
        assert not tokenizer.special_ids.intersection(ids)
        assert ids == tokenizer.encode_batch([text])[0]
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


def test_words_between_white_space_are_taken_as_they_stand() -> None:
    """In published tokenized text <unk> is the special token and the end of a line a word; other names are unknown words."""
    lines = ["the F.C. @-@ <unk> <eos>\n", " \n the <unk> 's\n"]
    tokenizer = Tokenizer.train(lines, TokenizerConfig("split", vocab_size=300))
    assert sorted(tokenizer.pieces(range(5, len(tokenizer)))) == ["\n", "'s", "@-@", "F.C.", "the"]
    for word in ("<unk>", "<eos>", "<pad>", "unseen", "<unk>'s"):
        assert tokenizer.encode(word) == [UNK]
    ids = tokenizer.encode(" the  F.C. \n\n <unk> 's")
    assert tokenizer.pieces(ids) == ["the", "F.C.", "\n", "\n", "<unk>", "'s"]
    assert tokenizer.decode(ids) == "the F.C. \n \n 's"


def test_words_in_lower_case_may_be_spelt_like_special_tokens() -> None:
    lines = ["The <UNK> of <Pad> <unk>\n"]
    tokenizer = Tokenizer.train(lines, TokenizerConfig("split", vocab_size=300, lowercase=True))
    assert sorted(tokenizer.pieces(range(5, len(tokenizer)))) == ["\n", "of", "the"]
    assert tokenizer.encode("<Unk> THE <PAD>") == [UNK, *tokenizer.encode("the"), UNK]


# ---- files and determinism ----


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint() == tokenizer.fingerprint() != trained(kind, nfc=False).fingerprint()
    assert len(tokenizer.fingerprint()) == 64
    assert loaded.pieces(range(len(loaded))) == tokenizer.pieces(range(len(tokenizer)))
    assert loaded.encode_batch(CORPUS) == tokenizer.encode_batch(CORPUS)


TRAIN_ALL = """
import random
from regard.text.tokenizer import KINDS, Tokenizer, TokenizerConfig
draw = random.Random(0)  # many words of few letters: many ties
words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, 8))) for _ in range(1500)]
lines = [" ".join(words[i : i + 5]) + " äöü!?"[i % 7 :] for i in range(0, len(words), 5)]
lines += [f"{c}abc {c}abd" for c in "ÄÖÜÑÇÕŻŁ"]  # only in the piece "▁Äab": "Ä" alone keeps no probability
for kind in KINDS:
    print(Tokenizer.train(lines, TokenizerConfig(kind, vocab_size=450)).fingerprint())
"""


def test_training_is_the_same_in_every_process() -> None:
    outputs = []
    for threads in ("1", "2", "5"):
        env = os.environ | {"RAYON_NUM_THREADS": threads}
        root = Path(__file__).parents[2]
        run = subprocess.run([sys.executable, "-c", TRAIN_ALL], env=env, cwd=root, capture_output=True, check=True)
        assert run.stderr == b""
        outputs.append(run.stdout)
    assert len(set(outputs)) == 1
    assert [len(line) for line in outputs[0].split()] == [64] * len(KINDS)  # nothing else is printed


def test_lines_are_streamed() -> None:
    """Train on a corpus longer than any buffer, from a generator that can be read only once."""
    lines = (f"line {i % 10}" for i in range(5000))
    assert "▁line" in Tokenizer.train(lines, TokenizerConfig("word", 50)).pieces(range(16))


# ---- bad input ----


def test_unknown_kind() -> None:
    with pytest.raises(RegardError, match=r"'spm'.*char, word, split, wordpiece, bpe, byte-bpe, unigram"):
        Tokenizer.train(CORPUS, TokenizerConfig(kind="spm"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [[], [""], ["  ", "\n", "\u3000"]])
def test_no_text(kind: str, lines: list[str]) -> None:
    with pytest.raises(RegardError, match="empty"):
        Tokenizer.train(lines, TokenizerConfig(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates(kind: str) -> None:
    with pytest.raises(RegardError, match=r"surrogate \(U\+D83D\) at character 4"):
        trained(kind).encode("ab \ud83d")
    with pytest.raises(RegardError, match="text 2 holds a lone surrogate"):
        trained(kind).encode_batch(["fine", "\udc80"])
    with pytest.raises(RegardError, match="line 3 of the training text"):
        Tokenizer.train(["fine", "", "not\udfff"], TokenizerConfig(kind))


@pytest.mark.parametrize("wrong", [-1, 400, 2**40])
def test_ids_outside_the_vocabulary(wrong: int) -> None:
    for read in (trained("byte-bpe").decode, trained("byte-bpe").pieces):
        with pytest.raises(RegardError, match=f"token id {wrong} is outside the vocabulary of 400"):
            read([5, wrong])


def test_errors_of_the_lines_come_through() -> None:
    def failing() -> object:
        yield "some text"
        raise RegardError("corpus.txt, line 2: not UTF-8")

    with pytest.raises(RegardError, match=r"^corpus.txt, line 2: not UTF-8$"):
        Tokenizer.train(failing(), TokenizerConfig("bpe"))  # type: ignore[arg-type]


def test_unreadable_files(tmp_path: Path) -> None:
    for content in (b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b"[" * 100_000):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(RegardError, match=r"t\.json"):
            Tokenizer.load(tmp_path / "t.json")
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(RegardError, match="cannot read"):
            Tokenizer.load(path)
    with pytest.raises(RegardError, match="cannot write"):
        trained("bpe").save(tmp_path / "t.json" / "below a file.json")


def altered(path: Path, **changes: object) -> Path:
    trained("bpe").save(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return path


def bpe(vocab: dict[str, int]) -> dict[str, object]:
    return {"type": "BPE", "vocab": vocab, "merges": []}


def split_by(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


ORDERED = {special: i for i, special in enumerate(SPECIAL_TOKEN_NAMES.values())}


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": []},  # the specials are there, but not marked as such
        {"model": bpe(ORDERED | {"<pad>": 4, "<mask>": 0, "a": 5}), "added_tokens": []},
        {"model": bpe(ORDERED | {"a": 9})},
        {"model": bpe({"a": 0, "b": 1}), "added_tokens": []},
        {"model": {"type": "Nonsense"}},
        {"pre_tokenizer": split_by("((((")},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # the library panics on this one
    ],
)
def test_hostile_files(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"t\.json is not a usable tokenizer") as caught:
        Tokenizer.load(altered(tmp_path / "t.json", **changes))
    assert "\n" not in str(caught.value)


def test_a_panic_while_encoding_is_an_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(altered(tmp_path / "t.json", pre_tokenizer=split_by("(a+)+$")))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(RegardError, match="cannot encode"):
            encode("a" * 40 + "b")


def test_a_file_cannot_make_it_cut_or_pad(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    tokenizer = Tokenizer.load(altered(tmp_path / "t.json", truncation=cut, padding=pad))
    assert tokenizer.encode(CORPUS[0]) == trained("bpe").encode(CORPUS[0])


def test_a_vocabulary_may_lack_special_tokens(tmp_path: Path) -> None:
    """A vocabulary with Regard's names needs only an end token, at any id."""
    marked = [{"id": 1, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}]  # fmt: skip
    tokenizer = Tokenizer.load(
        altered(tmp_path / "t.json", model=bpe({"a": 0, "<eos>": 1, "b": 2}), added_tokens=marked)
    )
    assert tokenizer.special == SpecialTokens(eos=1)
    assert tokenizer.encode("a<eos>b") == [0, 2]  # five characters that this vocabulary cannot write
    with pytest.raises(RegardError, match="no mask token, which blanks needs"):
        tokenizer.special.require("mask", "blanks")


def test_a_text_without_tokens_has_no_places() -> None:
    """Spaces beyond ASCII, which this kind drops."""
    tokenizer = trained("wordpiece")
    assert tokenizer.encode_with_offsets("\u00a0\u3000") == ([], [])
    assert tokenizer.split_words(["\u00a0"]) == [([], [])]
