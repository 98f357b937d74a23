"""Presets: as many parameters as the published models have, built on the meta device, and their style when asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configured import model_config
from torch import nn

from regard.config import ModelConfig
from regard.config.recipes import to_dict
from regard.config.registry import TABLES
from regard.models.architectures import PRESETS, make_model, preset
from regard.models.sizes import SIZES

OURS_ALONE = {"vit-tiny", "bert-tiny", "gpt-tiny", "gpt-small", "gpt-experts-tiny", "transformer-experts-small"}
OURS_ALONE |= {
    "convs2s-small",
    "convs2s",
    "bytenet-small",
    "conv-lm",
    "rnn-tiny",
    "lstm-small",
    "lstm-char",
    "gru-small",
}
SEQ2SEQ_NAMES = ("sutskever", "rnnenc", "rnnsearch", "gnmt", "deep-att")
OURS_ALONE |= {f"{name}{size}" for name in SEQ2SEQ_NAMES for size in ("", "-small")}
OURS_ALONE |= {"mamba-tiny", "rwkv-tiny"}
OURS_ALONE |= {f"transformer-{size}" for size in ("tiny", "small", "base", "big")}
OURS_ALONE |= {"s4-tiny", "s4d-tiny", "s4-wikitext103", "s4d-wikitext103"}
OURS_ALONE |= {"linear-attention-tiny", "gla-tiny", "gla-340m", "gla-1.3b", "based-tiny", "mamba2-tiny"}


def built(name: str) -> nn.Module:
    with torch.device("meta"):
        return make_model(preset(name))


def count(model: nn.Module, without: tuple[str, ...] = ()) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and not name.startswith(without))


# What an encoder has on top is not counted in the published numbers; BERT and RoBERTa count their pooler.
NOT_COUNTED = dict.fromkeys(("bert-base", "bert-large", "roberta-base", "roberta-large"), ("head.",))
NOT_COUNTED |= dict.fromkeys(("roformer-base", "deberta-base", "deberta-v3-base"), ("head.", "pooler."))
# What they have more than ours: where positions count from 2 on, two rows in each table that are never read.
MORE = {"roberta-base": 2 * 768, "roberta-large": 2 * 1024, "bart-base": 4 * 768, "bart-large": 4 * 1024}
# DeBERTa 1 has no biases of keys, neither of words nor of positions; here a layer has 768 of each.
MORE |= {"deberta-base": -12 * 2 * 768}
# Theirs has a bias on the input's product and one on the state's; only their sum matters.
MORE |= {"awd-lstm": 4 * (1150 + 1150 + 400)}
PUBLISHED = {
    "gpt-1": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "deberta-v3-base": 183_831_552,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "awd-lstm": 33_556_078,
    "vit-base-16": 86_567_656,
    "vit-large-16": 304_326_632,
    "vit-huge-14": 632_045_800,
}


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items())
def test_as_many_parameters_as_published(name: str, expected: int) -> None:
    assert count(built(name), NOT_COUNTED.get(name, ())) + MORE.get(name, 0) == expected


@pytest.mark.parametrize(("name", "billions"), [("palm-8b", 8.63), ("palm-62b", 62.50), ("palm-540b", 540.35)])
def test_palm_has_the_billions_of_its_paper(name: str, billions: float) -> None:
    assert count(built(name)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_gpt3_has_the_weights_of_the_lecture() -> None:
    """175,181,291,520 in its matrices, with the embedding matrix counted twice and no positions, norms and biases."""
    matrices = [p for name, p in built("gpt3").named_parameters() if p.dim() == 2 and "schemes" not in name]
    assert sum(p.numel() for p in matrices) + 12288 * 50257 == 175_181_291_520


def test_based_has_the_layers_and_the_parameters_of_its_publication() -> None:
    """Layers by train/configs/experiment/reference/based-360m.yaml of HazyResearch/based; parameters worked out by hand.

    Theirs has biases on the projections of the convolutions in place of those on the convolutions themselves, and three rows
    of padding in its embedding."""
    model: Any = built("based-360m")
    mixers = [type(block.sublayers["self"]).name for block in model.decoder.blocks]
    assert len(mixers) == 27
    assert [i for i, name in enumerate(mixers) if name == "based"] == [1, 6, 11, 16, 21]
    assert [i for i, name in enumerate(mixers) if name == "attention"] == [2, 7, 12, 17, 22]
    assert mixers.count("short-convolution") == 17
    d, window = 1024, model.decoder.blocks[2].sublayers["self"].window
    convolution = d * 4 * d + 2 * d * 4 + 2 * d * d  # two inputs of width 2 d, a kernel of 3 and a bias, the output
    linear_attention = d * 16 * (16 + 16 + 64) + d * d
    feedforward, norms = 3 * d * 2048, (2 * 27 + 1) * d
    parameters = 50277 * d + 17 * convolution + 5 * linear_attention + 5 * 4 * d * d + 27 * feedforward + norms
    assert count(model) == parameters == 362_582_016
    assert window == 65  # `window_size` 128 is halved there: 64 earlier tokens, and the token itself


def sized(layers: int, width: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": width}


DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
MARIAN = {"vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048}
MARIAN |= {"decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
MAMBA_SIZES = {"130m": (24, 768), "370m": (48, 1024), "790m": (48, 1536), "1.4b": (48, 2048), "2.8b": (64, 2560)}
RWKV_SIZES = {"169m": (12, 768), "430m": (24, 1024), "1b5": (24, 2048), "3b": (32, 2560), "7b": (32, 4096)}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"mamba-{size}": ("MambaForCausalLM", sized(*given)) for size, given in MAMBA_SIZES.items()},
    **{f"rwkv-{size}": ("RwkvForCausalLM", sized(*given)) for size, given in RWKV_SIZES.items()},
    "gpt-1": ("OpenAIGPTLMHeadModel", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt3": ("GPT2LMHeadModel", {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}),
    "llama-7b": ("LlamaForCausalLM", {}),
    "bloom-560m": ("BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "bert-base": ("BertModel", {}),
    "roformer-base": ("RoFormerModel", {}),
    "deberta-base": ("DebertaModel", {"vocab_size": 50265, **DEBERTA}),
    "deberta-v3-base": (
        "DebertaV2Model",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, **DEBERTA}
        | {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm", "vocab_size": 128100},
    ),
    "mixtral-8x7b": ("MixtralForCausalLM", {}),
    "switch-base-8": (
        "SwitchTransformersForConditionalGeneration",
        {"d_ff": 3072, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6},
    ),
    "t5-small": ("T5ForConditionalGeneration", {}),
    "bart-large": ("BartForConditionalGeneration", {}),
    "marian": ("MarianMTModel", MARIAN),  # opus-mt
    "vit-base-16": ("ViTForImageClassification", {"num_labels": 1000}),
}
MAMBA2 = {"130m": (24, 768), "370m": (48, 1024), "780m": (48, 1536), "1.3b": (48, 2048), "2.7b": (64, 2560)}
for size, (layers, width) in MAMBA2.items():
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_heads": width // 32, "n_groups": 1}
    PEERS[f"mamba2-{size}"] = ("Mamba2ForCausalLM", {**sizes, "vocab_size": 50288, "tie_word_embeddings": True})


@pytest.mark.parametrize("name", PEERS)
def test_as_many_parameters_as_hugging_faces(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, settings = PEERS[name]
    with torch.device("meta"):
        peer = getattr(transformers, kind)(getattr(transformers, kind).config_class(**settings))
    assert count(built(name), NOT_COUNTED.get(name, ())) + MORE.get(name, 0) == count(peer)


def test_no_published_model_is_left_uncounted() -> None:
    elsewhere = {"palm-8b", "palm-62b", "palm-540b", "based-360m"}  # in tests of their own
    assert {*PUBLISHED, *PEERS, *OURS_ALONE} | elsewhere == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_every_setting_that_it_names_and_no_other(name: str) -> None:
    found, default = to_dict(preset(name)), to_dict(model_config(preset=name))
    names = ("mixer", "feedforward")
    expected = {k: (v,) if k in names and isinstance(v, str) else v for k, v in PRESETS[name].items()}
    for table in TABLES.keys() & expected.keys():
        expected[table] = to_dict(TABLES[table].settings(**expected[table]))
    assert found == {**default, **expected}


def test_a_configuration_that_names_a_preset_has_its_sizes_alone() -> None:
    with torch.device("meta"):
        config = make_model(model_config(preset="palm-8b", n_decoder_layers=2)).config
    assert isinstance(config, ModelConfig)
    expected = {"d_model": 4096, "n_heads": 16, "n_kv_heads": 1, "d_head": 256, "d_ff": 16384, "target_vocab": 256000}
    found = {key: getattr(config, key) for key in SIZES}
    assert found == {
        **expected,
        "n_decoder_layers": 2,
        "n_encoder_layers": 0,
        "source_vocab": 0,
    }
    assert (config.parallel, config.feedforward, config.bias, config.positions) == (
        False,
        ("dense",),
        True,
        "sinusoidal",
    )


def test_what_is_given_stands_over_the_preset() -> None:
    config = preset("llama-7b", n_decoder_layers=2, d_model=64, n_heads=4, positions="alibi", tie="all")
    with torch.device("meta"):
        model = make_model(config)
    config = model.config  # type: ignore[assignment]
    assert (config.d_model, config.d_head, config.d_ff, config.norm_kind) == (64, 16, 11008, "rms")
    assert (config.positions, config.tie) == ("alibi", "all")
