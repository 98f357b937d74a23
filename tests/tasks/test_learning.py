"""Each task learns something tiny that is plainly there to learn, to a score that says it did."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from little import CYCLE, config_of, last_validation, learn, write_all
from tokenizers import models, pre_tokenizers

from regard import model_folder as folders
from regard.errors import RegardError
from regard.tasks import evaluate
from regard.text.special_tokens import SpecialTokens
from regard.text.tokenizer import Tokenizer, Tokenizers

UNIGRAM = math.log(len(CYCLE))  # nats a word of the cycle, without looking at its neighbours


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("little")
    write_all(folder)
    return folder


def fit(corpora: Path, tmp_path: Path, task: str, **changes: Any) -> dict[str, Any]:
    """The last validation, after what `regard evaluate` measures on the same data has turned out the same."""
    config = config_of(corpora, task, **changes)
    run = learn(config, tmp_path / "run")
    valid = last_validation(run)
    found = evaluate(folders.load(run, torch.device("cpu")), config, torch.device("cpu"))
    assert found.loss == pytest.approx(valid["loss"], abs=1e-5)
    assert {name: valid[name] for name in found.scores} == pytest.approx(found.scores, abs=1e-4)
    return valid


@pytest.mark.parametrize(
    "text",
    [
        pytest.param({}, id="one stream"),
        pytest.param({"data.documents": "line"}, id="lines in a stream"),
        pytest.param({"data.documents": "line", "data.packing": "documents"}, id="lines packed"),
        pytest.param({"tokenizer.kind": "wordpiece"}, id="a vocabulary without white space"),
    ],
)
def test_a_language_model_learns_a_cycle(corpora: Path, tmp_path: Path, text: dict[str, str]) -> None:
    valid = fit(corpora, tmp_path, "causal-lm", **text, **{"train.samples": 1})
    assert valid["loss"] < 0.25 * UNIGRAM
    assert valid["perplexity"] == pytest.approx(math.exp(valid["loss"]), rel=1e-5)


@pytest.mark.parametrize(
    "text", [{}, {"data.documents": "line", "data.packing": "documents", "data.whole_words": True}]
)
def test_masked_words_are_guessed_from_their_neighbours(corpora: Path, tmp_path: Path, text: dict[str, Any]) -> None:
    assert fit(corpora, tmp_path, "masked-lm", **text, **{"train.steps": 240})["loss"] < 0.5 * UNIGRAM


@pytest.mark.parametrize("task", ["span-corruption", "denoising"])
def test_damaged_text_is_mended(corpora: Path, tmp_path: Path, task: str) -> None:
    """Better than words without their neighbours: the order of words was learned."""
    assert fit(corpora, tmp_path, task, **{"train.steps": 150, "train.batch_tokens": 512})["loss"] < 0.6 * UNIGRAM


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="bert"),
        pytest.param({"model.preset": "gpt-tiny", "model.n_decoder_layers": 1}, id="gpt"),
        pytest.param(
            {"model.preset": "gpt-tiny", "model.n_decoder_layers": 1, "train.auxiliary": 0.5}, id="gpt that reads on"
        ),
    ],
)
def test_a_verdict_that_one_word_gives_is_learned_without_a_fault(
    corpora: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    valid = fit(corpora, tmp_path, "classification", **model, **{"train.metric": "accuracy"})
    assert valid["accuracy"] == 100
    assert valid["loss"] < 0.1


def test_a_number_that_words_add_up_to_is_learned(corpora: Path, tmp_path: Path) -> None:
    valid = fit(corpora, tmp_path, "regression", **{"train.steps": 200, "train.metric": "spearman"})
    assert valid["spearman"] > 90
    assert valid["pearson"] > 90


def test_names_that_are_always_names_are_tagged_without_a_fault(corpora: Path, tmp_path: Path) -> None:
    assert fit(corpora, tmp_path, "tagging", **{"train.metric": "f1"})["f1"] == 100


def test_two_kinds_of_pictures_are_told_apart(corpora: Path, tmp_path: Path) -> None:
    assert (
        fit(corpora, tmp_path, "image-classification", **{"train.metric": "accuracy", "data.shift": 1})["accuracy"]
        == 100
    )


def test_a_vocabulary_from_elsewhere_is_learned_with_as_it_is(corpora: Path, tmp_path: Path) -> None:
    """Token 0 is a word, the end token is the last one and there is no other: documents begin and end with it."""
    words = sorted(CYCLE)
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|endoftext|>"])
    end, rows = len(words), len(words) + 3
    found = Tokenizer(backend, SpecialTokens(bos=end, eos=end, unk=end), rows)
    (tmp_path / "words").mkdir()
    Tokenizers(found, found).save(tmp_path / "words")
    chosen = {"tokenizer.file": str(tmp_path / "words"), "data.documents": "line", "train.steps": 20}
    fit(corpora, tmp_path, "causal-lm", **chosen)
    with pytest.raises(RegardError, match="no mask token, which the task masked-lm needs"):
        fit(corpora, tmp_path / "masked", "masked-lm", **chosen)
    package = folders.load(next(path.parent for path in tmp_path.rglob("model/config.json")), torch.device("cpu"))
    assert (package.config.target_vocab, package.config.eos_token_id, package.config.suppress_tokens) == (rows, end, ())
    assert package.token_template.wrap([0]) == [end, 0, end]
    assert package.tokenizers is not None
    assert package.tokenizers.target.special == found.special
