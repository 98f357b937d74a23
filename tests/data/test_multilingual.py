"""Several directions in one model, told apart by a token before the source."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import model_folder, pretrained
from regard.config import TokenizerConfig
from regard.data.batches import PairBatches
from regard.data.multilingual import (
    DirectedCorpus,
    DirectedTokenizer,
    language_profiles,
    language_token,
    target_languages,
)
from regard.data.pair_store import prepare_pair_store
from regard.data.parallel_corpus import ParallelCorpus, parse_direction
from regard.data.token_cache import Filters, Store
from regard.errors import RegardError
from regard.evaluate.evaluation import evaluate
from regard.inference.translator import Translator
from regard.text.bpe_dropout import BPEDropout
from regard.text.special_tokens import PAD
from regard.text.tokenizer import Tokenizer, Tokenizers

SPECS = ("p.{lang}@en>de", "p.{lang}@de>en", "q.tsv@en>zh-Hant")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "p.en").write_text("one\ntwo\n")
    (tmp_path / "p.de").write_text("eins\nzwei\n")
    (tmp_path / "q.tsv").write_text("three\tsan\n\tnothing\n")
    return tmp_path


@pytest.fixture
def tokenizer() -> Tokenizer:
    config = TokenizerConfig(kind="char", vocab_size=60, language_tokens=("de", "en", "zh-Hant"))
    return Tokenizer.train(["one two eins zwei three san"], config)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.{lang}.xz@en>de", ("a.{lang}.xz", "en>de")),
        ("a@b.tsv@zh-Hant>en", ("a@b.tsv", "zh-Hant>en")),
        ("a.{lang}", ("a.{lang}", "")),
        ("me@home.tsv", ("me@home.tsv", "")),
    ],
)
def test_a_spec_says_its_direction(spec: str, expected: tuple[str, str]) -> None:
    assert parse_direction(spec) == expected


def test_rows_of_a_corpus_in_their_directions(root: Path) -> None:
    corpus = ParallelCorpus(SPECS, "en", "de", root)
    assert corpus.directions == ("en>de", "de>en", "en>zh-Hant")
    assert list(corpus.directed_rows())[:4] == [
        ("en>de", "one", "eins"),
        ("en>de", "two", "zwei"),
        ("de>en", "eins", "one"),
        ("de>en", "zwei", "two"),
    ]
    assert list(corpus.rows())[2] == ("eins", "one")
    assert list(DirectedCorpus(corpus).rows())[4] == ("zh-Hant\tthree", "san")
    assert target_languages(corpus.directions) == ("de", "en", "zh-Hant")


def test_directions_are_part_of_what_a_corpus_is(root: Path) -> None:
    there, back, none = (ParallelCorpus((spec,), "en", "de", root) for spec in ("q.tsv@en>de", "q.tsv@en>fr", "q.tsv"))
    assert len({c.fingerprint() for c in (there, back, none)}) == 3
    assert DirectedCorpus(there).fingerprint() != there.fingerprint()
    assert none.directions == ()


@pytest.mark.parametrize("spec", ["q.tsv", "p.en|p.de", "q.jsonl", "p.{lang}"])
def test_every_kind_of_corpus_is_turned(spec: str, root: Path) -> None:
    (root / "q.jsonl").write_text('{"en": "three", "de": "san"}\n')
    there, back = (list(ParallelCorpus((f"{spec}@{d}",), "en", "de", root).rows()) for d in ("en>de", "de>en"))
    assert back == [row[::-1] for row in there]
    assert there[0] in [("one", "eins"), ("three", "san")]


def test_a_direction_may_have_any_code() -> None:
    assert parse_direction("p.{lang}@en>zh_Hans") == ("p.{lang}", "en>zh_Hans")
    assert parse_direction("a@b.tsv") == ("a@b.tsv", "")


def test_all_specs_have_a_direction_or_none_has(root: Path) -> None:
    with pytest.raises(RegardError, match=r"'q\.tsv' has no direction"):
        _ = ParallelCorpus(("p.{lang}@en>de", "q.tsv"), "en", "de", root).directions


def test_tags_are_special_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.language_tokens() == {"de": 5, "en": 6, "zh-Hant": 7}
    assert tokenizer.encode("<to-de>")[0] != 5  # what a user types is text
    assert tokenizer.decode([5, *tokenizer.encode("one")]) == "one"
    tokenizer.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").language_tokens() == tokenizer.language_tokens()
    with pytest.raises(RegardError, match="no token for the language 'fr': it translates to de, en, zh-Hant"):
        language_token(tokenizer, "fr")


def test_sources_begin_with_the_token_of_their_target(tokenizer: Tokenizer, root: Path) -> None:
    store = prepare_pair_store(ParallelCorpus(SPECS, "en", "de", root), Tokenizers(tokenizer, tokenizer), Filters(100))
    assert [store.source[i].tolist() for i in (0, 2, 4)] == [
        [5, *tokenizer.encode("one")],
        [6, *tokenizer.encode("eins")],
        [7, *tokenizer.encode("three")],
    ]
    assert store.target[2].tolist() == tokenizer.encode("one")
    assert len(store) == 5  # a source that is empty but for its token is left out
    assert DirectedTokenizer(tokenizer).encode_batch(["de\t \u3000"]) == [[]]
    assert DirectedTokenizer(tokenizer).encode_batch(["de\t", "en\ta\tb"]) == [[], [6, *tokenizer.encode("a\tb")]]
    plain = prepare_pair_store(
        ParallelCorpus(("q.tsv",), "en", "de", root), Tokenizers(tokenizer, tokenizer), Filters(100)
    )
    assert plain.source[0].tolist() == tokenizer.encode("three")


def test_batches_with_dropout_stay_within_the_model_and_say_the_same(tmp_path: Path) -> None:
    lines = [" ".join(random.Random(i).choices(["stable", "unstable", "table"], k=1 + i % 6)) for i in range(60)]
    (tmp_path / "p.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    bpe = Tokenizer.train(lines, TokenizerConfig(kind="byte-bpe", vocab_size=290, language_tokens=("de",)))
    store: Store = prepare_pair_store(
        ParallelCorpus(("p.tsv@en>de",), "en", "de", tmp_path), Tokenizers(bpe, bpe), Filters(100)
    )  # fmt: skip
    longest = int(max(store.source.lengths.max() + 1, store.target.lengths.max() + 1))
    dropout = BPEDropout.for_both_sides(Tokenizers(bpe, bpe), 0.5)
    batches = PairBatches(store, 256, 3, bpe_dropout=dropout, max_len=longest)
    made = [batch for i in range(3) for batch in (batches.batch(i, j) for j in range(len(batches.plan(i))))]
    assert all(((x != PAD).sum(1) <= longest).all() for batch in made for x in batch.inputs)
    said = {line for batch in made for line in bpe.decode_batch(batch.inputs[0].clamp(min=0).tolist())}
    assert said == set(lines)
    assert all(row[0] == 5 for batch in made for row in batch.inputs[0].tolist())
    again = PairBatches(store, 256, 3, bpe_dropout=dropout, max_len=longest).batch(1, 0)
    assert np.array_equal(again.inputs[0], batches.batch(1, 0).inputs[0])
    assert not np.array_equal(again.labels, PairBatches(store, 256, 3).batch(1, 0).labels)


def test_each_side_falls_apart_by_its_own_vocabulary(tmp_path: Path) -> None:
    english, german = ["stable tables"] * 9 + ["a b c"], ["unstetige Unruhe"] * 9 + ["xyz äöü"]
    (tmp_path / "p.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(english, german, strict=True)))
    sides = [
        Tokenizer.train(lines, TokenizerConfig(kind="bpe", vocab_size=v)) for lines, v in ((english, 24), (german, 40))
    ]
    both = Tokenizers(*sides)
    store = prepare_pair_store(ParallelCorpus(("p.tsv",), "en", "de", tmp_path), both, Filters(100))
    batches = PairBatches(store, 512, 0, bpe_dropout=BPEDropout.for_both_sides(both, 0.5))
    made = [batches.batch(0, i) for i in range(len(batches.plan(0)))]
    pieces = {row: side.encode(row) for side, row in zip(sides, ("stable tables", "unstetige Unruhe"), strict=True)}
    read, said = (
        [row for batch in made for row in x(batch)]
        for x in (lambda b: b.inputs[0].clamp(min=0).tolist(), lambda b: b.labels.clamp(min=0).tolist())
    )
    assert {sides[0].decode(row) for row in read} == set(english)
    assert {sides[1].decode(row) for row in said} - {""} == set(german)
    assert any(row[: len(pieces["unstetige Unruhe"])] != pieces["unstetige Unruhe"] for row in said if row[0])


# ---- a model that learned two -------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "data": {"train": ["t.{lang}@en>de", "t.{lang}@en>fr"], "valid": ["v.{lang}@en>de", "v.{lang}@en>fr"]},
    "tokenizer": {"kind": "char", "vocab_size": 40},
    "model": {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 64, "n_heads": 4, "d_ff": 128, "max_len": 16},
    "train": {"steps": 250, "batch_tokens": 512, "lr": 5e-3, "warmup": 50, "schedule": "cosine", "label_smoothing": 0.0},
    "decode": {"beam": 2, "max_len_b": 4},
}  # fmt: skip
RECIPE["model"] |= {"dropout": 0.0}
RECIPE["train"] |= {"valid_every": 125, "save_every": 250, "samples": 2, "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Translator, list[str]]:
    """To "German" words are reversed, to "French" every letter is the next one."""
    place = tmp_path_factory.mktemp("two")
    words = ["".join(w) for k in (3, 4) for w in itertools.product("abcde", repeat=k)]
    random.Random(1).shuffle(words)
    for name, part in (("t", words[:600]), ("v", words[600:650])):
        for lang, change in (("en", str), ("de", lambda w: w[::-1]), ("fr", shifted)):
            (place / f"{name}.{lang}").write_text("".join(change(w) + "\n" for w in part))
    (place / "two.toml").write_text("")
    run = regard.train(place / "two.toml", run=place / "run", quiet=True, **with_root(place))
    valid = [m for m in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if m["kind"] == "valid"]
    assert valid[-1]["bleu"] == pytest.approx((valid[-1]["bleu en>de"] + valid[-1]["bleu en>fr"]) / 2)
    return regard.load(run, "cpu"), words[650:]


def with_root(folder: Path) -> dict[str, Any]:
    return RECIPE | {"data": RECIPE["data"] | {"root": str(folder)}}


def shifted(word: str) -> str:
    return word.translate(str.maketrans("abcde", "bcdea"))


def test_a_model_of_two_directions_does_what_its_tag_says(learned: tuple[Translator, list[str]]) -> None:
    translator, words = learned
    assert translator.directions == ("en>de", "en>fr")
    for to, change in (("de", lambda w: w[::-1]), ("fr", shifted)):
        said = [t.text for t in translator.translate_sentences(words, to=to)]
        right = sum(text == change(word) for text, word in zip(said, words, strict=True))
        assert right / len(words) >= 0.9, (to, right, len(words))


def test_such_a_model_tells_its_languages_apart(learned: tuple[Translator, list[str]]) -> None:
    assert set(learned[0].languages) == {"en", "de", "fr"}
    assert max(learned[0].languages["en"].values()) < 0  # log-probabilities


def test_such_a_model_learns_on_with_directions_alone(
    learned: tuple[Translator, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = model_folder.ModelPackage(
        learned[0].model,
        learned[0].tokenizers,
        "translation",
        directions=learned[0].directions,
        source="en",
        target="de",
    )
    model_folder.save(tmp_path / "along" / "two", package, "")
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "along")
    for name in ("t.en", "t.de", "v.en", "v.de"):
        (tmp_path / name).write_text("abc\ncde\n")
    (tmp_path / "r.toml").write_text("")
    bare = {
        "data.train": ["t.{lang}"],
        "data.valid": ["v.{lang}"],
        "train.init_from": "two",
        "train.steps": 1,
        "train.warmup": 0,
    }
    tuning = {name: table for name, table in with_root(tmp_path).items() if name != "tokenizer"}
    with pytest.raises(RegardError, match=r"told which language to translate to \(de, fr\): write '...@en>de' behind"):
        regard.train(tmp_path / "r.toml", run=tmp_path / "a", quiet=True, settings=bare, **tuning)
    told = bare | {"data.train": ["t.{lang}@en>de"], "data.valid": ["v.{lang}@en>de"]}
    run = regard.train(tmp_path / "r.toml", run=tmp_path / "b", quiet=True, settings=told, **tuning)
    assert regard.load(run, "cpu").directions == ("en>de",)


def test_such_a_model_translates_to_its_first_language_unless_it_is_told(learned: tuple[Translator, list[str]]) -> None:
    translator, _ = learned
    alone, told, other = (translator.translate_sentences(["abc"], to=to)[0] for to in (None, "de", "fr"))
    assert alone == told
    assert (alone.target, other.target) == ("de", "fr")
    with pytest.raises(RegardError, match="no token for the language 'zh': it translates to de, fr"):
        translator.translate_sentences(["abc"], to="zh")
    assert translator.translate_sentences(["", "abc"], to="de")[0].text == ""


def test_such_a_model_is_scored_one_direction_at_a_time(learned: tuple[Translator, list[str]], tmp_path: Path) -> None:
    translator, words = learned
    (tmp_path / "x.tsv").write_text("".join(f"{word}\t{shifted(word)}\n" for word in words[:40]))
    right, wrong = (ParallelCorpus((f"x.tsv@en>{to}",), "en", "de", tmp_path) for to in ("fr", "de"))
    good, bad = evaluate(translator, right), evaluate(translator, wrong)
    assert good.scores.exact.value >= 90 > bad.scores.exact.value
    assert good.perplexity < 1.5 < bad.perplexity
    with pytest.raises(RegardError, match="does not translate de>fr: it knows en>de, en>fr"):
        evaluate(translator, ParallelCorpus(("x.tsv@de>fr",), "en", "de", tmp_path))
    with pytest.raises(RegardError, match=r"write the corpus's own behind it, as in '...@en>de'"):
        evaluate(translator, ParallelCorpus(("x.tsv",), "en", "de", tmp_path))
    with pytest.raises(RegardError, match="one direction at a time"):
        evaluate(translator, ParallelCorpus(("x.tsv@en>de", "x.tsv@en>fr"), "en", "de", tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.valid": ["v.{lang}@de>en"]}, "data.valid has the direction de>en, which data.train has not"),
        ({"data.valid": ["v.{lang}"]}, "data.valid has the direction none"),
        ({"tokenizer.joint": False, "model.tie": "decoder"}, "set tokenizer.joint true"),
    ],
)
def test_recipes_that_do_not_fit_together(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    for name in ("t.en", "t.de", "t.fr", "v.en", "v.de", "v.fr"):
        (tmp_path / name).write_text("ab\n")
    (tmp_path / "r.toml").write_text("")
    with pytest.raises(RegardError, match=said):
        regard.train(
            tmp_path / "r.toml", run=tmp_path / "run", quiet=True, settings=changes, **with_root(tmp_path)
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["split", "word", "bpe", "byte-bpe"])
def test_what_is_spelt_like_a_tag_is_text(kind: str) -> None:
    """Also in what a vocabulary is learned from."""
    lines = ["one <to-de> two three"] * 3
    tokenizer = Tokenizer.train(lines, TokenizerConfig(kind=kind, vocab_size=300, language_tokens=("de",)))
    assert 5 not in tokenizer.encode(lines[0])
    assert tokenizer.language_tokens() == {"de": 5}


def test_tags_are_counted_among_the_pieces() -> None:
    config = TokenizerConfig(kind="byte-bpe", vocab_size=262, language_tokens=("de", "fr"))
    with pytest.raises(RegardError, match="needs at least 263, the 7 special tokens included"):
        Tokenizer.train(["one"], config)


def test_a_form_of_address_is_no_language_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("How are you?\tWie geht es Ihnen?\n", encoding="utf-8")
    corpus = ParallelCorpus(("a.tsv@en>de-formal", "a.tsv@en>de"), "en", "de", tmp_path)
    assert set(language_profiles(corpus)) == {"en", "de"}
