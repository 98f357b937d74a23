"""What this machine has for Regard."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from pathlib import Path

import torch

import regard
from regard.data.shards import cache_folder
from regard.device import cores, describe, peak_flops, pick_device, pick_precision

LIBRARIES = (
    "torch",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "numpy",
    "zstandard",
    "triton",
    "transformers",
    "fastapi",
)


def examine() -> dict[str, str]:
    device = pick_device("auto")
    peak = peak_flops(device)
    free = shutil.disk_usage(Path.cwd()).free
    return {
        "regard": regard.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in LIBRARIES},
        "device": describe(device) + (f", {peak / 1e12:.0f} TFLOP/s bf16 by data sheet" if peak else ""),
        "precision": str(pick_precision("auto", device)).removeprefix("torch."),
        "cores": f"{cores()} usable, torch uses {torch.get_num_threads()} threads",
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "cache": f"{cache_folder()} (set REGARD_CACHE to move it)",
        "disk": f"{free / 1e9:,.0f} GB free here" + ("  <- little: checkpoints may fail" if free < 2e9 else ""),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
