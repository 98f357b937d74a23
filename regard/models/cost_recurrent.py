"""Arithmetic and memory of recurrent models, one row at a time."""

from __future__ import annotations

from collections import Counter

from regard.config import ModelConfig
from regard.models.parameters_recurrent import layers, placed_layers, recurrent_parts
from regard.models.seq2seq import attends, reads_again
from regard.registry import find


def row_flops(config: ModelConfig, s: int, t: int) -> dict[str, int]:
    """By place. Every weight of a matrix is multiplied once for everything that meets it."""
    times = {"source": s, "target": t, "pair": s * t, "row": 1, "none": 0}
    found = alignment_flops(config, s, t)
    for place, met, part in recurrent_parts(config):
        found[place] += 2 * times[met] * part.total * part.matrix
    return found


def alignment_flops(config: ModelConfig, s: int, t: int) -> Counter[str]:
    """What attention multiplies beyond its weights: scores of vectors, and means of annotations. What these bring to the
    gates is worked out before the mean of it, once for each token of the source and not of the target."""
    annotation, brought, _ = annotated(config)
    if not annotation:
        return Counter()
    compared = 0 if config.score == "additive" else config.value("recurrent.d_hidden")
    means = s * t * (compared + annotation + (brought or annotation))
    return Counter({"decoder.0.attention": 2 * means, "decoder.0.cell": 2 * (s - t) * brought * annotation})


def annotated(config: ModelConfig) -> tuple[int, int, int]:
    """How many numbers attention keeps of a token of the source: its annotation, what that brings to the gates, and its
    key; 0 where there is none, or where it is the annotation itself."""
    if config.architecture == "rnn" or not attends(config):
        return 0, 0, 0
    h, cell = config.value("recurrent.d_hidden"), find("cell", config.cell)
    before = not (cell.bare or config.value("recurrent.norm"))
    return h * (1 + config.value("recurrent.bidirectional")), cell.inputs * h * before, h * (config.score != "dot")


def row_activations(config: ModelConfig, s: int, t: int) -> dict[str, int]:
    """Bytes that the backward pass needs, by place, in bf16 (2): of each layer what it reads, its gates and its states."""
    cell, tokens = find("cell", config.cell), {"source": s, "target": t}
    found = end_activations(config, s, t)
    for place, layer in placed_layers(config):
        read = (
            layer.d_in if layer.first or config.value("recurrent.hidden_dropout") else 0
        )  # else the layer below keeps it
        found[place] += tokens[layer.side] * 2 * (read + (cell.gates + cell.states) * layer.d_out)
    return found


def end_activations(config: ModelConfig, s: int, t: int) -> Counter[str]:
    """What the head is given; in a translator also what attention and the readout, a maxout, read and make."""
    if config.architecture == "rnn":
        return Counter({"head" if config.answer == "none" else "answers": t * 2 * layers(config)[-1].d_out})
    c, h, (annotation, brought, key) = config.d_model, config.value("recurrent.d_hidden"), annotated(config)
    dropped = annotation if config.value("recurrent.hidden_dropout") else 0  # a copy
    found = Counter({"head": t * 2 * c})
    if annotation:
        found["decoder.0.attention"] = s * 2 * (dropped + brought + key) + s * t * 6  # weights, in fp32 and in bf16
    if maxed := annotation or h * reads_again(config):  # the context, which it reads beside the state and the token
        found["decoder.readout"] = t * 2 * (h + c + maxed + 3 * c)
    return found


def state_numbers(config: ModelConfig) -> int:
    """Numbers that decoding keeps of one row, however long it is; the one context vector is read at every step."""
    states = sum(find("cell", config.cell).states * layer.d_out for layer in layers(config) if layer.side == "target")
    return states + (
        config.value("recurrent.d_hidden") if config.architecture == "seq2seq" and not attends(config) else 0
    )
