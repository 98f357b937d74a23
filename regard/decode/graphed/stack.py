"""One decoding step of a stack as few operations on static memory: what a CUDA graph records.

It is made from a model's modules and works with their weights, in the precision asked for. A model in use has that
precision, and its weights are shared; one in training has fp32 weights, of which `refresh` takes copies before a search.
With one row a step is limited by reading weights, so a norm, a projection and what follows it are one kernel; with more
the library's matrix products are faster, and what lies between two of them is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from regard.decode.graphed.attend import cross_attend, self_attend
from regard.decode.graphed.linear import KERNEL_ACTIVATIONS, Norm, add_norm, one_row
from regard.layers.attention import Attention, CrossAttention, SelfAttention
from regard.layers.block import Block, ParallelBlock
from regard.layers.cache import KeysValues
from regard.layers.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from regard.layers.masks import Mask
from regard.layers.norm import Branch, PostNorm, PreNorm
from regard.layers.positions import Learned, Linear, NoPositions, Positions, Sinusoidal
from regard.layers.relative import ALiBi, KerpleLog, KerplePower, T5Bias
from regard.layers.rotary import Rotary
from regard.layers.stack import Stack

# What a step re-implements, by exact type: a subclass may compute something else, so it is decoded token by token.
SCHEMES = (NoPositions, Linear, Sinusoidal, Learned, Rotary, ALiBi, T5Bias, KerpleLog, KerplePower)
SUBLAYERS = {"self": (SelfAttention,), "cross": (CrossAttention,), "ff": (FeedForward, GatedFeedForward)}
NORMS = (nn.LayerNorm, nn.RMSNorm)
LAYOUTS = {  # a block, the place of its sublayers, and whether the stack ends on a norm
    (Block, PreNorm, True),
    (Block, PostNorm, False),
    (ParallelBlock, Branch, True),
}
BLOCKS = (Block, ParallelBlock, PreNorm, PostNorm, Branch)
LAYERS = (SelfAttention, CrossAttention, FeedForward, GatedFeedForward)
PARTS = {Stack, nn.ModuleList, nn.ModuleDict, *BLOCKS, *LAYERS, nn.Linear, nn.Dropout, *NORMS, *SCHEMES}


def why_not(stack: Stack) -> str:
    """Return what in this stack `StepStack` cannot compute, or an empty string if there is nothing of the kind."""
    if getattr(stack, "changed", False):  # look/change/intervene.py
        return "what is changed in it for the time being"
    scheme, mask = stack.schemes[0], stack.mask
    if type(scheme) not in SCHEMES or len(stack.schemes) > 1:
        return f"{type(scheme).__name__} positions"
    if stack.dilations:
        return "convolutions"
    if type(stack.cross_scheme) is not NoPositions:
        return f"{type(stack.cross_scheme).__name__} positions in cross-attention"
    if type(mask) is not Mask or not mask.causal or mask.packed:
        return f"a mask that is not causal ({mask})"
    if stack.d_head % 2 or stack.d_head > 128:
        return f"heads {stack.d_head} wide"
    if stack.training and stack.random:
        return "dropout, which is active in training mode"
    return unknown_part("decoder", stack, PARTS) or next(filter(None, map(partial(unlike, stack), stack.blocks)), "")


def unknown_part(path: str, root: nn.Module, known: Collection[type]) -> str:
    """Return which module in `root` is of no known type or does not run its own code alone, or an empty string."""
    for module in root.modules():
        reason = altered_by(module) if type(module) in known else "an unknown"
        if reason:
            inner = next(name for name, other in root.named_modules(prefix=path) if other is module)
            return f"{reason} {type(module).__name__} ({inner})"
    return ""


def altered_by(module: nn.Module) -> str:
    """Return what makes a module compute something other than its class does, or an empty string.

    Recorders (look/record.py) mark their functions with `observes`: these leave every number as it is.
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
    if isinstance(module, NORMS) and (module.weight is None or module.eps is None):
        return "no scale or no epsilon in"
    return ""


