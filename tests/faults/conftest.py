"""Tiny models of several kinds, made once; and a place that a user without rights can enter."""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_packages import FAMILIES, exported_package, model_package

from regard import model_folder as folders
from regard.exchange.huggingface import write_huggingface


@pytest.fixture(autouse=True)
def _end_whatever_hangs() -> Iterator[None]:
    """A test that hangs inside a library, which no alarm ends, ends the whole suite with a traceback."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def open_place() -> Iterator[Path]:
    """A folder that every user may enter: pytest's own is for its owner alone. In memory where that can be had, because
    folders are written with fsync, which a busy disk answers late."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix="regard-faults-", dir=memory))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def place(open_place: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=open_place))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def models(open_place: Path) -> dict[str, Path]:
    """Model folders by kind."""
    for kind in ("translation", "gpt", "classifier"):
        folders.save(open_place / kind, model_package(kind), "# card\n")
    return {kind: open_place / kind for kind in ("translation", "gpt", "classifier")}


@pytest.fixture(scope="session")
def foreign(open_place: Path) -> dict[str, Path]:
    """Folders of Hugging Face's form by family."""
    for family in FAMILIES:
        write_huggingface(open_place / f"hf-{family}", exported_package(family))
    return {family: open_place / f"hf-{family}" for family in FAMILIES}
