"""The presets: sizes and style of published models, one table for each architecture.

A preset has the form of a recipe's `[model]` table: parts are named, and their settings are nested tables. A preset that
gives sizes alone, such as gpt-small, has the default style.
"""

from __future__ import annotations

from typing import Any

Table = dict[str, dict[str, Any]]


def encoder(layers: int, d_model: int, n_heads: int, d_ff: int) -> dict[str, int]:
    return {"n_encoder_layers": layers, "d_model": d_model, "n_heads": n_heads, "d_ff": d_ff}


def decoder(layers: int, d_model: int, n_heads: int, d_ff: int) -> dict[str, int]:
    return {"n_decoder_layers": layers, "d_model": d_model, "n_heads": n_heads, "d_ff": d_ff}


def encoder_decoder(layers: int, d_model: int, n_heads: int, d_ff: int) -> dict[str, int]:
    return {**encoder(layers, d_model, n_heads, d_ff), "n_decoder_layers": layers}


DROPOUTS = {"dropout": 0.1, "attention_dropout": 0.1}
UNSCALED = {"scale_embeddings": False}

# ---- decoders ---------------------------------------------------------------------------------------------------------

GPT2 = {
    **UNSCALED,
    **DROPOUTS,
    "activation": "gelu-tanh",
    "positions": "learned",
    "target_vocab": 50257,
    "max_len": 1024,
}
LLAMA = {
    **UNSCALED,
    **{
        "norm_kind": "rms",
        "norm_eps": 1e-6,
        "bias": False,
        "activation": "silu",
        "feedforward": "gated",
        "tie": "none",
    },
    **{"positions": "rope", "target_vocab": 32000, "max_len": 2048, "dropout": 0.0},
}
LLAMA3 = {**LLAMA, "norm_eps": 1e-5, "rope": {"base": 500000.0}, "target_vocab": 128256, "max_len": 8192}
MIXTRAL = {
    **LLAMA,
    **{"feedforward": "mixtral", "norm_eps": 1e-5, "n_kv_heads": 8, "rope": {"base": 1e6}, "max_len": 32768},
}
PALM = {
    **UNSCALED,
    **{
        "parallel": True,
        "bias": False,
        "activation": "silu",
        "feedforward": "gated",
        "scale_logits": True,
        "positions": "rope",
    },
    **{"n_kv_heads": 1, "d_head": 256, "target_vocab": 256000, "max_len": 2048, "dropout": 0.0},
}
BLOOM = {
    **UNSCALED,
    **{"activation": "gelu-tanh", "positions": "alibi", "embedding_norm": True},
    **{"target_vocab": 250880, "max_len": 2048, "dropout": 0.0},
}

GPT: Table = {
    "gpt-tiny": decoder(4, 128, 4, 512),
    "gpt-small": decoder(6, 256, 4, 1024),
    "gpt-experts-tiny": {**decoder(4, 128, 4, 256), "feedforward": "mixtral", "activation": "silu"},
    "gpt-1": {**decoder(12, 768, 12, 3072), **GPT2, "norm": "post", "target_vocab": 40478, "max_len": 512},
    "gpt2": {**decoder(12, 768, 12, 3072), **GPT2},
    "gpt2-medium": {**decoder(24, 1024, 16, 4096), **GPT2},
    "gpt2-large": {**decoder(36, 1280, 20, 5120), **GPT2},
    "gpt2-xl": {**decoder(48, 1600, 25, 6400), **GPT2},
    "gpt3": {**decoder(96, 12288, 96, 49152), **GPT2, "max_len": 2048},
    "llama-7b": {**decoder(32, 4096, 32, 11008), **LLAMA},
    "llama-13b": {**decoder(40, 5120, 40, 13824), **LLAMA},
    "llama2-70b": {**decoder(80, 8192, 64, 28672), **LLAMA, "n_kv_heads": 8, "norm_eps": 1e-5, "max_len": 4096},
    "llama3-8b": {**decoder(32, 4096, 32, 14336), **LLAMA3, "n_kv_heads": 8},
    "mixtral-8x7b": {**decoder(32, 4096, 32, 14336), **MIXTRAL},
    "palm-8b": {**decoder(32, 4096, 16, 16384), **PALM},
    "palm-62b": {**decoder(64, 8192, 32, 32768), **PALM},
    "palm-540b": {**decoder(118, 18432, 48, 73728), **PALM},
    "bloom-560m": {**decoder(24, 1024, 16, 4096), **BLOOM},
    "bloom-7b1": {**decoder(30, 4096, 32, 16384), **BLOOM},
    "bloom": {**decoder(70, 14336, 112, 57344), **BLOOM},
}

