"""From a recipe to a complete configuration, and from a folder to the object that uses its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_classifier import package, picture_bundle
from test_generator import bert_bundle, taught

import regard
from regard import model_folder, train
from regard.errors import RegardError
from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.models.presets import TABLES
from regard.tasks.run_config import make_config

ALL = [name for table in TABLES.values() for name in table]
TASKS = {"gpt": "causal-lm", "bert": "masked-lm", "transformer": "translation", "vit": "image-classification"}
TASKS |= {"rnn": "causal-lm", "seq2seq": "translation"}


@pytest.mark.parametrize("name", ALL)
def test_every_preset_makes_a_configuration_that_comes_back_from_its_own_settings(name: str) -> None:
    """What `regard resume` does: read what was written."""
    from tomllib import loads

    from regard.config.recipes import to_toml

    architecture = next(a for a, table in TABLES.items() if name in table)
    config = make_config({"task": TASKS[architecture], "model": {"preset": name}}, {})
    assert config.model.architecture == architecture
    assert make_config(loads(to_toml(config)), {}) == config


def test_a_recipe_has_the_style_of_its_preset_but_for_what_it_says_itself() -> None:
    config = make_config({"task": "causal-lm", "model": {"preset": "gpt2", "d_ff": 100}}, {"model.dropout": "0.3"})
    assert (config.model.activation, config.model.positions) == ("gelu-tanh", "learned")
    assert (config.model.d_model, config.model.d_ff, config.model.dropout) == (768, 100, 0.3)


@pytest.mark.parametrize(
    ("task", "head", "n_sentinels"),
    [
        ("classification", "sequence", 0),
        ("regression", "sequence", 0),
        ("tagging", "token", 0),
        ("masked-lm", "none", 0),
    ],
)
def test_the_task_decides_the_head(task: str, head: str, n_sentinels: int) -> None:
    config = make_config({"task": task, "model": {"preset": "bert-tiny"}}, {})
    assert (config.model.prediction_head, config.tokenizer.n_sentinels) == (head, n_sentinels)


def test_spans_get_marks_for_gaps_unless_told_how_many() -> None:
    values = {"task": "span-corruption", "model": {"preset": "t5-small"}}
    assert make_config(values, {}).tokenizer.n_sentinels == 100
    assert make_config(values, {"tokenizer.n_sentinels": 7}).tokenizer.n_sentinels == 7


def test_a_tuned_model_has_the_sizes_it_begins_with_and_the_changes_asked_for(tmp_path: Path) -> None:
    model_folder.save(tmp_path / "bert", bert_bundle(), "a card")
    values: dict[str, Any] = {"task": "classification", "train": {"init_from": str(tmp_path / "bert")}}
    config = make_config({**values, "model": {"dropout": 0.25}}, {})
    old = bert_bundle().config
    assert (config.model.d_model, config.model.n_heads, config.model.preset) == (old.d_model, old.n_heads, old.preset)
    assert (config.model.dropout, config.model.prediction_head) == (0.25, "sequence")
    assert Path(config.train.init_from).is_absolute()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": "poetry"}, "'task' must be one of translation, causal-lm"),
        ({"model": {"preset": "gpt-5"}}, r"unknown model\.preset 'gpt-5'"),
        ({"data": {"pairing": "x"}}, r"unknown setting 'data\.pairing'"),
        ({"train": {"init_from": "nowhere"}}, "no model at nowhere"),
        ({"tokenizer": {"joint": False}}, "needs one vocabulary"),
    ],
)
def test_what_a_recipe_cannot_say(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RegardError, match=words):
        make_config(values, {})


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no recipe at .*gone\.toml"):
        train(tmp_path / "gone.toml", tmp_path / "run")


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (taught, Generator),
        (bert_bundle, Embedder),
        (picture_bundle, Classifier),
        (lambda: package("classification"), Classifier),
    ],
)
def test_load_gives_what_the_model_is_for(tmp_path: Path, made: Any, kind: type) -> None:
    model_folder.save(tmp_path / "model", made(), "a card")
    assert type(regard.load(tmp_path / "model", device="cpu")) is kind
