"""Quantization and memory layout of weights for decoding on a CPU, which multiplies few rows with every matrix.

| weights | matrices                                                   | inputs of matrices                        |
|---------|------------------------------------------------------------|-------------------------------------------|
| fp32    | column-major in memory; the values stay the same           | fp32                                      |
| int8    | per-row symmetric int8: one scale for each output feature  | int8, with one dynamic scale for each row |
| fp16    | fp16                                                       | fp32                                      |
| bf16    | bf16                                                       | bf16                                      |

A column-major matrix is read in order by a product with few rows; results agree up to the order of summation. Each row of
inputs has its own scale so that no result depends on which other rows are in the batch. bf16 is for processors with bf16
instructions. A quantized model can be used, but neither trained nor saved. This is quantization at run time; int8 weights
on disk are written and read by models/weights.py.
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
from regard.layers.part import full_precision_parameters
from regard.layers.positions.scheme import PositionScheme


def make_column_major(model: nn.Module) -> None:
    """Store the matrices of all linear layers in column-major order, in place.

    Embeddings stay row-major, since they are looked up by rows, and so does a head that is tied to one. Parameters keep
    their values; outputs of the model may differ in the last bits.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
            if type(module) is nn.Linear and module.weight.nbytes >= LARGE_MATRIX_BYTES:
                module.__class__ = LargeLinear


class LargeLinear(nn.Linear):
    """A linear layer whose product uses several threads while the machine is idle (kernels/cpu_threads.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return large_matmul(super().forward, x)


def _unwrap_op(op: Any) -> Any:
    """Return an operator without its Python wrapper, whose overhead a decoding step pays for every matrix."""
    return getattr(op, "_op", op)


_int8_product = _unwrap_op(torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default)
_fp16_product = _unwrap_op(torch.ops.quantized.linear_dynamic_fp16.default)


class Int8Linear(nn.Module):
    """A linear layer, (..., K) -> (..., N), with W in per-row symmetric int8."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> None:
        """Quantize `weight` (N, K), or take it as int8 with the given scale (N,) of each row."""
        super().__init__()
        given = scale is not None
        scale = (scale if scale is not None else (weight.abs().amax(1) / 127).clamp(min=1e-12)).double()
        zero = torch.zeros_like(scale).long()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates quantized tensors, but has no replacement as fast
            if given:
                values = torch._make_per_channel_quantized_tensor(weight, scale, zero, 0)
            else:
                values = torch.quantize_per_channel(weight.float(), scale, zero, 0, torch.qint8)
            self.matrix = torch.ops.quantized.linear_prepack(values, None)
        self.size, self.large = weight.numel(), weight.numel() >= LARGE_MATRIX_BYTES
        self.bias = None if bias is None else bias.float()  # not a buffer, which is slower to get at
        # Without VNNI, pairs of products are summed in 16 bits, so inputs may only have 7.
        self.max_input = 127 if torch.cpu._is_vnni_supported() else 63

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., K) -> (..., N)."""
        return large_matmul(self.multiply, x) if self.large else self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Quantize the rows of x to int8, multiply, and scale the result back, (..., K) -> (..., N)."""
        # In a row of zeros, 0 / 0 is rounded to an arbitrary int8, and the result is multiplied by 0.
        largest = largest_magnitude(x)  # (..., 1)
        y = _int8_product(x / largest, 1 / self.max_input, self.max_input + 1, self.matrix).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row, (..., K) -> (..., 1).

    For one sentence, x.abs().amax() is faster; for many, the memory that abs() takes costs more than a second reading of x.
    """
    if x.numel() < 1 << 16:
        return x.abs().amax(-1, keepdim=True)
    return torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())


class Fp16Linear(nn.Module):
    """A linear layer with W in fp16 and products in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.size = weight.numel()
        self.matrix = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., K) -> (..., N)."""
        return _fp16_product(x, self.matrix)


class Bf16Linear(nn.Module):
    """A linear layer in bf16, with inputs and outputs in fp32."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.size = weight.numel()
        self.register_buffer("weight", weight.bfloat16())
        self.register_buffer("bias", None if bias is None else bias.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., K) -> (..., N)."""
        return F.linear(x.bfloat16(), self.weight, self.bias).float()


QUANTIZED_LINEAR: dict[str, type[nn.Module]] = {"int8": Int8Linear, "fp16": Fp16Linear, "bf16": Bf16Linear}


class QuantizedHead(Head):
    """A head with quantized weights; an embedding that is tied to it keeps its own weights for look-ups."""

    def __init__(self, head: Head, kind: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        nn.Module.__init__(self)
        self.linear = kind(*_weight_and_bias(head))
        self.scale = head.scale

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (..., V) of hidden vectors (..., C)."""
        return self.linear(self.features(x))


