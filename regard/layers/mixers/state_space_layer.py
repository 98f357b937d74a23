"""The layer around a time-invariant state space, as in S4 and S4D: y = GLU(W GELU(C x + D u)).

Every channel is a linear system of its own, which reads that channel's numbers u: x' = A x + B u with a step size dt. Its
parameters do not depend on the text, so that training computes it as one long convolution (kernels/long_convolution.py), and
decoding as a recurrence with a state of fixed size (kernels/linear_system.py). The linear layer mixes the channels.

Complex parameters are stored as real tensors (..., 2), which safetensors and optimizers know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.linear_system import LinearSystem
from regard.kernels.long_convolution import long_convolution
from regard.kernels.masks import PAD_POSITION
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.part import Mixer, Place


@dataclass(frozen=True)
class TextStarts:
    """The columns at which the documents of a batch begin."""

    columns: Tensor  # (B, T), of the first token of each token's document; below 0: before the first column
    packed: bool  # rows hold several documents
    continues: bool  # rows may continue texts, whose states are kept


class StateSpaceLayer(Mixer):
    """The base class of S4 and S4D, which say what their linear systems are."""

    reads: ClassVar[tuple[str, ...]] = ()
    # Rounding these to bf16 changes a step size by up to 1.6%, and after hundreds of tokens the phase of a state by radians.
    full_precision: ClassVar[tuple[str, ...]] = ("log_dt", "log_decay", "frequency")
    reads_pieces = True

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            raise RegardError(f"model.mixer {cls.name} reads forwards only: use it in a gpt")
        if settings.state % 2:
            raise RegardError(
                f"model.{cls.name}.state must be even, not {settings.state}: states come in conjugate pairs"
            )
        if settings.dt_min > settings.dt_max:
            raise RegardError(
                f"model.{cls.name}.dt_min, {settings.dt_min:g}, is above model.{cls.name}.dt_max, {settings.dt_max:g}"
            )

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.width, self.n, self.dt_range = config.d_model, settings.state, (settings.dt_min, settings.dt_max)
        self.log_dt = nn.Parameter(torch.empty(self.width))
        self.log_decay = nn.Parameter(torch.empty(self.width, self.n // 2))  # A = -exp(log_decay) + i frequency
        self.frequency = nn.Parameter(torch.empty(self.width, self.n // 2))
        self.outputs = nn.Parameter(torch.empty(self.width, self.n // 2, 2))  # C
        self.skip = nn.Parameter(torch.empty(self.width))  # D
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(self.width, 2 * self.width, bias=config.bias)

    def init_weights(self) -> None:
        """Draw step sizes log-uniformly, C complex normal with mean square 1, and D normal."""
        nn.init.uniform_(self.log_dt, math.log(self.dt_range[0]), math.log(self.dt_range[1]))
        nn.init.normal_(self.outputs, std=0.5**0.5)
        nn.init.normal_(self.skip)

    @classmethod
    def activation_bytes(cls, settings: Any, config: ModelConfig) -> int:
        return 10 * config.d_model  # input, its convolution, the input of `out`, and both halves before the gate

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"out": (1, [self.width, self.width])}

    def system(self, dtype: torch.dtype) -> LinearSystem:
        """Return the discrete linear systems of all channels, in fp32 at least."""
        raise NotImplementedError

    def numbers(self, dtype: torch.dtype, *parameters: Tensor) -> list[Tensor]:
        """Return parameters in fp32 at least; those that end in 2 numbers as complex ones."""
        full = torch.promote_types(dtype, torch.float32)
        return [torch.view_as_complex(p.to(full)) if p.dim() == 3 else p.to(full) for p in parameters]

    def prepare(self, request: PrepareRequest) -> TextStarts:
        return TextStarts(request.causal_starts(self.name), request.mask.packed, request.continues)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Mix the tokens of whole rows, (B, T, C) -> (B, T, C)."""
        run = convolve_eagerly if torch.compiler.is_compiling() else StateSpaceLayer.convolve
        return self.project(run(self, x, ctx))

    def project(self, y: Tensor) -> Tensor:
        """Mix the channels of the systems' outputs, (..., C) -> (..., C)."""
        return F.glu(self.out(self.dropout(F.gelu(y))), dim=-1)

    def read(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the inputs of the systems (B, T, C), with zeros on padding: a Fourier transform has no borders."""
        return torch.where((ctx.positions > PAD_POSITION)[..., None], x, 0)

    def convolve(self, x: Tensor, ctx: Context) -> Tensor:
        """Return C x + D u of whole rows whose states begin at zero, (B, T, C) -> (B, T, C)."""
        starts, u = ctx.prepared, self.read(x, ctx)
        kernel = self.system(x.dtype).kernel(u.shape[1])
        y = long_convolution(u, kernel, starts.columns if starts.packed else None)
        return (y + self.skip * u).to(x.dtype)

    def state(self) -> dict[str, Storage]:
        return {"states": PerRow((self.width, self.n))}

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Run the recurrence for one more token of each row, (N, C) -> (N, C)."""
        u = x.to(kept.states.dtype)
        states, y = self.system(x.dtype).step(kept.states, u)
        kept.states.copy_(states)
        return self.project((y + self.skip * u).to(x.dtype))

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Mix the tokens of prompts, (B, T, C) -> (B, T, C), and store the states after each row's last token."""
        if not x.numel():  # the states stay as they are
            return self.project(x)
        starts, system, u = ctx.prepared, self.system(x.dtype), self.read(x, ctx).to(kept.states.dtype)
        length = u.shape[1]
        y = long_convolution(u, system.kernel(length), starts.columns if starts.packed else None)
        counts = (ctx.positions > PAD_POSITION).sum(1)  # (B,)
        last = starts.columns.gather(1, (counts - 1).clamp(min=0)[:, None])  # (B, 1), where the last document begins
        own = torch.arange(length, device=x.device) >= last  # (B, T), tokens of the last document
        states = system.state_after((u * own[..., None]).mT, counts)
        if starts.continues:
            later = system.outputs_after(kept.states, length).mT  # (B, T, C)
            y = y + torch.where((starts.columns < 0)[..., None], later, 0)
            moved = system.advance_by(kept.states, counts, length)
            states = states + torch.where((last < 0)[..., None], moved, 0)
        kept.states.copy_(states)
        return self.project((y + self.skip * u).to(x.dtype))


# Inside a compiled block it runs eagerly: the number of squarings depends on the length, and torch compiles no complex
# numbers. `torch.compiler.disable` would load the compiler now.
convolve_eagerly = _disable_dynamo(StateSpaceLayer.convolve)
