"""Short-lists: Model 1 against EM in fractions, narrowed decoding against masked logits, and the file in its folder."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import BANNED, VOCAB, padded, random_sources, tiny_transformer
from test_engine import CPU, WAYS, assert_same
from tokens import EOS, SETTINGS
from torch import Tensor

from regard import cli, folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.shards import FilterReport, Filters, Store, TokenStore
from regard.data.toy import pairs as toy_pairs
from regard.decode import model1, shortlist
from regard.decode.engine import decode
from regard.decode.model1 import best, learn, ranges
from regard.decode.rules import Hypothesis
from regard.decode.shortlist import Narrow, Shortlist
from regard.errors import RegardError
from regard.files import damage
from regard.layers.packed import packed
from regard.models.architectures import make_model, preset
from regard.models.transformer import Transformer
from regard.text.frame import OWN, Frame
from regard.text.special import PAD
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.translator import Translator, load

Pair = tuple[list[int], list[int]]


# --- Model 1 -------------------------------------------------------------------------------------------------------------


def store_of(pairs: Sequence[Pair]) -> Store:
    def side(rows: list[list[int]]) -> TokenStore:
        return TokenStore(np.array(list(chain.from_iterable(rows)), np.uint16), np.cumsum([0, *map(len, rows)]))

    return Store((side([a for a, _ in pairs]), side([b for _, b in pairs])), FilterReport(Filters()))


def found(pairs: Sequence[Pair], iterations: int, vocab: int = 50) -> dict[tuple[int, int], float]:
    keys, t = model1.model1(store_of(pairs), vocab, iterations, lambda done: None)
    assert (np.diff(keys) > 0).all()
    return {(key // vocab, key % vocab): p for key, p in zip(keys.tolist(), t.tolist(), strict=True)}


def em(pairs: Sequence[Pair], iterations: int) -> dict[tuple[int, int], Fraction]:
    """The formulas of the paper in fractions, place by place."""
    t = {(e, f): Fraction(1) for source, target in pairs for e in source for f in target}
    for _ in range(iterations):
        count: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
        total: dict[int, Fraction] = defaultdict(Fraction)
        for source, target in pairs:
            for f in target:
                z = sum(t[e, f] for e in source)
                for e in source:
                    count[e, f] += t[e, f] / z
                    total[e] += t[e, f] / z
        t = {(e, f): count[e, f] / total[e] for e, f in t}
    return t


DAS, HAUS, BUCH, EIN = THE, HOUSE, BOOK, A = 5, 6, 7, 8
HOUSE_AND_BOOK: list[Pair] = [([DAS, HAUS], [THE, HOUSE]), ([DAS, BUCH], [THE, BOOK]), ([EIN, BUCH], [A, BOOK])]
KOEHN = {  # Statistical Machine Translation, figure 4.4: t(e | f) after 1, 2 and 3 iterations
    (DAS, THE): (0.5, 0.6364, 0.7479),
    (DAS, BOOK): (0.25, 0.1818, 0.1208),
    (DAS, HOUSE): (0.25, 0.1818, 0.1313),
    (BUCH, THE): (0.25, 0.1818, 0.1208),
    (BUCH, BOOK): (0.5, 0.6364, 0.7479),
    (BUCH, A): (0.25, 0.1818, 0.1313),
    (EIN, BOOK): (0.5, 0.4286, 0.3466),
    (EIN, A): (0.5, 0.5714, 0.6534),
    (HAUS, THE): (0.5, 0.4286, 0.3466),
    (HAUS, HOUSE): (0.5, 0.5714, 0.6534),
}


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_house_and_the_book_as_published(iterations: int) -> None:
    expected = {pair: values[iterations - 1] for pair, values in KOEHN.items()}
    assert found(HOUSE_AND_BOOK, iterations) == pytest.approx(expected, abs=5e-5)


def test_after_many_iterations_each_word_knows_its_own() -> None:
    t = found(HOUSE_AND_BOOK, 300)
    assert all(t[pair] > 0.97 for pair in ((DAS, THE), (HAUS, HOUSE), (BUCH, BOOK), (EIN, A)))


words = st.lists(st.integers(5, 12), min_size=1, max_size=5)


@settings(max_examples=40)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=8), st.integers(0, 3), st.sampled_from([1, 7, 1 << 20]))
def test_model_1_is_expectation_maximisation(pairs: list[Pair], iterations: int, chunk: int) -> None:
    """Repeated words count by their places; in one chunk kept in memory, and in many made again each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model1, "CHUNK", chunk)
        patch.setattr(model1, "KEPT", chunk)
        assert found(pairs, iterations) == pytest.approx({k: float(p) for k, p in em(pairs, iterations).items()})


