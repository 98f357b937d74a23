"""The studies that pre-train and fine-tune: their jobs, a tiny study from end to end, and the table by hand."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from regard.errors import RegardError
from regard.exchange import loader
from regard.studies.finetuning_study import (
    GLUE_TASKS,
    PRETRAINING,
    ROFORMER,
    FinetuningStudy,
    Variant,
    format_scores,
    format_table,
    merge_settings,
    plan_finetuning,
    plan_pretraining,
    study,
)
from regard.tasks.run_config import make_config

TINY: dict[str, Any] = {
    "task": "causal-lm",
    "tokenizer": {"kind": "word", "vocab_size": 60},
    "model": {"preset": "gpt-tiny", "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16, "max_len": 32},
    "train": {"steps": 3, "batch_tokens": 256, "valid_every": 3, "save_every": 3, "samples": 0},
}
PLAN = FinetuningStudy(
    {"gpt": TINY},
    ("RTE",),
    (Variant("tuned, aided", "gpt", changes={"train": {"auxiliary": 0.5}}), Variant("fresh", "gpt", fresh=True)),
    {"batch_tokens": 256, "lr": 1e-3},
)


WORDS = ("a", "dog", "ran", "up", "the", "red", "hill", "and", "sat")


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 9)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(0)
    for split in ("train", "valid", "test"):
        lines = "\n".join(sentence(rng) for _ in range(60))
        (folder / f"wikitext2.{split}.txt.xz").write_bytes(lzma.compress(lines.encode()))
    for name in ("RTE.train", "RTE.dev"):
        rows = [f"{i}\t{sentence(rng)}\t{sentence(rng)}\t{'yes' if i % 2 else 'no'}" for i in range(40)]
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *rows])
        (folder / f"{name}.tsv.xz").write_bytes(lzma.compress(text.encode()))
    return folder


@pytest.mark.parametrize("plan", [PRETRAINING, ROFORMER], ids=["pretraining", "roformer"])
def test_every_job_of_a_study_is_a_recipe(
    plan: FinetuningStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[str, Any] = {"device": "cpu", "threads": 1}
    first = plan_pretraining(plan, tmp_path, tmp_path, False, **where)
    for job in first:
        assert make_config(job.values, {}).task in ("causal-lm", "masked-lm")
    monkeypatch.setattr(loader, "model_settings", lambda init: {"preset": "gpt-small"})
    jobs = plan_finetuning(plan, tmp_path, list(plan.tasks), 2, tmp_path, False, **where)
    assert len({job.name for job in jobs}) == len(jobs) == 2 * len(plan.tasks) * len(plan.variants)
    for job in jobs:
        config = make_config(job.values, {})
        assert (config.task, config.train.metric) == (GLUE_TASKS[job.task].task, GLUE_TASKS[job.task].metric)
        assert bool(config.train.init_from) != bool(
            config.tokenizer.file
        )  # begins with a model, or with its vocabulary


def test_settings_within_tables_are_merged() -> None:
    assert merge_settings({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": 5}) == {
        "a": {"x": 1, "y": 4},
        "b": 3,
        "c": 5,
    }


@pytest.mark.usefixtures("in_this_process")
def test_a_tiny_study_from_files_to_its_table(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = study(PLAN, tmp_path, files, files, ["RTE"], seeds=2, device="cpu", quick=True)
    results = json.loads((out / "results.json").read_text())
    scores = results["rows"]["tuned, aided"]["RTE"]
    assert all(0 <= x <= 100 for x in scores)
    assert len(scores) == 2
    assert results["pretraining"]["gpt"] > 0
    assert (out / "jobs" / "fresh-RTE-1" / "model" / "model.safetensors").exists()
    assert not (out / "jobs" / "fresh-RTE-1" / "checkpoints").exists()
    monkeypatch.setattr("regard.studies.job_pool.try_job", None)  # nothing can be started
    study(PLAN, tmp_path, files, files, ["RTE"], seeds=2, device="cpu", quick=True)
    assert "done before, with the same settings: gpt" in capsys.readouterr().err


def test_the_table_by_hand() -> None:
    assert format_scores([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
    assert format_scores([4.0]) == "4.0"
    setting = {"device": "cpu", "torch": "2", "date": "2026-01-02T00", "command": "regard study x"}
    rows = {"one": {"RTE": [50.0, 52.0], "CoLA": [9.0, 11.0]}}
    text = format_table({"rows": rows, "pretraining": {"gpt": 1.5}, "setting": setting}, ["RTE", "CoLA"])
    assert "| one | 51.0 ± 1.4 | 10.0 ± 1.4 | 30.5 |" in text
    assert "gpt 1.500" in text


def test_unknown_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="unknown task 'QNLI': choose among SST-2"):
        study(PLAN, tmp_path, tmp_path, tmp_path, ["QNLI"])
