"""The device that a name selects, on simulated machines with and without GPUs."""

import os

import pytest
import torch

from regard.config import TrainConfig
from regard.device import autocast, peak_flops, pick_device, pick_precision, set_up_device
from regard.errors import RegardError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Simulate two GPUs; return the list of devices that are made current, checked as torch checks them."""
    current: list[torch.device] = []

    def set_device(device: torch.device) -> None:
        torch.cuda._utils._get_device_index(device)  # refuses a device without an index
        current.append(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return current


def test_names_of_gpus(two_gpus: list[torch.device]) -> None:
    assert [str(pick_device(name)) for name in ("auto", "cuda", "cpu", "cuda:1")] == ["cuda", "cuda", "cpu", "cuda:1"]
    assert two_gpus == [torch.device("cuda:1")]
    with pytest.raises(RegardError, match="'cuda:2' was asked for, but there are 2 GPUs"):
        pick_device("cuda:2")


def test_names_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(pick_device("auto")) == "cpu"
    with pytest.raises(RegardError, match="this torch sees no GPU"):
        pick_device("cuda")
    with pytest.raises(RegardError, match="unknown device 'gpu'"):
        pick_device("gpu")


def test_precision() -> None:
    cpu = torch.device("cpu")
    assert pick_precision("auto", cpu) == torch.float32
    assert pick_precision("bf16", cpu) == torch.bfloat16
    with autocast(cpu, torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(cpu, torch.float32):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_the_best_of_a_device_is_known_or_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(torch.device("cuda")) == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some other card")
    assert peak_flops(torch.device("cuda")) is None


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the configured number of threads, else that of the environment, which torch reads itself, else all cores."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 3, 5, 7}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_up_device(TrainConfig(device="cpu", threads=3))
    set_up_device(TrainConfig(device="cpu"))
    assert asked == [3]
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_up_device(TrainConfig(device="cpu"))
    assert asked == [3, 5]
