"""GNMT's length normalization, coverage penalty and pruning, against formulas in float64 and exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config
from oracle import (
    EOS,
    FIRST_WORD,
    LogP,
    Prefix,
    Said,
    TableModel,
    TableState,
    padded,
    random_table,
    successors,
    tiny_transformer,
)
from tokens import SETTINGS, SOS
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.decode.beam_search import beam_search
from regard.decode.constrained_beam_search import OutputConstraints, decode_constrained
from regard.decode.constraints import check_options, length_normalizer
from regard.errors import RegardError
from regard.look.record import record
from regard.models.ensemble import Ensemble
from regard.models.seq2seq import Seq2Seq

CPU = torch.device("cpu")
NAMES = [[5, 7, 8, 6], [6, 5], [7]]  # sentences by their first token; with EOS they have 5, 3 and 2 source tokens
Attention = Callable[[int, Prefix], np.ndarray]  # the words written so far -> weights of the source tokens, (S,)


# --- a model that is a table, with attention ---------------------------------------------------------------------------


def random_attention(seed: int) -> Attention:
    """Return random attention weights for every sentence and prefix; most of them are on one source token."""
    lengths = {name[0]: len(name) + 1 for name in NAMES}

    @cache
    def weights(name: int, said: Prefix) -> np.ndarray:
        drawn = np.exp(3 * np.random.default_rng([seed, name, *said]).normal(size=lengths[name]))
        return drawn / drawn.sum()

    return weights


class AttentiveTable(TableModel):
    """A table of log-probabilities with attention weights, which stands for model and `AttentiveStep` at once."""

    def __init__(self, table: Callable[[int, Prefix], np.ndarray], attention: Attention) -> None:
        super().__init__(table)
        self.attention = attention

    def __call__(self, tokens: Tensor, state: TableState) -> tuple[Tensor, Tensor]:
        logits = self.step(tokens, state)
        k, width = state.width, max(len(self.attention(name, ())) for name in state.names)
        weights = np.zeros((len(state.names), k, width))
        for i, said in enumerate(state.prefixes):
            own = self.attention(state.names[i // k], said[1:])
            weights[i // k, i % k, : len(own)] = own
        return logits, torch.tensor(weights, dtype=torch.float32)


def search(model: AttentiveTable, limit: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[Said]]:
    monkeypatch.setattr("regard.decode.beam_search.AttentiveStep", lambda given: given)
    chosen = DecodeConfig(**options)
    found = beam_search(model, padded(NAMES), torch.tensor([limit] * len(NAMES)), chosen)
    return [[(h.tokens, h.score, h.log_prob, h.ended) for h in ranked] for ranked in found]


# --- oracles -----------------------------------------------------------------------------------------------------------


def gnmt_score(log_prob: float, weights: Sequence[np.ndarray], norm: str, alpha: float, beta: float) -> float:
    """log p / lp + beta * sum_i log(min(sum_j p_ij, 1)), given the weights (S,) of each generated token."""
    length = len(weights)
    lp = length**alpha if norm == "power" else ((5 + length) / 6) ** alpha
    coverage = np.minimum(np.sum(weights, axis=0), 1.0)
    return log_prob / lp + beta * float(np.log(coverage).sum())


def every_scored(log_p: LogP, attention: Callable[[Prefix], np.ndarray], limit: int, *how: Any) -> list[Said]:
    """Return all sequences of at most `limit` tokens, best score first."""

    def walk(said: Prefix, total: float, weights: list[np.ndarray]) -> list[Said]:
        found: list[Said] = []
        now = [*weights, attention(said)]
        for token, gain in successors(log_p(said), said, 0):
            new = total + gain
            if token == EOS:
                found.append((list(said), gnmt_score(new, now, *how), new, True))
            elif len(now) == limit:
                found.append(([*said, token], gnmt_score(new, now, *how), new, False))
            else:
                found += walk((*said, token), new, now)
        return found

    return sorted(walk((), 0.0, []), key=lambda s: -s[1])


def slow_gnmt_beam(
    log_p: LogP, attention: Callable[[Prefix], np.ndarray], k: int, limit: int, prune: float, *how: Any
) -> list[Said]:
    """Beam search with lists that stops only at the limit, or with nothing open."""
    alive: list[tuple[Prefix, float, list[np.ndarray]]] = [((), 0.0, [])]
    done: list[Said] = []
    for length in range(1, limit + 1):
        offers = [
            (said, token, total + gain, [*weights, attention(said)])
            for said, total, weights in alive
            for token, gain in successors(log_p(said), said, 0)
        ]
        offers = sorted(offers, key=lambda o: -o[2])[: 2 * k]
        if prune:
            offers = [o if o[2] >= offers[0][2] - prune else (*o[:2], -math.inf, o[3]) for o in offers]
        for said, token, total, weights in offers[:k]:
            ends = token == EOS
            if (ends or length == limit) and total > -math.inf:
                done.append((list(said) if ends else [*said, token], gnmt_score(total, weights, *how), total, ends))
        done = sorted(done, key=lambda s: -s[1])[:k]
        open_ = [o for o in offers if o[1] != EOS and o[2] > -math.inf]
        alive = [((*said, token), total, weights) for said, token, total, weights in open_][:k]
        if not alive:
            break
    return [s for s in done if not prune or s[1] >= done[0][1] - prune]


def assert_same(found: list[Said], expected: list[Said], tolerance: float = 2e-5) -> None:
    assert [(tokens, ended) for tokens, _, _, ended in found] == [(tokens, ended) for tokens, _, _, ended in expected]
    np.testing.assert_allclose([s[1] for s in found], [s[1] for s in expected], atol=tolerance)
    np.testing.assert_allclose([s[2] for s in found], [s[2] for s in expected], atol=tolerance)


# --- formulas ----------------------------------------------------------------------------------------------------------


def test_length_normalization_by_hand() -> None:
    assert length_normalizer(7, DecodeConfig(length_penalty=0.5)) == math.sqrt(7)
    assert length_normalizer(7, DecodeConfig(length_penalty=0.5, length_norm="gnmt")) == math.sqrt(2)  # (5 + 7) / 6
    assert length_normalizer(1, DecodeConfig(length_penalty=0.9, length_norm="gnmt")) == 1
    tensor = length_normalizer(torch.tensor([7.0, 13.0]).double(), DecodeConfig(length_penalty=1.0, length_norm="gnmt"))
    assert tensor.tolist() == [2, 3]


@pytest.mark.parametrize("stop", ["likely", "proven"])
@pytest.mark.parametrize(("norm", "alpha"), [("gnmt", 0.6), ("gnmt", -0.5), ("power", 1.0)])
@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_all_hypotheses_have_the_scores_of_the_formulas(
    norm: str, alpha: float, beta: float, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three words, four tokens: the whole ranked list of 121 sequences is compared."""
    table, attention = random_table(seed=1, words=3), random_attention(3)
    options = {"length_norm": norm, "length_penalty": alpha, "coverage_penalty": beta, "beam_stop": stop}
    found = search(AttentiveTable(table, attention), 4, monkeypatch, beam=121, nbest=121, **options)
    for name, ranked in zip(NAMES, found, strict=True):
        expected = every_scored(partial(table, name[0]), partial(attention, name[0]), 4, norm, alpha, beta)
        assert len(ranked) == 121
        assert_same(ranked, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("norm", "alpha"), [("gnmt", 0.8), ("power", 1.0), ("power", 0.0)])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_a_proven_stop_loses_nothing(
    norm: str, alpha: float, beta: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that continues to the limit finds the same hypotheses."""
    table, attention = random_table(seed=seed, words=5, end=1.5), random_attention(seed)
    model = AttentiveTable(table, attention)
    options = {"length_norm": norm, "length_penalty": alpha} if alpha else {"length_penalty": 0.0}
    found = search(model, 9, monkeypatch, beam=3, nbest=3, coverage_penalty=beta, beam_stop="proven", **options)
    for name, ranked in zip(NAMES, found, strict=True):
        own = partial(table, name[0]), partial(attention, name[0])
        assert_same(ranked, slow_gnmt_beam(*own, 3, 9, 0.0, norm, alpha, beta))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prune", [0.5, 3.0, 100.0])
def test_pruning_drops_what_is_far_below_the_best(prune: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(seed=seed, words=5, end=1.0)
    model = AttentiveTable(table, random_attention(seed))
    found = search(model, 8, monkeypatch, beam=4, nbest=4, prune=prune, beam_stop="proven")
    for name, ranked in zip(NAMES, found, strict=True):
        expected = slow_gnmt_beam(partial(table, name[0]), lambda said: np.ones(1), 4, 8, prune, "power", 1.0, 0.0)
        assert_same(ranked, expected)
        assert 1 <= len(ranked) <= 4


def test_pruning_does_not_compare_open_hypotheses_with_shorter_finished_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty translation has log p -1.2. The best one falls below -2.7 and has a better score, -2.81 * 6 / 17."""

    def table(name: int, said: Prefix) -> np.ndarray:
        p = np.full(FIRST_WORD + 2, 1e-6)
        p[[EOS, FIRST_WORD, FIRST_WORD + 1]] = (0.3, 0.7, 1e-6) if not said else (1e-6, 0.8, 0.2)
        return np.log(p / p.sum())

    model = AttentiveTable(table, random_attention(0))
    options = {"length_norm": "gnmt", "length_penalty": 1.0, "beam_stop": "proven"}
    plain, pruned = (search(model, 12, monkeypatch, beam=3, prune=prune, **options) for prune in (0.0, 1.5))
    assert plain[0][0][0] == [FIRST_WORD] * 12
    assert pruned == plain


def test_a_source_token_without_attention_costs_a_finite_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AttentiveTable(random_table(1, 3), lambda name, said: np.array([1.0, 0.0, 0.0, 0.0, 0.0]))
    found = search(model, 4, monkeypatch, beam=3, coverage_penalty=0.5)
    tokens, score, log_prob, ended = found[0][0]
    # Four of five source tokens lack all attention.
    assert score == pytest.approx(log_prob / (len(tokens) + ended) + 0.5 * 4 * math.log(1e-9), abs=1e-4)


# --- real models -------------------------------------------------------------------------------------------------------


def recurrent(seed: int) -> Seq2Seq:
    torch.manual_seed(seed)
    sizes = {
        "source_vocab": 23,
        "target_vocab": 23,
        "d_model": 12,
        "recurrent.d_hidden": 12,
        "max_len": 64,
        "dropout": 0.0,
    }
    model = Seq2Seq(model_config(preset="rnnsearch-small", cell="gru", **sizes, **SETTINGS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


MODELS = {
    "transformer": lambda: tiny_transformer(1),
    "rnnsearch": lambda: recurrent(1),
    "ensemble": lambda: Ensemble([tiny_transformer(1), recurrent(1)]),
}


@torch.no_grad()
def forced(model: Any, source: list[int], written: list[int]) -> tuple[float, np.ndarray]:
    """Return log p of the tokens written, and the mean attention weights (T, S) of a teacher-forced pass, in fp64."""
    members = list(model.members) if isinstance(model, Ensemble) else [model]
    inputs = torch.tensor([[*source, EOS]]), torch.tensor([[SOS, *written[:-1]]])
    weights, probabilities = [], []
    for member in members:
        with record(member, "*cross") as tape:
            logits = member(*inputs)[0].double()
        weights += [tape.weights(name)[0].double().mean(0).numpy() for name in tape]
        probabilities.append(logits.softmax(-1).numpy())
    p = np.mean(probabilities, axis=0)[np.arange(len(written)), written]
    return float(np.log(p).sum()), np.mean(weights, axis=0)


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_those_of_a_teacher_forced_pass(kind: str) -> None:
    model: Any = MODELS[kind]()
    rng = np.random.default_rng(2)
    sources = [rng.integers(5, 23, size=n).tolist() for n in (3, 7, 5, 2, 6)]
    options = DecodeConfig(beam=4, nbest=4, length_norm="gnmt", length_penalty=0.7, coverage_penalty=0.4, max_len_b=6)
    found = decode(model, sources, options, 64, CPU)
    for source, ranked in zip(sources, found, strict=True):
        assert [h.score for h in ranked] == sorted((h.score for h in ranked), reverse=True)
        for h in ranked:
            log_prob, weights = forced(model, source, [*h.tokens, *[EOS] * h.ended])
            assert h.log_prob == pytest.approx(log_prob, abs=1e-4)
            assert h.score == pytest.approx(gnmt_score(log_prob, list(weights), "gnmt", 0.7, 0.4), abs=1e-4)


def test_no_attention_is_computed_without_a_coverage_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("regard.decode.beam_search.AttentiveStep", fail)
    decode(tiny_transformer(1), [[5, 6]], DecodeConfig(beam=2, prune=3.0), 64, CPU)


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"coverage_penalty": 0.2, "beam": 1},
        {"prune": 3.0, "temperature": 1.0},
        {"coverage_penalty": -0.1},
        {"prune": math.inf},
        {"epsilon": 0.02},
        {"epsilon": 1.0, "temperature": 1.0},
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RegardError, match="decode"):
        check_options(DecodeConfig(**settings))


def test_a_model_without_attention_has_no_coverage() -> None:
    torch.manual_seed(0)
    sizes = {"source_vocab": 23, "target_vocab": 23, "d_model": 12, "recurrent.d_hidden": 12, "max_len": 64}
    config = model_config(preset="rnnsearch-small", attention_score="constant", cell="gru", **sizes, **SETTINGS)
    with pytest.raises(RegardError, match="attention over the source"):
        decode(Seq2Seq(config).eval(), [[5, 6]], DecodeConfig(beam=2, coverage_penalty=0.2), 64, CPU)


def test_a_constrained_search_has_no_coverage() -> None:
    with pytest.raises(RegardError, match="constrained"):
        decode_constrained(
            tiny_transformer(1), [[5]], [OutputConstraints()], DecodeConfig(coverage_penalty=0.1), 64, CPU
        )
