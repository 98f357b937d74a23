"""Where a recurrent decoder looks: before each step it compares its state with every annotation of the source, and reads
their mean, so weighted.

    e_ij = score(s_{i-1}, h_j),   a_i = softmax(e_i),   c_i = sum_j a_ij h_j

| score    | e_ij                     | published by             |
|----------|--------------------------|--------------------------|
| additive | v . tanh(W s + U h_j)    | Bahdanau et al., 2015    |
| dot      | s . h_j                  | Luong et al., 2015       |
| general  | s . U h_j                | Luong et al., 2015       |

A score is two products and a comparison: `queries` of states, `keys` of annotations, which are made once a sentence, and
itself of queries (..., T, A) and keys (..., S, A), which gives (..., T, S).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings
from regard.config.registry import find, register
from regard.errors import RegardError
from regard.layers.attention_kernels import Plan
from regard.layers.cells import Cell, CellState, cell_settings
from regard.layers.part import Part, settings_of
from regard.layers.recurrent import scan
from regard.layers.stack import to_working_precision

MASKED_SCORE = -1e9  # its exponential is 0; finite, so that a row of padding alone is no NaN


class Score(Part):
    """How a state is compared with annotations: what `queries` makes of one with what `keys` makes of the others."""

    kind = "score"

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        """Other than parts of a block, scores have sizes of their own: those of states and of annotations."""
        nn.Module.__init__(self)

    def queries(self, states: Tensor) -> Tensor:
        return states

    def keys(self, annotations: Tensor) -> Tensor:
        return annotations

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores (..., T, S) of queries (..., T, A) and keys (..., S, A)."""
        return q @ k.transpose(-2, -1)


@register("additive")
class Additive(Score):
    """A small network as wide as the state, v . tanh(W s + U h_j) (Bahdanau et al. 2015)."""

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        super().__init__(settings, d_state, d_annotation)
        self.W = nn.Linear(d_state, d_state, bias=False)
        self.U = nn.Linear(d_annotation, d_state, bias=False)
        self.v = nn.Parameter(torch.empty(d_state))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.v, std=len(self.v) ** -0.5)

    def queries(self, states: Tensor) -> Tensor:
        return self.W(states)

    def keys(self, annotations: Tensor) -> Tensor:
        return self.U(annotations)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        hidden = (q[..., :, None, :] + k[..., None, :, :]).tanh()
        if hidden.is_meta:  # counted as the product that it is
            return hidden @ self.v
        # a product and a sum, not a matrix product: compiled, all of it is one kernel, and (..., T, S, A) is never there
        return (hidden * self.v).sum(-1)


@register("dot")
class Dot(Score):
    """The product s . h_j, with nothing to learn, so states and annotations must be of one width (Luong et al. 2015)."""

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        super().__init__(settings, d_state, d_annotation)
        if d_state != d_annotation:
            raise RegardError(
                f"model.score dot compares vectors of one width, but those of the decoder have {d_state} numbers and those "
                f"of the encoder {d_annotation}: choose model.score general, or model.recurrent.bidirectional false"
            )


@register("general")
class General(Score):
    """The product s . U h_j, with a matrix between the two (Luong et al. 2015)."""

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        super().__init__(settings, d_state, d_annotation)
        self.U = nn.Linear(d_annotation, d_state, bias=False)

    def keys(self, annotations: Tensor) -> Tensor:
        return self.U(annotations)


class SourceAnnotations(NamedTuple):
    """A source that was read, one row a sentence."""

    keys: Tensor  # (B, S, A)
    entering: Tensor  # (B, S, G*H) what each annotation brings to the gates of the cell, or the annotations themselves
    padding: Tensor  # (B, S) True where there is no token


