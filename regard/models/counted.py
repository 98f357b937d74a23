"""Parameters of a model by kind of matrix and by place, counted on its tensors; models/parameters.py has them by formula."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from regard.config import ModelConfig


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


Placed = tuple[str, Part]  # where it is: encoder.0.self


def trained(parts: Iterable[Part]) -> int:
    """How many numbers are learned: all of them, tied ones once."""
    return sum(part.total for part in parts if not part.tied)


def matrix_weights(parts: Iterable[Part]) -> tuple[int, int]:
    """Weights in matrices, and in how many; a tied unembedding is one more matrix."""
    matrices = [part for part in parts if part.matrix]
    return sum(part.total for part in matrices), sum(part.number for part in matrices)


def merged(found: Iterable[Part]) -> list[Part]:
    """Parts of one kind and shape together, in the order of the table, matrices first."""
    numbers: Counter[tuple[str, tuple[int, ...], bool]] = Counter()
    for part in found:
        numbers[part.kind, part.shape, part.tied] += part.number
    together = (Part(kind, shape, n, tied) for (kind, shape, tied), n in numbers.items() if n)
    return sorted(together, key=lambda part: (KINDS.index(part.kind), part.shape))


KINDS = (
    *("embedding", "token types", "patches", "convolution", "query", "key", "value", "output"),
    *("cross query", "cross key", "cross value", "cross output", "gate", "up", "down"),
    *("cell input", "cell state", "first state", "alignment", "readout"),
    *("pooler", "head", "unembedding", "answers", "positions", "summary", "norm", "bias"),
)


NAMES = {  # a parameter's name -> its kind
    r"\.(schemes|cross_scheme)\.": "positions",
    r"norm(s\.\d+)?\.(weight|bias)$": "norm",
    r"bias$": "bias",
    r"embedding\.weight$": "embedding",
    r"\btypes\.weight$": "token types",
    r"^patches\.weight$": "patches",
    r"^summary$": "summary",
    r"\bpooler\.inner\.weight$": "pooler",
    r"\bhead\.inner\.weight$": "head",
    r"\bhead\.weight$": "unembedding",
    r"^answers\.weight$": "answers",
    r"\.taps\.weight$": "convolution",
    r"\.weight_i[hn]$": "cell input",
    r"\.weight_hh$": "cell state",
    r"\.score\.": "alignment",
    r"\.bridge\.weight$": "first state",
    r"\breadout(\.pairs)?\.weight$": "readout",
    r"\bout\.weight$": "output",
    r"\bouter\.weight$": "down",
}


def counted(model: nn.Module) -> list[Part]:
    """Every parameter of a model, counted on its tensors (of any device, also meta)."""
    return merged(part for _, part in counted_places(model))


def counted_places(model: nn.Module) -> Iterator[Placed]:
    config: ModelConfig = model.config  # type: ignore[assignment]
    seen = set()
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            own = f"{path}.{name}".lstrip(".")
            for kind, piece, number in pieces(own, p, config):
                yield place_of(own, config), Part(kind, tuple(piece.shape), number, id(p) in seen)
            seen.add(id(p))


# ---- places ----------------------------------------------------------------------------------------------------------

OWN_SCHEMES = ("shaw", "cope", "fire")  # position schemes of which each block has one


def shared_embedding(config: ModelConfig) -> bool:
    """Whether source and target are looked up in one matrix."""
    return config.architecture in ("transformer", "seq2seq") and config.tie in ("inputs", "all")


PLACES = {  # the path of a module or parameter -> its place
    r"(encoder|decoder)\.blocks\.(\d+)(?:\.sublayers\.(\w+)|\.(norm)|$)": "{0}.{1}.{2}{3}",
    r"(encoder|decoder)\.(?:cross_scheme|schemes\.0\.distances)": "{0}.positions",
    r"(encoder|recurrent)\.layers\.(\d+)": "{0}.{1}",  # those of a recurrent encoder, or of a language model
    r"decoder\.layers\.layers\.(\d+)": "decoder.{0}",
    r"decoder\.attentive\.cell": "decoder.0.cell",
    r"decoder\.attentive": "decoder.0.attention",
    r"decoder\.bridge": "decoder.first_state",
    r"((?:encoder|decoder)\.norm|decoder\.readout)": "{0}",
}


def place_of(path: str, config: ModelConfig) -> str:
    """The place of a module or parameter: blocks and their sublayers, else the name that its model gives it."""
    path = path.removeprefix("body.")
    if found := re.match(r"(encoder|decoder)\.schemes\.(\d+)(?!\.distances)", path):
        own = config.positions_at(found[1]) in (*OWN_SCHEMES, "disentangled")
        return f"{found[1]}.{found[2]}.positions" if own else f"{found[1]}.positions"
    if found := re.match(r"decoder\.above\.layers\.(\d+)", path):
        return f"decoder.{int(found[1]) + 1}"
    for pattern, place in PLACES.items():
        if found := re.match(pattern, path):
            return place.format(*(group or "" for group in found.groups())).rstrip(".")
    name = path.split(".")[0]
    return "embedding" if name.endswith("_embedding") and shared_embedding(config) else name


# ---- kinds -----------------------------------------------------------------------------------------------------------


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
        kinds = ("gate", "up") if (config.feedforward == "gated") else ("up",)
        for kind, piece in zip(kinds, p.chunk(len(kinds)), strict=True):
            yield (kind if leaf == "weight" else "bias"), piece, 1
    else:
        kind = next(kind for pattern, kind in NAMES.items() if re.search(pattern, name))
        yield (where if kind == "output" else "") + kind, p.flatten(1) if kind == "patches" else p, 1
