"""The tasks of the long-range study against their definitions, the sizes of its systems, its jobs, and its report."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from regard.cli.study_commands import study_app
from regard.config.recipes import changed_settings, load
from regard.errors import RegardError
from regard.models.analysis.cost import Cost
from regard.studies import long_range, long_range_jobs
from regard.studies.job_pool import load_result
from regard.studies.long_range import collect_results, cost_numbers, format_table, plan_jobs, study
from regard.studies.long_range_jobs import (
    COST,
    QUICK,
    SYSTEMS,
    TASKS,
    TITLES,
    LongRangeJob,
    LongRangeSettings,
    make_model_config,
    measure_costs,
    run_job,
    text_model_settings,
    text_sizes,
    train_and_test,
)
from regard.studies.long_range_tasks import ANSWER, BLANK, FIRST, Copying, Recall, Text, random_permutations
from regard.text.special_tokens import PAD

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- tasks ---------------------------------------------------------------------------------------------------------------


def test_random_permutations() -> None:
    found = random_permutations(50, 6, seeded())
    assert (found.sort(1).values == torch.arange(6)).all()
    assert len(found.unique(dim=0)) > 30


@pytest.mark.parametrize("scattered", [False, True])
def test_copying_asks_for_the_symbols_in_their_order(scattered: bool) -> None:
    inputs, labels = Copying(length=20, copied=5, symbols=7, scattered=scattered).batch(40, seeded())
    places = set()
    for x, y in zip(inputs.tolist(), labels.tolist(), strict=True):
        body = x[:15]
        symbols = [token for token in body if token != BLANK]
        assert len(symbols) == 5
        assert all(FIRST <= token < FIRST + 7 for token in symbols)
        assert x[15:] == [ANSWER] * 5
        assert y == [PAD] * 15 + symbols
        places.add(tuple(i for i, token in enumerate(body) if token != BLANK))
    assert len(places) > 10 if scattered else places == {(0, 1, 2, 3, 4)}


def test_recall_asks_for_the_values_of_random_keys() -> None:
    task = Recall(length=24, keys=9, pairs=(2, 4, 8))
    inputs, labels = task.batch(60, seeded())
    numbers, orders = set(), set()
    for x, y in zip(inputs.tolist(), labels.tolist(), strict=True):
        n = y.count(PAD) // 2
        assert y[: 2 * n] == [PAD] * (2 * n)
        numbers.add(n)
        orders.add(tuple(x[2 * n :]))
        pairs = dict(zip(x[: 2 * n : 2], x[1 : 2 * n : 2], strict=True))  # what stands in front
        assert len(pairs) == n
        assert all(FIRST <= key < FIRST + 9 <= value < task.vocab for key, value in pairs.items())
        assert y[2 * n :] == [pairs[key] for key in x[2 * n :]]
    assert numbers == {2, 4, 8}
    assert len(orders) == 60


def test_the_learning_rate_with_the_lower_loss_at_the_end_counts(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, steps=20, rates=(1e-9, 1e-2))
    found = train_and_test(job_of("copying", "attention", tmp_path, settings), CPU, torch.float32)
    assert found["lr"] == 1e-2
    assert found["losses"][-1] == found["last_losses"]["0.01"] < found["last_losses"]["1e-09"]


def test_the_lowest_validation_loss_of_a_character_model_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, losses = Text("".join(chr(97 + i % 26) for i in range(1000)), length=24), iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(long_range_jobs, "make_task", lambda job: text)
    monkeypatch.setattr(text, "measure", lambda *_: {"loss": next(losses)})
    settings = dataclasses.replace(QUICK, text_steps=5, text_every=2)
    found = train_and_test(job_of("text", "attention", tmp_path, settings), CPU, torch.float32)
    assert found["valid"] == {2: 3.0, 4: 1.0, 5: 2.0}
    assert (found["scores"], found["step"]) == ({"loss": 1.0}, 4)


class Unread:
    """A value that nothing can be done with."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("a setting was read that is not part of the identity")


