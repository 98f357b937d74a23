"""Selection of the attention kernel: a pure function of the situation, which also gives the reason.

`regard doctor --explain` shows its choices for a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.kernels.attention_functions import SHORT_TILE
from regard.kernels.masks import Mask
from regard.layers.positions.scheme import PositionScheme

FEW_QUERIES = 128  # with fewer queries, a dense mask costs too little to avoid it


@dataclass(frozen=True)
class Situation:
    """Everything that the choice of a kernel depends on."""

    device: str  # cpu, cuda, or meta, where costs are counted
    queries: int  # T
    self_attention: bool  # queries and keys are the same tokens: training, encoders, prompts
    mask: Mask
    scheme: PositionScheme
    d_head: int = 64
    dropout: float = 0.0  # of the attention weights
    triton: bool = True  # Triton is installed, which `flex`, `short` and `toeplitz` need
    keys: int | None = None  # S; None: as many as queries
    needs_grad: bool = True  # gradients are computed


@dataclass(frozen=True)
class Choice:
    """A kernel and the reason for it."""

    kernel: str
    why: str
    fast: bool = True  # False: a faster kernel is conceivable; logged once


def choose(s: Situation) -> Choice:
    """Return the kernel of the first rule that fits."""
    scheme, biased = type(s.scheme).__name__, s.scheme.relative
    simple = not biased and not s.mask.packed and s.mask.back is None and (s.mask.triangle or s.mask.ahead is None)
    if s.device == "meta":
        return Choice("reference" if s.scheme.contextual else "sdpa", "tensors without numbers: plain products")
    if s.scheme.contextual:
        return Choice("reference", f"{scheme} looks at queries inside the softmax; no fused kernel can", fast=False)
    if simple and s.needs_grad and in_one_tile(s) and (s.self_attention or not s.mask.causal):
        return Choice("short", f"training on rows of at most {SHORT_TILE} tokens: one tile")
    if simple and s.mask.triangle and s.self_attention:
        return Choice("sdpa", "causal without a bias: the fused triangle")
    if simple:
        return Choice("sdpa", "no bias: fused, with a mask for padding")
    if s.device == "cpu":
        return Choice("sdpa", "on a CPU: fused, with a dense mask")
    if s.queries < FEW_QUERIES:
        few = f"fewer than {FEW_QUERIES} queries" if s.self_attention else "a few queries over a cache or a memory"
        return Choice("sdpa", f"{few}: fused, with a dense mask")
    if not s.self_attention:
        return Choice("sdpa", "a bias or window over other tokens: a dense mask, T x S in memory", fast=False)
    if s.dropout:
        return Choice("sdpa", "dropout on weights: fused, but with a dense mask, T x T in memory", fast=False)
    if not s.triton:
        return Choice("sdpa", "Triton is not installed: fused, but with a dense mask, T x T in memory", fast=False)
    if s.d_head < 16:
        return Choice("sdpa", f"heads only {s.d_head} wide: fused, but with a dense mask, T x T in memory", fast=False)
    if not biased:
        return Choice("flex", f"{s.mask}: blocks that nobody sees are skipped")
    if s.d_head not in (16, 32, 64, 128):
        if s.scheme.toeplitz:
            return Choice("flex", f"heads {s.d_head} wide: the bias is looked up score by score", fast=False)
        return Choice("sdpa", f"{scheme} with heads {s.d_head} wide: a dense bias, T x T in memory", fast=False)
    if s.scheme.toeplitz or (s.mask.causal and not s.mask.packed):
        return Choice("toeplitz", f"{scheme}: its bias is made inside the kernel")
    return Choice("sdpa", f"{scheme} where a query sees {s.mask}: a dense bias, T x T in memory", fast=False)


def in_one_tile(s: Situation) -> bool:
    """Return whether sizes and device allow the kernel `short`."""
    longest = max(s.queries, s.queries if s.keys is None else s.keys)
    return s.device == "cuda" and s.triton and longest <= SHORT_TILE and s.d_head in (16, 32, 64, 128)
