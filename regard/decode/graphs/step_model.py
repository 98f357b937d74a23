"""The model as the CUDA-graph decoder steps it: the same modules, with weights in the precision of decoding.

A model in use has that precision already, and its parameters are shared. One in training has fp32 weights, of which
`refresh` takes copies before a search; the copies stay where they are, so captured steps read the new numbers. Norms and
position schemes keep their own precision.
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
from regard.layers.positions.scheme import Positions
from regard.layers.quantization import LargeLinear
from regard.layers.stack import Stack
from regard.layers.variational_dropout import VariationalDropout

TILE = 64
DROPS = "dropout, which is active in training mode"
NORMS = (nn.LayerNorm, nn.RMSNorm)


class StepModel:
    """A copy of a model's module tree in evaluation mode, without observers, whose parameters have one precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies: list[tuple[Tensor, Tensor]] = []  # (copy, parameter)
        kept = {p for m in model.modules() if isinstance(m, (*NORMS, Positions)) for p in m.parameters()}
        memo: dict[int, Any] = {}
        for module in stepped(model):
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
            _without_observers(module)
            if type(module) is LargeLinear:  # laid out for a CPU
                module.__class__ = nn.Linear  # type: ignore[assignment]
        self.model.head = self.head = StepHead(self.model.head, model.head, self)  # type: ignore[arg-type]
        for _, part in self.model.named_modules():
            if isinstance(part, Stack):
                part.activation_checkpointing = False
        self.autocast = any(p.dtype != dtype and p.is_floating_point() for p in model.parameters())

    def _converted(self, parameter: Tensor) -> Tensor:
        if parameter.dtype == self.dtype and parameter.is_contiguous():
            return parameter
        made = nn.Parameter(parameter.detach().to(self.dtype, copy=True).contiguous(), requires_grad=False)
        self.copies.append((made, parameter))
        return made

    def refresh(self) -> None:
        """Take over what training has changed since."""
        if self.copies:
            torch._foreach_copy_([made.detach() for made, _ in self.copies], [p.detach() for _, p in self.copies])
        self.head.refresh()

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Return logits (N, V, and a few more at -inf) after one more token (N,) of each row."""
        # Parameters that are no matrix of a known layer are converted at each use, as autocast does in training.
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.autocast, cache_enabled=False):
            return self.model.step(tokens, state)


class StepHead(nn.Module):
    """The output layer with a vocabulary of whole tiles: products with others are several times slower.

    What only fills up has a bias of minus infinity."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, head: Head, original: Head, shadow: StepModel) -> None:
        super().__init__()
        weight, bias = head.weight, head.bias
        self.scale, self.size = head.scale, len(weight)
        more = -self.size % TILE
        self.padded = more > 0
        self.original = (original,)  # a tuple, because the module stays the model's
        if self.padded:
            filled = weight.new_zeros(self.size + more, weight.shape[1], dtype=shadow.dtype)
            added = weight.new_full((self.size + more,), -torch.inf, dtype=shadow.dtype)
            self.weight, self.bias = (nn.Parameter(x, requires_grad=False) for x in (filled, added))
            self.refresh()
        else:
            self.weight, self.bias = weight, bias

    @torch.no_grad()
    def refresh(self) -> None:
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
    """Return what a model has that a captured step would not see, or an empty string.

    Whether the step itself can be captured is found out by running it (decode/graphs/engine.py)."""
    if not hasattr(model, "step"):
        return f"{type(model).__name__}, which has no step"
    head = getattr(model, "head", None)
    if type(head) is not Head:
        return f"a head of the class {type(head).__name__}"
    for module in stepped(model):
        if isinstance(module, Stack):
            if module.intervened:
                return "what is changed in it for the time being"
            if module.training and module.random:
                return DROPS
            if not module.mask.causal:
                return f"a mask that is not causal ({module.mask})"
        if isinstance(module, (nn.Dropout, VariationalDropout)) and module.training and module.p > 0:
            return DROPS
        reason = altered_by(module)
        if reason:
            path = next(name for name, other in model.named_modules() if other is module)
            return f"{reason} {type(module).__name__}" + (f" ({path})" if path else "")
    return ""


def stepped(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that its steps run: all but those of encoders, which read the source as they are."""
    found, children = [model], [*model.children()]
    while children:
        module = children.pop()
        if getattr(module, "side", "") != "encoder":
            found.append(module)
            children += (child for child in module._modules.values() if child is not None)
    return found


def altered_by(module: nn.Module) -> str:
    """Return what makes a module compute something other than its class does, or an empty string.

    A captured step runs no Python, so a hook or a replaced method may miss what it counts on. Recorders (look/record.py)
    mark their functions with `observes`: these leave every number as it is, and may be left out.
    """
    own, names = vars(module), methods(type(module))  # type: ignore[arg-type]
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
def methods(kind: Any) -> frozenset[str]:
    """Return the names of all methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name)))


def _without_observers(module: nn.Module) -> None:
    """Take recorders off a module of the copy: they record the model itself."""
    own = vars(module)
    for name in methods(type(module)) & own.keys():  # type: ignore[arg-type]
        del own[name]
    own.pop("observe", None)  # of a block
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
