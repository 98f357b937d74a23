"""Position schemes by name, with the settings each of them reads."""

from __future__ import annotations

from collections.abc import Callable

from regard.config import LARGEST_TABLE, ModelConfig
from regard.errors import RegardError
from regard.layers.contextual import CoPE, Disentangled, Distances, Shaw
from regard.layers.positions import Learned, Linear, NoPositions, Positions, Sinusoidal
from regard.layers.relative import FIRE, ALiBi, KerpleLog, KerplePower, T5Bias
from regard.layers.rotary import Rotary, rope, yarn

# name -> a scheme for a place: encoder, decoder or cross
SCHEMES: dict[str, Callable[[ModelConfig, str], Positions]] = {
    "none": lambda c, place: NoPositions(),
    "linear": lambda c, place: Linear(c.d_model, c.max_len),
    "sinusoidal": lambda c, place: Sinusoidal(c.d_model, c.max_len, c.position_base),
    "learned": lambda c, place: Learned(c.d_model, c.max_len),
    "shaw": lambda c, place: Shaw(c.d_head, c.shaw_clip),
    "t5": lambda c, place: T5Bias(c.n_heads, c.t5_buckets, c.t5_max_distance, bidirectional=place != "decoder"),
    "rope": lambda c, place: rope(c.d_head, c.position_base, c.rope_scaling, c.rope_factor),
    "yarn": lambda c, place: yarn(c.d_head, c.position_base, c.rope_factor, c.trained_len, c.yarn_slow, c.yarn_fast),
    "alibi": lambda c, place: ALiBi(c.n_heads),
    "kerple-log": lambda c, place: KerpleLog(c.n_heads),
    "kerple-power": lambda c, place: KerplePower(c.n_heads),
    "fire": lambda c, place: FIRE(c.n_heads, c.fire_width, c.fire_threshold),
    "cope": lambda c, place: CoPE(c.d_head, c.cope_positions or c.max_len),
    "disentangled": lambda c, place: disentangled(c),
}

KINDS: dict[str, type[Positions]] = {
    "none": NoPositions,
    "linear": Linear,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "shaw": Shaw,
    "t5": T5Bias,
    "rope": Rotary,
    "yarn": Rotary,
    "alibi": ALiBi,
    "kerple-log": KerpleLog,
    "kerple-power": KerplePower,
    "fire": FIRE,
    "cope": CoPE,
    "disentangled": Disentangled,
}


def disentangled(c: ModelConfig) -> Disentangled:
    distances = Distances(c.d_model, c.disentangled_reach, c.disentangled_buckets, c.norm_eps)
    return Disentangled(distances, c.d_model, c.d_head, (c.n_heads, c.n_kv_heads), own=not c.disentangled_buckets)


def scheme_at(config: ModelConfig, place: str) -> str:
    """The name of the scheme that an encoder, a decoder or its cross-attention has."""
    names = {"encoder": config.encoder_positions or config.positions, "cross": config.cross_positions}
    return names.get(place, config.positions)


def make_positions(config: ModelConfig, place: str, name: str | None = None) -> Positions:
    """The scheme of one place in a model of resolved sizes, or the reason why it makes no sense there."""
    name = name or scheme_at(config, place)
    check_positions(config, place, name)
    return SCHEMES[name](config, place)


def check_positions(config: ModelConfig, place: str, name: str | None = None) -> None:
    """Refuse a scheme that makes no sense in a place, without making it."""
    name = name or scheme_at(config, place)
    if name not in SCHEMES:
        raise RegardError(f"unknown position scheme '{name}': choose one of {', '.join(SCHEMES)}")
    if name in ("rope", "yarn") and config.d_head % 2:
        raise RegardError(f"{name} turns pairs of numbers, but heads are {config.d_head} wide: choose an even width")
    if name == "rope" and config.rope_scaling == "ntk" and config.d_head < 4:
        raise RegardError("model.rope_scaling ntk keeps the first hand's pace: it needs heads at least 4 wide")
    if name == "rope" and config.rope_scaling == "none" and config.rope_factor != 1:
        raise RegardError(
            f"model.rope_factor {config.rope_factor:g} does nothing without model.rope_scaling: choose linear or ntk"
        )
    if name == "sinusoidal" and config.max_len * config.d_model > LARGEST_TABLE:
        raise RegardError(
            f"sinusoidal positions are a table of model.max_len {config.max_len:,} x model.d_model {config.d_model:,} "
            f"numbers, and at most {LARGEST_TABLE:,} are made: choose a smaller model.max_len, or rope"
        )
    if config.mixer == "convolution" and place != "cross":
        return check_below(name)
    if place in KINDS[name].refuses:
        raise RegardError(f"positions '{name}' make no sense in {PLACES[place]}: {KINDS[name].refuses[place]}")


def check_below(name: str) -> None:
    """Convolutions know the order of their tokens, and have no scores that a scheme could act on."""
    if name not in BELOW:
        raise RegardError(
            f"positions '{name}' act inside self-attention, which a model with model.mixer convolution does not have: "
            f"choose one of {', '.join(BELOW)}"
        )


BELOW = ("none", "linear", "sinusoidal", "learned")  # what is added to the embeddings, or nothing
PLACES = {"encoder": "an encoder", "decoder": "a decoder", "cross": "cross-attention"}
