"""Hidden tokens: exact reconstruction, whole words, and frequencies within five standard deviations of the binomial's."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import EOS, MASK, SOS, UNK

from regard.config import TokenizerConfig
from regard.data.noise import corrupt_spans, denoise, infill, mask_tokens, permute_sentences, word_numbers
from regard.errors import RegardError
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, PAD, SPECIAL_TOKEN_NAMES, SpecialTokens
from regard.text.tokenizer import KINDS, Tokenizer

VOCAB = 1000
SENTINELS = range(900, 1000)
LENGTHS = st.integers(0, 3) | st.integers(0, 200)
SEEDS = st.integers(0, 2**32 - 1)
RATES = st.floats(0.01, 0.99)
SPANS = st.floats(0.5, 12)
DTYPES = st.sampled_from([np.uint16, np.int32, np.int64])


def text(n: int, dtype: type = np.int64) -> np.ndarray:
    """n different pieces, in order, so that every token tells where it was."""
    return np.arange(5, 5 + n, dtype=dtype)


def near(count: int, trials: int, p: float) -> bool:
    """Within five standard deviations of the binomial distribution: wrong by chance once in two million times."""
    return abs(count - trials * p) <= 5 * math.sqrt(trials * p * (1 - p))


def equally_likely(outcomes: Sequence[object], n_kinds: int) -> bool:
    counts = Counter(outcomes)
    return len(counts) == n_kinds and all(near(count, len(outcomes), 1 / n_kinds) for count in counts.values())


# ---- BERT --------------------------------------------------------------------------------------------------------


@given(LENGTHS, SEEDS, RATES, DTYPES)
def test_masking_chooses_the_rounded_share_and_labels_exactly_the_chosen(
    n: int, seed: int, rate: float, d: type
) -> None:
    ids = text(n, d)
    inputs, labels = mask_tokens(ids, np.random.default_rng(seed), VOCAB, DEFAULT_SPECIAL_TOKENS, rate)
    chosen = labels != PAD
    assert chosen.sum() == min(n, max(1, round(rate * n)))
    assert (labels[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    assert (inputs.dtype, labels.dtype) == (d, np.int64)
    assert (ids == text(n, d)).all()  # the caller's array is not written to


def test_eighty_ten_ten() -> None:
    rng, n = np.random.default_rng(0), 0
    fates: Counter[str] = Counter()
    pieces: list[int] = []
    for _ in range(200):
        ids = text(400)
        inputs, labels = mask_tokens(ids, rng, VOCAB, DEFAULT_SPECIAL_TOKENS)
        chosen, n = labels != PAD, n + 60  # 15% of 400
        fates["mask"] += (inputs[chosen] == MASK).sum()
        fates["kept"] += (inputs[chosen] == ids[chosen]).sum()
        pieces += inputs[chosen][(inputs[chosen] != MASK) & (inputs[chosen] != ids[chosen])].tolist()
    assert near(fates["mask"], n, 0.8)
    assert near(fates["kept"], n, 0.1 + 0.1 / (VOCAB - 5))  # a random piece may be the same one
    assert near(len(pieces), n, 0.1 * (1 - 1 / (VOCAB - 5)))


def test_random_pieces_are_all_pieces_equally_often() -> None:
    rng, row = np.random.default_rng(9), np.full(400, 5)
    inputs = np.concatenate(
        [mask_tokens(row, rng, vocab_size=9, special=DEFAULT_SPECIAL_TOKENS)[0] for _ in range(100)]
    )
    others = inputs[(inputs != 5) & (inputs != MASK)].tolist()
    assert set(others) == {6, 7, 8}
    assert equally_likely(others, 3)


def test_every_position_is_chosen_equally_often() -> None:
    rng = np.random.default_rng(1)
    counts = sum((mask_tokens(text(20), rng, VOCAB, DEFAULT_SPECIAL_TOKENS)[1] != PAD).astype(int) for _ in range(2000))
    assert all(near(count, 2000, 3 / 20) for count in counts)


@given(st.lists(st.sampled_from([0, SOS, EOS, UNK, MASK, 5, 6, 7]), max_size=30), SEEDS)
def test_special_tokens_are_never_chosen(ids: list[int], seed: int) -> None:
    row = np.array(ids, np.int64)
    inputs, labels = mask_tokens(row, np.random.default_rng(seed), VOCAB, DEFAULT_SPECIAL_TOKENS)
    special = row < 5
    assert (labels[special] == PAD).all()
    assert (inputs[special] == row[special]).all()
    assert (labels != PAD).sum() >= (not special.all())


def test_special_tokens_may_stand_anywhere() -> None:
    """BERT's ids: what is drawn at random is every other id equally often, and the mask is theirs."""
    special = SpecialTokens(bos=4, eos=5, unk=2, mask=7, pad=0)
    rng, row = np.random.default_rng(10), np.array([4, *[1] * 400, 2, 5])
    pairs = [mask_tokens(row, rng, 9, special) for _ in range(100)]
    assert all((labels[[0, 401, 402]] == PAD).all() for _, labels in pairs)
    inputs = np.concatenate([inputs[1:-2] for inputs, _ in pairs])
    assert (inputs == 7).sum() > 0
    others = inputs[(inputs != 1) & (inputs != 7)].tolist()
    assert set(others) == {3, 6, 8}
    assert equally_likely(others, 3)


