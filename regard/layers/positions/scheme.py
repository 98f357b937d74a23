"""Position schemes (positional encodings), which give attention the order of tokens: by itself it is
permutation-equivariant.

A scheme overrides one of these hooks, each of which does nothing by default:

- `embed(x, positions)` adds vectors to the embeddings, once, before the first block (absolute.py);
- `rotation(positions)` rotates queries and keys (rotary.py);
- `bias(q, k)` is added to the scores (relative.py);
- `scores(...)` and `values(...)` use queries, keys and weights themselves (contextual.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.config.registry import PARTS, find, register
from regard.errors import RegardError
from regard.kernels.attention_functions import Rotation
from regard.layers.part import Curves, Matrix, Mixer, Part, Place, check_part, make_part

if TYPE_CHECKING:
    from regard.layers.block import Block

SIDES = {"encoder": "an encoder", "decoder": "a decoder", "cross": "cross-attention"}
DISTANCE = "distance j - i of the key from the query"


class PositionScheme(Part):
    """Base class of position schemes (positional encodings); a subclass overrides one of the hooks.

    Without positions a model sees a bag of tokens, except that a causal mask still carries information about order.
    """

    kind = "positions"
    formula: ClassVar[str] = ""  # LaTeX; i is the position of the query, j of the key; heads h count from 0
    per_layer: ClassVar[bool] = False  # each layer has its own instance
    relative: ClassVar[bool] = False  # overrides `bias`
    toeplitz: ClassVar[bool] = False  # `bias` depends on k - q alone
    contextual: ClassVar[bool] = False  # overrides `scores` and `values`
    terms: ClassVar[int] = 1  # dot products that are summed into one score
    why_not_cross: ClassVar[str] = "only a scheme that adds to scores can act between source and target"
    scale: float | None = None  # factor of q k^T; None: 1/sqrt(D)

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.d_model, self.causal = config.d_model, place.causal

    @classmethod
    def check_declaration(cls, name: str) -> None:
        hooks = {
            hook: getattr(cls, hook) is not getattr(PositionScheme, hook) for hook in ("embed", "rotation", "bias")
        }
        if hooks["bias"] and not cls.relative:
            raise RegardError(
                f"the position scheme '{name}' has bias(), which is used only with relative = True: say so"
            )
        if not any(hooks.values()) and not (cls.contextual or cls.relative) and name != "none":
            raise RegardError(f"the position scheme '{name}' does nothing: write embed, rotation, bias or scores")
        if taken := [own for own in ("hook", "table", "acts_in_attention") if not callable(getattr(cls, own))]:
            raise RegardError(f"the position scheme '{name}' has a '{taken[0]}', which is a method of its base class")

    @classmethod
    def check_kind(cls, config: ModelConfig, place: Place) -> None:
        if place.side == "cross" and cls.hook() in ("embed", "rotation"):
            cls.refuse(place, cls.why_not_cross)
        mixers = mixers_of(config)
        if place.side != "cross" and cls.acts_in_attention() and not any(mixer.attends for mixer in mixers):
            others = [name for name, scheme in PARTS["positions"].items() if not scheme.acts_in_attention()]
            raise RegardError(
                f"positions '{cls.name}' act inside self-attention, which a model with model.mixer "
                f"{', '.join(config.mixer)} does not have: choose one of {', '.join(others)}"
            )

    @classmethod
    def refuse(cls, place: Place, why: str) -> NoReturn:
        """Raise the error that the scheme makes no sense in this place."""
        raise RegardError(f"positions '{cls.name}' make no sense in {SIDES[place.side]}: {why}")

    @classmethod
    def hook(cls) -> str:
        """Return the hook that the scheme overrides: scores, bias, rotation, embed or none."""
        if cls.contextual or cls.relative:
            return "scores" if cls.contextual else "bias"
        if cls.rotation is not PositionScheme.rotation:
            return "rotation"
        return "none" if cls.embed is PositionScheme.embed else "embed"

    @classmethod
    def acts_in_attention(cls) -> bool:
        """Return whether the scheme changes queries, keys or scores, rather than embeddings."""
        return cls.hook() not in ("embed", "none")

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings x (..., C) with positions (...) added."""
        return x

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Return the cosines and sines (B, 1, T, D/2) that rotate queries and keys at positions (B, T)."""
        return None

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the bias of the scores for queries at positions q and keys at positions k, (H, *broadcast shape)."""
        raise NotImplementedError

    def table(self, n: int, device: torch.device | None = None) -> Tensor:
        """Return the bias of all distances k - q from -(n-1) to n-1, (H, 2n-1); only for `toeplitz` schemes."""
        return self.bias(torch.zeros(1, dtype=torch.long, device=device), torch.arange(1 - n, n, device=device))

    def attach(self, block: Block, first: PositionScheme) -> None:
        """Share parameters with the block, and with the scheme of the first layer; for schemes that are `per_layer`."""

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return curves or matrices of the hook's effect on n positions."""
        if self.relative:
            return (self.describe_bias(n),)
        if self.hook() == "rotation":
            return (self.describe_rotation({self.name: self.rotation(torch.arange(n)[None])}),)
        if self.hook() == "embed":
            added = self.embed(torch.zeros(1, n, self.d_model), torch.arange(n)[None])[0]  # (n, C)
            return (Matrix("added to the embeddings", added, "dimension", "position"),)
        return ()

    def describe_bias(self, n: int) -> Curves:
        """Return curves of the bias between a query at position n - 1 and the keys around it."""
        at = self.key_offsets(n)
        bias = self.bias(torch.tensor([n - 1]), at + n - 1)  # (H, keys)
        title = "bias" if self.toeplitz else f"bias of a query at position {n - 1}"
        return Curves(title, at, {f"head {h}": row for h, row in enumerate(bias)}, DISTANCE, "added to the score")

    def key_offsets(self, n: int) -> Tensor:
        """Return the distances j - i of all keys that a query can attend to: in a decoder none is positive."""
        return torch.arange(1 - n, 1 if self.causal else n)

    @staticmethod
    def describe_rotation(rotations: dict[str, Rotation | None]) -> Curves:
        """Return curves of q . k by distance, for vectors of norm 1 whose components are all equal."""
        tables = {name: [x[0, 0] for x in rotation] for name, rotation in rotations.items() if rotation is not None}
        curves = {name: (cos * cos[0] + sin * sin[0]).mean(-1) for name, (cos, sin) in tables.items()}  # of (n, D/2)
        distance = torch.arange(len(next(iter(curves.values()))))
        return Curves("q . k of equal vectors", distance, curves, "distance |i - j|", "q . k")


