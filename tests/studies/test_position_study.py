"""The study of positions: its tasks, its scores, its jobs, and a tiny study from end to end."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configured import SCHEMES, replaced
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import RegardError
from regard.files import read_json
from regard.models.gpt import GPT
from regard.studies import position_study
from regard.studies.job_pool import JobPool, Outcome, load_result, run_jobs
from regard.studies.position_study_jobs import (
    FIRST_CHARACTER,
    FIRST_SYMBOL,
    ROPE_ROWS,
    SEPARATOR,
    UNKNOWN,
    CopyTask,
    PositionStudyJob,
    PositionStudySettings,
    TextTask,
    list_rows,
    make_copies,
    make_model_config,
    measure_lengths,
    reconfigure,
    run_job,
    train,
)
from regard.text.special_tokens import PAD

CPU = torch.device("cpu")
TINY = PositionStudySettings(
    length=8, layers=1, width=16, heads=2, d_ff=16, batch=4, steps=2, windows=5, strings=6, symbols=5, sentences=100
)


def random_text(n: int, alphabet: str = "abcde") -> str:
    return "".join(np.random.default_rng(0).choice(list(alphabet), n))


def tiny_model(scheme: str, vocab: int, settings: PositionStudySettings = TINY) -> GPT:
    torch.manual_seed(3)
    return GPT(make_model_config(scheme, vocab, settings, "lm")).eval()


# ---- copy -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(2, 7))
def test_a_string_stands_before_and_after_the_separator_and_only_the_second_is_scored(
    lengths: list[int], spare: int, symbols: int
) -> None:
    width = 2 * max(lengths) + 1 + spare
    inputs, labels = make_copies(torch.tensor(lengths), width, symbols, torch.Generator().manual_seed(0))
    for m, row, scored in zip(lengths, inputs.tolist(), labels.tolist(), strict=True):
        first = row[:m]
        assert all(FIRST_SYMBOL <= symbol < FIRST_SYMBOL + symbols for symbol in first)
        assert row == [*first, SEPARATOR, *first, *[PAD] * (width - 2 * m - 1)]
        assert scored == [*[PAD] * m, *first, *[PAD] * (width - 2 * m)]


def test_training_strings_have_every_length_that_fits_the_trained_one() -> None:
    settings = replaced(TINY, length=16, batch=64)
    lengths = [m for x, _ in CopyTask(settings).batches(3, CPU) for m in (x == SEPARATOR).int().argmax(1).tolist()]
    assert set(lengths) == {4, 5, 6, 7}


class Copier(nn.Module):
    """A model that copies the string correctly, except for mistakes at (row, symbol)."""

    def __init__(self, mistakes: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__()
        self.anything, self.mistakes = nn.Parameter(torch.zeros(())), mistakes

    def forward(self, ids: Tensor) -> Tensor:
        m = ids.shape[1] // 2 - 1
        said = ids.roll(m, dims=1)  # at m + i, after the separator and i symbols: symbol i
        for row, symbol in self.mistakes:
            said[row, m + symbol] = SEPARATOR
        return nn.functional.one_hot(said.clamp(min=0), FIRST_SYMBOL + TINY.symbols).float()


def test_copied_symbols_and_strings_are_counted() -> None:
    settings = replaced(TINY, batch=100)  # all six strings in one batch
    perfect = CopyTask(settings).measure(Copier(), 2)  # type: ignore[arg-type]
    assert perfect == {"symbols": 1.0, "strings": 1.0}
    some = CopyTask(settings).measure(Copier(((0, 0), (0, 6), (4, 3))), 2)  # type: ignore[arg-type]
    assert some == {"symbols": pytest.approx(1 - 3 / 42), "strings": pytest.approx(4 / 6)}  # six strings of seven


# ---- text -------------------------------------------------------------------------------------------------------------


@given(st.integers(65, 400), st.integers(1, 40))
def test_windows_of_every_length_end_at_the_same_places_and_their_last_blocks_do_not_overlap(n: int, most: int) -> None:
    settings = replaced(TINY, windows=most)
    task, places = (
        TextTask(random_text(2000), settings),
        torch.arange(n),
    )  # a text that says where each character stands
    ends = []
    for multiple in TINY.multiples:
        inputs, labels = task.windows(places, multiple)
        assert inputs.shape == labels.shape == (len(inputs), multiple * 8)
        assert torch.equal(labels, inputs + 1)
        assert torch.equal(inputs.diff(dim=1), torch.ones_like(inputs)[:, 1:])
        ends.append(labels[:, -8:])
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert len(ends[0].unique()) == ends[0].numel()
    assert len(ends[0]) == min(most, (n - 65) // 8 + 1)


def test_the_tests_read_nothing_that_training_reads() -> None:
    text = "c" + random_text(1799, "ab") + "b" * 100 + "c" * 100  # training, validation, test
    task = TextTask(text, TINY)
    a, b, c = FIRST_CHARACTER, FIRST_CHARACTER + 1, FIRST_CHARACTER + 2
    for multiple in TINY.multiples:
        assert all((part == c).all() for part in task.windows(task.test, multiple))
        assert all((part == b).all() for part in task.windows(task.valid, multiple))
    trained = torch.cat([labels for _, labels in task.batches(300, CPU)])
    assert set(trained.unique().tolist()) == {a, b}
    assert task.vocab == 5


def test_a_training_batch_is_text_and_the_same_text_one_character_on() -> None:
    text = random_text(1500)
    inputs, labels = next(TextTask(text, TINY).batches(1, CPU))
    letters = np.array(list("??abcde"))
    for row, following in zip(letters[inputs], letters[labels], strict=True):
        assert "".join(row) + following[-1] in text[:1350]
        assert list(row[1:]) == list(following[:-1])
    again, _ = next(TextTask(text, TINY).batches(1, CPU))
    assert torch.equal(again, inputs)


def test_characters_that_training_has_not_seen_share_one_id() -> None:
    task = TextTask("ab" * 900 + "xy" * 100, TINY)
    assert task.valid.unique().tolist() == task.test.unique().tolist() == [UNKNOWN]


def test_a_text_too_short_for_the_longest_window_is_refused_with_what_it_takes() -> None:
    with pytest.raises(RegardError, match="1,280 characters: give one of at least 1,300"):
        TextTask("a" * 1280, TINY)
    with pytest.raises(RegardError, match="1 characters"):
        TextTask("a", TINY)
    for n in range(1281, 1340):  # 5% hold a window of 64 characters and the one after it, or the text is refused
        try:
            task = TextTask("a" * n, TINY)
        except RegardError:
            assert n < 1300
        else:
            assert all(task.windows(part, 8)[0].shape == (1, 64) for part in (task.valid, task.test))


def test_bits_are_those_of_the_logits() -> None:
    task = TextTask(random_text(2600), TINY)
    model = tiny_model("alibi", task.vocab)
    for multiple in (1, 4):
        bits = []
        for x, y in zip(*task.windows(task.test, multiple), strict=True):
            logits = model(x[None])[0].detach().double().numpy()  # (T, V)
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            bits.append([-math.log2(p[t, character]) for t, character in enumerate(y.tolist())])
        scores, expected = task.measure(model, multiple), np.array(bits)
        assert scores["whole"] == pytest.approx(expected.mean(), rel=1e-5)
        assert scores["last"] == pytest.approx(expected[:, -8:].mean(), rel=1e-5)
        pairs = expected.mean(0).reshape(-1, 2).mean(1)  # steps of a quarter of 8
        assert scores["along"] == pytest.approx(pairs.tolist(), rel=1e-5)


# ---- one job ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "yarn"])
def test_every_scheme_learns_a_text_that_repeats_itself(scheme: str) -> None:
    settings = replaced(TINY, width=32, d_ff=64, steps=60, lr=1e-2, lm_dropout=0.0)
    task = TextTask("abc" * 600, settings)
    model = tiny_model(scheme, task.vocab, settings)
    training = train(model, task, settings, CPU, torch.float32)
    assert training["first_bad_step"] is None
    assert training["losses"][-1] < 0.2 < 1 < training["losses"][0]
    assert task.measure(model, 1)["last"] < 0.3


def test_other_ways_to_read_rope_have_its_weights_and_a_factor_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TextTask(random_text(2600), TINY)
    model = tiny_model("rope", task.vocab)
    read: list[tuple[str, str, float]] = []

    def note(other: GPT, multiple: int) -> dict[str, Any]:
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
        name = other.config.positions
        read.append((name, other.config.value("rope.scaling"), other.config.value(f"{name}.factor")))
        return {}

    monkeypatch.setattr(task, "measure", note)
    for changes in list_rows("rope").values():
        measure_lengths(model, task, changes, TINY)
    plain, linear, ntk, yarn = (read[i : i + 4] for i in range(0, 16, 4))
    assert plain == [("rope", "none", 1.0)] * 4
    assert linear == [("rope", "linear", n) for n in (1, 2, 4, 8)]
    assert ntk == [("rope", "ntk", n) for n in (1, 2, 4, 8)]
    assert yarn == [("yarn", "none", n) for n in (1, 2, 4, 8)]


def test_rope_read_with_linear_scaling_sees_twice_the_length_at_half_the_angles() -> None:
    model = tiny_model("rope", 7)
    other = reconfigure(model, ROPE_ROWS["rope + linear"](2.0, 8)).eval()
    ids, places = torch.randint(1, 7, (2, 9)), torch.arange(9).expand(2, 9)
    expected = model.hidden(ids, places)
    torch.testing.assert_close(other.hidden(ids, 2 * places), expected)


# ---- processes --------------------------------------------------------------------------------------------------------


def test_a_job_that_fails_or_dies_fails_alone() -> None:
    begun: list[str] = []
    jobs = {"one": "pass", "bad": "raise ValueError('no such thing')", "dead": "import os; os._exit(7)", "last": "pass"}
    outcomes = {outcome.name: outcome for outcome in run_jobs(exec, jobs, 1, begun.append)}
    assert begun == list(outcomes) == list(jobs)
    assert [outcome.error is None for outcome in outcomes.values()] == [True, False, False, True]
    assert outcomes["bad"].reason == "ValueError: no such thing"
    assert outcomes["dead"].reason == "its process ended with code 7"


def test_an_idle_process_that_died_is_replaced() -> None:
    with JobPool(exec, 1) as pool:
        assert [outcome.error for outcome in pool.run({"one": "pass"}, print)] == [None]
        pool.idle[0].process.kill()
        pool.idle[0].process.join()
        assert [outcome.error for outcome in pool.run({"two": "pass"}, print)] == [None]


# ---- the study --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a study of two schemes, run by real worker processes."""
    out = tmp_path_factory.mktemp("study")
    assert position_study.study(out, None, 2, ("yarn", "alibi"), 1, "cpu", True) == out
    return out


