"""Mixtures of experts: feed-forward layers of which every token uses only a few, chosen by a router.

y = sum over the chosen experts i of g_i E_i(x). The three forms differ in how g is made and in what keeps the experts busy:

| name          | paper               | chosen     | g                                         | auxiliary losses       |
|---------------|---------------------|------------|-------------------------------------------|------------------------|
| noisy-experts | Shazeer et al. 2017 | top k of H | softmax of the chosen H, which have noise | importance, load       |
| switch        | Fedus et al. 2021   | top 1      | its probability; some tokens are dropped  | balance, router z-loss |
| mixtral       | Jiang et al. 2024   | top k      | probabilities, divided by their sum       | balance                |

The weights of all experts are stacked, `inner` (E, F, C) and `outer` (E, C, F), without biases. Tokens are sorted by expert,
so that the tokens of an expert are neighbouring rows, and each matrix of all experts is one grouped product
(kernels/grouped_linear.py); decoding on a GPU multiplies all experts where tokens are few (kernels/expert_step.py). Every
size follows from the number of tokens alone, and on a GPU nothing is read by the host, so a step can be captured in a CUDA
graph.

The router works in fp32. Neither it nor the experts are quantized on a CPU: layers/quantization.py has int8 for linear
layers alone, and a decoding step reads only a few of the experts.

Padding is sent to no expert, its output is 0, and it counts in no loss. The losses are means over the tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.device import without_autocast, working_dtype
from regard.errors import RegardError
from regard.kernels.expert_step import can_multiply_all, expert_step, top_k_gates
from regard.kernels.grouped_linear import TILE, grouped_linear
from regard.kernels.linear_activation import ACTIVATIONS
from regard.kernels.operators import operator
from regard.kernels.weight_layout import gate_block, split_gates
from regard.layers.context import Context, apply_step, has_hooks
from regard.layers.part import FeedForward, Place

# ---- sorting tokens by expert --------------------------------------------------------------------------------------------


class Dispatch(NamedTuple):
    """The places of the k assignments of each of M tokens among P rows that are sorted by expert."""

    row: Tensor  # (M, k), the row of each assignment; P where it is dropped
    slot: Tensor  # (P,), the assignment m * k + j in each row; M * k in rows that fill up a group or belong to none
    ends: Tensor  # (E,) int32, the row after the last one of each expert
    counts: Tensor  # (E,), the number of tokens of each expert


def count_rows(assignments: int, experts: int, align: int) -> int:
    """Return a number of rows that is enough whichever experts are chosen."""
    return assignments + (experts * align if align > 1 else 0)


# An operator of its own, which torch.compile leaves as it is: the kernels that it would make of a sort take it a minute.
@operator("regard::sort_by_expert")
def sort_by_expert(chosen: Tensor, experts: int, align: int, least: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the assignments `chosen` (M, k) by expert, and those of an expert by token; the number `experts` means dropped.

    Each expert has a multiple of `align` rows, and at least `least`. Returns the fields of a `Dispatch`."""
    m, k = chosen.shape
    flat, total = chosen.flatten(), count_rows(m * k, experts, align)
    in_order, slots = torch.sort(flat.to(torch.int32), stable=True)
    numbers = torch.arange(experts + 1, device=chosen.device, dtype=torch.int32)
    starts = torch.searchsorted(in_order, numbers)  # (E + 1,), without the rows that fill up groups
    counts = starts.diff()
    ends = (counts.clamp(min=least) + (align - 1)).div(align, rounding_mode="floor").mul(align).cumsum(0)
    begins = F.pad(ends, (1, 0))  # (E + 1,)
    expert = in_order.long()
    place = begins[expert] + torch.arange(m * k, device=chosen.device) - starts[expert]
    place = torch.where(expert < experts, place, total)  # (M * k,)
    row = torch.empty_like(place).scatter_(0, slots, place).view(m, k)
    slot = torch.full((total + 1,), m * k, device=chosen.device).scatter_(0, place, slots)[:total]
    return row, slot.clone(), ends.to(torch.int32), counts


