"""What a family of Hugging Face models declares: its settings, its model classes, and the rules of its tensors.

Each declaration is used in both directions, for import and for export. A config.json chooses among what is declared and
never names code; a value that Regard does not support is refused by name.
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
from regard.exchange.tensor_rules import Rule
from regard.models.architectures import ARCHITECTURES
from regard.models.model import Model

Their = Mapping[str, Any]  # the settings in a config.json of transformers

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "relu": "relu", "silu": "silu"}
ACTIVATIONS |= {"swish": "silu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_fast": "gelu-tanh"}  # synonyms


# Settings of ours that must be read from config.json: no preset may fill them in.
SIZES = (
    *("d_model", "n_encoder_layers", "n_decoder_layers", "n_heads", "d_head", "d_ff", "max_len"),
    *("vit.patch_size", "vit.image_channels"),
)


def read_size(their: Their, *names: str, default: int | None = None) -> int:
    """Return the size under the first of these names that config.json has, or `default`."""
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
    """A setting of theirs that corresponds to one of ours."""

    theirs: str
    ours: str
    default: Any = None  # where config.json lacks it
    values: Mapping[Any, Any] | None = None  # their value -> ours, where they differ
    old_name: str = ""  # the name in older versions of transformers

    def read(self, their: Their, family: str) -> Any:
        if self.ours in SIZES:
            return read_size(their, self.theirs, *([self.old_name] if self.old_name else []), default=self.default)
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
        """Return the value in their spelling; the spelling of `before` where that means the same."""
        value = config.value(self.ours)
        if before.get(self.theirs) is not None and self.read(before, family) == value:
            return before[self.theirs]
        return value if self.values is None else next(t for t, ours in self.values.items() if ours == value)

    def allows(self, config: ModelConfig) -> bool:
        return self.values is None or config.value(self.ours) in self.values.values()


@dataclass(frozen=True)
class ModelClass:
    """A model class of transformers: the groups of tensors that it must have, and its prediction head."""

    groups: tuple[str, ...] = ("body",)
    prediction_head: str = "none"
    headless: bool = False  # its tensors lack the prefix that a model with a head gives to its body
    exported_as: str = ""  # another class, where Regard does not keep all of its heads


def no_values(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models, such as BERT, by its `model_type`."""

    name: str  # for messages
    model_type: str  # in config.json
    architecture: str  # ours
    task: str
    classes: Mapping[str, ModelClass]
    settings: tuple[Setting, ...]
    fixed_settings: Mapping[str, Any]  # ours, the same in every model; those of parts are dotted, as in "rope.base"
    rules: Callable[[ModelConfig], Iterator[Rule]]
    # A setting of theirs -> the values that Regard can follow, the default first.
    supported_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prefix: str = ""  # of the body's tensors in classes with a head
    copies: Callable[[ModelConfig], dict[str, str]] = no_values  # tied tensors: name -> the one it equals
    # Of these, those that a file must have, since transformers would not tie but draw them.
    written_copies: Callable[[ModelConfig], dict[str, str]] = no_values
    old_names: tuple[tuple[str, str], ...] = ()  # regular expression of an older name -> the name in the rules
    ignored: tuple[tuple[str, str], ...] = ()  # regular expression of a name, and why Regard does not need it
    constants: Callable[[ModelConfig], dict[str, Tensor]] = no_values  # tensors of theirs that follow from sizes alone
    read_settings: Callable[[Their], dict[str, Any]] = no_values  # settings without a one-to-one mapping
    write_settings: Callable[[ModelConfig], dict[str, Any]] = no_values
    extra_settings: Mapping[str, Any] = field(default_factory=dict)  # written to every config.json
    allowed_ties: tuple[str, ...] = ("none", "decoder", "inputs", "all")  # which embeddings may be tied
    # Tensors of ours changed so that the model computes the same without the biases that theirs lack.
    absorb: Callable[[ModelConfig, dict[str, Tensor]], dict[str, Tensor]] = no_values
    custom_settings: tuple[str, ...] = ()  # settings of ours that `read_settings` and `write_settings` handle
    # What `custom_settings` have that no model of the family has, in words.
    find_differences: Callable[[ModelConfig], list[str]] = lambda config: []
    # Values that other settings determine.
    derived_settings: Callable[[ModelConfig], dict[str, Any]] = lambda config: split_evenly(config)

    @property
    def model(self) -> type[Model]:
        """The model class of ours that its models become."""
        return ARCHITECTURES[self.architecture]

    def to_ours(self, their: Their, model_class: ModelClass, **more: Any) -> ModelConfig:
        for name, allowed in self.supported_values.items():
            if their.get(name, allowed[0]) not in allowed:
                asked, said = format_value(their[name]), " or ".join(map(repr, allowed))
                raise RegardError(
                    f"config.json asks for {name} {asked}, which Regard's {self.name} does not have: only {said}"
                )
        ours = {s.ours: s.read(their, self.name) for s in self.settings}
        ours |= {
            "preset": next(iter(self.model.presets)),
            "architecture": self.architecture,
            "prediction_head": model_class.prediction_head,
        }
        return build(nest({**ours, **self.fixed_settings, **self.read_settings(their), **more}), ModelConfig, "model.")

    def to_theirs(self, config: ModelConfig, before: Their) -> dict[str, Any]:
        supported = self.supported_values.items()
        theirs: dict[str, Any] = {name: allowed[0] for name, allowed in supported if allowed[0] is not None}
        theirs |= dict(before)
        theirs |= {s.theirs: s.write(config, before, self.name) for s in self.settings}
        more = self.write_settings(config)
        if before and self.read_settings(before) == self.read_settings({**before, **more}):  # an equivalent spelling
            more = {name: before.get(name, value) for name, value in more.items()}
        return {**theirs, **more, **self.extra_settings, "model_type": self.model_type}

    def list_differences(self, config: ModelConfig) -> list[str]:
        """Return the settings of one of our models that this family does not have, in words."""
        if config.architecture != self.architecture:
            return [f"architecture is {config.architecture}, not {self.architecture}"]
        if config.prediction_head not in {model_class.prediction_head for model_class in self.classes.values()}:
            return [f"prediction_head is {config.prediction_head}"]
        variable = {*self.custom_settings, *(s.ours for s in self.settings)}
        theirs = {**USUAL_SETTINGS, **get_part_defaults(config), **self.derived_settings(config), **self.fixed_settings}
        different = [
            f"{name} is {config.value(name)!r}, not {value!r}"
            for name, value in theirs.items()
            if name not in variable and config.value(name) != value
        ]
        if config.tie not in self.allowed_ties:
            different.append(f"tie is {config.tie!r}, not {' or '.join(map(repr, self.allowed_ties))}")
        different += self.find_differences(config)
        return different + [f"{s.ours} is {config.value(s.ours)!r}" for s in self.settings if not s.allows(config)]


