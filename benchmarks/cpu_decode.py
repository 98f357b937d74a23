"""Decoding on a CPU beside CTranslate2 and transformers: a random Transformer-base, 32 tokens in and 48 out per sentence.

    python benchmarks/cpu_decode.py [--threads 2] [--weights fp32,int8] [--kinds float32,int8] [--neighbour] [--json FILE]

Regard and CTranslate2 have the same weights and must give the same output in fp32; that is checked first. Each runs in its
own process, since the thread pools of two libraries disturb each other in one, and they take turns, so that other load on
the machine affects all alike: compare within one run. `limit` is what reading all weights once per step allows at the
measured bandwidth, for one sentence at a time.

CTranslate2 runs with one thread, with all threads inside its matrix products, and with a worker for each thread, as many
batches as workers (`inter_threads`); the best of them counts. Regard runs with its defaults, and once more in one thread.
`--neighbour` keeps one core busy with another process meanwhile: nothing may then be slower with all cores than with one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.kernels.weight_layout import deinterleave_rows
from regard.layers.quantization import convert_weights
from regard.models.architectures import make_model, preset
from regard.models.transformer import Transformer
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS

V, STEPS, LENGTH, HEADS = 32000, 48, 32, 8
CASES = ((1, 1), (1, 4), (16, 1), (16, 4))  # sentences, beam
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
CPU = torch.device("cpu")
Run = Callable[[int, int], list[list[int]]]  # sentences, beam -> the best hypothesis of each sentence


def random_model() -> Transformer:
    torch.manual_seed(0)
    sizes = {
        "source_vocab": V,
        "target_vocab": V,
        "dropout": 0.0,
        "max_len": 512,
        **DEFAULT_SPECIAL_TOKENS.model_settings(),
    }
    model = make_model(preset("transformer-base", **sizes)).eval()
    assert isinstance(model, Transformer)
    for module in model.decoder.modules():
        # Random LayerNorm scales: with tied embeddings and unit scales an untrained decoder repeats its last token.
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight)
    return model


def make_sources(n: int) -> list[list[int]]:
    return [[5 + (i * 7 + j * 13) % (V - 5) for j in range(LENGTH - 1)] for i in range(n)]


def make_regard(weights: str) -> Run:
    model = convert_weights(random_model(), weights, CPU)

    def run(n: int, beam: int) -> list[list[int]]:
        options = DecodeConfig(beam=beam, min_len=STEPS - 1, max_len_a=0.0, max_len_b=STEPS, batch_tokens=1 << 20)
        return [ranked[0].tokens for ranked in decode(model, make_sources(n), options, 512, CPU)]  # type: ignore[arg-type]

    return run


def huggingface() -> Run:
    """Return a decoder of transformers' Marian of the same sizes, with other random weights."""
    from peer_models import make_hf_model

    theirs = make_hf_model(random_model().config, "marian", CPU).eval()

    @torch.inference_mode()
    def run(n: int, beam: int) -> list[list[int]]:
        ids = torch.tensor([[*row, DEFAULT_SPECIAL_TOKENS.eos] for row in make_sources(n)])
        length = {"min_new_tokens": STEPS, "max_new_tokens": STEPS}
        return theirs.generate(input_ids=ids, num_beams=beam, do_sample=False, **length)[:, 1:].tolist()  # type: ignore[operator]

    return run


