"""Non-local means and the bilateral filter, run by the Transformer's attention layer.

A filter that weighs by exp(-|a_p - b_q|^2) is attention whose queries and keys are those features. The softmax over q of

    -|a_p - b_q|^2 = 2 a_p . b_q - |b_q|^2 - |a_p|^2

does not mind |a_p|^2, which is the same for every key. What is left is a product of vectors with one column more:

    query = (2 a_p, 1),    key = (b_q, -|b_q|^2),    value = I(q),    scale = 1

Nothing is learned, and the features are given: patches over h for non-local means, (position, value) over their sigmas
for the bilateral filter. The search window is a mask: who is within reach may be looked at. (What stands beyond the
border is a key too, reflected.) This is the definition and not for use: it has all scores of a picture at once, (H W) x
(keys). The filters proper give the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.filters.images import pad
from regard.filters.nonlocal_means import taps_of
from regard.layers.attention_stages import AttentionOutput, many_queries

# Tensors (B, C, H, W) in; a result of the same shape and the weights (B, H W, keys) out.


def nonlocal_means_by_attention(
    x: Tensor, h: float, patch: int, reach: int, patch_weights: str = "flat"
) -> AttentionOutput:
    """softmax(-|patch_p - patch_q|^2 / h^2) V"""
    taps = torch.tensor(taps_of(patch, patch_weights), dtype=x.dtype)
    share = (
        (torch.outer(taps, taps) / x.shape[1]).sqrt().flatten()
    )  # of each pixel in the distance, before it is squared
    wide = pad(x, reach + patch // 2, reach + patch // 2)
    patches = F.unfold(wide, patch).unflatten(1, (x.shape[1], -1)) * share[:, None] / h  # (B, C, patch^2, keys)
    return attend(patches.flatten(1, 2).mT, pad(x, reach, reach), reach)


def bilateral_by_attention(x: Tensor, sigma_color: float, sigma_spatial: float, window: int) -> AttentionOutput:
    """softmax(-|(p, I(p)) - (q, I(q))|^2 / 2), positions and values each in units of their sigma"""
    wide = pad(x, window // 2, window // 2)
    places = places_of(wide).to(x.dtype).expand(len(x), -1, -1) / (2**0.5 * sigma_spatial)  # (B, keys, 2)
    values = wide.flatten(2).mT / (2**0.5 * sigma_color)  # (B, keys, C)
    return attend(torch.cat([places, values], -1), wide, window // 2)


def attend(features: Tensor, wide: Tensor, reach: int) -> AttentionOutput:
    """Features (B, keys, D) of every pixel of wide (B, C, H + 2 reach, W + 2 reach); those not in its border ask."""
    inner = torch.zeros(wide.shape[-2:], dtype=torch.bool)
    inner[reach : wide.shape[-2] - reach, reach : wide.shape[-1] - reach] = True
    asking = inner.flatten()
    queries, keys = as_products(features[:, asking], features)
    places = places_of(wide)
    near = (places[asking][:, None] - places).abs().amax(-1) <= reach  # (queries, keys)
    values = wide.flatten(2).mT  # (B, keys, C)
    means, weights = many_queries(
        queries * queries.shape[-1] ** 0.5, keys, values, near
    )  # the layer divides by this root
    height, width = (n - 2 * reach for n in wide.shape[-2:])
    return means.mT.unflatten(2, (height, width)), weights


def as_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is -|a - b|^2 but for what is the same for all keys of a query."""
    ones = torch.ones_like(a[..., :1])
    return torch.cat([2 * a, ones], -1), torch.cat([b, -b.square().sum(-1, keepdim=True)], -1)


def places_of(x: Tensor) -> Tensor:
    """Rows and columns of all pixels, (H W, 2)"""
    return torch.cartesian_prod(*(torch.arange(n) for n in x.shape[-2:]))
