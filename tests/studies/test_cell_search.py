"""The search for cells: its tasks, mutations, stacked trainings, and a tiny search that is stopped and continued."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from typer.testing import CliRunner

from regard.cli.study_commands import study_app
from regard.config.registry import PARTS
from regard.errors import RegardError
from regard.files import read_json
from regard.layers.expression_cell import GRU_TEXT, Expression, parse, to_python, to_text
from regard.models.initialization import initialize
from regard.studies import cell_search, job_pool, stacked_training
from regard.studies.cell_mutation import is_sensible, mutate
from regard.studies.cell_search import GRU, LSTM, QUICK, CellSearch, SearchSizes, evaluate, study
from regard.studies.cell_search_report import compare, format_table, judge
from regard.studies.cell_tasks import LENGTH, LETTERS, PAD, TASKS, VOCABULARY, make_examples
from regard.studies.stacked_training import StackedAdam, TinyModel, TrainingSizes, Trial, choose_width, train_stacked


def letters(row: np.ndarray) -> str:
    return "".join(LETTERS[i - 1] for i in row if i != PAD)


def scored(task: str, i: int) -> tuple[str, str]:
    """Return a sequence of a task, and its scored letters."""
    made = make_examples(task, 64, 0)
    return letters(made.ids[i]), letters(made.ids[i, 1:][made.scored[i]])


# ---- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*TASKS, "text"])
def test_examples_are_always_the_same_and_fit(task: str) -> None:
    made = make_examples(task, 64, 0)
    make_examples.cache_clear()
    again, other = make_examples(task, 64, 0), make_examples(task, 64, 1)
    assert made.ids.shape == (64, LENGTH + 1)
    assert made.scored.shape == (64, LENGTH)
    assert np.array_equal(made.ids, again.ids)
    assert not np.array_equal(made.ids, other.ids)
    assert made.ids.max() < VOCABULARY
    assert made.scored.any(1).mean() > 0.8
    assert not (made.scored & (made.ids[:, 1:] == PAD)).any()


def test_what_is_scored_follows_from_what_was_read() -> None:
    for i in range(64):
        text, answer = scored("memory", i)
        assert (text[:8], text[8]) == (answer, "|")
        text, answer = scored("repeat", i)
        assert text == f"{answer}|{answer}"
        text, answer = scored("reverse", i)
        assert text[:8] == answer[::-1]
        text, answer = scored("arithmetic", i)
        first, second = text[:5].split("+")
        assert int(answer[:3][::-1]) == int(first[::-1]) + int(second[::-1])
        text, answer = scored("brackets", i)
        opened, expected = [], ""
        for tag in text.split("<")[1:]:
            if tag.startswith("/"):
                expected += (opened.pop() + ">")[: len(tag) - 1]
            elif tag.endswith(">"):
                opened.append(tag.strip("<>"))
        assert answer == expected


def test_training_and_test_windows_of_a_text_do_not_overlap(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 1200 + "xyz" * 133 + "x")  # the last tenth of 4,000 letters
    training, test = make_examples("text", 50, 0, text), make_examples("text", 50, 1, text)
    assert len({*training.ids.flatten()}) == len({*test.ids.flatten()}) == 3
    assert not {*training.ids.flatten()} & {*test.ids.flatten()}


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc")
    with pytest.raises(RegardError, match="at least 1,600"):
        make_examples("text", 50, 0, text)


# ---- mutations -------------------------------------------------------------------------------------------------------


def test_mutations_are_cells_that_differ_and_are_the_same_for_a_seed() -> None:
    chains = []
    for _ in range(2):
        rng, graph, chain = random.Random(1), parse(GRU_TEXT), []
        for _ in range(100):
            new = mutate(graph, rng)
            assert new != graph
            assert is_sensible(new)
            assert parse(to_text(new)) == new
            graph = new if rng.random() < 0.3 else parse(rng.choice((GRU, LSTM)))
            chain.append(to_text(new))
        chains.append(chain)
    assert chains[0] == chains[1]
    assert len({*chains[0]}) > 80
    every = " ".join(chains[0])
    assert all(word in every for word in ("relu", "x)", "- ", "W(x, ", ", 0.9)"))


@pytest.mark.parametrize(
    ("text", "sensible"),
    [
        (GRU_TEXT, True),
        ("h = tanh(W(x) + U(h))", True),
        ("c = tanh(W(x) + U(c)); h = tanh(W(x) + U(h))", False),  # nothing reads c
        ("h, c = tanh(W(x) + U(h) + c), h * 0.9", False),  # the input does not reach c in one step
    ],
)
def test_states_that_do_nothing_are_refused(text: str, sensible: bool) -> None:
    assert is_sensible(parse(text)) == sensible


# ---- stacked trainings -----------------------------------------------------------------------------------------------

SMALL = TrainingSizes(width=6, embedding=5, steps=3, batch=4, training_examples=32, test_examples=16)


@pytest.mark.parametrize("cell", ["gru", "lstm-peephole", "nas", "mut1"])
def test_models_that_are_trained_at_once_learn_what_each_learns_alone(cell: str) -> None:
    trials = [Trial(task, lr, seed) for task in ("memory", "text") for lr, seed in ((0.01, 0), (0.1, 1))]
    together = train_stacked(cell, None, 6, trials, SMALL)
    alone = [train_stacked(cell, None, 6, [trial], SMALL)[0] for trial in trials]
    assert together == pytest.approx(alone, abs=1e-6)


def test_steps_of_a_stacked_model_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam and clipping against torch's own. Its epsilon stands at another place, so it is almost 0 here."""
    monkeypatch.setattr(stacked_training, "EPSILON", 1e-14)
    model = TinyModel("gru", None, 6, 5)
    initialize(model, 3)
    names = [name for name, _ in model.named_parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])[None].double()
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-14)
    mine = StackedAdam(flat.clone())
    ids = torch.from_numpy(make_examples("memory", 8, 0).ids)
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(5 * model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])[None]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mine.update(gradient, torch.tensor([[0.02]], dtype=torch.float64))
        parts = mine.values[0].split([p.numel() for p in model.parameters()])
        for part, p in zip(parts, model.parameters(), strict=True):
            torch.testing.assert_close(
                part.view_as(p), p.detach(), rtol=1e-3, atol=1e-4
            )  # torch clips to 1 / (1 + 1e-6)
    values = dict(zip(names, (p.detach() for p in model.parameters()), strict=True))
    torch.testing.assert_close(functional_call(model, values, (ids[:, :-1],)), model(ids[:, :-1]))


