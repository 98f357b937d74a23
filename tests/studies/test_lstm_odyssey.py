"""The comparison of LSTM variants: its test of significance, and a tiny study from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from regard.cli.study_commands import study_app
from regard.files import read_json
from regard.layers.lstm_variants import VARIANTS
from regard.studies import lstm_odyssey
from regard.studies.lstm_odyssey import TASKS, OdysseySizes, format_table, mann_whitney
from regard.studies.stacked_training import TrainingSizes, best_rate, name_largest_rates


def test_the_p_value_is_that_of_the_published_table() -> None:
    """Exact two-sided values for two groups of five: U = 0, 1, 2 and 3 have p = 2, 4, 8 and 14 of 252."""
    low = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert mann_whitney(low, [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert mann_whitney([1, 2, 3, 4, 6], [5, 7, 8, 9, 10]) == pytest.approx(4 / 252)
    assert mann_whitney([1, 2, 3, 5, 6], [4, 7, 8, 9, 10]) == pytest.approx(8 / 252)
    assert mann_whitney([1, 2, 4, 5, 6], [3, 7, 8, 9, 10]) == pytest.approx(14 / 252)
    assert mann_whitney(low, low) == 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=5), st.lists(st.integers(0, 5), min_size=2, max_size=5))
def test_the_test_does_not_depend_on_order_scale_or_which_group_is_first(a: list[int], b: list[int]) -> None:
    p = mann_whitney(a, b)
    assert 0 < p <= 1
    assert mann_whitney(b, a) == pytest.approx(p)
    assert mann_whitney([3 * x for x in sorted(a)], [3 * x for x in b]) == pytest.approx(p)


def test_the_command_writes_table_numbers_and_picture_and_keeps_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    tiny = TrainingSizes(width=3, embedding=3, steps=1, batch=2, training_examples=8, test_examples=4)
    monkeypatch.setattr(lstm_odyssey, "QUICK", OdysseySizes(tiny, seeds=2))
    monkeypatch.setattr(lstm_odyssey, "cpu_cores", lambda: 2)
    words = ["lstm-odyssey", "--quick", "--jobs", "8", "--output", str(tmp_path)]
    ran = CliRunner().invoke(study_app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    assert ran.stdout.strip().endswith((tmp_path / "table.md").read_text().strip())
    assert (tmp_path / "lstm-odyssey.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["jobs"] == 2  # as many as ran, one a core
    assert list(results["accuracies"]) == list(VARIANTS)
    assert all(len(values) == 2 for row in results["accuracies"].values() for values in row.values())
    parameters = results["parameters"]
    assert parameters["vanilla"] - parameters["no-peepholes"] == 3 * 3
    assert parameters["gate-recurrence"] - parameters["vanilla"] == 9 * 3 * 3
    assert parameters["vanilla"] - parameters["coupled"] == 3 * 3 + 3 * 3 + 3 + 3  # W, U, b, p of one gate
    monkeypatch.setattr(lstm_odyssey, "train_stacked", None)  # nothing is trained again
    again = CliRunner().invoke(study_app, words, catch_exceptions=False)
    assert "done before" in again.output
    assert read_json(tmp_path / "results.json")["accuracies"] == results["accuracies"]


def test_a_variant_that_differs_is_bold() -> None:
    accuracies = {variant: {task: [0.5, 0.51, 0.52, 0.53, 0.54] for task in TASKS} for variant in VARIANTS}
    accuracies["no-forget-gate"]["text"] = [0.1, 0.11, 0.12, 0.13, 0.14]
    accuracies["coupled"]["text"] = [0.6, 0.61, 0.62, 0.63, 0.64]
    results = {
        "accuracies": accuracies,
        "p": {
            variant: {task: mann_whitney(row[task], accuracies["vanilla"][task]) for task in TASKS}
            for variant, row in accuracies.items()
            if variant != "vanilla"
        },
        "parameters": dict.fromkeys(VARIANTS, 1000),
        "sizes": {"seeds": 5, "lrs": [0.01, 0.03], "training": {"width": 32, "steps": 300}},
        "setting": {"torch": "2.11", "date": "2026-11-18", "command": "regard study lstm-odyssey"},
        "seconds": 60.0,
        "jobs": 2,
        "best_lrs": {task: [0.03] * 22 + [0.01] * 23 for task in TASKS},
    }
    table = format_table(results)
    assert "| no-forget-gate | NFG | 1,000 | 0.520 | 0.520 | **0.120** | 0 | 1 |" in table
    assert "| coupled | CIFG | 1,000 | 0.520 | 0.520 | **0.620** | 1 | 0 |" in table
    assert table.count("**") == 4
    assert "was the best for 66 of 135 seeds, and for most seeds of no task" in table


def test_the_note_says_where_the_largest_learning_rate_won() -> None:
    """With the rates that the study had first, 0.01 and 0.03, all 45 seeds of the text chose the larger one."""
    rates = {"brackets": [0.01] * 30 + [0.03] * 15, "text": [0.03] * 45}
    assert "0.03, was the best for most seeds of these tasks: text (45 of 45)." in name_largest_rates(
        (0.01, 0.03), rates
    )
    assert best_rate((0.01, 0.03, 0.1), (0.5, 0.7, 0.7)) == 0.03


def test_the_committed_numbers_belong_to_the_page_and_the_largest_rate_is_rarely_the_best() -> None:
    path = Path(__file__).parents[2] / "docs" / "studies" / "lstm-odyssey.json"
    results = read_json(path)
    page = (path.parents[1] / "lectures" / "found-cells.md").read_text()
    table, note, _ = format_table(results).split("\n\n", 2)
    assert table in page
    assert note in page
    assert OdysseySizes().lrs == tuple(results["sizes"]["lrs"])
    largest, all_best = max(OdysseySizes().lrs), [lr for rates in results["best_lrs"].values() for lr in rates]
    assert sum(lr == largest for lr in all_best) < 0.1 * len(all_best)
    for variant, tasks in results["accuracies"].items():  # the best rates are those of the trainings
        for task, accuracies in tasks.items():
            assert accuracies == [max(seed) for seed in results["all"][f"{variant} {task}"]]
