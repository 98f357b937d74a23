"""Training of word2vec from files: learning rate, order of the text, and results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from regard.cli.main import app
from regard.config import VectorsConfig
from regard.data.token_cache import TokenStore
from regard.errors import RegardError
from regard.vectors import word2vec
from regard.vectors.word2vec import TrainingState, blocks, learning_rate, run_threads, train, train_ids
from regard.vectors.word_counts import Vocabulary
from regard.vectors.word_vectors import WordVectors

FIRE, WATER = ("fire", "hot", "flame", "burn", "red"), ("water", "cold", "river", "swim", "blue")
SMALL = VectorsConfig(dim=16, window=3, min_count=1, subsample=0.0, epochs=5, lr=0.05, threads=1)


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sentences about fire and sentences about water, which share three words."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("topics") / "topics.txt"
    lines = [rng.choice((*(FIRE, WATER)[i % 2], "the", "is", "of"), 8) for i in range(1500)]
    path.write_text("\n".join(map(" ".join, lines)) + "\n")
    return path


def cosines(words: list[str], vectors: np.ndarray, among: tuple[str, ...], other: tuple[str, ...]) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    a, b = ([words.index(word) for word in group] for group in (among, other))
    return float(np.mean([unit[i] @ unit[j] for i in a for j in b if i != j]))


@pytest.mark.parametrize("model", ["skipgram", "cbow"])
@pytest.mark.parametrize("loss", ["negative", "hierarchical", "softmax"])
def test_words_of_one_topic_come_together(topics: Path, model: str, loss: str) -> None:
    found = train([topics], replace(SMALL, model=model, loss=loss, lr=0.1), quiet=True)
    near = cosines(found.vocabulary.words, found.inputs, FIRE, FIRE)
    far = cosines(found.vocabulary.words, found.inputs, FIRE, WATER)
    assert near > far + 0.3
    assert found.outputs.shape == (13 - (loss == "hierarchical"), 16)
    assert found.words == 5 * 12000
    assert np.isfinite(found.loss)


def test_one_thread_and_a_seed_give_the_same_bits(topics: Path) -> None:
    a, b, c = (train([topics], replace(SMALL, seed=seed, subsample=0.05), quiet=True) for seed in (1, 1, 2))
    assert np.array_equal(a.inputs, b.inputs)
    assert np.array_equal(a.outputs, b.outputs)
    assert a.loss == b.loss
    assert not np.allclose(a.inputs, c.inputs)


def test_two_threads_learn_the_same_thing(topics: Path) -> None:
    found = train([topics], replace(SMALL, threads=2, lr=0.1), quiet=True)
    words = found.vocabulary.words
    assert cosines(words, found.inputs, FIRE, FIRE) > cosines(words, found.inputs, FIRE, WATER) + 0.3
    assert found.words == 5 * 12000


def test_gensim_orders_similarities_alike(topics: Path) -> None:
    gensim = pytest.importorskip("gensim.models")
    lines = [line.split() for line in topics.read_text().splitlines()]
    theirs = gensim.Word2Vec(
        lines, vector_size=16, window=3, min_count=1, sample=0, epochs=5, alpha=0.1, sg=1, workers=1, seed=1
    ).wv
    ours = train([topics], replace(SMALL, lr=0.1), quiet=True)
    words = ours.vocabulary.words
    unit = ours.inputs / np.linalg.norm(ours.inputs, axis=1, keepdims=True)
    pairs = [(a, b) for a in range(13) for b in range(a)]
    mine = [unit[a] @ unit[b] for a, b in pairs]
    peer = [theirs.similarity(words[a], words[b]) for a, b in pairs]
    assert np.corrcoef(np.argsort(np.argsort(mine)), np.argsort(np.argsort(peer)))[0, 1] > 0.8


def test_the_learning_rate_falls_in_a_line_to_its_floor() -> None:
    config = VectorsConfig()
    assert learning_rate(config, 0) == 0.025
    assert learning_rate(config, 0.5) == 0.0125
    assert learning_rate(config, 1) == pytest.approx(0.025e-4)
    assert learning_rate(replace(config, model="cbow"), 0) == 0.05
    assert learning_rate(replace(config, lr=0.3, min_lr_share=0.1), 0.99) == pytest.approx(0.03)


def test_all_epochs_share_one_decay(topics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, int, int]] = []

    def note(work: TrainingState, a: int, b: int, state: np.ndarray, totals: np.ndarray) -> None:
        seen.append((work.lr, a, b))

    monkeypatch.setattr(word2vec, "run_block", note)
    train([topics], replace(SMALL, epochs=2, lr=1.0), quiet=True)
    rates, read = [rate for rate, _, _ in seen], [8 * (b - a) for _, a, b in seen]
    expected = 1 - np.concatenate([[0], np.cumsum(read)[:-1]]) / 24000
    np.testing.assert_allclose(rates, np.maximum(expected, 1e-4), atol=1e-9)
    assert sum(read) == 24000
    assert len(seen) > 100


def test_blocks_cover_every_sentence_once() -> None:
    rng = np.random.default_rng(1)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 40, 500)), [20_000]])  # the last is a long one
    found = list(blocks(offsets, 0, 501, 100))
    assert [i for a, b in found for i in range(a, b)] == list(range(501))
    assert max(offsets[b] - offsets[a] for a, b in found[:-1]) <= 100


def test_a_text_read_in_blocks_gives_the_pairs_of_one_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a constant learning rate, the result does not depend on where blocks end."""
    rng = np.random.default_rng(2)
    ids, lengths = rng.integers(0, 20, 3000), [*rng.integers(1, 30, 100)]
    vocabulary = Vocabulary([f"w{i}" for i in range(20)], np.sort(np.bincount(ids))[::-1].copy())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    store = TokenStore(ids[: offsets[-1]].astype(np.uint16), offsets)
    config = replace(SMALL, epochs=1, min_lr_share=1.0, subsample=0.01)
    cut = train_ids(store, vocabulary, config)
    monkeypatch.setattr(word2vec, "blocks", lambda offsets, first, last, size: iter([(first, last)]))
    whole = train_ids(store, vocabulary, config)
    assert np.array_equal(cut.inputs, whole.inputs)
    assert cut.loss == pytest.approx(whole.loss)


