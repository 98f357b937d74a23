"""Recurrent models from text to use: *hello* learned exactly, words as published, predictions from both ends, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from little import config_of, learn, tuning, write_all
from tokens import EOS, PADDING, SOS, UNK

import regard
from regard.config import Config, recipes
from regard.device import pick_device
from regard.errors import RegardError
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.model_folder import load
from regard.tasks import prepare_job
from regard.tasks.run_config import make_config
from regard.tasks.text_data import make_text_corpus
from regard.text.tokenizer import Tokenizer

RECIPES = Path(regard.__file__).parent / "recipes"
RNN: dict[str, Any] = {"model.preset": "lstm-small", "model.recurrent.d_hidden": 32, "model.n_decoder_layers": 1}
RNN |= {"model.n_heads": 0, "model.d_ff": 0, "model.token_types": 0, "model.positions": "sinusoidal"}
CPU = pick_device("cpu")


# ---- hello -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("hello") / "run"
    return regard.train(RECIPES / "hello.toml", run, settings={"data.root": str(RECIPES)}, quiet=True)


def test_hello_is_learned_exactly(hello: Path) -> None:
    writer = Generator.load(hello)
    for beginning, rest in (("h", "ello"), ("he", "llo"), ("hel", "lo"), ("hell", "o")):
        found = writer.generate(beginning)
        assert (found.text, found.end) == (rest, "end")
    assert writer.score("hello").perplexity < 1.05
    assert writer.generate("h", temperature=1.0, seed=3).text == "ello"


def test_its_vocabulary_is_four_letters_a_space_and_the_special_tokens(hello: Path) -> None:
    tokenizer = Generator.load(hello).tokenizer
    assert sorted(tokenizer.pieces(range(5, len(tokenizer)))) == ["e", "h", "l", "o", "▁"]


def test_a_conversation_and_vectors_can_be_had_of_it(hello: Path) -> None:
    assert Generator.load(hello).chat().say("h", max_new_tokens=3) is not None
    vectors = Embedder(load(hello, CPU)).embed(["hello", "hell"])
    assert vectors.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


# ---- WikiText-2 as published -----------------------------------------------------------------------------------------


def wikitext(data_folder: Path) -> Config:
    if not (data_folder / "lm" / "wikitext2.train.txt.xz").exists():
        pytest.skip(f"no WikiText-2 in {data_folder / 'lm'}")
    return make_config(recipes.load(RECIPES / "wikitext2-lstm.toml"), {"data.root": str(data_folder / "lm")})


def test_wikitext2_has_the_words_that_are_published(data_folder: Path) -> None:
    """33,278 words, the end of a line among them, and 2,088,628, 217,646 and 245,569 tokens."""
    config = wikitext(data_folder)
    texts = {
        split: [text for (text,) in make_text_corpus(config, split).rows()] for split in ("train", "valid", "test")
    }
    tokenizer = Tokenizer.train(texts["train"], config.tokenizer)
    ids = {split: np.concatenate(tokenizer.encode_batch(rows)) for split, rows in texts.items()}
    assert [len(found) for found in ids.values()] == [2_088_628, 217_646, 245_569]
    assert len(np.unique(ids["train"])) == 33_278
    assert set(np.unique(ids["valid"])) | set(np.unique(ids["test"])) <= set(np.unique(ids["train"]))
    assert not np.isin([PADDING, SOS, EOS], ids["train"]).any()
    said = "".join(texts["test"]).split(" ").count("<unk>")
    assert (ids["test"] == UNK).sum() == said > 15_000  # and the likelihood of each is counted
    lines = sum(text.count("\n") for text in texts["test"])
    assert (ids["test"] == tokenizer.encode("\n")[0]).sum() == lines == 4358


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_all(folder)
    return folder


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry_state", [True, False])
def test_a_recurrent_model_learns_a_text(corpora: Path, tmp_path: Path, carry_state: bool) -> None:
    settings = {**RNN, "train.bptt": 12, "train.carry_state": carry_state, "train.lr": 1e-2}
    run = learn(config_of(corpora, "causal-lm", **settings), tmp_path / "run")
    writer = regard.load(run)
    assert str(writer.generate("three", max_new_tokens=3)).split()[:3] == ["four", "five", "six"]
    result = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["kind"] == "valid"
    assert result["loss"] < 0.2


@pytest.mark.parametrize("task", ["classification", "tagging", "regression"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_answers_are_learned_by_models_that_read_one_way_and_both(
    corpora: Path, tmp_path: Path, task: str, bidirectional: bool
) -> None:
    settings = {**RNN, "model.recurrent.bidirectional": bidirectional, "train.lr": 1e-2}
    run = learn(config_of(corpora, task, **settings), tmp_path / "run")
    labeller = regard.load(run)
    if task == "classification":
        predictions = labeller.classify(["the cat sat lovely on a mat", "awful the dog ran"])
        assert [prediction.label for prediction in predictions] == ["good", "bad"]
    elif task == "tagging":
        assert str(labeller.classify("the cat saw a red hill")) == "the/O cat/B-PET saw/O a/O red/O hill/O"
    else:
        assert labeller.classify([("the cat", "a dog")])[0].value is not None


def test_a_language_model_is_the_beginning_of_one_that_answers(corpora: Path, tmp_path: Path) -> None:
    first = learn(config_of(corpora, "causal-lm", **RNN, **{"train.steps": 3}), tmp_path / "first")
    still = {"train.steps": 1, "train.lr": 1e-30}
    second = learn(tuning(corpora, "classification", first, **still), tmp_path / "second")
    one, two = load(first, CPU).model, load(second, CPU).model
    ours = dict(two.named_parameters())
    for name, p in one.named_parameters():
        np.testing.assert_array_equal(p.detach().numpy(), ours[f"body.{name}"].detach().numpy())


@pytest.mark.parametrize(("start", "shown"), [("zzz", 2), ("", 2), ("zzz " * 200, 0)])
def test_what_is_written_begins_with_a_word_that_is_known(
    corpora: Path, tmp_path: Path, start: str, shown: int
) -> None:
    """Where no line end begins a text: a validation text of words that nobody knows has none."""
    (corpora / "other.txt").write_text(f"{start} one two\n" if shown else start)
    settings = {**RNN, "tokenizer.kind": "wordpiece", "train.samples": 2, "train.steps": 1, "data.valid": ["other.txt"]}
    job = prepare_job(tmp_path, config_of(corpora, "causal-lm", **settings), quiet=True)
    assert len(job.validate(job.model.eval(), CPU, torch.float32, lambda: None).samples) == shown


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model.recurrent.bidirectional": True},
            r"model\.recurrent\.bidirectional is for models with a prediction head",
        ),
        ({"data.packing": "documents"}, r"data\.packing documents hides"),
        ({"train.r_drop": 1.0}, r"train\.r_drop is not for this kind of causal-lm"),
        ({"train.activation_checkpointing": True}, r"train\.activation_checkpointing is for models of blocks"),
        ({"train.optimizer": "muon"}, r"train\.optimizer muon is for the matrices inside blocks"),
        ({"model.mixer": "convolution"}, r"model\.mixer is for transformer, gpt, bert, vit models, and lstm-small is"),
        (
            {"model.attention.window": 4},
            r"\[model\.attention\] would do nothing here: it is for transformer",
        ),
        ({"model.attention_dropout": 0.1}, r"model\.attention_dropout is for transformer"),
        ({"model.attention_score": "dot"}, r"model\.attention_score is for seq2seq models"),
    ],
)
def test_what_a_recurrent_language_model_cannot_do(
    corpora: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RegardError, match=said):
        learn(config_of(corpora, "causal-lm", **RNN, **changes), tmp_path / "run")
