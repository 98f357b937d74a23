"""BLEU against the cost of training: FLOPs by hand, settings that are those of the recipes, and a tiny study as a whole."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_translators import TINY, write_multi30k

import regard
from regard.config import Config, recipes
from regard.data.batches import Cursor
from regard.errors import RegardError
from regard.studies import sentence_length, translation_cost, translation_models
from regard.studies.finetuning_study import merge_settings
from regard.studies.translation_models import (
    MODELS,
    STARTS_FROM,
    count_flops,
    make_settings,
    plan_jobs,
    read_curve,
    run_job,
)
from regard.tasks.run import train_config
from regard.tasks.run_config import make_config
from regard.tasks.translation import prepare_job

RECIPES = Path(regard.__file__).parent / "recipes"
FILES = {name: f"multi30k-{name.partition('-seed-')[0]}" for name in MODELS}
MEMBERS = ("wide-1", "wide-2", "wide-3")
FILES |= dict.fromkeys(("transformer", *MEMBERS), "multi30k-small-en-de")
WITH_RECIPES = [name for name in MODELS if name not in STARTS_FROM]
SEEDS = {name: (name, f"{name}-seed-1", f"{name}-seed-2") for name in ("deep-att", "gnmt", "gnmt-reward", "convs2s")}
SEEDED = [name for names in SEEDS.values() for name in names[1:]]
ROWS = ["lstm", "rnnsearch", "bytenet", *(name for names in SEEDS.values() for name in names), "experts"]
ROWS += ["transformer", "reward", *MEMBERS, "deep-att-ensemble", "gnmt-ensemble", "convs2s-ensemble", "ensemble", "mbr"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_multi30k(tmp_path_factory.mktemp("multi30k"))


@pytest.mark.parametrize("name", WITH_RECIPES)
def test_a_study_trains_by_the_recipe(name: str) -> None:
    own = make_config(merge_settings(translation_models.COMMON, MODELS[name]), {})
    there = make_config(recipes.load(RECIPES / f"{FILES[name]}.toml"), {})
    shared = {"data.source", "data.target", "tokenizer.vocab_size"}  # one for all, so that models can be compared
    if name in MEMBERS:
        shared |= {"model.d_model", "model.d_head", "model.d_ff", "model.dropout", "train.lr", "train.seed"}
    if name in SEEDED:
        shared |= {"train.seed"}
    assert set(recipes.differences(own, there)) <= {"name", "data.root", *shared}


@pytest.mark.parametrize("name", WITH_RECIPES)
def test_watching_a_run_changes_nothing_that_is_learned(name: str) -> None:
    recipe = make_config(merge_settings(translation_models.COMMON, MODELS[name]), {})
    watched = make_config(make_settings(name), {})
    assert set(recipes.differences(recipe, watched)) <= {
        "name",
        *(f"train.{x}" for x in translation_models.MONITORING["train"]),
    }
    assert watched.train.average > 1  # not the best validation


def test_the_study_fine_tunes_gnmt_by_the_recipe() -> None:
    recipe, own = recipes.load(RECIPES / "multi30k-gnmt-reward.toml"), MODELS["gnmt-reward"]
    assert {name: recipe[name] for name in ("model", "decode")} == {name: own[name] for name in ("model", "decode")}
    train = {name: value for name, value in recipe["train"].items() if name not in ("init_from", "reward")}
    assert {**own["train"], "valid_every": 100, "metric": "bleu"} == train
    defaults = recipes.build({"train": {"reward": recipe["train"]["reward"]}}, Config)
    assert defaults.train.reward == Config().train.reward


def test_all_models_read_the_same_batches() -> None:
    """But for the vocabulary of Deep-Att, the order of the later members of an ensemble, and fine-tuning."""
    configs = {name: make_config(make_settings(name), {}) for name in WITH_RECIPES}
    first = configs["transformer"]
    for name, config in configs.items():
        assert config.data == first.data
        assert (config.tokenizer == first.tokenizer) == (not name.startswith("deep-att"))
        train = config.train
        assert (train.batch_tokens, train.accumulate) == (8192, 1)
        assert (train.seed == first.train.seed) == (name not in (*MEMBERS, *SEEDED))
        assert config.model.max_len == 256  # longer pairs would be left out


@pytest.mark.parametrize("r_drop", [0.0, 5.0])
def test_flops_are_those_of_the_batches_by_hand(data: Path, tmp_path: Path, r_drop: float) -> None:
    where = {"data.root": str(data), "train.batch_tokens": 200, "train.r_drop": r_drop, "tokenizer.vocab_size": 90}
    job = prepare_job(tmp_path, make_config(merge_settings(translation_models.COMMON, TINY), where), quiet=True)
    n, total = 40, 0  # more than an epoch
    expected = []
    for batch, _ in islice(job.batches().iterate_from(Cursor()), n):
        (rows, width), vocab = batch.inputs[0].shape, len(job.tokenizers.target)  # type: ignore[union-attr]
        attention = 4 * (2 * 16 * 16) + 2 * 2 * 16 * width  # four projections; scores and sums of values, for a token
        blocks = 3 * attention + 2 * 2 * (2 * 16 * 32)  # self, self and cross; a feed-forward layer on either side
        total += (2 if r_drop else 1) * 3 * rows * width * (blocks + 2 * 16 * vocab)
        expected.append(total)
    assert count_flops(job, n) == expected
    assert len({b - a for a, b in pairwise(expected)}) > 2  # batches of several shapes
    assert len(job.batches().plan(0)) < n


def test_the_curve_is_the_validations_at_what_was_spent_until_then(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"kind": "valid", "step": 1, "loss": 3.0, "bleu": 0.1}]
    lines += [{"kind": "train", "step": 1, "loss": 9.0}, {"kind": "valid", "step": 2, "loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_curve(tmp_path, [10, 30, 60, 100], per_step=2)
    assert found == [{"step": 1, "flops": 30, "loss": 3.0}, {"step": 2, "flops": 100, "loss": 2.5}]


@pytest.mark.parametrize("name", [name for name in WITH_RECIPES if name not in (*MEMBERS[1:], *SEEDED)])
def test_a_job_trains_counts_and_translates(name: str, data: Path, tmp_path: Path) -> None:
    recurrent = {} if name in ("bytenet", "convs2s", "transformer", "wide-1") else {"recurrent": {"d_hidden": 32}}
    widths = {"d_model": 32, **recurrent}
    small = {"model": widths, "tokenizer": {"vocab_size": 200}, "decode": {"max_len_a": 0.0, "max_len_b": 8}}
    job = plan_jobs([name], tmp_path / "out", data, 2, "cpu", True)[0]
    run_job(dataclasses.replace(job, values=merge_settings(job.values, small)))
    found = json.loads(job.result.read_text())
    assert found["parameters"] == sum(w.numel() for w in load_file(job.run / "model" / "model.safetensors").values())
    assert found["tokens"] < 4 * 512
    assert found["flops"] > 3 * 2 * found["tokens"] * 32 * 200  # what the vocabulary alone takes
    assert [point["step"] for point in found["curve"]] == [2, 4]
    for n, many in {"1": (12, 9), "2": (6, 4), "3": (4, 3), "4": (3, 2)}.items():
        assert tuple(len(found["translations"][test][n]) for test in translation_models.TEST_SETS) == many
    assert len(found["valid"]) == 10


def test_fine_tuning_on_a_reward_counts_its_samples(data: Path, tmp_path: Path) -> None:
    """A pair costs its reference and 3 samples, forward and backward, and 3 samples more, forward alone."""
    small = merge_settings(TINY, {"train": {"steps": 2, "batch_tokens": 200}, "tokenizer": {"vocab_size": 90}})
    where = {"data.root": str(data), "train.device": "cpu"}
    run = tmp_path / "first"
    config = make_config(merge_settings(translation_models.COMMON, small), where)
    train_config(config, run, quiet=True)
    reward = {"train.init_from": str(run), "train.objective": "reward", "train.reward.samples": 3}
    tuned = make_config({"data": translation_models.COMMON["data"]}, {**where, **reward, "train.batch_tokens": 200})
    job = prepare_job(tmp_path / "second", tuned, quiet=True)
    plain = prepare_job(tmp_path / "third", config, quiet=True)
    assert count_flops(job, 5) == [4 * n + n for n in count_flops(plain, 5)]


@pytest.mark.usefixtures("in_this_process")
def test_studies_side_by_side_share_what_they_train(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in WITH_RECIPES:
        monkeypatch.setitem(MODELS, name, TINY)
    tuned = merge_settings(TINY, {"train": {"objective": "reward", "label_smoothing": 0.0, "reward": {"samples": 2}}})
    for name in STARTS_FROM:
        monkeypatch.setitem(MODELS, name, {**tuned, "model": {"max_len": 128}})
    out = translation_cost.study(tmp_path / "cost", data, device="cpu", quick=True)
    results = json.loads((out / "results.json").read_text())
    assert list(results["rows"]) == ROWS
    found = results["rows"]["lstm"]
    assert (found["steps"], [point["step"] for point in found["curve"]]) == (4, [2, 4])
    assert found["curve"][0]["flops"] < found["curve"][1]["flops"] == found["flops"]
    assert found["seconds"] > 0 <= found["bleu_tokenized"]
    assert found == results["rows"]["convs2s"] | {"seconds": found["seconds"]}  # here all models are alike
    rows = results["rows"]
    assert rows["ensemble"]["flops"] == sum(rows[name]["flops"] for name in MEMBERS)
    assert rows["gnmt-ensemble"]["flops"] == sum(rows[name]["flops"] for name in SEEDS["gnmt-reward"])
    assert rows["gnmt-reward"]["flops"] > rows["gnmt"]["flops"]
    assert rows["mbr"]["flops"] == rows["transformer"]["flops"] < rows["reward"]["flops"]
    assert rows["ensemble"]["parameters"] == 3 * rows["mbr"]["parameters"]
    assert "| LSTM, one vector | " in (out / "table.md").read_text()
    assert (out / "translation-cost.png").read_bytes().startswith(b"\x89PNG")
    runs = tmp_path / "translators-quick"
    assert (runs / "lstm" / "model" / "model.safetensors").exists()
    assert not (runs / "lstm" / "checkpoints").exists()
    assert "done before" not in capsys.readouterr().err

    sentence_length.study(tmp_path / "length", data, device="cpu", quick=True)
    told = capsys.readouterr().err
    assert "done before, with the same settings: rnnsearch, transformer" in told
    assert "rnnenc: started" in told
    monkeypatch.setattr("regard.studies.job_pool.try_job", None)  # nothing can be started, nor translated again
    monkeypatch.setattr(translation_cost, "Translator", None)
    translation_cost.study(tmp_path / "cost", data, device="cpu", quick=True)
    assert json.loads((out / "results.json").read_text())["rows"] == results["rows"]


def test_chosen_systems_bring_what_they_are_made_of() -> None:
    assert translation_cost.with_parts(["mbr", "lstm"]) == {"mbr", "transformer", "lstm"}
    expected = {"gnmt-ensemble", *SEEDS["gnmt-reward"], *SEEDS["gnmt"]}
    assert translation_cost.with_parts(["gnmt-ensemble"]) == expected
    assert translation_cost.with_parts(ROWS) == set(ROWS)


def test_the_figure_shows_the_mean_over_seeds_and_losses_of_the_common_vocabulary() -> None:
    point = {"curve": [{"step": 1, "flops": 5, "loss": 3.0}, {"step": 2, "flops": 10, "loss": 2.0}], "flops": 10}
    names = (*SEEDS["convs2s"], "deep-att", "lstm")
    rows = {name: {**point, "bleu_tokenized": 40.0 + i} for i, name in enumerate(names)}
    left, right = translation_cost.plot_results(rows).axes
    _, labels = left.get_legend_handles_labels()
    assert [label.partition(":")[0] for label in labels] == ["ConvS2S", "Deep-Att + PosUnk", "LSTM, one vector"]
    assert labels[0].endswith(", 3 seeds")
    dots = [container.lines[0].get_ydata()[0] for container in left.containers]
    assert dots == pytest.approx([41.0, 43.0, 44.0])
    assert len(right.lines) == 2  # one seed of ConvS2S, and the LSTM
    assert [line.get_label() for line in right.lines] == ["ConvS2S", "LSTM, one vector"]


def test_the_figure_shows_later_seeds_without_the_first() -> None:
    point = {"curve": [{"step": 1, "flops": 5, "loss": 3.0}], "flops": 10, "bleu_tokenized": 40.0}
    for names, label in ((["gnmt-seed-1"], "GNMT, seed 1"), (["wide-2", "wide-3"], "Transformer, 256 wide, 2 seeds")):
        left, right = translation_cost.plot_results(dict.fromkeys(names, point)).axes
        assert left.get_legend_handles_labels()[1] == [label]
        assert len(right.lines) == 1


def test_what_a_result_is_of_is_its_settings_and_its_texts(data: Path, tmp_path: Path) -> None:
    job = plan_jobs(["transformer"], tmp_path / "out", data, 1, "cpu", False)[0]
    moved = write_multi30k(tmp_path)
    assert plan_jobs(["transformer"], tmp_path / "out", moved, 2, "cpu", False)[0].identity() == job.identity()
    assert plan_jobs(["transformer"], tmp_path / "out", data, 1, "cpu", True)[0].identity() != job.identity()
    (moved / "test_2017_flickr.de.xz").write_bytes((moved / "val.de.xz").read_bytes())
    assert plan_jobs(["transformer"], tmp_path / "out", moved, 1, "cpu", False)[0].identity() != job.identity()
    assert job.config().data.root == str(data)


def test_the_table_by_hand() -> None:
    setting = {"device": "H200", "torch": "2", "date": "2026-01-02T00", "command": "regard study x", "jobs": 2}
    found = {"parameters": 1234, "steps": 5000, "flops": 1.2345e16, "seconds": 61.6}
    found |= {"bleu_valid": 31.0, "bleu_tokenized": 30.126, "bleu_lower": 29.0}
    text = translation_cost.format_table({"rows": {"rnnsearch": found}, "setting": setting})
    assert "| RNNsearch: GRU and attention | 1,234 | 5,000 | 1.23e+16 | 62 | 31.00 | 30.13 | 29.00 |" in text
    assert "H200, 2 trainings at a time" in text


def test_bleu_is_that_of_single_sentences_of_the_test_set() -> None:
    pairs: list[tuple[str, ...]] = [
        ("Ein Hund läuft hier.", "A dog runs here."),
        ("Ja doch, so ist es.", "Yes, so it is."),
    ]
    said = {"test_2016_flickr": {"1": ["a DOG runs here .", "Yes, so it is."], "2": ["no"]}, "test_2017_flickr": {}}
    found = dict.fromkeys(translation_cost.KEPT, 1) | {"translations": said, "of": {}, "valid": ["no", "no"]}
    row = translation_cost.make_row(found, {"valid": pairs, "test": pairs})
    assert row["bleu_tokenized"] == pytest.approx(100)
    assert row["bleu_valid"] < 10


def test_data_that_is_not_there_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="there is no data folder"):
        translation_cost.study(tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(RegardError, match="unknown system 'gru': choose among lstm, rnnsearch"):
        translation_cost.study(tmp_path / "out", tmp_path, systems=["gru"])
    with pytest.raises(RegardError, match="at least 1 job"):
        translation_cost.study(tmp_path / "out", tmp_path, jobs=0)