def ctranslate2_model(kind: str, threads: int, workers: int = 1, like_ours: bool = False) -> Run:
    """Return a decoder of the same weights in CTranslate2.

    `like_ours`: special tokens are suppressed, as in Regard; without it CTranslate2 has less to do."""
    import ctranslate2
    from ctranslate2.specs import TransformerSpec

    model, spec = random_model(), TransformerSpec.from_config(6, HEADS, pre_norm=True)
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = True
    for stack, own in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        fill_stack(stack, own)
    words = model.source_embedding.weight.detach().numpy()
    embedding = spec.encoder.embeddings
    (embedding[0] if isinstance(embedding, list) else embedding).weight = words
    spec.decoder.embeddings.weight = spec.decoder.projection.weight = words
    spec.decoder.projection.bias = np.zeros(V, np.float32)
    names = ["<blank>", "<s>", "</s>", "<unk>", *(f"t{i}" for i in range(4, V))]
    number = {name: i for i, name in enumerate(names)}
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = ctranslate2.Translator(folder, inter_threads=workers, intra_threads=threads, compute_type=kind)
    rules: dict[str, Any] = {"min_decoding_length": STEPS, "max_decoding_length": STEPS, "length_penalty": 1.0}
    if like_ours:
        rules |= {"disable_unk": True, "suppress_sequences": [["<blank>"], ["<s>"], ["t4"]]}

    def run(n: int, beam: int) -> list[list[int]]:
        rows = [[*(names[i] for i in row), "</s>"] for row in make_sources(n)]
        together = -(-n // workers) if workers > 1 else 0  # sentences in a batch; 0 = all
        found = translator.translate_batch(rows, beam_size=beam, max_batch_size=together, **rules)
        return [[number[piece] for piece in result.hypotheses[0]] for result in found]

    return run


def fill_stack(stack: Any, own: torch.nn.Module, max_len: int = 512) -> None:
    scheme = own.schemes[0]  # type: ignore[index]
    positions = torch.arange(max_len)[None]
    stack.position_encodings.encodings = scheme.embed(torch.zeros(1, max_len, 512), positions)[0].numpy()
    norm(stack.layer_norm, own.norm)
    for layer, block in zip(stack.layer, own.blocks, strict=True):  # type: ignore[arg-type]
        parts = block.sublayers
        attention = layer.self_attention
        linear(attention.linear[0], parts["self"].qkv, parts=3)
        linear(attention.linear[1], parts["self"].out)
        norm(attention.layer_norm, block.norms["self"])
        if "cross" in parts:
            linear(layer.attention.linear[0], parts["cross"].q)
            linear(layer.attention.linear[1], parts["cross"].kv, parts=2)
            linear(layer.attention.linear[2], parts["cross"].out)
            norm(layer.attention.layer_norm, block.norms["cross"])
        linear(layer.ffn.linear_0, parts["ff"].inner)
        linear(layer.ffn.linear_1, parts["ff"].outer)
        norm(layer.ffn.layer_norm, block.norms["ff"])


def linear(theirs: Any, own: torch.nn.Linear, parts: int = 1) -> None:
    """Copy a linear layer; `parts` matrices are interleaved by head in ours and stacked in theirs."""
    weight, bias = (
        torch.cat(deinterleave_rows(p.detach(), HEADS, [1] * parts)).numpy() for p in (own.weight, own.bias)
    )
    theirs.weight, theirs.bias = weight, bias


def norm(theirs: Any, own: torch.nn.LayerNorm) -> None:
    theirs.gamma, theirs.beta = own.weight.detach().numpy(), own.bias.detach().numpy()


class DecoderProcess:
    """A decoder in a process of its own. `make` is a function of this file."""

    def __init__(self, threads: int, make: Callable[..., Run], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, threads, make, arguments), daemon=True)
        self.process.start()
        other.close()

    def __call__(self, n: int, beam: int) -> tuple[float, list[list[int]]]:
        """Return the seconds and the hypotheses."""
        self.pipe.send((n, beam))
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def serve(pipe: Connection, threads: int, make: Callable[..., Run], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    run = make(*arguments)
    for n, beam in iter(pipe.recv, None):
        start = time.perf_counter()
        found = run(n, beam)
        pipe.send((time.perf_counter() - start, found))


def in_turns(runs: dict[str, DecoderProcess], n: int, beam: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the tokens per second of each, median and best, of rounds in which all take turns, after one warm-up round."""
    rounds = [{name: run(n, beam)[0] for name, run in runs.items()} for _ in range(repeats + 1)][1:]
    times = {name: [times[name] for times in rounds] for name in runs}
    work = n * STEPS
    return {k: {"median": work / statistics.median(t), "best": work / min(t)} for k, t in times.items()}


def bandwidth() -> float:
    """Return the bytes read per second, in passes over more memory than the caches hold."""
    x, times = torch.ones(1 << 26), []
    for _ in range(6):
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return 4 * len(x) / min(times)


def ratio(found: dict[str, dict[str, float]], which: str, theirs: str = "") -> float:
    """Return Regard with defaults and its best weights over the best of CTranslate2, of the runs whose name has `theirs`."""
    own = [v[which] for k, v in found.items() if k.startswith("regard") and "," not in k]
    other = [v[which] for k, v in found.items() if k.startswith("ctranslate2") and theirs in k]
    return max(own) / max(other) if own and other else float("nan")


def to_one_thread(found: dict[str, dict[str, float]], which: str) -> float:
    """Return the lowest ratio of all threads to one thread over the kinds of weights."""
    pairs = [(v[which], found[f"{k}, 1 thread"][which]) for k, v in found.items() if f"{k}, 1 thread" in found]
    return min((both / one for both, one in pairs), default=float("nan"))


def same_hypotheses(a: DecoderProcess, b: DecoderProcess) -> dict[str, bool]:
    return {f"{n} x {beam}": a(n, beam)[1] == b(n, beam)[1] for n, beam in CASES}


def make_runs(options: argparse.Namespace) -> dict[str, DecoderProcess]:
    threads = options.threads
    runs = {f"regard {weights}": DecoderProcess(threads, make_regard, weights) for weights in options.weights}
    if threads > 1:
        runs |= {f"regard {weights}, 1 thread": DecoderProcess(1, make_regard, weights) for weights in options.weights}
    if options.kinds:
        import ctranslate2

        known = ctranslate2.get_supported_compute_types("cpu")
        for kind in (kind for kind in options.kinds if kind in known):
            runs[f"ctranslate2 {kind}, {threads} threads"] = DecoderProcess(threads, ctranslate2_model, kind, threads)
            if threads > 1:
                runs[f"ctranslate2 {kind}, 1 thread"] = DecoderProcess(1, ctranslate2_model, kind, 1)
                runs[f"ctranslate2 {kind}, {threads} workers"] = DecoderProcess(
                    threads, ctranslate2_model, kind, 1, threads
                )
    if options.huggingface:
        runs["transformers fp32"] = DecoderProcess(threads, huggingface)
    return runs


def keep_busy() -> None:
    """Keep one core busy, with little memory."""
    x = 1
    while True:
        x = (x * 6364136223846793005 + 1) % (1 << 64)


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=keep_busy, daemon=True)
    if wanted:
        process.start()
    try:
        yield
    finally:
        if wanted:
            process.kill()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    parser.add_argument("--weights", type=names, default="fp32,int8", help="of Regard: fp32, fp16, bf16, int8")
    parser.add_argument(
        "--kinds", type=names, default="float32,int8,int8_float32,bfloat16", help="of CTranslate2, if it can"
    )
    parser.add_argument("--neighbour", action="store_true", help="with a process beside that keeps one core busy")
    parser.add_argument("--huggingface", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs, model = make_runs(options), random_model()
    result: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__, "processor": processor()}
    result["neighbour"] = options.neighbour
    if "regard fp32" in runs and "float32" in options.kinds:
        theirs = DecoderProcess(options.threads, ctranslate2_model, "float32", options.threads, 1, True)
        result["same as ctranslate2 in fp32"] = same_hypotheses(runs["regard fp32"], theirs)
        theirs.end()
        print("same hypotheses as CTranslate2 in fp32:", result["same as ctranslate2 in fp32"], file=sys.stderr)
    numbers = sum(p.numel() for p in (*model.decoder.parameters(), model.head.weight))
    read = bandwidth()
    result["limit, steps per s"] = {w: read / (BYTES[w] * numbers) for w in options.weights}
    with neighbour(options.neighbour):
        for n, beam in CASES:
            found = in_turns(runs, n, beam, options.repeats)
            ratios = {
                "to ctranslate2's best": ratio(found, "median"),
                "to ctranslate2 without its workers": ratio(found, "median", "thread"),
                "to one thread": to_one_thread(found, "median"),
            }
            result[f"{n} x {beam}"] = {"tokens per s": found, "ratio": ratios}
            shown = ", ".join(f"{k}: {v['median']:.0f} ({v['best']:.0f})" for k, v in found.items())
            print(f"{n} x beam {beam}: {shown}; ratios {ratios}", file=sys.stderr)
    for run in runs.values():
        run.end()
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
