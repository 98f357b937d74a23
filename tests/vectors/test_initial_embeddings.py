"""`train.pretrained_embeddings`: which rows are initialised by word vectors, for every model that reads text."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import resume
from regard.config import Config, TokenizerConfig
from regard.errors import RegardError
from regard.tasks import prepare_job
from regard.tasks.initial_model import load_initial_vectors
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config
from regard.text.tokenizer import Tokenizer
from regard.vectors.initial_embeddings import whole_words
from regard.vectors.word_vectors import WordVectors

sys.path.append(str(Path(__file__).parents[1] / "training"))
from helpers import assert_same_run

TEXT = "the cat sat on the mat , and the dog ran . the Cat saw well-known things .\n" * 40
KNOWN = ["the", "cat", "dog", ",", "known", "<unk>", "elephant", "##at", "at"]
DIM = 16
SIZES = {"d_model": DIM, "n_heads": 2, "d_ff": 32, "max_len": 32, "dropout": 0.0}
LAYERS = {"n_encoder_layers": 1, "n_decoder_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"task": "causal-lm", "model": {"preset": "gpt-tiny", **SIZES, "n_decoder_layers": 1}},
    "bert": {"task": "masked-lm", "model": {"preset": "bert-tiny", **SIZES, "n_encoder_layers": 1}},
    "rnn": {"task": "causal-lm", "model": {"preset": "rnn-tiny", "d_model": DIM, "recurrent": {"d_hidden": DIM}}},
    "transformer": {"task": "translation", "model": {"preset": "transformer-tiny", **SIZES, **LAYERS}},
    "seq2seq": {
        "task": "translation",
        "model": {"preset": "rnnsearch-small", **LAYERS, "d_model": DIM, "recurrent": {"d_hidden": DIM}},
    },
    "classifier": {"task": "classification", "model": {"preset": "bert-tiny", **SIZES, "n_encoder_layers": 1}},
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    lines = [line for line in TEXT.splitlines() if line]
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line.upper()} DOG DOG DOG DOG DOG\n" for line in lines))
    (tmp_path / "film.tsv").write_text("text\tlabel\n" + "".join(f"{x}\t{i % 2}\n" for i, x in enumerate(lines)))
    rng = np.random.default_rng(0)
    WordVectors(KNOWN, 7 * rng.normal(size=(len(KNOWN), DIM)).astype(np.float32)).save(tmp_path / "words.bin")
    return tmp_path


def config_of(corpus: Path, name: str, **changes: Any) -> Config:
    given = MODELS[name]
    files = {"translation": "pairs.tsv", "classification": "film.tsv"}
    file = files.get(given["task"], "text.txt")
    training = {"steps": 4, "batch_tokens": 128, "save_every": 2, "valid_every": 2, "samples": 0, "log_every": 1}
    values = {
        "task": given["task"],
        "data": {"root": str(corpus), "train": [file], "valid": [file]},
        "tokenizer": {"kind": "word", "vocab_size": 60},
        "model": given["model"],
        "train": {**training, "device": "cpu", "threads": 1, "pretrained_embeddings": str(corpus / "words.bin")},
    }
    return make_config(values, changes)


def weights(corpus: Path, config: Config, name: str) -> tuple[Tokenizer, Tokenizer, dict[str, torch.Tensor]]:
    run = corpus / name
    run.mkdir()
    job = prepare_job(run, config, quiet=True)
    assert job.tokenizers is not None
    named = {name.removeprefix("body."): p.detach() for name, p in job.model.named_parameters()}
    return job.tokenizers.source, job.tokenizers.target, named


def fresh(corpus: Path, config_name: str, **changes: Any) -> dict[str, torch.Tensor]:
    return weights(corpus, config_of(corpus, config_name, **{**changes, "train.pretrained_embeddings": ""}), "fresh")[2]


def rows_of(tokenizer: Tokenizer, words: list[str]) -> list[int]:
    pieces = tokenizer.pieces(range(len(tokenizer)))
    return [pieces.index(word) for word in words]


@pytest.mark.parametrize("name", MODELS)
def test_words_in_the_file_begin_with_their_vectors_scaled_and_all_others_as_ever(corpus: Path, name: str) -> None:
    before = fresh(corpus, name)
    tokenizer, _, after = weights(corpus, config_of(corpus, name), "begun")
    given = WordVectors.load(corpus / "words.bin")
    # all pieces that are words of the file, in this case or that, with or without a space before them
    pieces = [(i, piece.strip("▁").lower()) for i, piece in enumerate(tokenizer.pieces(range(5, len(tokenizer))), 5)]
    rows, words = zip(*((i, word) for i, word in pieces if word in KNOWN), strict=True)
    assert {"the", "cat", "dog", ",", "known"} == set(words)
    table = "source_embedding.weight" if name in ("transformer", "seq2seq") else "embedding.weight"
    vectors = torch.from_numpy(np.stack([given[word] for word in words]))
    scale = before[table][[*rows]].square().mean().sqrt() / vectors.square().mean().sqrt()
    torch.testing.assert_close(after[table][[*rows]], vectors * scale)
    others = [i for i in range(len(tokenizer)) if i not in rows]
    torch.testing.assert_close(after[table][others], before[table][others], rtol=0, atol=0)
    assert all(torch.equal(after[k], before[k]) for k in before if k not in (table, "target_embedding.weight"))


def test_a_language_of_its_own_has_vectors_of_its_own(corpus: Path) -> None:
    changes = {"tokenizer.joint": False, "model.tie": "none"}
    before = fresh(corpus, "transformer", **changes)
    source, target, after = weights(corpus, config_of(corpus, "transformer", **changes), "begun")
    moved = {
        name: {i for i, (a, b) in enumerate(zip(after[name], before[name], strict=True)) if not torch.equal(a, b)}
        for name in ("source_embedding.weight", "target_embedding.weight")
    }
    assert moved["source_embedding.weight"] == set(rows_of(source, ["▁the", "▁cat", "▁Cat", "▁dog", ",", "known"]))
    assert moved["target_embedding.weight"] == set(rows_of(target, ["▁THE", "▁CAT", "▁DOG", ",", "KNOWN"]))
    assert moved["source_embedding.weight"] != moved["target_embedding.weight"]
    torch.testing.assert_close(after["head.weight"], before["head.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "whole", "parts"),
    [
        ("word", {"▁the": "the", "known": "known", ".": "."}, []),
        ("split", {"the": "the", "well-known": "well-known"}, []),
        ("bpe", {"▁the": "the", "▁cat": "cat"}, ["at", "a", "t"]),
        ("byte-bpe", {"▁the": "the", "▁cat": "cat", ".": "."}, ["at", "t"]),
        ("unigram", {"▁sa": "sa"}, ["t"]),
        ("wordpiece", {"the": "the", "cat": "cat", ".": "."}, ["##at", "##t"]),
        ("char", {",": ",", ".": "."}, ["a", "t", "▁"]),
    ],
)
def test_pieces_that_are_whole_words_are_told_from_parts(kind: str, whole: dict[str, str], parts: list[str]) -> None:
    size = 300 if kind == "byte-bpe" else 90
    tokenizer = Tokenizer.train(TEXT.splitlines(), TokenizerConfig(kind=kind, vocab_size=size))
    pieces = tokenizer.pieces(range(len(tokenizer)))
    found = {pieces[i]: word for i, word in whole_words(tokenizer)}
    assert found.items() >= whole.items()
    assert set(parts) <= set(pieces)
    assert not set(parts) & set(found)
    assert not set(pieces[:5]) & set(found)  # special tokens are no words


def test_the_run_says_how_many_pieces_were_found(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = corpus / "run"
    run.mkdir()
    prepare_job(run, config_of(corpus, "gpt"), quiet=False)
    assert "words.bin begin 7 of 24 pieces" in capsys.readouterr().err


def test_a_run_goes_on_when_the_vectors_are_gone(corpus: Path) -> None:
    whole = train(config_of(corpus, "gpt"), corpus / "whole", quiet=True)
    train(config_of(corpus, "gpt", **{"train.steps": 2}), corpus / "short", quiet=True)
    (corpus / "words.bin").unlink()
    resume(corpus / "short", settings={"train.steps": 4}, quiet=True)
    assert_same_run(corpus / "short", whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.d_model": 32}, "have 16 numbers each, but model.d_model is 32: set model.d_model 16"),
        ({"train.pretrained_embeddings": "nothing.bin"}, "there is no file .*nothing.bin"),
    ],
)
def test_vectors_that_do_not_fit_are_an_error(corpus: Path, changes: dict[str, Any], said: str) -> None:
    (corpus / "run").mkdir()
    with pytest.raises(RegardError, match=said):
        prepare_job(corpus / "run", config_of(corpus, "gpt", **changes), quiet=True)


def test_vectors_where_they_make_no_sense_are_an_error(corpus: Path) -> None:
    config = config_of(corpus, "gpt")
    with pytest.raises(RegardError, match="images have none"):
        load_initial_vectors(replace(config, task="image-classification"))
    with pytest.raises(RegardError, match="leave one of them out"):
        load_initial_vectors(replace(config, train=replace(config.train, init_from="runs/other")))


def test_vectors_of_none_of_the_words_are_an_error(corpus: Path) -> None:
    WordVectors(["elefant"], np.ones((1, DIM), np.float32)).save(corpus / "words.bin")
    (corpus / "run").mkdir()
    with pytest.raises(RegardError, match="none of the vocabulary's pieces"):
        prepare_job(corpus / "run", config_of(corpus, "gpt"), quiet=True)
