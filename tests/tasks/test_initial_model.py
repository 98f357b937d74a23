"""Where runs begin: with another model's weights and vocabulary, or where they were stopped."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import after_step, assert_same_run, checkpoint
from little import CYCLE, config_of, learn, tuning, write_all
from tokens import EOS, MASK, SOS

import regard
from regard import model_folder as folders
from regard.config import Config
from regard.decode.constraints import Hypothesis
from regard.errors import RegardError
from regard.models.weights import weights_of
from regard.signals import Interrupted
from regard.tasks import prepare_job, translation
from regard.tasks.run_config import make_config
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizers

CPU = torch.device("cpu")
SHORT = {"train.steps": 6, "train.valid_every": 3, "train.save_every": 2, "train.log_every": 1}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("little")
    write_all(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_CACHE", str(folder / "cache"))
        for task in ("causal-lm", "masked-lm", "image-classification"):
            learn(config_of(folder, task, **SHORT), folder / task)
    return folder


def stop_at(step: int, config: Config, run: Path) -> None:
    with after_step(step, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(Interrupted):
        learn(config, run)


# ---- stopped and gone on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("causal-lm", {"model.dropout": 0.1}),
        ("causal-lm", {"data.documents": "line", "data.packing": "documents"}),
        ("masked-lm", {}),
        ("denoising", {}),
        ("tagging", {}),
        ("image-classification", {"data.shift": 1, "data.flip": True}),
    ],
)
def test_a_run_that_was_stopped_is_the_run_that_was_not(
    corpora: Path, tmp_path: Path, task: str, changes: dict[str, Any]
) -> None:
    config = config_of(corpora, task, **SHORT, **changes)
    learn(config, tmp_path / "whole")
    stop_at(3, config, tmp_path / "stopped")
    regard.resume(tmp_path / "stopped", quiet=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    ("init", "task"), [("masked-lm", "classification"), ("image-classification", "image-classification")]
)
def test_a_run_goes_on_when_the_model_it_began_with_is_gone(
    corpora: Path, tmp_path: Path, init: str, task: str
) -> None:
    shutil.copytree(corpora / init / "model", tmp_path / "init")
    config = tuning(corpora, task, tmp_path / "init", **SHORT)
    learn(config, tmp_path / "whole")
    stop_at(3, config, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "init")
    regard.resume(tmp_path / "stopped", quiet=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


ABROAD = SpecialTokenTemplate(before=(MASK,), between=(SOS,), after=(EOS, EOS), start=(EOS,))
ORIGIN = {"family": "bert", "numbering": {"ids": [1, 2, 3]}}


def imported(model: Path, to: Path) -> Path:
    """The same model as if it came from elsewhere: with a token_template of its own and what exporting it needs."""
    package = replace(folders.load(model, CPU), token_template=ABROAD, origin=ORIGIN, pooling="first")
    folders.save(to, package, "a card")
    return to


@pytest.mark.parametrize(("init", "task"), [("masked-lm", "classification"), ("causal-lm", "causal-lm")])
def test_what_an_imported_model_knows_outlives_it_and_reaches_the_tuned_one(
    corpora: Path, tmp_path: Path, init: str, task: str
) -> None:
    config = tuning(corpora, task, imported(corpora / init, tmp_path / "init"), **SHORT, **{"data.documents": "line"})
    stop_at(3, config, tmp_path / "run")
    shutil.rmtree(tmp_path / "init")
    regard.resume(tmp_path / "run", quiet=True)
    tuned = folders.load(tmp_path / "run", CPU)
    assert (tuned.token_template, tuned.origin, tuned.pooling) == (ABROAD, ORIGIN, "first")


def test_a_run_that_failed_with_a_model_leaves_nothing_of_it_to_one_without(corpora: Path, tmp_path: Path) -> None:
    run, init = tmp_path / "run", imported(corpora / "masked-lm", tmp_path / "init")
    with pytest.raises(RegardError, match="do not fit"):
        learn(tuning(corpora, "classification", init, **{"model.d_ff": 48}), run)
    learn(config_of(corpora, "classification", **SHORT), run)
    assert folders.load(run, CPU).origin == {}
    assert not (run / "start.json").exists()


# ---- another model's weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "task"),
    [
        ("causal-lm", "classification"),
        ("causal-lm", "causal-lm"),
        ("masked-lm", "classification"),
        ("masked-lm", "regression"),
        ("masked-lm", "tagging"),
        ("masked-lm", "masked-lm"),
    ],
)
def test_tuning_begins_with_every_weight_and_the_vocabulary_of_the_model_it_is_given(
    corpora: Path, tmp_path: Path, init: str, task: str
) -> None:
    given = folders.load(corpora / init, CPU)
    job = prepare_job(tmp_path, tuning(corpora, task, corpora / init), quiet=True)
    body = getattr(job.model, "body", job.model)
    theirs, ours = weights_of(given.model), weights_of(body)
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert torch.equal(theirs[name], ours[name]), name
    assert job.tokenizers is not None
    assert given.tokenizers is not None
    assert job.tokenizers.source.fingerprint() == given.tokenizers.source.fingerprint()
    assert Tokenizers.load(tmp_path).source.fingerprint() == given.tokenizers.source.fingerprint()


def test_a_new_head_is_fresh_and_the_same_for_the_same_seed(corpora: Path, tmp_path: Path) -> None:
    heads = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        config = tuning(corpora, "classification", corpora / "masked-lm", **{"train.seed": seed})
        heads.append(prepare_job(tmp_path / name, config, quiet=True).model.prediction_head.weight)  # type: ignore[union-attr]
    assert torch.equal(heads[0], heads[1])  # type: ignore[arg-type]
    assert not torch.equal(heads[0], heads[2])  # type: ignore[arg-type]


def test_tuning_changes_the_copy_alone(corpora: Path, tmp_path: Path) -> None:
    before = (corpora / "masked-lm" / "model" / "model.safetensors").read_bytes()
    learn(tuning(corpora, "tagging", corpora / "masked-lm", **SHORT), tmp_path / "run")
    assert (corpora / "masked-lm" / "model" / "model.safetensors").read_bytes() == before
    tensors, _ = checkpoint(max((tmp_path / "run" / "checkpoints").iterdir()))
    given = weights_of(folders.load(corpora / "masked-lm", CPU).model)
    assert not torch.equal(tensors["body.embedding.weight"], given["embedding.weight"])


def test_pictures_are_normalised_as_the_first_model_learned_them(corpora: Path, tmp_path: Path) -> None:
    given = folders.load(corpora / "image-classification", CPU)
    odd = replace(given, pixels={"mean": [0.25], "std": [0.125]})
    folders.save(tmp_path / "init", odd, "a card")
    run = learn(tuning(corpora, "image-classification", tmp_path / "init", **SHORT), tmp_path / "run")
    assert folders.load(run, CPU).pixels == {**odd.pixels, "size": [8, 8]}


@pytest.mark.parametrize("given", ["causal-lm", "causal-lm/model", "causal-lm/tokenizer.json"])
def test_a_run_may_take_the_vocabulary_alone(corpora: Path, tmp_path: Path, given: str) -> None:
    config = config_of(corpora, "masked-lm", **{"tokenizer.file": str(corpora / given), "tokenizer.vocab_size": 7})
    job = prepare_job(tmp_path, config, quiet=True)
    assert job.tokenizers is not None
    expected = Tokenizers.load(corpora / "causal-lm").source
    assert job.tokenizers.source.fingerprint() == expected.fingerprint()
    assert job.config.model.source_vocab == len(expected) > 7


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.d_ff": 48}, r"do not fit this model .*ff.*leave its sizes as they are"),
        ({"model.n_encoder_layers": 2}, r"do not fit this model .*blocks\.1.*leave its sizes"),
        ({"model.positions": "learned"}, r"do not fit this model .*leave its sizes"),
    ],
)
def test_sizes_that_the_given_weights_do_not_have_are_refused(
    corpora: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RegardError, match=words):
        learn(tuning(corpora, "classification", corpora / "masked-lm", **changes), tmp_path / "run")


def test_a_model_without_a_vocabulary_cannot_begin_a_run_on_text(corpora: Path, tmp_path: Path) -> None:
    config = tuning(corpora, "classification", corpora / "masked-lm")
    config = replace(config, train=replace(config.train, init_from=str(corpora / "image-classification")))
    with pytest.raises(RegardError, match="has no tokenizer"):
        learn(config, tmp_path / "run")


def test_a_beginning_that_is_not_there_is_refused_by_name(corpora: Path, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no model at .*nowhere"):
        tuning(corpora, "classification", tmp_path / "nowhere")


def test_the_words_of_the_given_model_are_those_it_learned(corpora: Path, tmp_path: Path) -> None:
    """The film reviews have other words; they are unknown, not learned anew."""
    job = prepare_job(tmp_path, tuning(corpora, "classification", corpora / "masked-lm"), quiet=True)
    assert job.tokenizers is not None
    assert len(job.tokenizers.source.encode(" ".join(CYCLE))) == len(CYCLE)
    assert job.tokenizers.source.encode("lovely") == job.tokenizers.source.encode("awful")


def test_a_model_of_two_vocabularies_is_tuned_and_gone_on_with(tmp_path: Path) -> None:
    words = ["one two", "two three", "three one", "four one two"]
    (tmp_path / "x.tsv").write_text("".join(f"{a}\t{a.upper()}\n" for a in words * 4))
    data = {"root": str(tmp_path), "train": ["x.tsv"], "valid": ["x.tsv"]}
    sizes = {"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2}
    train = {"steps": 2, "valid_every": 2, "save_every": 1, "batch_tokens": 64, "device": "cpu", "threads": 1}
    tokenizer = {"kind": "char", "vocab_size": 40, "joint": False}
    first = {"name": "a", "data": data, "tokenizer": tokenizer, "train": train, "model": {**sizes, "tie": "decoder"}}
    learn(make_config(first, {}), tmp_path / "a")
    second = {"name": "b", "data": data, "train": {**train, "init_from": str(tmp_path / "a")}}
    learn(make_config(second, {}), tmp_path / "b")
    regard.resume(tmp_path / "b", quiet=True, train={"steps": 4})
    assert not (tmp_path / "b" / "tokenizer.json").exists()
    assert (tmp_path / "b" / "tokenizer.source.json").exists()


def lower_casing_run(folder: Path) -> dict[str, Any]:
    """Train a translator of one step that lower-cases, and return the settings of a run that starts from it."""
    rows = ["Anna sees Ben", "Ben sees Carl", "Carl sees Anna", "Anna and Ben see Carl"]
    (folder / "x.tsv").write_text("".join(f"{row}\t{row}\n" for row in rows * 4))
    data = {"root": str(folder), "train": ["x.tsv"], "valid": ["x.tsv"]}
    sizes = {"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2}
    train = {"steps": 1, "warmup": 0, "batch_tokens": 64, "device": "cpu", "threads": 1}
    tokenizer = {"kind": "word", "vocab_size": 40, "lowercase": True}
    first = {"name": "a", "data": data, "tokenizer": tokenizer, "train": train, "model": sizes}
    learn(make_config(first, {}), folder / "a")
    return {"name": "b", "data": data, "train": {**train, "init_from": str(folder / "a")}}


@pytest.mark.parametrize("replace_unknown", ["none", "copy"])
def test_validation_ignores_case_where_the_vocabulary_of_the_initial_model_lower_cases(
    replace_unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was learned: the translations are replaced by the sources, which are the references but for their case.
    Where unknown words are replaced, words with capitals are copied."""
    settings = lower_casing_run(tmp_path)
    given = make_config(settings, {"decode.replace_unknown": replace_unknown})
    job = prepare_job(tmp_path / "b", given, quiet=True)
    monkeypatch.setattr(
        translation, "decode", lambda _, sources, *rest: [[Hypothesis(ids, 0.0, 0.0, True)] for ids in sources]
    )
    monkeypatch.setattr(translation, "replace_unknown", lambda *given: given[4])  # the sources as they were written
    found = job.validate(job.model.eval(), CPU, torch.float32, lambda: None)
    assert found.scores["bleu"] == pytest.approx(100)