# ---- encoders ---------------------------------------------------------------------------------------------------------

BERT_STYLE = {
    **UNSCALED,
    **DROPOUTS,
    **{"norm": "post", "norm_eps": 1e-12, "activation": "gelu", "embedding_norm": True},
    **{"positions": "learned", "token_types": 2, "source_vocab": 30522, "max_len": 512},
}
ROBERTA = {**BERT_STYLE, "norm_eps": 1e-5, "token_types": 1, "source_vocab": 50265}
DEBERTA = {**BERT_STYLE, "norm_eps": 1e-7, "token_types": 0, "encoder_positions": "disentangled"}

BERT: Table = {
    "bert-tiny": encoder(2, 128, 2, 512),
    "bert-base": {**encoder(12, 768, 12, 3072), **BERT_STYLE},
    "bert-large": {**encoder(24, 1024, 16, 4096), **BERT_STYLE},
    "roberta-base": {**encoder(12, 768, 12, 3072), **ROBERTA},
    "roberta-large": {**encoder(24, 1024, 16, 4096), **ROBERTA},
    "roformer-base": {
        **encoder(12, 768, 12, 3072), **BERT_STYLE, "positions": "rope", "source_vocab": 50000, "max_len": 1536,
    },
    "deberta-base": {**encoder(12, 768, 12, 3072), **DEBERTA, "disentangled": {"buckets": 0}, "source_vocab": 50265},
    "deberta-v3-base": {**encoder(12, 768, 12, 3072), **DEBERTA, "source_vocab": 128100},
}  # fmt: skip

VIT_STYLE = {"norm_eps": 1e-12, "activation": "gelu", "positions": "learned", "n_classes": 1000}

VIT: Table = {  # max_len: the patches of 224 x 224 pixels and the class token
    "vit-tiny": encoder(6, 192, 3, 768),
    "vit-base-16": {
        **encoder(12, 768, 12, 3072),
        **VIT_STYLE,
        "vit": {"patch_size": 16, "image_channels": 3},
        "max_len": 197,
    },
    "vit-large-16": {
        **encoder(24, 1024, 16, 4096),
        **VIT_STYLE,
        "vit": {"patch_size": 16, "image_channels": 3},
        "max_len": 197,
    },
    "vit-huge-14": {
        **encoder(32, 1280, 16, 5120),
        **VIT_STYLE,
        "vit": {"patch_size": 14, "image_channels": 3},
        "max_len": 257,
    },
}

# ---- encoder-decoders -------------------------------------------------------------------------------------------------


def joint_vocabulary(size: int) -> dict[str, int]:
    """Return the sizes of one vocabulary for source and target."""
    return {"source_vocab": size, "target_vocab": size}


T5 = {
    **UNSCALED,
    **DROPOUTS,
    **joint_vocabulary(32128),
    **{"norm_kind": "rms", "norm_eps": 1e-6, "bias": False, "positions": "t5", "scale_logits": True, "d_head": 64},
    **{"ff_dropout": 0.1, "max_len": 512},
}
T5_1_1 = {**T5, "activation": "gelu-tanh", "feedforward": "gated", "scale_logits": False, "tie": "inputs"}
SWITCH = {  # every second block has experts; their capacity is a number of tokens, as in transformers
    **T5,
    "feedforward": ("dense", "switch"),
    "switch": {"capacity_factor": 0.0, "eval_capacity_factor": 0.0, "capacity": 64, "balance": 0.001},
}
BART = {
    **UNSCALED,
    **DROPOUTS,
    **joint_vocabulary(50265),
    **{"norm": "post", "activation": "gelu", "embedding_norm": True, "positions": "learned", "ff_dropout": 0.1},
}

