"""The model of a step: tokens in, logits out, over static memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.decode.graphed.linear import add_norm
from regard.decode.graphed.stack import (
    NORMS,
    Memory,
    StepStack,
    Weights,
    altered_by,
    heads_of,
    norm_of,
    unknown_part,
    why_not,
)
from regard.layers.attention import CrossAttention, SelfAttention
from regard.layers.cache import StepCache
from regard.layers.embedding import Embedding, Head
from regard.layers.stack import Stack
from regard.models.gpt import GPT
from regard.models.transformer import Transformer

Writing = GPT | Transformer


class StepModel:
    """`Transformer.step` and `GPT.step` without their Python: the same numbers up to rounding."""

    def __init__(self, model: Writing, dtype: torch.dtype, room: int) -> None:
        self.weights = Weights(dtype)
        self.stack = StepStack(model.decoder, self.weights, room)
        self.embedding = model.target_embedding if isinstance(model, Transformer) else model.embedding
        norm = model.target_norm if isinstance(model, Transformer) else model.embedding_norm
        self.norm = None if isinstance(norm, nn.Identity) else norm_of(norm)
        head = model.head
        self.head, self.scale = self.weights.head(head.weight, head.bias), head.scale

    def __call__(self, tokens: Tensor, position: Tensor, memory: Memory) -> Tensor:
        """Logits (N, V or a few more at -inf) after one more token (N,) of each row, which stands at `position` (N,)."""
        x = F.embedding(tokens, self.weights.of(self.embedding.weight)) * self.embedding.scale
        x = self.stack.stack.embed(x[:, None], position[:, None])[:, 0]  # (N, C)
        if self.norm is not None:
            x = add_norm(x, None, self.norm)[1]
        hidden = self.stack(x, position, memory)
        return self.head(hidden * self.scale if self.scale != 1.0 else hidden)

    def refresh(self) -> None:
        self.weights.refresh()
        self.stack.refresh()

    def memory(self, rows: int, room: int, device: torch.device) -> Memory:
        """Of N rows with that many columns."""
        stack, dtype = self.stack.stack, self.weights.dtype
        heads = heads_of(self_layers(stack)[0])[1]
        shape = (rows, heads, room, stack.d_head)
        keys, values = ([torch.zeros(shape, dtype=dtype, device=device) for _ in stack.blocks] for _ in range(2))
        return Memory(keys, values)


EDGES = (Embedding, Head, nn.Identity, nn.Dropout, *NORMS)  # what `StepModel` computes around the stack


def cannot(model: nn.Module) -> str:
    """Return why a model is not decoded by CUDA graphs, or an empty string if it is."""
    if type(model) not in (GPT, Transformer):
        return type(model).__name__
    assert isinstance(model, (GPT, Transformer))
    altered = altered_by(model)
    if altered:
        return f"{altered} {type(model).__name__}"
    names = ("target_embedding", "target_norm") if isinstance(model, Transformer) else ("embedding", "embedding_norm")
    edges = (unknown_part(name, model.get_submodule(name), EDGES) for name in (*names, "dropout", "head"))
    return why_not(model.decoder) or next(filter(None, edges), "")


def fill(memory: Memory, model: Writing, cache: StepCache, rows: Tensor, which: Tensor) -> None:
    """Rows of the memory (n,) take the first columns of what rows `which` (n,) of a cache hold."""
    for i, layer in enumerate(self_layers(model.decoder)):
        if layer in cache.keys:
            for place, held in ((memory.keys[i], cache.keys[layer]), (memory.values[i], cache.values[layer])):
                place[rows, :, : cache.filled] = held[which, :, : cache.filled].to(place.dtype)


def self_layers(stack: Stack) -> list[SelfAttention]:
    return [block.get_submodule("sublayers.self.sublayer") for block in stack.blocks]  # type: ignore[misc]


def cross_layers(model: Transformer) -> list[CrossAttention]:
    return [block.get_submodule("sublayers.cross.sublayer") for block in model.decoder.blocks]  # type: ignore[misc]
