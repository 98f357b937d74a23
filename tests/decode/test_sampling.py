"""Sampling: frequencies against probabilities, truncation against NumPy, and the meaning of seeds."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    BANNED,
    TableModel,
    every_sequence,
    log_softmax,
    padded,
    random_sources,
    random_table,
    score,
    tiny_transformer,
)
from tokens import EOS, SOS

from regard.config import DecodeConfig, ModelConfig
from regard.decode import sampling as drawing
from regard.decode.batch_decoding import decode
from regard.decode.beam_search import beam_search
from regard.decode.constraints import Hypothesis
from regard.decode.sampling import (
    choose,
    exponential_noise,
    penalize_repetition,
    row_keys,
    sample,
    seen_tokens,
    truncate,
)
from regard.errors import RegardError
from regard.kernels.exponential_race_numba import run_race
from regard.text.special_tokens import SpecialTokenTemplate

CPU = torch.device("cpu")


def draw(
    model: object, source: list[int], limit: int, count: int, seed: int = 0, **options: object
) -> list[Hypothesis]:
    """`count` samples of one source, each with a seed of its own."""
    chosen = DecodeConfig(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    seeds = list(range(seed, seed + count))
    return sample(model, padded([source] * count), torch.full((count,), limit), seeds, chosen)  # type: ignore[arg-type]


def assert_frequencies(counts: Counter, p: dict, n: int) -> None:
    """Every outcome within 4.5 standard deviations of n p, and nothing that cannot be."""
    assert set(counts) <= {outcome for outcome, value in p.items() if value > 0}
    for outcome, value in p.items():
        assert abs(counts[outcome] - n * value) <= 4.5 * (n * value * (1 - value)) ** 0.5 + 1, outcome


# --- log p -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("never", [[], [0], [0, 1, 2], [6], list(range(6))])
def test_log_p_is_a_number_whichever_tokens_cannot_come(never: list[int], temperature: float) -> None:
    """Logits of minus infinity, as a padded vocabulary has them, in the first column or any other."""
    logits = 50 * torch.randn(40, 7)
    logits[:, never] = -torch.inf
    options, config = DecodeConfig(temperature=temperature), ModelConfig()
    seeds = torch.arange(40)
    token, log_p = drawing.choose_next(logits, None, False, seeds, torch.zeros_like(seeds), options, config)
    expected = [log_softmax(row[np.isfinite(row)]) for row in logits.numpy()]
    places = [np.flatnonzero(np.isfinite(row)).tolist() for row in logits.numpy()]
    wanted = [p[at.index(i)] for p, at, i in zip(expected, places, token.tolist(), strict=True)]
    np.testing.assert_allclose(log_p.numpy(), wanted, atol=1e-4)


# --- truncation --------------------------------------------------------------------------------------------------------


def kept(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens stay: all as likely as the k-th, and of those the fewest whose probabilities reach p."""
    stay = np.ones(len(logits), dtype=bool)
    if top_k:
        stay &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    if top_p < 1:
        p = np.where(stay, np.exp(logits - logits.max()), 0.0)
        p /= p.sum()
        reached = 0.0
        for token in sorted(range(len(logits)), key=lambda i: -p[i]):
            stay[token] &= reached < top_p
            reached += p[token]
    return stay


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.83, 0.999, 1.0]),
    holes=st.integers(0, 20),
)
def test_truncation(seed: int, size: int, top_k: int, top_p: float, holes: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * 2
    logits[rng.permutation(size)[: min(holes, size - 1)]] = -np.inf  # banned already
    found = truncate(torch.tensor(logits[None]), top_k, top_p)[0].numpy()
    expected = kept(logits, top_k, top_p)
    np.testing.assert_array_equal(found, np.where(expected, logits, -np.inf))


def test_truncation_by_hand() -> None:
    """p = 0.5, 0.25, 0.125, 0.125."""
    p = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()

    def stays(top_k: int, top_p: float) -> list[bool]:
        return (truncate(p, top_k, top_p)[0] > -torch.inf).tolist()

    assert stays(0, 1e-9) == [False, True, False, False]  # the likeliest always stays
    assert stays(0, 0.5) == [False, True, False, False]  # 0.5 is reached
    assert stays(0, 0.51) == [False, True, False, True]
    assert stays(0, 0.75) == [False, True, False, True]
    assert sum(stays(0, 0.8)) == 3  # one of the two that are equal is enough
    assert stays(1, 1.0) == [False, True, False, False]
    assert stays(3, 1.0) == [True, True, True, True]  # equals of the third are not told apart
    assert stays(2, 0.6) == [False, True, False, False]  # of what top_k leaves, 2/3 is in the first
    assert stays(2, 0.7) == [False, True, False, True]
    assert stays(0, 1.0) == stays(9, 1.0) == [True, True, True, True]


def test_all_equally_likely() -> None:
    level = torch.zeros(1, 8)
    assert (truncate(level, 0, 0.5)[0] > -torch.inf).sum() == 4
    assert (truncate(level, 0, 1e-9)[0] > -torch.inf).sum() == 1
    assert (truncate(level, 1, 1.0)[0] > -torch.inf).all()


# --- frequencies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.3, 0, 0.7)]
)
def test_one_token_has_the_frequency_of_its_probability(temperature: float, top_k: int, top_p: float) -> None:
    n = 4000
    log_p = np.log(np.array([0.0, 0.3, 0.05, 0.25, 0.2, 0.1, 0.1]), where=np.arange(7) > 0, out=np.full(7, -np.inf))
    options = DecodeConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    seeds = torch.arange(n)
    picked = choose(torch.tensor(log_p, dtype=torch.float32).expand(n, -1), seeds, torch.zeros_like(seeds), options)
    weight = np.where(kept(log_p / temperature, top_k, top_p), np.exp(log_p / temperature), 0.0)
    assert_frequencies(Counter(picked.tolist()), dict(enumerate(weight / weight.sum())), n)


