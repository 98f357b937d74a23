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
from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION

if TYPE_CHECKING:
    from regard.layers.context import Context, PrepareRequest
    from regard.layers.decoding_state import Storage


@dataclass(frozen=True)
class Place:
    """The place in a model that a part is built for."""

    side: str  # encoder, decoder, or cross for what lies between them
    index: int = 0  # counts parts of the same name on this side, from 0
    causal: bool = False  # tokens see only themselves and earlier ones
    depth: int = 0  # counts the blocks of this side, from 0


@dataclass(frozen=True)
class NoSettings:
    """The settings of a part that has none."""


class Part(nn.Module):
    """Base class of all parts. A part is registered by `@register("name")` and declares everything about itself here.

    The first sentence of a part's docstring is its help text.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    Settings: ClassVar[type] = NoSettings  # a frozen dataclass whose fields are made with `registry.setting`
    tensor_parallel: ClassVar[dict[str, str]] = {}  # child or parameter -> "column" or "row"; else replicated
    no_decay: ClassVar[tuple[str, ...]] = ()  # own parameters without weight decay
    full_precision: ClassVar[
        tuple[str, ...]
    ] = ()  # own parameters that stay fp32 where weights are in bf16, fp16 or int8
    random: bool = False  # draws random numbers in training by something other than nn.Dropout
    observed: ClassVar[dict[str, str]] = {}  # name -> child whose input `look.record` stores under this name

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        """Store what `forward` needs as plain attributes, so that it reads no configuration."""
        super().__init__()

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        """Raise a RegardError where the part makes no sense. It runs before anything is built, after `check_kind`."""

    @classmethod
    def check_kind(cls, config: ModelConfig, place: Place) -> None:
        """Raise a RegardError where no part of this kind and with these declarations makes sense."""

    @classmethod
    def check_declaration(cls, name: str) -> None:
        """Raise a RegardError where the class lacks what parts of its kind need; it runs when the part is registered."""

    def init_weights(self) -> None:
        """Fill the part's own parameters and buffers.

        The default leaves matrices, biases and norm scales to models/initialization.py."""

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        """Return how the fused weights of child layers are divided, for Muon, which treats each matrix separately.

        A fused weight holds the rows of several matrices, interleaved in blocks (kernels/weight_layout.py). The result
        maps the child's name to the number of blocks and the number of rows of each matrix in a block. The name may also
        be that of an own parameter (E, R, C), a stack of E such weights."""
        return {}

    def cut_sizes(self) -> dict[str, int]:
        """Return the numbers that tensor parallelism divides, by the names of what they count."""
        return {}

    def cut(self, size: int) -> None:
        """Adapt to matrices that were cut over `size` processes, as `tensor_parallel` declares."""

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return curves and matrices that show the effect of the part on n tokens; `regard look` draws them."""
        return ()


def full_precision_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose parts declare that they stay in fp32."""
    return {
        part.get_parameter(name) for part in model.modules() if isinstance(part, Part) for name in part.full_precision
    }


@dataclass(frozen=True)
class Curves:
    """Named curves over one axis."""

    title: str
    x: Tensor  # (n,)
    curves: dict[str, Tensor]  # (n,) each
    across: str  # label of the x axis
    up: str  # label of the y axis
    log: bool = False
    ticks: tuple[str, ...] = ()  # labels of the points on the x axis, if any


@dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns) of numbers."""

    title: str
    values: Tensor
    across: str  # label of the columns
    up: str  # label of the rows
    start: int = 0  # the value of the first column on its axis


HEAD_SETTINGS = ("n_heads", "n_kv_heads", "d_head", "attention_dropout")