class Alignment(nn.Module):
    def __init__(self, config: ModelConfig, d_state: int, d_annotation: int) -> None:
        super().__init__()
        kind: type[Score] = find("score", config.score)
        self.score = kind(settings_of(kind, config), d_state, d_annotation)

    def forward(self, states: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
        """The weights (B, K, S) of states (B*K, H): K of each sentence, one after the other."""
        q = self.score.queries(states).view(len(keys), -1, keys.shape[-1])  # (B, K, A)
        return self.score(q, keys).masked_fill(padding[:, None], MASKED_SCORE).softmax(-1)

    @property
    def is_observed(self) -> bool:
        """Whether somebody listens: only then is there anything to tell."""
        return "attend" in self.__dict__

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
        """`look.record` listens here. Steps look one by one, since each needs the one before; it is told of all of them at
        once, as of queries (B, 1, T, A), keys (B, 1, S, A) and values (B, 1, S, M)."""


# ---- steps ------------------------------------------------------------------------------------------------------------


class AttentionCell(nn.Module):
    """A cell that looks before it moves: s_i = cell(s_{i-1}, [y_{i-1}; c_i]), and c_i is found with s_{i-1}.

    `forward` is one step, to be compiled. Of the product with [y; c], the part of y is made for all steps before the first,
    and that of c is a mean of the annotations' own products: W c_i = sum_j a_ij (W h_j). So no step has it to do. Cells that
    add their input itself, or normalise it, must see [y; c] as it is.
    """

    def __init__(self, config: ModelConfig, d_in: int, d_hidden: int, d_annotation: int) -> None:
        super().__init__()
        self.cross = Alignment(config, d_hidden, d_annotation)
        kind, s = find("cell", config.cell), config.table(RecurrentSettings)
        self.cell: Cell = kind(cell_settings(config), d_in + d_annotation, d_hidden, s.norm)
        self.d_in, self.weight_dropout, self.projects_early = (
            d_in,
            s.weight_dropout,
            not (self.cell.adds_input or s.norm),
        )
        self.d_annotation = d_annotation
        self.d_keys = self.cross.score.keys(torch.empty(0, d_annotation)).shape[-1]

    def forward(
        self, now: Tensor, weight_hh: Tensor, offset: Tensor | None, source: SourceAnnotations, *state: Tensor
    ) -> tuple[tuple[CellState, CellState], Tensor]:
        """What the cell gives, and the weights (B, K, S)."""
        keys, entering, padding = source
        weights = self.cross(state[0], keys, padding)
        mean = (weights.to(entering.dtype) @ entering).flatten(0, 1)
        x = now + mean if self.projects_early else self.cell.project(torch.cat([now, mean], -1))
        return self.cell(x, weight_hh, offset, None, *state), weights

    def widths(self) -> tuple[int, int, int]:
        """Return the widths of keys, of what enters the cell, and of annotations."""
        entering = self.cell.weight_ih.shape[0] if self.projects_early else self.d_annotation
        return self.d_keys, entering, self.d_annotation

    def prepare_source(self, annotations: Tensor, padding: Tensor) -> SourceAnnotations:
        entering = F.linear(annotations, self.cell.weight_ih[:, self.d_in :]) if self.projects_early else annotations
        return SourceAnnotations(self.cross.score.keys(annotations), entering, padding)

    def project_input(self, y: Tensor) -> Tensor:
        """What depends on y alone."""
        if not self.projects_early:
            return y
        x = F.linear(y, self.cell.weight_ih[:, : self.d_in])
        return x + self.cell.bias.to(x.dtype)

    def run_steps(self, y: Tensor, source: SourceAnnotations, state: CellState) -> tuple[Tensor, CellState, Tensor]:
        """All steps: y (B, T, C) -> states (B, T, H), the last of them as a whole, and the weights (B, T, S).

        Or one step of the K hypotheses that each sentence has: y (B*K, 1, C), and weights (B, K, S)."""
        bound = BoundAttentionCell(self, source)
        weight_hh = F.dropout(self.cell.weight_hh, self.weight_dropout, self.training)
        states, state = scan(cast(Cell, bound), weight_hh, to_working_precision(y), state, None)
        weights = torch.cat(bound.weights, 1)  # on the meta device those of one step
        return states, state, weights.expand(-1, states.shape[0] * states.shape[1] // len(weights), -1)


class BoundAttentionCell:
    """The step of one source in the place of a cell, as a scan calls it; it keeps the weights."""

    def __init__(self, step: AttentionCell, source: SourceAnnotations) -> None:
        self.step, self.source = step, source
        self.split_products, self.d_hidden = step.cell.split_products, step.cell.d_hidden
        self.weights: list[Tensor] = []
        self.detached_weights: list[Tensor] = []  # the same, without their history

    def project(self, y: Tensor) -> Tensor:
        x, entering = self.step.project_input(y), self.source.entering
        if self.step.projects_early and entering.requires_grad:
            self.source = self.source._replace(entering=entering.detach())
            return DeferredMean.apply(x, entering, self.detached_weights)
        return x

    def __call__(self, *args: Any) -> tuple[CellState, CellState]:
        return self._step(self.step, *args)

    def forward(self, *args: Any) -> tuple[CellState, CellState]:
        return self._step(self.step.forward, *args)

    def _step(
        self, step: Any, now: Tensor, weight_hh: Tensor, offset: Tensor | None, real: None, *state: Tensor
    ) -> Any:
        result, weights = step(now, weight_hh, offset, self.source, *state)
        self.weights.append(weights)
        self.detached_weights.append(weights.detach())
        return result


class DeferredMean(torch.autograd.Function):
    """Each step adds a weighted mean of `entering` to its x, as if nothing were learned by that; the gradient comes from
    here, for all steps in one product, with the weights that they leave in `given`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entering: Tensor, detached_weights: list[Tensor]) -> Tensor:
        ctx.detached_weights, ctx.dtype = detached_weights, entering.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, Tensor, None]:
        """grad_x (T, N, G*H)"""
        weights = torch.cat(ctx.detached_weights, 1).to(grad_x.dtype)  # (B, T or K, S)
        grad_mean = grad_x.transpose(0, 1).reshape(*weights.shape[:2], -1)
        return grad_x, (weights.mT @ grad_mean).to(ctx.dtype), None
