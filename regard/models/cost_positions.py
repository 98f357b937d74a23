"""What position schemes multiply. The usual count of a model's FLOPs, that of models/cost.py, leaves it aside."""

from __future__ import annotations

from regard.config import ModelConfig
from regard.models.parameters import RECURRENT, architecture, sides


def position_flops(config: ModelConfig, batch: int, s: int, t: int) -> dict[str, int]:
    """Of a forward pass, by place: vectors of distances times queries, and what a network or a projection makes of them."""
    found: dict[str, int] = {}
    for side, n, _ in sides(config) if architecture(config) not in RECURRENT else ():
        block = block_flops(config, config.positions_at(side), batch, s if side == "encoder" else t)
        found |= {f"{side}.{i}.{name}": flops for i in range(n) for name, flops in block.items()}
    return found


def block_flops(config: ModelConfig, name: str, batch: int, n: int) -> dict[str, int]:
    """In one block, by sublayer: "positions" where the scheme's own numbers are multiplied, else those of "self"."""
    h, c, queries = config.n_heads, config.d_model, config.n_heads * config.d_head
    times = batch * n * 2 * queries  # all queries with one vector
    if name == "shaw":
        return {"positions": 2 * times * (2 * config.value("shaw.clip") + 1)}  # scores, and values
    if name == "cope":
        return {"positions": times * (config.value("cope.positions") or config.max_len)}
    if name == "fire":  # a network 1 -> width -> H, asked once for all rows
        return {"positions": n * n * 2 * config.value("fire.width") * (1 + h)}
    if name != "disentangled":
        return {}
    rows = 2 * (config.value("disentangled.buckets") or config.value("disentangled.reach"))
    projected = rows * 2 * c * (queries + config.n_kv_heads * config.d_head)  # with the layer's own matrices, or others
    crossed = 2 * times * rows  # queries with positions, and positions with keys
    if config.value("disentangled.buckets"):
        return {"self": crossed + projected}
    return {"self": crossed, "positions": projected}
