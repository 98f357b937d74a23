"""How many parameters a model has, by formula; models/counted.py counts them on its tensors. Sizes must be resolved.

Every parameter has a place, a dotted name as `look.record` has them: encoder.0.self, decoder.3.cross, head.
"""

from __future__ import annotations

from collections.abc import Iterator

from regard.config import ModelConfig
from regard.models.architectures import PRESETS
from regard.models.counted import OWN_SCHEMES, Part, Placed, merged, shared_embedding
from regard.models.parameters_recurrent import recurrent_parts


def architecture(config: ModelConfig) -> str:
    return config.architecture or PRESETS[config.preset]["architecture"]


def blocks(config: ModelConfig) -> tuple[int, int, int]:
    """Encoder blocks, decoder blocks, and how many of those cross."""
    n_encoder, n_decoder = config.n_encoder_layers, config.n_decoder_layers
    both = {"transformer": (n_encoder, n_decoder, n_decoder), "seq2seq": (n_encoder, n_decoder, 0)}
    one = {"gpt": (0, n_decoder, 0), "rnn": (0, n_decoder, 0)}
    return (both | one).get(architecture(config), (n_encoder, 0, 0))


def sides(config: ModelConfig) -> list[tuple[str, int, bool]]:
    """The stacks of a model: which, how many blocks, and whether they cross."""
    n_encoder, n_decoder, n_cross = blocks(config)
    return [side for side in (("encoder", n_encoder, False), ("decoder", n_decoder, n_cross > 0)) if side[1]]


RECURRENT = ("rnn", "seq2seq")


def parts(config: ModelConfig) -> list[Part]:
    """Every parameter of a model, by formula."""
    return merged(part for _, part in placed(config))


def placed(config: ModelConfig) -> Iterator[Placed]:
    """The same with their places, in the order in which a forward comes by."""
    if architecture(config) in RECURRENT:
        yield from ((place, part) for place, _, part in recurrent_parts(config))
        return
    for side, n, crosses in sides(config):
        yield from below(config, side)
        yield from ((f"{side}.positions", part) for part in shared_positions(config, side))
        block = [("positions", part) for part in own_positions(config, side)] + [*block_parts(config, crosses)]
        yield from ((f"{side}.{i}.{name}", part) for i in range(n) for name, part in block)
        if config.norm == "pre":
            yield f"{side}.norm", norm_part(config)
    yield from above(config)


def below(config: ModelConfig, side: str) -> Iterator[Placed]:
    """What a stack reads."""
    c, kind = config.d_model, architecture(config)
    if kind == "vit":
        yield (
            "patches",
            Part("patches", (c, config.value("vit.image_channels") * config.value("vit.patch_size") ** 2), 1),
        )
        yield "patches", Part("bias", (c,), 1)
        yield "summary", Part("summary", (c,), 1)
        return
    vocab = config.source_vocab if side == "encoder" else config.target_vocab
    again = side == "decoder" and shared_embedding(config)
    yield embedding_place(config, side), Part("embedding", (vocab, c), int(not again))
    if kind == "bert":
        yield "types", Part("token types", (config.token_types, c), min(config.token_types, 1))
    if config.embedding_norm:
        own = {"encoder": "source_norm", "decoder": "target_norm"}[side]
        yield (own if kind == "transformer" else "embedding_norm"), norm_part(config)


def embedding_place(config: ModelConfig, side: str) -> str:
    """Where what a stack reads is made."""
    kind = architecture(config)
    if kind == "transformer" and not shared_embedding(config):
        return {"encoder": "source_embedding", "decoder": "target_embedding"}[side]
    return "patches" if kind == "vit" else "embedding"


def above(config: ModelConfig) -> Iterator[Placed]:
    """What reads the last stack. Its biases are always there; those of the blocks are a setting."""
    c, kind = config.d_model, architecture(config)
    if kind == "vit":
        yield "head", Part("unembedding", (config.n_classes, c), 1)
        yield "head", Part("bias", (config.n_classes,), 1)
    elif kind == "bert":
        for place, name in (("pooler", "pooler"), ("head", "head")):
            yield place, Part(name, (c, c), 1)
            yield place, Part("bias", (c,), 1)
        yield "head", norm_part(config)
        yield "head", Part("unembedding", (config.source_vocab, c), 1, True)
        yield "head", Part("bias", (config.source_vocab,), 1)
    else:
        yield "head", Part("unembedding", (config.target_vocab, c), 1, config.tie in ("decoder", "all"))
        yield "head", Part("bias", (config.target_vocab,), int(config.head_bias))
    if config.answer != "none":
        yield "answers", Part("answers", (config.n_classes, c), 1)
        yield "answers", Part("bias", (config.n_classes,), 1)


