"""A run's folder: only one that Regard began is trained in or overwritten, and a user's files in it survive."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_run, fit, fit_until, tiny, write_corpus

import regard
from regard.cli import main
from regard.config import Config, recipes
from regard.errors import RegardError
from regard.files import add_file, find_damage, read_json
from regard.tasks.run import open_trainer
from regard.tasks.run import train_config as train
from regard.training.checkpoint import Checkpoints

SHORT = {"train.steps": 4, "train.valid_every": 4, "train.samples": 0, "train.average": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def reference(corpus: Path) -> Path:
    return fit(corpus / "reference", **SHORT)


@pytest.fixture
def run(corpus: Path, reference: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    shutil.copytree(reference, corpus / tmp_path.name)
    return corpus / tmp_path.name


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe outside of the working directory, in which a folder runs/ is."""
    (tmp_path / "work" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "recipe.toml"
    path.write_text(recipes.to_toml(tiny(corpus, **SHORT)))
    return path


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything below a folder: contents, targets of links, and times."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        held = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = (path.lstat().st_mode, path.lstat().st_mtime_ns, held)
    return found


def overwritten(run: Path) -> Path:
    return train(tiny(run.parent, **SHORT), run, overwrite=True, quiet=True)


def by_python(recipe: Path, run: Path | None, overwrite: bool, settings: dict[str, str]) -> str:
    with pytest.raises(RegardError) as error:
        regard.train(recipe, run, overwrite=overwrite, quiet=True, settings=settings)
    return str(error.value)


def by_command(recipe: Path, run: Path | None, overwrite: bool, settings: dict[str, str]) -> str:
    words = ["regard", "train", str(recipe), "-q", *(["--run", str(run)] if run else [])]
    words += [word for name, value in settings.items() for word in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:  # noqa: PT012
        patch.setattr(sys, "argv", words + ["--overwrite"] * overwrite)
        main.main()
    assert stop.value.code == 2
    return ""


WAYS = pytest.mark.parametrize("refused", [by_python, by_command])
Refused = Callable[[Path, Path | None, bool, dict[str, str]], str]


# ---- names -----------------------------------------------------------------------------------------------------------

WRONG = ["", ".", "..", "a/b", "/tmp/a", "a\\b", ".hidden", " a", "a\t", "a\nb", "a\0b", "a\x7fb", "\udc80", "\u2028x"]
WRONG += ["n" * 300, "é" * 112]


@pytest.mark.parametrize("name", WRONG)
def test_a_name_is_not_a_path(corpus: Path, name: str) -> None:
    for make in (
        lambda: tiny(corpus, name=name),
        lambda: Config(name=name),
        lambda: recipes.build({"name": name}, Config),
    ):
        with pytest.raises(RegardError, match="'name' must") as error:
            make()
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300


@WAYS
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["", "..", "a/../..", "n" * 300])
def test_a_name_leads_nowhere_else(recipe: Path, refused: Refused, name: str, overwrite: bool) -> None:
    Path("config.toml").write_text("[model]\nd_model = 3\n")
    Path("precious.txt").write_text("years of work")
    before = snapshot(Path())
    refused(recipe, None, overwrite, {"name": name})
    assert snapshot(Path()) == before


@pytest.mark.parametrize("name", ["n" * 223, "ü" * 109 + " 😀", "a..b-#%"])
def test_an_allowed_name_works_to_the_end(recipe: Path, name: str) -> None:
    run = regard.train(recipe, quiet=True, name=name)
    assert run == Path("runs") / name
    regard.resume(run, quiet=True)
    assert find_damage(run / "model") is None
    assert recipes.load(run / "config.toml")["name"] == name


# ---- folders of others ---------------------------------------------------------------------------------------------


def foreign(folder: Path, files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("[model]\nd_model = 3\n" if name == "config.toml" else "years of work")
    return folder


@WAYS
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    ["config.toml tokenizer.json precious.txt model/a checkpoints/b", "thesis.txt", ".lock", "run.json", ".run.json.7"],
)
def test_a_foreign_folder_is_left_as_it_is(recipe: Path, refused: Refused, files: str, overwrite: bool) -> None:
    folder = foreign(recipe.parent / "foreign", files)
    before = snapshot(folder)
    said = refused(recipe, folder, overwrite, {})
    assert snapshot(folder) == before
    assert refused is by_command or ("is not a run of Regard" in said and "\n" not in said)


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_things_in_the_place_of_a_run(recipe: Path, overwrite: bool) -> None:
    folder = recipe.parent / "odd"
    folder.mkdir()
    (folder / "file").write_text("years of work")
    (folder / "broken").symlink_to("nowhere")
    foreign(folder / "foreign", "config.toml precious.txt")
    (folder / "link").symlink_to("foreign")
    before = snapshot(folder)
    for name, said in (("file", "is a file"), ("broken", "symbolic link"), ("link", "not a run of Regard")):
        assert said in by_python(recipe, folder / name, overwrite, {})
        assert snapshot(folder) == before


@pytest.mark.parametrize("marker", ["{}", "[]", "3", '{"regard_run": 2}', "\0", '{"regard_run": 1'])
def test_a_marker_of_others_proves_nothing(recipe: Path, marker: str) -> None:
    folder = foreign(recipe.parent / "foreign", "config.toml precious.txt")
    (folder / "run.json").write_text(marker)
    before = snapshot(folder)
    assert "run.json is damaged or was not written by Regard" in by_python(recipe, folder, True, {})
    assert snapshot(folder) == before


def test_odd_locks_and_markers(recipe: Path) -> None:
    folder = recipe.parent / "odd"
    folder.mkdir()
    (folder / "mine").write_text("years of work")
    for link in (".lock", "run.json"):
        (folder / link).symlink_to("mine")
        assert "is not a run of Regard" in by_python(recipe, folder, True, {})
        (folder / link).unlink()
    os.mkfifo(folder / "run.json")
    assert "not a regular file" in by_python(recipe, folder, True, {})
    assert (folder / "mine").read_text() == "years of work"
    assert "File name too long" in by_python(recipe, folder / ("n" * 300), False, {})


def test_resume_needs_the_marker(run: Path) -> None:
    (run / "run.json").unlink()
    before = snapshot(run)
    with pytest.raises(
        RegardError, match=r"has a config.toml but no run.json.*regard train .*config.toml --run FOLDER"
    ):
        regard.resume(run, quiet=True)
    assert snapshot(run) == before
    regard.load(run, "cpu")  # reading needs no proof


def test_what_a_killed_start_leaves_is_nothing(corpus: Path, reference: Path, tmp_path: Path) -> None:
    run = corpus / tmp_path.name
    run.mkdir()
    (run / ".lock").touch()
    (run / ".run.json.draft-1").write_text('{"rega')
    assert_same_run(fit(run, **SHORT), reference)
    assert read_json(run / "run.json")["regard_run"] == 1


def test_a_link_to_a_run_is_a_run(run: Path, reference: Path) -> None:
    link = run.with_name(f"{run.name}-link")
    link.symlink_to(run.name)
    overwritten(link)
    assert link.is_symlink()
    assert_same_run(run, reference)


# ---- a user's files in a run -----------------------------------------------------------------------------------------

OWN = "notes.txt tokenizer-mine.json .model.2024 model/my-notes.md model/deep/er.txt checkpoints/mine/best.bin"
OWN += " checkpoints/step-00000004/why.txt checkpoints/step-1/a tensorboard/view.html hypotheses/mine.de"


def add_own(run: Path) -> dict[Path, str]:
    for name in OWN.split():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"of {name}")
    return {run / name: f"of {name}" for name in OWN.split()}