def test_a_vocabulary_without_a_mask_hides_nothing() -> None:
    with pytest.raises(RegardError, match="no mask token"):
        mask_tokens(text(4), np.random.default_rng(0), VOCAB, SpecialTokens(eos=0))


@given(st.lists(st.tuples(st.integers(-1, 8), st.integers(1, 4)), max_size=12), SEEDS, RATES)
def test_words_are_chosen_whole_and_no_more_than_needed(runs: list[tuple[int, int]], seed: int, rate: float) -> None:
    words = np.array([word for word, size in runs for _ in range(size)], np.int64)
    ids = text(len(words))
    _, labels = mask_tokens(ids, np.random.default_rng(seed), VOCAB, DEFAULT_SPECIAL_TOKENS, rate, words)
    chosen = set(words[labels != PAD].tolist())
    sizes = [int((words == word).sum()) for word in chosen]
    n = int((words >= 0).sum())
    wanted = min(n, max(1, round(rate * n)))
    assert -1 not in chosen
    assert sum(sizes) == (labels != PAD).sum() >= wanted
    assert (
        not chosen or sum(sizes) - max(sizes) < wanted
    )  # without its last word, whichever that was, there were too few


def test_words_of_all_lengths_are_chosen_equally_often() -> None:
    """Two words, one of three tokens and one of one: one of them is enough for 15% of four tokens."""
    rng, words = np.random.default_rng(2), np.array([0, 0, 0, 1])
    rows = [tuple(mask_tokens(text(4), rng, VOCAB, DEFAULT_SPECIAL_TOKENS, words=words)[1] != PAD) for _ in range(2000)]
    assert equally_likely(rows, 2)


@pytest.mark.parametrize(
    ("pieces", "numbers"),
    [
        (["▁The", "▁an", "im", "al", "."], [0, 1, 1, 1, 1]),
        (["the", "an", "##im", "##al", "."], [0, 1, 1, 1, 2]),
        (["The", "▁an", "imal", "▁", "##"], [0, 1, 1, 2, 2]),  # bytes: no space in front of the first word
        (["▁", "a", "b", "▁", "c"], [0, 0, 0, 1, 1]),
        (["<sos>", "the", "##m", "<eos>", "<unk>", "and", "<eos>"], [-1, 0, 0, -1, -1, 1, -1]),
        (["<sos>", "The", "y", "▁eat", "<eos>", "a", "n"], [-1, 0, 0, 1, -1, 2, 2]),
        (["▁caf", "<unk>", "s", "▁", "<unk>", "<mask>", "<pad>"], [0, -1, 0, 1, -1, -1, -1]),
        (["<unk>", "b", "▁c"], [-1, 0, 1]),
        ([], []),
    ],
)
def test_word_numbers_by_hand(pieces: list[str], numbers: list[int]) -> None:
    named = {name: i for i, name in enumerate(SPECIAL_TOKEN_NAMES.values())}
    assert word_numbers([named.get(piece, 5) for piece in pieces], pieces, DEFAULT_SPECIAL_TOKENS).tolist() == numbers


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_what_stands_between_spaces_for_every_tokenizer(kind: str) -> None:
    lines = ["the animal did not cross the wide street", "nobody crosses streets that are too wide"]
    tokenizer = Tokenizer.train(lines, TokenizerConfig(kind=kind, vocab_size=300))
    ids = np.array(tokenizer.encode(lines[0]))
    words = word_numbers(ids, tokenizer.pieces(ids), tokenizer.special)
    spelt = [tokenizer.decode(ids[words == word]).strip() for word in range(words.max() + 1)]
    assert spelt == lines[0].split()


