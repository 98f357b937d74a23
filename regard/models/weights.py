"""A model's weights as named tensors, out and in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import RegardError
from regard.layers.packed import packed_bytes, products


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, tied ones under their first name."""
    return {name: p.detach() for name, p in model.named_parameters()}


STEP = ".step"  # a matrix in bytes has its steps beside it


def in_bytes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in a quarter of the room: of a matrix each row in 255 steps of its own, all else in halves."""
    made: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if x.ndim == 2:
            step = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).float()  # (rows, 1)
            made |= {name: (x / step).round().to(torch.int8), name + STEP: step}
        else:
            made[name] = x.half()
    return made


def out_of_bytes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices that `in_bytes` rounded, in fp32; other tensors as they are."""
    steps = {name.removesuffix(STEP): step for name, step in tensors.items() if name.endswith(STEP)}
    kept = {name: x for name, x in tensors.items() if not name.endswith(STEP)}
    return {name: x.float() * steps[name] if name in steps else x for name, x in kept.items()}


def are_bytes(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(STEP) for name in tensors)


def load_bytes(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """What `in_bytes` rounded, into a model whose products are then of bytes (layers/packed.py). No matrix becomes fp32 but
    those that rows are looked up in."""
    check(model, {name: x for name, x in tensors.items() if not name.endswith(STEP)}, where)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    multiplied = {names[layer.weight] for _, _, layer in products(model) if isinstance(layer, nn.Linear)}
    fill(model, out_of_bytes({k: x for k, x in tensors.items() if k.removesuffix(STEP) not in multiplied}))
    packed_bytes(model, lambda weight: (tensors[names[weight]], tensors[names[weight] + STEP]))


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into a model; whatever is missing, extra or of another shape is listed."""
    check(model, tensors, where)
    fill(model, tensors)


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, x in tensors.items():
            own[name].copy_(x)


def check(model: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> None:
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


def check_steps(tensors: Mapping[str, Tensor], where: Path) -> None:
    """Of matrices in bytes, which `check` sees none of."""
    for name, x in tensors.items():
        step = tensors.get(name + STEP)
        if x.dtype == torch.int8 and (step is None or step.shape != (len(x), 1) or not finite(step)):
            raise RegardError(f"the steps of {name} in {where} are missing or broken: copy the folder anew")


def finite(x: Tensor) -> bool:
    """One number that is not finite makes the sum so too, which is faster to see; a sum of huge ones may be, without any."""
    return not x.is_floating_point() or bool(x.sum().isfinite() or x.isfinite().all())


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
