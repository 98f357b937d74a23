"""Several layers of recurrent cells, in one or both directions, and the connections between them.

| cell            | without norm                                    | with norm |
|-----------------|-------------------------------------------------|-----------|
| lstm, gru       | fused: cuDNN or oneDNN computes all steps       | a scan    |
| rnn             | fused; a scan where there is padding            | a scan    |
| all others      | a scan                                          | a scan    |

A scan is a loop over time steps. The input projection is computed for all steps before the loop, and the gradient of the
recurrent matrix for all steps after it (`DeferredWeightGrad`), so that a step contains as little as the equations allow.
Training compiles the step and captures the loop in a CUDA graph.

Padding: packed sequences need lengths on the host, which a captured CUDA graph cannot read. A scan keeps the state of a row
at padding. Fused kernels get additional input columns, one of which is 1 at padding and closes the input gate of an LSTM or
opens the update gate of a GRU, so that a state of zeros stays exactly zero until a row begins.

Connections of deep stacks: residual sums and a context that every layer reads (GNMT), fast-forward connections and
directions that alternate from layer to layer (Deep-Att), and feed-forward layers between recurrent ones
(layers/recurrent_feedforward.py).

On the meta device, where costs are counted, a scan runs a single step that is counted as T (`counted_as`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings
from regard.config.registry import find
from regard.device import without_autocast
from regard.errors import RegardError
from regard.layers.cells import Cell, CellState, cell_settings
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.recurrent_feedforward import RecurrentFeedForward, make_feedforwards
from regard.layers.stack import to_working_precision
from regard.layers.variational_dropout import VariationalDropout

Run = Callable[[list[Cell], Tensor, CellState, Tensor | None], tuple[Tensor, CellState]]
LONGEST = 32_768  # steps in one call of a fused kernel; cuDNN refuses 65,536
PADDING_COLUMNS = 8  # one column marks padding; the others keep rows aligned for tensor cores


class Recurrent(nn.Module):
    """A stack of recurrent layers.

    Its state is a flat tuple with h (B, H) of each layer and direction, each followed by c and whatever else a cell keeps.
    """

    def __init__(
        self,
        cell: str,
        d_in: int,
        widths: Sequence[int],
        *,
        bidirectional: bool = False,
        bidirectional_layers: int = 0,  # how many of the lowest layers are bidirectional; 0: all
        alternating: bool = False,  # every layer reads in the direction opposite to that of the layer below
        dropout: float = 0.0,  # between layers
        weight_dropout: float = 0.0,  # on weight_hh
        variational: bool = True,
        norm: bool = False,
        settings: Any = None,  # of the cell; None: its defaults
        first: int = 1,  # the number of the lowest layer in a model that has other layers below it
        residual: int = 0,  # layers from this number on add their input to their output; 0: none
        d_context: int = 0,  # width of a context that every layer reads beside its input
        fast_forward: bool = False,  # layers read the input projection of the layer below too
        d_fast: int = 0,  # width of that projection below the lowest layer
        returns_fast: bool = False,  # the output has the input projection of the highest layer behind it
        feedforwards: Sequence[RecurrentFeedForward] = (),  # after each layer but the last
    ) -> None:
        super().__init__()
        kind: type[Cell] = find("cell", cell)
        settings = settings or kind.Settings()
        n_both = (bidirectional_layers or len(widths)) if bidirectional else 0
        directions = [("forward_", "backward_") if i < n_both else ("forward_",) for i in range(len(widths))]
        outs = [len(names) * width for names, width in zip(directions, widths, strict=True)]
        ins = [d_in, *outs[:-1]]
        layers = []
        for i, (names, width) in enumerate(zip(directions, widths, strict=True)):
            d_input = ins[i] + d_context + d_fast
            cells = {name: kind(settings, d_input, width, norm) for name in names}
            layers.append(nn.ModuleDict(cells))
            d_fast = sum(half_projection(each) for each in cells.values()) if fast_forward else 0
        self.layers = nn.ModuleList(layers)
        self.residual = [bool(residual) and first + i >= residual for i in range(len(widths))]
        for i, adds in enumerate(self.residual):
            if adds and ins[i] != outs[i]:
                raise RegardError(
                    f"model.recurrent.residual {residual} adds the input of layer {first + i} ({ins[i]} numbers) to its "
                    f"output ({outs[i]} numbers): choose a higher layer, or equal widths"
                )
        self.feedforwards = nn.ModuleList(feedforwards)
        self.bidirectional, self.alternating, self.fast_forward = bidirectional, alternating, fast_forward
        self.returns_fast = returns_fast
        d_top = sum(len(each.weight_ih) for each in self.cells_by_layer()[-1])
        self.d_out = outs[-1] + d_top * returns_fast
        # Layers with nothing between them may run in one call of a fused kernel.
        connected = (*self.residual, d_context, fast_forward, alternating, len(feedforwards), len(set(directions)) > 1)
        self.is_plain = not any(connected)
        self.dropout = VariationalDropout(dropout, variational)
        self.weight_dropout = weight_dropout
        self.fuses, self.fuses_padded = bool(kind.fused_op) and not norm, kind.hold_gate is not None and not norm

    def zero_state(self, rows: int, like: Tensor) -> CellState:
        """Return the initial state of zeros for a number of rows, with the dtype and device of `like`."""
        cells = [module for module in self.layers.modules() if isinstance(module, Cell)]
        return tuple(like.new_zeros(rows, cell.d_hidden) for cell in cells for _ in range(cell.states))

    # ---- decoding -----------------------------------------------------------------------------------------------------

    def storage(self, first: int = 0) -> dict[str, Storage]:
        """Declare the tensors of the state for decoding, as state_0, state_1, ... counted from `first`."""
        return {f"state_{first + i}": PerRow((x.shape[1],)) for i, x in enumerate(self.zero_state(0, torch.empty(0)))}

    @staticmethod
    def load_state(kept: Any) -> CellState:
        """Return the state from the storage that `storage` declares."""
        return tuple(value for name, value in vars(kept).items() if name.startswith("state_"))

    @staticmethod
    def store_state(state: CellState, kept: Any) -> None:
        """Copy a state into the storage that `storage` declares."""
        for i, value in enumerate(state):
            getattr(kept, f"state_{i}").copy_(value)

    def forward(
        self,
        x: Tensor,
        state: CellState | None = None,
        real: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        context: Tensor | None = None,
        fast: Tensor | None = None,
    ) -> tuple[Tensor, CellState]:
        """Run all layers, x (B, T, C) -> outputs (B, T, d_out) and the final state; `real` (B, T) is False at padding.

        Padding may precede or follow the tokens of a row. From a state of zeros, outputs at tokens do not depend on it;
        neither does the final state of a direction that ends on a token.

        `tokens` (B, T) says which columns feed-forward layers count as tokens where `real` is None, because padding at the
        end of a row needs no treatment. `context` (B, T, d_context) is read by every layer, and `fast` (B, T, d_fast) is
        the input projection of the layer below the first.
        """
        fuses = self.fuses if real is None else self.fuses_padded
        fuses = fuses and not (self.bidirectional and x.shape[1] > LONGEST)
        run = self._scan if x.is_meta or not fuses else self._fused  # products inside fused kernels are not counted
        state = self.zero_state(len(x), x) if state is None else state
        return self._run_layers(run, x, state, real, real if tokens is None else tokens, context, fast)

    def step(
        self, x: Tensor, state: CellState, context: Tensor | None = None, fast: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """Run one token of each row, (N, C) -> (N, d_out), and return the new state; for one direction only."""
        assert not self.bidirectional, "the backward direction needs tokens that are not known yet"
        assert not self.alternating, "a direction that alternates needs tokens that are not known yet"
        beside = (None if each is None else each[:, None] for each in (context, fast))
        x, state = self._run_layers(self._scan, x[:, None], state, None, None, *beside)
        return x[:, 0], state

    def _run_layers(
        self,
        run: Run,
        x: Tensor,
        state: CellState,
        real: Tensor | None,
        tokens: Tensor | None,
        context: Tensor | None,
        fast: Tensor | None,
    ) -> tuple[Tensor, CellState]:
        """Run the layers one by one, or all in one call if a fused kernel can."""
        ends: CellState = ()
        groups = self._fusable_groups() if run == self._fused and real is None else self.cells_by_layer()
        for i, cells in enumerate(groups):
            if i and self.alternating:
                x, fast, real, tokens = (None if each is None else each.flip(1) for each in (x, fast, real, tokens))  # type: ignore[assignment]
            n = len(cells) * cells[0].states
            read = [self.dropout(x) if i else x, fast, context]
            parts = [to_working_precision(part) for part in read if part is not None]
            given = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            out, end = run(cells, given, state[len(ends) :][:n], real)
            ends += end
            is_top = i == len(groups) - 1
            if self.fast_forward and (self.returns_fast or not is_top):
                rows = (len(cell.weight_ih) if is_top else half_projection(cell) for cell in cells)
                fast = torch.cat([cell.project_linearly(given, n) for cell, n in zip(cells, rows, strict=True)], -1)
            x = out + x.to(out.dtype) if self.residual[i] else out
            if i < len(self.feedforwards):
                x = self.feedforwards[i](x, tokens)
        if self.returns_fast and fast is not None:
            x = torch.cat([x, fast.to(x.dtype)], -1)
        return x.flip(1) if self.alternating and len(groups) % 2 == 0 else x, ends

    def cells_by_layer(self) -> list[list[Cell]]:
        """Return the cells of each layer, one for each direction."""
        return [list(layer.values()) for layer in self.layers]  # type: ignore[operator]

    def _fusable_groups(self) -> list[list[Cell]]:
        """Return all layers as one group if a fused kernel can run them in one call, which overlaps layers.

        They must have one width and no dropout or other connection between them; otherwise each layer is a group."""
        layers = self.cells_by_layer()
        alike = self.is_plain and len({cells[0].d_hidden for cells in layers}) == 1
        alike = alike and not (self.training and self.dropout.p)
        return [[cell for cells in layers for cell in cells]] if alike else layers

    def _fused(self, cells: list[Cell], x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
        """Run cells by a fused kernel, x (B, T, C) -> (B, T, d_out); they are one layer, or all layers.

        Rows longer than LONGEST, which have one direction, are read in pieces."""
        if real is not None:
            x = torch.cat([x, F.pad(~real[..., None], (0, PADDING_COLUMNS - 1)).to(x.dtype)], -1)
        weights = FlattenedParameters.apply(
            x.dtype, *(w for cell in cells for w in self._weights(cell, real is not None))
        )
        kind, n = cells[0].fused_op, cells[0].states
        hx = [torch.stack(state[i::n]).to(x.dtype) for i in range(n)]  # h, c: (layers * directions, B, H)
        directions = len(self.layers[0]) if self.is_plain else len(cells)  # type: ignore[arg-type]
        dropout = 0.0  # between layers, it is applied in _run_layers
        options = (True, len(cells) // directions, dropout, torch.is_grad_enabled(), directions == 2, True)
        outs = []
        with without_autocast(x.device):  # autocast would cast to fp16
            for piece in x.split(LONGEST, 1):
                out, *hx = getattr(torch._VF, kind)(piece, hx if n > 1 else hx[0], weights, *options)
                outs.append(out)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        return out, tuple(part for both in zip(*hx, strict=True) for part in both)

    def _weights(self, cell: Cell, padded: bool) -> tuple[Tensor, ...]:
        """Return weights and biases as torch's kernels take them; `padded` adds the columns that mark padding."""
        weight_ih: Tensor = cell.weight_ih
        if padded:
            assert cell.hold_gate is not None
            (gate, value), h = cell.hold_gate, cell.d_hidden
            columns = weight_ih.new_zeros(len(weight_ih), PADDING_COLUMNS)
            columns[gate * h : (gate + 1) * h, 0] = value
            weight_ih = torch.cat([weight_ih, columns], 1)
        return weight_ih, self._drop_weights(cell), cell.bias, torch.zeros_like(cell.bias)

    def _drop_weights(self, cell: Cell) -> Tensor:
        """Return weight_hh with dropout on its elements, the same for all steps (weight drop, Merity et al. 2018)."""
        return F.dropout(cell.weight_hh, self.weight_dropout, self.training)

    def _scan(self, cells: list[Cell], x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
        """Run the cells of one layer step by step, x (B, T, C) -> (B, T, d_out); the second reads backward."""
        n, outs = cells[0].states, []
        ends: CellState = ()
        for i, cell in enumerate(cells):
            flip = (lambda t: t.flip(1)) if i else (lambda t: t)
            own_state, mask = state[i * n : (i + 1) * n], None if real is None else flip(real)
            out, end = scan(cell, self._drop_weights(cell), flip(x), own_state, mask)
            outs.append(flip(out))
            ends += end
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1), ends


