"""Training curves: the figure shows what metrics.jsonl holds, for one run or several, finished or not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from regard.cli.look_commands import look_app
from regard.errors import RegardError
from regard.look.figures import Lines, XYLines, draw
from regard.look.training_curves import TrainingCurves, read_training_curves

STEPS = [(10, 5.0, 1e-3, 2.0), (20, 4.0, 2e-3, 1.5), (30, 3.5, 1e-3, 9.0)]


def write(folder: Path, shift: float = 0.0, scores: dict[str, float] | None = None, more: str = "") -> Path:
    """Three lines of training and two of validation."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {
            "kind": "train",
            "step": step,
            "loss": loss + shift,
            "nll": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": 100.0,
        }
        for step, loss, lr, norm in STEPS
    ]
    own = {"perplexity": 20.0, "bleu": 10.0} if scores is None else scores
    lines += [{"kind": "valid", "step": step, "loss": loss + shift, **own} for step, loss in ((15, 3.0), (30, 3.2))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + more, encoding="utf-8")
    return folder


def by_title(found: TrainingCurves) -> dict[str, XYLines]:
    return {panel.title: panel for panel in found.panels()}


def test_the_curves_are_what_the_run_wrote(tmp_path: Path) -> None:
    panels = by_title(read_training_curves([write(tmp_path / "run")]))
    assert list(panels) == [
        "loss",
        "validation: perplexity",
        "validation: bleu",
        "learning rate",
        "norm of the gradient, before clipping",
        "speed",
    ]
    loss = panels["loss"].curves
    assert {name: [x.tolist(), y.tolist()] for name, (x, y) in loss.items()} == {
        "training": [[10, 20, 30], [5.0, 4.0, 3.5]],
        "validation": [[15, 30], [3.0, 3.2]],
    }
    assert panels["learning rate"].curves["run"][1].tolist() == [1e-3, 2e-3, 1e-3]
    assert panels["validation: bleu"].curves["run"][1].tolist() == [10, 10]


def test_several_runs_are_in_one_picture_under_their_names(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a" / "first"), write(tmp_path / "second", 1.0, {"accuracy": 0.5})]
    panels = by_title(read_training_curves(runs))
    assert list(panels["loss"].curves) == [
        "first, training",
        "first, validation",
        "second, training",
        "second, validation",
    ]
    assert list(panels["validation: accuracy"].curves) == ["second"]
    assert list(panels["speed"].curves) == ["first", "second"]
    twins = [tmp_path / "a" / "first", write(tmp_path / "b" / "first")]
    assert [run.name for run in read_training_curves(twins).runs] == [str(path) for path in twins]


def test_a_line_that_a_killed_run_left_half_written_and_values_that_are_no_numbers_are_passed_over(
    tmp_path: Path,
) -> None:
    broken = '{"kind": "train", "step": 40, "loss": NaN}\n[1]\n{"kind": "train", "st'
    (loss, *_) = read_training_curves([write(tmp_path / "run", more=broken)]).panels()
    assert loss.curves["training"][0].tolist() == [10, 20, 30]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no metrics\.jsonl in .*runs/toy-en-de"):
        read_training_curves([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RegardError, match="has no line yet"):
        read_training_curves([tmp_path])


def test_a_run_without_a_number_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    line = '{"kind": "train", "step": 10, "loss": NaN, "lr": null}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(RegardError, match=r"no number in the metrics\.jsonl of run yet"):
        read_training_curves([tmp_path / "run"])
    assert read_training_curves([tmp_path / "run", write(tmp_path / "other")]).panels()


def test_a_run_in_short(tmp_path: Path) -> None:
    found = read_training_curves([write(tmp_path / "run"), write(tmp_path / "none", scores={})])
    assert found.runs[0].summary() == {
        "run": "run",
        "steps": 30,
        "training loss": 3.5,
        "best validation loss": 3.0,
        "at step": 15,
        "tokens/s (median)": 100.0,
    }
    assert str(found).splitlines()[1].split() == ["run", "30", "3.5", "3", "15", "100"]


# ---- the drawing -----------------------------------------------------------------------------------------------------


def test_axes_hold_the_curves_their_names_and_scales(tmp_path: Path) -> None:
    found = read_training_curves([write(tmp_path / "one"), write(tmp_path / "_two_$x$")])
    figure = found.figure()
    axes = {one.get_title(): one for one in figure.axes}
    loss = axes["loss"]
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("step", "loss")
    np.testing.assert_array_equal(loss.lines[1].get_xdata(), [15, 30])
    names = [text.get_text() for text in loss.get_legend().get_texts()]
    assert names == ["one, training", "one, validation", "two_$x$, training", "two_$x$, validation"]
    assert len({(line.get_color(), line.get_linestyle()) for line in loss.lines}) == 4
    assert axes["norm of the gradient, before clipping"].get_yscale() == "log"
    assert axes["speed"].get_yscale() == "linear"
    assert figure.get_suptitle() == "one, _two_$x$"
    assert found._repr_png_()[:4] == b"\x89PNG"


def test_a_logarithmic_curve_leaves_out_what_is_not_above_zero() -> None:
    panel = XYLines("t", {"a": (np.arange(3), np.array([1.0, 0.0, 4.0]))}, "x", "y", log=True)
    (axes,) = draw("", [panel], 1).axes
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [1, math.nan, 4])
    assert axes.get_yscale() == "log"
    nothing = XYLines("t", {"a": (np.arange(2), np.zeros(2))}, "x", "y", log=True)
    draw("", [nothing], 1).draw_without_rendering()


def test_marks_are_lines_across_with_names() -> None:
    panel = Lines("t", np.arange(2), {"a": np.array([1.0, 2.0])}, "x", "y", marks=(("clip", 1.5),))
    (axes,) = draw("", [panel], 1).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "clip"]
    assert list(axes.lines[1].get_ydata()) == [1.5, 1.5]
    assert panel.numbers()["marks"] == {"clip": 1.5}


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str, **settings: str) -> Result:
    return CliRunner().invoke(look_app, ["training", *words], obj=settings)


def test_the_command_draws_prints_and_writes_a_table(tmp_path: Path) -> None:
    runs = [str(write(tmp_path / name)) for name in ("a", "b")]
    png, table = tmp_path / "t.png", tmp_path / "t.csv"
    done = call(*runs, "--output", str(png), "--csv", str(table))
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["a", "b"]
    assert png.read_bytes()[:4] == b"\x89PNG"
    rows = table.read_text(encoding="utf-8").splitlines()
    assert rows[0] == "run,curve,step,value"
    assert 'b,"norm of the gradient, before clipping",30,9' in rows
    assert {"a,training loss,10,5", "b,validation loss,30,3.2", "b,validation: bleu,15,10"} <= set(rows)
    assert {row.split(",")[0] for row in rows[1:]} == {"a", "b"}
    numbers = json.loads(call(*runs, "--json").stdout)
    assert [run["run"] for run in numbers["runs"]] == ["a", "b"]
    assert numbers["panels"][0]["curves"]["b, validation"] == {"at": [15.0, 30.0], "values": [3.0, 3.2]}
    assert "does not belong here" in str(call(*runs, **{"train.lr": "1"}).exception)