def test_one_seed_again_and_again() -> None:
    """The tokens of one sentence come from one seed: its steps must not repeat each other."""
    n = 4000
    p = torch.tensor([[0.1, 0.2, 0.7]])
    steps = torch.arange(n)
    picked = choose(p.log().expand(n, -1), torch.full((n,), 3), steps, DecodeConfig(temperature=1.0)).tolist()
    assert_frequencies(Counter(picked), {0: 0.1, 1: 0.2, 2: 0.7}, n)
    pairs = {(a, b): p[0, a].item() * p[0, b].item() for a in range(3) for b in range(3)}
    assert_frequencies(Counter(zip(picked[::2], picked[1::2], strict=True)), pairs, n // 2)


@pytest.mark.parametrize("large", [0, 2**40, 2**62])
def test_the_noise_is_exponential_and_independent(large: int) -> None:
    """Over columns, steps and seeds: mean and deviation 1, the right tail, and no correlation between neighbours."""
    seeds, steps = torch.meshgrid(torch.arange(60) + large, torch.arange(50), indexing="ij")
    noise = exponential_noise(seeds.flatten(), steps.flatten(), 40).view(60, 50, 40).double()
    assert noise.min() > 0
    assert noise.isfinite().all()
    n = noise.numel()
    assert noise.mean().item() == pytest.approx(1, abs=5 / n**0.5)
    assert noise.std().item() == pytest.approx(1, abs=15 / n**0.5)
    assert (noise > 4).double().mean().item() == pytest.approx(np.exp(-4), abs=5 * (np.exp(-4) / n) ** 0.5)
    for dim in range(3):
        a, b = noise.narrow(dim, 0, noise.shape[dim] - 1), noise.narrow(dim, 1, noise.shape[dim] - 1)
        assert abs(((a - 1) * (b - 1)).mean().item()) < 5 / a.numel() ** 0.5


def test_whole_sequences_have_the_frequency_of_their_probability() -> None:
    """Two words, at most three tokens: 1 + 2 + 4 ended, 8 cut; what is banned leaves its share to the others."""
    n = 4000
    table = random_table(seed=4, words=2)

    def allowed(name: int, said: tuple[int, ...]) -> np.ndarray:
        log_p = table(name, said).copy()
        log_p[list(BANNED)] = -np.inf
        return log_p - np.log(np.exp(log_p).sum())

    p = {(*tokens, ended): np.exp(log_prob) for tokens, _, log_prob, ended in every_sequence(partial(allowed, 5), 3, 0)}
    assert len(p) == 15
    assert sum(p.values()) == pytest.approx(1)
    found = draw(TableModel(table), [5], 3, n)
    assert_frequencies(Counter((*h.tokens, h.ended) for h in found), p, n)
    # The reported log p is the model's own: of all it could have said, before any mask or temperature.
    known = {(*tokens, ended): log_prob for tokens, _, log_prob, ended in every_sequence(partial(table, 5), 3, 0)}
    for h in found[:50]:
        assert h.log_prob == pytest.approx(known[*h.tokens, h.ended], abs=1e-5)
        assert h.score == pytest.approx(score(h.log_prob, len(h.tokens) + h.ended, 1.0))


def test_min_len_and_limit() -> None:
    table = random_table(seed=5, words=2, end=1.0)
    found = draw(TableModel(table), [5], 4, 300, min_len=2)
    assert {len(h.tokens) for h in found if h.ended} == {2, 3}
    assert {len(h.tokens) for h in found if not h.ended} == {4}


# --- temperature -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-30])
def test_cold_sampling_is_greedy_search(temperature: float) -> None:
    for seed in range(10):
        table = random_table(seed, words=4)
        (found,) = draw(TableModel(table), [5], 8, 1, seed=seed, temperature=temperature)
        (expected,) = greedy(table, 8)
        assert found.tokens == expected[0]
        assert found.ended == expected[3]
        assert found.log_prob == pytest.approx(expected[2], abs=1e-5)


def greedy(table: object, limit: int) -> list:
    """A slow beam of one that ends with its first end token."""
    said: tuple[int, ...] = ()
    total = 0.0
    while len(said) < limit:
        log_p = table(5, said).copy()  # type: ignore[operator]
        log_p[list(BANNED)] = -np.inf
        token = int(log_p.argmax())
        total += log_p[token]
        if token == EOS:
            return [(list(said), total, total, True)]
        said = (*said, token)
    return [(list(said), total, total, False)]


def test_hot_sampling_is_level() -> None:
    """At a very high temperature all allowed tokens are equally likely, and none of the banned ones appears."""
    table = random_table(seed=6, words=3)
    counts = Counter((h.tokens or [EOS])[0] for h in draw(TableModel(table), [5], 1, 2000, temperature=1e6))
    assert_frequencies(counts, dict.fromkeys((EOS, 5, 6, 7), 0.25), 2000)


# --- seeds -------------------------------------------------------------------------------------------------------------


def test_a_seed_means_one_output() -> None:
    model, sources = tiny_transformer(0), random_sources(1, 20)

    def run(seed: int) -> list[list[int]]:
        return [h.tokens for (h,) in decode(model, sources, DecodeConfig(temperature=1.0, seed=seed), 64, CPU)]

    first = run(3)
    assert run(3) == first
    assert sum(a != b for a, b in zip(first, run(1000), strict=True)) >= 18


def test_sentence_i_uses_seed_plus_i() -> None:
    model, source = tiny_transformer(0), random_sources(1, 1)[0]
    together = decode(model, [source] * 6, DecodeConfig(temperature=1.0, seed=10), 64, CPU)
    assert len({tuple(h.tokens) for (h,) in together}) >= 5
    for i, (h,) in enumerate(together):
        ((alone,),) = decode(model, [source], DecodeConfig(temperature=1.0, seed=10 + i), 64, CPU)
        assert alone.tokens == h.tokens


@pytest.mark.parametrize("seed", [-1, 2**32, 2**62, 2**63 - 1, 2**64])
def test_any_integer_is_a_seed(seed: int) -> None:
    model, sources = tiny_transformer(0), random_sources(1, 2)
    options = DecodeConfig(temperature=1.0, nbest=4, seed=seed)
    tokens = [[h.tokens for h in ranked] for ranked in decode(model, sources, options, 64, CPU)]
    assert tokens == [[h.tokens for h in ranked] for ranked in decode(model, sources, options, 64, CPU)]


@pytest.mark.parametrize("beam", [1, 4])
def test_several_samples_are_ranked(beam: int) -> None:
    """Asking for samples makes the beam meaningless; there may be more samples than its width."""
    model, sources = tiny_transformer(0), random_sources(2, 10)
    found = decode(model, sources, DecodeConfig(temperature=1.0, beam=beam, nbest=6), 64, CPU)
    for ranked in found:
        assert len(ranked) == 6
        assert [h.score for h in ranked] == sorted((h.score for h in ranked), reverse=True)
    assert np.mean([len({tuple(h.tokens) for h in ranked}) for ranked in found]) > 4


def test_samples_of_one_sentence_are_those_of_single_rows() -> None:
    """A sentence is read once for all of its samples; fp64, in which no rounding decides between two tokens."""
    model, sources = tiny_transformer(seed=4).double(), random_sources(7, 3)
    rows, options = padded(sources).repeat_interleave(4, 0), DecodeConfig(temperature=1.0)
    read: list[int] = []
    begin = model.begin
    model.begin = lambda source: (read.append(len(source)), begin(source))[1]  # type: ignore[method-assign]
    together = sample(model, rows, torch.full((12,), 9), range(12), options)
    assert read == [3]
    for i in range(12):
        (alone,) = sample(model, rows[i : i + 1], torch.tensor([9]), [i], options)
        assert alone.tokens == together[i].tokens
        assert alone.log_prob == pytest.approx(together[i].log_prob, rel=1e-6)


# --- min-p, the repetition penalty and transformers --------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([0.2, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    epsilon=st.sampled_from([0.0, 0.02, 0.3, 0.9]),
    penalty=st.sampled_from([0.6, 1.0, 1.5]),
)
def test_what_is_drawn_from_is_what_transformers_would_draw_from(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, epsilon: float, penalty: float
) -> None:
    """Its processors, in the order in which its generate applies them."""
    theirs = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(3, 20)) * 3)
    seen = rng.integers(0, 20, size=(3, 6))
    processors = [theirs.RepetitionPenaltyLogitsProcessor(penalty), theirs.TemperatureLogitsWarper(temperature)]
    processors += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    processors += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    processors += [theirs.EpsilonLogitsWarper(epsilon)] if epsilon else []
    expected = theirs.LogitsProcessorList(processors)(torch.tensor(seen), logits.clone())
    penalized = penalize_repetition(logits, seen_tokens(seen.tolist(), logits), penalty)
    found = truncate(penalized / temperature, top_k, top_p, min_p, epsilon)
    torch.testing.assert_close(found, expected)


