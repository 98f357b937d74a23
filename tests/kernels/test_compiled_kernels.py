"""Triton kernels as they are compiled for an H100 or H200: their registers hold what they should, which needs no GPU to see.

A kernel whose tiles are laid out badly is several times slower, and the backward kernel of the scan, whose sums on the
tensor cores rely on the layout, would compute wrong gradients. The layout is chosen by Triton's compiler and changes with
its version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Return what compile_for_hopper.py prints."""
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (tools / name).is_file()]
    if missing:
        pytest.skip(f"Triton is installed without {', '.join(missing)}")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "compile_for_hopper.py"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        *((kernel, "whole") for kernel in ("forward_local", "local_adjoint", "forward", "backward")),
        *((kernel, "masked") for kernel in ("forward", "backward")),
    ],
)
def test_the_selective_scan_keeps_its_tiles_in_registers(
    compiled: dict[str, dict[str, int]], kernel: str, shape: str
) -> None:
    """With several channels to a lane, the backward kernel kept 2,600 bytes of a thread in memory."""
    assert compiled[f"selective_scan_triton.{kernel}/{shape}"]["stack"] <= 128
    assert compiled[f"selective_scan_triton.{kernel}/{shape}"]["exchanges"] == 0


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_the_convolution_keeps_its_window_in_registers(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    assert compiled[f"causal_convolution_triton.{kernel}"]["stack"] <= 128