TRANSFORMER: Table = {
    "transformer-tiny": encoder_decoder(4, 128, 4, 256),
    "transformer-experts-small": {**encoder_decoder(4, 128, 4, 256), "feedforward": "noisy-experts"},
    "transformer-small": encoder_decoder(6, 256, 4, 1024),
    "transformer-base": encoder_decoder(6, 512, 8, 2048),
    "transformer-big": encoder_decoder(6, 1024, 16, 4096),
    "t5-small": {**encoder_decoder(6, 512, 8, 2048), **T5},
    "t5-base": {**encoder_decoder(12, 768, 12, 3072), **T5},
    "t5-large": {**encoder_decoder(24, 1024, 16, 4096), **T5},
    "t5-v1.1-small": {**encoder_decoder(8, 512, 6, 1024), **T5_1_1},
    "t5-v1.1-base": {**encoder_decoder(12, 768, 12, 2048), **T5_1_1},
    "switch-base-8": {**encoder_decoder(12, 768, 12, 3072), **SWITCH},
    "bart-base": {**encoder_decoder(6, 768, 12, 3072), **BART},
    "bart-large": {**encoder_decoder(12, 1024, 16, 4096), **BART},
    "marian": {
        **encoder_decoder(6, 512, 8, 2048),
        **joint_vocabulary(58101),
        "norm": "post",
        "activation": "silu",
        "max_len": 512,
    },
}

# ---- convolutions: blocks of a transformer or gpt whose mixer is a convolution -------------------------------------------

CONVOLUTION = {"mixer": "convolution", "positions": "learned"}
TRANSFORMER |= {
    "convs2s-small": {**encoder_decoder(6, 256, 4, 0), **CONVOLUTION},
    "convs2s": {**encoder_decoder(20, 512, 1, 0), **CONVOLUTION},
    "bytenet-small": {**encoder_decoder(5, 256, 4, 0), **CONVOLUTION, "convolution": {"dilations": (1, 2, 4, 8, 16)}},
}
GPT |= {
    "conv-lm": {
        **decoder(8, 256, 1, 0),
        **CONVOLUTION,
        "positions": "none",
        "convolution": {"dilations": (1, 2, 4, 8, 16, 32)},
    },
}

# ---- time-invariant state spaces: blocks of a gpt whose mixer is a long convolution --------------------------------------

# The size of S4's language model of WikiText-103, which had a larger vocabulary.
S4_STYLE = {"positions": "none", "activation": "gelu", "target_vocab": 50257, "max_len": 1 << 20, **UNSCALED}
GPT |= {
    "s4-tiny": {**decoder(4, 128, 1, 512), "mixer": "s4", "positions": "none"},
    "s4d-tiny": {**decoder(4, 128, 1, 512), "mixer": "s4d", "positions": "none"},
    "s4-wikitext103": {**decoder(16, 1024, 1, 4096), "mixer": "s4", **S4_STYLE},
    "s4d-wikitext103": {**decoder(16, 1024, 1, 4096), "mixer": "s4d", **S4_STYLE},
}

# ---- linear recurrences: blocks of a gpt whose mixer has a state of fixed size ------------------------------------------

