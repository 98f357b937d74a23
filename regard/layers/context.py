"""What every part may need beside its input, made once a forward by the stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION, Mask
from regard.layers.part import FeedForward
from regard.layers.positions.scheme import Positions

if TYPE_CHECKING:
    from regard.layers.attention_kernels import Plan


def apply_read(part: Any, x: Tensor, ctx: Context) -> Any:
    """Run a part on prompts (B, T, C), leaving behind the state that its steps continue from."""
    return run_with_hooks(part, part.read, x, ctx) if has_hooks(part) else part.read(x, ctx, ctx.state.parts.get(part))


def apply_step(part: Any, x: Tensor, ctx: Context) -> Any:
    """Run a part on one more token of each row (N, C)."""
    return run_with_hooks(part, part.step, x, ctx) if has_hooks(part) else part.step(x, ctx, ctx.state.parts.get(part))


def has_hooks(part: nn.Module) -> bool:
    """Return whether a part has forward hooks, or a `forward` of its own that replaces that of its class."""
    own = part.__dict__
    return bool(own["_forward_pre_hooks"] or own["_forward_hooks"]) or "forward" in own


def run_with_hooks(part: Any, run: Callable[..., Any], x: Tensor, ctx: Context) -> Any:
    """Run `read` or `step` of a part with the forward hooks that it has, as calling the part would."""
    own, kept = part.__dict__, ctx.state.parts.get(part)
    if isinstance(part, FeedForward):
        return run(x, ctx, kept)  # it calls itself, with all of its hooks
    if "forward" in own:
        name = type(part).__name__
        raise RegardError(
            f"the forward() of {name} is replaced, but decoding runs its read() and step(): replace those too"
        )
    for hook in own["_forward_pre_hooks"].values():
        given = hook(part, (x, ctx))
        x = x if given is None else given[0] if isinstance(given, tuple) else given
    result = run(x, ctx, kept)
    for hook in own["_forward_hooks"].values():
        found = hook(part, (x, ctx), result)
        result = result if found is None else found
    return result


@dataclass(frozen=True)
class Context:
    positions: Tensor  # (B, T), -1 = padding; in a step (N,)
    prepared: Any = None  # what the block's mixer has prepared, once for all blocks that share it
    memory: Tensor | None = None  # (B', S, C), the encoder's final output; B' divides B
    memory_plan: Plan | None = None  # how the tokens look at the memory
    apply: Callable[[nn.Module, Tensor, Context], Any] | None = None  # apply_read or apply_step; None: parts are called
    state: Any = None  # what decoding keeps: a State, or a StaticState
    fuse: bool = False  # one row, whose parts may run their fused step

    @property
    def real(self) -> Tensor:
        """Return which tokens are no padding, with the shape of `positions`; in a step, which rows are being decoded."""
        if self.apply is apply_step:
            return self.state.active(self.positions)
        return self.positions > PAD_POSITION

    def with_prepared(self, prepared: Any) -> Context:
        """Return the context with what a mixer has prepared; `replace` would take longer, at every step."""
        return Context(self.positions, prepared, self.memory, self.memory_plan, self.apply, self.state, self.fuse)

    def at(self, t: int) -> Context:
        """Return the context of a step over the tokens in column t."""
        return replace(self, positions=self.positions[:, t], apply=apply_step)


@dataclass(frozen=True)
class Request:
    """What a mixer is asked to prepare for, before a forward and outside of compiled code."""

    positions: Tensor  # (B, T) of the queries
    keys: Tensor  # (B, S) of all tokens that they may look at; the same object where these are the queries' own
    mask: Mask
    scheme: Positions
    past: Tensor | None  # (B, T, S) which keys are a query's own past, where queries are hypotheses
    training: bool
    sees_all: bool = False  # a step whose rows may look at every key