def test_of_a_large_corpus_some_pairs_are_read_from_beginning_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model1, "MOST_PAIRS", 3)
    assert set(found([([i], [i]) for i in range(5, 14)], 1)) == {(5, 5), (9, 9), (13, 13)}


def test_progress_hears_of_every_pair_in_every_pass() -> None:
    heard: list[int] = []
    model1.model1(store_of(HOUSE_AND_BOOK), 50, 4, heard.append)
    assert sum(heard) == 3 * 5


def test_ranges() -> None:
    assert ranges(np.array([7, 0, 3]), np.array([2, 0, 3])).tolist() == [7, 8, 3, 4, 5]


def test_the_best_of_each_source_piece_likeliest_first() -> None:
    keys = np.array([0 * 10 + 3, 0 * 10 + 4, 0 * 10 + 9, 2 * 10 + 1, 2 * 10 + 5])
    t = np.array([0.2, 0.5, 0.3, 0.5, 0.5])
    assert best(keys, t, 4, 10, 2).tolist() == [[4, 9], [PAD, PAD], [1, 5], [PAD, PAD]]


class Pieces:
    """As much of a tokenizer as learning needs."""

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("joint", [True, False])
def test_what_is_learned_from_pairs(joint: bool) -> None:
    source: Any = Pieces()
    tokenizers = Tokenizers(source, source if joint else Pieces())  # type: ignore[arg-type]
    lists = learn(store_of([*HOUSE_AND_BOOK, ([EIN], [A])]), tokenizers, 1, 2, lambda done: None)
    expected = [[PAD]] * 5 + [[HOUSE], [HOUSE], [A], [A], [PAD]]  # beside those that are always there
    assert lists.lists.tolist() == [row + [i] * joint for i, row in enumerate(expected)]
    assert lists.always.tolist() == [THE, BOOK]  # twice each, as is A, whose id comes later


# --- in use ---------------------------------------------------------------------------------------------------------------


def random_lists(seed: int, n: int = 2) -> Shortlist:
    rng = np.random.default_rng(seed)
    always, lists = rng.integers(5, VOCAB, 2), rng.integers(5, VOCAB, (VOCAB, n))
    lists[EOS] = PAD
    return Shortlist(torch.tensor(always, dtype=torch.int32), torch.tensor(lists, dtype=torch.int32))


EVERYTHING = Shortlist(torch.arange(VOCAB, dtype=torch.int32), torch.zeros(VOCAB, 1, dtype=torch.int32))


def run(
    model: Any, sources: list[list[int]], lists: Shortlist | None, frame: Frame = OWN, **options: Any
) -> list[list[Hypothesis]]:
    chosen = DecodeConfig(max_len_a=1, max_len_b=5, **options)
    return decode(model, sources, chosen, 64, CPU, frame=frame, shortlist=lists)


def own_list(source: list[int], lists: Shortlist) -> set[int]:
    """By hand: what may be said in a translation."""
    listed = {i for e in source if e != PAD for i in lists.lists[e].tolist() if i != PAD}
    return set(range(5)) | set(lists.always.tolist()) | listed


