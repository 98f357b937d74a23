"""Operators of torch for kernels: torch.compile and autograd see one operation with a known result, not what is inside.

`dense_rows` gives kernels the rows that they can address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


class Operator:
    """A function that is registered with torch, as `torch.library.custom_op` does; `op` is what that returns.

    With torch 2.11 on the host of an H200, the wrapper took about 0.4 ms a call: 24 of the 61 ms in which a mixture of
    experts of 12 blocks read a prompt. In inference mode on a GPU, where nobody looks at operations (autograd, the
    compiler, modes such as a counter of FLOPs), the function itself is called."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function, self.op = function, torch.library.custom_op(name, function, mutates_args=())
        self.register_fake, self.register_autograd = self.op.register_fake, self.op.register_autograd
        self.__doc__, self.__name__ = function.__doc__, function.__name__

    def __call__(self, *given: Any) -> Any:
        # Inference mode, not a mere lack of gradients: the compiler traces backward passes without gradients.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or not on_gpu(given):
            return self.op(*given)
        return self.function(*given) if _get_current_dispatch_mode() is None else self.op(*given)


def on_gpu(given: tuple[Any, ...]) -> bool:
    """Return whether the first tensor of some arguments is on a GPU."""
    return next(each for each in given if isinstance(each, Tensor)).is_cuda


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes a function of tensors the operator of this name. It must not change its inputs."""
    return lambda function: Operator(name, function)


MOST_ROWS = 65535  # the largest second or third axis of a grid


def dense_rows(x: Tensor) -> Tensor:
    """Return x (B, T, C), copied unless its rows are dense and follow each other at equal distances, x.stride(1)."""
    dense = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    # Not `contiguous`: with one token in each row, torch takes any distance of tokens for that of a contiguous tensor.
    return x if dense else x.clone(memory_format=torch.contiguous_format)