def check_own(own: dict[Path, str]) -> None:
    assert {path: path.read_text() for path in own} == own


def without_own(own: dict[Path, str]) -> None:
    for path in own:
        path.unlink()
        while not any((path := path.parent).iterdir()):
            path.rmdir()


def test_overwrite_removes_what_regard_wrote_and_nothing_else(run: Path, reference: Path) -> None:
    (run / "hypotheses").mkdir()
    add_file(run / "hypotheses", "test.de", lambda draft: draft.write_text("Hallo\n"))
    (run / "model" / ".languages.json.draft-1").write_text("half")
    own, events = add_own(run), set((run / "tensorboard").glob("events*"))
    overwritten(run)
    check_own(own)
    assert not (run / "hypotheses" / "test.de").exists()
    assert not events & set((run / "tensorboard").iterdir())
    assert find_damage(run / "model") is None
    without_own(own)
    assert_same_run(run, reference)


def test_overwrite_of_another_kind_leaves_no_old_file(run: Path) -> None:
    """Two tokenizers instead of one, stopped before there is a model."""
    own = add_own(run)
    other = {**SHORT, "tokenizer.joint": False, "model.tie": "decoder"}
    with open_trainer(tiny(run.parent, **other), run, overwrite=True, quiet=True):
        pass
    check_own(own)
    assert Checkpoints(run / "checkpoints").steps() == []
    assert sorted(path.name for path in run.glob("tokenizer*")) == [
        "tokenizer-mine.json",
        "tokenizer.source.json",
        "tokenizer.target.json",
    ]
    assert sorted(path.name for path in (run / "model").iterdir()) == ["deep", "my-notes.md"]
    fit(run, **other)  # a folder of notes is neither a checkpoint nor a model
    check_own(own)


