"""Every initial weight, in one place.

| weights                      | start                                                              |
|------------------------------|--------------------------------------------------------------------|
| projections                  | Xavier uniform; q, k, v share one matrix, so each starts smaller   |
|                              | by sqrt(2), which keeps early attention soft                       |
| embeddings (and a tied head) | N(0, 1/sqrt(C)): unit size after the sqrt(C) scaling, and logits   |
|                              | of unit size too                                                   |
| biases                       | 0                                                                  |
| LayerNorm                    | gain 1, bias 0                                                     |
"""

from __future__ import annotations

from torch import nn

from regard.layers.embedding import Embedding, Head


def initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, (Embedding, Head)):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
