"""Decoding on a CPU beside CTranslate2: the same random Transformer-base, the same sources, 48 tokens written for each.

    python benchmarks/cpu_decode.py [--threads 2] [--kinds float32,int8] [--json FILE]

Compare within one run. The physical limit is what reading all weights once a step allows at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.config import DecodeConfig
from regard.decode.engine import decode
from regard.layers.packed import column_major
from regard.models.architectures import make_model, preset
from regard.models.transformer import Transformer

V, STEPS, LENGTH = 32000, 48, 32
CASES = ((1, 1), (1, 4), (16, 1), (16, 4))  # sentences, beam


def random_model() -> Transformer:
    torch.manual_seed(0)
    model = make_model(preset("transformer-base", source_vocab=V, target_vocab=V, dropout=0.0, max_len=512)).eval()
    assert isinstance(model, Transformer)
    return model


def sources(n: int) -> list[list[int]]:
    return [[5 + (i * 7 + j * 13) % (V - 5) for j in range(LENGTH - 1)] for i in range(n)]


def ours(model: Transformer) -> Callable[[int, int], list[list[int]]]:
    def run(n: int, beam: int) -> list[list[int]]:
        options = DecodeConfig(beam=beam, min_len=STEPS - 1, max_len_a=0.0, max_len_b=STEPS, batch_tokens=1 << 20)
        found = decode(model, sources(n), options, 512, torch.device("cpu"))
        return [ranked[0].tokens for ranked in found]

    return run


def ctranslate2_model(model: Transformer, threads: int, kind: str) -> Callable[[int, int], list[list[int]]]:
    """The same weights in CTranslate2."""
    import ctranslate2
    from ctranslate2.specs import TransformerSpec

    spec = TransformerSpec.from_config(6, 8, pre_norm=True)
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = True
    for stack, own in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        fill_stack(stack, own)
    words = model.source_embedding.weight.detach().numpy()
    embedding = spec.encoder.embeddings
    (embedding[0] if isinstance(embedding, list) else embedding).weight = words
    spec.decoder.embeddings.weight = spec.decoder.projection.weight = words
    spec.decoder.projection.bias = np.zeros(V, np.float32)
    names = ["<blank>", "<s>", "</s>", "<unk>", *(f"t{i}" for i in range(4, V))]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    folder = tempfile.mkdtemp()
    spec.save(folder)
    translator = ctranslate2.Translator(folder, inter_threads=1, intra_threads=threads, compute_type=kind)

    def run(n: int, beam: int) -> list[list[int]]:
        rows = [[*(names[i] for i in row), "</s>"] for row in sources(n)]
        found = translator.translate_batch(
            rows,
            beam_size=beam,
            min_decoding_length=STEPS,
            max_decoding_length=STEPS,
            max_batch_size=0,
            length_penalty=1.0,
        )
        return [[names.index(piece) for piece in result.hypotheses[0]] if n == 1 else [] for result in found]

    return run


def fill_stack(stack: Any, own: torch.nn.Module) -> None:
    scheme = own.schemes[0]  # type: ignore[index]
    positions = torch.arange(512)[None]
    stack.position_encodings.encodings = scheme.embed(torch.zeros(1, 512, 512), positions)[0].numpy()
    norm(stack.layer_norm, own.norm)
    for layer, block in zip(stack.layer, own.blocks, strict=True):  # type: ignore[arg-type]
        parts = block.sublayers
        attention = layer.self_attention
        linear(attention.linear[0], parts["self"].sublayer.qkv)
        linear(attention.linear[1], parts["self"].sublayer.out)
        norm(attention.layer_norm, parts["self"].norm)
        if "cross" in parts:
            linear(layer.attention.linear[0], parts["cross"].sublayer.q)
            linear(layer.attention.linear[1], parts["cross"].sublayer.kv)
            linear(layer.attention.linear[2], parts["cross"].sublayer.out)
            norm(layer.attention.layer_norm, parts["cross"].norm)
        linear(layer.ffn.linear_0, parts["ff"].sublayer.inner)
        linear(layer.ffn.linear_1, parts["ff"].sublayer.outer)
        norm(layer.ffn.layer_norm, parts["ff"].norm)


def linear(theirs: Any, own: torch.nn.Linear) -> None:
    theirs.weight, theirs.bias = own.weight.detach().numpy(), own.bias.detach().numpy()


def norm(theirs: Any, own: torch.nn.LayerNorm) -> None:
    theirs.gamma, theirs.beta = own.weight.detach().numpy(), own.bias.detach().numpy()


def seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read a second, in one pass over more than the caches hold."""
    x = torch.ones(1 << 26)
    return 4 * len(x) / seconds(lambda: x.sum(), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default="float32,int8", help="compute types of CTranslate2; empty: without it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = random_model()
    laid_out = random_model()
    column_major(laid_out)  # as a model is when it was loaded
    runs = {"regard, as trained": ours(model), "regard": ours(laid_out)}
    for kind in filter(None, options.kinds.split(",")):
        runs[f"ctranslate2 {kind}"] = ctranslate2_model(model, options.threads, kind)
    read = 4 * sum(p.numel() for p in (*model.decoder.parameters(), model.head.weight))
    limit = copy_bandwidth() / read
    table: dict[str, dict[str, float]] = {}
    for n, beam in CASES:
        table[f"{n} x {beam}"] = {
            name: n * STEPS / seconds(lambda run=run, n=n, beam=beam: run(n, beam), options.repeats)
            for name, run in runs.items()
        }
        print(f"{n} x beam {beam}", {k: round(v, 1) for k, v in table[f"{n} x {beam}"].items()}, file=sys.stderr)
    print(f"one step reads {read / 1e6:.0f} MB: at most {limit:.0f} steps a second at the bandwidth measured")
    print(json.dumps(table, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"tokens_per_s": table, "steps_per_s_limit": limit}, indent=1))


if __name__ == "__main__":
    main()
