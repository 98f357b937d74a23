"""How many parameters a model has, by formula; models/counted.py counts them on its tensors. Sizes must be resolved."""

from __future__ import annotations

from collections.abc import Iterator

from regard.config import ModelConfig
from regard.layers.schemes import scheme_at
from regard.models.architectures import PRESETS
from regard.models.counted import Part, merged
from regard.models.parameters_recurrent import recurrent_parts


def architecture(config: ModelConfig) -> str:
    return config.architecture or PRESETS[config.preset]["architecture"]


def blocks(config: ModelConfig) -> tuple[int, int, int]:
    """Encoder blocks, decoder blocks, and how many of those cross."""
    n_encoder, n_decoder = config.n_encoder_layers, config.n_decoder_layers
    both = {"transformer": (n_encoder, n_decoder, n_decoder), "seq2seq": (n_encoder, n_decoder, 0)}
    one = {"gpt": (0, n_decoder, 0), "rnn": (0, n_decoder, 0)}
    return (both | one).get(architecture(config), (n_encoder, 0, 0))


RECURRENT = ("rnn", "seq2seq")


def parts(config: ModelConfig) -> list[Part]:
    """Every parameter of a model, by formula."""
    if architecture(config) in RECURRENT:
        return merged(part for _, part in recurrent_parts(config))
    return merged(part for group in (ends, middle, vectors, positions) for part in group(config))


def ends(config: ModelConfig) -> Iterator[Part]:
    """The matrices below and above the blocks."""
    c, kind = config.d_model, architecture(config)
    if kind == "vit":
        yield Part("patches", (c, config.image_channels * config.patch_size**2), 1)
        yield Part("unembedding", (config.n_classes, c), 1)
    elif kind == "bert":
        yield Part("embedding", (config.source_vocab, c), 1)
        yield Part("token types", (config.token_types, c), min(config.token_types, 1))
        yield Part("pooler", (c, c), 1)
        yield Part("head", (c, c), 1)
        yield Part("unembedding", (config.source_vocab, c), 1, True)
    else:
        if kind == "transformer" and config.tie in ("none", "decoder"):
            yield Part("embedding", (config.source_vocab, c), 1)
        yield Part("embedding", (config.target_vocab, c), 1)
        yield Part("unembedding", (config.target_vocab, c), 1, config.tie in ("decoder", "all"))
    if config.answer != "none":
        yield Part("answers", (config.n_classes, c), 1)


def middle(config: ModelConfig) -> Iterator[Part]:
    """The matrices of the blocks."""
    c, f, d = config.d_model, config.d_ff, config.d_head
    n_encoder, n_decoder, n_cross = blocks(config)
    n, convolved = n_encoder + n_decoder, config.mixer == "convolution"
    yield Part("convolution", (2 * c, config.kernel * c), n * convolved)
    for where, layers in (("", n * (not convolved)), ("cross ", n_cross)):
        yield Part(f"{where}query", (d, c), layers * config.n_heads)
        yield Part(f"{where}key", (d, c), layers * config.n_kv_heads)
        yield Part(f"{where}value", (d, c), layers * config.n_kv_heads)
        yield Part(f"{where}output", (c, config.n_heads * d), layers)
    if f:
        yield Part("gate", (f, c), n * config.gated)
        yield Part("up", (f, c), n)
        yield Part("down", (c, f), n)


def vectors(config: ModelConfig) -> Iterator[Part]:
    """Norms and biases. The biases of the ends are always there; those of the blocks are a setting."""
    c, kind = config.d_model, architecture(config)
    n_encoder, n_decoder, n_cross = blocks(config)
    n, stacks = n_encoder + n_decoder, 2 if kind == "transformer" else 1
    norms = (n if config.parallel else n + n_cross + n * (config.d_ff > 0)) + (kind == "bert")
    norms += stacks * ((config.norm == "pre") + (config.embedding_norm and kind != "vit"))
    yield Part("norm", (c,), norms * (2 if config.bias and config.norm_kind == "layer" else 1))
    if config.bias:
        yield from (Part("bias", part.shape[:1], part.number) for part in middle(config))
    if kind == "bert":
        yield Part("bias", (c,), 2)
        yield Part("bias", (config.source_vocab,), 1)
    if kind == "vit":
        yield Part("summary", (c,), 1)
        yield Part("bias", (c,), 1)
        yield Part("bias", (config.n_classes,), 1)
    if config.answer != "none":
        yield Part("bias", (config.n_classes,), 1)
    if config.head_bias and kind in ("gpt", "transformer"):
        yield Part("bias", (config.target_vocab,), 1)


def positions(config: ModelConfig) -> Iterator[Part]:
    """What the schemes learn, once a stack or once a block."""
    for place, layers in zip(("encoder", "decoder", "cross"), blocks(config), strict=True):
        name = scheme_at(config, place)
        for shape in scheme_shapes(config, name) if layers else ():
            yield Part("positions", shape, layers if name in ("shaw", "cope", "fire") else 1)
        if name == "disentangled" and not config.disentangled_buckets:  # its blocks share a table, not the projections
            width = (config.n_heads + config.n_kv_heads) * config.d_head
            yield Part("positions", (width, config.d_model), layers)
            yield Part("positions", (width,), layers)


def scheme_shapes(config: ModelConfig, name: str) -> list[tuple[int, ...]]:
    c, d, h, width = config.d_model, config.d_head, config.n_heads, config.fire_width
    buckets = config.disentangled_buckets
    learned: dict[str, list[tuple[int, ...]]] = {
        "linear": [(c,)] * 2,
        "learned": [(config.max_len, c)],
        "shaw": [(2 * config.shaw_clip + 1, d)] * 2,
        "t5": [(h, config.t5_buckets)],
        "kerple-log": [(h,)] * 2,
        "kerple-power": [(h,)] * 2,
        "fire": [(width, 1), (width,), (h, width), (h,), (), ()],
        "cope": [(config.cope_positions or config.max_len, d)],
        "disentangled": [(2 * (buckets or config.disentangled_reach), c), *([(c,)] * 2 if buckets else [])],
    }
    return learned.get(name, [])
