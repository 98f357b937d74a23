"""Recurrent cells, written as single steps. s is the logistic function, * is elementwise, n is the candidate state.

rnn      h = tanh(W x + U h + b)
lstm     i, f, o = s(...), g = tanh(...), each of W x + U h + b;  c = f * c + i * g;  h = o * tanh(c)
gru      r, z = s(W x + U h + b);  n = tanh(W x + r * (U h) + b);  h = z * h + (1 - z) * n       (torch's and cuDNN's)
gru-cho  as gru, but n = tanh(W x + U (r * h) + b): the reset gate acts before the product       (Cho et al. 2014)
mut1     z = s(W x + b);  r = s(W x + U h + b);  n = tanh(U (r * h) + tanh(x) + b);  h = z * n + (1 - z) * h
mut2     z = s(W x + U h + b);  r = s(x + U h + b);  n = tanh(U (r * h) + W x + b);  h = z * n + (1 - z) * h
mut3     z = s(W x + U tanh(h) + b);  r = s(W x + U h + b);  n and h as in mut2       (Jozefowicz et al. 2015)
nas      a_k = W_k x + U_k h + b_k, but a_3 = (W_3 x + b_3) * (U_3 h);  v = tanh(s(a_0) * relu(a_1));
         c = tanh(v + c) * tanh(s(a_2) + relu(a_3));
         h = tanh(c * tanh(tanh(tanh(a_4) * s(a_5)) + s(tanh(a_6) + s(a_7))))                    (Zoph & Le 2017)

W is `weight_ih`, U is `weight_hh`, b is `bias`: their rows are those of the gates, in the order i f g o or r z n, without
gates that an equation does not use. MUT1 and MUT2 add x to vectors as wide as the state; an input of another width is first
projected by a matrix `weight_in`.

With norm there is a LayerNorm on W x, on each product with U, and on an LSTM's c before its tanh (Ba et al. 2016).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import find, register
from regard.layers.part import Part, settings_of
from regard.layers.stack import to_working_precision

CellState = tuple[Tensor, ...]  # h, and an LSTM's c, each (B, H)


class CellShape(NamedTuple):
    """The numbers of vectors and matrices that a cell has."""

    states: int  # state tensors; the first is h, the output
    gates: int  # gates of the bias
    inputs: int  # gates of weight_ih
    hidden: tuple[int, ...]  # gates of each product with weight_hh
    adds_input: bool  # adds x itself to a gate


class Cell(Part):
    """A recurrent cell; a layer has one for each direction.

    `project` computes what depends on x alone, for all steps at once. `forward` is one step. Its arguments are

    - x: the projected input (B, G*H);
    - weight: weight_hh, possibly with dropout;
    - offset: zeros (B, rows of weight_hh) or None, to be added to the products with weight_hh, whose gradient it collects
      (`DeferredWeightGrad` in recurrent.py);
    - real: (B, 1) or None; where it is False, at padding, the state stays;
    - the tensors of the state.

    It returns the new state, and the inputs of its products with weight_hh other than the first, whose input is h.

    The numbers of states, gates and products are class attributes. A cell whose numbers depend on its settings overrides
    `shape` instead; its instances have the attributes.
    """

    kind = "cell"
    states = 1  # the fields of CellShape
    gates = 1
    inputs = 1
    hidden: tuple[int, ...] = (1,)
    adds_input = False
    norms_state = False  # with norm, there is a LayerNorm `cell_norm` on c before its tanh
    hold_gate: tuple[int, float] | None = None  # a gate, and the offset that makes it keep a state of zeros
    fused_op = ""  # torch's operator that runs all steps in one fused kernel

    def __init__(self, settings: Any, d_in: int, d_hidden: int, norm: bool = False) -> None:
        """Make the parameters. Unlike parts of a block, a cell gets its sizes as arguments."""
        nn.Module.__init__(self)
        self.states, self.gates, self.inputs, self.hidden, self.adds_input = self.shape(settings)
        through = self.adds_input and d_in != d_hidden
        self.weight_in = nn.Parameter(torch.empty(d_hidden, d_in)) if through else None
        self.weight_ih = nn.Parameter(torch.empty(self.inputs * d_hidden, d_hidden if through else d_in))
        self.weight_hh = nn.Parameter(torch.empty(sum(self.hidden) * d_hidden, d_hidden))
        self.bias = nn.Parameter(torch.empty(self.gates * d_hidden))
        self.d_hidden = d_hidden
        self.input_norm = nn.LayerNorm(self.inputs * d_hidden, bias=False) if norm else None
        norms = (nn.LayerNorm(n * d_hidden, bias=False) for n in self.hidden)
        self.hidden_norms = nn.ModuleList(norms) if norm else None
        self.cell_norm = nn.LayerNorm(d_hidden) if norm and self.norms_state else None

    @classmethod
    def shape(cls, settings: Any) -> CellShape:
        """Return the numbers of states, gates and products of a cell with these settings."""
        return CellShape(cls.states, cls.gates, cls.inputs, cls.hidden, cls.adds_input)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize gate by gate: Xavier for inputs, orthogonal for the state, which preserves its norm; bias 0."""
        for weight in (self.weight_in, *self.weight_ih.split(self.d_hidden)):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for weight in self.weight_hh.split(self.d_hidden):
            nn.init.orthogonal_(weight)
        nn.init.zeros_(self.bias)

    def project(self, x: Tensor) -> Tensor:
        """Return the input projection with bias, (..., C) -> (..., G*H)."""
        x = x if self.weight_in is None else F.linear(x, self.weight_in)
        y = F.linear(x, self.weight_ih)
        y = self.add_input(y if self.input_norm is None else self.input_norm(y), x)
        return to_working_precision(y + self.bias.to(y.dtype))

    def add_input(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the gates y = W x, with x itself appended where the equations add it."""
        return y

    def project_linearly(self, x: Tensor, rows: int) -> Tensor:
        """Return the first numbers of W x, without bias and norm, (..., C) -> (..., rows); for fast-forward connections."""
        x = x if self.weight_in is None else F.linear(x, self.weight_in)
        return F.linear(x, self.weight_ih[:rows])

    def split_products(self, numbers: Tensor, dim: int, d_hidden: int) -> tuple[Tensor, ...]:
        """Split a tensor along the rows of weight_hh into one part for each product."""
        return numbers.split([n * d_hidden for n in self.hidden], dim)

    def recurrent_product(self, i: int, x: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        """Return the i-th product with weight_hh, after its norm if there is one."""
        d_hidden = weight.shape[1]  # read from the tensor, so that one compiled step serves all widths
        y = F.linear(x.to(weight.dtype), self.split_products(weight, 0, d_hidden)[i])  # a state may be in fp32
        if offset is not None:
            y = y + self.split_products(offset, -1, d_hidden)[i]
        return y if self.hidden_norms is None else self.hidden_norms[i](y)


def keep_at_padding(real: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return the new state where `real` (B, 1) is True, and the old one at padding."""
    new = new.to(old.dtype)
    return new if real is None else torch.where(real, new, old)


@register("rnn")
class Vanilla(Cell):
    """The vanilla recurrent cell: h = tanh(W x + U h + b)."""

    fused_op = "rnn_tanh"

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and h (B, H); return the new state, and the inputs of products after the first."""
        return (keep_at_padding(real, torch.tanh(x + self.recurrent_product(0, h, weight, offset)), h),), ()


@register("lstm")
class LSTM(Cell):
    """LSTM, whose state c is changed by gates alone (Hochreiter & Schmidhuber 1997, with forget gates).

    Without norms and padding, dc_t / dc_{t-1} = f_t, so that the forget gate alone controls how gradients decay.
    """

    states, gates, inputs, hidden, norms_state = 2, 4, 4, (4,), True
    hold_gate = 0, -1e4  # input gate i = 0
    fused_op = "lstm"

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize with a forget-gate bias of 1, so that the cell keeps its state at first."""
        super().init_weights()
        self.bias[self.d_hidden : 2 * self.d_hidden] = 1.0

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor, c: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, 4H), h and c (B, H); return the new state (h, c), and no further inputs of products."""
        i, f, g, o = (x + self.recurrent_product(0, h, weight, offset)).chunk(4, -1)
        new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        out = torch.sigmoid(o) * torch.tanh(
            new if self.cell_norm is None else self.cell_norm(new.to(self.cell_norm.weight.dtype))
        )
        return (keep_at_padding(real, out, h), keep_at_padding(real, new, c)), ()


@register("gru")
class GRU(Cell):
    """GRU as torch and cuDNN have it, which resets after its product."""

    gates, inputs, hidden = 3, 3, (3,)
    hold_gate = 1, 1e4  # update gate z = 1
    fused_op = "gru"

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and h (B, H); return the new state, and the inputs of products after the first."""
        (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), self.recurrent_product(0, h, weight, offset).chunk(3, -1)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        return (keep_at_padding(real, z * h + (1 - z) * n, h),), ()


