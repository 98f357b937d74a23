"""How many parameters a model has, by kind of matrix: by formula, and counted on its tensors. Sizes must be resolved."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.schemes import scheme_at
from regard.models.architectures import PRESETS


@dataclass(frozen=True)
class Part:
    """Parameters of one kind and shape. A head's query, key and value are one each; all heads' output is one a block."""

    kind: str
    shape: tuple[int, ...]
    number: int
    tied: bool = False  # an embedding's own numbers, used once more

    @property
    def total(self) -> int:
        return self.number * math.prod(self.shape)

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix that vectors are multiplied by or looked up in; positions are left aside."""
        return self.kind not in ("positions", "summary", "norm", "bias")


def trained(parts: Iterable[Part]) -> int:
    """How many numbers are learned: all of them, tied ones once."""
    return sum(part.total for part in parts if not part.tied)


def matrix_weights(parts: Iterable[Part]) -> tuple[int, int]:
    """Weights in matrices, and in how many; a tied unembedding is one more matrix."""
    matrices = [part for part in parts if part.matrix]
    return sum(part.total for part in matrices), sum(part.number for part in matrices)


def architecture(config: ModelConfig) -> str:
    return config.architecture or PRESETS[config.preset]["architecture"]


def blocks(config: ModelConfig) -> tuple[int, int, int]:
    """Encoder blocks, decoder blocks, and how many of those cross."""
    n_encoder, n_decoder = config.n_encoder_layers, config.n_decoder_layers
    both = {"transformer": (n_encoder, n_decoder, n_decoder), "gpt": (0, n_decoder, 0)}
    return both.get(architecture(config), (n_encoder, 0, 0))


def parts(config: ModelConfig) -> list[Part]:
    """Every parameter of a model, by formula."""
    return merged(part for group in (ends, middle, vectors, positions) for part in group(config))


def merged(found: Iterable[Part]) -> list[Part]:
    """Parts of one kind and shape together, in the order of the table, matrices first."""
    numbers: Counter[tuple[str, tuple[int, ...], bool]] = Counter()
    for part in found:
        numbers[part.kind, part.shape, part.tied] += part.number
    together = (Part(kind, shape, n, tied) for (kind, shape, tied), n in numbers.items() if n)
    return sorted(together, key=lambda part: (KINDS.index(part.kind), part.shape))


KINDS = (
    *("embedding", "token types", "patches", "query", "key", "value", "output"),
    *("cross query", "cross key", "cross value", "cross output", "gate", "up", "down"),
    *("pooler", "head", "unembedding", "answers", "positions", "summary", "norm", "bias"),
)


def ends(config: ModelConfig) -> Iterator[Part]:
    """The matrices below and above the blocks."""
    c, kind = config.d_model, architecture(config)
    if kind == "vit":
        yield Part("patches", (c, config.image_channels * config.patch_size**2), 1)
        yield Part("unembedding", (config.n_classes, c), 1)
    elif kind == "bert":
        yield Part("embedding", (config.source_vocab, c), 1)
        yield Part("token types", (config.token_types, c), min(config.token_types, 1))
        yield Part("pooler", (c, c), 1)
        yield Part("head", (c, c), 1)
        yield Part("unembedding", (config.source_vocab, c), 1, True)
    else:
        if kind == "transformer" and config.tie in ("none", "decoder"):
            yield Part("embedding", (config.source_vocab, c), 1)
        yield Part("embedding", (config.target_vocab, c), 1)
        yield Part("unembedding", (config.target_vocab, c), 1, config.tie in ("decoder", "all"))
    if config.answer != "none":
        yield Part("answers", (config.n_classes, c), 1)


def middle(config: ModelConfig) -> Iterator[Part]:
    """The matrices of the blocks."""
    c, f, d = config.d_model, config.d_ff, config.d_head
    n_encoder, n_decoder, n_cross = blocks(config)
    n = n_encoder + n_decoder
    for where, layers in (("", n), ("cross ", n_cross)):
        yield Part(f"{where}query", (d, c), layers * config.n_heads)
        yield Part(f"{where}key", (d, c), layers * config.n_kv_heads)
        yield Part(f"{where}value", (d, c), layers * config.n_kv_heads)
        yield Part(f"{where}output", (c, config.n_heads * d), layers)
    yield Part("gate", (f, c), n * config.gated)
    yield Part("up", (f, c), n)
    yield Part("down", (c, f), n)