@pytest.mark.parametrize("task", [*TASKS, COST])
@pytest.mark.parametrize("system", ["attention", "lstm", "mamba"])
def test_a_job_reads_no_settings_but_those_of_its_identity(task: str, system: str, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    job = LongRangeJob(task, system, QUICK, tmp_path, data, "hash")
    others = {field.name for field in dataclasses.fields(QUICK)} - set(job.identity()["settings"])
    assert others
    own = copy.copy(QUICK)
    for name in others:
        object.__setattr__(own, name, Unread())
    run_job(dataclasses.replace(job, settings=own))
    assert load_result(job)


def test_results_with_another_recipe_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, recall = job_of("text", "gla", tmp_path), job_of("recall", "gla", tmp_path)
    before = text.identity(), recall.identity()
    monkeypatch.setitem(long_range_jobs.RECIPE, "activation", "relu")
    assert text.identity() != before[0]
    assert recall.identity() == before[1]
    more = dataclasses.replace(QUICK, steps=QUICK.steps + 1)
    assert job_of("recall", "gla", tmp_path, more).identity() != before[1]
    assert job_of(COST, "gla", tmp_path, more).identity() == job_of(COST, "gla", tmp_path).identity()


@pytest.mark.parametrize("system", [*SYSTEMS])
def test_character_models_are_trained_by_the_recipe(system: str, tmp_path: Path) -> None:
    """The settings are those of the file; the systems differ from it in what makes them what they are."""
    s = LongRangeSettings()
    recipe = load("shakespeare-char")
    size = make_model_config(system, 68, s.text_width, text_sizes(s), s.length)
    config = changed_settings(size, **text_model_settings(job_of("text", system, tmp_path, s)))
    assert config.dropout == recipe["model"]["dropout"]
    if system == "lstm":
        assert [config.value(f"recurrent.{place}_dropout") for place in ("hidden", "output")] == [0.2, 0.2]
    elif system not in ("mamba", "mamba2"):
        names = [
            "activation",
            "bias",
            "scale_embeddings",
            *(["attention_dropout"] if system in ("attention", "based") else []),
        ]
        assert {name: getattr(config, name) for name in names} == {name: recipe["model"][name] for name in names}
    training = {"lr": s.text_rate, **long_range_jobs.TRAINING}
    assert training == {name: recipe["train"][name] for name in training}
    assert s.text_batch * s.length == recipe["train"]["batch_tokens"]


def test_texts_are_cut_in_two_and_labels_are_the_next_characters() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    task = Text(text, length=10)
    assert (len(task.train), len(task.valid)) == (900, 100)
    inputs, labels = task.batch(5, seeded())
    assert inputs.shape == labels.shape == (5, 10)
    assert ((labels - inputs) % 26 == 1).all()
    with pytest.raises(RegardError, match="at least 110"):
        Text("short text", length=10)


class Oracle(nn.Module):
    """A model that finds the answers of associative recall in its input, but only in the first rows of a batch."""

    def __init__(self, vocab: int, right: int) -> None:
        super().__init__()
        self.vocab, self.right = vocab, right

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, self.vocab)
        for row in ids[: self.right]:
            i = int((ids == row).all(1).nonzero()[0])
            seen: dict[int, int] = {}
            for t, token in enumerate(row.tolist()):
                if token in seen:
                    logits[i, t, seen[token]] = 1
                elif t % 2 == 0 and t + 1 < len(row):
                    seen[token] = int(row[t + 1])
        return logits


def test_accuracy_is_the_share_of_right_values() -> None:
    task = Recall(length=24, keys=9, pairs=(2, 4))
    assert task.measure(Oracle(task.vocab, 8), 8, seeded()) == {"2": 1.0, "4": 1.0}
    assert task.measure(Oracle(task.vocab, 6), 8, seeded()) == {"2": 0.75, "4": 0.75}


# ---- systems -------------------------------------------------------------------------------------------------------------


def test_every_system_has_a_title_and_nearly_equal_parameters() -> None:
    assert set(SYSTEMS) == set(TITLES)
    for s, vocab in ((LongRangeSettings(), 259), (text_sizes(LongRangeSettings()), 68)):
        sizes = {name: Cost(make_model_config(name, vocab, s.width, s, s.length)).parameters for name in SYSTEMS}
        assert {"attention", "lstm", "s4", "s4d"} <= set(sizes)
        for name, size in sizes.items():
            assert abs(size / sizes["mamba"] - 1) < 0.03, (name, size)


def job_of(task: str, system: str, folder: Path, settings: LongRangeSettings = QUICK) -> LongRangeJob:
    return LongRangeJob(task, system, settings, folder)