@register("gru-cho")
class GRUCho(Cell):
    """GRU that resets before its product (Cho et al. 2014)."""

    gates, inputs, hidden = 3, 3, (2, 1)

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and h (B, H); return the new state, and the inputs of products after the first."""
        (x_r, x_z, x_n), (h_r, h_z) = x.chunk(3, -1), self.recurrent_product(0, h, weight, offset).chunk(2, -1)
        z, reset = torch.sigmoid(x_z + h_z), torch.sigmoid(x_r + h_r) * h
        n = torch.tanh(x_n + self.recurrent_product(1, reset, weight, offset))
        return (keep_at_padding(real, z * h + (1 - z) * n, h),), (reset.detach(),)


@register("mut1")
class MUT1(Cell):
    """MUT1, the first of three cells found by search (Jozefowicz et al. 2015)."""

    gates, inputs, hidden, adds_input = 3, 2, (1, 1), True

    def add_input(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.cat([y, torch.tanh(x).to(y.dtype)], -1)

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and h (B, H); return the new state, and the inputs of products after the first."""
        x_r, x_z, x_n = x.chunk(3, -1)
        z, reset = torch.sigmoid(x_z), torch.sigmoid(x_r + self.recurrent_product(0, h, weight, offset)) * h
        n = torch.tanh(x_n + self.recurrent_product(1, reset, weight, offset))
        return (keep_at_padding(real, n * z + h * (1 - z), h),), (reset.detach(),)


