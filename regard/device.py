"""Where models run, in which precision, and how fast that could be at best."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from regard.config import TrainConfig
from regard.errors import RegardError

# Dense bf16 FLOP/s by the makers' data sheets; MFU is measured against these.
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
        torch.cuda.set_device(device)  # streams, graphs and random states are the current device's
    return device


def cpu_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the precision that products of `x` are made in: that of autocast where it is on, else that of `x` itself.

    The meta device, where models are counted, has no autocast.
    """
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which nothing is cast; the meta device has no autocast to switch off."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Matrix products in bf16 over fp32 weights, or nothing at all."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def set_up_device(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    device = pick_device(config.device)
    if config.threads or not os.environ.get("OMP_NUM_THREADS"):  # which torch has read by itself
        torch.set_num_threads(config.threads or cpu_cores())
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # cuDNN's attention sometimes returns NaN gradients under a mask in bf16 (seen with cuDNN 9.19, torch 2.11).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device, pick_precision(config.precision, device)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device) -> float | None:
    """The device's best, or None where we do not know it (then no MFU is shown)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
