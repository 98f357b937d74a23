"""Every initial weight, in one place.

| weights                      | start                                                              |
|------------------------------|--------------------------------------------------------------------|
| projections                  | Xavier uniform; q, k, v share one matrix, so each starts smaller   |
|                              | by sqrt(2), which keeps early attention soft                       |
| embeddings (and a tied head) | N(0, 1/sqrt(C)): unit size after the sqrt(C) scaling, and logits   |
|                              | of unit size too; N(0, 0.02) where a norm follows them, as the     |
|                              | positions and token types have that are added to them             |
| token types                  | N(0, 0.02)                                                         |
| biases                       | 0                                                                  |
| LayerNorm                    | gain 1, bias 0                                                     |
| positions                    | as each scheme made itself (layers/)                               |
| queries without 1/sqrt(D)    | smaller by sqrt(D): T5's scores are not scaled                     |
| recurrent cells              | gate by gate: Xavier uniform from the input, orthogonal from the   |
|                              | state, so that it neither grows nor fades; bias 0, but 1 for an    |
|                              | LSTM's forget gate, which at first remembers                       |
"""

from __future__ import annotations

import torch
from torch import nn

from regard.layers.attention import CrossAttention, SelfAttention
from regard.layers.cells import Cell
from regard.layers.embedding import Embedding, Head
from regard.layers.positions import Positions
from regard.layers.stack import Stack


def initialise(model: nn.Module, normed: bool = False) -> None:
    """`normed`: a norm follows the embeddings."""
    schemes = [module for module in model.modules() if isinstance(module, Positions)]
    theirs = {part for scheme in schemes for part in scheme.modules()}
    for module in model.modules():
        if module in theirs:
            continue
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (Embedding, Head)):
            nn.init.normal_(module.weight, std=0.02 if normed else module.weight.shape[1] ** -0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Cell):
            module.init_weights()
    for module in model.modules():
        if isinstance(module, Stack):
            shrink_unscaled_queries(module)


@torch.no_grad()
def shrink_unscaled_queries(stack: Stack) -> None:
    for module in stack.modules():
        if isinstance(module, SelfAttention):
            scheme, queries = stack.schemes[0], module.qkv.weight[: module.d_queries]
        elif isinstance(module, CrossAttention):
            scheme, queries = stack.cross_scheme, module.q.weight
        else:
            continue
        queries *= module.d_head**-0.5 / (scheme.scale or module.d_head**-0.5)
