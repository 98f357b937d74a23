"""Saving and loading weights as named tensors, in full precision or quantized to int8.

This is int8 on disk: it makes a model folder small. Int8 at run time, where linear layers multiply int8 rows, is
layers/quantization.py; `load_quantized` hands the stored rows and scales over to it without dequantizing them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.files import check_regular
from regard.layers.quantization import linear_layers, load_int8_layers


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by name (state_dict), tied ones once, under their first name."""
    return {name: p.detach() for name, p in model.named_parameters()}


SCALE_SUFFIX = ".step"  # ends the stored name of the scales (rows, 1) of an int8 matrix: its quantization step


def quantize_weights(tensors: Mapping[str, Tensor], exact: Collection[str] = ()) -> dict[str, Tensor]:
    """Quantize matrices to int8, symmetrically and with a scale for each row; convert other tensors to fp16.

    Tensors that are named in `exact` are left as they are."""
    made: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if name in exact:
            made[name] = x
        elif x.ndim == 2:
            scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).float()  # (rows, 1)
            made |= {name: (x / scale).round().to(torch.int8), name + SCALE_SUFFIX: scale}
        else:
            made[name] = x.half()
    return made


def dequantize_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return int8 matrices of `quantize_weights` in fp32, and other tensors unchanged."""
    scales = {name.removesuffix(SCALE_SUFFIX): x for name, x in tensors.items() if name.endswith(SCALE_SUFFIX)}
    kept = {name: x for name, x in tensors.items() if not name.endswith(SCALE_SUFFIX)}
    return {name: x.float() * scales[name] if name in scales else x for name, x in kept.items()}


def are_quantized(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(SCALE_SUFFIX) for name in tensors)


def load_quantized(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Load tensors of `quantize_weights` into a model whose linear layers then multiply int8 (layers/quantization.py).

    Only other matrices, such as embeddings, of which rows are looked up, are dequantized to fp32."""
    check_weights(model, {name: x for name, x in tensors.items() if not name.endswith(SCALE_SUFFIX)}, where)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    multiplied = {names[layer.weight] for _, _, layer in linear_layers(model) if isinstance(layer, nn.Linear)}
    copy_weights(
        model, dequantize_weights({k: x for k, x in tensors.items() if k.removesuffix(SCALE_SUFFIX) not in multiplied})
    )
    load_int8_layers(model, lambda weight: (tensors[names[weight]], tensors[names[weight] + SCALE_SUFFIX]))


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into a model (load_state_dict); the error lists those that are missing, extra or of another shape."""
    check_weights(model, tensors, where)
    copy_weights(model, tensors)


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, x in tensors.items():
            own[name].copy_(x)


def check_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Refuse tensors that do not have the names and shapes of the model's parameters, or are not finite."""
    own = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is not in the model" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    wrong += [f"{name} holds numbers that are not finite" for name, x in tensors.items() if not is_finite(x)]
    if wrong:
        shown = "; ".join(sorted(wrong)[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RegardError(f"the weights in {where} do not fit this model (another vocabulary or size?): {shown}")


def check_scales(tensors: Mapping[str, Tensor], where: Path) -> None:
    """Refuse int8 matrices whose scales are missing, of another shape or not finite; `check_weights` sees no scales."""
    for name, x in tensors.items():
        scale = tensors.get(name + SCALE_SUFFIX)
        if x.dtype == torch.int8 and (scale is None or scale.shape != (len(x), 1) or not is_finite(scale)):
            raise RegardError(f"the scales of {name} in {where} are missing or broken: copy the folder anew")


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite.

    A finite sum proves it in less time; only where the sum is not finite, which huge numbers can cause, is every one
    looked at."""
    return not x.is_floating_point() or bool(x.sum().isfinite() or x.isfinite().all())


# ---- checking sizes before memory is allocated -----------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a safetensors file; only its header is read."""
    with safe_open(check_regular(path), "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


SPARE = 1 << 24  # numbers that a model may have beyond twice those in its file: new heads, computed tables


class SizeLimit(TorchFunctionMode):
    """A limit on the elements of the tensors that are made inside of the context: a configuration from a file is checked
    against the size of its weights before any memory is allocated.

    Building the model on the `meta` device would check the same, but its first operation imports 900 modules of torch,
    which takes longer than loading the model.
    """

    def __init__(self, config: ModelConfig, shapes: Shapes, where: Path) -> None:
        super().__init__()
        self.where, self.stored = where, sum(map(math.prod, shapes.values()))
        self.left = 2 * self.stored + SPARE
        layers = config.n_encoder_layers + config.n_decoder_layers
        if layers > len(shapes):
            raise RegardError(f"the configuration in {where} has {layers:,} layers, but only {len(shapes):,} tensors")

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in FACTORIES:
            self.left -= math.prod(args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args)
            if self.left < 0:
                raise RegardError(
                    f"the configuration in {self.where} is of a model much larger than its weights, which have "
                    f"{self.stored:,} numbers: its sizes are wrong; copy the folder anew"
                )
        return func(*args, **(kwargs or {}))


FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.randn}


# ---- skipping the initialization ---------------------------------------------------------------------------------

DRAWS = {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_}


class SkipInit(TorchFunctionMode):
    """A context in which a model is built without random initial weights, since its weights are about to be loaded."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            return args[0] if args else kwargs["tensor"]
        if func is torch.linalg.qr:  # makes random matrices orthogonal
            return args[0], args[0]
        if func is torch.randint:  # a model's seed
            return torch.zeros((), dtype=torch.long, device="cpu")
        return func(*args, **kwargs)
