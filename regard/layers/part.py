"""The base classes of the parts of a model, and the place in a model that a part is built for.

A part is a position scheme, a token mixer, a feed-forward layer, a recurrent cell or an attention score.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import find
from regard.kernels.masks import PAD_POSITION

if TYPE_CHECKING:
    from regard.layers.context import Context, Request
    from regard.layers.decoding_state import Storage


@dataclass(frozen=True)
class Place:
    """Where in a model a part stands."""

    side: str  # encoder, decoder, or cross for what lies between them
    index: int = 0  # which of the parts of its name on this side it is, from 0
    causal: bool = False  # tokens see only themselves and earlier ones


@dataclass(frozen=True)
class NoSettings:
    """The settings of a part that has none."""


class Part(nn.Module):
    """One class in one file, entered in the registry by `@register("name")`. It alone knows what is said here.

    The first sentence of its docstring is its help text.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    Settings: ClassVar[type] = NoSettings  # a frozen dataclass whose fields are made with `registry.setting`
    tensor_parallel: ClassVar[dict[str, str]] = {}  # child or parameter -> "column", "row" or "expert"; else replicated
    no_decay: ClassVar[tuple[str, ...]] = ()  # own parameters that weight decay leaves alone
    random: ClassVar[bool] = False  # draws random numbers in training by something other than nn.Dropout
    observed: ClassVar[dict[str, str]] = {}  # name -> child; `look.record` keeps what enters that child under this name

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        """Parts read what they need here and keep it as plain attributes: `forward` looks nothing up."""
        super().__init__()

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        """Raise a RegardError where the part makes no sense. It is called before anything is built."""

    def init_weights(self) -> None:
        """Fill the part's own parameters and buffers. The default leaves matrices, biases and gains to models/initialization.py."""

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        """Return, for each child layer whose weight holds several matrices in turns (kernels/weight_layout.py): in how many blocks
        its rows come, and how many rows each matrix has in a block. Muon treats them as a matrix each."""
        return {}

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return curves and matrices that show what the part does to n tokens; `regard look` draws them."""
        return ()


@dataclass(frozen=True)
class Curves:
    """Named curves over one axis."""

    title: str
    x: Tensor  # (n,)
    curves: dict[str, Tensor]  # (n,) each
    across: str  # what the axes are
    up: str
    log: bool = False
    ticks: tuple[str, ...] = ()  # names of the points on the axis, where they have any


@dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns) of numbers."""

    title: str
    values: Tensor
    across: str
    up: str
    start: int = 0  # what the first column stands for


class Mixer(Part):
    """What moves information between the tokens of a row: self-attention, a convolution, a recurrence.

    It has a parallel form (`forward`) and a form for one more token (`step`) that computes the same with what `state`
    declares. `step` works in place on that storage, so that it can be captured in a CUDA graph.
    """

    kind = "mixer"
    attends: ClassVar[bool] = False  # compares queries with keys, so that position schemes can act on its scores
    has_heads: ClassVar[bool] = True  # reads model.n_heads
    ordered: ClassVar[bool] = True  # knows the order of its tokens without a position scheme
    window: int = 0  # of a mixer that attends: how many tokens back it sees; 0: all
    share_key: Hashable = ()  # blocks whose mixers are of one class and have equal values share what `prepare` returns

    def prepare(self, request: Request) -> Any:
        """Return what `forward`, `read` and the steps of a growing state want to have made once for all layers. It is called
        outside of compiled code."""
        return None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Mix the tokens of whole rows, (B, T, C) -> (B, T, C)."""
        raise NotImplementedError

    def state(self) -> dict[str, Storage]:
        """Declare what is kept between two steps (layers/decoding_state.py)."""
        return {}

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix one more token of each row with what was kept, (N, C) -> (N, C), and keep what later steps need.

        A mixer that keeps nothing mixes nothing between tokens: its step is its forward."""
        if kept is not None:
            raise NotImplementedError(f"{type(self).__name__} declares a state, but has no step")
        return self.forward(x[:, None], replace(ctx, positions=ctx.positions[:, None]))[:, 0]

    def read(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix the tokens of prompts (B, T, C), which may end in padding, and leave the state after each row's last token.

        The default takes one step after the other, for mixers that keep only states of fixed size (PerRow). A mixer with a
        parallel form that gives its state overrides it."""
        if kept is None:  # nothing is kept between tokens
            return self.forward(x, ctx)
        found = []
        for t in range(x.shape[1]):
            ctx_t = ctx.at(t)
            real = ctx_t.positions > PAD_POSITION
            before = {name: value.clone() for name, value in vars(kept).items()}
            found.append(self.step(x[:, t], ctx_t, kept))
            for name, value in before.items():
                new = getattr(kept, name)
                new.copy_(torch.where(real.view(-1, *[1] * (new.dim() - 1)), new, value))
        return torch.stack(found, 1)

    # A faster form of residual + step(norm(x)) for one row, where norm and residual may be None; None: there is none.
    fused_step: Callable[[Tensor, nn.Module | None, Tensor | None, Context, Any], Tensor] | None = None


class FeedForward(Part):
    """What changes each token by itself. One with `auxiliary` returns its result and a loss that training adds."""

    kind = "feedforward"
    auxiliary: ClassVar[bool] = False
    fused_step: Callable[[Tensor, nn.Module | None, Tensor | None, Context, Any], Tensor] | None = None

    def forward(self, x: Tensor, ctx: Context) -> Any:
        """Change every token by itself, (..., C) -> (..., C)."""
        raise NotImplementedError

    def read(self, x: Tensor, ctx: Context, kept: Any) -> Any:
        return self(x, ctx)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Any:
        return self(x, ctx)


FUSED_METHODS = ("forward", "step", "read", "attend", "split", "project")  # whose result a fused step computes


def fused_step_of(part: nn.Module) -> Callable[..., Tensor] | None:
    """Return a part's fused step if it computes what the part does, or None.

    It would not run the method of a subclass that overrides one without the fused step, nor a layer that is no plain
    nn.Linear."""
    for cls in type(part).__mro__:
        own = vars(cls)
        if "fused_step" in own:
            break
        if any(name in own for name in FUSED_METHODS):
            return None
    plain = all(type(child) in (nn.Linear, nn.Dropout) for child in part.children())
    return getattr(part, "fused_step", None) if plain else None


def find_failing_part(error: BaseException) -> str:
    """Return the name of the innermost part of a model that an error comes from."""
    trace, found = error.__traceback__, "the model"
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Part):
            found = f"'{getattr(owner, 'name', type(owner).__name__)}'"
        trace = trace.tb_next
    return found


def make_part(kind: str, name: str, config: ModelConfig, place: Place) -> Any:
    """Build the part that a configuration names, after asking it whether it makes sense there."""
    check_part(kind, name, config, place)
    cls = find(kind, name)
    return cls(settings_of(cls, config), config, place)


def check_part(kind: str, name: str, config: ModelConfig, place: Place) -> None:
    """Raise a RegardError where a part makes no sense, without building it."""
    cls = find(kind, name)
    cls.check(settings_of(cls, config), config, place)


def settings_of(cls: type[Part], config: ModelConfig) -> Any:
    """Return the settings of a part in a configuration: those of its table, or its defaults."""
    found = config.parts.get(cls.name)
    return cls.Settings() if found is None else found
