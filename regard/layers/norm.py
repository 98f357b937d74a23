"""Normalization layers: LayerNorm and RMSNorm."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.residual_norm import add_norm


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a LayerNorm, gamma (x - mean) / sqrt(var + eps) + beta, or an RMSNorm, gamma x / sqrt(mean(x^2) + eps)."""
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def normalize(x: Tensor, norm: nn.Module) -> Tensor:
    """Return norm(x) of one token per row, (N, C), in the precision of x; nn.Identity means no norm."""
    return x if isinstance(norm, nn.Identity) else add_norm(x, None, norm, 0.0)[1]
