"""The cost of a model: parameters, FLOPs and memory. The sizes of its configuration must be resolved.

Parameters and FLOPs are counted on the model itself, on the meta device (models/analysis/counting.py), so that no
architecture is described here a second time. A product of (m, k) and (k, n) is 2mkn FLOPs. Attention is counted in full, S
keys for each query, masked or not: the usual convention. Only matrix products are counted.

Formulas give what a forward pass does not show: a backward pass costs two forward passes; the optimizer's state of every
parameter; the activations that a backward pass needs, by one formula for stacks of blocks and one for recurrent models.
"""

from __future__ import annotations

import inspect
from collections import Counter
from fractions import Fraction
from functools import cached_property
from math import isqrt, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.config import ModelConfig, ViTSettings
from regard.config.registry import find
from regard.device import PEAK_FLOPS
from regard.kernels.cross_entropy import chunk_rows
from regard.layers.cells import cell_shape
from regard.layers.decoding_state import PerRow, declared_storage
from regard.layers.part import FeedForward, Mixer, settings_of
from regard.layers.recurrent import InterleavedRecurrent, Recurrent
from regard.layers.recurrent_feedforward import feedforward_config
from regard.models.analysis.counting import ForwardCount, Shape, count, meta_model
from regard.models.architectures import architecture_of
from regard.models.seq2seq import Maxout, RNNSearchDecoder, ends_backward, uses_attention


