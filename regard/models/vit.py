"""The vision Transformer: an encoder over the patches of an image.

Shapes: images (B, channels, height, width), hidden (B, 1 + patches, C), logits (B, classes).
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from regard.config import ModelConfig, ViTSettings
from regard.config.registry import BLOCKS, IMAGES
from regard.kernels.masks import FULL
from regard.layers.block import make_blocks
from regard.layers.stack import Stack
from regard.models import presets as tables
from regard.models.initialization import initialize, new_seed
from regard.models.model import Model


class ViT(Model):
    """An encoder of image patches and a class token, with a linear head on the class token."""

    made_of = (BLOCKS, IMAGES)
    presets = tables.VIT
    tasks = ("image-classification",)
    sides = ("encoder",)
    vocabularies = ()
    sees_images = classifies = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        seed = new_seed()
        self.config = config = self.resolve(config)
        images = config.table(ViTSettings)
        size = images.patch_size
        self.patches = nn.Conv2d(images.image_channels, config.d_model, size, stride=size)  # one matrix for all patches
        self.summary = nn.Parameter(torch.zeros(config.d_model))  # the class token
        self.dropout = nn.Dropout(config.dropout)
        blocks = make_blocks(config, config.n_encoder_layers, "encoder", causal=False)
        self.encoder = Stack(config, blocks, FULL, "encoder")
        self.head = nn.Linear(config.d_model, config.n_classes)
        initialize(self, seed)

    def init_weights(self) -> None:
        nn.init.zeros_(self.summary)

    def hidden(self, images: Tensor) -> Tensor:
        """Return hidden vectors (B, 1 + patches, C): the class token, then the patches row by row."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, C)
        x = torch.cat([self.summary.expand(len(x), 1, -1), x], 1)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return self.encoder(self.dropout(self.encoder.embed(x, positions)), positions)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, channels, height, width)."""
        return self.head(self.hidden(images)[:, 0])  # (B, classes)

    @classmethod
    def lengths(cls, config: ModelConfig, *inputs: Tensor) -> tuple[int, int]:
        """Return how many tokens images (B, channels, height, width) have: their patches and the class token."""
        (height, width), size = inputs[0].shape[-2:], config.table(ViTSettings).patch_size
        return 1 + (height // size) * (width // size), 0

    @classmethod
    def example_inputs(cls, config: ModelConfig, batch: int, s: int, t: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return images of s - 1 patches, square ones where that is a square number."""
        rows = isqrt(s - 1) if isqrt(s - 1) ** 2 == s - 1 else 1
        images = config.table(ViTSettings)
        size = images.patch_size * rows, images.patch_size * ((s - 1) // rows)
        return (like.new_zeros(batch, images.image_channels, *size),)
