"""Attention of a recurrent decoder (Bahdanau, Luong): before each step, its state is compared with every source annotation.

    e_ij = score(s_{i-1}, h_j),   a_i = softmax(e_i),   c_i = sum_j a_ij h_j

| score    | e_ij                     | published by             |
|----------|--------------------------|--------------------------|
| additive | v . tanh(W s + U h_j)    | Bahdanau et al., 2015    |
| dot      | s . h_j                  | Luong et al., 2015       |
| general  | s . U h_j                | Luong et al., 2015       |

Annotations are the encoder's outputs h_j, and the context c_i is their weighted mean. A score computes `queries` from
states and `keys` from annotations, the keys once per sentence; called with queries (..., T, A) and keys (..., S, A) it
returns the scores (..., T, S).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings
from regard.config.registry import find, register
from regard.errors import RegardError
from regard.layers.attention_kernels import AttentionPlan
from regard.layers.cells import Cell, CellState, cell_settings
from regard.layers.part import Part, settings_of
from regard.layers.recurrent import scan
from regard.layers.stack import to_working_precision

MASKED_SCORE = -1e9  # its exponential is 0; finite, so that softmax over padding alone is not NaN


class AttentionScore(Part):
    """An attention score, which compares a decoder state with annotations; by default a dot product."""

    kind = "attention_score"

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        """Make the parameters. Unlike parts of a block, a score gets its sizes as arguments."""
        nn.Module.__init__(self)

    def queries(self, states: Tensor) -> Tensor:
        """Return the queries (..., A) of decoder states (..., H)."""
        return states

    def keys(self, annotations: Tensor) -> Tensor:
        """Return the keys (..., A) of annotations (..., M)."""
        return annotations

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (..., T, S) of queries (..., T, A) and keys (..., S, A)."""
        return q @ k.transpose(-2, -1)


@register("additive")
class AdditiveScore(AttentionScore):
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
        """Return v . tanh(q + k), (..., T, A) and (..., S, A) -> (..., T, S)."""
        hidden = (q[..., :, None, :] + k[..., None, :, :]).tanh()
        if hidden.is_meta:  # a matrix product, which the cost counter counts
            return hidden @ self.v
        # Not a matrix product: this compiles into one kernel that never stores (..., T, S, A).
        return (hidden * self.v).sum(-1)


@register("dot")
class DotScore(AttentionScore):
    """The product s . h_j, with nothing to learn, so states and annotations must be of one width (Luong et al. 2015)."""

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        super().__init__(settings, d_state, d_annotation)
        if d_state != d_annotation:
            raise RegardError(
                f"model.attention_score dot compares vectors of one width, but those of the decoder have {d_state} numbers "
                f"and those of the encoder {d_annotation}: choose model.attention_score general, or "
                f"model.recurrent.bidirectional false"
            )


@register("general")
class GeneralScore(AttentionScore):
    """The product s . U h_j, with a matrix between the two (Luong et al. 2015)."""

    def __init__(self, settings: Any, d_state: int, d_annotation: int) -> None:
        super().__init__(settings, d_state, d_annotation)
        self.U = nn.Linear(d_annotation, d_state, bias=False)

    def keys(self, annotations: Tensor) -> Tensor:
        return self.U(annotations)


class SourceAnnotations(NamedTuple):
    """What attention needs of an encoded source, one row per sentence."""

    keys: Tensor  # (B, S, A)
    projected: Tensor  # (B, S, G*H), annotations projected to the gates of the cell, or the annotations themselves
    padding: Tensor  # (B, S), True at padding