def vectors(config: ModelConfig) -> Iterator[Part]:
    """Norms and biases. The biases of the ends are always there; those of the blocks are a setting."""
    c, kind = config.d_model, architecture(config)
    n_encoder, n_decoder, n_cross = blocks(config)
    n, stacks = n_encoder + n_decoder, 2 if kind == "transformer" else 1
    norms = (n if config.parallel else 2 * n + n_cross) + (kind == "bert")
    norms += stacks * ((config.norm == "pre") + (config.embedding_norm and kind != "vit"))
    yield Part("norm", (c,), norms * (2 if config.bias and config.norm_kind == "layer" else 1))
    if config.bias:
        yield Part("bias", (config.d_head,), (n + n_cross) * (config.n_heads + 2 * config.n_kv_heads))
        yield Part("bias", (c,), 2 * n + n_cross)  # outputs, down projections
        yield Part("bias", (config.d_ff,), n * (1 + config.gated))
    if kind == "bert":
        yield Part("bias", (c,), 2)
        yield Part("bias", (config.source_vocab,), 1)
    if kind == "vit":
        yield Part("summary", (c,), 1)
        yield Part("bias", (c,), 1)
        yield Part("bias", (config.n_classes,), 1)
    if config.answer != "none":
        yield Part("bias", (config.n_classes,), 1)
    if config.head_bias and kind in ("gpt", "transformer"):
        yield Part("bias", (config.target_vocab,), 1)


def positions(config: ModelConfig) -> Iterator[Part]:
    """What the schemes learn, once a stack or once a block."""
    for place, layers in zip(("encoder", "decoder", "cross"), blocks(config), strict=True):
        name = scheme_at(config, place)
        for shape in scheme_shapes(config, name) if layers else ():
            yield Part("positions", shape, layers if name in ("shaw", "cope", "fire") else 1)
        if name == "disentangled" and not config.disentangled_buckets:  # its blocks share a table, not the projections
            width = (config.n_heads + config.n_kv_heads) * config.d_head
            yield Part("positions", (width, config.d_model), layers)
            yield Part("positions", (width,), layers)


def scheme_shapes(config: ModelConfig, name: str) -> list[tuple[int, ...]]:
    c, d, h, width = config.d_model, config.d_head, config.n_heads, config.fire_width
    buckets = config.disentangled_buckets
    learned: dict[str, list[tuple[int, ...]]] = {
        "linear": [(c,)] * 2,
        "learned": [(config.max_len, c)],
        "shaw": [(2 * config.shaw_clip + 1, d)] * 2,
        "t5": [(h, config.t5_buckets)],
        "kerple-log": [(h,)] * 2,
        "kerple-power": [(h,)] * 2,
        "fire": [(width, 1), (width,), (h, width), (h,), (), ()],
        "cope": [(config.cope_positions or config.max_len, d)],
        "disentangled": [(2 * (buckets or config.disentangled_reach), c), *([(c,)] * 2 if buckets else [])],
    }
    return learned.get(name, [])


NAMES = {  # a parameter's name -> its kind
    r"\.(schemes|cross_scheme)\.": "positions",
    r"norm\.(weight|bias)$": "norm",
    r"bias$": "bias",
    r"embedding\.weight$": "embedding",
    r"\btypes\.weight$": "token types",
    r"^patches\.weight$": "patches",
    r"^summary$": "summary",
    r"\bpooler\.inner\.weight$": "pooler",
    r"\bhead\.inner\.weight$": "head",
    r"\bhead\.weight$": "unembedding",
    r"^answers\.weight$": "answers",
    r"\bout\.weight$": "output",
    r"\bouter\.weight$": "down",
}


def counted(model: nn.Module) -> list[Part]:
    """Every parameter of a model, counted on its tensors (of any device, also meta)."""
    found, seen = [], set()
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            for kind, piece, number in pieces(f"{path}.{name}".lstrip("."), p, model.config):  # type: ignore[arg-type]
                found.append(Part(kind, tuple(piece.shape), number, id(p) in seen))
            seen.add(id(p))
    return merged(found)


def pieces(name: str, p: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor, int]]:
    """(kind, one of them, how many) of a parameter; projections that share a tensor are taken apart, head by head."""
    d, h, g = config.d_head, config.n_heads, config.n_kv_heads
    heads = {"qkv": {"query": h, "key": g, "value": g}, "q": {"query": h}, "kv": {"key": g, "value": g}}
    layer, leaf = ("", *name.split("."))[-2:]
    where = "cross " if ".cross." in name else ""
    if layer in heads:
        shares = heads[layer]
        for kind, piece in zip(shares, p.split([n * d for n in shares.values()]), strict=True):
            yield (where + kind if leaf == "weight" else "bias"), piece[:d], len(piece) // d
    elif ".ff.sublayer.inner." in name:
        kinds = ("gate", "up") if config.gated else ("up",)
        for kind, piece in zip(kinds, p.chunk(len(kinds)), strict=True):
            yield (kind if leaf == "weight" else "bias"), piece, 1
    else:
        kind = next(kind for pattern, kind in NAMES.items() if re.search(pattern, name))
        yield (where if kind == "output" else "") + kind, p.flatten(1) if kind == "patches" else p, 1
