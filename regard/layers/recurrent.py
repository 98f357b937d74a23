"""Several layers of recurrent cells, in one or both directions.

| cell            | without norm                                  | with norm |
|-----------------|-----------------------------------------------|-----------|
| lstm, gru       | fused: cuDNN or oneDNN does all steps at once | a scan    |
| rnn             | fused; a scan where there is padding          | a scan    |
| gru-cho, mut1-3 | a scan                                        | a scan    |

A scan is a loop over the steps. What depends on the input alone is worked out before it, for all steps at once, and the
gradient of the matrix that each step multiplies the state with after it, again for all steps at once (`Late`). What is
left for a step is as little as the equations allow; training compiles it, and records the loop in a CUDA graph.

Padding: packed sequences would need lengths on the host, which a recorded graph cannot ask for. A scan keeps the state
where there is padding. The fused kernels get more input columns, of which one is 1 on padding and shuts the input gate of an
LSTM, or holds the state of a GRU, so that a state of zeros stays exactly that until a row begins.

MERGED: Loops whose turns are all alike, on the meta device: one flip is run, and counts as many.

A recurrent layer of 10,000 steps is counted by one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config.registry import find
from regard.device import without_autocast
from regard.layers.cells import Cell, CellState
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.stack import to_working_precision
from regard.layers.variational_dropout import VariationalDropout

Run = Callable[[list[Cell], Tensor, CellState, Tensor | None], tuple[Tensor, CellState]]
PADDING_COLUMNS = 8  # columns that say what is padding: one does, the others keep rows aligned for the tensor cores


class Recurrent(nn.Module):
    """A state is flat: for each layer and direction h, and for LSTMs then c, each (B, H)."""

    def __init__(
        self,
        cell: str,
        d_in: int,
        widths: Sequence[int],
        *,
        bidirectional: bool = False,
        dropout: float = 0.0,  # between layers
        weight_dropout: float = 0.0,  # on weight_hh
        variational: bool = True,
        norm: bool = False,
        settings: Any = None,  # of the cell; None: its defaults
    ) -> None:
        super().__init__()
        kind: type[Cell] = find("cell", cell)
        directions = ("forward_", "backward_") if bidirectional else ("forward_",)
        settings = settings or kind.Settings()
        ins = (d_in, *(len(directions) * width for width in widths))
        self.d_out, self.bidirectional = ins[-1], bidirectional
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: kind(settings, ins[i], width, norm) for name in directions})
            for i, width in enumerate(widths)
        )
        self.dropout = VariationalDropout(dropout, variational)
        self.weight_dropout = weight_dropout
        self.fuses, self.fuses_padded = bool(kind.fused_op) and not norm, kind.hold_gate is not None and not norm

    def start(self, rows: int, like: Tensor) -> CellState:
        """Zeros."""
        cells = [module for module in self.layers.modules() if isinstance(module, Cell)]
        return tuple(like.new_zeros(rows, cell.d_hidden) for cell in cells for _ in range(cell.states))

    # ---- decoding -----------------------------------------------------------------------------------------------------

    def storage(self, first: int = 0) -> dict[str, Storage]:
        """Declare the tensors of the state, numbered from `first` on, as decoding keeps them."""
        return {f"state_{first + i}": PerRow((x.shape[1],)) for i, x in enumerate(self.start(0, torch.empty(0)))}

    @staticmethod
    def kept(kept: Any) -> CellState:
        """Return the state that decoding keeps under these names."""
        return tuple(value for name, value in vars(kept).items() if name.startswith("state_"))

    @staticmethod
    def keep(state: CellState, kept: Any) -> None:
        """Copy a state to where decoding keeps it."""
        for i, value in enumerate(state):
            getattr(kept, f"state_{i}").copy_(value)

    def forward(
        self, x: Tensor, state: CellState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """x (B, T, C) -> what the last layer says (B, T, d_out), and the state after it. `real` (B, T): what is not padding.

        Padding stands before or after the tokens of a row. From a state of zeros, what is said at tokens is what the row
        alone would give; so is the state at the end of a direction, where that end is a token.
        """
        fused = (self.fuses if real is None else self.fuses_padded) and not x.is_meta  # kernels hide their products
        state = self.start(len(x), x) if state is None else state
        return self._run_layers(self._fused if fused else self._scan, x, state, real)

    def step(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """One token (N, C) of each row -> (N, d_out), and the state after it; for one direction."""
        assert not self.bidirectional, "what comes later is not known yet"
        x, state = self._run_layers(self._scan, x[:, None], state, None)
        return x[:, 0], state

    def _run_layers(self, run: Run, x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
        """Layer by layer, or as many at once as a kernel can read."""
        ends: CellState = ()
        for i, cells in enumerate(
            self._fusable_groups() if run == self._fused and real is None else self._cells_by_layer()
        ):
            n = len(cells) * cells[0].states
            x, end = run(cells, to_working_precision(self.dropout(x) if i else x), state[len(ends) :][:n], real)
            ends += end
        return x, ends

    def _cells_by_layer(self) -> list[list[Cell]]:
        return [list(layer.values()) for layer in self.layers]  # type: ignore[operator]

    def _fusable_groups(self) -> list[list[Cell]]:
        """All layers as one, in which a kernel reads the next before it is through with the last. They must be of one
        width, and nothing may be dropped between them."""
        layers = self._cells_by_layer()
        alike = len({cells[0].d_hidden for cells in layers}) == 1 and not (self.training and self.dropout.p)
        return [[cell for cells in layers for cell in cells]] if alike else layers

    def _fused(self, cells: list[Cell], x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
        if real is not None:
            x = torch.cat([x, F.pad(~real[..., None], (0, PADDING_COLUMNS - 1)).to(x.dtype)], -1)
        weights = FlattenedParameters.apply(
            x.dtype, *(w for cell in cells for w in self._weights(cell, real is not None))
        )
        kind, n = cells[0].fused_op, cells[0].states
        hx = tuple(torch.stack(state[i::n]).to(x.dtype) for i in range(n))  # h, c: (layers * directions, B, H)
        depth = len(cells) // (1 + self.bidirectional)
        settings = (True, depth, 0.0, torch.is_grad_enabled(), self.bidirectional, True)  # nothing is dropped inside
        with without_autocast(x.device):  # autocast would make fp16 of it
            out, *ends = getattr(torch._VF, kind)(x, hx if n > 1 else hx[0], weights, *settings)
        return out, tuple(part for both in zip(*ends, strict=True) for part in both)

    def _weights(self, cell: Cell, padded: bool) -> tuple[Tensor, ...]:
        weight_ih: Tensor = cell.weight_ih
        if padded:
            assert cell.hold_gate is not None
            (gate, value), h = cell.hold_gate, cell.d_hidden
            columns = weight_ih.new_zeros(len(weight_ih), PADDING_COLUMNS)
            columns[gate * h : (gate + 1) * h, 0] = value
            weight_ih = torch.cat([weight_ih, columns], 1)
        return weight_ih, self._drop_weights(cell), cell.bias, torch.zeros_like(cell.bias)

    def _drop_weights(self, cell: Cell) -> Tensor:
        """Weight drop (Merity et al. 2018): weight_hh without some of its numbers, the same at all steps."""
        return F.dropout(cell.weight_hh, self.weight_dropout, self.training)

    def _scan(self, cells: list[Cell], x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
        n, outs = cells[0].states, []
        ends: CellState = ()
        for i, cell in enumerate(cells):
            flip = (lambda t: t.flip(1)) if i else (lambda t: t)
            own_state, mask = state[i * n : (i + 1) * n], None if real is None else flip(real)
            out, end = scan(cell, self._drop_weights(cell), flip(x), own_state, mask)
            outs.append(flip(out))
            ends += end
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1), ends


def scan(cell: Cell, weight_hh: Tensor, x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
    """All steps of a cell, one after the other: x (B, T, C) -> (B, T, H), and the state after them."""
    x = x.transpose(0, 1)  # (T, B, C)
    # h is multiplied, in the precision of products; c only adds up, and small numbers would be lost on it in bf16
    state = (state[0].to(x.dtype), *(c.to(torch.promote_types(c.dtype, torch.float32)) for c in state[1:]))
    learns = torch.is_grad_enabled() and weight_hh.requires_grad
    step = cell if learns else cell.forward  # what is compiled is for training
    factors: list[CellState] = []
    offsets: Iterable[Tensor | None] = (
        DeferredWeightGrad.apply(weight_hh, cell, factors, x).unbind() if learns else repeat(None)
    )
    masks: Iterable[Tensor | None] = repeat(None) if real is None else real.T[..., None].contiguous().unbind()
    weight_hh, outs = weight_hh.detach().to(x.dtype), []
    projected = cell.project(x)
    if x.is_meta:  # all steps cost the same: one is counted for all
        with counted_as(len(x)):
            state, _ = step(projected[0], weight_hh, None, next(iter(masks)), *state)
        return state[0][:, None].expand(-1, len(x), -1), state
    for now, offset, mask in zip(projected.unbind(), offsets, masks, strict=False):
        before = state[0].detach()
        state, others = step(now, weight_hh, offset, mask, *state)
        outs.append(state[0])
        if learns:
            factors.append((before, *others))
    return torch.stack(outs).transpose(0, 1), state


class DeferredWeightGrad(torch.autograd.Function):
    """Zeros (T, B, rows of weight_hh), to be added to the products of a scan with weight_hh. Their gradient is that of the
    products, and with what was multiplied, which the scan leaves in `factors`, it makes that of weight_hh: one product
    for all steps instead of one, and a sum, for each."""

    @staticmethod
    def forward(ctx: Any, weight_hh: Tensor, cell: Cell, factors: list[CellState], x: Tensor) -> Tensor:
        ctx.cell, ctx.factors, ctx.dtype = cell, factors, weight_hh.dtype
        return x.new_zeros(*x.shape[:2], len(weight_hh))

    @staticmethod
    def backward(ctx: Any, grad_offsets: Tensor) -> tuple[Tensor, None, None, None]:
        grad_products = ctx.cell.split_products(grad_offsets.flatten(0, 1), 1, ctx.cell.d_hidden)
        parts = zip(grad_products, zip(*ctx.factors, strict=True), strict=True)
        found = [y.T @ torch.cat(x).to(y.dtype) for y, x in parts]
        return torch.cat(found).to(ctx.dtype), None, None, None


class FlattenedParameters(torch.autograd.Function):
    """Weights as views of one piece of memory in a dtype, first matrices and then biases: so cuDNN reads them where they
    are. It would copy them otherwise, and warn of it."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [w.dtype for w in weights]
        flat = weights[0].new_empty(sum(w.numel() for w in weights), dtype=dtype)
        order = sorted(range(len(weights)), key=lambda i: -weights[i].ndim)
        pieces = flat.split([weights[i].numel() for i in order])
        views = {i: piece.view_as(weights[i]) for i, piece in zip(order, pieces, strict=True)}
        torch._foreach_copy_([views[i] for i in order], [weights[i] for i in order])
        return tuple(views[i] for i in range(len(weights)))

    @staticmethod
    def backward(ctx: Any, *grad_views: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g.to(dtype) for g, dtype in zip(grad_views, ctx.dtypes, strict=True))


_repetitions = [1]


def repetition_count() -> int:
    """How often what runs now would run."""
    return _repetitions[-1]


@contextmanager
def counted_as(n: int) -> Iterator[None]:
    """What runs inside stands for n turns."""
    _repetitions.append(n * _repetitions[-1])
    try:
        yield
    finally:
        _repetitions.pop()