class Alignment(nn.Module):
    """The attention weights of decoder states over a source."""

    def __init__(self, config: ModelConfig, d_state: int, d_annotation: int) -> None:
        super().__init__()
        kind: type[AttentionScore] = find("attention_score", config.attention_score)
        self.score = kind(settings_of(kind, config), d_state, d_annotation)

    def forward(self, states: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
        """Return the weights (B, K, S) of states (B*K, H), K consecutive ones for each sentence."""
        q = self.score.queries(states).view(len(keys), -1, keys.shape[-1])  # (B, K, A)
        return self.score(q, keys).masked_fill(padding[:, None], MASKED_SCORE).softmax(-1)

    @property
    def is_observed(self) -> bool:
        """Whether a recorder has replaced `attend`; otherwise models skip the call."""
        return "attend" in self.__dict__

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Do nothing; `look.record` replaces this method.

        Attention is computed step by step, since each step needs the state before it. A recorder receives all steps at
        once, as queries (B, 1, T, A), keys (B, 1, S, A) and values (B, 1, S, M)."""


# ---- cells ------------------------------------------------------------------------------------------------------------


class AttentionCell(nn.Module):
    """A recurrent cell with attention: s_i = cell(s_{i-1}, [y_{i-1}; c_i]), where c_i attends with the query s_{i-1}.

    `forward` is one step, which training compiles. The input projection W [y; c] needs no product in a step: the part of y
    is computed for all steps before the first, and that of c is a mean of projected annotations, W c_i = sum_j a_ij (W h_j).
    Cells that add their input itself or normalize it need [y; c], so they project it in each step.
    """

    def __init__(self, config: ModelConfig, d_in: int, d_hidden: int, d_annotation: int) -> None:
        super().__init__()
        self.cross = Alignment(config, d_hidden, d_annotation)
        kind, s = find("cell", config.cell), config.table(RecurrentSettings)
        self.cell: Cell = kind(cell_settings(config), d_in + d_annotation, d_hidden, s.norm)
        self.d_in, self.d_annotation, self.weight_dropout = d_in, d_annotation, s.weight_dropout
        self.projects_early = not (self.cell.adds_input or s.norm)
        self.d_keys = self.cross.score.keys(torch.empty(0, d_annotation)).shape[-1]

    def forward(
        self, now: Tensor, weight_hh: Tensor, offset: Tensor | None, source: SourceAnnotations, *state: Tensor
    ) -> tuple[tuple[CellState, CellState], Tensor]:
        """Run one step; return the result of the cell, and the attention weights (B, K, S)."""
        keys, projected, padding = source
        weights = self.cross(state[0], keys, padding)
        mean = (weights.to(projected.dtype) @ projected).flatten(0, 1)
        x = now + mean if self.projects_early else self.cell.project(torch.cat([now, mean], -1))
        return self.cell(x, weight_hh, offset, None, *state), weights

    def widths(self) -> tuple[int, int, int]:
        """Return the widths of keys, of projected annotations, and of annotations."""
        projected = self.cell.weight_ih.shape[0] if self.projects_early else self.d_annotation
        return self.d_keys, projected, self.d_annotation

    def prepare_source(self, annotations: Tensor, padding: Tensor) -> SourceAnnotations:
        """Return the keys and projections of annotations (B, S, M), computed once per sentence."""
        projected = F.linear(annotations, self.cell.weight_ih[:, self.d_in :]) if self.projects_early else annotations
        return SourceAnnotations(self.cross.score.keys(annotations), projected, padding)

    def project_input(self, y: Tensor) -> Tensor:
        """Return the input projection of y alone, with bias; y itself if steps project [y; c]."""
        if not self.projects_early:
            return y
        x = F.linear(y, self.cell.weight_ih[:, : self.d_in])
        return x + self.cell.bias.to(x.dtype)

    def run_steps(self, y: Tensor, source: SourceAnnotations, state: CellState) -> tuple[Tensor, CellState, Tensor]:
        """Run all steps, y (B, T, C) -> outputs (B, T, H), the final state, and the attention weights (B, T, S).

        It also runs one step of the K hypotheses of each sentence: then y is (B*K, 1, C) and the weights are (B, K, S)."""
        bound = BoundAttentionCell(self, source)
        weight_hh = F.dropout(self.cell.weight_hh, self.weight_dropout, self.training)
        states, state = scan(cast(Cell, bound), weight_hh, to_working_precision(y), state, None)
        weights = torch.cat(bound.weights, 1)  # on the meta device, of a single step
        return states, state, weights.expand(-1, states.shape[0] * states.shape[1] // len(weights), -1)


class BoundAttentionCell:
    """An AttentionCell bound to one source, with the interface of a cell that `scan` expects; it collects the weights."""

    def __init__(self, step: AttentionCell, source: SourceAnnotations) -> None:
        self.step, self.source = step, source
        self.split_products, self.d_hidden = step.cell.split_products, step.cell.d_hidden
        self.weights: list[Tensor] = []
        self.detached_weights: list[Tensor] = []  # for DeferredMean

    def project(self, y: Tensor) -> Tensor:
        x, projected = self.step.project_input(y), self.source.projected
        if self.step.projects_early and projected.requires_grad:
            self.source = self.source._replace(projected=projected.detach())
            return DeferredMean.apply(x, projected, self.detached_weights)
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
    """Computes the gradient of projected annotations as one matmul after the time loop, instead of one per step.

    Each step adds a weighted mean of the detached projections to its input x. The result here is x itself, whose gradient,
    multiplied with the weights that the steps append to `detached_weights`, is that of the projections."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projected: Tensor, detached_weights: list[Tensor]) -> Tensor:
        ctx.detached_weights, ctx.dtype = detached_weights, projected.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of the projections from grad_x (T, N, G*H)."""
        weights = torch.cat(ctx.detached_weights, 1).to(grad_x.dtype)  # (B, T or K, S)
        grad_mean = grad_x.transpose(0, 1).reshape(*weights.shape[:2], -1)
        return grad_x, (weights.mT @ grad_mean).to(ctx.dtype), None
