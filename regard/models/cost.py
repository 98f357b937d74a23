"""What a model costs, by formula. A product of (m, k) and (k, n) is 2mkn FLOPs; the backward pass costs two forwards.

Attention is counted in full, S keys for each query, masked or not: the usual convention. What position schemes add is not.
"""

from __future__ import annotations

from regard.config import ModelConfig


def forward_flops(config: ModelConfig, batch: int, source_len: int, target_len: int) -> int:
    """One forward pass of the encoder-decoder over padded (batch, source_len) and (batch, target_len)."""
    c, f, s, t = config.d_model, config.d_ff, source_len, target_len
    queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head  # widths of all heads together
    matrices = (
        2 * c * queries + 2 * c * keys + (3 if config.gated else 2) * c * f
    )  # q and out, k and v; the feed-forward's
    encoder = s * (2 * matrices + 4 * s * queries)  # 4s: q k^T and the weighted sum of v
    cross = (
        t * (2 * 2 * c * queries + 4 * s * queries) + s * 2 * 2 * c * keys
    )  # q, out by the target; k, v by the memory
    decoder = t * (2 * matrices + 4 * t * queries) + cross
    head = t * 2 * c * config.target_vocab
    return batch * (config.n_encoder_layers * encoder + config.n_decoder_layers * decoder + head)


def training_flops(config: ModelConfig, batch: int, source_len: int, target_len: int) -> int:
    return 3 * forward_flops(config, batch, source_len, target_len)
