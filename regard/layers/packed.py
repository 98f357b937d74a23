"""Weights laid out for use on a CPU, where decoding multiplies a few rows with every matrix of the model.

The same numbers the other way round in memory: what multiplies a few rows then reads them in order.
Nothing else changes, not even what is saved.
"""

from __future__ import annotations

from torch import nn


def column_major(model: nn.Module) -> None:
    """In place. Embeddings stay as they are, since they are looked up by rows, and so does a head that is one of them."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