def split_evenly(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of heads that share the width of the model evenly, each with its own keys and values."""
    return {"d_head": config.d_model // config.n_heads, "n_kv_heads": config.n_heads}


# Values of our settings in every family that does not declare others. Settings of parts have their defaults.
USUAL_SETTINGS: dict[str, Any] = {
    "norm_eps": 1e-5, "norm_kind": "layer", "bias": True, "parallel": False, "scale_embeddings": False,
    "embedding_norm": False, "scale_logits": False, "head_bias": False,
    "encoder_positions": "", "cross_positions": "none", "mixer": ("attention",), "feedforward": ("dense",),
}  # fmt: skip


def get_part_defaults(config: ModelConfig) -> dict[str, Any]:
    """Return the default settings of the parts that a configuration has tables for, by dotted names."""
    return {
        f"{table}.{name}": field.default
        for table, settings in config.parts.items()
        for name, field in fields_of(type(settings)).items()
    }


def list_rules(family: Family, config: ModelConfig) -> list[Rule]:
    """Return the rules of a model, whose names begin with `body.` if it has a head for labels."""
    rules = list(family.rules(config))
    if config.prediction_head == "none":
        return rules
    return [r if r.group == "prediction_head" else dataclasses.replace(r, ours=f"body.{r.ours}") for r in rules]