@sort_by_expert.register_fake
def _(chosen: Tensor, experts: int, align: int, least: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = count_rows(chosen.numel(), experts, align)
    sizes = (chosen.shape, (rows,), (experts,), (experts,))
    row, slot, ends, counts = (chosen.new_empty(size, dtype=torch.long) for size in sizes)
    return row, slot, ends.to(torch.int32), counts


class GatherTokens(torch.autograd.Function):
    """Copies tokens (M, C) to their rows (P, C); other rows are 0. Forward and backward are gathers, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        k = row.shape[1]
        token = slot.clamp(max=row.numel() - 1) // k
        return torch.where((slot < row.numel())[:, None], x[token], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return pick_rows(grad, row).sum(1), None, None


class CombineExperts(torch.autograd.Function):
    """Returns sum over j of weight[m, j] y[row[m, j]] for each token m, (P, C) -> (M, C); dropped assignments add 0."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight, row, slot)
        total = (pick_rows(y, row) * weight[..., None]).sum(1)
        # Not `.to` alone: in fp32 its result is `total` itself, and torch 2.11 loses the gradient of such a result where
        # the function is compiled (pytorch issue 180642).
        return total if total.dtype == y.dtype else total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weight, row, slot = ctx.saved_tensors
        at = slot.clamp(max=row.numel() - 1)
        grad_y = grad[at // row.shape[1]] * weight.flatten()[at][:, None]
        grad_y = torch.where((slot < row.numel())[:, None], grad_y, 0).to(y.dtype)
        grad_weight = (pick_rows(y, row).to(weight.dtype) * grad[:, None]).sum(-1)
        return grad_y, grad_weight.to(weight.dtype), None, None


def pick_rows(y: Tensor, row: Tensor) -> Tensor:
    """Return the rows of y (P, C) at `row` (M, k), (M, k, C); 0 for row P."""
    return torch.where((row < len(y))[..., None], y[row.clamp(max=len(y) - 1)], 0)


# ---- the layer -----------------------------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """The experts of M tokens, their weights, and the auxiliary loss."""

    chosen: Tensor  # (M, k); E = dropped
    weight: Tensor  # (M, k)
    loss: Tensor  # ()


class Experts(FeedForward):
    """Base class of mixtures of experts. A subclass chooses experts and their weights in `route`."""

    auxiliary = True
    renormalizes: ClassVar[bool] = (
        True  # without noise, weights are the probabilities of the chosen divided by their sum
    )
    drops_tokens: bool = False  # outside of training, an expert takes only so many tokens of a text
    drops_in_training: bool = False
    observed: ClassVar[dict[str, str]] = {"experts": "gates"}
    full_precision: ClassVar[tuple[str, ...]] = ("router",)
    load: Tensor
    no_loss: Tensor

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.experts, self.top_k = settings.experts, self.experts_per_token(settings)
        self.activation = config.activation
        self.router = nn.Parameter(torch.empty(self.experts, config.d_model))
        self.inner = nn.Parameter(torch.empty(self.experts, (1 + self.gated) * config.d_ff, config.d_model))
        self.outer = nn.Parameter(torch.empty(self.experts, config.d_model, config.d_ff))
        self.dropout = nn.Dropout(config.ff_dropout)
        self.gates = nn.Identity()  # receives the weights of all experts, for observers
        # Tokens by expert, and those that were dropped, since the trainer last read them (`expert_loads`).
        self.register_buffer("load", torch.zeros(self.experts + 1), persistent=False)
        self.register_buffer("no_loss", torch.zeros(()), persistent=False)  # of a decoding step

    @classmethod
    def experts_per_token(cls, settings: Any) -> int:
        return settings.top_k

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if cls.experts_per_token(settings) > settings.experts:
            raise RegardError(
                f"model.{cls.name}.top_k {settings.top_k} is more than model.{cls.name}.experts {settings.experts}: "
                f"a token can use each expert once"
            )

    def init_weights(self) -> None:
        """Draw the router, whose first probabilities are nearly equal; the matrices of an expert start as in `dense`."""
        nn.init.normal_(self.router, std=0.02)
        self.load.zero_()
        self.no_loss.zero_()

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        width = self.outer.shape[2]
        block = gate_block(width)
        inner = (width // block, [block] * 2) if self.gated else (1, [width])
        return {"inner": inner, "outer": (1, [self.outer.shape[1]])}

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Send every token to its experts, (..., C) -> (..., C), and return the auxiliary loss with the result."""
        flat, real = x.flatten(0, -2), ctx.real.flatten()  # (M, C), (M,)
        with without_autocast(x.device):
            routing = self.route(flat.to(torch.promote_types(x.dtype, torch.float32)), real, ctx)
            chosen = torch.where(real[:, None], routing.chosen, self.experts)
        flat = flat.to(working_dtype(x))
        # Compiled by torch 2.11, experts in fp32 gave wrong results on an H200, so they run eagerly in a compiled block.
        eager = x.is_cuda and flat.dtype == torch.float32 and torch.compiler.is_compiling()
        run = run_experts_eagerly if eager else Experts.run_experts
        y, counts = run(self, flat, chosen, routing.weight)
        if ctx.apply is not apply_step:
            self.gates(self.all_gates(chosen, routing.weight).unflatten(0, x.shape[:-1]))
        if self.training:
            with torch.no_grad():
                self.load += torch.cat([counts, real.sum(0, keepdim=True) * self.top_k - counts.sum(0, keepdim=True)])
        return y.view_as(x), routing.loss

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> tuple[Tensor, Tensor]:
        """Send the tokens of prompts to their experts, (B, T, C) -> (B, T, C); a few tokens on a GPU by fused kernels."""
        rows = x.flatten(0, -2)
        if self.drops_tokens or has_hooks(self.gates) or not self.can_multiply_all(rows):
            return self(x, ctx)
        return self.multiply_all(rows, ctx.real.flatten()).view_as(x), self.no_loss

    def step(self, x: Tensor, ctx: Context, kept: Any) -> tuple[Tensor, Tensor]:
        """Send one more token of each row to its experts, (N, C) -> (N, C); on a GPU by fused kernels."""
        return (self.multiply_all(x), self.no_loss) if self.can_multiply_all(x) else self(x, ctx)

    def can_multiply_all(self, x: Tensor) -> bool:
        """Return whether fused kernels that multiply the tokens x (M, C) with all experts are faster."""
        plain = not (self.training or has_hooks(self))
        return plain and can_multiply_all(x, self.experts, self.top_k, self.inner[0].numel() + self.outer[0].numel())

    def multiply_all(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Return what the experts of the tokens x (M, C) give, 0 where `real` (M,) is false: all experts are multiplied."""
        gates = top_k_gates(x, self.router, self.top_k, self.renormalizes)
        if real is not None:
            gates = gates * real[:, None]
        inner, outer = self.inner.to(x.dtype), self.outer.to(x.dtype)
        return expert_step(x, gates, inner, outer, self.activation, self.gated)

    def route(self, x: Tensor, real: Tensor, ctx: Context) -> Routing:
        """Choose the experts of the tokens x (M, C), in fp32 at least, of which `real` (M,) are no padding."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits (M, E)."""
        return F.linear(x, self.router.to(x.dtype))

    def all_gates(self, chosen: Tensor, weight: Tensor) -> Tensor:
        """Return the weights of all experts, (M, E), 0 for those that are not chosen."""
        return (one_hot(chosen, self.experts) * weight[..., None]).sum(1)

    def run_experts(self, x: Tensor, chosen: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the chosen experts' outputs times their weights, (M, C) -> (M, C), and the tokens of each
        expert, (E,)."""
        inner, outer = self.inner.to(x.dtype), self.outer.to(x.dtype)
        if x.is_meta:  # shapes alone: any order will do
            counts = chosen.new_empty(self.experts)
            y = self.expert(x[:, None].expand(-1, self.top_k, -1).flatten(0, 1), inner, outer, counts)
            return (y.unflatten(0, chosen.shape) * weight[..., None]).sum(1).to(x.dtype), counts
        align, least = (TILE, TILE if torch.is_grad_enabled() else 0) if x.is_cuda else (1, 0)
        plan = Dispatch(*sort_by_expert(chosen, self.experts, align, least))
        y = self.expert(GatherTokens.apply(x, plan.row, plan.slot), inner, outer, plan.ends)
        return CombineExperts.apply(y, weight, plan.row, plan.slot), plan.counts

    def expert(self, x: Tensor, inner: Tensor, outer: Tensor, ends: Tensor) -> Tensor:
        """Return E_i(x) for rows x (P, C) that are sorted by expert, (P, C); the inner width is F."""
        hidden = grouped_linear(x, inner, ends)  # (P, F), gated (P, 2F)
        if self.gated:
            gate, value = split_gates(hidden)
            hidden = (ACTIVATIONS[self.activation](gate) * value).flatten(-2)
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return grouped_linear(self.dropout(hidden), outer, ends)


run_experts_eagerly = _disable_dynamo(Experts.run_experts)  # torch.compiler.disable would load the compiler now


def one_hot(chosen: Tensor, classes: int) -> Tensor:
    """Return chosen (M, k) as (M, k, classes) of zeros and ones; a number beyond the classes gives zeros."""
    return (chosen[..., None] == torch.arange(classes, device=chosen.device)).float()


def expert_loads(model: nn.Module) -> list[Tensor]:
    """Return the loads (E + 1,) of all mixtures of experts of a model: the buffers themselves, which the caller sets to 0.

    A load is how many tokens each expert had in training since then, and how many were dropped."""
    return [part.load for part in model.modules() if isinstance(part, Experts)]


def limited_layers(model: nn.Module) -> list[bool]:
    """Return whether each mixture of experts, in the order of `expert_loads`, drops tokens over a capacity in training."""
    return [part.drops_in_training for part in model.modules() if isinstance(part, Experts)]


def summarize_loads(loads: Sequence[Tensor], limited: Sequence[bool]) -> dict[str, Any]:
    """Return the metrics of the loads of all layers: the busiest and the idlest expert, 1 = as many tokens as the mean of
    its layer, the busiest of each layer, and the share of dropped tokens in the layers that are `limited`."""
    found = [load.double().tolist() for load in loads]
    means = [max(sum(tokens) / len(tokens), 1e-9) for *tokens, _ in found]
    busiest = [max(tokens) / mean for (*tokens, _), mean in zip(found, means, strict=True)]
    idlest = [min(tokens) / mean for (*tokens, _), mean in zip(found, means, strict=True)]
    return {
        "expert_load_max": max(busiest),
        "expert_load_min": min(idlest),
        "expert_load_by_layer": [round(x, 4) for x in busiest],
        "dropped_tokens": sum(row[-1] for row in found)
        / max(1.0, sum(sum(row) for row, drops in zip(found, limited, strict=True) if drops)),
    }


def mean_over(x: Tensor, real: Tensor) -> Tensor:
    """Return the mean of x (M, ...) over the tokens that are no padding."""
    mask = real.view(-1, *[1] * (x.dim() - 1))
    return torch.where(mask, x, 0).sum(0) / real.sum().clamp(min=1)


# ---- Shazeer et al. 2017 -------------------------------------------------------------------------------------------------


@register("noisy-experts")
class NoisyExperts(Experts):
    """A mixture of experts with noisy top-k gating and losses on importance and load (Shazeer et al. 2017)."""

    @dataclass(frozen=True)
    class Settings:
        experts: int = setting(8, "number of experts", least=2, most=1 << 15)
        top_k: int = setting(2, "experts that a token uses", least=1, most=1 << 15)
        importance: float = setting(0.01, "weight of CV^2 of the sums of gate values by expert")
        load: float = setting(0.01, "weight of CV^2 of the expected numbers of tokens by expert")

    random = True
    full_precision = ("router", "noise")

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.importance_weight, self.load_weight = settings.importance, settings.load
        self.noise = nn.Parameter(torch.empty(self.experts, config.d_model))
        self.init_weights()

    def init_weights(self) -> None:
        """Set both matrices of the gate to 0, so that noise alone chooses at first; the others start as in `dense`."""
        super().init_weights()
        nn.init.zeros_(self.router)
        nn.init.zeros_(self.noise)

    def route(self, x: Tensor, real: Tensor, ctx: Context) -> Routing:
        clean = self.logits(x)
        if not self.training:
            top, chosen = clean.topk(self.top_k)
            weight = top.softmax(-1)
            load = torch.where(real[:, None], one_hot(chosen, self.experts).sum(1), 0).sum(0)
        else:
            deviation = F.softplus(F.linear(x, self.noise.to(x.dtype)))
            chosen, weight, chance = noisy_top_k(clean, deviation, torch.randn_like(clean), self.top_k)
            load = torch.where(real[:, None], chance, 0).sum(0)
        importance = torch.where(real[:, None], self.all_gates(chosen, weight), 0).sum(0)
        loss = self.importance_weight * cv_squared(importance) + self.load_weight * cv_squared(load)
        return Routing(chosen, weight, loss)


def noisy_top_k(clean: Tensor, deviation: Tensor, noise: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top k of H = clean + noise * deviation, the softmax of these, and P(x, i), the chance that expert i is
    among the top k if its noise alone is drawn anew: (M, E) each -> (M, k), (M, k), (M, E).

    P(x, i) = Phi((clean_i - t_i) / deviation_i), where t_i is the k-th largest of the other values of H."""
    h = clean + noise * deviation
    experts = h.shape[1]
    top, order = h.topk(min(k + 1, experts))
    chosen, weight = order[:, :k], top[:, :k].softmax(-1)
    if k == experts:
        return chosen, weight, torch.ones_like(h)
    inside = one_hot(chosen, experts).sum(1) > 0
    threshold = torch.where(inside, top[:, k:], top[:, k - 1 : k])
    return chosen, weight, torch.special.ndtr((clean - threshold) / deviation.clamp(min=1e-6))


def cv_squared(x: Tensor) -> Tensor:
    """Return the square of the coefficient of variation of x (E,), its variance divided by its mean squared."""
    return x.var(correction=0) / (x.mean() ** 2 + 1e-10)


# ---- Fedus et al. 2021 ---------------------------------------------------------------------------------------------------


@register("switch")
class Switch(Experts):
    """A mixture of experts of which each token uses one, with a capacity for each expert (Switch Transformer).

    Capacity is counted in each text: in a row, and in packed rows in each document. Of the tokens of a text that choose an
    expert, the first ones are taken; the others get 0, so that the residual connection passes them on.

    A share of a text depends on its length, which a decoder does not know while it writes: outside of training, causal
    layers drop nothing by `eval_capacity_factor`, so that a text has the same probabilities token by token and at once.
    A decoding step reads one token of each text, and never drops it."""

    @dataclass(frozen=True)
    class Settings:
        experts: int = setting(8, "number of experts", least=2, most=1 << 15)
        capacity_factor: float = setting(
            1.25, "training: an expert takes at most this many times its even share of a text; 0 = no limit"
        )
        eval_capacity_factor: float = setting(
            2.0, "the same outside of training, in encoders; decoders have no limit then; 0 = no limit"
        )
        capacity: int = setting(0, "an expert takes at most this many tokens of a text; 0 = by the factors")
        balance: float = setting(0.01, "weight of the loss that keeps the experts' shares even")
        z_loss: float = setting(0.001, "weight of the router z-loss, which keeps the router's logits small")
        jitter: float = setting(0.01, "training: the router's inputs are multiplied by 1 +- this, at random", below=1)

    renormalizes: ClassVar[bool] = False

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        given = 0.0 if place.causal else settings.eval_capacity_factor, settings.capacity_factor
        self.factors = tuple(capacity_ratio(factor, self.experts) for factor in given)
        self.capacity, self.jitter = settings.capacity, settings.jitter
        self.balance, self.z_loss = settings.balance, settings.z_loss
        self.drops_tokens, self.drops_in_training = (bool(self.capacity or factor) for factor in given)
        self.random = settings.jitter > 0
        self.reads_pieces = not self.drops_tokens  # capacity is counted in whole texts
        self.init_weights()

    @classmethod
    def experts_per_token(cls, settings: Any) -> int:
        return 1

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        usual = cls.Settings()
        for name in ("capacity_factor", "eval_capacity_factor") if settings.capacity else ():
            if getattr(settings, name) not in (0, getattr(usual, name)):
                raise RegardError(f"model.switch.capacity is the limit, and model.switch.{name} another: leave one out")

    def route(self, x: Tensor, real: Tensor, ctx: Context) -> Routing:
        if self.training and self.jitter:
            x = x * (1 + self.jitter * (2 * torch.rand_like(x) - 1))
        logits = self.logits(x)
        probabilities = logits.softmax(-1)
        weight, chosen = probabilities.max(-1, keepdim=True)
        z_loss = mean_over(logits.logsumexp(-1).square(), real)
        loss = self.balance * balance_loss(probabilities, chosen, real) + self.z_loss * z_loss
        above, below = self.factors[self.training]
        if ctx.apply is not apply_step and (self.capacity or above):
            number, length = count_in_texts(chosen.view(ctx.positions.shape), self.experts, ctx.positions)
            below *= self.experts
            capacity = self.capacity or (length * above + below - 1) // below  # rounded up
            chosen = torch.where((number < capacity).view_as(chosen), chosen, self.experts)
        return Routing(chosen, weight, loss)


def capacity_ratio(factor: float, experts: int) -> tuple[int, int]:
    """Return a capacity factor as a fraction, 1.1 as (11, 10), and 0 as (0, 1).

    Its numbers are small enough that their products with lengths are exact in 64 bits: a factor of as many as there are
    experts is no limit, so that larger ones need not be told from it, and millionths make no difference."""
    ratio = Fraction(str(min(factor, experts))).limit_denominator(1_000_000)
    return (max(ratio, Fraction(1, 1_000_000)) if factor else ratio).as_integer_ratio()


def count_in_texts(chosen: Tensor, experts: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many earlier tokens of the same text have the same expert, and how many tokens the text has.

    chosen, positions: (B, T), and so are both results. A text begins at position 0; padding has position -1."""
    t = positions.shape[1]
    index = torch.arange(t, device=positions.device)
    real = positions >= 0
    start = torch.where(real, index - positions, index).clamp(0, t - 1)  # where a token's text begins
    taken = (one_hot(chosen, experts) * real[..., None]).int()  # (B, T, E)
    before = taken.cumsum(1) - taken
    at_start = before.gather(1, start[..., None].expand_as(before))
    number = (before - at_start).gather(2, chosen[..., None])[..., 0]
    length = torch.zeros_like(start).scatter_add(1, start, real.to(start.dtype)).gather(1, start)
    return number, length


def balance_loss(probabilities: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
    """Return E * sum over i of f_i P_i: f_i is the mean number of times that a token chooses expert i, P_i its mean
    probability. It is k where all experts are chosen equally often, and grows if likely experts are chosen more often.

    probabilities: (M, E), chosen: (M, k), real: (M,)."""
    experts = probabilities.shape[1]
    share = mean_over(one_hot(chosen, experts).sum(1).to(probabilities.dtype), real)
    return experts * (share * mean_over(probabilities, real)).sum()


# ---- Jiang et al. 2024 ---------------------------------------------------------------------------------------------------


@register("mixtral")
class Mixtral(Experts):
    """A mixture of gated experts, whose probabilities are divided by the sum of the chosen ones (Mixtral)."""

    @dataclass(frozen=True)
    class Settings:
        experts: int = setting(8, "number of experts", least=2, most=1 << 15)
        top_k: int = setting(2, "experts that a token uses", least=1, most=1 << 15)
        balance: float = setting(0.01, "weight of the loss that keeps the experts' shares even")

    gated: ClassVar[bool] = True

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.balance = settings.balance
        self.init_weights()

    def route(self, x: Tensor, real: Tensor, ctx: Context) -> Routing:
        probabilities = self.logits(x).softmax(-1)
        top, chosen = probabilities.topk(self.top_k)
        loss = self.balance * balance_loss(probabilities, chosen, real)
        return Routing(chosen, top / top.sum(-1, keepdim=True), loss)
