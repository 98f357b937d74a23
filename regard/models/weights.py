"""A model's weights as named tensors, out and in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
    wrong += [f"{name} holds numbers that are not finite" for name, x in tensors.items() if not finite(x)]
    if wrong:
        shown = "; ".join(sorted(wrong)[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RegardError(f"the weights in {where} do not fit this model (another vocabulary or size?): {shown}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def finite(x: Tensor) -> bool:
    """One number that is not finite makes the sum so too, which is faster to see; a sum of huge ones may be, without any."""
    return bool(x.sum().isfinite() or x.isfinite().all())


DRAWS = {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_}


class Unfilled(TorchFunctionMode):
    """A model made inside draws no initial weights. Its own are about to be loaded, which takes less time than drawing."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            return args[0] if args else kwargs["tensor"]
        if func is torch.linalg.qr:  # by which drawn matrices become orthogonal
            return args[0], args[0]
        return func(*args, **kwargs)
