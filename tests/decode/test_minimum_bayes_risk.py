"""Minimum-Bayes-risk decoding against a loop over sacreBLEU, and its candidates against sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from configured import model_config
from tokens import SETTINGS

from regard.config import DecodeConfig, TokenizerConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis, check_options, greedy_options
from regard.decode.generation import check_generation
from regard.decode.minimum_bayes_risk import candidate_options, rank_by_risk
from regard.errors import RegardError
from regard.inference.arguments import decode_config
from regard.inference.translator import Translator
from regard.model_folder import ModelPackage
from regard.models.transformer import Transformer
from regard.text.tokenizer import Tokenizer, Tokenizers

TEXTS = ["der Hund schläft", "der Hund schlaeft", "ein Hund schläft", "der Hund schläft", "", "die Katze", "der Hund"]
UTILITIES: dict[str, Any] = {
    "chrf": lambda h, r: sacrebleu.sentence_chrf(h, [r]).score / 100,
    "bleu": lambda h, r: sacrebleu.sentence_bleu(h, [r]).score / 100,
}


@pytest.mark.parametrize("metric", UTILITIES)
def test_candidates_are_ranked_by_their_mean_utility(metric: str) -> None:
    candidates = [Hypothesis([i], -float(i), -float(i), True) for i in range(len(TEXTS))]
    options = DecodeConfig(mbr=len(TEXTS), mbr_metric=metric, nbest=4)
    found = rank_by_risk(candidates, TEXTS, options, "de")
    utility = {h: np.mean([UTILITIES[metric](h, r) for r in TEXTS]) for h in TEXTS}
    expected = sorted(dict.fromkeys(TEXTS), key=lambda h: -utility[h])[:4]
    assert [TEXTS[h.tokens[0]] for h in found] == expected
    assert [h.tokens[0] for h in found if TEXTS[h.tokens[0]] == TEXTS[0]] == [0]  # the first of equal ones
    np.testing.assert_allclose([h.score for h in found], [utility[h] for h in expected], rtol=1e-12)
    assert [h.log_prob for h in found] == [-float(h.tokens[0]) for h in found]


def test_settings_of_the_candidates() -> None:
    options = DecodeConfig(mbr=8, beam=4, seed=3, length_norm="gnmt")
    found = candidate_options(options)
    assert (found.nbest, found.temperature, found.epsilon, found.mbr, found.seed) == (8, 1.0, 0.02, 0, 3)
    found = candidate_options(DecodeConfig(mbr=8, epsilon=0.1, temperature=0.7, mbr_metric="bleu"))
    assert (found.temperature, found.epsilon, found.mbr_metric) == (0.7, 0.1, "chrf")
    assert candidate_options(DecodeConfig(mbr=8, mbr_candidates="ancestral")).epsilon == 0
    found = candidate_options(DecodeConfig(mbr=8, mbr_candidates="beam", coverage_penalty=0.2))
    assert (found.beam, found.nbest, found.temperature, found.coverage_penalty) == (8, 8, 0.0, 0.2)
    for settings in (options, found):
        check_options(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"mbr_metric": "bleu"},
        {"mbr_candidates": "beam"},
        {"mbr": 1},
        {"mbr": 4, "nbest": 5},
        {"mbr": 4, "mbr_candidates": "beam", "temperature": 1.0},
        {"mbr": 4, "mbr_candidates": "ancestral", "epsilon": 0.1},
        {"mbr": 4, "coverage_penalty": 0.2},
        {"mbr": 4, "mbr_candidates": "beam", "top_k": 5},
        {"mbr": 4, "mbr_candidates": "beam", "top_p": 0.9},
        {"mbr": 4, "mbr_candidates": "beam", "min_p": 0.5},
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RegardError, match="decode"):
        check_options(DecodeConfig(**settings))


def test_where_there_are_no_texts_it_is_refused() -> None:
    with pytest.raises(RegardError, match="language models"):
        check_generation(DecodeConfig(mbr=4, max_new_tokens=4))
    model = make_translator().model
    with pytest.raises(RegardError, match="compares texts"):
        decode(model, [[5]], DecodeConfig(mbr=4), 64, torch.device("cpu"))


# --- translators -------------------------------------------------------------------------------------------------------

LINES = ["ein Haus steht im Garten.", "a house is in the garden.", "der Hund, the dog! 0123456789"] * 3


def make_translator() -> Translator:
    """Return an untrained translator whose distributions are far from uniform."""
    tokens = Tokenizer.train(LINES, TokenizerConfig(kind="byte-bpe", vocab_size=290))
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "n_heads": 2, "d_ff": 32, "d_model": 16, "max_len": 64}
    torch.manual_seed(0)
    both = {"source_vocab": len(tokens), "target_vocab": len(tokens), "dropout": 0.0}
    model = Transformer(model_config(**sizes, **both, **SETTINGS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    options = DecodeConfig(max_len_a=1.0, max_len_b=4)
    return Translator(ModelPackage(model.eval(), Tokenizers(tokens, tokens), "translation", options, "en", "de"))


@pytest.mark.parametrize("candidates", ["epsilon", "ancestral", "beam"])
@pytest.mark.parametrize("metric", ["chrf", "bleu", "gleu"])
def test_a_translation_does_not_depend_on_its_batch(candidates: str, metric: str) -> None:
    translator = make_translator()
    texts = ["a house", "the dog, the garden.", "in the garden", "dog"]
    options: Any = {"mbr": 6, "mbr_metric": metric, "mbr_candidates": candidates, "nbest": 2}
    together = translator.translate(texts, seed=5, **options)
    for i, (text, found) in enumerate(zip(texts, together, strict=True)):
        alone = translator.translate(text, seed=5 + i, **options)
        assert alone.text == found.text
        assert alone.score == pytest.approx(found.score, rel=1e-9)
        assert found.score >= found.nbest[-1].score


def test_the_candidates_are_samples() -> None:
    """The winner is the one that a loop over all samples of the same seed chooses."""
    translator = make_translator()
    texts = ["a house", "the dog, the garden."]
    found = translator.translate(texts, mbr=8, seed=2)
    samples = translator.translate(texts, temperature=1.0, epsilon=0.02, nbest=8, seed=2)
    for one, drawn in zip(found, samples, strict=True):
        all_texts = [each.text for each in drawn.nbest]
        assert len(all_texts) == 8
        utility = {h: np.mean([UTILITIES["chrf"](h, r) for r in all_texts]) for h in all_texts}
        assert one.score == pytest.approx(max(utility.values()), rel=1e-9)
        assert utility[one.text] == pytest.approx(max(utility.values()), rel=1e-9)


@pytest.mark.parametrize(
    "options", [{"mbr": 4, "mbr_metric": "gleu"}, {"length_norm": "gnmt", "coverage_penalty": 0.2, "prune": 3.0}]
)
def test_required_words_and_repetitions_are_searched_for_as_before(options: Any) -> None:
    translator = make_translator()
    (found,) = translator.translate_sentences(["a house"], force_words=[["Garten"]], **options)
    assert "Garten" in found.text
    (found,) = translator.translate_sentences(["a house"], no_repeat_ngram_size=2, length_penalty=0.0, **options)
    assert found.tokens


def test_commands_that_decode_greedily_leave_out_what_a_model_was_saved_with() -> None:
    saved = DecodeConfig(beam=5, coverage_penalty=0.2, prune=3.0, max_len_b=7)
    for options in (saved, DecodeConfig(mbr=8, mbr_metric="bleu", temperature=0.7, epsilon=0.1, max_len_b=7)):
        found = decode_config(options, greedy_options())
        check_options(found)
        assert found == DecodeConfig(beam=1, max_len_b=7)
