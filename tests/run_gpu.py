"""Run everything marked gpu, in several processes on one GPU: most of the time goes into compiling, a core for each process.

    python tests/run_gpu.py [--processes 8] [arguments of pytest]

Compiled kernels are kept on disk, where all processes find them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    options, others = parser.parse_known_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(1, options.processes + 1)]
        running = [start(f"{i}/{options.processes}", log, others) for i, log in enumerate(logs, 1)]
        codes = [process.wait() for process in running]
        for code, log in zip(codes, logs, strict=True):
            text = log.read_text(encoding="utf-8")
            print(text if code else text.splitlines()[-1])
    print(f"{sum(code == 0 for code in codes)} of {len(codes)} processes passed in {time.monotonic() - begun:.0f} s")
    return int(any(codes))


def start(shard: str, log: Path, others: list[str]) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    files = [str(path) for path in sorted(here.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--shard", shard, *others, *files]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=here.parent)


if __name__ == "__main__":
    sys.exit(main())
