"""Arithmetic and memory of recurrent models, one row at a time."""

from __future__ import annotations

from regard.config import ModelConfig
from regard.layers.cells import CELLS
from regard.models.parameters_recurrent import layers, recurrent_parts
from regard.models.seq2seq import attends, reads_again


def row_flops(config: ModelConfig, s: int, t: int) -> int:
    """Every weight of a matrix is multiplied once for everything that meets it."""
    times = {"source": s, "target": t, "pair": s * t, "row": 1, "none": 0}
    products = sum(times[met] * part.total for met, part in recurrent_parts(config) if part.matrix)
    return 2 * (products + alignment_products(config, s, t))


def alignment_products(config: ModelConfig, s: int, t: int) -> int:
    """What attention multiplies beyond its weights: scores of vectors, and means of annotations. What these bring to the
    gates is worked out before the mean of it, once for each token of the source and not of the target."""
    annotation, brought, _ = annotated(config)
    if not annotation:
        return 0
    compared = 0 if config.score == "additive" else config.d_hidden
    return s * t * (compared + annotation + (brought or annotation)) + (s - t) * brought * annotation


def annotated(config: ModelConfig) -> tuple[int, int, int]:
    """How many numbers attention keeps of a token of the source: its annotation, what that brings to the gates, and its
    key; 0 where there is none, or where it is the annotation itself."""
    if config.architecture == "rnn" or not attends(config):
        return 0, 0, 0
    h, cell = config.d_hidden, CELLS[config.cell]
    before = not (cell.bare or config.recurrent_norm)
    return h * (1 + config.bidirectional), cell.inputs * h * before, h * (config.score != "dot")


def row_activations(config: ModelConfig, s: int, t: int) -> int:
    """Bytes that the backward pass needs, in bf16 (2): of each layer what it reads, its gates and its states."""
    cell, tokens = CELLS[config.cell], {"source": s, "target": t}
    total = 0
    for layer in layers(config):
        read = layer.d_in if layer.first or config.hidden_dropout else 0  # else the layer below keeps it
        total += tokens[layer.side] * 2 * (read + (cell.gates + cell.states) * layer.d_out)
    return total + end_activations(config, s, t)


def end_activations(config: ModelConfig, s: int, t: int) -> int:
    """What the head is given; in a translator also what attention and the readout, a maxout, read and make."""
    if config.architecture == "rnn":
        return t * 2 * layers(config)[-1].d_out
    c, h, (annotation, brought, key) = config.d_model, config.d_hidden, annotated(config)
    dropped = annotation if config.hidden_dropout else 0  # a copy
    looked = s * 2 * (dropped + brought + key) + s * t * 6 * (annotation > 0)  # weights, in fp32 and in bf16
    maxed = annotation or h * reads_again(config)  # the context, which it reads beside the state and the token
    return looked + t * 2 * (c + (h + c + maxed + 3 * c if maxed else 0))


def state_numbers(config: ModelConfig) -> int:
    """Numbers that decoding keeps of one row, however long it is; the one context vector is read at every step."""
    states = sum(CELLS[config.cell].states * layer.d_out for layer in layers(config) if layer.side == "target")
    return states + (config.d_hidden if config.architecture == "seq2seq" and not attends(config) else 0)