def test_min_p_by_hand() -> None:
    """p = 0.5, 0.25, 0.125, 0.125: at least that part of one half."""
    p = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    stays = {m: (truncate(p, 0, 1.0, m)[0] > -torch.inf).tolist() for m in (0.0, 0.24, 0.3, 0.49, 0.6, 1.0)}
    assert stays[0.0] == stays[0.24] == [True] * 4
    assert stays[0.3] == stays[0.49] == [False, True, False, True]
    assert stays[0.6] == stays[1.0] == [False, True, False, False]


def test_epsilon_by_hand() -> None:
    """p = 0.5, 0.25, 0.125, 0.125: at least epsilon, and always the likeliest."""
    p = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    stays = {e: (truncate(p, 0, 1.0, 0.0, e)[0] > -torch.inf).tolist() for e in (0.0, 0.1, 0.2, 0.3, 0.9)}
    assert stays[0.0] == stays[0.1] == [True] * 4
    assert stays[0.2] == [False, True, False, True]
    assert stays[0.3] == stays[0.9] == [False, True, False, False]


def test_the_penalty_by_hand() -> None:
    """Divided where positive, multiplied where negative, once however often a token was seen."""
    logits = torch.tensor([[3.0, -3.0, 0.0, 1.0], [2.0, 2.0, -1.0, -torch.inf]])
    found = penalize_repetition(logits, seen_tokens([[0, 1, 2, 0], [3]], logits), 2.0)
    assert found.tolist() == [[1.5, -6.0, 0.0, 1.0], [2.0, 2.0, -1.0, -np.inf]]


