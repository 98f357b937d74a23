"""The package as `pip install` gets it: a wheel in a new environment, used in an empty folder, far from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import regard

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a source tree, with the setuptools of this environment."""
    out.mkdir(exist_ok=True)
    words = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.splitlines()[-1]


def copy_tree(target: Path) -> Path:
    """Copy the files that git tracks: a build leaves folders behind."""
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        if name.startswith(("regard/", "pyproject", "README", "LICENSE")) and (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files belong to the package")
    return build("build_wheel", copy_tree(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`regard` of a new environment that has the wheel; the libraries it depends on are those of this environment."""
    place = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    bin = place / "bin"
    packages = Path(
        subprocess.run(
            [bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a plain path: no editable install
    script = bin / "regard"
    script.write_text(f"#!{bin / 'python'}\nfrom regard.cli.main import main\n\nmain()\n")
    script.chmod(0o755)
    return script


def run(program: Path, folder: Path, *words: str | Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "REGARD_CACHE")}
    environment |= {"REGARD_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, *map(str, words)], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def test_it_is_the_wheel_that_runs(program: Path, folder: Path) -> None:
    code = "import regard, sys; print(regard.__file__, regard.__version__)"
    where, version = run(program.with_name("python"), folder, "-c", code).split()
    assert Path(where).is_relative_to(program.parents[1])
    assert version == regard.__version__
    assert run(program, folder, "--version").strip() == regard.__version__
    assert run(program.with_name("python"), folder, "-m", "regard", "--version").strip() == regard.__version__


def test_translate(program: Path, folder: Path) -> None:
    assert run(program, folder, "translate", "I ate an apple.") == "Ich habe einen Apfel gegessen.\n"


def test_train_a_shipped_recipe_and_use_it(program: Path, folder: Path) -> None:
    settings = ["--train.steps", "3", "--train.warmup", "1", "--train.samples", "0", "--data.train", "toy:200"]
    settings += ["--data.valid", "toy:10", "--data.test", "toy:10", "--train.device", "cpu"]
    assert run(program, folder, "train", "toy-en-de", "--quiet", *settings) == "runs/toy-en-de\n"
    assert run(program, folder, "translate", "--model", "runs/toy-en-de", "I ate an apple.").count("\n") == 1
    assert "BLEU" in run(program, folder, "evaluate", "runs/toy-en-de")
    assert (
        run(program, folder, "train", "hello", "--quiet", "--train.steps", "3") == "runs/hello\n"
    )  # its text is in it


def test_look(program: Path, folder: Path) -> None:
    assert run(program, folder, "look", "en-de-fr-zh", "I ate an apple.").splitlines()[-1] == "look.html"
    assert "<script>" in (folder / "look.html").read_text(encoding="utf-8")


def test_vectors_and_filter(program: Path, folder: Path) -> None:
    (folder / "text.txt").write_text("the king and the queen sat by the fire and the man sat by the woman\n" * 50)
    run(program, folder, "vectors", "train", "text.txt", "-o", "vectors", "--dim", "8", "--quiet")
    assert len(run(program, folder, "vectors", "nearest", "vectors", "king", "-n", "3").splitlines()) == 3
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "photo.png")
    assert run(program, folder, "filter", "nlm", "photo.png").startswith("photo-nlm.png")


def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", copy_tree(tmp_path / "tree"), tmp_path / "dist")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build("build_wheel", source, tmp_path / "again")
    contents = [
        {info.filename: info.CRC for info in zipfile.ZipFile(one).infolist() if "dist-info" not in info.filename}
        for one in (wheel, again)
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 250
    assert not [name for name in contents[0] if "__pycache__" in name or name.startswith(("tests", "docs"))]
