"""One thread for torch (two cores are shared by everything), and a cache folder that no test leaves behind."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

if shutil.which("nvidia-smi") is None:  # Triton decides when it is first imported, maybe by torch
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail; the same examples every time, so that a red test stays red.
settings.register_profile("calm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("calm")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """What would take all cores finds one: threads that wait for a core of others are many times slower than none."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def data_folder() -> Path:
    """The real corpora beside the repository, or a skip where they are not."""
    folder = Path(os.environ.get("REGARD_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}: set REGARD_DATA to their folder")
    return folder
