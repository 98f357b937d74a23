"""A figure of token mixers: how much of what a token gets comes from the tokens before it, by their distance.

The influence of a token on the output of a later one is the size of a derivative, |d y_t / d x_{t-l}|. It is measured by
differentiating the mixer itself on random inputs, so it needs nothing of a mixer but its forward pass: attention,
convolutions and recurrences are drawn side by side. Curves are shares: they sum to 1 over all distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL
from regard.layers.context import Context, PrepareRequest
from regard.layers.part import Mixer, Place, full_precision_parameters, make_part
from regard.layers.positions.scheme import PositionScheme, make_positions
from regard.layers.stack import Stack
from regard.look.figures import Drawable, Lines, draw, rounded
from regard.models.architectures import architecture_of
from regard.models.initialization import initialize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 32  # random inputs, over which the influence is averaged
LEAST = 1e-6  # smaller shares are not drawn


@dataclass(frozen=True)
class MixerFigure(Drawable):
    """The share of each distance in the influence on a token, (n,) for each mixer."""

    shares: dict[str, np.ndarray]
    in_order: bool = False  # of the blocks of a model

    def figure(self) -> Figure:
        n = len(next(iter(self.shares.values())))
        lines = {name: np.where(share < LEAST, np.nan, share) for name, share in self.shares.items()}
        # A logarithmic axis has no 0, the token itself; convolutions end after a few tokens, where a linear one hides them.
        x, y = "distance to the earlier token, plus 1", "share of all influence"
        panel = Lines("", np.arange(1, n + 1), lines, x, y, log=True, powers=True, unordered=not self.in_order)
        return draw("Influence of earlier tokens", [panel], 1)

    def numbers(self) -> dict[str, Any]:
        return {name: rounded(share) for name, share in self.shares.items()}


def draw_untrained_mixers(names: Sequence[str], config: ModelConfig, n: int) -> MixerFigure:
    """Draw mixers as they are initialized, in a decoder of this configuration but for its mixers, over n tokens.

    The seed is 0."""
    shares = {}
    # One model has all of them, so that a setting that only some of them read may be given.
    blocks, longest = max(len(names), config.n_decoder_layers), max(n, config.max_len)
    changed = replace(config, mixer=tuple(names), n_decoder_layers=blocks, max_len=longest)
    of_all = architecture_of(config).resolve(changed)
    for name in names:
        own = replace(of_all, mixer=(name,))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            mixer: Mixer = make_part("mixer", name, own, Place("decoder", causal=True))
            initialize(mixer)
            shares[name] = influence_by_distance(mixer, make_positions(own, "decoder"), own.d_model, n)
    return MixerFigure(shares)


def draw_trained_mixers(model: nn.Module, n: int) -> MixerFigure:
    """Draw the mixer of every block of a model's decoder as it has learned it."""
    stacks = [stack for stack in model.modules() if isinstance(stack, Stack) and stack.mask.causal]
    if not stacks:
        raise RegardError("this model has no blocks that read forwards: `regard look mixers` draws those of decoders")
    config, shares = model.config, {}
    assert isinstance(config, ModelConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for i, mixer in enumerate(stacks[0].mixers):
            scheme: Any = stacks[0].schemes[i % len(stacks[0].schemes)]
            shares[f"block {i + 1}: {mixer.name}"] = influence_by_distance(mixer, scheme, config.d_model, n)
    return MixerFigure(shares, in_order=True)


def influence_by_distance(mixer: Mixer, scheme: PositionScheme, width: int, n: int) -> np.ndarray:
    """Return the share (n,) of the tokens 0, 1, ... n - 1 before the last one in the influence on its output.

    Inputs are normal, as after a norm. The size of a derivative is estimated by its product with a random vector."""
    was_training = mixer.training
    mixer.eval()
    scheme.eval()
    exact = full_precision_parameters(mixer)  # these may have another precision than the inputs
    weight = next(p for p in mixer.parameters() if p not in exact)
    x = torch.randn(ROWS, n, width, dtype=weight.dtype, device=weight.device, requires_grad=True)
    positions = torch.arange(n, device=x.device).expand(ROWS, n)
    request = PrepareRequest(positions, positions, CAUSAL, scheme, None, False)
    with torch.enable_grad():
        y: Tensor = mixer(x, Context(positions, mixer.prepare(request)))[:, -1]
        (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    mixer.train(was_training)
    sizes = gradient.double().square().sum(2).mean(0).sqrt().flip(0)  # (n,), from the nearest token to the farthest
    return (sizes / sizes.sum()).cpu().numpy()
