"""What a model costs, by formula: arithmetic and memory. Sizes must be resolved.

A product of (m, k) and (k, n) is 2mkn FLOPs; the backward pass costs two forwards. Attention is counted in full, S keys for
each query, masked or not: the usual convention. What position schemes, softmax, norms and activations add is not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from regard.config import ModelConfig
from regard.device import PEAK_FLOPS
from regard.models.architectures import make_model
from regard.models.cost_recurrent import annotated, row_activations, row_flops, state_numbers
from regard.models.counted import counted, matrix_weights, trained
from regard.models.parameters import RECURRENT, architecture, blocks, embedding_place, parts, sides
from regard.training.crossentropy import chunk_rows


def forward_flops(config: ModelConfig, batch: int, source_len: int = 0, target_len: int = 0) -> int:
    """One forward pass over padded rows. An encoder reads (batch, source_len), for images 1 + patches; a decoder writes
    (batch, target_len). Logits are counted for every token."""
    at = source_len, target_len
    if architecture(config) in RECURRENT:
        return batch * sum(row_flops(config, *at).values())
    middle = sum(n * sum(block_flops(config, side, *at).values()) for side, n, _ in sides(config))
    return batch * (middle + sum(end_flops(config, *at).values()))


def place_flops(config: ModelConfig, s: int, t: int) -> dict[str, int]:
    """The same for one row, by place."""
    if architecture(config) in RECURRENT:
        return row_flops(config, s, t)
    found: dict[str, int] = {}
    for side, n, _ in sides(config):
        block = block_flops(config, side, s, t)
        found |= {f"{side}.{i}.{name}": flops for i in range(n) for name, flops in block.items()}
    return found | end_flops(config, s, t)


def block_flops(config: ModelConfig, side: str, s: int, t: int) -> dict[str, int]:
    """Of one row in one block, by sublayer."""
    c, n, (queries, keys) = config.d_model, s if side == "encoder" else t, widths(config)
    found = {"self": mixer_flops(config, n)}
    if side == "decoder" and blocks(config)[2]:  # q, out by the target; k, v by the memory
        found["cross"] = t * (4 * c * queries + 4 * s * queries) + s * 4 * c * keys
    if config.d_ff:
        found["ff"] = n * 2 * (3 if (config.feedforward == "gated") else 2) * c * config.d_ff
    return found


def widths(config: ModelConfig) -> tuple[int, int]:
    """Of the queries and of the keys of all heads together."""
    return config.n_heads * config.d_head, config.n_kv_heads * config.d_head


def mixer_flops(config: ModelConfig, n: int) -> int:
    """Of one row of n tokens in one block: its self-attention or convolution."""
    c, (queries, keys) = config.d_model, widths(config)
    if "convolution" in config.mixer:
        return n * 2 * (config.value("convolution.kernel") * c) * (2 * c)
    return n * (4 * c * (queries + keys) + 4 * n * queries)  # q and out, k and v; q k^T and the weighted sum of v


def end_flops(config: ModelConfig, s: int, t: int) -> dict[str, int]:
    """Of one row, outside the blocks."""
    c, kind = config.d_model, architecture(config)
    if config.answer != "none":
        found = {"pooler": 2 * c * c} if kind == "bert" and config.answer == "row" else {}
        return found | {"answers": 2 * c * config.n_classes * (max(s, t) if config.answer == "token" else 1)}
    if kind == "vit":  # the class is read from one token, which is no patch
        patches = 2 * c * (s - 1) * config.value("vit.image_channels") * config.value("vit.patch_size") ** 2
        return {"patches": patches, "head": 2 * c * config.n_classes}
    return {"head": 2 * c * (s * (c + config.source_vocab) if kind == "bert" else t * config.target_vocab)}


def training_flops(config: ModelConfig, batch: int, source_len: int = 0, target_len: int = 0) -> int:
    return 3 * forward_flops(config, batch, source_len, target_len)


def training_memory(config: ModelConfig, batch: int, source_len: int = 0, target_len: int = 0) -> dict[str, int]:
    """Bytes of a training step in bf16: fp32 weights, products under autocast, attention that keeps no (T, S) matrix."""
    mine = parts(config)
    n, looked_up = trained(mine), ("embedding", "token types")
    multiplied = sum(part.total for part in mine if part.matrix and part.kind not in looked_up)
    return {
        "weights": 4 * n,
        "gradients": 4 * n,
        "moments": 8 * n,  # AdamW's two
        "bf16 copies": 2 * multiplied,
        "activations": batch * activations(config, source_len, target_len),
        "logits": logit_bytes(config, batch, source_len, target_len),
    }


def activations(config: ModelConfig, s: int, t: int) -> int:
    """Bytes that the backward pass of one row needs: what norms and products read, in bf16 (2)."""
    return sum(place_activations(config, s, t).values())


def place_activations(config: ModelConfig, s: int, t: int) -> dict[str, int]:
    """The same by place. What a stack gives is its last norm's."""
    if architecture(config) in RECURRENT:
        return row_activations(config, s, t)
    found: Counter[str] = Counter()
    for side, n, _ in sides(config):
        block = block_activations(config, side, s, t)
        found |= Counter({f"{side}.{i}.{name}": kept for i in range(n) for name, kept in block.items()})
        before, after = (share * (s if side == "encoder" else t) for share in end_activations(config))
        found[embedding_place(config, side)] += before
        found[f"{side}.norm" if config.norm == "pre" else f"{side}.{n - 1}.{[*block][-1]}"] += after
    if architecture(config) == "bert":
        found["head"] += s * 8 * config.d_model
    return found


