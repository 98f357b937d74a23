"""What every part of a model is: the base class that position schemes, token mixers, feed-forward layers, recurrent cells
and attention scores share, and the place in a model that a part is built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.registry import find


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
    tensor_parallel: ClassVar[
        dict[str, str]
    ] = {}  # parameter or child -> "column", "row" or "expert"; others are replicated
    no_decay: ClassVar[tuple[str, ...]] = ()  # own parameters that weight decay leaves alone

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        """Parts read what they need here and keep it as plain attributes: `forward` looks nothing up."""
        super().__init__()

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        """Raise a RegardError where the part makes no sense. It is called before anything is built."""

    def init_weights(self) -> None:
        """Fill the part's own parameters and buffers. The default leaves matrices, biases and gains to models/init.py."""

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return curves and matrices that show what the part does to n tokens; `regard look` draws them."""
        return ()


class Mixer(Part):
    """A sublayer `f(x, ctx) -> x` by which the tokens of a row act on each other."""

    kind = "mixer"
    has_scores: ClassVar[bool] = False  # compares queries with keys, so that position schemes can act on it
    ordered: ClassVar[bool] = True  # knows the order of its tokens by itself


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
    found = getattr(config, "parts", {}).get(cls.name)
    return cls.Settings() if found is None else found