def test_widths_make_parameters_equal() -> None:
    sizes = TrainingSizes()
    counts = {}
    for cell in PARTS["cell"]:
        width = choose_width(cell, None, sizes)
        counts[cell] = sum(p.numel() for p in TinyModel(cell, None, width, sizes.embedding).parameters())
    assert choose_width("gru", None, sizes) == choose_width("expression", Expression.Settings(GRU), sizes) == 32
    assert max(counts.values()) < 1.06 * counts["gru"]
    assert min(counts.values()) > 0.94 * counts["gru"]


def test_a_model_that_diverges_scores_zero() -> None:
    trials = [Trial("memory", lr, 0) for lr in (math.inf, 0.01)]
    found = train_stacked("rnn", None, 6, trials, SMALL)
    assert found[0] == 0
    assert found[1] > 0


# ---- the search ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> None:
    """A search of few and tiny trainings in this process."""
    sizes = SearchSizes(SMALL, first_steps=2, first_accuracy=0.0, seeds=2, round=3, finalists=2, rounds=2)
    monkeypatch.setattr(cell_search, "cpu_cores", lambda: 2)
    monkeypatch.setattr(cell_search, "QUICK", sizes)


def test_a_search_that_was_stopped_finds_what_one_without_a_stop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    whole = read_json(study(tmp_path / "whole", quick=True) / "results.json")
    count, run = 0, job_pool.JobPool.run

    def stop_at_ten(pool: job_pool.JobPool, *args: Any) -> Iterator[job_pool.Outcome]:
        nonlocal count
        for outcome in run(pool, *args):
            count += 1
            if count == 10:
                raise KeyboardInterrupt
            yield outcome

    with monkeypatch.context() as patch:
        patch.setattr(job_pool.JobPool, "run", stop_at_ten)
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path / "parts", quick=True)
    assert len([*(tmp_path / "parts" / "evaluations").glob("*.json")]) == 10
    done: list[str] = []
    monkeypatch.setattr(cell_search, "evaluate", lambda job: done.append(job.name) or evaluate(job))
    parts = read_json(study(tmp_path / "parts", quick=True) / "results.json")
    assert len(done) == len([*(tmp_path / "whole" / "evaluations").glob("*.json")]) - 10
    for name in ("graph", "accuracies", "pool", "scores", "cells"):
        assert parts[name] == whole[name]