def make_positions(config: ModelConfig, side: str, name: str | None = None) -> PositionScheme:
    """Return the position scheme of one side of a model with resolved sizes; raise a RegardError if it makes no sense."""
    place = Place(side, causal=side == "decoder")
    scheme: PositionScheme = make_part("positions", name or config.positions_at(side), config, place)
    return scheme


def schemes_for(config: ModelConfig, side: str) -> list[str]:
    """Return the names of the schemes that make sense on one side of a model with resolved sizes."""
    found = []
    for name in PARTS["positions"]:
        try:
            check_part("positions", name, config, Place(side, causal=side == "decoder"))
        except RegardError:
            continue
        found.append(name)
    return found


def mixers_of(config: ModelConfig) -> list[type[Mixer]]:
    """Return the classes of the configured token mixers."""
    return [find("mixer", name) for name in config.mixer]


@register("none")
class NoPositions(PositionScheme):
    """NoPE: in a causal decoder the mask alone breaks the symmetry, and the model can count what it sees."""

    def __init__(self, settings: Any = None, config: ModelConfig | None = None, place: Place | None = None) -> None:
        """Make the scheme; it has no settings, so all arguments may be omitted."""
        super().__init__(settings, config or ModelConfig(), place or Place("decoder", causal=True))

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if place.side == "encoder" and not any(mixer.ordered for mixer in mixers_of(config)):
            cls.refuse(
                place,
                "without positions an encoder sees a bag of tokens; only a causal decoder can do without "
                "(give the decoder alone none: --model.positions none --model.encoder_positions sinusoidal)",
            )