def test_settings_of_a_vocabulary_that_the_initial_model_decides_are_refused(tmp_path: Path) -> None:
    settings = lower_casing_run(tmp_path)
    cases = {"kind": "char", "vocab_size": 5000, "joint": False, "nfc": False, "lowercase": True, "n_sentinels": 3}
    for name, value in {**cases, "file": str(tmp_path / "a")}.items():
        with pytest.raises(
            RegardError, match=rf"tokenizer\.{name} would do nothing: .* train\.init_from; leave it out"
        ):
            learn(make_config(settings, {f"tokenizer.{name}": value, "model.tie": "decoder"}), tmp_path / "b")


def test_the_same_command_goes_on_when_the_model_it_began_with_is_gone(corpora: Path, tmp_path: Path) -> None:
    shutil.copytree(corpora / "causal-lm", tmp_path / "init")
    recipe = tmp_path / "tune.toml"
    recipe.write_text(
        f"""task = "causal-lm"
[data]
root = "{corpora}"
train = ["cycle.txt"]
valid = ["cycle.txt"]
[train]
init_from = "{tmp_path / "init"}"
steps = 2
batch_tokens = 256
samples = 0
device = "cpu"
threads = 1
"""
    )
    run = regard.train(recipe, tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "init")
    assert regard.train(recipe, tmp_path / "run", quiet=True, train={"steps": 3}) == run
    assert (run / "checkpoints" / "step-00000003").is_dir()


