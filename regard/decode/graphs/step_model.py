"""The model whose step is captured in a CUDA graph: the same modules, with weights in the precision of decoding.

A model that was loaded for inference has that precision already, and its parameters are shared. A model in training has
fp32 weights, which `refresh` copies before a search; the copies stay at their addresses, so captured steps read the new
values. Norms and position schemes keep their own precision.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from regard.layers.embedding import Head
from regard.layers.part import full_precision_parameters
from regard.layers.positions.scheme import PositionScheme
from regard.layers.quantization import LargeLinear
from regard.layers.stack import Stack
from regard.layers.variational_dropout import VariationalDropout

TILE = 64  # columns of the output matrix
ACTIVE_DROPOUT = "dropout, which is active in training mode"
NORMS = (nn.LayerNorm, nn.RMSNorm)


class StepModel:
    """A copy of a model's module tree in evaluation mode, without observers, whose parameters have one precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies: list[tuple[Tensor, Tensor]] = []  # (copy, parameter)
        kept = {p for m in model.modules() if isinstance(m, (*NORMS, PositionScheme)) for p in m.parameters()}
        memo: dict[int, Any] = {}
        for module in modules_in_step(model):
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in memo:
                    converts = isinstance(module, (nn.Linear, nn.Embedding, Head)) and parameter not in kept
                    memo[id(parameter)] = self._converted(parameter) if converts else parameter
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                memo.setdefault(id(parameter), parameter)
            for buffer in module.buffers(recurse=False):
                memo.setdefault(id(buffer), buffer)
        self.model: Any = copy.deepcopy(model, memo).eval()
        for module in self.model.modules():
            remove_observers(module)
            if type(module) is LargeLinear:  # its forward is for CPUs
                module.__class__ = nn.Linear  # type: ignore[assignment]
        self.model.head = self.head = StepHead(self.model.head, model.head, self)  # type: ignore[arg-type]
        for _, part in self.model.named_modules():
            if isinstance(part, Stack):
                part.activation_checkpointing = False
        exact = full_precision_parameters(model)
        self.autocast = any(p.dtype != dtype and p.is_floating_point() and p not in exact for p in model.parameters())

    def _converted(self, parameter: Tensor) -> Tensor:
        if parameter.dtype == self.dtype and parameter.is_contiguous():
            return parameter
        made = nn.Parameter(parameter.detach().to(self.dtype, copy=True).contiguous(), requires_grad=False)
        self.copies.append((made, parameter))
        return made

    def refresh(self) -> None:
        """Copy the weights that training has changed since the last call."""
        if self.copies:
            torch._foreach_copy_([made.detach() for made, _ in self.copies], [p.detach() for _, p in self.copies])
        self.head.refresh()

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Return logits (N, V padded to tiles, with -inf) after one more token (N,) of each row."""
        # Parameters that were not converted above are converted at each use by autocast, as in training.
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.autocast, cache_enabled=False):
            return self.model.step(tokens, state)


class StepHead(nn.Module):
    """The output layer with a vocabulary padded to whole tiles: matrix products of other sizes are several times slower.

    The logits of the padding are -inf, by their bias."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, head: Head, original: Head, step_model: StepModel) -> None:
        super().__init__()
        weight, bias = head.weight, head.bias
        self.scale, self.size = head.scale, len(weight)
        more = -self.size % TILE
        self.padded = more > 0
        self.original = (original,)  # in a tuple, so that it is not registered as a child
        if self.padded:
            filled = weight.new_zeros(self.size + more, weight.shape[1], dtype=step_model.dtype)
            added = weight.new_full((self.size + more,), -torch.inf, dtype=step_model.dtype)
            self.weight, self.bias = (nn.Parameter(x, requires_grad=False) for x in (filled, added))
            self.refresh()
        else:
            self.weight, self.bias = weight, bias

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights of the original head."""
        if self.padded:
            weight, bias = self.original[0].weight, self.original[0].bias
            assert self.bias is not None
            self.weight[: self.size].copy_(weight)
            if bias is None:
                self.bias[: self.size] = 0.0
            else:
                self.bias[: self.size].copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        from regard.kernels.step_linear import linear_one_row, runs_kernels

        x = x * self.scale if self.scale != 1.0 else x
        if len(x) == 1 and runs_kernels(x) and x.dtype == self.weight.dtype:
            return linear_one_row(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def why_not_capturable(model: nn.Module) -> str:
    """Return why a model must be decoded eagerly: what a captured step would miss, or an empty string.

    Whether the step itself can be captured is tested by running it (decode/graphs/engine.py)."""
    if not hasattr(model, "step"):
        return f"{type(model).__name__}, which has no step"
    head = getattr(model, "head", None)
    if type(head) is not Head:
        return f"a head of the class {type(head).__name__}"
    for module in modules_in_step(model):
        if isinstance(module, Stack):
            if module.intervened:
                return "what is changed in it for the time being"
            if module.training and module.random:
                return ACTIVE_DROPOUT
            if not module.mask.causal:
                return f"a mask that is not causal ({module.mask})"
        if isinstance(module, (nn.Dropout, VariationalDropout)) and module.training and module.p > 0:
            return ACTIVE_DROPOUT
        reason = find_override(module)
        if reason:
            path = next(name for name, other in model.named_modules() if other is module)
            return f"{reason} {type(module).__name__}" + (f" ({path})" if path else "")
    return ""


def modules_in_step(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that its step may call: all but those of encoders, which read the source eagerly."""
    found, children = [model], [*model.children()]
    while children:
        module = children.pop()
        if getattr(module, "side", "") != "encoder":
            found.append(module)
            children += (child for child in module._modules.values() if child is not None)
    return found


def find_override(module: nn.Module) -> str:
    """Return which hook or replaced method makes a module compute something else than its class, or an empty string.

    Graph replay skips Python, so a hook or a replaced method would not run at every step. Recorders (look/record.py) mark
    their functions with `observes`: these change no number, and may be left out.
    """
    own, names = vars(module), method_names(type(module))  # type: ignore[arg-type]
    if not names.isdisjoint(own):
        for name in names & own.keys():
            if not getattr(own[name], "observes", False):
                return f"a replaced {name}() of"
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or _has_any_global_hook():
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        if _has_any_global_hook() or not all(getattr(hook, "observes", False) for hook in hooks):
            return "a forward hook of"
    return ""


@cache
def method_names(kind: Any) -> frozenset[str]:
    """Return the names of all methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name)))


def remove_observers(module: nn.Module) -> None:
    """Remove recorders from a module of the copy: they record the model itself."""
    own = vars(module)
    for name in method_names(type(module)) & own.keys():  # type: ignore[arg-type]
        del own[name]
    own.pop("observe", None)  # set on blocks
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
