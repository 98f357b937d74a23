"""A model's weights as named tensors, out and in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import RegardError


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, tied ones under their first name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into a model; whatever is missing, extra or of another shape is listed."""
    own = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is not in the model" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    wrong += [f"{name} holds numbers that are not finite" for name, x in tensors.items() if not x.isfinite().all()]
    if wrong:
        shown = "; ".join(sorted(wrong)[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RegardError(f"the weights in {where} do not fit this model (another vocabulary or size?): {shown}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