def block_activations(config: ModelConfig, side: str, s: int, t: int) -> dict[str, int]:
    """Of one row in one block, by sublayer."""
    f, (queries, keys) = config.d_ff, widths(config)
    kept = (
        3 if (config.feedforward == "gated") else 1 if config.activation == "relu" else 2
    )  # relu is its own derivative's memory
    # of the block's other sublayers: the sum that a norm reads, and the norm, which the first product reads
    later = 0 if config.parallel else 4 * config.d_model
    tokens = s if side == "encoder" else t
    found = {"self": tokens * mixer_activations(config)}
    if side == "decoder" and blocks(config)[2]:
        found["cross"] = t * (later + 4 * queries) + s * 4 * keys
    if f:
        found["ff"] = tokens * (later + 2 * kept * f + (3 * f if config.ff_dropout else 0))
    return found


def mixer_activations(config: ModelConfig) -> int:
    """Of one token in one block: its self-attention or convolution, with the sum and the norm below it."""
    c, (queries, keys) = config.d_model, widths(config)
    if "convolution" in config.mixer:
        beside = 2 * c if config.parallel else 0  # the norm, where other sublayers read it too
        return (
            2 * c + beside + 2 * config.value("convolution.kernel") * c + 4 * c
        )  # the sum, the tokens seen, both halves before the gate
    turned = 4 * queries + 2 * keys if config.positions in ("rope", "yarn") else 0  # copies, by heads
    return 4 * c + 2 * (queries + 2 * keys) + 2 * queries + turned  # q, k, v and what attention gives


def end_activations(config: ModelConfig) -> tuple[int, int]:
    """Of one token, before and after the blocks of a stack."""
    c, normed = config.d_model, config.embedding_norm and architecture(config) != "vit"
    before = (4 * c if normed else 0) + (c if config.dropout else 0)  # fp32; a mask
    return before, 4 * c if config.norm == "pre" else 2 * c  # what a stack gives, and the last sum


def logit_bytes(config: ModelConfig, batch: int, s: int, t: int) -> int:
    """Those of tokens are there in bf16, a chunk at a time, and become their gradient; classes in fp32 beside theirs."""
    kind = architecture(config)
    if config.answer != "none" or kind == "vit":
        return batch * 8 * config.n_classes * (max(s, t) if config.answer == "token" else 1)
    rows, vocab = (batch * s, config.source_vocab) if kind == "bert" else (batch * t, config.target_vocab)
    return 2 * vocab * min(rows, chunk_rows(rows, 2 * vocab, torch.device("cuda")))


def cache_numbers(config: ModelConfig, source_len: int, target_len: int) -> int:
    """Numbers that decoding keeps of one row: keys and values of each decoder block, own and of the memory; what went into
    a convolution; what attention reads of a recurrent encoder."""
    if architecture(config) in RECURRENT:
        return source_len * sum(annotated(config))
    (_, n_decoder, n_cross), (_, keys) = blocks(config), widths(config)
    own = config.d_model if "convolution" in config.mixer else 2 * keys
    return n_decoder * target_len * own + n_cross * source_len * 2 * keys


def lengths(config: ModelConfig, length: int) -> tuple[int, int]:
    """How long source and target are in rows of `length` tokens; 0 for a side that the model does not have."""
    kind = architecture(config)
    return (length * (kind not in ("gpt", "rnn")), length * (kind in ("transformer", "seq2seq", "gpt", "rnn")))


def measured(config: ModelConfig, batch: int, length: int, tokens: int | None = None) -> dict[str, Any]:
    """All the numbers of a model, as `regard cost` prints them."""
    return {
        "architecture": architecture(config),
        "batch": batch,
        "length": length,
        "parameters": count_parameters(config),
        "flops": count_flops(config, length, tokens),
        "memory": count_memory(config, batch, length),
    }


def count_parameters(config: ModelConfig) -> dict[str, Any]:
    """By formula, and counted on a model that is built without memory."""
    with torch.device("meta"):
        model = make_model(config)
    formula, count = parts(config), counted(model)
    totals = {(part.kind, part.shape): part.total for part in count}
    kinds = [
        {**vars(part), "matrix": part.matrix, "total": part.total, "counted": totals.get((part.kind, part.shape), 0)}
        for part in formula
    ]
    (weights, number), (weights_counted, _) = matrix_weights(formula), matrix_weights(count)
    return {
        "kinds": kinds,
        "matrices": {"number": number, "total": weights, "counted": weights_counted},
        "trained": {"total": trained(formula), "counted": sum(p.numel() for p in model.parameters())},
    }


def count_flops(config: ModelConfig, length: int, tokens: int | None) -> dict[str, Any]:
    at = lengths(config, length)
    result: dict[str, Any] = {"forward_per_token": forward_flops(config, 1, *at) / length}
    result["training_per_token"] = training_flops(config, 1, *at) / length
    if tokens:
        total = tokens * result["training_per_token"]
        seconds = total / (MFU * PEAK_FLOPS[GPU])
        result |= {"tokens": tokens, "training": total, "example": {"gpu": GPU, "mfu": MFU, "days": seconds / 86400}}
    return result


GPU, MFU = "H200", 0.4  # the example


def count_memory(config: ModelConfig, batch: int, length: int) -> dict[str, Any]:
    """Bytes."""
    training, n = training_memory(config, batch, *lengths(config, length)), trained(parts(config))
    decoding = {"weights_bf16": 2 * n, "weights_fp32": 4 * n}
    if architecture(config) in RECURRENT:
        decoding["state_bf16_per_row"] = 2 * state_numbers(config)
    if cache_numbers(config, 1, 1):
        decoding["cache_bf16_per_token"] = 2 * cache_numbers(config, *lengths(config, 1))
        decoding["cache_bf16"] = 2 * batch * cache_numbers(config, *lengths(config, length))
    return {"training": {**training, "total": sum(training.values())}, "decoding": decoding}