def test_documents_end_even_where_an_imported_model_has_no_frame(corpora: Path, tmp_path: Path) -> None:
    """As GPT-2, whose tokenizer puts nothing around a text."""
    package = folders.load(corpora / "causal-lm", CPU)
    bare = SpecialTokenTemplate((), (), (), ())
    foreign = replace(package, token_template=bare, origin={"family": "gpt2"})
    folders.save(tmp_path / "foreign", foreign, "")
    config = tuning(corpora, "causal-lm", tmp_path / "foreign", **{"data.documents": "line", **SHORT})
    job = prepare_job(tmp_path / "run", config, quiet=True)
    ids = job.train.source.ids  # type: ignore[attr-defined]
    assert (ids == EOS).sum() == len(job.train)  # type: ignore[attr-defined]
    labelled = tuning(corpora, "regression", tmp_path / "foreign", **SHORT)
    rows = prepare_job(tmp_path / "other", labelled, quiet=True).train  # type: ignore[attr-defined]
    assert all(row.count(EOS) == 2 and row[-1] == EOS for row in rows.ids)


def test_texts_in_jsonl_are_documents_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one two"}\n{"text": "two one two"}\n' * 20)
    values = {"train": ["x.jsonl"], "valid": ["x.jsonl"]}
    config = config_of(tmp_path, "causal-lm", **{f"data.{k}": v for k, v in values.items()})
    job = prepare_job(tmp_path / "run", config, quiet=True)
    assert (job.train.source.ids == EOS).sum() == (job.train.source.ids == SOS).sum() == 40  # type: ignore[attr-defined]