@pytest.fixture
def again(finished: Path, tmp_path: Path) -> Callable[[], Path]:
    """Return a function that runs the same study again, on a copy of its folder."""
    shutil.copytree(finished, tmp_path / "out")
    return lambda: position_study.study(tmp_path / "out", None, 2, ("yarn", "alibi"), 1, "cpu", True)


def cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


def test_a_study_writes_its_numbers_its_tables_and_its_picture(finished: Path) -> None:
    results = read_json(finished / "results.json")
    rows = [*ROPE_ROWS, "alibi"]
    assert list(results["lm"]) == list(results["copy"]) == rows
    assert results["failed"] == {}
    assert results["setting"]["settings"]["steps"] == 2
    assert {path.name for path in (finished / "jobs").iterdir()} == {f"{job}.json" for job in results["training"]}
    last, whole, copy = map(cells, (finished / "table.md").read_text(encoding="utf-8").split("## ")[1:])
    for row in rows:
        lm, copied = results["lm"][row].values(), results["copy"][row].values()
        assert last[row] == [f"{scores['last']:.3f}" for scores in lm]
        assert whole[row] == [f"{scores['whole']:.3f}" for scores in lm]
        assert copy[row] == [f"{scores['symbols']:.1%} ({scores['strings']:.1%})" for scores in copied]
    assert last["positions"] == ["32", "64", "128", "256"]
    assert (finished / "positions.png").read_bytes().startswith(b"\x89PNG")


