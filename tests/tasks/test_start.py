"""The start and the end of a run: misspelt names, settings that cannot do what they say, refused starts, finished runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import call

import regard
from regard.config import Config, recipes
from regard.errors import RegardError
from regard.tasks.run_config import make_config, recipe_warnings

TINY = """
[data]
train = "toy:100"
valid = "toy:10"
[tokenizer]
kind = "word"
[model]
preset = "transformer-tiny"
n_encoder_layers = 1
n_decoder_layers = 1
d_model = 16
n_heads = 2
d_ff = 16
[train]
steps = 3
warmup = 1
batch_tokens = 256
samples = 0
device = "cpu"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


# ---- suggestions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--trian.steps", "5"], "unknown setting 'trian.steps': did you mean 'train.steps'?"),
        (["--train.step", "5"], "unknown setting 'train.step': did you mean 'train.steps'?"),
        (["--steps", "5"], "no option --steps: did you mean --train.steps?"),
        (["--batch-tokens", "5"], "no option --batch-tokens: did you mean --train.batch-tokens?"),
        (["--overwrit"], "no option --overwrit: did you mean --overwrite?"),
        (["--model.preset", "tiny"], "unknown model.preset 'tiny': did you mean 'transformer-tiny'?"),
        (["--model.positions", "rop"], "did you mean 'rope'?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(
    words: list[str], hint: str, recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capfd, monkeypatch, "train", str(recipe), *words)
    assert (code, out) == (2, "")
    assert hint.replace("--train.batch-tokens", "--train.batch_tokens") in err
    assert err.count("\n") == 1
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ("[dta]\ntrain = 'x'", r"unknown table \[dta\]: did you mean \[data\]\?"),
        ("[xyz]\na = 1", r"unknown table \[xyz\]: there are \[data\], \[tokenizer\], \[model\], \[train\], \[decode\]"),
    ],
)
def test_a_misspelt_table_is_answered_with_the_nearest(table: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(table)
    with pytest.raises(RegardError, match=hint):
        regard.train(tmp_path / "r.toml", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_misspelt_command_or_argument_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capfd, monkeypatch, "translte", "hello")
    assert (code, out) == (2, "")
    assert err.startswith("regard: no such command 'translte'. Did you mean 'translate'")
    code, out, err = call(capfd, monkeypatch, "evaluate")
    assert (code, out, err) == (2, "", "regard: missing argument 'run'; `regard evaluate --help` explains it\n")


# ---- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.warmup": 50, "train.steps": 10}, "train.warmup 50 is as long as the run"),
        ({"train.average": 5, "train.steps": 10, "train.save_every": 10}, "train.average 5 .* saves only 1"),
        ({"data.test": "toy:20"}, r"data\.test is toy:20, the embedded corpus, but data\.train is not"),
        ({"data.valid": "a.{lang}", "data.test": "a.{lang}"}, r"data.test is also data.valid \(a\.\{lang\}\)"),
    ],
)
def test_settings_that_cannot_do_what_they_say_are_warned_about(settings: dict[str, object], words: str) -> None:
    found = recipe_warnings(make_config({"data": {"train": ["t.{lang}"]}}, {"train.warmup": 1, **settings}))
    assert len(found) == 1
    assert re.search(words, found[0])


def test_dropout_in_training_on_a_reward_is_warned_about_by_name(recipe: Path, tmp_path: Path) -> None:
    first = regard.train(recipe, tmp_path / "first", quiet=True)
    values = {"data": {"train": ["t.{lang}"]}, "train": {"objective": "reward", "init_from": str(first), "warmup": 0}}
    none = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "model.ff_dropout": 0.0}
    assert recipe_warnings(make_config(values, none)) == []
    (found,) = recipe_warnings(make_config(values, {**none, "model.ff_dropout": 0.2}))
    assert re.search(r"usually trained without dropout, but model\.ff_dropout 0\.2 is", found)
    recurrent = {
        "model": {
            "preset": "gnmt-small",
            "architecture": "seq2seq",
            "recurrent": {"weight_dropout": 0.3},
            "dropout": 0.1,
        }
    }
    (found,) = recipe_warnings(make_config({**values, **recurrent}, {}))
    assert re.search(r"but model\.dropout 0\.1, model\.recurrent\.weight_dropout 0\.3 is", found)