def logit_table(name: int, said: tuple[int, ...]) -> np.ndarray:
    """Logits of both signs, not probabilities, with one favourite at every step."""
    logits = np.random.default_rng([name, len(said)]).normal(size=12)
    logits[7] += 1.5
    logits[EOS] -= 1.0
    return logits


@pytest.mark.parametrize("penalty", [1.0, 1.7, 4.0])
def test_a_translation_is_penalised_for_what_it_has_said(penalty: float) -> None:
    sources = [[name] for name in (5, 6, 8, 9)]
    options = DecodeConfig(beam=1, repetition_penalty=penalty, max_len_a=0, max_len_b=8, batch_tokens=4)
    found = decode(TableModel(logit_table), sources, options, 64, CPU)
    for (name,), (hypothesis,) in zip(sources, found, strict=True):
        said: list[int] = []
        total = 0.0
        while EOS not in said and len(said) < 8:
            logits = logit_table(name, tuple(said))
            scores = logits.copy()
            for token in set(said):
                scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            scores[list(BANNED)] = -np.inf
            said.append(int(scores.argmax()))
            total += log_softmax(logits)[said[-1]]
        assert hypothesis.tokens == [token for token in said if token != EOS]
        assert hypothesis.log_prob == pytest.approx(total, abs=1e-5)  # the model's own, not the penalised one