class Masked:
    """The whole model, with -inf for what is not on a sentence's list: what narrowing must be the same as."""

    def __init__(self, model: Transformer, lists: Shortlist) -> None:
        self.model, self.lists, self.config = model, lists, model.config

    class State:
        def __init__(self, own: Any, mask: Tensor) -> None:
            self.own, self.mask = own, mask

        def reorder(self, parents: Tensor) -> None:
            self.own.reorder(parents)

        def select(self, sentences: Tensor) -> None:
            self.own.select(sentences)
            self.mask = self.mask[sentences]

    def begin(self, source: Tensor) -> Masked.State:
        mask = torch.full((len(source), VOCAB), -torch.inf)
        for row, ids in zip(mask, source.tolist(), strict=True):
            row[list(own_list(ids, self.lists))] = 0.0
        return Masked.State(self.model.begin(source), mask)

    def step(self, tokens: Tensor, state: Masked.State) -> Tensor:
        return self.model.step(tokens, state.own) + state.mask.repeat_interleave(len(tokens) // len(state.mask), 0)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_with_everything_on_the_list_translations_are_the_same(way: dict) -> None:
    model, sources = tiny_transformer(0), random_sources(3, 20)
    for narrow, whole in zip(run(model, sources, EVERYTHING, **way), run(model, sources, None, **way), strict=True):
        assert_same(narrow, whole)


@pytest.mark.parametrize("way", [*WAYS, {"beam": 1, "repetition_penalty": 1.5}], ids=str)
def test_a_short_list_is_a_mask_on_the_whole_vocabulary(way: dict) -> None:
    model, sources, lists = tiny_transformer(0), random_sources(3, 20), random_lists(0)
    narrow = run(model, sources, lists, **way)
    for source, mine, expected in zip(sources, narrow, run(Masked(model, lists), sources, None, **way), strict=True):
        assert_same(mine, expected)
        assert all(set(h.tokens) <= own_list(source, lists) - {*BANNED, EOS} for h in mine)
    assert narrow != run(model, sources, None, **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_sentence_keeps_to_its_own_list_in_any_company(way: dict) -> None:
    model, sources, lists = tiny_transformer(0), random_sources(4, 20), random_lists(1)
    together = run(model, sources, lists, **way)
    assert len({frozenset(own_list(source, lists)) for source in sources}) > 10
    for i, source in enumerate(sources):
        (alone,) = run(model, [source], lists, **{**way, "seed": way.get("seed", 0) + i})
        assert_same(alone, together[i])


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[3]], ids=str)
def test_every_kind_of_head_is_narrowed(way: dict) -> None:
    """An own matrix, a bias, smaller logits."""
    model = tiny_transformer(1, tie="inputs", head_bias=True, scale_logits=True)
    torch.nn.init.normal_(model.head.bias)
    sources, lists = random_sources(5, 12), random_lists(2)
    for mine, expected in zip(
        run(model, sources, lists, **way), run(Masked(model, lists), sources, None, **way), strict=True
    ):
        assert_same(mine, expected)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[3]], ids=str)
def test_start_tokens_are_read_and_not_said(way: dict) -> None:
    """Some models begin with the name of a language, which is on nobody's list."""
    model, sources, lists, frame = tiny_transformer(2), random_sources(6, 12), random_lists(3), Frame(start=(EOS, 9))
    lists = Shortlist(lists.always[lists.always != 9], lists.lists.masked_fill(lists.lists == 9, 10))
    narrow = run(model, sources, lists, frame, **way)
    assert all(9 not in h.tokens for ranked in narrow for h in ranked)
    for mine, expected in zip(narrow, run(Masked(model, lists), sources, None, frame, **way), strict=True):
        assert_same(mine, expected)


def test_only_the_rows_on_the_lists_are_multiplied() -> None:
    lists = random_lists(0)
    narrow = Narrow(tiny_transformer(0), lists, padded([[7, 8], [9]]), (1,), wide=False)
    expected = own_list([7, 8, EOS], lists) | own_list([9, EOS], lists)
    assert narrow.ids.tolist() == sorted(expected)
    assert len(narrow.head.weight) == len(expected) < VOCAB


def test_packed_weights_have_no_rows_to_take() -> None:
    model = packed(tiny_transformer(0), "int8")
    with pytest.raises(RegardError, match="leave out --weights"):
        run(model, [[7]], EVERYTHING)


# --- in a folder ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    rows = [text for pair in toy_pairs(200, "train") for text in pair]
    joint = Tokenizer.train(rows, TokenizerConfig(kind="bpe", vocab_size=300))
    return Tokenizers(joint, joint)


@pytest.fixture
def saved(tokenizers: Tokenizers, tmp_path: Path) -> Path:
    """A model folder with a random translator."""
    torch.manual_seed(0)
    n = len(tokenizers.source)
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 64}
    model = make_model(preset("transformer-tiny", source_vocab=n, target_vocab=n, **SETTINGS, **sizes))
    options = DecodeConfig(beam=2, max_len_a=0.0, max_len_b=6)
    folder.save(tmp_path / "model", folder.Bundle(model, tokenizers, "translation", options, "en", "de"), "")
    return tmp_path / "model"