@register("mut2")
class MUT2(Cell):
    """MUT2, the second of three cells found by search (Jozefowicz et al. 2015)."""

    gates, inputs, hidden, adds_input = 3, 2, (2, 1), True

    def add_input(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x.to(y.dtype), y], -1)

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and h (B, H); return the new state, and the inputs of products after the first."""
        (x_r, x_z, x_n), (h_r, h_z) = x.chunk(3, -1), self.recurrent_product(0, h, weight, offset).chunk(2, -1)
        z, reset = torch.sigmoid(x_z + h_z), torch.sigmoid(x_r + h_r) * h
        n = torch.tanh(x_n + self.recurrent_product(1, reset, weight, offset))
        return (keep_at_padding(real, n * z + h * (1 - z), h),), (reset.detach(),)


@register("mut3")
class MUT3(Cell):
    """MUT3, the third of three cells found by search (Jozefowicz et al. 2015)."""

    gates, inputs, hidden = 3, 3, (1, 1, 1)

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, G*H) and h (B, H); return the new state, and the inputs of products after the first."""
        (x_r, x_z, x_n), squashed = x.chunk(3, -1), torch.tanh(h)
        z = torch.sigmoid(x_z + self.recurrent_product(1, squashed, weight, offset))
        reset = torch.sigmoid(x_r + self.recurrent_product(0, h, weight, offset)) * h
        n = torch.tanh(x_n + self.recurrent_product(2, reset, weight, offset))
        return (keep_at_padding(real, n * z + h * (1 - z), h),), (squashed.detach(), reset.detach())


@register("nas")
class NAS(Cell):
    """NASCell, found by neural architecture search with a controller that was trained by reward (Zoph & Le 2017).

    It computes what NASCell of TensorFlow does, whose bias, off by default, would be added to U h instead of W x. That makes
    a difference in one of the eight gates alone, the one that multiplies W x and U h.
    """

    states, gates, inputs, hidden = 2, 8, 8, (8,)

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor, c: Tensor
    ) -> tuple[CellState, CellState]:
        """Run one step from x (B, 8H), h and c (B, H); return the new state (h, c), and no further inputs of products."""
        from_x, from_h = x.chunk(8, -1), self.recurrent_product(0, h, weight, offset).chunk(8, -1)
        a = [u * v if k == 3 else u + v for k, (u, v) in enumerate(zip(from_x, from_h, strict=True))]
        s, tanh, relu = torch.sigmoid, torch.tanh, torch.relu
        new = tanh(tanh(s(a[0]) * relu(a[1])) + c) * tanh(s(a[2]) + relu(a[3]))
        out = tanh(new * tanh(tanh(tanh(a[4]) * s(a[5])) + s(tanh(a[6]) + s(a[7]))))
        return (keep_at_padding(real, out, h), keep_at_padding(real, new, c)), ()


def cell_settings(config: ModelConfig) -> Any:
    """Return the settings of the cell that a configuration names."""
    return settings_of(find("cell", config.cell), config)


def cell_shape(config: ModelConfig) -> CellShape:
    """Return the numbers of states, gates and products of the cell that a configuration names."""
    kind: type[Cell] = find("cell", config.cell)
    return kind.shape(settings_of(kind, config))
