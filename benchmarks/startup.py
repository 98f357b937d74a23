"""Time from the start of a process to its first output, on a CPU: `regard --help`, and `regard translate` of one sentence.

    python benchmarks/startup.py [--peers hf] [--repeats 7] [--json FILE]

For the bundled model `en-de-fr-zh`, the time of another short sentence after the first is measured too (median of twenty).

Beside it are `import torch`, the lower bound of everything that uses torch (the last column is its share), and transformers
with a Marian of the same sizes and the same tokenizer. Both use a beam of 4 and write 10 tokens. They take turns, so that
other load affects all alike; files are in the page cache.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from common import Report, joint, make_random_model, parser, sizes
from peer_models import make_hf_model

from regard.config import DecodeConfig, TokenizerConfig
from regard.data.toy import pairs
from regard.model_folder import ModelPackage, save
from regard.pretrained import DEFAULT
from regard.text.tokenizer import Tokenizer, Tokenizers

CPU = torch.device("cpu")
SENTENCE, TOKENS, BEAM = "I ate an apple.", 10, 4
MODELS = {"transformer-small": 1000, "transformer-base": 32000}  # preset -> size of its vocabulary
SECTIONS = ("help", DEFAULT, *MODELS)
THEIRS = f"""
import sys
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
inputs = tokenizer("{SENTENCE}", return_tensors="pt", return_token_type_ids=False)
written = model.generate(**inputs, num_beams={BEAM}, min_new_tokens={TOKENS}, max_new_tokens={TOKENS})
print(tokenizer.decode(written[0], skip_special_tokens=True))
"""


SHORT = ("How are you?", "Where is the station?", "I would like a cup of coffee.", "Thank you very much.")
NEXT = f"""
import statistics, time
from regard import load
ours, times = load("{DEFAULT}", "cpu", "int8"), []
ours.translate("{SENTENCE}")
for text in {SHORT} * 5:
    begun = time.perf_counter()
    ours.translate(text)
    times.append(time.perf_counter() - begun)
print(statistics.median(times))
"""


def lines(words: int) -> Iterator[str]:
    """Yield the toy corpus and random words, for vocabularies as large as real ones."""
    for pair in pairs(1000, "train"):
        yield from pair
    rng = random.Random(0)
    for _ in range(words):
        yield "".join(rng.choices("abcdefghijklmnopqrst", k=rng.randint(4, 7)))


def save_models(folder: Path, name: str, size: int, tiny: bool, peers: list[str]) -> None:
    """Save a random model of Regard in `folder/regard`, and one of the same sizes in `folder/transformers`."""
    size = 300 if tiny else size
    tokenizer = Tokenizer.train(lines(5 * size), TokenizerConfig(kind="bpe", vocab_size=size))
    model = make_random_model(replace(sizes(name, tiny), **joint(len(tokenizer))), CPU)
    options = DecodeConfig(beam=BEAM, min_len=TOKENS - 1, max_len_a=0.0, max_len_b=TOKENS)
    package = ModelPackage(model, Tokenizers(tokenizer, tokenizer), "translation", options, "en", "de")
    save(folder / "regard", package, "")
    if "hf" in peers:
        from transformers import PreTrainedTokenizerFast

        make_hf_model(model.config, "marian", CPU).save_pretrained(folder / "transformers")  # type: ignore[arg-type]
        file = str(folder / "regard" / "tokenizer.json")
        PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<eos>").save_pretrained(folder / "transformers")


def medians(programs: dict[str, list[str]], repeats: int) -> dict[str, float]:
    """Return the seconds of each program: medians of runs in turns, after one turn to warm up."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, words in programs.items():
            start = time.perf_counter()
            done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            times[name].append(time.perf_counter() - start)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def regard(*words: str) -> list[str]:
    return [sys.executable, "-m", "regard", *words]


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def measure_help(report: Report) -> None:
    found = medians({"regard": regard("--help"), "python": python("pass")}, report.options.repeats)
    for who, value in found.items():
        report.put("help", who, value, "s")


def measure_bundled(report: Report) -> None:
    """Measure the bundled model as a user runs it, with no option but the device."""
    programs = {"regard": regard("translate", "--device", "cpu", SENTENCE), "import torch": python("import torch")}
    found = medians(programs, report.options.repeats)
    for who, value in found.items():
        report.put(f"translate, {DEFAULT}", who, value, "s", found["import torch"] / value)
    output = subprocess.run(python(NEXT), capture_output=True, text=True, check=True).stdout
    report.put(f"the next short sentence, {DEFAULT}", "regard", 1000 * float(output), "ms")


def measure_translate(report: Report, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        save_models(Path(place), name, MODELS[name], report.options.tiny, report.peers)
        programs = {
            "regard": regard("translate", "--device", "cpu", "--model", f"{place}/regard", SENTENCE),
            "import torch": python("import torch"),
        }
        if "hf" in report.peers:
            programs["hf"] = python(THEIRS, f"{place}/transformers")
        found = medians(programs, report.options.repeats)
    for who, value in found.items():
        report.put(f"translate, {name}", who, value, "s", found["import torch"] / value)


def main() -> int:
    options = parser(__doc__, SECTIONS, ("hf",), "hf").parse_args()
    options.repeats = max(options.repeats, 5 if not options.tiny else 1)
    report = Report(options, CPU)
    report.section("help", measure_help)
    report.section(DEFAULT, measure_bundled)
    for name in MODELS:
        report.section(name, lambda report, name=name: measure_translate(report, name))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