def test_the_penalty_has_no_place_in_a_beam() -> None:
    with pytest.raises(RegardError, match="repetition_penalty is not for beam search"):
        decode(TableModel(logit_table), [[5]], DecodeConfig(beam=2, repetition_penalty=1.2), 64, CPU)


# --- what the decoder reads first --------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [(SOS,), (EOS, SOS), (EOS, 9, SOS)])
def test_start_tokens_are_read_before_the_first_word(start: tuple[int, ...]) -> None:
    """Greedy, sampled at no temperature and beams of one word: each against full forwards of the model."""
    model = tiny_transformer(3)
    source = padded(random_sources(3, 4))
    limits = torch.full((4,), 6)
    expected = []
    for row in source:
        said: list[int] = []
        while len(said) < 6 and EOS not in said:
            logits = model(row[None], torch.tensor([[*start, *said]]))[0, -1].detach()
            logits[list(BANNED)] = -torch.inf
            said.append(int(logits.argmax()))
        expected.append([token for token in said if token != EOS])
    greedy_ = sample(model, source, limits, [0] * 4, DecodeConfig(), start)
    assert [h.tokens for h in greedy_] == expected
    wide = beam_search(model, source, torch.ones_like(limits), DecodeConfig(beam=3), start)
    assert [ranked[0].tokens for ranked in wide] == [tokens[:1] for tokens in expected]


def test_a_frame_stands_around_every_source_and_counts_in_its_length() -> None:
    model, sources = tiny_transformer(4), random_sources(4, 3, longest=8)
    token_template = SpecialTokenTemplate(before=(SOS, 9), after=(EOS, 8), start=(EOS, SOS))
    options = DecodeConfig(beam=2, max_len_a=0, max_len_b=7)
    found = decode(model, sources, options, 64, CPU, token_template=token_template)
    for ids, ranked in zip(sources, found, strict=True):
        framed = torch.tensor([[SOS, 9, *ids, EOS, 8]])
        (alone,) = beam_search(model, framed, torch.tensor([7]), options, (EOS, SOS))
        assert [h.tokens for h in ranked] == [h.tokens for h in alone]
    with pytest.raises(RegardError, match="sentence 1 has 61 tokens, but the model was built for at most 60"):
        decode(model, [[5] * 61], options, 64, CPU, token_template=token_template)


def test_the_start_tokens_take_room_from_the_translation() -> None:
    """Two of them in a model of 10 positions leave 9 words: the last one is written, never read."""
    model = tiny_transformer(5, end=-20.0, max_len=10)
    options = DecodeConfig(beam=1, max_len_a=0, max_len_b=50)
    for start, room in (((SOS,), 10), ((EOS, SOS), 9)):
        ((found,),) = decode(model, [[5, 6]], options, 10, CPU, token_template=SpecialTokenTemplate(start=start))
        assert (len(found.tokens), found.ended) == (room, False)


@given(
    st.integers(1, 300),
    st.floats(0.01, 30),
    st.integers(0, 2**63 - 1),
    st.integers(0, 10_000),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_the_compiled_race_has_the_winner_of_the_formula(
    columns: int, spread: float, seed: int, step: int, draw: int
) -> None:
    """argmax of p_i / e_i in float64, where no other token comes within rounding of the winner; p = 0 never wins."""
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(draw)) * spread
    x[:, 1::3] = -torch.inf
    p, seeds = x.softmax(-1), torch.arange(5) + seed % (2**62)
    steps = torch.full((5,), step)
    found = run_race(p, row_keys(seeds, steps))
    ratios = p.double() / exponential_noise(seeds, steps, columns).double()
    best = ratios.amax(1)
    chosen = ratios.gather(1, found[:, None])[:, 0]
    assert (chosen >= best * (1 - 1e-5)).all()
    assert (chosen > 0).all()