def test_at_the_trained_length_all_ways_to_read_rope_are_one(finished: Path) -> None:
    lm = read_json(finished / "results.json")["lm"]
    assert all(lm[row]["32"]["last"] == pytest.approx(lm["rope"]["32"]["last"], abs=1e-5) for row in ROPE_ROWS)
    assert len({lm[row]["256"]["last"] for row in ROPE_ROWS}) == 4
    assert lm["alibi"]["32"] != lm["rope"]["32"]


def test_the_picture_has_a_line_for_every_row_with_its_numbers(finished: Path) -> None:
    results = read_json(finished / "results.json")
    lm, copy, along, _ = position_study.plot_results(results).axes
    for axes, task, score in ((lm, "lm", "last"), (copy, "copy", "symbols")):
        drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        assert drawn == {row: [scores[score] for scores in by.values()] for row, by in results[task].items()}
    assert len(along.get_lines()) == len(results["lm"]) + 1


def test_every_row_has_a_look_of_its_own() -> None:
    rows = [row for scheme in position_study.choose_schemes(None) for row in list_rows(scheme)]
    styles = position_study.make_line_styles()
    assert set(rows) <= set(styles)
    assert len({styles[row]["color"] for row in rows}) == len(rows)


def test_a_rerun_does_nothing_twice_and_says_so(
    again: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.studies.job_pool.Worker", None)  # nothing can be started
    before = read_json(again() / "results.json")
    assert "done before, with the same settings: lm-rope, lm-alibi, copy-rope, copy-alibi" in capsys.readouterr().err
    assert len(before["lm"]) == 5


def test_a_job_with_other_settings_or_a_damaged_result_counts_as_not_done(finished: Path, tmp_path: Path) -> None:
    results = read_json(finished / "results.json")
    settings = PositionStudySettings(**results["setting"]["settings"] | {"multiples": (1, 2, 4, 8)})
    job = PositionStudyJob("lm", "alibi", settings, finished / "jobs", text=results["setting"]["data"]["sha256"])
    assert load_result(job)
    assert load_result(dataclasses.replace(job, threads=5, data=Path("moved.txt")))
    assert not load_result(dataclasses.replace(job, settings=dataclasses.replace(settings, steps=3)))
    assert not load_result(dataclasses.replace(job, text="another"))
    cut = dataclasses.replace(job, folder=tmp_path)
    cut.result.write_text(job.result.read_text(encoding="utf-8")[:99], encoding="utf-8")
    assert not load_result(cut)


def test_a_failed_job_is_named_and_the_others_are_reported(
    again: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "jobs" / "lm-alibi.json").unlink()
    trace = "Traceback:\n  somewhere\nOutOfMemoryError: too large"
    monkeypatch.setattr("regard.studies.job_pool.run_jobs", lambda *_: [Outcome("lm-alibi", 1.0, trace)])
    with pytest.raises(RegardError, match=r"1 of 4 jobs failed \(lm-alibi: OutOfMemoryError: too large\)"):
        again()
    results = read_json(out / "results.json")
    assert "alibi" not in results["lm"]
    assert "alibi" in results["copy"]
    assert "- lm-alibi failed: OutOfMemoryError" in (out / "table.md").read_text(encoding="utf-8")
    assert (out / "jobs" / "lm-alibi.error").read_text(encoding="utf-8") == trace


def test_a_training_that_breaks_off_is_said_under_the_tables() -> None:
    results = {"failed": {}, "training": {"lm-linear": {"first_bad_step": 12}, "lm-rope": {"first_bad_step": None}}}
    assert position_study.list_remarks(results) == [
        "- lm-linear: the loss was not finite at step 12; tested with the weights before it"
    ]


def test_the_text_of_a_file_is_what_the_models_learn(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(random_text(30000, "ab\n"), encoding="utf-8")
    job = PositionStudyJob("lm", "none", TINY, tmp_path, tmp_path / "text.txt")
    run_job(job)
    result = json.loads(job.result.read_text(encoding="utf-8"))
    assert list(result["rows"]["none"]) == ["8", "16", "32", "64"]
    assert 0 < result["training"]["valid_bits"] < 10


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"schemes": ("rope", "ropes")}, "unknown position scheme 'ropes'"),
        ({"steps": 0}, "at least 1 job at a time and 1 step"),
        ({"jobs": 0}, "at least 1 job at a time and 1 step"),
        ({"data": Path("nowhere.txt")}, "no file nowhere.txt"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_runs(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(RegardError, match=said):
        position_study.study(tmp_path / "out", **{"device": "cpu", "quick": True} | wrong)
    assert not (tmp_path / "out").exists()


def test_yarn_is_rope_read_otherwise_so_it_is_not_trained() -> None:
    assert position_study.choose_schemes(("yarn", "alibi", "rope")) == ["rope", "alibi"]
    assert sorted(position_study.choose_schemes(None)) == sorted(name for name in SCHEMES if name != "yarn")
