"""The steps of the Dockerfile, run without Docker: COPY into a folder, RUN in a new environment, then the entry point."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, (name, arguments)."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]  # type: ignore[misc]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A new environment with pip; the libraries that Regard depends on are those of this one, and are not installed."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    old = [tmp_path / "env" / "bin" / "pip", "uninstall", "--yes", "setuptools"]  # Python 3.11 brings an old one
    subprocess.run(old, capture_output=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "OMP_NUM_THREADS": "1"}


def test_the_steps_make_an_image_that_translates(tmp_path: Path, environment: dict[str, str]) -> None:
    root, place, entry = tmp_path / "root", Path("/"), []
    copied = shutil.ignore_patterns("__pycache__")
    for name, words in steps():
        inside = root / place.relative_to("/")
        if name == "WORKDIR":
            place = Path(words)
            (root / place.relative_to("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = words.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, inside / target, ignore=copied)
                else:
                    shutil.copy(ROOT / source, inside / target)
        elif name == "RUN":
            done = subprocess.run(words, shell=True, cwd=inside, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
        elif name == "ENV":
            key, value = words.split("=")
            environment[key] = str(root / Path(value).relative_to("/"))
        elif name == "ENTRYPOINT":
            entry = json.loads(words)
        else:
            assert name in ("FROM", "ARG", "CMD"), name
    words = [*entry, "translate", "I ate an apple."]
    done = subprocess.run(
        shlex.join(words), shell=True, cwd=root / "work", env=environment, capture_output=True, text=True
    )
    assert done.stdout == "Ich habe einen Apfel gegessen.\n", done.stderr[-2000:]
    where = subprocess.run(
        ["python", "-c", "import regard; print(regard.__file__)"],
        cwd=root / "work",
        env=environment,
        capture_output=True,
        text=True,
    ).stdout
    assert where.startswith(str(tmp_path / "env"))


def test_what_is_copied_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word.rstrip("/") for name, words in steps() if name == "COPY" for word in words.split()[:-1]}
    assert copied == kept