def test_a_resumed_finish_keeps_a_users_files(run: Path, reference: Path) -> None:
    own = add_own(run)
    (run / "model" / "model.safetensors").write_bytes(b"damaged")
    regard.resume(run, quiet=True)
    check_own(own)
    assert find_damage(run / "model") is None
    without_own(own)
    assert_same_run(run, reference)


@pytest.mark.parametrize("manifest", ["", '{"sha256": {"my-notes.md": 3}}'])
def test_a_model_without_its_manifest_is_made_again(run: Path, reference: Path, manifest: str) -> None:
    own = add_own(run)
    (run / "model" / "manifest.json").write_text(manifest)
    regard.resume(run, quiet=True)
    check_own(own)
    assert find_damage(run / "model") is None
    without_own(own)
    assert_same_run(run, reference)


def test_files_in_a_checkpoint_outlive_it(corpus: Path, tmp_path: Path) -> None:
    run = corpus / tmp_path.name
    changes = {**SHORT, "train.steps": 14, "train.valid_every": 20, "train.keep": 1}
    fit_until(run, 4, **changes)
    notes = run / "checkpoints" / "step-00000004" / "notes.txt"
    notes.write_text("the loss is odd here")
    fit(run, **changes)
    assert Checkpoints(run / "checkpoints").steps() == [12, 14]
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_nothing_is_removed_through_a_link(run: Path, tmp_path: Path, reference: Path) -> None:
    links = ("model", "checkpoints/step-00000004", "tensorboard", "hypotheses")
    (run / "hypotheses").mkdir()
    add_file(run / "hypotheses", "test.de", lambda draft: draft.write_text("Hallo"))
    for name in links:
        shutil.move(run / name, tmp_path / Path(name).name)
        (run / name).symlink_to(tmp_path / Path(name).name)
    before = snapshot(tmp_path)
    with pytest.raises(RegardError, match="is a symbolic link"):
        fit(run, **SHORT)
    assert snapshot(tmp_path) == before
    overwritten(run)
    after = snapshot(tmp_path)
    board = str(tmp_path / "tensorboard")  # still a link, into which new events go
    assert {path: held for path, held in before.items() if path != board}.items() <= after.items()
    assert [path for path in after.keys() - before.keys() if not path.startswith(board)] == []
    assert [name for name in links if (run / name).is_symlink()] == ["tensorboard", "hypotheses"]
    (run / "hypotheses").unlink()
    assert_same_run(run, reference)


def test_no_link_in_the_place_of_checkpoints(run: Path, tmp_path: Path, reference: Path) -> None:
    shutil.move(run / "checkpoints", tmp_path / "checkpoints")
    (run / "checkpoints").symlink_to(tmp_path / "checkpoints")
    before = snapshot(tmp_path)
    with pytest.raises(RegardError, match="checkpoints is a symbolic link"):
        fit(run, **SHORT)
    overwritten(run)
    assert snapshot(tmp_path) == before
    assert_same_run(run, reference)