GATED: dict[str, Any] = {
    **UNSCALED,
    **{"norm_kind": "rms", "bias": False, "activation": "silu", "feedforward": "gated"},
    **{"positions": "none", "max_len": 2048, "dropout": 0.0},
}
GLA = {**GATED, "mixer": "gla"}
BASED = {**GATED, "mixer": ("short-convolution", "based", "attention"), "positions": "rope"}
# The mixers of HazyResearch/based. Its window_size of 128 means 64 earlier tokens; with the token itself they are 65. Its
# convolutions have biases in their projections, which `bias = false` leaves out here.
BASED_360M = {
    **BASED,
    "mixer": ("short-convolution", "based", "attention", "short-convolution", "short-convolution") * 5
    + ("short-convolution",) * 2,
    **{"short-convolution": {"expand": 2}, "attention": {"window": 65}},
}
MAMBA2: dict[str, Any] = {
    **UNSCALED,
    **{"mixer": "mamba2", "norm_kind": "rms", "bias": False, "positions": "none", "max_len": 2048, "dropout": 0.0},
}
GPT |= {
    "linear-attention-tiny": {**decoder(4, 128, 4, 512), "mixer": "linear-attention", "positions": "learned"},
    "gla-tiny": {**decoder(4, 128, 4, 256), **GLA},
    "gla-340m": {**decoder(24, 1024, 4, 2816), **GLA, "target_vocab": 32000},
    "gla-1.3b": {**decoder(24, 2048, 4, 5632), **GLA, "target_vocab": 32000},
    "based-tiny": {**decoder(3, 128, 4, 256), **BASED, "attention": {"window": 16}},
    "based-360m": {**decoder(27, 1024, 16, 2048), **BASED_360M, "target_vocab": 50277},
    "mamba2-tiny": {**decoder(4, 128, 1, 0), **MAMBA2, "mamba2": {"d_state": 32, "d_head": 32}},
    "mamba2-130m": {**decoder(24, 768, 1, 0), **MAMBA2, "target_vocab": 50288},
    "mamba2-370m": {**decoder(48, 1024, 1, 0), **MAMBA2, "target_vocab": 50288},
    "mamba2-780m": {**decoder(48, 1536, 1, 0), **MAMBA2, "target_vocab": 50288},
    "mamba2-1.3b": {**decoder(48, 2048, 1, 0), **MAMBA2, "target_vocab": 50288},
    "mamba2-2.7b": {**decoder(64, 2560, 1, 0), **MAMBA2, "target_vocab": 50288},
}

# ---- state spaces and RWKV: blocks of a gpt whose memory of a text has a fixed size ---------------------------------------

MAMBA = {
    **UNSCALED,
    **{"mixer": "mamba", "positions": "none", "norm_kind": "rms", "norm_eps": 1e-5, "bias": False, "dropout": 0.0},
    "max_len": 2048,
}
RWKV = {
    **UNSCALED,
    **{"mixer": "rwkv", "feedforward": "rwkv-channel-mix", "positions": "none", "embedding_norm": True, "tie": "none"},
    **{"max_len": 1024, "dropout": 0.0},
}
GPT |= {
    "mamba-tiny": {**decoder(4, 128, 1, 0), **MAMBA},
    "mamba-130m": {**decoder(24, 768, 1, 0), **MAMBA, "target_vocab": 50280},
    "mamba-370m": {**decoder(48, 1024, 1, 0), **MAMBA, "target_vocab": 50280},
    "mamba-790m": {**decoder(48, 1536, 1, 0), **MAMBA, "target_vocab": 50280},
    "mamba-1.4b": {**decoder(48, 2048, 1, 0), **MAMBA, "target_vocab": 50280},
    "mamba-2.8b": {**decoder(64, 2560, 1, 0), **MAMBA, "target_vocab": 50280},
    "rwkv-tiny": {**decoder(4, 128, 1, 512), **RWKV},
    "rwkv-169m": {**decoder(12, 768, 1, 3072), **RWKV, "target_vocab": 50277},
    "rwkv-430m": {**decoder(24, 1024, 1, 4096), **RWKV, "target_vocab": 50277},
    "rwkv-1b5": {**decoder(24, 2048, 1, 8192), **RWKV, "target_vocab": 50277},
    "rwkv-3b": {**decoder(32, 2560, 1, 10240), **RWKV, "target_vocab": 50277},
    "rwkv-7b": {**decoder(32, 4096, 1, 16384), **RWKV, "target_vocab": 50277},
}

