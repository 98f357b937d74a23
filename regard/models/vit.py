"""The vision Transformer: an image is a sentence of patches.

Shapes: images (B, channels, height, width), hidden (B, 1 + patches, C), logits (B, classes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig, ViTSettings
from regard.layers.block import encoder_block
from regard.layers.masks import FULL
from regard.layers.stack import Stack
from regard.models import presets
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes

PRESETS = presets.VIT


class ViT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve_sizes(config, PRESETS)
        images = config.table(ViTSettings)
        size = images.patch_size
        self.patches = nn.Conv2d(
            images.image_channels, config.d_model, size, stride=size
        )  # each patch times one matrix
        self.summary = nn.Parameter(torch.zeros(config.d_model))  # a token of no patch, which the class is read from
        self.dropout = nn.Dropout(config.dropout)
        blocks = (encoder_block(config, i) for i in range(config.n_encoder_layers))
        self.encoder = Stack(config, blocks, FULL, "encoder")
        self.head = nn.Linear(config.d_model, config.n_classes)
        initialise(self)

    def hidden(self, images: Tensor) -> Tensor:
        """(B, 1 + patches, C), patches row by row."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, C)
        x = torch.cat([self.summary.expand(len(x), 1, -1), x], 1)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return self.encoder(self.dropout(self.encoder.embed(x, positions)), positions)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.hidden(images)[:, 0])  # (B, classes)
