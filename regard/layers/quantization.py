"""Weights laid out for use on a CPU, where decoding multiplies a few rows with every matrix of the model.

* `column_major`: every matrix transposed in memory, so that a product with a few rows reads it in order. Its values, and
  what is saved, are the same. Results agree up to rounding, since such a product may add its terms in another order.
* `packed`: fewer bytes a number, in the order in which the processor's instructions want them. A model that was packed can
  be used, but neither trained nor saved. `int8` has a scale for each output, and rounds the inputs of a matrix to bytes as
  they come, each row by its own largest number, so that no row depends on which others are with it; `fp16` rounds the
  matrices alone; `bf16` rounds both, for processors that multiply such numbers themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.cpu_threads import LARGE_MATRIX_BYTES, large_matmul
from regard.layers.embedding import Head
from regard.layers.positions.scheme import Positions


def column_major(model: nn.Module) -> None:
    """Lay out the matrices of all linear layers by columns, in place.

    Embeddings stay as they are, since they are looked up by rows, and so does a head that is one of them. The values of
    the parameters stay equal; outputs of the model may differ in the last bits.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
            if type(module) is nn.Linear and module.weight.nbytes >= LARGE_MATRIX_BYTES:
                module.__class__ = LargeLinear


class LargeLinear(nn.Linear):
    """A linear layer that decoding multiplies in several threads while the machine is idle (cores.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return large_matmul(super().forward, x)


def _direct(op: Any) -> Any:
    """An operator without the layers of Python around it, which a step would go through for every matrix."""
    return getattr(op, "_op", op)


_int8_product = _direct(torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default)
_fp16_product = _direct(torch.ops.quantized.linear_dynamic_fp16.default)


class Int8Linear(nn.Module):
    """x W^T + b, (..., K) -> (..., N), with W in bytes."""

    def __init__(self, weight: Tensor, bias: Tensor | None, step: Tensor | None = None) -> None:
        """With `step` (N,), of each output, `weight` is in bytes already."""
        super().__init__()
        given = step is not None
        step = (step if step is not None else (weight.abs().amax(1) / 127).clamp(min=1e-12)).double()
        zero = torch.zeros_like(step).long()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to replace this kind of tensor, and has nothing as fast yet
            if given:
                values = torch._make_per_channel_quantized_tensor(weight, step, zero, 0)
            else:
                values = torch.quantize_per_channel(weight.float(), step, zero, 0, torch.qint8)
            self.matrix = torch.ops.quantized.linear_prepack(values, None)
        self.size, self.large = weight.numel(), weight.numel() >= LARGE_MATRIX_BYTES
        self.bias = None if bias is None else bias.float()  # not a buffer, which is slower to get at
        # Without VNNI, pairs of products are summed in 16 bits, so inputs may only have 7.
        self.most = 127 if torch.cpu._is_vnni_supported() else 63

    def forward(self, x: Tensor) -> Tensor:
        return large_matmul(self.multiply, x) if self.large else self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        # In a row of zeros 0 / 0 is rounded to some byte, and what comes of it is multiplied by 0.
        largest = x.abs().amax(-1, keepdim=True)  # (..., 1)
        y = _int8_product(x / largest, 1 / self.most, self.most + 1, self.matrix).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)


class Fp16Linear(nn.Module):
    """The same with W in halves, multiplied in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.size = weight.numel()
        self.matrix = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def forward(self, x: Tensor) -> Tensor:
        return _fp16_product(x, self.matrix)


class Bf16Linear(nn.Module):
    """The same with everything in bf16, and fp32 around it."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.size = weight.numel()
        self.register_buffer("weight", weight.bfloat16())
        self.register_buffer("bias", None if bias is None else bias.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).float()


KINDS: dict[str, type[nn.Module]] = {"int8": Int8Linear, "fp16": Fp16Linear, "bf16": Bf16Linear}


class QuantizedHead(Head):
    """An embedding that is also the head stays as it is for looking up, and is packed for the head alone."""

    def __init__(self, head: Head, kind: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        nn.Module.__init__(self)
        self.product = kind(*_parts(head))
        self.scale = head.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.features(x))


def convert_weights(model: nn.Module, weights: str, device: torch.device) -> nn.Module:
    """A model that was just loaded, in place, as it is best used on this device. By itself that is fp32; on a GPU bf16 for
    models that write, since all their weights are read for every token."""
    if weights not in ("auto", "fp32", *KINDS):
        raise RegardError(f"unknown weights '{weights}': use auto, fp32 (exact), {', '.join(KINDS)}")
    if device.type == "cpu":
        if weights in KINDS:
            return quantize_model(model, weights)
        column_major(model)
    elif weights == "bf16" or (weights == "auto" and hasattr(model, "step")):
        for parameter in model.parameters():  # not buffers: angles of rotations need every digit
            parameter.data = parameter.data.bfloat16()
    elif weights in KINDS:
        raise RegardError(f"weights in {weights} are for CPUs: use bf16 or fp32, or --device cpu")
    return model


def count_weights(model: nn.Module) -> int:
    """Return how many weights a model has, packed ones included."""
    packed = [module.size for module in model.modules() if isinstance(module, (Int8Linear, Fp16Linear, Bf16Linear))]
    return sum(p.numel() for p in model.parameters()) + sum(packed)


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, tuple(KINDS.values())) for module in model.modules())


def quantize_model(model: nn.Module, kind: str) -> nn.Module:
    """Every matrix of the model in this kind of number, in place; position schemes stay as they are."""
    for module, name, layer in linear_layers(model):
        replace_module(module, name, layer, KINDS[kind])
    return model


def quantized_bytes(model: nn.Module, rows: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """The same from bytes: `rows` gives those of a weight (N, K), and their steps (N, 1). Biases are the model's."""
    for module, name, layer in linear_layers(model):
        values, step = rows(layer.weight)  # type: ignore[arg-type]
        replace_module(module, name, layer, lambda _, bias, w=values, s=step: Int8Linear(w, bias, s.squeeze(1)))


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Where the model multiplies with matrices: a module, and the name it has for a layer."""
    kept = {part for module in model.modules() if isinstance(module, Positions) for part in module.modules()}
    return [
        (module, name, layer)
        for module in model.modules()
        if module not in kept
        for name, layer in module.named_children()
        if isinstance(layer, (Head, nn.Linear)) and not isinstance(layer, QuantizedHead)
    ]


def replace_module(module: nn.Module, name: str, layer: nn.Module, kind: Callable[..., nn.Module]) -> None:
    setattr(module, name, QuantizedHead(layer, kind) if isinstance(layer, Head) else kind(*_parts(layer)))


def _parts(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    return weight.detach(), bias.detach() if isinstance(bias, Tensor) else None
