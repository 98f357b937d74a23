"""Rotary position embeddings (RoPE): pairs of numbers of queries and keys are rotated by angles that grow with position.

Pair (2m, 2m+1) at position p is rotated by the angle p * theta_m, theta_m = base^(-2m/D).
The product of a query rotated by i and a key rotated by j depends on i - j alone. Beyond its trained length a model meets
angles that it has never seen; scalings map a context s times as long to the angles of the trained length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.kernels.attention_functions import Rotation
from regard.layers.part import Curves, Matrix, Place
from regard.layers.positions.scheme import PositionScheme


class Rotary(PositionScheme):
    """Base class of rotary schemes, which rotate pairs of components of queries and keys by an angle linear in the position.

    `inv_freq` is theta (D/2,). `temperature` multiplies cosines and sines, and so the scores by its square.
    """

    inv_freq: Tensor
    temperature = 1.0

    why_not_cross = (
        "rotary positions compare a place in the target with a place in the source, whose difference means nothing"
    )

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.settings, self.d_head = settings, config.d_head
        self.register_buffer("inv_freq", torch.empty(config.d_head // 2), persistent=False)
        self.init_weights()

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if config.d_head % 2:
            raise RegardError(
                f"{cls.name} turns pairs of numbers, but heads are {config.d_head} wide: choose an even width"
            )

    def compute_inv_freq(self) -> Tensor:
        """Return theta, the angle per position of each pair, (D/2,) fp64."""
        return rope_frequencies(self.d_head, self.settings.base)

    def init_weights(self) -> None:
        self.inv_freq.copy_(self.compute_inv_freq())

    def rotation(self, positions: Tensor) -> Rotation:
        angle = positions[:, None, :, None] * self.inv_freq  # (B, 1, T, D/2) fp32
        return angle.cos() * self.temperature, angle.sin() * self.temperature

    def label(self) -> str:
        """Return the label of the scheme in figures that compare it with plain rope."""
        return self.name

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return the wavelength of each pair and q . k of equal vectors, with those of plain rope where they differ."""
        plain, p = rope_frequencies(self.d_head, self.settings.base).to(self.inv_freq), torch.arange(n)
        thetas, rotations = {self.name: self.inv_freq}, {self.name: self.rotation(p[None])}
        if not torch.equal(plain, self.inv_freq):
            angle = (p[:, None] * plain)[None, None]
            thetas = {self.label(): self.inv_freq, "plain rope": plain}
            rotations = {self.label(): rotations[self.name], "plain rope": (angle.cos(), angle.sin())}
        waves = {name: 2 * math.pi / theta for name, theta in thetas.items()}
        m = torch.arange(len(plain))
        wavelengths = Curves("wavelength of each pair", m, waves, "pair m", "tokens per full rotation", log=True)
        return wavelengths, self.describe_rotation({**rotations})


def rope_frequencies(d_head: int, base: float) -> Tensor:
    """Return the inverse frequencies (inv_freq) theta_m = base^(-2m/D) for m = 0 .. D/2-1, fp64."""
    return base ** -(torch.arange(0, d_head, 2, dtype=torch.float64, device="cpu") / d_head)


@register("rope")
class RoPE(Rotary):
    """RoPE, pairs of queries and keys rotated by p base^(-2m/D), and its two simplest scalings (Su et al. 2021).

    `linear` is position interpolation, p / s. `ntk` enlarges the base, so that the lowest frequency is divided by s and the
    highest stays.
    """

    @dataclass(frozen=True)
    class Settings:
        base: float = setting(10000.0, "base of the wavelengths", above=1)
        scaling: str = setting(
            "none", "beyond the trained length: none, linear or ntk", choices=("none", "linear", "ntk")
        )
        factor: float = setting(1.0, "how many times the trained length the scaling is for", least=1)

    formula = r"pairs of $q$ and $k$ rotated by $p\,\theta_m,\quad \theta_m = N^{-2m/D}$"

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().check(settings, config, place)
        if settings.scaling == "ntk" and config.d_head < 4:
            raise RegardError("model.rope.scaling ntk keeps the first frequency: it needs heads at least 4 wide")
        if settings.scaling == "none" and settings.factor != 1:
            raise RegardError(
                f"model.rope.factor {settings.factor:g} does nothing without model.rope.scaling: choose linear or ntk"
            )

    def compute_inv_freq(self) -> Tensor:
        base, scaling, factor = self.settings.base, self.settings.scaling, self.settings.factor
        if scaling == "ntk":
            return rope_frequencies(self.d_head, base * factor ** (self.d_head / (self.d_head - 2)))
        return rope_frequencies(self.d_head, base) / (factor if scaling == "linear" else 1.0)

    def label(self) -> str:
        return f"rope, {self.settings.scaling} scaling, s = {self.settings.factor:g}"


@register("yarn")
class YaRN(Rotary):
    """YaRN: rope for s times the trained length, which interpolates low frequencies alone (Peng et al. 2023).

    Frequencies with more than `fast` rotations in the trained length stay (beta_fast), those with less than `slow` are
    divided by s (beta_slow), with a linear ramp between; and scores are multiplied by a factor that sharpens the softmax.
    """

    @dataclass(frozen=True)
    class Settings:
        base: float = setting(10000.0, "base of the wavelengths", above=1)
        factor: float = setting(1.0, "how many times the trained length the model is for", least=1)
        trained_len: int = setting(1024, "the length the model was trained on", least=1, most=1 << 24)
        slow: float = setting(
            1.0, "frequencies with fewer rotations in trained_len are interpolated (beta_slow)", above=0
        )
        fast: float = setting(32.0, "frequencies with more rotations in trained_len are kept (beta_fast)", above=0)

    formula = r"$\theta'_m = (1 - g_m)\,\theta_m / s + g_m\,\theta_m,\quad$ scores $\times\,(0.1 \ln s + 1)^2$"

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.temperature = 0.1 * math.log(settings.factor) + 1

    def compute_inv_freq(self) -> Tensor:
        s, d_head = self.settings, self.d_head

        def find_pair(rotations: float) -> float:
            """Return the fractional index m of the pair with this many rotations in the trained length."""
            return d_head * math.log(s.trained_len / (rotations * 2 * math.pi)) / (2 * math.log(s.base))

        low, high = max(math.floor(find_pair(s.fast)), 0), min(math.ceil(find_pair(s.slow)), d_head - 1)
        m = torch.arange(d_head // 2, dtype=torch.float64, device="cpu")
        interpolated = ((m - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: kept, 1: divided by s
        theta = rope_frequencies(d_head, s.base)
        return theta / s.factor * interpolated + theta * (1 - interpolated)

    def label(self) -> str:
        return f"yarn, s = {self.settings.factor:g}"

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        waves, products = super().describe(n)
        assert isinstance(waves, Curves)
        if len(waves.curves) > 1:
            waves.curves["trained length"] = torch.full((len(waves.x),), float(self.settings.trained_len))
        return waves, products