def block_parts(config: ModelConfig, crosses: bool) -> Iterator[Placed]:
    """Of one block, by sublayer."""
    sublayers = {"self": convolution if "convolution" in config.mixer else attention}
    sublayers |= {"cross": cross_attention} if crosses else {}
    sublayers |= {"ff": feedforward} if config.d_ff else {}
    for name, matrices in sublayers.items():
        for part in matrices(config):
            yield name, part
            if config.bias:
                yield name, Part("bias", part.shape[:1], part.number)
        if not config.parallel:
            yield name, norm_part(config)
    if config.parallel:
        yield "norm", norm_part(config)


def norm_part(config: ModelConfig) -> Part:
    return Part("norm", (config.d_model,), 2 if config.bias and config.norm_kind == "layer" else 1)


def convolution(config: ModelConfig) -> Iterator[Part]:
    yield Part("convolution", (2 * config.d_model, config.value("convolution.kernel") * config.d_model), 1)


def attention(config: ModelConfig, where: str = "") -> Iterator[Part]:
    c, d = config.d_model, config.d_head
    yield Part(f"{where}query", (d, c), config.n_heads)
    yield Part(f"{where}key", (d, c), config.n_kv_heads)
    yield Part(f"{where}value", (d, c), config.n_kv_heads)
    yield Part(f"{where}output", (c, config.n_heads * d), 1)


def cross_attention(config: ModelConfig) -> Iterator[Part]:
    return attention(config, "cross ")


def feedforward(config: ModelConfig) -> Iterator[Part]:
    c, f = config.d_model, config.d_ff
    yield Part("gate", (f, c), int(config.feedforward == "gated"))
    yield Part("up", (f, c), 1)
    yield Part("down", (c, f), 1)


def shared_positions(config: ModelConfig, side: str) -> Iterator[Part]:
    """What the scheme of a stack learns once for all its blocks, and that of its cross-attention."""
    if config.positions_at(side) not in OWN_SCHEMES:
        yield from (Part("positions", shape, 1) for shape in scheme_shapes(config, side))
    if side == "decoder" and blocks(config)[2]:
        yield from (Part("positions", shape, 1) for shape in scheme_shapes(config, "cross"))


def own_positions(config: ModelConfig, side: str) -> Iterator[Part]:
    """What it learns in each block."""
    name, width = config.positions_at(side), (config.n_heads + config.n_kv_heads) * config.d_head
    if name in OWN_SCHEMES:
        yield from (Part("positions", shape, 1) for shape in scheme_shapes(config, side))
    if name == "disentangled" and not config.value("disentangled.buckets"):  # blocks share a table, not the projections
        yield Part("positions", (width, config.d_model), 1)
        yield Part("positions", (width,), 1)


def scheme_shapes(config: ModelConfig, place: str) -> list[tuple[int, ...]]:
    c, d, h, width = config.d_model, config.d_head, config.n_heads, config.value("fire.width")
    buckets = config.value("disentangled.buckets")
    learned: dict[str, list[tuple[int, ...]]] = {
        "linear": [(c,)] * 2,
        "learned": [(config.max_len, c)],
        "shaw": [(2 * config.value("shaw.clip") + 1, d)] * 2,
        "t5": [(h, config.value("t5.buckets"))],
        "kerple-log": [(h,)] * 2,
        "kerple-power": [(h,)] * 2,
        "fire": [(width, 1), (width,), (h, width), (h,), (), ()],
        "cope": [(config.value("cope.positions") or config.max_len, d)],
        "disentangled": [(2 * (buckets or config.value("disentangled.reach")), c), *([(c,)] * 2 if buckets else [])],
    }
    return learned.get(config.positions_at(place), [])