def test_lengths_that_do_not_fit_or_take_too_long_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(QUICK, cost_lengths=(8, 16, 32, 64))

    def training(model: Any, n: int, *_: Any) -> dict[str, float]:
        if n == 32:
            raise torch.OutOfMemoryError("too long")
        return {"seconds": n, "bytes": 3 * n, "rows": 1, "pass_seconds": 0.0}

    def decoding(model: Any, n: int, *_: Any) -> dict[str, float]:
        return {"seconds": n, "bytes": 8 * n, "rows": 2, "pass_seconds": 0.2 * n}

    monkeypatch.setattr(long_range_jobs, "measure_training", training)
    monkeypatch.setattr(long_range_jobs, "measure_decoding", decoding)
    found = measure_costs(job_of(COST, "attention", tmp_path, settings), CPU, torch.float32)
    results = {COST: {"attention": found}}
    assert [row.get("left_out") for row in found["training"]] == [None, None, "memory", "memory"]
    assert [row.get("left_out") for row in found["decoding"]] == [None, None, "time", "time"]  # twice 3.2 s is over 5 s
    assert cost_numbers(results, "attention", "training", "bytes")[:2] == [24, 48]
    assert cost_numbers(results, "attention", "decoding", "bytes")[:2] == [32, 64]  # of one of two texts
    assert all(math.isnan(x) for x in cost_numbers(results, "attention", "decoding", "bytes")[2:])


# ---- study ---------------------------------------------------------------------------------------------------------------


def test_the_command_writes_table_numbers_and_pictures_and_resumes(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    out = tmp_path / "study"
    words = ["long-range", "--quick", "--device", "cpu", "--systems", "attention,s4d"]
    words += ["--data", str(data), "--output", str(out)]
    ran = CliRunner().invoke(study_app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    assert ran.stdout.strip() == (out / "table.md").read_text().strip()
    for picture in ("recall", "cost"):
        assert (out / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert [*results[COST]] == ["attention", "s4d"]
    assert all([*results[task]] == ["attention", "s4d"] for task in TASKS)
    assert [*results["recall"]["s4d"]["scores"]] == ["2", "4"]
    for row in results[COST]["s4d"]["decoding"]:
        assert row["bytes"] == QUICK.cost_rows * QUICK.layers * QUICK.cost_width * 64 * 4  # it does not grow
    cache = [row["bytes"] for row in results[COST]["attention"]["decoding"]]
    assert cache[1] > cache[0]

    done: list[str] = []
    monkeypatch.setattr(long_range, "run_job", lambda job: done.append(job.name))
    monkeypatch.setattr(long_range, "plot_results", lambda results: {})
    (out / "jobs" / "recall-s4d.json").unlink()
    study(out, data, ["attention", "s4d"], quick=True, device="cpu")
    assert done == ["recall-s4d"]


def test_reports_without_text_and_with_failures(tmp_path: Path) -> None:
    todo = plan_jobs(tmp_path, None, QUICK, ["attention", "s4d"], "cpu", 2)
    assert {job.task for job in todo} == {*TASKS[:3], COST}
    results = collect_results(todo, [])
    assert all(not results[task] for task in (*TASKS[:3], COST))
    costs = [{"length": 32, "seconds": 1.2345, "bytes": 10**6, "rows": 2}, {"length": 64, "left_out": "time"}]
    results[COST]["s4d"] = {"training": costs, "decoding": costs}
    results["recall"]["s4d"] = {"parameters": 1234, "scores": {"2": 0.5, "4": 0.25}}
    settings = dataclasses.asdict(QUICK)
    results["setting"] = {"settings": settings, "device": "x", "torch": "y", "date": "2026-01-01", "command": "regard"}
    table = format_table(results)
    assert "| S4D | 1,234 |  |  | 50.0 | 25.0 |" in table
    assert "| S4D | 1,234 | \u2013 |" in table
    assert "| S4D | 0.5 | \u2013 |" in table
    assert "nats |" not in table


def test_a_task_alone(tmp_path: Path) -> None:
    study(tmp_path, systems=["attention"], tasks=["recall"], device="cpu", quick=True)
    assert [path.name for path in (tmp_path / "jobs").glob("*.json")] == ["recall-attention.json"]
    assert (tmp_path / "recall.png").exists()
    assert "training step" not in (tmp_path / "table.md").read_text().split("Accuracy")[0]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="unknown system 'elman': choose among attention"):
        study(tmp_path, systems=["elman"], device="cpu", quick=True)
    with pytest.raises(RegardError, match="unknown task 'sorting': choose among copying"):
        study(tmp_path, tasks=["sorting"], device="cpu", quick=True)
    with pytest.raises(RegardError, match="--data FILE"):
        study(tmp_path, tasks=["text"], device="cpu", quick=True)
    with pytest.raises(RegardError, match="at least 1 job"):
        study(tmp_path, jobs=0, device="cpu", quick=True)