class Cost:
    """The cost of the model of a configuration; FLOPs are counted once for rows of the same lengths."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.counted: dict[tuple[int, int], Counter[str]] = {}

    @cached_property
    def model(self) -> nn.Module:
        return meta_model(self.config)

    @cached_property
    def parameters(self) -> int:
        """The number of learned numbers, tied ones counted once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def blocks(self) -> int:
        """The number of blocks, or recurrent layers, of encoder and decoder together."""
        source, target = side_lengths(self.config, 1)
        return source * self.config.n_encoder_layers + target * self.config.n_decoder_layers

    @cached_property
    def token(self) -> ForwardCount:
        """The count of a forward pass over one token on each side that the model has; for images, over one patch."""
        side = 2 if "images" in forward_arguments(self.model) else 1
        return count(self.model, *meta_inputs(self.model, 1, side, side))

    @property
    def active(self) -> int:
        """The number of weights that a token is multiplied with: in a mixture of experts not all of them."""
        once, each = self.token.weights(), Counter[nn.Parameter]()
        if "images" in forward_arguments(self.model):
            # The FLOPs of one patch more, 0 for weights that are applied once to an image.
            each = Counter(count(self.model, *meta_inputs(self.model, 1, 3, 3)).weights()) - Counter(once)
        return sum(min(p.numel(), (each[p] or flops) // 2) for p, flops in once.items())

    @property
    def multiplied(self) -> int:
        """The number of weights in matrix products, which have a bf16 copy in training."""
        return sum(p.numel() for p in self.token.weights())

    def forward_flops(self, batch: int, source_len: int = 0, target_len: int = 0) -> int:
        """Return the FLOPs of one forward pass over padded rows, with logits for every token.

        An encoder reads (batch, source_len), for images 1 + patches; a decoder (batch, target_len)."""
        return batch * self.module_flops(source_len, target_len).total()

    def module_flops(self, source_len: int = 0, target_len: int = 0) -> Counter[str]:
        """Return the FLOPs of each module in the forward pass of one row, by its path."""
        at = source_len, target_len
        if at not in self.counted:
            self.counted[at] = count(self.model, *meta_inputs(self.model, 1, *at)).flops()
        return self.counted[at]

    def training_flops(self, batch: int, source_len: int = 0, target_len: int = 0, checkpointing: bool = False) -> int:
        """Return the FLOPs of a training step: a backward pass is two forward passes, activation checkpointing one more."""
        return (4 if checkpointing else 3) * self.forward_flops(batch, source_len, target_len)

    def fitted_flops(self, source_len: int, target_len: int) -> int:
        """Return the forward FLOPs of one row by a quadratic through those of a few short rows, without counting.

        It is exact where a model multiplies at most pairs of tokens, as all of them do here."""
        if max(source_len, target_len) <= max(FITTED):
            return self.forward_flops(1, source_len, target_len)
        sides = [{0: 1} if n == 0 else {at: lagrange_weight(n, at) for at in FITTED} for n in (source_len, target_len)]
        sums = (a * b * self.forward_flops(1, s, t) for s, a in sides[0].items() for t, b in sides[1].items())
        return round(sum(sums))

    def training_memory(self, batch: int, source_len: int = 0, target_len: int = 0) -> dict[str, int]:
        """Return the bytes of a training step in bf16: fp32 weights, products under autocast, attention without a (T, S)
        matrix."""
        n = self.parameters
        return {
            "weights": 4 * n,
            "gradients": 4 * n,
            "moments": 8 * n,  # AdamW's two
            "bf16 copies": 2 * self.multiplied,
            "activations": batch * activation_bytes(self.config, source_len, target_len),
            "logits": logit_bytes(self.config, batch, source_len, target_len),
        }


def forward_flops(config: ModelConfig, batch: int, source_len: int = 0, target_len: int = 0) -> int:
    return Cost(config).forward_flops(batch, source_len, target_len)


def training_flops(config: ModelConfig, batch: int, source_len: int = 0, target_len: int = 0) -> int:
    return Cost(config).training_flops(batch, source_len, target_len)


def training_memory(config: ModelConfig, batch: int, source_len: int = 0, target_len: int = 0) -> dict[str, int]:
    return Cost(config).training_memory(batch, source_len, target_len)


FITTED = (4, 6, 9)  # lengths at which FLOPs are counted for the polynomial


def lagrange_weight(n: int, at: int) -> Fraction:
    """Return the value at n of the Lagrange polynomial that is 1 at one of the fitted lengths and 0 at the others."""
    return prod((Fraction(n - other, at - other) for other in FITTED if other != at), start=Fraction(1))


# ---- inputs ------------------------------------------------------------------------------------------------------------


def forward_arguments(model: nn.Module) -> list[str]:
    """Return the names of the required arguments of a model's forward."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name != "self"]


def meta_inputs(model: nn.Module, batch: int, s: int, t: int) -> tuple[Tensor, ...]:
    """Return inputs of these lengths, without padding, on the meta device; an image has s - 1 patches."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    images = config.table(ViTSettings)

    def image() -> Tensor:
        rows = isqrt(s - 1) if isqrt(s - 1) ** 2 == s - 1 else 1
        size = images.patch_size * rows, images.patch_size * ((s - 1) // rows)
        dtype = next(model.parameters()).dtype
        return torch.empty(batch, images.image_channels, *size, dtype=dtype, device="meta")

    lengths = {"source": s, "target": t}
    return tuple(
        image()
        if name == "images"
        else torch.empty(batch, lengths.get(name, max(s, t)), dtype=torch.long, device="meta")
        for name in forward_arguments(model)
    )


def side_lengths(config: ModelConfig, length: int) -> tuple[int, int]:
    """Return the lengths of source and target in rows of `length` tokens; 0 for a side that the model does not have."""
    sides = architecture_of(config).sides
    return length * ("encoder" in sides), length * ("decoder" in sides)


# ---- parameters --------------------------------------------------------------------------------------------------------


def parameter_table(model: nn.Module) -> list[dict[str, Any]]:
    """Return every parameter by its path, with one line for equal members of a list: `blocks.*.ff.inner.weight`.

    A parameter with several paths is counted at the first; the others are marked as tied."""
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    numbers: Counter[tuple[str, Shape, bool]] = Counter()
    seen: set[int] = set()
    for path, p in model.named_parameters(remove_duplicate=False):
        steps = path.split(".")
        name = ".".join("*" if ".".join(steps[:i]) in lists else step for i, step in enumerate(steps))
        numbers[name, tuple(p.shape), id(p) in seen] += 1
        seen.add(id(p))
    return [
        {"name": name, "shape": list(shape), "number": n, "total": n * torch.Size(shape).numel(), "tied": tied}
        for (name, shape, tied), n in numbers.items()
    ]


# ---- memory ------------------------------------------------------------------------------------------------------------


def activation_bytes(config: ModelConfig, s: int, t: int) -> int:
    """Return the bytes that the backward pass of one row needs: the inputs of norms and products, in bf16."""
    return (recurrent_activation_bytes if architecture_of(config).is_recurrent else block_activation_bytes)(
        config, s, t
    )


def block_activation_bytes(config: ModelConfig, s: int, t: int) -> int:
    """Return the activation bytes of stacks of blocks, and of BERT's head, which has a dense layer and a norm."""
    total = sum(stack.n_blocks * stack.block + stack.ends for stack in stack_activations(config, s, t))
    return total + (s * 8 * config.d_model if architecture_of(config).fills_blanks else 0)


class StackActivations(NamedTuple):
    """The bytes that the backward pass of one row needs of a stack."""

    n_blocks: int
    block: int  # of one block
    ends: int  # before the first block and after the last
    residual: int  # of the input of a block, which is all that activation checkpointing keeps of it


def stack_activations(config: ModelConfig, s: int, t: int) -> list[StackActivations]:
    """Return the activation bytes of each stack: for each sublayer the residual sum that its norm reads, the output of the
    norm, and the inputs of its own products."""
    c, f, queries, keys = config.d_model, config.d_ff, *head_widths(config)
    summed = 0 if config.parallel else 4 * c  # sum and norm of the sublayers after the first
    n = max(config.n_encoder_layers, config.n_decoder_layers)
    mixer = 2 * c + part_bytes("mixer", config, n)
    block = mixer + (summed + part_bytes("feedforward", config, n) if f else 0)
    normed = config.embedding_norm and not architecture_of(config).sees_images
    ends = (4 * c if normed else 0) + (c if config.dropout else 0)  # the embeddings in fp32; a dropout mask
    ends += 4 * c if config.norm == "pre" else 2 * c  # the output of a stack, and the last residual sum
    # The residual sum and, before a norm, what is still to be added.
    residual = 4 * c if config.norm == "pre" else 2 * c
    return [
        StackActivations(
            n_blocks,
            tokens * block + crosses * (t * (summed + 4 * queries) + s * 4 * keys),
            tokens * ends,
            tokens * residual,
        )
        for n_blocks, tokens, crosses in stack_sizes(config, s, t)
    ]


def part_bytes(kind: str, config: ModelConfig, n_blocks: int) -> int:
    """Return the activation bytes of a token in the mixer or feed-forward layer of a block, on average over the blocks."""
    names = getattr(config, kind)
    parts: list[type[Mixer | FeedForward]] = [find(kind, names[i % len(names)]) for i in range(n_blocks)]
    return sum(part.activation_bytes(settings_of(part, config), config) for part in parts) // n_blocks


def stack_sizes(config: ModelConfig, s: int, t: int) -> list[tuple[int, int, bool]]:
    """Return the number of blocks, the number of tokens, and whether there is cross-attention, of each stack."""
    both = architecture_of(config).translates
    encoder, decoder = (config.n_encoder_layers, s, False), (config.n_decoder_layers, t, both)
    return [encoder, decoder] if both else [decoder if "decoder" in architecture_of(config).sides else encoder]


def head_widths(config: ModelConfig) -> tuple[int, int]:
    """Return the widths of the queries and of the keys of all heads together."""
    return config.n_heads * config.d_head, config.n_kv_heads * config.d_head


def recurrent_activation_bytes(config: ModelConfig, s: int, t: int) -> int:
    """Return the activation bytes of recurrent models: inputs, gates and states of each layer, what feed-forward layers
    between them keep, the input of the head, and in an encoder-decoder the inputs and outputs of attention and of the
    readout. How the layers are connected is read from the model itself."""
    model: Any = meta_model(config)
    if not architecture_of(config).translates:
        return t * (layers_bytes(config, model.recurrent) + 2 * model.recurrent.d_out)
    encoder, decoder = model.encoder, model.decoder
    columns: list[Any] = list(encoder.columns.values()) if isinstance(encoder, InterleavedRecurrent) else [encoder]
    source = s * sum(layers_bytes(config, column) for column in columns)
    if uses_attention(config):
        source += s * 2 * annotation_numbers(config, model)
        target = t * attentive_layers_bytes(config, decoder) + s * t * 6  # attention weights, in fp32 and in bf16
    else:
        target = t * layers_bytes(config, decoder.layers)
    readout, d_head = decoder.readout, decoder.d_out  # the head reads a vector of the readout
    if isinstance(readout, Maxout):  # [s; y; c], the pairs, and the larger of each
        d_head += readout.pairs.in_features + 3 * decoder.d_out
    elif uses_attention(config) and not isinstance(readout, nn.Identity):  # [s; c]
        d_head += readout.in_features
    return source + target + t * 2 * d_head


def layers_bytes(config: ModelConfig, layers: Recurrent, below: int = 0) -> int:
    """Return the activation bytes of a token in recurrent layers: gates and states of each cell, what feed-forward layers
    keep, and the input of each layer, unless it is the state of the layer below.

    `below` is the width of the state that is the input of the lowest layer; 0 if the input is no state."""
    cell, total = cell_shape(config), 0
    for i, cells in enumerate(layers.cells_by_layer()):
        d_input, width = cells[0].weight_ih.shape[1], sum(each.d_hidden for each in cells)
        total += 2 * (cell.gates + cell.states) * width
        total += 0 if d_input == below else 2 * d_input
        has_feedforward = i < len(layers.feedforwards)
        if has_feedforward:
            total += feedforward_bytes(config, width, reads_sum=layers.residual[i])
        changed = layers.dropout.p or layers.alternating or layers.residual[i] or has_feedforward
        below = 0 if changed else width
    return total


def attentive_layers_bytes(config: ModelConfig, decoder: RNNSearchDecoder) -> int:
    """Return the activation bytes of a token in the layers of a decoder that attends to the source."""
    attentive, above, width = decoder.attentive, decoder.above, decoder.width
    cell, d_read = cell_shape(config), attentive.d_in + attentive.d_annotation
    total = 2 * (d_read + (cell.gates + cell.states) * width)
    if decoder.d_fast:  # [s; y; c], of which [y; c] is projected for the layer above
        total += 2 * (width + d_read)
    if decoder.feedforwards:
        total += feedforward_bytes(config, width, reads_sum=decoder.adds_input)
    if above is None:
        return total
    changed = decoder.dropout.p or decoder.adds_input or decoder.feedforwards
    return total + layers_bytes(config, above, below=0 if changed else width)


def feedforward_bytes(config: ModelConfig, width: int, reads_sum: bool) -> int:
    """Return the activation bytes of a token in a feed-forward layer between recurrent layers: what the part keeps, the
    sigmoid of its output, and its input where that is a residual sum and no state."""
    part: type[FeedForward] = find("feedforward", config.recurrent_feedforward)
    inside = part.activation_bytes(settings_of(part, config), feedforward_config(config, width))
    return inside + 2 * width * (1 + reads_sum)


def annotation_numbers(config: ModelConfig, model: Any) -> int:
    """Return how many numbers attention keeps of a source token: its annotation, unless that is a state of the encoder;
    what the annotation is projected from (Deep-Att); its contribution to the gates; and its key where that is not the
    annotation itself."""
    attentive = model.decoder.attentive
    keys, entering, annotation = attentive.widths()
    before = model.annotate.in_features if model.annotate else 0
    # Dropout, a residual sum and another order of the tokens give annotations that are no states.
    adds_input = isinstance(model.encoder, Recurrent) and model.encoder.residual[-1]
    is_state = ends_backward(config) and not (before or adds_input or model.decoder.dropout.p)
    early = entering if attentive.projects_early else 0
    return before + annotation * (not is_state) + early + (keys if config.attention_score != "dot" else 0)


def logit_bytes(config: ModelConfig, batch: int, s: int, t: int) -> int:
    """Return the bytes of logits and their gradients.

    Logits of tokens are in bf16, one chunk at a time, and are overwritten by their gradient; logits of classes are in fp32
    and have a gradient of their own."""
    if architecture_of(config).gives_classes(config):
        return batch * 8 * config.n_classes * (max(s, t) if config.prediction_head == "token" else 1)
    rows, vocab = (
        batch * (t if "decoder" in architecture_of(config).sides else s),
        architecture_of(config).output_vocabulary(config),
    )
    return 2 * vocab * min(rows, chunk_rows(rows, 2 * vocab, torch.device("cuda")))


def decoding_bytes(model: nn.Module, source_len: int, target_len: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that decoding keeps of one row: `state` of fixed size, and `cache`, which grows with the row.

    They are the storage that the parts of the model declare (layers/decoding_state.py)."""
    found = {"state": 0, "cache": 0}
    for _, _, storages in declared_storage(model):
        for storage in storages.values():
            kind = "state" if isinstance(storage, PerRow) else "cache"
            found[kind] += storage.nbytes(1, 1, target_len, source_len, dtype)
    return found


# ---- the report --------------------------------------------------------------------------------------------------------


def report_costs(config: ModelConfig, batch: int, length: int, tokens: int | None = None) -> dict[str, Any]:
    """Return parameters, FLOPs and memory of a model, as `regard cost` prints them."""
    cost = Cost(config)
    return {
        "architecture": config.architecture,
        "batch": batch,
        "length": length,
        "parameters": {"rows": parameter_table(cost.model), "trained": cost.parameters, "active": cost.active},
        "flops": count_flops(cost, length, tokens),
        "memory": count_memory(cost, batch, length),
    }


def count_flops(cost: Cost, length: int, tokens: int | None) -> dict[str, Any]:
    """Return FLOPs per token and, if `tokens` is given, of a whole training, with the days it takes on one GPU."""
    at = side_lengths(cost.config, length)
    result: dict[str, Any] = {"forward_per_token": cost.forward_flops(1, *at) / length}
    result["training_per_token"] = cost.training_flops(1, *at) / length
    if tokens:
        total = tokens * result["training_per_token"]
        seconds = total / (MFU * PEAK_FLOPS[GPU])
        result |= {"tokens": tokens, "training": total, "example": {"gpu": GPU, "mfu": MFU, "days": seconds / 86400}}
    return result


GPU, MFU = "H200", 0.4  # the example: a GPU and its model FLOPs utilization


def count_memory(cost: Cost, batch: int, length: int) -> dict[str, Any]:
    """Return the bytes of training and of decoding."""
    training = cost.training_memory(batch, *side_lengths(cost.config, length))
    decoding = {"weights_bf16": 2 * cost.parameters, "weights_fp32": 4 * cost.parameters}
    one, whole = (decoding_bytes(cost.model, *side_lengths(cost.config, n), torch.bfloat16) for n in (1, length))
    if one["state"]:
        decoding["state_per_row"] = one["state"]
    if one["cache"]:
        decoding["cache_bf16_per_token"] = one["cache"]
        decoding["cache_bf16"] = batch * whole["cache"]
    return {"training": {**training, "total": sum(training.values())}, "decoding": decoding}
