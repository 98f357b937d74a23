"""Registry of the filters: names, parameters, units and defaults, for the command line and the study of filters.

A filter's module is imported only when the filter is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from regard.errors import RegardError


@dataclass(frozen=True)
class Parameter:
    """A parameter of a filter."""

    name: str
    kind: type
    help: str  # with its unit
    default: Any = None
    needed: bool = False  # the function has no default for it
    noises: float | None = None  # default: this many standard deviations of the noise
    colours: bool = False  # times sqrt(C): it is compared with distances of colours, and noise is in all C channels


@dataclass(frozen=True)
class Filter:
    """A filter and its parameters."""

    name: str
    place: str  # module:function
    line: str  # of help
    parameters: tuple[Parameter, ...]
    denoises: bool = True  # the result can be compared with the input, pixel by pixel
    strength: tuple[str, ...] = ()  # parameters that follow from the noise; if one is given, it need not be estimated

    @property
    def function(self) -> Callable[..., Any]:
        """The function of the filter, imported now."""
        module, name = self.place.split(":")
        return getattr(import_module(f"regard.filters.{module}"), name)

    def needs_noise(self, given: dict[str, Any]) -> bool:
        """Return whether the noise must be known or estimated, since none of the parameters that follow from it is given."""
        return bool(self.strength) and all(given.get(name) is None for name in self.strength)

    def settings(self, given: dict[str, Any], noise: float | None, channels: int = 1) -> dict[str, Any]:
        """Return the arguments of the function: those given, and defaults that depend on the noise, if that is known."""
        values = {name: value for name, value in given.items() if value is not None}
        for parameter in self.parameters:
            if parameter.name in values:
                continue
            if noise is not None and parameter.noises is not None:
                values[parameter.name] = parameter.noises * noise * (math.sqrt(channels) if parameter.colours else 1)
            elif parameter.needed:
                raise RegardError(f"the {self.name} filter needs {option(parameter.name)}: {parameter.help}")
        return values


def option(name: str) -> str:
    """Return the command-line option of a parameter."""
    return f"--{name.replace('_', '-')}"


UNITS = "in the picture's units"  # out of 255 for 8 bits, out of 65535 for 16
BORDER = "Padding at the border: reflect, symmetric, edge, wrap or constant, as in numpy.pad."

ALL = (
    Filter(
        "gaussian",
        "gaussian:gaussian",
        "A mean of nearby pixels, weighted by distance.",
        (
            Parameter("sigma", float, "Width of the Gaussian, in pixels.", 1.0),
            Parameter("truncate", float, "Where its weights end, in sigmas.", 4.0),
            Parameter("border", str, BORDER, "symmetric"),
        ),
    ),
    Filter(
        "heat",
        "diffusion:heat",
        "The heat equation: the Gaussian of sigma = sqrt(2 time).",
        (
            Parameter("time", float, "How long heat flows, in square pixels: sigma^2 / 2.", 0.5),
            Parameter("steps", int, "Explicit steps, of a time of 1/4 at most; without, it is solved exactly."),
        ),
    ),
    Filter(
        "perona-malik",
        "diffusion:perona_malik",
        "Diffusion that stops at edges.",
        (
            Parameter("kappa", float, f"Difference of neighbours that stops flow, {UNITS}.", needed=True, noises=1.0),
            Parameter("steps", int, "Number of steps.", 8),
            Parameter("rate", float, "Time of a step, in square pixels: 1/4 at most.", 0.2),
            Parameter("conductance", str, "exponential (prefers sharp edges) or rational (large regions).", "rational"),
        ),
        strength=("kappa",),
    ),
    Filter(
        "bilateral",
        "bilateral:bilateral",
        "A mean of nearby pixels of similar value.",
        (
            Parameter(
                "sigma_color",
                float,
                f"Width over differences of value, {UNITS}.",
                needed=True,
                noises=2.5,
                colours=True,
            ),
            Parameter("sigma_spatial", float, "Width over distances, in pixels.", 1.0),
            Parameter("window", int, "Side of the window, odd, in pixels; by default three sigma_spatial each way."),
            Parameter("border", str, BORDER, "reflect"),
        ),
        strength=("sigma_color",),
    ),
    Filter(
        "nlm",
        "nonlocal_means:nonlocal_means",
        "Non-local means: a mean of pixels with similar surroundings.",
        (
            Parameter("h", float, f"Difference of patches that makes weights fall, {UNITS}; given sigma alone, by it."),
            Parameter("patch", int, "Side of a patch, odd, in pixels; given sigma alone by it, else 7."),
            Parameter("reach", int, "How far away patches are looked at, in pixels; given sigma alone 6, else 11."),
            Parameter("sigma", float, f"Standard deviation of the noise, {UNITS}.", 0.0, noises=1.0),
            Parameter(
                "mode", str, "pixel, or patch: a pixel is the mean of all patches it is in. Given sigma alone patch."
            ),
            Parameter("patch_weights", str, "flat, or gaussian: a patch's middle counts most.", "flat"),
        ),
        strength=("h", "sigma"),
    ),
    Filter(
        "tv",
        "total_variation:total_variation",
        "Total variation: the nearest picture with small differences of neighbours.",
        (
            Parameter("weight", float, f"The bigger, the smoother, {UNITS}.", needed=True, noises=0.7),
            Parameter("tolerance", float, "Promised distance from the exact solution, in weights.", 0.05),
            Parameter("max_steps", int, "Maximum number of steps.", 500),
        ),
        strength=("weight",),
    ),
    Filter(
        "texture",
        "texture:synthesise",
        "Efros and Leung: a larger picture that looks like a sample of it.",
        (
            Parameter("height", int, "Height of the result, in pixels; by default twice the sample's."),
            Parameter("width", int, "Width of the result, in pixels; by default twice the sample's."),
            Parameter("window", int, "Side of the surroundings that are compared, odd, in pixels.", 11),
            Parameter("epsilon", float, "How much worse than the best a match may be, as a share of it.", 0.1),
            Parameter("seed", int, "Random seed.", 0),
        ),
        denoises=False,
    ),
)
FILTERS = {one.name: one for one in ALL}
