"""Decoding on a GPU beside `generate` of transformers: random weights of the same sizes in bf16, the same number of steps.

    python benchmarks/decode.py [--only 'gpt2*'] [--peers hf|none] [--repeats 5] [--json FILE]

Language models continue prompts of 32 tokens by 128; translation has sources of 32 tokens and 64 steps. The end token is
masked, so all rows are equally long. Times are wall-clock and include reading the prompt or source; the first call, which
compiles and captures CUDA graphs, is a figure of its own. With one row, a step is limited by reading all weights once: the
share is of the bandwidth of a copy, measured in the same run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import LLAMA, Report, joint, make_random_model, parser, reset_memory, sizes, wall
from peer_models import make_hf_model
from torch import Tensor, nn

from regard.config import DecodeConfig, ModelConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import pad_rows
from regard.decode.generation import generate
from regard.device import pick_device, pick_precision
from regard.models.gpt import GPT
from regard.models.transformer import Transformer

READ = 32  # tokens of a prompt or a source
ALL_AT_ONCE = 1 << 20  # tokens: one batch, whatever its size
Run = Callable[[], int]  # returns how many tokens it wrote


def make_inference_model(config: ModelConfig, device: torch.device) -> Any:
    """Return a model as it is used for decoding: in bf16 on a GPU."""
    return make_random_model(config, device).to(pick_precision("auto", device)).eval()


def rows(n: int, length: int, vocabulary: int) -> list[list[int]]:
    words = torch.randint(5, vocabulary, (n, length), generator=torch.Generator().manual_seed(0))
    return words.tolist()


def weight_bytes(model: nn.Module, looked_up: Tensor) -> int:
    """Return the bytes that every decoding step reads: blocks and head, but only one row of an embedding."""
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return held - (0 if model.head.weight is looked_up else looked_up.numel() * looked_up.element_size())


def measure(report: Report, what: str, who: str, run: Run, read: int = 0) -> None:
    """Report tokens per second; `read`: bytes read per token, if these are the limit."""
    device, found = report.device, []
    report.put(f"{what}, first call", who, wall(lambda: found.append(run()), device), "s")
    clock = statistics.median(wall(run, device) for _ in range(report.options.repeats))
    rate = found[0] / clock
    report.put(what, who, rate, "tokens/s", rate * read / report.limits["copy"] if read else None)


def language_model(what: str, kind: str, peer: str, name: str, n: int, **settings: Any) -> Callable[[Report], None]:
    """Return a section that continues `n` prompts."""

    def run(report: Report) -> None:
        tiny, device = report.options.tiny, report.device
        config, (length, new) = sizes(name, tiny, **settings), (4, 8) if tiny else (READ, 128)
        prompts = rows(n, length, config.target_vocab)
        model: GPT = make_inference_model(config, device)
        options = DecodeConfig(beam=1, min_len=new, max_new_tokens=new, batch_tokens=ALL_AT_ONCE)

        def own() -> int:
            return sum(len(row.tokens) for row in generate(model, prompts, options))

        read = weight_bytes(model, model.embedding.weight) if n == 1 else 0
        measure(report, what, "regard", own, read)
        if peer in report.peers:
            del model
            reset_memory(device)
            theirs = make_hf_model(config, kind, device, pick_precision("auto", device)).eval()
            measure(report, what, "hf", hf_generate(theirs, pad_rows(prompts, device), 1, new), read)

    return run


def translation(what: str, n: int, beam: int) -> Callable[[Report], None]:
    """Return a section that translates `n` sources with a beam."""

    def run(report: Report) -> None:
        tiny, device = report.options.tiny, report.device
        config = sizes("transformer-base", tiny, **joint(32000), dropout=0.0, max_len=512)
        length, steps = (4, 8) if tiny else (READ, 64)
        sources = rows(n, length - 1, config.source_vocab)  # the end token is the last
        model: Transformer = make_inference_model(config, device)
        limits = {"min_len": steps - 1, "max_len_a": 0.0, "max_len_b": steps, "batch_tokens": ALL_AT_ONCE}
        options = DecodeConfig(beam=beam, **limits)  # type: ignore[arg-type]

        def own() -> int:
            found = decode(model, sources, options, config.max_len, device)
            assert all(len(ranked[0].tokens) >= steps - 1 for ranked in found), "some ended before the last step"
            return n * steps

        measure(report, what, "regard", own)
        if "hf" in report.peers:
            del model
            reset_memory(device)
            theirs = make_hf_model(config, "marian", device, pick_precision("auto", device)).eval()
            source = pad_rows([[*ids, 2] for ids in sources], device)
            measure(report, what, "hf", hf_generate(theirs, source, beam, steps))

    return run


def hf_generate(model: Any, ids: Tensor, beam: int, steps: int) -> Run:
    """Return a call of transformers that generates exactly `steps` tokens."""
    mask = torch.ones_like(ids)

    @torch.inference_mode()
    def run() -> int:
        lengths = {"min_new_tokens": steps, "max_new_tokens": steps}
        model.generate(input_ids=ids, attention_mask=mask, num_beams=beam, do_sample=False, use_cache=True, **lengths)
        return len(ids) * steps

    return run


SECTIONS = {
    "gpt2-1": language_model("gpt2-1", "gpt2", "hf", "gpt2", 1, target_vocab=50257),
    "gpt2-64": language_model("gpt2-64", "gpt2", "hf", "gpt2", 64, target_vocab=50257),
    "marian-64x4": translation("marian-64x4", 64, 4),
    "marian-256x4": translation("marian-256x4", 256, 4),
    "marian-1x1": translation("marian-1x1", 1, 1),
    "marian-1x4": translation("marian-1x4", 1, 4),
    "llama-1": language_model("llama-1", "llama", "hf-llama", "llama-7b", 1, **LLAMA, target_vocab=32000),
}


def main() -> int:
    made = parser(__doc__, SECTIONS, ("hf", "hf-llama"), "hf")
    made.set_defaults(repeats=5)
    report = Report(made.parse_args(), pick_device("auto"))
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