@cache
def methods(kind: Hashable) -> frozenset[str]:
    """Return the names of all methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name)))


def unlike(stack: Stack, block: nn.Module) -> str:
    """Return how a block of known parts differs from those that `StepStack` puts together, or an empty string."""
    first = stack.blocks[0]
    assert isinstance(first, Block)
    assert isinstance(block, Block)
    if type(block) is not type(first) or [*block.sublayers] != [*first.sublayers] or "self" not in block.sublayers:
        return "blocks of different kinds"
    heads = heads_of(first.get_submodule("sublayers.self.sublayer"))  # type: ignore[arg-type]
    for name, place in block.sublayers.items():
        layer = place.sublayer
        if type(layer) not in SUBLAYERS.get(name, ()):
            return f"{type(layer).__name__} as the sublayer '{name}'"
        if (type(block), type(place), stack.norm is not None) not in LAYOUTS:
            return (
                f"{type(place).__name__} in a {type(block).__name__}, {'no ' * (stack.norm is None)}norm after the last"
            )
        if isinstance(layer, FeedForward) and layer.activation not in KERNEL_ACTIVATIONS:
            return f"the activation {layer.activation}"
        if isinstance(layer, Attention) and (heads_of(layer), layer.d_head) != (heads, stack.d_head):
            return "attention layers with different heads"
    return ""


TILE = 64


@dataclass
class Memory:
    """What the rows of a step remember: N rows of B sentences."""

    keys: list[Tensor]  # of each layer, (N, G, L, D)
    values: list[Tensor]
    owner: Tensor | None = None  # (N, L) which row holds a column of a row's past; None: itself
    crossed: list[KeysValues] = field(default_factory=list)  # of each layer, (B, G, S, D) twice
    length: Tensor | None = None  # (B,) real source tokens


Mix = Callable[[Tensor, Tensor, Memory], Tensor]  # what stands between the two matrices of a sublayer


class Weights:
    """Parameters in one precision: themselves where they have it, else copies."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies: dict[Tensor, Tensor] = {}

    def of(self, parameter: Tensor) -> Tensor:
        if parameter.dtype == self.dtype and parameter.is_contiguous():
            return parameter.detach()
        if parameter not in self.copies:
            self.copies[parameter] = parameter.detach().to(self.dtype, copy=True).contiguous()
        return self.copies[parameter]

    def head(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A vocabulary of whole tiles: products with others are several times slower. What only fills up has a
        bias of minus infinity."""
        v = len(weight)
        more = -v % TILE
        if not more:
            return Matrix(self.of(weight), None if bias is None else self.of(bias))
        filled = weight.new_zeros(v + more, weight.shape[1], dtype=self.dtype)
        added = weight.new_full((v + more,), -torch.inf, dtype=self.dtype)
        added[:v] = 0.0
        self.copies[weight] = filled[:v]
        if bias is not None:
            self.copies[bias] = added[:v]
        self.refresh()
        return Matrix(filled, added)

    def matrix(self, linear: nn.Linear, activation: str = "", gated: bool = False) -> Matrix:
        return Matrix(self.of(linear.weight), None if linear.bias is None else self.of(linear.bias), activation, gated)

    def refresh(self) -> None:
        """What training has changed since. The copies stay where they are, so recorded graphs read the new numbers."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), [p.detach() for p in self.copies])


@dataclass(frozen=True)
class Matrix:
    weight: Tensor  # (N, C)
    bias: Tensor | None = None
    activation: str = ""
    gated: bool = False

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """residual + f(norm(x) W^T + b), (M, C) -> (M, N)"""
        if len(x) == 1:
            settings = {"norm": norm, "activation": self.activation, "gated": self.gated, "residual": residual}
            return one_row(x, self.weight, self.bias, **settings)  # type: ignore[arg-type]
        y = self._many(x if norm is None else add_norm(x, None, norm)[1])
        return y if residual is None else residual + y

    def _many(self, x: Tensor) -> Tensor:
        if self.activation == "relu" and not self.gated and self.bias is not None:
            return torch._addmm_activation(self.bias, x, self.weight.t())  # the product's own kernel adds and cuts
        y = F.linear(x, self.weight, self.bias)
        if not self.activation:
            return y
        if not self.gated:
            return ACTIVATIONS[self.activation](y)
        gate, value = y.chunk(2, -1)
        return ACTIVATIONS[self.activation](gate) * value


@dataclass(frozen=True)
class Part:
    """A sublayer: last(mix(first(x)))."""

    norm: Norm | None  # None: its block has one for all
    first: Matrix
    mix: Mix
    last: Matrix

    def __call__(
        self, x: Tensor, position: Tensor, memory: Memory, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + f(norm(x))"""
        return self.last(self.mix(self.first(x, norm), position, memory), residual=residual)


class StepStack:
    """`Stack.forward` for one new token in each row."""

    def __init__(self, stack: Stack, weights: Weights, room: int) -> None:
        self.stack, self.weights = stack, weights
        scheme = stack.schemes[0]
        assert isinstance(scheme, Positions)
        self.scheme, self.room = scheme, room
        self.bias: Tensor | None = None  # (H, L), of each distance back
        self.refresh()
        self.blocks = [self._block(i, block) for i, block in enumerate(stack.blocks)]  # type: ignore[arg-type]
        self.norm = None if stack.norm is None else norm_of(stack.norm)
        self.forward = self._parallel if isinstance(stack.blocks[0], ParallelBlock) else self._serial()

    def refresh(self) -> None:
        if self.scheme.relative:
            device = next(self.stack.parameters()).device
            past = torch.arange(self.room, device=device)
            bias = self.scheme.bias(past, torch.zeros_like(past)).detach().float()  # (H, L)
            self.bias = bias.contiguous() if self.bias is None else self.bias.copy_(bias)

    def __call__(self, x: Tensor, position: Tensor, memory: Memory) -> Tensor:
        """x (N, C), each row's token at its `position` (N,) -> (N, C), the stack's last norm included."""
        return self.forward(x, position, memory)

    # ---- the three ways a block is put together ---------------------------------------------------------------------

    def _serial(self) -> Callable[[Tensor, Tensor, Memory], Tensor]:
        return self._post if self.norm is None else self._pre

    def _pre(self, x: Tensor, position: Tensor, memory: Memory) -> Tensor:
        """x + f(norm(x)). Each sum is made together with the norm that follows it, or by the matrix before it."""
        assert self.norm is not None
        parts = [part for block in self.blocks for part in block]
        if len(x) == 1:
            for part in parts:
                x = part(x, position, memory, part.norm, residual=x)
            return add_norm(x, None, self.norm)[1]
        y = None
        for part in parts:
            assert part.norm is not None
            x, normal = add_norm(x, y, part.norm)
            y = part(normal, position, memory)
        return add_norm(x, y, self.norm)[1]

    def _post(self, x: Tensor, position: Tensor, memory: Memory) -> Tensor:
        """norm(x + f(x))"""
        for block in self.blocks:
            for part in block:
                assert part.norm is not None
                x = add_norm(x, part(x, position, memory), part.norm)[1]
        return x

    def _parallel(self, x: Tensor, position: Tensor, memory: Memory) -> Tensor:
        """x + f(norm(x)) + g(norm(x))"""
        for block, parts in zip(self.stack.blocks, self.blocks, strict=True):
            norm, before = norm_of(block.norm), x  # type: ignore[arg-type]
            if len(x) > 1:
                before = add_norm(x, None, norm)[1]
            for part in parts:
                x = part(before, position, memory, norm if len(x) == 1 else None, residual=x)
        return x if self.norm is None else add_norm(x, None, self.norm)[1]

    # ---- sublayers ----------------------------------------------------------------------------------------------------

    def _block(self, i: int, block: Block) -> list[Part]:
        return [self._part(i, place) for place in block.sublayers.values()]

    def _part(self, i: int, place: nn.Module) -> Part:
        norm, layer, matrix = getattr(place, "norm", None), place.sublayer, self.weights.matrix
        own = None if norm is None else norm_of(norm)
        if isinstance(layer, SelfAttention):
            return Part(own, matrix(layer.qkv), self._self(i, layer), matrix(layer.out))
        if isinstance(layer, CrossAttention):
            return Part(own, matrix(layer.q), self._cross(i, layer), matrix(layer.out))
        assert isinstance(layer, FeedForward)
        inner = matrix(layer.inner, layer.activation, layer.gated)
        return Part(own, inner, lambda x, position, memory: x, matrix(layer.outer))

    def _self(self, i: int, layer: SelfAttention) -> Mix:
        rotary = isinstance(self.scheme, Rotary)
        settings = {
            "turn": self.scheme.turn if rotary else None,
            "temperature": self.scheme.temperature if rotary else 1.0,
            "bias": self.bias,
            "back": self.stack.mask.back,
            "scale": self.scheme.scale or self.stack.d_head**-0.5,
            "heads": heads_of(layer),
        }

        def mix(qkv: Tensor, position: Tensor, memory: Memory) -> Tensor:
            return self_attend(qkv, memory.keys[i], memory.values[i], position, owner=memory.owner, **settings)  # type: ignore[arg-type]

        return mix

    def _cross(self, i: int, layer: CrossAttention) -> Mix:
        scale, heads = self.stack.cross_scheme.scale or self.stack.d_head**-0.5, heads_of(layer)

        def mix(q: Tensor, position: Tensor, memory: Memory) -> Tensor:
            assert memory.length is not None
            return cross_attend(q, *memory.crossed[i], memory.length, scale=scale, heads=heads)

        return mix


def heads_of(layer: Attention) -> tuple[int, int]:
    """H and G."""
    return layer.d_queries // layer.d_head, layer.d_keys // layer.d_head


def norm_of(norm: nn.Module) -> Norm:
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    kind = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
    return Norm(kind, norm.weight.detach(), getattr(norm, "bias", None), norm.eps)  # type: ignore[arg-type]
