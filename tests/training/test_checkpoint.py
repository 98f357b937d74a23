"""Checkpoints: all of a run's state, whole or passed over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_equal_tensors, write_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from regard.data.batches import Cursor
from regard.errors import RegardError
from regard.files import MANIFEST
from regard.models.weights import load_weights, weights_of
from regard.training.checkpoint import Checkpoints, Progress

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", MANIFEST]


class Tied(nn.Module):
    """Two layers that share their matrix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def trained(seed: int = 0, steps: int = 3) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    for _ in range(steps):
        model.second(model.first(torch.rand(2, 3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}


def save(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(*trained(seed=step), Progress(step=step))
    return checkpoints


def copied(source: Path, folder: Path) -> Checkpoints:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return Checkpoints(folder)


# ---- round trip --------------------------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    progress = Progress(7, Cursor(2, 5), 6, 4, -1.1, 2, 1234, 5.678, [0.1, 1 / 3, 17.0])
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(model, optimizer, progress)
    drawn = torch.rand(4)
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    other, fresh = trained(seed=9, steps=0)
    assert checkpoints.load(7, other, fresh) == progress
    assert_equal_tensors(weights_of(other), weights_of(model))
    assert_equal_tensors(moments(other, fresh), moments(model, optimizer))
    assert torch.equal(torch.rand(4), drawn)  # the random numbers go on where they were


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    tensors = load_file(save(tmp_path, 1).path(1) / "model.safetensors")
    assert set(tensors) == {"first.weight", "first.bias", "second.bias"}


def test_what_was_loaded_no_longer_needs_the_file(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    model, optimizer = trained(steps=0)
    checkpoints.load(1, model, optimizer)
    before = {k: v.clone() for k, v in {**weights_of(model), **moments(model, optimizer)}.items()}
    for name in FILES[:2]:  # in place, as a mapping would notice
        with (checkpoints.path(1) / name).open("r+b") as file:
            file.write(b"\0" * os.fstat(file.fileno()).st_size)
    assert_equal_tensors({**weights_of(model), **moments(model, optimizer)}, before)


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    tensors = {"first.weight": torch.zeros(2, 3), "first.bias": torch.zeros(3), "third.bias": torch.zeros(3)}
    model = Tied()
    before = {k: v.clone() for k, v in weights_of(model).items()}
    with pytest.raises(RegardError) as error:
        load_weights(model, tensors, tmp_path)
    for part in ("first.weight is (2, 3), the model has (3, 3)", "second.bias is missing", "third.bias is not in"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert_equal_tensors(weights_of(model), before)


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save(folder, 10, 20)
    return folder


def check_falls_back(checkpoints: Checkpoints) -> str:
    said: list[str] = []
    assert checkpoints.newest(said.append) == 10
    assert len(said) == 1
    assert str(checkpoints.path(20)) in said[0]
    assert "is damaged" in said[0]
    assert "falling back to the one before" in said[0]
    return said[0]


def test_the_newest_whole_one(two: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert Checkpoints(two).newest(said.append) == 20
    assert Checkpoints(tmp_path / "none").newest(said.append) is None
    assert said == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit(two: Path, tmp_path: Path, name: str, where: float, bit: int) -> None:
    checkpoints = copied(two, tmp_path / "copy")
    file = checkpoints.path(20) / name
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    file.write_bytes(content)
    check_falls_back(checkpoints)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0.0, 0.5, 1.0], ids=["empty", "half", "all but a byte"])
def test_truncated(two: Path, tmp_path: Path, name: str, left: float) -> None:
    checkpoints = copied(two, tmp_path / "copy")
    file = checkpoints.path(20) / name
    size = file.stat().st_size
    os.truncate(file, min(int(left * size), size - 1))
    check_falls_back(checkpoints)


@pytest.mark.parametrize("name", FILES)
def test_missing(two: Path, tmp_path: Path, name: str) -> None:
    checkpoints = copied(two, tmp_path / "copy")
    (checkpoints.path(20) / name).unlink()
    assert f"{name} is missing" in check_falls_back(checkpoints)


def test_none_is_whole(two: Path, tmp_path: Path) -> None:
    checkpoints = copied(two, tmp_path / "copy")
    for step in (10, 20):
        (checkpoints.path(step) / MANIFEST).unlink()
    said: list[str] = []
    assert checkpoints.newest(said.append) is None
    assert "starting from the beginning" in said[-1]


# ---- a disk that is full -----------------------------------------------------------------------------------------

FULL_DISK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from helpers import tiny
from regard.errors import RegardError
from regard.training.checkpoint import Checkpoints
from regard.tasks.run import train_config as train
folder = Path(sys.argv[2])
changes = {"train.save_every": 1, "train.keep": 100}
try:
    train(tiny(folder, **changes), folder / "disk" / "run", quiet=True)
except RegardError as error:
    said = []
    newest = Checkpoints(folder / "disk" / "run" / "checkpoints").newest(said.append)
    drafts = [p.name for p in (folder / "disk" / "run" / "checkpoints").glob(".*")]
    print(newest, said, drafts, error, sep="|")
"""


def full_disk_run(folder: Path, prefix: list[str]) -> list[str]:
    write_corpus(folder)
    (folder / "disk").mkdir()
    (folder / "script.py").write_text(FULL_DISK)
    program = [*prefix, sys.executable, str(folder / "script.py"), str(Path(__file__).parent), str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    """A tmpfs of 400 kB, in a name space of our own."""
    mount = f'mount -t tmpfs -o size=400k none {tmp_path}/disk && exec "$@"'
    able = ["unshare", "-rm", "sh", "-c", f"mkdir -p {tmp_path}/able && mount -t tmpfs none {tmp_path}/able"]
    if not shutil.which("unshare") or subprocess.run(able, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    newest, said, drafts, error = full_disk_run(tmp_path, ["unshare", "-rm", "sh", "-c", mount, "sh"])
    assert int(newest) >= 2
    assert (said, drafts) == ("[]", "[]")
    assert "No space left on device" in error
    assert "free some space" in error


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where a folder should be: an error of the disk that even root gets."""
    blocked = tmp_path / "checkpoints"
    blocked.write_text("in the way")
    with pytest.raises(RegardError, match=r"cannot write .*step-00000001"):
        save(blocked, 1)
    assert blocked.read_text() == "in the way"


# ---- keeping and averaging ---------------------------------------------------------------------------------------


def test_tidy_keeps_what_it_is_told(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 10, 20, 30)
    (tmp_path / ".step-00000040.draft-77").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints.prune([-1, 10, 30])
    assert checkpoints.steps() == [10, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000010", "step-00000030"]


def test_the_mean_of_checkpoints(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 10, 20, 30)
    loaded = [load_file(checkpoints.path(step) / "model.safetensors") for step in (10, 20, 30)]
    mean = checkpoints.average([10, 20, 30])
    assert mean.keys() == loaded[0].keys()
    for name, tensor in mean.items():
        expected = np.mean([each[name].numpy().astype(np.float64) for each in loaded], axis=0).astype(np.float32)
        np.testing.assert_array_equal(tensor.numpy(), expected)
    assert_equal_tensors(checkpoints.average([20]), loaded[1])
