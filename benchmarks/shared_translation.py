"""Translation of one file by several CPU processes of torchrun, with one of them killed in the middle.

    python benchmarks/shared_translation.py [--lines 200000] [--ranks 2] [--kills 1] [--folder FOLDER]

A tiny model with random weights translates sentences of the toy grammar three times: in one process; in several ranks; and
in several ranks of which one is killed (SIGKILL) in the middle, after which the same command is given again. All outputs
must have the same bytes, otherwise the exit code is 1. The model costs next to nothing, so the figures are those of reading,
dividing and joining the file and of starting processes, and not those of a real model. Ranks share the cores that one
process has for itself: on one machine without GPUs they are not faster.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from regard.config import DecodeConfig, TokenizerConfig
from regard.data import toy
from regard.files import sha256
from regard.model_folder import ModelPackage, save
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers


def save_tiny_model(folder: Path) -> None:
    """Save a translator with random weights, whose translations end at 8 tokens."""
    torch.manual_seed(0)
    texts = [text for pair in toy.pairs(2000, "train") for text in pair]
    tokenizer = Tokenizer.train(texts, TokenizerConfig(kind="bpe", vocab_size=400))
    sizes = {"d_model": 32, "d_ff": 64, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1, "max_len": 64}
    vocabularies = {"source_vocab": len(tokenizer), "target_vocab": len(tokenizer)}
    model = make_model(preset("transformer-base", dropout=0.0, **sizes, **vocabularies)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2.0)  # so that translations differ from each other
    options = DecodeConfig(beam=2, max_len_a=0.0, max_len_b=8)
    package = ModelPackage(model, Tokenizers(tokenizer, tokenizer), "translation", options, source="en", target="de")
    save(folder, package, "# A model with random weights\n")


def write_lines(path: Path, count: int) -> None:
    """Write sentences of the toy grammar, each with its number, so that no two lines are equal."""
    sentences = [english for english, _ in toy.pairs(min(count, 5000), "train")]
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            file.write(f"{sentences[i % len(sentences)]} {i}\n")


def environment() -> dict[str, str]:
    """Return the environment of the commands: without OMP_NUM_THREADS, so that one process and several have all cores."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def command(folder: Path, output: str, ranks: int = 1) -> list[str]:
    """Return the words that translate the file, by torchrun if there are several ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = ["translate", "-m", str(folder / "model"), "-i", str(folder / "lines.en"), "-o", str(folder / output)]
    return [sys.executable, *start, "-m", "regard", *words]


def run(words: list[str], log: Path) -> float:
    """Run a command and return its seconds; a failure ends this program."""
    begun = time.perf_counter()
    with log.open("wb") as file:
        code = subprocess.run(words, env=environment(), stdout=file, stderr=file, check=False).returncode
    if code:
        raise SystemExit(f"{' '.join(words)} failed ({code}):\n{log.read_text(errors='replace')[-3000:]}")
    return time.perf_counter() - begun


def find_rank(launcher: int, rank: int) -> int:
    """Return the process id of a rank: the child of torchrun that has its number in the environment (Linux)."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except (OSError, IndexError, ValueError):  # not a process, or one that has ended
            continue
    raise SystemExit(f"rank {rank} of process {launcher} has ended before it could be killed")


def count_parts(folder: Path, output: str) -> int:
    return len(list((folder / f"{output}.parts").glob("part-*")))


def run_and_kill(folder: Path, output: str, ranks: int, kills: int, log: Path) -> tuple[float, list[int]]:
    """Translate, kill a rank so many times, the last one first, and start the same command again each time.

    Returns:
        The seconds of all starts together, and the number of parts that were there at each kill.
    """
    whole = -(-sum(1 for _ in (folder / "lines.en").open("rb")) // 256)
    parts, begun = [], time.perf_counter()
    for kill in range(kills):
        with log.open("wb") as file:
            group = subprocess.Popen(command(folder, output, ranks), env=environment(), stdout=file, stderr=file)
            goal = max(1, whole * (2 * kill + 1) // (2 * kills))
            while count_parts(folder, output) < goal:
                if group.poll() is not None:
                    raise SystemExit(f"the ranks ended early:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.02)
            os.kill(find_rank(group.pid, (ranks - 1 - kill) % ranks), signal.SIGKILL)
            if group.wait(timeout=120) == 0:
                raise SystemExit("torchrun reports success although a rank was killed")
        parts.append(count_parts(folder, output))
        if (folder / output).exists():
            raise SystemExit(f"{output} is there although a rank was killed")
    run(command(folder, output, ranks), log)
    return time.perf_counter() - begun, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep model, input and outputs here; by default nothing is kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        save_tiny_model(folder / "model")
        write_lines(folder / "lines.en", given.lines)
        log = folder / "log"
        seconds = {"one process": run(command(folder, "alone"), log)}
        seconds[f"{given.ranks} ranks"] = run(command(folder, "shared", given.ranks), log)
        killed, parts = run_and_kill(folder, "killed", given.ranks, given.kills, log)
        seconds[f"{given.ranks} ranks, one killed after {' and '.join(map(str, parts))} parts"] = killed
        sums = {sha256(folder / name) for name in ("alone", "shared", "killed")}
        left = sorted(path.name for path in folder.glob("*.part*"))
        print(f"{given.lines:,} lines, {(folder / 'alone').stat().st_size:,} bytes of output")
        for what, value in seconds.items():
            print(f"{what}: {value:.1f} s")
        print("the same bytes three times" if len(sums) == 1 else "the outputs differ")
        if len(sums) > 1 or left:
            raise SystemExit(f"left behind: {', '.join(left)}" if left else 1)


if __name__ == "__main__":
    main()
