"""Non-local means and the bilateral filter, computed by the Transformer's attention layer.

A filter with weights exp(-|a_p - b_q|^2) is attention with the features a and b as queries and keys. In the softmax
over q of

    -|a_p - b_q|^2 = 2 a_p . b_q - |b_q|^2 - |a_p|^2

the term |a_p|^2 cancels, since it is the same for every key. What is left is a dot product of vectors with one more
component:

    query = (2 a_p, 1),    key = (b_q, -|b_q|^2),    value = I(q),    scale = 1

Nothing is learned. The features are patches divided by h for non-local means, and (position, value) divided by their
sigmas for the bilateral filter. The search window is the attention mask. Pixels of the reflected border are keys as
well. This is a definition to compare with, not for use: all scores of an image, (H W) x (keys), are in memory at once.
The modules of the filters give the same results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.filters.image_arrays import pad
from regard.filters.nonlocal_means import patch_taps
from regard.layers.attention_stages import AttentionOutput, many_queries

# Both filters take x (B, C, H, W), and return a result of the same shape and the attention weights (B, H W, keys).


def nonlocal_means_by_attention(
    x: Tensor, h: float, patch: int, reach: int, patch_weights: str = "flat"
) -> AttentionOutput:
    """Return non-local means as attention: softmax(-|patch_p - patch_q|^2 / h^2) V."""
    taps = torch.tensor(patch_taps(patch, patch_weights), dtype=x.dtype)
    share = (torch.outer(taps, taps) / x.shape[1]).sqrt().flatten()  # weight of each pixel of a patch, before squaring
    wide = pad(x, reach + patch // 2, reach + patch // 2)
    patches = F.unfold(wide, patch).unflatten(1, (x.shape[1], -1)) * share[:, None] / h  # (B, C, patch^2, keys)
    return attend_to_window(patches.flatten(1, 2).mT, pad(x, reach, reach), reach)


def bilateral_by_attention(x: Tensor, sigma_color: float, sigma_spatial: float, window: int) -> AttentionOutput:
    """Return the bilateral filter as attention: softmax(-|(p, I(p)) - (q, I(q))|^2 / 2) V.

    Positions p and values I(p) are divided by their sigmas.
    """
    wide = pad(x, window // 2, window // 2)
    coordinates = pixel_coordinates(wide).to(x.dtype).expand(len(x), -1, -1) / (2**0.5 * sigma_spatial)  # (B, keys, 2)
    values = wide.flatten(2).mT / (2**0.5 * sigma_color)  # (B, keys, C)
    return attend_to_window(torch.cat([coordinates, values], -1), wide, window // 2)


def attend_to_window(features: Tensor, wide: Tensor, reach: int) -> AttentionOutput:
    """Return the attention of every pixel of an image to the pixels at most `reach` rows and columns away.

    `wide` (B, C, H + 2 reach, W + 2 reach) is the image with its border, `features` (B, keys, D) belong to all its
    pixels.
    """
    inner = torch.zeros(wide.shape[-2:], dtype=torch.bool)
    inner[reach : wide.shape[-2] - reach, reach : wide.shape[-1] - reach] = True
    is_query = inner.flatten()
    queries, keys = dot_product_features(features[:, is_query], features)
    coordinates = pixel_coordinates(wide)
    near = (coordinates[is_query][:, None] - coordinates).abs().amax(-1) <= reach  # (queries, keys)
    values = wide.flatten(2).mT  # (B, keys, C)
    scale = queries.shape[-1] ** 0.5  # the layer divides by this root
    means, weights = many_queries(queries * scale, keys, values, near)
    height, width = (n - 2 * reach for n in wide.shape[-2:])
    return means.mT.unflatten(2, (height, width)), weights


def dot_product_features(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose dot product is -|a - b|^2, up to a constant per query; (..., D) -> (..., D + 1)."""
    ones = torch.ones_like(a[..., :1])
    return torch.cat([2 * a, ones], -1), torch.cat([b, -b.square().sum(-1, keepdim=True)], -1)


def pixel_coordinates(x: Tensor) -> Tensor:
    """Return the row and the column of every pixel of x (..., H, W): (H W, 2)."""
    return torch.cartesian_prod(*(torch.arange(n) for n in x.shape[-2:]))