def convert_weights(model: nn.Module, weights: str, device: torch.device) -> nn.Module:
    """Convert a loaded model to `weights` in place, and return it.

    `auto` is fp32, except on a GPU for models that decode: they use bf16, because every token reads all weights."""
    if weights not in ("auto", "fp32", *QUANTIZED_LINEAR):
        raise RegardError(f"unknown weights '{weights}': use auto, fp32 (exact), {', '.join(QUANTIZED_LINEAR)}")
    if device.type == "cpu":
        if weights in QUANTIZED_LINEAR:
            return quantize_model(model, weights)
        make_column_major(model)
    elif weights == "bf16" or (weights == "auto" and hasattr(model, "step")):
        exact = full_precision_parameters(model)
        for parameter in model.parameters():  # buffers stay fp32: rotary angles need the precision
            if parameter not in exact:
                parameter.data = parameter.data.bfloat16()
    elif weights in QUANTIZED_LINEAR:
        raise RegardError(f"weights in {weights} are for CPUs: use bf16 or fp32, or --device cpu")
    return model


def count_weights(model: nn.Module) -> int:
    """Return the number of weights of a model, quantized ones included."""
    quantized = [module.size for module in model.modules() if isinstance(module, (Int8Linear, Fp16Linear, Bf16Linear))]
    return sum(p.numel() for p in model.parameters()) + sum(quantized)


def is_quantized(model: nn.Module) -> bool:
    """Return whether any layer of the model is quantized."""
    return any(isinstance(module, tuple(QUANTIZED_LINEAR.values())) for module in model.modules())


def quantize_model(model: nn.Module, kind: str) -> nn.Module:
    """Quantize every matrix of a model in place, except those of position schemes, and return the model."""
    for module, name, layer in linear_layers(model):
        _replace_layer(module, name, layer, QUANTIZED_LINEAR[kind])
    return model


def load_int8_layers(model: nn.Module, rows: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """Replace every matrix of a model by int8 rows that were quantized before; biases stay.

    `rows` maps a weight (N, K) of the model to its int8 rows (N, K) and their scales (N, 1)."""
    for module, name, layer in linear_layers(model):
        values, scale = rows(layer.weight)  # type: ignore[arg-type]
        _replace_layer(module, name, layer, lambda _, bias, w=values, s=scale: Int8Linear(w, bias, s.squeeze(1)))


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the linear layers and heads of a model that can be quantized, as (parent module, name, layer)."""
    kept = {part for module in model.modules() if isinstance(module, PositionScheme) for part in module.modules()}
    return [
        (module, name, layer)
        for module in model.modules()
        if module not in kept
        for name, layer in module.named_children()
        if isinstance(layer, (Head, nn.Linear)) and not isinstance(layer, QuantizedHead)
    ]


def _replace_layer(module: nn.Module, name: str, layer: nn.Module, kind: Callable[..., nn.Module]) -> None:
    setattr(module, name, QuantizedHead(layer, kind) if isinstance(layer, Head) else kind(*_weight_and_bias(layer)))


def _weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    return weight.detach(), bias.detach() if isinstance(bias, Tensor) else None