def call(capfd: Any, monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0), *capfd.readouterr()  # type: ignore[return-value]


def test_the_command_puts_lists_into_the_folder_and_translate_keeps_to_them(saved: Path, capfd, monkeypatch) -> None:
    for n in (1, 3):  # the second time it replaces the first
        words = ("shortlist", saved, "--data", "toy:300", "-n", n, "--frequent", 4)
        assert call(capfd, monkeypatch, *words)[:2] == (0, f"{saved / shortlist.FILE}\n")
        assert damage(saved) is None
        assert shortlist.FILE in json.loads((saved / "manifest.json").read_text())["sha256"]
        lists = folder.load(saved, CPU).shortlist
        assert lists is not None
        assert (lists.lists.shape[1], len(lists.always)) == (n + 1, 4)
    assert not [path.name for path in saved.iterdir() if path.name.startswith(".")]
    translator = load(saved, "cpu")
    ids = translator.tokenizers.source.encode("I ate an apple.")
    allowed = set(translator.tokenizers.target.pieces(sorted(own_list(ids, lists))))
    short = translator.translate("I ate an apple.", shortlist=True)
    assert set(short.tokens) <= allowed
    assert short != translator.translate("I ate an apple.")
    _, out, _ = call(capfd, monkeypatch, "translate", "-m", saved, "--decode.shortlist", "true", "I ate an apple.")
    assert out == short.text + "\n"


def test_lists_follow_the_words_of_the_toy_grammar(saved: Path, tokenizers: Tokenizers, capfd, monkeypatch) -> None:
    """Nine in ten pieces of unseen references are on the lists of their sources."""
    call(capfd, monkeypatch, "shortlist", saved, "--data", "toy:2000", "-n", 10, "--frequent", 20)
    lists = folder.load(saved, CPU).shortlist
    assert lists is not None
    inside = [
        i in own_list(tokenizers.source.encode(english), lists)
        for english, german in toy_pairs(100, "test")
        for i in tokenizers.target.encode(german)
    ]
    assert np.mean(inside) > 0.9


def test_without_lists_the_option_says_how_to_make_them(saved: Path, capfd, monkeypatch) -> None:
    code, _, err = call(capfd, monkeypatch, "translate", "-m", saved, "--decode.shortlist", "true", "I ate an apple.")
    assert code == 2
    assert "regard shortlist" in err


def test_a_gpu_refuses_the_option(saved: Path) -> None:
    bundle = folder.load(saved, CPU)
    translator = Translator(folder.Bundle(**{**vars(bundle), "shortlist": EVERYTHING}))
    with pytest.raises(RegardError, match="for CPUs"):
        translator._shortlist(torch.device("cuda"))


def test_lists_are_saved_with_their_model(saved: Path, tmp_path: Path) -> None:
    bundle = folder.load(saved, CPU)
    n = bundle.config.source_vocab
    lists = Shortlist(torch.tensor([5, 9], dtype=torch.int32), torch.arange(2 * n, dtype=torch.int32).view(n, 2) % n)
    folder.save(tmp_path / "copy", folder.Bundle(**{**vars(bundle), "shortlist": lists}), "")
    again = folder.load(tmp_path / "copy", CPU).shortlist
    assert again is not None
    assert torch.equal(again.always, lists.always)
    assert torch.equal(again.lists, lists.lists)


def test_lists_of_another_vocabulary_and_broken_ones_are_refused(saved: Path) -> None:
    shortlist.save(saved, EVERYTHING)
    with pytest.raises(RegardError, match="another vocabulary"):
        folder.load(saved, CPU)
    (saved / shortlist.FILE).write_bytes(b"nothing")
    with pytest.raises(RegardError, match=f"damaged: {shortlist.FILE} does not match"):
        folder.load(saved, CPU)
    with pytest.raises(RegardError, match="make it again with `regard shortlist"):
        shortlist.load(saved, make_model_config())


def make_model_config() -> Any:
    return preset("transformer-tiny", source_vocab=VOCAB, target_vocab=VOCAB)


def test_a_model_without_training_data_asks_for_some(saved: Path, capfd, monkeypatch) -> None:
    code, _, err = call(capfd, monkeypatch, "shortlist", saved)
    assert code == 2
    assert "give some with --data" in err