# ---- T5 ----------------------------------------------------------------------------------------------------------


def put_back(source: np.ndarray, target: np.ndarray, sentinels: Sequence[int]) -> list[int]:
    """The text again: each sentinel of the source replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target.tolist():
        if token in sentinels:
            spans[token] = last = []
        else:
            last.append(token)
    assert list(spans) == list(sentinels)[: len(spans)]  # in order, none twice
    assert not last  # the final sentinel closes the last span
    return [piece for token in source.tolist() for piece in spans.get(token, [token])]


@given(LENGTHS, SEEDS, RATES, SPANS, DTYPES)
def test_spans_put_back_at_their_sentinels_give_the_text(n: int, seed: int, rate: float, span: float, d: type) -> None:
    ids, sentinels = text(n, d), range(500, 800)
    source, target = corrupt_spans(ids, np.random.default_rng(seed), sentinels, rate, span)
    assert put_back(source, target, sentinels) == ids.tolist()
    marks = np.flatnonzero(source >= 500)
    hidden = min(max(1, round(rate * n)), n - 1) if n > 1 else 0
    assert len(target) - (len(marks) + 1) == hidden
    assert len(marks) == (min(max(1, round(hidden / span)), hidden, n - hidden) if hidden else 0)
    assert (np.diff(marks) > 1).all()  # spans do not touch
    assert (np.diff(np.flatnonzero(target >= 500)) > 1).all()  # nor are they empty
    assert source.dtype == target.dtype == d


def test_all_partitions_into_spans_are_equally_likely() -> None:
    """Ten tokens, four hidden in two spans: 3 ways to cut the hidden ones times 5 ways to cut the six others."""
    rng = np.random.default_rng(3)
    assert equally_likely([tuple(corrupt_spans(text(10), rng, SENTINELS, 0.4, 2.0)[0]) for _ in range(6000)], 15)


def test_the_papers_share_of_tokens_and_spans() -> None:
    source, target = corrupt_spans(text(512), np.random.default_rng(4), SENTINELS)
    assert (len(source), len(target)) == (512 - 77 + 26, 77 + 27)  # 15% of 512, in spans of three


def test_too_few_sentinels_are_refused() -> None:
    corrupt_spans(text(100), np.random.default_rng(0), SENTINELS[:6])
    with pytest.raises(RegardError, match="5 hidden spans in a text of 100 tokens need 6 sentinels, but there are 5"):
        corrupt_spans(text(100), np.random.default_rng(0), SENTINELS[:5])


# ---- BART --------------------------------------------------------------------------------------------------------


@given(LENGTHS, SEEDS, RATES, SPANS, DTYPES)
def test_infilling_hides_its_share_and_nothing_outside_a_mask(
    n: int, seed: int, rate: float, span: float, d: type
) -> None:
    ids = text(n, d)
    source = infill(ids, np.random.default_rng(seed), MASK, rate, span)
    kept = source[source != MASK]
    assert n - len(kept) == min(n, max(1, round(rate * n)))
    assert (np.diff(kept.astype(int)) > 0).all()  # in order, none twice
    # With a border on each side: where tokens are missing there is a MASK between their neighbours.
    tokens = [4, *source.tolist(), 5 + n]
    solid = [(a, b) for a, b in pairwise(tokens) if MASK not in (a, b)]
    assert all(b == a + 1 for a, b in solid)
    assert source.dtype == d


def test_spans_are_as_long_as_poisson_says() -> None:
    """Of two tokens one is hidden: the draws before the first that is not 0 are insertions, a geometric number."""
    rng, p = np.random.default_rng(5), math.exp(-1)
    rows = [infill(text(2), rng, MASK, 0.5, 1.0) for _ in range(4000)]
    masks = Counter(int((row == MASK).sum()) for row in rows)
    assert all(near(masks[k], 4000, p ** (k - 1) * (1 - p)) for k in (1, 2, 3))
    assert equally_likely([tuple(row) for row in rows if len(row) == 2], 2)
    # A span of 0 and one of 1 around a kept token, in 3 places; in the middle either span may be the empty one.
    two = Counter(tuple(row.tolist()) for row in rows if len(row) == 3)
    likely = {(5, MASK, MASK): 1 / 3, (MASK, MASK, 6): 1 / 3, (MASK, 5, MASK): 1 / 6, (MASK, 6, MASK): 1 / 6}
    assert two.keys() == likely.keys()
    assert all(near(two[row], two.total(), likely[row]) for row in likely)


def test_a_long_text_has_a_mask_for_every_three_hidden_tokens() -> None:
    """900 hidden tokens take about 300 draws, with a standard deviation of sqrt(300 * 3 / 9) = 10; here the mean of 25."""
    rng = np.random.default_rng(6)
    masks = [(infill(text(3000), rng, MASK) == MASK).sum() for _ in range(25)]
    assert abs(np.mean(masks) - 300) < 5 * 10 / 5


def test_sentences_keep_their_words_and_change_places() -> None:
    ids = np.array([10, 11, 7, 12, 7, 8, 13, 14])  # 7 and 8 end sentences; two in a row end one
    sentences = [(10, 11, 7), (12, 7, 8), (13, 14)]
    rng = np.random.default_rng(7)
    rows = [tuple(permute_sentences(ids, rng, [7, 8]).tolist()) for _ in range(3000)]
    orders = {a + b + c for a in sentences for b in sentences for c in sentences if len({a, b, c}) == 3}
    assert set(rows) == orders
    assert equally_likely(rows, 6)


@given(st.lists(st.integers(5, 12), max_size=40), SEEDS)
def test_permuting_sentences_loses_nothing(ids: list[int], seed: int) -> None:
    row = np.array(ids, np.uint16)
    assert sorted(permute_sentences(row, np.random.default_rng(seed), [5, 6]).tolist()) == sorted(ids)
    assert permute_sentences(row, np.random.default_rng(seed), []).tolist() == ids


def test_denoising_permutes_and_hides_and_asks_for_the_text() -> None:
    ids = text(100)
    source, target = denoise(ids, np.random.default_rng(8), MASK, ends=[54])
    assert (target == ids).all()
    kept = source[source != MASK]
    assert len(kept) == 70
    swapped = [denoise(ids, np.random.default_rng(seed), MASK, ends=[54])[0] for seed in range(200)]
    assert near(sum(row[row != MASK][0] > 54 for row in swapped), 200, 0.5)  # the second half comes first


# ---- all of them -------------------------------------------------------------------------------------------------

NOISE: dict[str, Callable[..., object]] = {
    "mask": lambda rng, **s: mask_tokens(text(50), rng, VOCAB, DEFAULT_SPECIAL_TOKENS, **s),
    "spans": lambda rng, **s: corrupt_spans(text(50), rng, SENTINELS, **s),
    "denoise": lambda rng, **s: denoise(text(50), rng, MASK, ends=[20, 40], **s),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_the_seed_decides(noise: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
    def run(seed: int) -> list[list[int]]:
        return [row.tolist() for row in noise(np.random.default_rng(seed))]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan])
def test_a_rate_that_is_no_share_is_refused(noise: Callable[..., object], rate: float) -> None:
    with pytest.raises(RegardError, match=f"rate of hidden tokens is {rate}"):
        noise(np.random.default_rng(0), rate=rate)


@pytest.mark.parametrize("noise", [NOISE["spans"], NOISE["denoise"]])
@pytest.mark.parametrize("span", [0.0, -1.0, math.inf, math.nan])
def test_spans_without_a_length_are_refused(noise: Callable[..., object], span: float) -> None:
    with pytest.raises(RegardError, match="mean length of hidden spans"):
        noise(np.random.default_rng(0), mean_span=span)