class Mixer(Part):
    """A token mixer, which moves information between the tokens of a row: self-attention, a convolution, a recurrence.

    An attention variant is a token mixer of its own, a position scheme, or both. A mixer has a parallel form
    (`forward`) and a one-token form (`step`), which computes the same from the storage declared by `state`. `step`
    changes that storage in place, so that it can be captured in a CUDA graph.
    """

    kind = "mixer"
    attends: ClassVar[bool] = False  # compares queries with keys, so that position schemes can act on its scores
    reads: ClassVar[tuple[str, ...]] = HEAD_SETTINGS  # those that it reads; what no mixer of a model reads is refused
    ordered: ClassVar[bool] = True  # knows the order of its tokens without a position scheme
    reads_pieces: bool = False  # its `prefill` continues an earlier piece of a text, all tokens of the next one at once
    window: int = 0  # width of sliding-window attention, in tokens; 0: unlimited
    share_key: Hashable = ()  # mixers of one class with equal keys share the result of `prepare`

    @classmethod
    def check_declaration(cls, name: str) -> None:
        if cls.state is Mixer.state:
            raise RegardError(
                f"the mixer '{name}' has no method state(), which declares what a decoding step needs of earlier tokens: "
                f"return {{}} there if that is nothing"
            )

    @classmethod
    def activation_bytes(cls, settings: Any, config: ModelConfig) -> int:
        """Return the bytes that the backward pass in bf16 needs of a token: the inputs of products and of kernels, the
        mixer's own input among them. Elementwise functions are computed again.

        `cost` predicts the memory of training from it. The default is right for a mixer of one product."""
        return 2 * config.d_model

    def prepare(self, request: PrepareRequest) -> Any:
        """Return what `forward`, `prefill` and `step` find in `ctx.prepared`: masks, tables and the like.

        It runs once for all layers with an equal `share_key`, outside of compiled code. Steps over a StaticDecodingState
        do not call it."""
        return None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Mix the tokens of whole rows, (B, T, C) -> (B, T, C)."""
        raise NotImplementedError

    def state(self) -> dict[str, Storage]:
        """Declare the storage that is kept between two steps (layers/decoding_state.py)."""
        return {}

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix one more token of each row with earlier ones, (N, C) -> (N, C), and update the storage `kept` in place.

        Without storage a mixer cannot mix tokens, so the default is `forward` on rows of one token."""
        if kept is not None:
            raise NotImplementedError(f"{type(self).__name__} declares a state, but has no step")
        return self.forward(x[:, None], replace(ctx, positions=ctx.positions[:, None]))[:, 0]

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix the tokens of prompts (B, T, C), which may end in padding, and store the state after each row's last token.

        The default steps through the columns, which serves mixers with states of fixed size (PerRow). A mixer that can
        compute its state in parallel overrides it."""
        if kept is None:  # no storage
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

    # An optional fused kernel for residual + step(norm(x)) on one row; its norm and residual may be None.
    fused_step: Callable[[Tensor, nn.Module | None, Tensor | None, Context, Any], Tensor] | None = None


class FeedForward(Part):
    """A feed-forward layer, which transforms each token by itself; with `auxiliary` it returns (y, loss).

    One that also sees the token before declares what a step needs of it in `state`, and has a `prefill` and `step` of its
    own, as mixers have."""

    kind = "feedforward"
    auxiliary: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("activation",)  # shared settings that some layers do not read
    gated: ClassVar[bool] = False  # its first matrix has gates and values (kernels/weight_layout.py)
    reads_pieces: bool = True  # a text that is read in pieces gives what it gives at once
    fused_step: Callable[[Tensor, nn.Module | None, Tensor | None, Context, Any], Tensor] | None = None

    @classmethod
    def experts_per_token(cls, settings: Any) -> int:
        """Return how many experts of the layer a token uses; 0: there is one layer for all tokens."""
        return 0

    @classmethod
    def activation_bytes(cls, settings: Any, config: ModelConfig) -> int:
        """Return the bytes that the backward pass in bf16 needs of a token inside of the layer; `cost` counts its input.

        Of a mixture of experts, every chosen expert has an input, numbers inside and an output of its own, and the router
        reads the token in fp32."""
        # The derivative of relu is known from its output, so its input need not be kept.
        kept = 3 if cls.gated else 1 if config.activation == "relu" else 2
        inside = 2 * kept * config.d_ff + (3 * config.d_ff if config.ff_dropout else 0)
        experts = cls.experts_per_token(settings)
        return experts * (inside + 4 * config.d_model) + 4 * config.d_model if experts else inside

    def forward(self, x: Tensor, ctx: Context) -> Any:
        """Transform every token by itself, (..., C) -> (..., C)."""
        raise NotImplementedError

    def state(self) -> dict[str, Storage]:
        """Declare the storage that is kept between two steps (layers/decoding_state.py); most layers need none."""
        return {}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Any:
        """Transform every token of prompts, (B, T, C) -> (B, T, C)."""
        return self(x, ctx)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Any:
        """Transform one more token of each row, (N, C) -> (N, C)."""
        return self(x, ctx)


# Methods that a fused step replaces.
FUSED_METHODS = ("forward", "prefill", "step", "attend_with_cache", "attend", "split", "project")


def fused_step_of(part: nn.Module) -> Callable[..., Tensor] | None:
    """Return the fused step of a part, or None if it has none or if it would compute something else than `step`.

    A fused step would ignore a method that a subclass overrides without it, and child layers that are not plain
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
    """Return the name of the innermost part in the traceback of an error."""
    trace, found = error.__traceback__, "the model"
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Part):
            found = f"'{getattr(owner, 'name', type(owner).__name__)}'"
        trace = trace.tb_next
    return found


def make_part(kind: str, name: str, config: ModelConfig, place: Place) -> Any:
    """Return the named part, built for this place after its `check`."""
    check_part(kind, name, config, place)
    cls = find(kind, name)
    part = cls(settings_of(cls, config), config, place)
    if cls.init_weights is Part.init_weights:
        for vector in (n for n, p in part.named_parameters(recurse=False) if p.dim() < 2 and n != "bias"):
            raise RegardError(
                f"the part '{name}' has the vector '{vector}', but no init_weights() to fill it: write one"
            )
    return part


def check_part(kind: str, name: str, config: ModelConfig, place: Place) -> None:
    """Raise a RegardError if the named part makes no sense in this place, without building it."""
    cls = find(kind, name)
    cls.check_kind(config, place)
    cls.check(settings_of(cls, config), config, place)


def settings_of(cls: type[Part], config: ModelConfig) -> Any:
    """Return the settings of a part: those of its table in the configuration, or its defaults."""
    found = config.parts.get(cls.name)
    return cls.Settings() if found is None else found