def test_a_warning_is_printed_and_shipped_recipes_have_none(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capfd, monkeypatch, "train", str(recipe), "--train.warmup", "9")
    assert code == 0
    assert "warning: train.warmup 9 is as long as the run (train.steps 3)" in err
    for name in recipes.shipped_recipes():
        values = recipes.load(name)
        kept = ("data", "train", *(["model"] if values["train"].get("objective") == "reward" else []))
        values = {key: value for key, value in values.items() if key in kept}
        settings = recipes.build(values, Config)
        assert recipe_warnings(settings) == [], name


# ---- refused starts and finished runs --------------------------------------------------------------------------------


def test_a_refused_start_leaves_nothing_behind(recipe: Path) -> None:
    for settings in ({"data.train": "missing.{lang}"}, {"train.metric": "accuracy"}, {"model.max_len": 2}):
        with pytest.raises(RegardError):
            regard.train(recipe, settings=settings, quiet=True)
        assert not Path("runs").exists()
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/notes.txt").write_text("mine")
    with pytest.raises(RegardError):
        regard.train(recipe, settings={"data.train": "missing.{lang}"}, quiet=True)
    assert sorted(path.name for path in Path("runs").rglob("*")) == ["notes.txt", "tiny"]  # an empty folder stays


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"data.train": "missing.{lang}"},
        {"data.root": "elsewhere", "data.test": "x", "train.metric": "accuracy"},
        {"train.device": "cuda:77", "train.steps": 9},
    ],
    ids=["data", "metric", "device"],
)
def test_a_refused_start_leaves_a_run_that_was_there(
    settings: dict[str, object], overwrite: bool, recipe: Path
) -> None:
    run = regard.train(recipe, quiet=True)
    before = contents(run)
    with pytest.raises(RegardError):
        regard.train(recipe, settings=settings, overwrite=overwrite, quiet=True)
    assert contents(run) == before
    assert not (run / ".start").exists()
    assert regard.resume(run, train={"steps": 4}, quiet=True) == run


def test_a_refused_resume_does_not_change_the_settings_of_the_run(recipe: Path, tmp_path: Path) -> None:
    """Neither where preparing is refused, nor where the trainer finds that these are other data."""
    for name in ("mine", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.tsv").write_text("".join(f"{name} {i}\tSatz {i}\n" for i in range(50)))
    own = {"data.train": "x.tsv", "data.valid": "toy:10", "data.root": str(tmp_path / "mine")}
    run = regard.train(recipe, settings=own, quiet=True)
    before = contents(run)
    for root in ("nowhere", "others"):
        with pytest.raises(RegardError):
            regard.resume(run, data={"root": str(tmp_path / root)}, train={"steps": 5}, quiet=True)
        assert contents(run) == before
    regard.resume(run, train={"steps": 5}, quiet=True)
    assert "steps = 5" in (run / "config.toml").read_text()


def test_overwriting_a_run_replaces_it_and_keeps_what_is_not_its_own(recipe: Path) -> None:
    run = regard.train(recipe, quiet=True)
    (run / "notes.txt").write_text("mine")
    (run / ".start").mkdir()  # as a process that was killed leaves it
    (run / ".start" / "tokenizer.json").write_text("{")
    regard.train(recipe, settings={"tokenizer.kind": "char", "train.steps": 2}, overwrite=True, quiet=True)
    assert (run / "notes.txt").read_text() == "mine"
    assert not (run / ".start").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert 'kind = "char"' in (run / "config.toml").read_text()


def test_a_finished_run_says_so_and_does_nothing(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(capfd, monkeypatch, "train", str(recipe))
    files = {path: path.stat().st_mtime_ns for path in Path("runs/tiny/model").rglob("*")}
    for words in (["train", str(recipe)], ["resume", "runs/tiny"]):
        code, out, err = call(capfd, monkeypatch, *words)
        assert (code, out.strip()) == (0, "runs/tiny")
        assert "runs/tiny is finished (3 of 3 steps); its model is in runs/tiny/model" in err
        assert "to train longer: regard resume runs/tiny --train.steps 6" in err
        assert {path: path.stat().st_mtime_ns for path in Path("runs/tiny/model").rglob("*")} == files
    code, _, err = call(capfd, monkeypatch, "resume", "runs/tiny", "--train.steps", "5")
    assert code == 0
    assert "is finished" not in err
    assert "done: " in err
