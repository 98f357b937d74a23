"""What every sublayer may need beside its input, made once per forward by the stack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.layers.attend import Plan
from regard.layers.cache import Cache
from regard.layers.positions import Rotation
from regard.layers.reach import Reach


@dataclass(frozen=True)
class Context:
    positions: Tensor  # (B, T), -1 = padding
    self_plan: Plan  # how the tokens look at each other
    cache: Cache  # keys and values of earlier steps
    rotation: Rotation | None = None  # how queries and keys are turned, if they are
    memory: Tensor | None = None  # (B', S, C), the encoder's final output; B' divides B
    memory_plan: Plan | None = None  # how the tokens look at the memory
    reach: Reach | None = None  # which tokens a convolution sees, if the block has one