def test_the_command_writes_everything(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["cell-search", "--quick", "--jobs", "1", "--output", str(tmp_path)]
    ran = CliRunner().invoke(study_app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    assert ran.stdout.strip() == (tmp_path / "table.md").read_text().strip()
    assert (tmp_path / "cell-search.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["graph"] not in (GRU, LSTM)
    assert set(results["accuracies"]) == {"GRU", "LSTM", "found"}
    assert all(len(values) == 2 for values in results["accuracies"]["found"].values())
    parse(results["graph"])
    try:
        exec((tmp_path / "found_cell.py").read_text(), {})
        assert PARTS["cell"]["found"].hidden == parse(results["graph"]).shape.hidden
    finally:
        PARTS["cell"].pop("found", None)
    assert f'graph = "{results["graph"]}"' in (tmp_path / "found-cell.toml").read_text()


def test_the_score_is_the_worst_task_in_units_of_the_gru(tmp_path: Path) -> None:
    search = CellSearch(job_pool.JobPool(evaluate, 1), QUICK, 0, None, tmp_path, 1)
    good = {"memory": 0.5, "arithmetic": 0.5, "brackets": 0.5, "text": 0.5}
    search.found = {GRU: [good], "a": [good | {"text": 0.4}, good | {"text": 0.5}], "b": [good | {"memory": 0.6}]}
    assert search.score("a") == pytest.approx(0.9)
    assert search.score("b") == 1
    assert search.ranking()[-1] == "a"


def test_a_finalist_that_fails_the_first_task_with_a_new_seed_does_not_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = CellSearch(job_pool.JobPool(evaluate, 1), QUICK, 0, None, tmp_path, 1)
    good = dict.fromkeys(cell_search.TASKS, 0.5)
    search.found = {GRU: [good], "lucky": [dict.fromkeys(good, 0.9)], "steady": [dict.fromkeys(good, 0.6)]}
    result = {"accuracies": {task: [0.5] for task in good}}
    monkeypatch.setattr(
        search,
        "evaluate",
        lambda wanted, tasks: [{"accuracies": {}} if text == "lucky" else result for text, _ in wanted],
    )
    assert search.finish() == "steady"
    search.refused.add("steady")
    search.found.pop("lucky")
    with pytest.raises(RegardError, match="no new cell"):
        search.finish()


def test_a_comparison_leaves_out_no_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed with which a cell did not learn the first task counts as 0."""
    search = CellSearch(job_pool.JobPool(evaluate, 1), QUICK, 0, None, tmp_path, 1)
    learned = {"accuracies": {key: [0.2, 0.5, 0.5, 0.1] for key in (*cell_search.TASKS, "reverse")}}
    monkeypatch.setattr(search, "evaluate", lambda wanted, tasks: [learned, learned, {"accuracies": {}}])
    accuracies, rates = search.compare(GRU)
    assert accuracies["GRU"]["reverse"] == [0.5]
    assert accuracies["found"]["reverse"] == [0.0]
    assert rates["GRU"]["text"] == [0.03]
    assert rates["found"]["text"] == []


def test_a_failed_evaluation_stops_the_search_and_the_same_command_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    whole = read_json(study(tmp_path / "whole", quick=True) / "results.json")
    count = 0

    def fail_at_ten(job: cell_search.CellJob) -> None:
        nonlocal count
        count += 1
        if count == 10:
            raise OSError(28, "No space left on device")
        evaluate(job)

    with monkeypatch.context() as patch:
        patch.setattr(cell_search, "evaluate", fail_at_ten)
        with pytest.raises(
            RegardError, match=r'1 of . evaluations failed.*cell ".*h.* = .*" with seed .*No space left'
        ):
            study(tmp_path / "parts", quick=True)
    assert len([*(tmp_path / "parts" / "evaluations").glob("*.error")]) == 1
    parts = read_json(study(tmp_path / "parts", quick=True) / "results.json")
    assert not [*(tmp_path / "parts" / "evaluations").glob("*.error")]
    for name in ("graph", "accuracies", "pool", "scores", "cells"):
        assert parts[name] == whole[name]
    assert 0 < parts["evaluations_run_now"] < whole["evaluations_run_now"]
    assert "evaluations were there from an earlier run" in (tmp_path / "parts" / "table.md").read_text()
    assert "from an earlier run" not in (tmp_path / "whole" / "table.md").read_text()


def test_a_text_that_is_too_short_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("123456789")
    monkeypatch.setattr(cell_search, "JobPool", None)
    with pytest.raises(RegardError, match="the text has 9 characters: give one of at least 1,600"):
        study(tmp_path / "out", data=text)
    assert not (tmp_path / "out").exists()


def test_time_of_jobs_is_that_of_processes_that_take_the_next_job_when_they_are_free() -> None:
    assert cell_search.time_of_jobs([1, 2, 3], 1) == 6
    assert cell_search.time_of_jobs([3, 1, 1, 1, 3], 2) == 6  # 3 + 3 beside 1 + 1 + 1
    assert cell_search.time_of_jobs([3, 1, 2], 100) == 3


@pytest.mark.parametrize("at_once", [1, 2, 8, 100])
def test_a_search_keeps_its_time_with_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Evaluations take a minute by a simulated clock. A round has eight of them, so that 100 processes gain no more than
    eight do; the whole search ends in time, and leaves less than one round of it unused."""
    now, ran = 0.0, 0

    def run(pool: job_pool.JobPool, jobs: dict[str, Any], started: Any) -> Iterator[job_pool.Outcome]:
        nonlocal now, ran
        for job in jobs.values():
            accuracies = {task: [0.5] for task in job.tasks}
            seconds = 60.0 if len(job.tasks) == 4 else 75.0
            result = {"of": job.identity(), "accuracies": accuracies, "seconds": seconds}
            job.result.parent.mkdir(exist_ok=True)
            job.result.write_text(json.dumps(result))
            yield job_pool.Outcome(job.name, seconds)
        now += math.ceil(len(jobs) / at_once) * seconds
        ran += len(jobs)

    monkeypatch.setattr(job_pool.JobPool, "run", run)
    monkeypatch.setattr(cell_search.time, "perf_counter", lambda: now)
    monkeypatch.setattr(cell_search, "best_rate", lambda lrs, accuracies: lrs[0])
    monkeypatch.setattr(cell_search, "cpu_cores", lambda: 200)
    search = CellSearch(job_pool.JobPool(evaluate, at_once), SearchSizes(), 0, None, tmp_path / "evaluations", at_once)
    search.run(100)
    search.compare(search.finish())
    assert search.run_here == ran
    assert search.seconds == pytest.approx(now)
    round_and_a_bit = math.ceil(8 / at_once) * 60 + 20
    assert 100 * 60 - round_and_a_bit < now <= 100 * 60


def test_no_more_processes_start_than_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StopError(Exception): ...

    def refuse(work: Any, at_once: int) -> None:
        raise StopError(at_once)

    monkeypatch.setattr(cell_search, "JobPool", refuse)
    for jobs, cores, expected in ((64, 2, 2), (64, 128, 15), (3, 128, 3), (1, 2, 1)):
        monkeypatch.setattr(cell_search, "cpu_cores", lambda cores=cores: cores)
        with pytest.raises(StopError, match=f"^{expected}$"):
            study(tmp_path, jobs=jobs)


def test_a_number_of_rounds_is_exact_and_no_time_limits_it(tmp_path: Path, small: None) -> None:
    words = ["cell-search", "--quick", "--jobs", "1", "--rounds", "3", "--minutes", "0", "--output", str(tmp_path)]
    assert CliRunner().invoke(study_app, words, catch_exceptions=False).exit_code == 0
    results = read_json(tmp_path / "results.json")
    assert results["rounds"] == results["sizes"]["rounds"] == 3
    assert results["evaluations"] in (2 * 2 + 3 * 3 + finals * 2 for finals in (2, 3))  # GRU and LSTM, rounds, finals
    assert "in 3 rounds" in (tmp_path / "table.md").read_text()


def test_the_report_says_where_the_cell_is_worse() -> None:
    accuracies = {cell: {"memory": [0.5, 0.7], "reverse": [0.4, 0.6]} for cell in ("GRU", "LSTM", "found")}
    results = {"accuracies": accuracies, "held_out": "reverse"}
    assert "at least as good as the GRU on all tasks" in judge(results)
    accuracies["found"]["reverse"] = [0.3, 0.5]
    assert compare(results) == {"memory": 1, "reverse": pytest.approx(0.8)}
    assert "worse than the GRU on 1 of 2 tasks: reverse (0.800)" in judge(results)


def test_the_committed_numbers_belong_to_the_committed_report() -> None:
    path = Path(__file__).parents[2] / "docs" / "studies" / "cell-search.json"
    results = read_json(path)
    page = (path.parents[1] / "lectures" / "found-cells.md").read_text()
    judgement, table, note, *_ = format_table(results).split("\n\n")
    for part in (judgement, table, note, results["graph"].replace("; ", "\n"), to_python(parse(results["graph"]))[60:]):
        assert part in page
    assert is_sensible(parse(results["graph"]))
    assert min(compare(results).values()) >= 1  # at least as good as the GRU on every task, as the page says
    assert SearchSizes().lrs == tuple(results["sizes"]["lrs"])
    rates = [lr for tasks in results["best_lrs"].values() for each in tasks.values() for lr in each]
    assert sum(lr == max(SearchSizes().lrs) for lr in rates) < 0.1 * len(rates)
