"""What Regard knows of a family of models elsewhere: its settings in our words, its classes, its tensors by rules.

Everything is declared once and read in both directions. Their configuration chooses among what is declared; it never names
code, and what it asks for that we do not have is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.config import ModelConfig
from regard.config.recipes import build, fields_of, format_value, nest
from regard.errors import RegardError
from regard.exchange.rules import Rule
from regard.models.architectures import ARCHITECTURES
from regard.models.model import Model

Their = Mapping[str, Any]  # a config.json

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "relu": "relu", "silu": "silu"}
ACTIVATIONS |= {"swish": "silu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_fast": "gelu-tanh"}  # other names of the same


# Sizes of ours that no preset may fill in for a model from elsewhere.
SIZES = (
    *("d_model", "n_encoder_layers", "n_decoder_layers", "n_heads", "d_head", "d_ff", "max_len"),
    *("vit.patch_size", "vit.image_channels"),
)


def whole(their: Their, *names: str, default: int | None = None) -> int:
    """A size under the first of these names that is there."""
    name = next((name for name in names if their.get(name) is not None), names[0])
    value = their.get(name)
    value = default if value is None else value
    if value is None:
        raise RegardError(f"config.json has no '{names[0]}', which says how large the model is")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RegardError(f"config.json has {name} {format_value(value)}, which must be a whole number of at least 1")
    return value


@dataclass(frozen=True)
class Setting:
    """One of theirs that is one of ours."""

    theirs: str
    ours: str
    default: Any = None  # where theirs says nothing
    values: Mapping[Any, Any] | None = None  # their words for ours
    older: str = ""  # another name of theirs

    def read(self, their: Their, family: str) -> Any:
        if self.ours in SIZES:
            return whole(their, self.theirs, *([self.older] if self.older else []), default=self.default)
        value = their.get(self.theirs)
        value = self.default if value is None else value
        if value is None:
            raise RegardError(f"config.json has no '{self.theirs}', which a {family} model needs")
        if self.values is None:
            return value
        if value not in self.values:
            known = ", ".join(map(str, self.values))
            raise RegardError(f"config.json asks for {self.theirs} {format_value(value)}: Regard has {known}")
        return self.values[value]

    def write(self, config: ModelConfig, before: Their, family: str) -> Any:
        """In their words; as it was before where that means the same."""
        value = config.value(self.ours)
        if before.get(self.theirs) is not None and self.read(before, family) == value:
            return before[self.theirs]
        return value if self.values is None else next(t for t, ours in self.values.items() if ours == value)

    def allows(self, config: ModelConfig) -> bool:
        return self.values is None or config.value(self.ours) in self.values.values()


@dataclass(frozen=True)
class Kind:
    """A class of theirs: which groups of tensors it must have, and what it answers."""

    groups: tuple[str, ...] = ("body",)
    answer: str = "none"
    bare: bool = False  # without a head, and so without the prefix of the body
    out: str = ""  # the class that it goes out as, where we keep less of it


def nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    name: str  # as people call it
    model_type: str  # as config.json does
    architecture: str  # ours
    task: str
    kinds: Mapping[str, Kind]
    settings: tuple[Setting, ...]
    style: Mapping[str, Any]  # settings of ours that are always so; those of parts are dotted, as in "rope.base"
    rules: Callable[[ModelConfig], Iterator[Rule]]
    demands: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # theirs -> what we can honour, the usual first
    prefix: str = ""  # of the body's tensors, which a class without a head leaves out
    copies: Callable[[ModelConfig], dict[str, str]] = nothing  # tensors of theirs that are others of theirs
    older: tuple[tuple[str, str], ...] = ()  # other names of theirs (regular expressions), and those of the rules
    ignored: tuple[tuple[str, str], ...] = ()  # names of theirs (regular expressions), and why we need them not
    constants: Callable[[ModelConfig], dict[str, Tensor]] = nothing  # tensors of theirs that follow from sizes
    read: Callable[[Their], dict[str, Any]] = nothing  # settings of ours that are not one of theirs
    write: Callable[[ModelConfig], dict[str, Any]] = nothing
    said: Mapping[str, Any] = field(default_factory=dict)  # settings of theirs that go with the names of the rules
    ties: tuple[str, ...] = ("none", "decoder", "inputs", "all")  # which embeddings may be one
    settle: Callable[[ModelConfig, dict[str, Tensor]], dict[str, Tensor]] = (
        nothing  # tensors of ours that say the same without what theirs lack
    )
    free: tuple[str, ...] = ()  # settings of ours that `read` and `write` see to
    wants: Callable[[ModelConfig], dict[str, Any]] = lambda config: square(config)  # values that follow from others

    @property
    def model(self) -> type[Model]:
        """The class of ours that its models become."""
        return ARCHITECTURES[self.architecture]

    def to_ours(self, their: Their, kind: Kind, **more: Any) -> ModelConfig:
        for name, allowed in self.demands.items():
            if their.get(name, allowed[0]) not in allowed:
                asked, said = format_value(their[name]), " or ".join(map(repr, allowed))
                raise RegardError(
                    f"config.json asks for {name} {asked}, which Regard's {self.name} does not have: only {said}"
                )
        ours = {s.ours: s.read(their, self.name) for s in self.settings}
        ours |= {"preset": next(iter(self.model.presets)), "architecture": self.architecture, "answer": kind.answer}
        return build(nest({**ours, **self.style, **self.read(their), **more}), ModelConfig, "model.")

    def to_theirs(self, config: ModelConfig, before: Their) -> dict[str, Any]:
        theirs: dict[str, Any] = {name: allowed[0] for name, allowed in self.demands.items() if allowed[0] is not None}
        theirs |= dict(before)
        theirs |= {s.theirs: s.write(config, before, self.name) for s in self.settings}
        more = self.write(config)
        if before and self.read(before) == self.read({**before, **more}):  # the same in other words
            more = {name: before.get(name, value) for name, value in more.items()}
        return {**theirs, **more, **self.said, "model_type": self.model_type}

    def differences(self, config: ModelConfig) -> list[str]:
        """What a model of ours has that this family has not."""
        if config.architecture != self.architecture:
            return [f"architecture is {config.architecture}, not {self.architecture}"]
        if config.answer not in {kind.answer for kind in self.kinds.values()}:
            return [f"answer is {config.answer}"]
        free = {*self.free, *(s.ours for s in self.settings)}
        theirs = {**NEUTRAL, **defaults(config), **self.wants(config), **self.style}
        different = [
            f"{name} is {config.value(name)!r}, not {value!r}"
            for name, value in theirs.items()
            if name not in free and config.value(name) != value
        ]
        if config.tie not in self.ties:
            different.append(f"tie is {config.tie!r}, not {' or '.join(map(repr, self.ties))}")
        return different + [f"{s.ours} is {config.value(s.ours)!r}" for s in self.settings if not s.allows(config)]


def square(config: ModelConfig) -> dict[str, Any]:
    """Heads that share the width of the model evenly, with keys of their own."""
    return {"d_head": config.d_model // config.n_heads, "n_kv_heads": config.n_heads}


# What no family has unless it says so; and the settings of the parts that a model has are their defaults.
NEUTRAL: dict[str, Any] = {
    "norm_eps": 1e-5, "norm_kind": "layer", "bias": True, "parallel": False, "scale_embeddings": False,
    "embedding_norm": False, "scale_logits": False, "head_bias": False,
    "encoder_positions": "", "cross_positions": "none", "mixer": ("attention",), "feedforward": "dense",
}  # fmt: skip


def defaults(config: ModelConfig) -> dict[str, Any]:
    """The settings of the tables that a configuration has, by dotted names, as they are where nobody sets them."""
    return {
        f"{table}.{name}": field.default
        for table, settings in config.parts.items()
        for name, field in fields_of(type(settings)).items()
    }


def rules_of(family: Family, config: ModelConfig) -> list[Rule]:
    """The rules of a model as it is here: under a head that answers, the rest is its body."""
    rules = list(family.rules(config))
    if config.answer == "none":
        return rules
    return [r if r.group == "answers" else dataclasses.replace(r, ours=f"body.{r.ours}") for r in rules]
