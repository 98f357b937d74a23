"""Devices: where models run, in which precision, and the peak speed of a GPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from regard.config import TrainConfig
from regard.errors import RegardError

# Dense bf16 FLOP/s from data sheets; model FLOPs utilization (MFU) is measured against these.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}


def pick_device(name: str) -> torch.device:
    """Return the device of a name (auto, cpu, cuda or cuda:N); one that does not exist is a RegardError."""
    if not isinstance(name, str):
        raise TypeError(f"a device is a string, auto, cpu, cuda or cuda:N, not {type(name).__name__}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RegardError(f"device '{name}' was asked for, but this torch sees no GPU: use cpu, or run `regard doctor`")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RegardError(f"unknown device '{name}': use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and device.index is not None:
        if device.index >= torch.cuda.device_count():
            raise RegardError(f"device '{name}' was asked for, but there are {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)  # streams, CUDA graphs and random states belong to the current device
    return device


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a precision (auto, fp32 or bf16); auto is bf16 on GPUs that support it."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of `x` are computed: that of autocast where it is on, else that of `x`.

    The meta device, on which parameters and FLOPs are counted, has no autocast.
    """
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast; the meta device has none to switch off."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Return the context of mixed precision: matrix products in `dtype` over fp32 weights, or no change for fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def set_up_device(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """Return the device and precision of a run, after setting torch's threads and matrix precision for it."""
    device = pick_device(config.device)
    if config.threads or not os.environ.get("OMP_NUM_THREADS"):  # otherwise torch has read OMP_NUM_THREADS itself
        torch.set_num_threads(config.threads or cpu_cores())
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        avoid_cudnn_attention()
    return device, pick_precision(config.precision, device)


def avoid_cudnn_attention() -> None:
    """Let torch choose other kernels than cuDNN's for attention.

    cuDNN's attention plans for milliseconds at every new shape, which decoding has many of, and its gradients under a mask
    in bf16 are sometimes NaN (both seen with cuDNN 9.19, torch 2.11)."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def describe(device: torch.device) -> str:
    """Return the name of a GPU, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device, or None where it is unknown (then no MFU is shown)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
