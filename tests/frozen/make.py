"""Writes data/models.safetensors and data/models.json: what the code of commit 0802df8 computes of tiny models.

    git worktree add --detach OLD 0802df8
    PYTHONPATH=OLD python tests/frozen/make.py

The numbers are the reference that later code is compared with (test_frozen.py), so this runs with that commit alone. Every
parameter is random, those of norms and biases too, so that none is at a value without effect, and is a number of bf16, in
which the file stores it without loss. A seed is taken only where small changes of the weights, far above what rounding
does, change no token that is written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import convert
import frozen_runs as runs
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

DATA = Path(__file__).parent / "data"
V = 40  # pieces of a vocabulary

# ---- settings, under the names of commit 0802df8 --------------------------------------------------------------------------

OFF = {"dropout": 0.0}
BLOCKS: dict[str, Any] = {
    **OFF,
    **{"d_model": 16, "n_heads": 4, "d_ff": 32, "norm": "pre", "norm_kind": "layer", "norm_eps": 1e-5, "bias": True},
    **{"activation": "relu", "attention_dropout": 0.0, "ff_dropout": 0.0, "scale_embeddings": True, "max_len": 32},
}
LAYERS = {"n_encoder_layers": 2, "n_decoder_layers": 2}
VOCABULARIES = {"source_vocab": V, "target_vocab": V}
PAIR: dict[str, Any] = {"preset": "transformer-tiny", **BLOCKS, **LAYERS, **VOCABULARIES, "tie": "all"}
GPT: dict[str, Any] = {"preset": "gpt-tiny", **BLOCKS, "n_decoder_layers": 2, "target_vocab": V, "tie": "all"}
BERT: dict[str, Any] = {"preset": "bert-tiny", **BLOCKS, "n_encoder_layers": 2, "source_vocab": V}
BERT |= {"norm": "post", "activation": "gelu", "embedding_norm": True, "scale_embeddings": False}
RNN: dict[str, Any] = {"preset": "lstm-small", **OFF, "n_decoder_layers": 2, "d_model": 16, "d_hidden": 16}
RNN |= {"scale_embeddings": False, "target_vocab": V, "max_len": 32, "tie": "all"}
SEARCH: dict[str, Any] = {"preset": "rnnsearch-small", **OFF, "d_model": 16, "d_hidden": 12, **VOCABULARIES}
SEARCH |= {"scale_embeddings": False, "max_len": 32, "n_encoder_layers": 1, "n_decoder_layers": 1, "tie": "all"}
LLAMA = {"norm_kind": "rms", "norm_eps": 1e-6, "bias": False, "activation": "silu", "gated": True, "d_ff": 24}

MODELS: dict[str, dict[str, Any]] = {
    # ---- encoder-decoders
    "transformer-pre": {**PAIR, "positions": "sinusoidal", "position_base": 100.0},
    "transformer-post": {
        **PAIR, "norm": "post", "activation": "gelu", "positions": "learned", "tie": "decoder", "source_vocab": 45,
        "embedding_norm": True, "head_bias": True, "scale_embeddings": False,
    },
    "transformer-parallel": {
        **PAIR, **LLAMA, "parallel": True, "positions": "rope", "rope_scaling": "linear", "rope_factor": 2.0,
        "n_kv_heads": 2, "tie": "none", "scale_logits": True,
    },
    "transformer-t5": {
        **PAIR, **LLAMA, "activation": "gelu-tanh", "positions": "t5", "t5_buckets": 8, "t5_max_distance": 12,
        "d_head": 6, "scale_embeddings": False, "scale_logits": True,
    },
    "transformer-kerple": {**PAIR, "positions": "kerple-log", "cross_positions": "kerple-power", "n_kv_heads": 1},
    "transformer-cross-t5": {**PAIR, "positions": "alibi", "cross_positions": "t5", "t5_buckets": 8, "t5_max_distance": 9},
    "transformer-fire": {**PAIR, "positions": "fire", "fire_width": 8, "fire_threshold": 4.0},
    "transformer-shaw": {**PAIR, "positions": "shaw", "shaw_clip": 3, "tie": "inputs"},
    "transformer-two-schemes": {**PAIR, "positions": "none", "encoder_positions": "linear"},
    "transformer-window": {**PAIR, "positions": "rope", "window": 2, "activation": "gelu-tanh"},
    "transformer-convolution": {  # its preset has no feed-forward layers
        **{key: value for key, value in PAIR.items() if key != "d_ff"}, "preset": "convs2s-small",
        "mixer": "convolution", "kernel": 3, "dilations": [1, 2], "positions": "learned",
    },
    # ---- decoders
    "gpt2": {**GPT, "positions": "learned", "activation": "gelu-tanh", "scale_embeddings": False, "max_len": 16},
    "gpt-llama": {
        **GPT, **LLAMA, "positions": "rope", "position_base": 500.0, "n_kv_heads": 2, "d_head": 6, "tie": "none",
        "scale_embeddings": False,
    },
    "gpt-ntk": {
        **GPT, **LLAMA, "positions": "rope", "rope_scaling": "ntk", "rope_factor": 2.0, "n_kv_heads": 1, "bias": True,
    },
    "gpt-palm": {**GPT, **LLAMA, "norm_kind": "layer", "parallel": True, "positions": "rope", "n_kv_heads": 1},
    "gpt-yarn": {
        **GPT, "positions": "yarn", "position_base": 50.0, "rope_factor": 4.0, "trained_len": 8, "yarn_slow": 0.5,
        "yarn_fast": 1.2, "d_head": 8,
    },
    "gpt-alibi": {**GPT, "d_model": 24, "n_heads": 6, "positions": "alibi", "embedding_norm": True, "head_bias": True},
    "gpt-kerple-power": {**GPT, "positions": "kerple-power", "norm": "post"},
    "gpt-fire": {**GPT, "positions": "fire", "fire_width": 8, "fire_threshold": 6.0},
    "gpt-cope": {**GPT, "positions": "cope", "cope_positions": 6},
    "gpt-window": {**GPT, "positions": "sinusoidal", "window": 3, "n_kv_heads": 2},
    "gpt-convolution": {**GPT, "mixer": "convolution", "kernel": 4, "dilations": [1, 3], "positions": "none"},
    # ---- encoders
    "bert": {**BERT, "positions": "learned", "token_types": 2},
    "bert-disentangled-3": {
        **BERT, "positions": "learned", "encoder_positions": "disentangled", "disentangled_buckets": 6,
        "disentangled_reach": 10,
    },
    "bert-disentangled-1": {
        **BERT, "positions": "learned", "encoder_positions": "disentangled", "disentangled_buckets": 0,
        "disentangled_reach": 5,
    },
    "bert-row": {**BERT, "positions": "t5", "t5_buckets": 8, "t5_max_distance": 9, "answer": "row", "n_classes": 3},
    "gpt-row": {**GPT, "positions": "rope", "answer": "row", "n_classes": 3},
    "vit": {
        "preset": "vit-tiny", **BLOCKS, "n_encoder_layers": 2, "positions": "learned", "activation": "gelu", "patch_size": 3,
        "image_channels": 2, "n_classes": 5,
    },
    # ---- recurrent
    "rnn-lstm": {**RNN, "cell": "lstm"},
    "rnn-lstm-norm": {**RNN, "cell": "lstm", "recurrent_norm": True, "tie": "none", "d_hidden": 12, "head_bias": True},
    "rnn-gru": {**RNN, "cell": "gru", "d_hidden": 12},
    "rnn-gru-cho-norm": {**RNN, "cell": "gru-cho", "recurrent_norm": True},
    "rnn-mut1": {**RNN, "cell": "mut1", "d_hidden": 12},
    "rnn-mut2": {**RNN, "cell": "mut2"},
    "rnn-mut3": {**RNN, "cell": "mut3"},
    "rnn-token": {**RNN, "cell": "gru", "bidirectional": True, "answer": "token", "n_classes": 4},
    "seq2seq-additive": {**SEARCH, "cell": "gru", "score": "additive"},
    "seq2seq-general": {
        **SEARCH, "cell": "lstm", "score": "general", "n_decoder_layers": 2, "n_encoder_layers": 2, "tie": "none",
    },
    "seq2seq-mut1-norm": {**SEARCH, "cell": "mut1", "score": "additive", "recurrent_norm": True},
    "seq2seq-dot": {**SEARCH, "cell": "gru", "score": "dot", "bidirectional": False},
    "seq2seq-none": {
        **SEARCH, "preset": "sutskever-small", "cell": "lstm", "score": "none", "reverse_source": True, **LAYERS,
        "bidirectional": False,
    },
    "seq2seq-constant": {**SEARCH, "preset": "rnnenc-small", "cell": "gru", "score": "constant", "bidirectional": False},
}  # fmt: skip

# ---- decoding -----------------------------------------------------------------------------------------------------------

SHORT = {"max_len_a": 1.0, "max_len_b": 4}
PAIR_WAYS = {"greedy": {**SHORT, "beam": 1}, "beam": {**SHORT, "beam": 4, "nbest": 4}}
MORE_PAIR_WAYS = {
    "proven": {**SHORT, "beam": 3, "nbest": 2, "length_penalty": 0.6, "stop": "proven", "min_len": 3},
    "sampled": {**SHORT, "temperature": 0.9, "top_k": 12, "nbest": 2, "seed": 5},
}
TEXT_WAYS = {"greedy": {"beam": 1, "max_new_tokens": 12}}
MORE_TEXT_WAYS = {
    "sampled": {"temperature": 0.9, "top_p": 0.9, "nbest": 2, "seed": 5, "max_new_tokens": 8},
    "penalized": {"beam": 1, "repetition_penalty": 1.3, "min_len": 4, "max_new_tokens": 12},
}
PACKED = ("gpt-llama", "gpt-alibi", "gpt-convolution", "gpt-cope")  # also read as rows of several documents
MORE = ("transformer-pre", "transformer-parallel", "gpt2", "gpt-llama", "rnn-lstm", "seq2seq-additive")


def case_of(name: str) -> dict[str, Any]:
    settings = MODELS[name]
    answer = settings.get("answer", "none")
    architecture = name.split("-")[0]
    kinds = {"transformer": "pair", "seq2seq": "pair", "bert": "masked", "vit": "image"}
    kind = answer if answer != "none" else kinds.get(architecture, "text")
    ways: dict[str, Any] = {}
    if kind == "pair":
        ways = PAIR_WAYS | (MORE_PAIR_WAYS if name in MORE else {})
    elif kind == "text":
        ways = TEXT_WAYS | (MORE_TEXT_WAYS if name in MORE else {})
    rest = {"max_len": settings["max_len"], "decode": ways, "packed": name in PACKED}
    return {"kind": kind, "settings": settings, **rest}


# ---- weights and inputs -------------------------------------------------------------------------------------------------


def weights_of(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return random numbers of bf16 for every parameter: matrices keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in model.named_parameters():
        x = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            x = x * (1.5 if "embedding" in name else 1.0) * parameter[0].numel() ** -0.5
        elif "bias" in name:
            x = 0.3 * x
        elif "schemes" in name and "norm" not in name:  # such as the slopes of biases, which must be positive
            x = (0.3 + 0.1 * x).abs().clamp(min=0.05)
        else:  # gains
            x = (1 + 0.3 * x).abs().clamp(min=0.1)
        found[name] = x.bfloat16()
    return found


def inputs_of(case: Mapping[str, Any], model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)

    def texts(vocab: int, lengths: tuple[int, ...], start: bool, end: bool) -> Tensor:
        ids = torch.randint(5, vocab, (len(lengths), max(lengths)), generator=generator)
        for row, n in zip(ids, lengths, strict=True):
            row[n:] = -1
            row[0] = convert.BOS if start else row[0]
            row[n - 1] = convert.EOS if end else row[n - 1]
        return ids

    config: Any = model.config
    kind = case["kind"]
    if kind == "image":
        images = torch.randn(3, config.image_channels, 9, 12, generator=generator)
        return {"images": images, "labels": torch.tensor([1, 4, 0])}
    if kind == "pair":
        source = texts(config.source_vocab, (7, 3, 5), start=False, end=False)
        return {"source": source, "target": texts(config.target_vocab, (4, 8, 6), start=True, end=True)}
    vocab, lengths = config.source_vocab or config.target_vocab, (9, 4, 6)
    found = {"ids": texts(vocab, lengths, start=kind != "text", end=kind not in ("text", "token"))}
    if kind == "masked" or (kind in ("row", "token")):
        found["types"] = (torch.arange(9) > 3).long().expand(3, 9).contiguous() * (config.token_types > 1)
    if kind == "masked":
        labels = torch.full_like(found["ids"], -1)
        for row, column in ((0, 2), (0, 5), (1, 1), (2, 3)):
            labels[row, column], found["ids"][row, column] = found["ids"][row, column].item(), 4
        found["labels"] = labels
    if kind == "row":
        found["labels"] = torch.tensor([2, 0, 1])
    if kind == "token":
        labels = torch.randint(0, config.n_classes, found["ids"].shape, generator=generator)
        found["labels"] = labels.where(found["ids"] >= 0, -1)
    return found


# ---- stability ----------------------------------------------------------------------------------------------------------


def ids_of(written: Mapping[str, Any]) -> list[Any]:
    return [[row["ids"] for row in rows] for rows in written.values()]


def margins(written: Mapping[str, Any]) -> float:
    """Return the smallest difference of the scores of neighbouring hypotheses of one text, found by beams."""
    gaps = [1.0]
    for name in ("beam", "proven"):
        rows = written.get(name, [])
        gaps += [a["score"] - b["score"] for a, b in itertools.pairwise(rows) if a["text"] == b["text"]]
    return min(gaps)


def shaken(weights: Mapping[str, Tensor], size: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: x.float() * (1 + size * torch.randn(x.shape, generator=generator)) for name, x in weights.items()}


def stable(case: Mapping[str, Any], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> bool:
    """Return whether hypotheses lie 1e-3 apart, some end, and weights changed by 3e-4 of their size write the same."""
    if not case["decode"]:
        return True
    found = runs.written(runs.filled(case, weights), case, inputs)
    ended = [row.get("ended", row.get("end") == "end") for rows in found.values() for row in rows]
    if margins(found) < 1e-3 or (case["kind"] == "pair" and not any(ended)):
        return False
    return all(
        ids_of(runs.written(runs.filled(case, shaken(weights, 3e-4, i)), case, inputs)) == ids_of(found)
        for i in range(8)
    )


def rounding(case: Mapping[str, Any], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> tuple[float, ...]:
    """Return how far logits and losses move when every weight moves by one rounding: the scale of what may differ."""
    exact, other = (runs.filled(case, w) for w in (weights, shaken(weights, 2.0**-24, 0)))
    with torch.no_grad():
        by_logits = (runs.predicted(exact, case, inputs) - runs.predicted(other, case, inputs)).abs().max().item()
    pairs = zip(runs.losses(exact, case, inputs), runs.losses(other, case, inputs), strict=True)
    apart = [abs(a - b) / a for a, b in pairs]
    return by_logits, apart[0], max(apart)


def main() -> None:
    assert not convert.NESTED, "make.py runs with the code of commit 0802df8 alone"
    torch.set_num_threads(1)
    tensors: dict[str, Tensor] = {}
    cases: dict[str, Any] = {}
    for name in MODELS:
        case = case_of(name)
        model: Any = runs.build(case)
        config = dataclasses.asdict(model.config)
        case["sizes"] = {key: config[key] for key in ("n_heads", "n_kv_heads", "d_head", "d_ff", "gated")}
        for seed in range(200):
            weights, inputs = weights_of(model, seed), inputs_of(case, model, seed)
            if stable(case, weights, inputs) and (moved := rounding(case, weights, inputs))[0] < 2e-6:
                break
        else:
            raise SystemExit(f"{name}: no seed writes tokens that are clear of each other")
        model = runs.filled(case, weights)
        with torch.no_grad():
            logits = runs.predicted(model, case, inputs)
            if case["packed"]:
                tensors[f"{name}/packed"] = runs.packed(model, inputs)
        case["written"] = runs.written(model, case, inputs)
        case["losses"] = runs.losses(model, case, inputs)
        assert logits.abs().max() < 16
        by_logits, first, last = moved
        assert max(first, last) < 5e-7
        tensors |= {f"{name}/weights/{key}": x for key, x in weights.items()}
        tensors |= {f"{name}/inputs/{key}": x.short() if not x.is_floating_point() else x for key, x in inputs.items()}
        tensors[f"{name}/logits"] = logits.contiguous()
        cases[name] = case
        print(
            f"{name}: seed {seed}, {sum(x.numel() for x in weights.values()):,} weights, logits to "
            f"{logits.abs().max():.1f}, losses {case['losses'][0]:.3f} to {case['losses'][-1]:.3f}, one rounding moves "
            f"logits by {by_logits:.1e} and losses by {first:.1e} to {last:.1e}",
            flush=True,
        )
    DATA.mkdir(exist_ok=True)
    save_file(tensors, DATA / "models.safetensors")
    lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    (DATA / "models.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
