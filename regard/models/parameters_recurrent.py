"""The same for recurrent models: what each layer has, and what is multiplied with it, which tells its cost as well.

Names of kinds: a cell has a matrix for its input and one for its state, with the gates one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from regard.config import ModelConfig
from regard.models.counted import Part, shared_embedding
from regard.models.rnn import tied, widths
from regard.models.seq2seq import attends, reads_again
from regard.registry import find


class Layer(NamedTuple):
    """One cell, or one each way, that all tokens of a side go through."""

    side: str  # source or target
    d_in: int
    width: int
    directions: int
    first: bool  # it reads embeddings, not the layer below

    @property
    def d_out(self) -> int:
        return self.width * self.directions


def stacked(side: str, d_in: int, sizes: list[int], directions: int = 1) -> list[Layer]:
    ins = [d_in, *(directions * width for width in sizes[:-1])]
    return [Layer(side, ins[i], width, directions, i == 0) for i, width in enumerate(sizes)]


def layers(config: ModelConfig) -> list[Layer]:
    c, h, directions = config.d_model, config.value("recurrent.d_hidden"), 1 + config.value("recurrent.bidirectional")
    if config.architecture == "rnn":
        return stacked("target", c, widths(config), directions)
    again = h * directions if attends(config) else h * reads_again(config)
    encoder = stacked("source", c, [h] * config.n_encoder_layers, directions)
    return encoder + stacked("target", c + again, [h] * config.n_decoder_layers)


def layer_parts(config: ModelConfig, layer: Layer) -> Iterator[Part]:
    cell, h, each = find("cell", config.cell), layer.width, layer.directions
    through = cell.bare and layer.d_in != h  # x itself is added to what is as wide as the state
    yield Part("cell input", (h, layer.d_in), each * through)
    yield Part("cell input", (cell.inputs * h, h if through else layer.d_in), each)
    yield Part("cell state", (sum(cell.hidden) * h, h), each)
    yield Part("bias", (cell.gates * h,), each)
    if config.value("recurrent.norm"):
        yield from (Part("norm", (n * h,), each) for n in (cell.inputs, *cell.hidden))
        yield Part("norm", (h,), 2 * each * (cell.states == 2))  # a gain and a bias


Met = tuple[str, str, Part]
"""Where a part is, and what meets it: each token of the "source" or "target", each "pair", a "row" once, or "none"."""


def recurrent_parts(config: ModelConfig) -> Iterator[Met]:
    """Every parameter of a recurrent model, in the order in which a forward comes by."""
    if config.architecture == "rnn":
        yield "embedding", "none", Part("embedding", (config.target_vocab, config.d_model), 1)
        yield from cells(config, "target")
        yield from language_ends(config)
    else:
        shared = shared_embedding(config)
        source, target = ("embedding", "") if shared else ("source_embedding", "target_embedding")
        yield source, "none", Part("embedding", (config.source_vocab, config.d_model), 1)
        yield from cells(config, "source")
        yield target, "none", Part("embedding", (config.target_vocab, config.d_model), int(not shared))
        yield from cells(config, "target")
        yield from searching(config) if attends(config) else one_context(config)
        yield (
            "head",
            "target",
            Part("unembedding", (config.target_vocab, config.d_model), 1, config.tie in ("decoder", "all")),
        )
        yield "head", "target", Part("bias", (config.target_vocab,), int(config.head_bias))


def cells(config: ModelConfig, side: str) -> Iterator[Met]:
    """All layers of a side."""
    mine = ((place, layer) for place, layer in placed_layers(config) if layer.side == side)
    yield from ((place, side, part) for place, layer in mine for part in layer_parts(config, layer))


def placed_layers(config: ModelConfig) -> list[tuple[str, Layer]]:
    """The first layer of a decoder that attends is a cell and where it looks."""
    target = "recurrent" if config.architecture == "rnn" else "decoder"
    names = {"source": (f"encoder.{i}" for i in count()), "target": (f"{target}.{i}" for i in count())}
    placed = [(next(names[layer.side]), layer) for layer in layers(config)]
    attentive = config.architecture == "seq2seq" and attends(config)
    return [(f"{place}.cell" if attentive and place == "decoder.0" else place, layer) for place, layer in placed]


def language_ends(config: ModelConfig) -> Iterator[Met]:
    """A model that answers does not ask its head; what reads both ways has none."""
    vocab, d_out = config.target_vocab, layers(config)[-1].d_out
    if not config.value("recurrent.bidirectional"):
        asked = "target" if config.answer == "none" else "none"
        yield "head", asked, Part("unembedding", (vocab, d_out), 1, tied(config))
        yield "head", asked, Part("bias", (vocab,), int(config.head_bias))
    if config.answer != "none":
        meets = "target" if config.answer == "token" else "row"
        yield "answers", meets, Part("answers", (config.n_classes, d_out), 1)
        yield "answers", meets, Part("bias", (config.n_classes,), 1)


def one_context(config: ModelConfig) -> Iterator[Met]:
    c, h = config.d_model, config.value("recurrent.d_hidden")
    if reads_again(config):
        yield from maxout(config, c + 2 * h)
    elif h != c:
        yield "decoder.readout", "target", Part("readout", (c, h), 1)
        yield "decoder.readout", "target", Part("bias", (c,), 1)


def searching(config: ModelConfig) -> Iterator[Met]:
    c, h = config.d_model, config.value("recurrent.d_hidden")
    states, annotation = find("cell", config.cell).states, h * (1 + config.value("recurrent.bidirectional"))
    if config.score == "additive":
        yield "decoder.0.attention", "target", Part("alignment", (h, h), 1)
        yield "decoder.0.attention", "pair", Part("alignment", (h,), 1)
    if config.score != "dot":
        yield "decoder.0.attention", "source", Part("alignment", (h, annotation), 1)
    yield "decoder.first_state", "row", Part("first state", (states * h, h), 1)
    yield "decoder.first_state", "row", Part("bias", (states * h,), 1)
    yield from maxout(config, h + c + annotation)


def maxout(config: ModelConfig, d_in: int) -> Iterator[Met]:
    yield "decoder.readout", "target", Part("readout", (2 * config.d_model, d_in), 1)
    yield "decoder.readout", "target", Part("bias", (2 * config.d_model,), 1)