class InterleavedRecurrent(nn.Module):
    """Two columns of recurrent layers that read in opposite directions, which alternate from layer to layer (Deep-Att).

    A column alone has read a text in both directions after two layers, and no layer is wider than its cells. The highest
    layer of the first column reads forward and that of the second backward. The outputs of both are concatenated."""

    def __init__(self, make_column: Callable[[], Recurrent]) -> None:
        super().__init__()
        self.columns = nn.ModuleDict({name: make_column() for name in ("forward_", "backward_")})
        self.d_out = sum(column.d_out for column in self.columns.values())  # type: ignore[misc]

    def forward(
        self, x: Tensor, state: CellState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """Run both columns, x (B, T, C) -> outputs (B, T, d_out) and the final states; `real` (B, T) is False at padding.

        The last tensors of the state are those of the highest layer that reads backward."""
        outs, ends = [], ()
        for name, column in self.columns.items():
            turn = (lambda t: t.flip(1)) if self.begins_backward(name) else (lambda t: t)
            out, end = column(turn(x), None, None if real is None else turn(real))
            outs.append(turn(out))
            ends += end
        return torch.cat(outs, -1), ends

    def begins_backward(self, name: str) -> bool:
        """Return whether the lowest layer of a column reads backward."""
        return (name == "backward_") == (len(self.columns[name].layers) % 2 == 1)  # type: ignore[arg-type]


def half_projection(cell: Cell) -> int:
    """Return how many numbers of a cell's input projection a fast-forward connection passes on: half of them."""
    return len(cell.weight_ih) // 2


def make_recurrent(config: ModelConfig, d_in: int, widths: Sequence[int], side: str, **more: Any) -> Recurrent:
    """Return recurrent layers of the configured cell on one side of a model, with the configured connections.

    `more` are further arguments of `Recurrent`."""
    s = config.table(RecurrentSettings)
    both = more.get("bidirectional", False)
    below = more.get("first", 1) - 1
    n_both = (s.bidirectional_layers or len(widths)) if both else 0
    outs = [(2 if i < n_both else 1) * width for i, width in enumerate(widths)]
    return Recurrent(
        config.cell,
        d_in,
        widths,
        bidirectional_layers=s.bidirectional_layers if both else 0,
        dropout=s.hidden_dropout,
        weight_dropout=s.weight_dropout,
        variational=s.variational,
        norm=s.norm,
        settings=cell_settings(config),
        residual=s.residual,
        fast_forward=s.fast_forward,
        feedforwards=make_feedforwards(config, outs[:-1], side, below),
        **more,
    )


def scan(cell: Cell, weight_hh: Tensor, x: Tensor, state: CellState, real: Tensor | None) -> tuple[Tensor, CellState]:
    """Run a cell over all time steps, x (B, T, C) -> (B, T, H), and return the final state."""
    x = x.transpose(0, 1)  # (T, B, C)
    # h has the precision of matrix products; c is a running sum, to which bf16 could not add small numbers.
    state = (state[0].to(x.dtype), *(c.to(torch.promote_types(c.dtype, torch.float32)) for c in state[1:]))
    learns = torch.is_grad_enabled() and weight_hh.requires_grad
    step = cell if learns else cell.forward  # calling the module would run code that was compiled for training
    factors: list[CellState] = []
    offsets: Iterable[Tensor | None] = (
        DeferredWeightGrad.apply(weight_hh, cell, factors, x).unbind() if learns else repeat(None)
    )
    masks: Iterable[Tensor | None] = repeat(None) if real is None else real.T[..., None].contiguous().unbind()
    weight_hh, outs = weight_hh.detach().to(x.dtype), []
    projected = cell.project(x)
    if x.is_meta:  # all steps cost the same
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
    """Computes the gradient of weight_hh as one matmul after the time loop, instead of one per step.

    The result is zeros (T, B, rows of weight_hh), which a scan adds to its products with the detached weight_hh. The
    gradient of these zeros is that of the products; multiplied with the inputs of the products, which the scan appends to
    `factors`, it is the gradient of weight_hh."""

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
    """Copies weights into one flat tensor, first matrices and then biases, and returns views of it.

    This is the layout of cuDNN's flattened parameters; cuDNN would otherwise copy them with a warning in every call."""

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


# ---- cost counting on the meta device -----------------------------------------------------------------------------------

_repetitions = [1]


def repetition_count() -> int:
    """Return how many runs the code that runs now stands for."""
    return _repetitions[-1]


@contextmanager
def counted_as(n: int) -> Iterator[None]:
    """Count everything inside the `with` block n times."""
    _repetitions.append(n * _repetitions[-1])
    try:
        yield
    finally:
        _repetitions.pop()
