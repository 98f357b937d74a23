"""Compile Triton kernels for an H100 or H200 where there is no GPU, by their own launches, and print what they need.

A launch compiles and does not run. The output is JSON: for each kernel the bytes of a thread's stack, which holds what did
not fit into registers, and the numbers of instructions and of those that exchange numbers between lanes.
test_compiled_kernels.py starts it as a process of its own, since Triton decides between its compiler and its interpreter
when it is imported.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard.kernels import causal_convolution, selective_scan

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BATCH, LENGTH, WIDTH, STATES = 16, 2048, 2048, 16  # one layer of Mamba with 370 million parameters, on 32,768 tokens
EXCHANGES = ("SHFL", "REDUX", "STS", "STSM", "LDS", "LDSM")  # through registers, or through shared memory
compiled: dict[str, Any] = {}


class Hopper:
    """What Triton asks of its driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    local = "_local" if kwargs.get("LOCAL") else ""
    compiled[f"{self.fn.__module__.split('.')[-1]}.{self.fn.__name__}{local}"] = run(
        self, *args, grid=grid, warmup=True, **kwargs
    )


def usage(cubin: bytes) -> dict[str, int]:
    """Return the number of bytes of a thread's stack, of instructions, and of those that exchange numbers between lanes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", resources.stdout + resources.stderr)
    assert stack
    kinds = collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", code))
    return {"stack": int(stack[1]), "instructions": kinds.total(), "exchanges": sum(kinds[name] for name in EXCHANGES)}


def rows(width: int) -> torch.Tensor:
    return torch.empty(BATCH, LENGTH, width, dtype=torch.bfloat16)


def launch_scan(suffix: str, length: int, width: int, states: int) -> None:
    """Launch the scan as a layer of Mamba does in training, and with splits, as with few rows."""
    x, u, z = (torch.empty(BATCH, length, n, dtype=torch.bfloat16) for n in (width, width, 2 * width))
    z = z[..., width:]
    a, vectors = torch.empty(width, states), torch.empty(BATCH, length, 2 * states)
    selective_scan.sums_by_tensor_cores = lambda x, states: True
    skip, bias, starts = torch.empty(width), torch.empty(width), torch.zeros(BATCH, length, dtype=torch.int32)
    for size in (length, length // 4) if suffix == "whole" else (length,):
        selective_scan.split_size = lambda x, size=size: size
        _, _, kept = selective_scan.run_forward(x, u, a, vectors, skip, bias, starts, z, None)
        selective_scan.run_backward_kernels(x, None, x, u, a, vectors, skip, bias, starts, z, kept)
    for name in [name for name in compiled if name.startswith("selective_scan_triton") and "/" not in name]:
        compiled[f"{name}/{suffix}"] = compiled.pop(name)


def launch_convolution() -> None:
    from regard.kernels import causal_convolution_triton as kernels

    x, weight, bias = rows(WIDTH), torch.empty(WIDTH, 4), torch.empty(WIDTH)
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    kernels.run_forward(x, weight, bias, starts, True, None, causal_convolution.SIZES)
    kernels.run_backward(x, x, weight, bias, starts, True, causal_convolution.SIZES)


if __name__ == "__main__":
    run, JITFunction.run = JITFunction.run, compile_only  # type: ignore[method-assign]
    driver.set_active(Hopper())  # type: ignore[arg-type]
    launch_scan("whole", LENGTH, WIDTH, STATES)
    launch_scan("masked", 333, 40, 6)
    launch_convolution()
    print(json.dumps({name: usage(kernel.asm["cubin"]) for name, kernel in compiled.items()}))