def test_more_threads_than_sentences_are_no_trouble() -> None:
    store = TokenStore(np.array([0, 1, 0], np.uint16), np.array([0, 3]))
    found = train_ids(store, Vocabulary(["a", "b"], np.array([2, 1])), replace(SMALL, threads=4))
    assert found.words == 15


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TokenStore(np.array([0, 1, 0], np.uint16), np.array([0, 3]))
    work = word2vec.initial_state(store, Vocabulary(["a", "b"], np.array([2, 1])), SMALL)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(word2vec, "run_block", fail)
    with pytest.raises(ZeroDivisionError):
        run_threads(work)
    assert work.stopped


def test_settings_that_learn_nothing_are_refused(topics: Path) -> None:
    with pytest.raises(RegardError, match=r"negatives is 0.*hierarchical"):
        train([topics], replace(SMALL, negatives=0), quiet=True)
    assert train([topics], replace(SMALL, negatives=0, loss="hierarchical", epochs=1), quiet=True).words == 12000
    with pytest.raises(RegardError, match="no file"):
        train([Path("nowhere.txt")], SMALL, quiet=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["skipgram", "cbow"])
@pytest.mark.parametrize("loss", ["negative", "hierarchical"])
def test_a_gpu_brings_the_words_of_one_topic_together(topics: Path, model: str, loss: str) -> None:
    found = train([topics], replace(SMALL, model=model, loss=loss, lr=0.1, device="cuda", batch=8), quiet=True)
    words = found.vocabulary.words
    assert cosines(words, found.inputs, FIRE, FIRE) > cosines(words, found.inputs, FIRE, WATER) + 0.3
    assert found.words == 5 * 12000


def test_the_full_softmax_is_not_for_gpus(topics: Path) -> None:
    with pytest.raises(RegardError, match="CPU alone"):
        train([topics], replace(SMALL, loss="softmax", device="cuda"), quiet=True)


def test_the_command_writes_vectors_that_can_be_asked(topics: Path, tmp_path: Path) -> None:
    options = ["--dim", "16", "--min-count", "1", "--threads", "1", "--lr", "0.1", "--subsample", "0"]
    result = CliRunner().invoke(app, ["vectors", "train", str(topics), "-o", str(tmp_path / "out"), *options], obj={})
    assert result.exit_code == 0, result.output
    assert "13 words, 16 numbers each" in result.output
    found = WordVectors.load(tmp_path / "out")
    assert {word for word, _ in found.nearest("fire", 4)} == set(FIRE) - {"fire"}
    assert found.counts is not None
    assert found.counts.sum() == 12000
    assert found.about["settings"]["dim"] == 16


@pytest.mark.parametrize("wrong", [["--loss", "logistic"], ["--dim", "0"], ["--model", "glove"]])
def test_the_command_refuses_settings_that_do_not_exist(topics: Path, wrong: list[str]) -> None:
    result = CliRunner().invoke(app, ["vectors", "train", str(topics), *wrong], obj={})
    assert isinstance(result.exception, RegardError)
    assert f"vectors.{wrong[0][2:]}" in str(result.exception)
