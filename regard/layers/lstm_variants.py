"""The LSTM with peepholes and its eight variants, each with one change (Greff et al. 2017).

    i = s(W x + U h + p * c + b)        input gate; c is the state before the step
    f = s(W x + U h + p * c + b)        forget gate
    g = tanh(W x + U h + b)             candidate
    c = f * c + i * g
    o = s(W x + U h + p * c + b)        output gate; c is the new state
    h = o * tanh(c)

A vector p (a peephole) lets a gate read the state of its own cell. The rows of W, U and b are those of the gates that a
variant has, in the order i f g o; `peephole` holds the vectors of i, f and o in this order. With norm there is a LayerNorm
on W x, on each product with U, and on c before its tanh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.config.registry import register, setting
from regard.layers.cells import Cell, CellShape, CellState, keep_at_padding

GATES = ("i", "f", "g", "o")


@dataclass(frozen=True)
class LSTMVariant:
    """One of the LSTMs that Greff et al. (2017) compared."""

    short: str  # its name in the paper
    without: str = ""  # a gate that it lacks; the gate's value is 1, or 1 - i for a coupled forget gate
    peepholes: bool = True
    squashes_input: bool = True  # g = tanh(...), not the sum itself
    squashes_output: bool = True  # h = o * tanh(c), not o * c
    coupled: bool = False
    gate_recurrence: bool = False  # i, f and o of the step before are read by all three gates

    @property
    def gates(self) -> tuple[str, ...]:
        return tuple(gate for gate in GATES if gate != self.without)

    @property
    def peeping(self) -> tuple[str, ...]:
        """The gates that read c."""
        return tuple(gate for gate in self.gates if gate != "g") if self.peepholes else ()


VARIANTS = {
    "vanilla": LSTMVariant("V"),
    "no-input-gate": LSTMVariant("NIG", without="i"),
    "no-forget-gate": LSTMVariant("NFG", without="f"),
    "no-output-gate": LSTMVariant("NOG", without="o"),
    "no-input-activation": LSTMVariant("NIAF", squashes_input=False),
    "no-output-activation": LSTMVariant("NOAF", squashes_output=False),
    "coupled": LSTMVariant("CIFG", without="f", coupled=True),
    "no-peepholes": LSTMVariant("NP", peepholes=False),
    "gate-recurrence": LSTMVariant("FGR", gate_recurrence=True),
}


@register("lstm-peephole")
class PeepholeLSTM(Cell):
    """LSTM with peepholes, or one of its eight variants (Greff et al. 2017).

    Full gate recurrence keeps the gates i, f and o of a step as further states. They enter three products with weight_hh, of
    three gates each, beside the product with h.
    """

    @dataclass(frozen=True)
    class Settings:
        variant: str = setting("vanilla", "the change to the vanilla LSTM", choices=tuple(VARIANTS))

    norms_state = True

    def __init__(self, settings: Settings, d_in: int, d_hidden: int, norm: bool = False) -> None:
        super().__init__(settings, d_in, d_hidden, norm)
        self.variant = VARIANTS[settings.variant]
        n = len(self.variant.peeping)
        self.peephole = nn.Parameter(torch.empty(n * d_hidden)) if n else None

    @classmethod
    def shape(cls, settings: Any) -> CellShape:
        variant = VARIANTS[settings.variant]
        n, again = len(variant.gates), 3 * variant.gate_recurrence
        return CellShape(2 + again, n, n, (n, *[3] * again), False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as an LSTM: peepholes 0, and biases with which the cell keeps its state at first."""
        super().init_weights()
        if self.peephole is not None:
            nn.init.zeros_(self.peephole)
        for gate, bias in zip(self.variant.gates, self.bias.split(self.d_hidden), strict=True):
            bias.fill_({"f": 1.0, "i": -1.0 * self.variant.coupled}.get(gate, 0.0))

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        offset: Tensor | None,
        real: Tensor | None,
        h: Tensor,
        c: Tensor,
        *gates: Tensor,
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H), h, c and perhaps the gates i, f, o before (B, H each); return the new state, and the
        inputs of products after the first."""
        variant = self.variant
        names, total = variant.gates, x + self.recurrent_product(0, h, weight, offset)
        sums = dict(zip(names, total.chunk(len(names), -1), strict=True))
        peep = {}
        if self.peephole is not None:
            peep = dict(zip(variant.peeping, self.peephole.chunk(len(variant.peeping)), strict=True))
        for k, gate in enumerate(gates, 1):
            for name, part in zip("ifo", self.recurrent_product(k, gate, weight, offset).chunk(3, -1), strict=True):
                sums[name] = sums[name] + part

        def open_gate(name: str, state: Tensor) -> Any:
            """Return a gate that reads `state` by its peephole, or 1 if the variant lacks the gate."""
            if name not in sums:
                return 1.0
            return torch.sigmoid(sums[name] + peep[name] * state if name in peep else sums[name])

        i = open_gate("i", c)
        f = 1 - i if variant.coupled else open_gate("f", c)
        new = f * c + i * (torch.tanh(sums["g"]) if variant.squashes_input else sums["g"])
        o = open_gate("o", new)
        shown = new if self.cell_norm is None else self.cell_norm(new.to(self.cell_norm.weight.dtype))
        out = o * (torch.tanh(shown) if variant.squashes_output else shown)
        state = [(out, h), (new, c), *zip((i, f, o), gates, strict=False)]
        return tuple(keep_at_padding(real, *pair) for pair in state), tuple(gate.detach() for gate in gates)
