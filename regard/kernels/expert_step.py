"""Mixtures of experts in a decoding step on a GPU: every expert multiplies every row, and a weight of 0 removes the rest.

A step has few rows, so its time is that of reading weights and of launching kernels. The rows together choose nearly all
experts, whose weights are then read anyway. Sorting rows by expert would take a dozen small kernels to save products that
cost nothing. Here there are five: the gates, one product with the inner matrices of all experts, the activation times the
gates, a batched product with the outer matrices, and the sum over experts. A short prompt is read in the same way: the host
takes about a millisecond to launch what sorts its tokens, in which the GPU multiplies many of them with all experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear_activation import ACTIVATIONS
from regard.kernels.residual_norm import TRITON
from regard.kernels.weight_layout import gate_block, split_gates

MOST_ROWS = 256  # of a decoding step: more rows than that are limited by arithmetic
MOST_TOKENS, MOST_FLOPS = 4096, 3e11  # of a prompt, and of a layer with all experts: half a millisecond in bf16
MOST_EXPERTS = 64  # a program of the kernel holds the logits of all experts


def can_multiply_all(x: Tensor, experts: int, k: int, weights: int) -> bool:
    """Return whether a step or a prompt of rows x (N, C) is faster this way: the rows choose at least half of the experts or
    so, and are few for experts with so many `weights` each."""
    rows = x.shape[0]
    short = x.dtype != torch.float32 and rows <= MOST_TOKENS and 2 * rows * experts * weights <= MOST_FLOPS
    few = rows <= MOST_ROWS or short
    few = few and experts <= min(2 * k * rows, MOST_EXPERTS)
    return TRITON and x.is_cuda and x.dtype != torch.float64 and few and not torch.is_grad_enabled()


def expert_step(x: Tensor, gates: Tensor, inner: Tensor, outer: Tensor, activation: str, gated: bool) -> Tensor:
    """Return the sum of all experts' outputs times their gates, (N, C) -> (N, C).

    gates: (N, E), 0 for experts that are not chosen. inner: (E, F, C), gated (E, 2F, C). outer: (E, C, F)."""
    experts, _, f = outer.shape
    hidden = F.linear(x, inner.flatten(0, 1))  # (N, E * F), gated (N, E * 2F)
    hidden = weighted_activation(hidden, gates, f, activation, gated)
    each = torch.bmm(hidden.unflatten(1, (experts, f)).transpose(0, 1), outer.transpose(1, 2))  # (E, N, C)
    return sum_experts(each)


def sum_experts(each: Tensor) -> Tensor:
    """Return the sum of the outputs of all experts, (E, N, C) -> (N, C)."""
    if not each.is_cuda:
        return each.sum(0)
    from regard.kernels import expert_step_triton as kernels

    return kernels.run_sum(each)


def top_k_gates(x: Tensor, router: Tensor, k: int, renormalize: bool) -> Tensor:
    """Return the gates (N, E) of rows x (N, C), in fp32: the softmax of x router^T where it is largest, 0 elsewhere.

    `renormalize`: the gates of a row sum to 1."""
    if not x.is_cuda:
        logits = F.linear(x.float(), router.float())
        probabilities, chosen = logits.softmax(-1).topk(k)
        if renormalize:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, chosen, probabilities)
    from regard.kernels import expert_step_triton as kernels

    return kernels.run_gates(x.contiguous(), router, k, renormalize)


def weighted_activation(hidden: Tensor, gates: Tensor, f: int, activation: str, gated: bool) -> Tensor:
    """Return f(hidden) times the gate of each expert, (N, E * F), gated from (N, E * 2F), in the dtype of `hidden`."""
    if not hidden.is_cuda:
        if gated:
            blocks = hidden.unflatten(1, (-1, 2 * f))
            gate, value = split_gates(blocks)
            result = (ACTIVATIONS[activation](gate.float()) * value.float()).flatten(-2)
        else:
            result = ACTIVATIONS[activation](hidden.float()).unflatten(1, (-1, f))
        return (result * gates[..., None]).flatten(1).to(hidden.dtype)
    from regard.kernels import expert_step_triton as kernels

    return kernels.run_activation(hidden, gates, f, activation, gate_block(f) if gated else 0)