# ---- recurrent --------------------------------------------------------------------------------------------------------


def recurrent(layers: int, d_model: int, d_hidden: int, cell: str = "lstm", **more: Any) -> dict[str, Any]:
    """Return the sizes of a recurrent decoder; `more` are further settings of `[model.recurrent]`."""
    table = {"d_hidden": d_hidden, **more}
    return {"n_decoder_layers": layers, "d_model": d_model, "cell": cell, "recurrent": table, **UNSCALED}


def recurrent_pair(layers: int, d_model: int, d_hidden: int, cell: str, **more: Any) -> dict[str, Any]:
    """Return the sizes of a recurrent encoder-decoder with as many layers on both sides."""
    return {"n_encoder_layers": layers, **recurrent(layers, d_model, d_hidden, cell, **more)}


AWD = {"dropout": 0.65, "head_bias": True, "target_vocab": 33278, "max_len": 4096}
AWD_DROPOUTS: dict[str, Any] = {
    "hidden_dropout": 0.2,
    "output_dropout": 0.4,
    "weight_dropout": 0.5,
    "word_dropout": 0.1,
}
REVERSED = {"attention_score": "none", "seq2seq": {"reverse_source": True}}
GNMT: dict[str, Any] = {"bidirectional": True, "bidirectional_layers": 1, "residual": 3}
DEEP_ATT: dict[str, Any] = {"interleaved": True, "fast_forward": True}

RNN: Table = {
    "rnn-tiny": {**recurrent(1, 32, 32, "rnn"), "dropout": 0.0},
    "lstm-small": recurrent(2, 256, 256),
    "lstm-char": recurrent(3, 512, 512),
    "gru-small": recurrent(2, 256, 256, "gru"),
    "awd-lstm": {**recurrent(3, 400, 1150, **AWD_DROPOUTS), **AWD},
}
SEQ2SEQ: Table = {
    "sutskever-small": {**recurrent_pair(2, 256, 512, "lstm"), **REVERSED},
    "sutskever": {**recurrent_pair(4, 1000, 1000, "lstm"), **REVERSED, "tie": "none"},
    "rnnenc-small": {**recurrent_pair(1, 256, 512, "gru"), "attention_score": "constant"},
    "rnnenc": {**recurrent_pair(1, 620, 1000, "gru"), "attention_score": "constant", "tie": "none"},
    "rnnsearch-small": {**recurrent_pair(1, 256, 512, "gru", bidirectional=True)},
    "rnnsearch": {**recurrent_pair(1, 620, 1000, "gru", bidirectional=True), "tie": "none"},
    # Embeddings of unit size: every LSTM makes small numbers smaller, and after four the decoder has nothing to align with.
    "gnmt-small": {
        **recurrent_pair(4, 256, 256, "lstm", **GNMT),
        **{"seq2seq": {"context": "all", "readout": "linear"}, "scale_embeddings": True},
    },
    "gnmt": {
        **recurrent_pair(8, 1024, 1024, "lstm", **GNMT),
        **{"seq2seq": {"context": "all", "readout": "concat"}, "tie": "none", "scale_embeddings": True},
    },
    "deep-att-small": {
        **recurrent_pair(3, 256, 256, "lstm", **DEEP_ATT),
        "seq2seq": {"readout": "linear"},
    },
    "deep-att": {
        **{**recurrent_pair(9, 256, 512, "lstm", **DEEP_ATT), "n_decoder_layers": 7},
        **{"seq2seq": {"readout": "linear"}, "tie": "none"},
    },
}

TABLES = {"transformer": TRANSFORMER, "gpt": GPT, "bert": BERT, "vit": VIT, "rnn": RNN, "seq2seq": SEQ2SEQ}
for architecture, table in TABLES.items():
    for settings in table.values():
        settings["architecture"] = architecture
