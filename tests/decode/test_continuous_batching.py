"""Sentences and prompts that join a running batch get the results that they get alone, whatever the model is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configured import model_config

from regard.config import DecodeConfig
from regard.decode.beam_search import BeamSearch, beam_search
from regard.decode.constraints import pad_rows
from regard.decode.generation import GenerationBatch, GenerationRequest, eager_steps, make_request
from regard.decode.sampling import Sampling, sample
from regard.models.architectures import make_model
from regard.models.ensemble import Ensemble

SIZES = {"d_model": 32, "n_heads": 2, "d_ff": 64, "dropout": 0.0}
TRANSFORMER = {"preset": "transformer-base", "n_encoder_layers": 2, "n_decoder_layers": 2, "max_len": 64, **SIZES}
VOCABULARIES = {"source_vocab": 50, "target_vocab": 50}
TRANSLATORS: dict[str, dict[str, Any]] = {
    "sinusoidal": TRANSFORMER,
    "rotary": {**TRANSFORMER, "positions": "rope"},
    "relative": {**TRANSFORMER, "positions": "t5"},
    "alibi": {**TRANSFORMER, "positions": "alibi"},
    "windowed": {**TRANSFORMER, "attention.window": 4},
    "recurrent": {"preset": "rnnsearch-small", "max_len": 64, "dropout": 0.0},
}
CONVOLUTIONAL = {**TRANSFORMER, "mixer": "convolution", "positions": "learned"}
ENSEMBLE = [TRANSFORMER, TRANSLATORS["recurrent"], CONVOLUTIONAL]
LENGTHS = (9, 3, 14, 5, 7, 11)  # of the sources
JOINS = (0, 0, 2, 3, 9, 16)  # the step before which each of them joins


def make(settings: dict[str, Any]) -> Any:
    """Return a model with random weights in fp64, in which no rounding decides between two tokens."""
    torch.manual_seed(0)
    model = make_model(model_config(**{**settings, **VOCABULARIES})).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # so that not all distributions are nearly uniform
    return model


def make_sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 50, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(params=[*TRANSLATORS, "ensemble"])
def translator(request: pytest.FixtureRequest) -> Any:
    if request.param == "ensemble":
        return Ensemble([make(settings) for settings in ENSEMBLE])
    return make(TRANSLATORS[request.param])


def is_same(found: Any, alone: Any) -> bool:
    same_score = found.score == pytest.approx(alone.score, rel=1e-5)  # attention weights are fp32
    return found.tokens == alone.tokens and found.log_prob == pytest.approx(alone.log_prob, rel=1e-9) and same_score


@pytest.mark.parametrize("scores", [{}, {"coverage_penalty": 0.3, "prune": 4.0, "length_norm": "gnmt"}])
@pytest.mark.parametrize("beam", [2, 4])
def test_sentences_join_a_beam_search(translator: Any, beam: int, scores: dict[str, Any]) -> None:
    options = DecodeConfig(beam=beam, nbest=2, **scores)
    sources, limits = make_sources(), [12, 5, 30, 20, 9, 25]
    search, found, step = BeamSearch(translator, options), {}, 0
    while search.sentences or step <= max(JOINS):
        for i, when in enumerate(JOINS):
            if when == step:
                search.add(pad_rows([sources[i]], torch.device("cpu")), torch.tensor([limits[i]]), [i])
        found |= search.step()
        step += 1
    for i, source in enumerate(sources):
        (alone,) = beam_search(translator, pad_rows([source], torch.device("cpu")), torch.tensor([limits[i]]), options)
        assert len(found[i]) == len(alone)
        assert all(map(is_same, found[i], alone))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sentences_join_greedy_decoding_and_sampling(translator: Any, temperature: float) -> None:
    options = DecodeConfig(beam=1, temperature=temperature)
    sources, limits = make_sources(), [12, 5, 30, 20, 9, 25]
    search, found, step = Sampling(translator, options), {}, 0
    while search.rows or step <= max(JOINS):
        for i, when in enumerate(JOINS):
            if when == step:
                search.add(pad_rows([sources[i]], torch.device("cpu")), torch.tensor([limits[i]]), [i], [i])
        found |= search.step() if search.rows else {}
        step += 1
    for i, source in enumerate(sources):
        rows = pad_rows([source], torch.device("cpu"))
        (alone,) = sample(translator, rows, torch.tensor([limits[i]]), [i], options)
        assert is_same(found[i], alone)


def test_a_sentence_that_nobody_waits_for_leaves_the_batch(translator: Any) -> None:
    options = DecodeConfig(beam=3)
    sources = make_sources()
    search = BeamSearch(translator, options)
    search.add(pad_rows(sources, torch.device("cpu")), torch.full((len(sources),), 20), range(len(sources)))
    found = search.step()
    search.remove({1, 2})
    while search.sentences:
        found |= search.step()
    assert sorted(found) == [0, 3, 4, 5]
    (alone,) = beam_search(translator, pad_rows(sources[3:4], torch.device("cpu")), torch.tensor([20]), options)
    assert is_same(found[3][0], alone[0])


@pytest.mark.parametrize(
    "settings", [{"preset": "gpt2", "n_decoder_layers": 2, **SIZES}, {"preset": "lstm-small"}], ids=["gpt", "lstm"]
)
def test_prompts_join_a_batch(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = model_config(**{**settings, "max_len": 40, "target_vocab": 50, "source_vocab": 50})
    model: Any = make_model(config).double().eval()
    options = DecodeConfig(beam=1, temperature=0.8, max_new_tokens=20)
    prompts = make_sources()

    def requests() -> list[GenerationRequest]:
        return [make_request(prompt, i, options, model) for i, prompt in enumerate(prompts)]

    batch, joined, step = GenerationBatch(model, options), requests(), 0
    widest = 0
    while batch.rows or step <= max(JOINS):
        for row, when in zip(joined, JOINS, strict=True):
            if when == step:
                batch.add([row])
        if batch.rows:
            widest = max(widest, len(batch.rows))
            batch.step()
        step += 1
    assert widest > 2  # there was a batch to join
    for row, alone in zip(joined, requests(), strict=True):
        for _ in eager_steps(model, [alone], options):
            pass
        assert row.tokens == alone.tokens
        assert row.end == alone.end
        assert row.log_probs == pytest.approx(alone.log_probs, rel=1e-9)


def test_a_batch_that_others_join_and_leave_does_not_grow() -> None:
    model = make(TRANSFORMER)
    search = Sampling(model, DecodeConfig(beam=1))
    widths = []
    for i in range(60):
        search.add(pad_rows([make_sources()[i % 6]], torch.device("cpu")), torch.tensor([6]), [i], [i])
        search.step()
        widths.append(search.state.filled)
        assert search.state.memory_positions.shape[1] <= 4 / 3 * max(LENGTHS)
    assert max(widths) <= 12  # six tokens at most, and as many columns again until unused ones are dropped
