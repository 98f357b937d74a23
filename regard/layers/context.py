"""The context that a stack passes to every part beside its input, built once per forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION, Mask, document_starts
from regard.layers.part import FeedForward
from regard.layers.positions.scheme import PositionScheme

if TYPE_CHECKING:
    from regard.layers.attention_kernels import AttentionPlan


def apply_prefill(part: Any, x: Tensor, ctx: Context) -> Any:
    """Run a part on prompts (B, T, C) and fill its decoding state, from which its steps continue."""
    return (
        run_with_hooks(part, part.prefill, x, ctx)
        if has_hooks(part)
        else part.prefill(x, ctx, ctx.state.parts.get(part))
    )


def apply_step(part: Any, x: Tensor, ctx: Context) -> Any:
    """Run a part on one more token of each row, (N, C)."""
    return run_with_hooks(part, part.step, x, ctx) if has_hooks(part) else part.step(x, ctx, ctx.state.parts.get(part))


def has_hooks(part: nn.Module) -> bool:
    """Return whether a part has forward hooks, or an instance attribute `forward` that replaces its class's method."""
    own = part.__dict__
    return bool(own["_forward_pre_hooks"] or own["_forward_hooks"]) or "forward" in own


def run_with_hooks(part: Any, run: Callable[..., Any], x: Tensor, ctx: Context) -> Any:
    """Run `prefill` or `step` of a part together with its forward hooks, as calling the part would."""
    own, kept = part.__dict__, ctx.state.parts.get(part)
    if isinstance(part, FeedForward) and kept is None:
        return run(x, ctx, kept)  # its prefill() and step() call the module, which runs the hooks
    if "forward" in own:
        name = type(part).__name__
        raise RegardError(
            f"the forward() of {name} is replaced, but decoding runs its prefill() and step(): replace those too"
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
    """Everything that parts need beside their input x."""

    positions: Tensor  # (B, T), -1 = padding; in a step (N,)
    prepared: Any = None  # the result of the mixer's `prepare`, made once for all blocks that share it
    memory: Tensor | None = None  # (B', S, C), the encoder's final output; B / B' hypotheses of a sentence share a row
    memory_plan: AttentionPlan | None = None  # the plan of cross-attention
    apply: Callable[[nn.Module, Tensor, Context], Any] | None = None  # apply_prefill or apply_step; None: call the part
    state: Any = None  # the decoding state: a DecodingState or a StaticDecodingState
    fuse: bool = False  # there is one row, so parts may run their fused step

    @property
    def real(self) -> Tensor:
        """Return a mask of the tokens that are not padding, shaped like `positions`; in a step, of the active rows."""
        if self.apply is apply_step:
            return self.state.active(self.positions)
        return self.positions > PAD_POSITION

    def with_prepared(self, prepared: Any) -> Context:
        """Return a copy with another `prepared`. It is faster than `dataclasses.replace`, and runs in every step."""
        return Context(self.positions, prepared, self.memory, self.memory_plan, self.apply, self.state, self.fuse)

    def at(self, t: int) -> Context:
        """Return the context of a decoding step that reads the tokens of column t."""
        return replace(self, positions=self.positions[:, t], apply=apply_step)


@dataclass(frozen=True)
class PrepareRequest:
    """The argument of `Mixer.prepare`, which runs before a forward pass and outside of compiled code."""

    positions: Tensor  # (B, T), positions of the queries
    keys: Tensor  # (B, S), positions of the keys; the same object as `positions` in self-attention without a cache
    mask: Mask
    scheme: PositionScheme
    past: Tensor | None  # (B, T, S), True for keys of the query's own hypothesis (layers/decoding_state.py)
    training: bool
    sees_all: bool = False  # a step in which every query may attend to every key
    continues: bool = False  # a decoding state holds tokens before these

    def causal_starts(self, name: str) -> Tensor:
        """Return the column at which each token's document begins, int32 (B, T), for a mixer that reads forwards only.

        Refuse masks that are not causal, such as that of a prefix; `name` is the mixer's."""
        if not self.mask.causal:
            raise RegardError(f"{name} sees no prefix: read the text causally, or with a model of attention")
        return document_starts(self.positions)
