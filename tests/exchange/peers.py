"""Tiny models of transformers with random weights, and inputs for them and for Regard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.exchange.huggingface import read_huggingface
from regard.exchange.weight_conversion import ConversionReport
from regard.model_folder import ModelPackage
from regard.text.special_tokens import PAD

transformers: Any = pytest.importorskip("transformers")
V, C, H, LAYERS = 41, 32, 4, 2
CPU = torch.device("cpu")
BERT: dict[str, Any] = {
    "vocab_size": V, "hidden_size": C, "num_hidden_layers": LAYERS, "num_attention_heads": H, "intermediate_size": 48,
}  # fmt: skip
PAIR: dict[str, Any] = {"vocab_size": V, "d_model": C, "max_position_embeddings": 20}
for side in ("encoder", "decoder"):
    PAIR |= {f"{side}_layers": LAYERS, f"{side}_attention_heads": H, f"{side}_ffn_dim": 48}
T5 = {"vocab_size": V, "d_model": C, "d_kv": 16, "d_ff": 48, "num_layers": LAYERS, "num_heads": H}
T5 |= {"num_decoder_layers": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}
T5 |= {"decoder_start_token_id": 0}


def make(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings))


ends = {"bos_token_id": 7, "eos_token_id": 9, "pad_token_id": None}
roberta = {**BERT, "max_position_embeddings": 18, "type_vocab_size": 1, "pad_token_id": 1}
roberta |= {"layer_norm_eps": 1e-5}  # as published
marian = {**PAIR, "decoder_vocab_size": V, "pad_token_id": 40, "eos_token_id": 0, "decoder_start_token_id": 40}
marian |= {"forced_eos_token_id": None, "activation_function": "swish", "scale_embedding": True}
bart = {**PAIR, "forced_eos_token_id": None, "attention_dropout": 0.1, "activation_dropout": 0.1}  # as published
gpt2: dict[str, Any] = {"vocab_size": V, "n_embd": C, "n_layer": LAYERS, "n_head": H, "n_positions": 24}

recurrent: dict[str, Any] = {"vocab_size": V, "hidden_size": C, "num_hidden_layers": LAYERS, **ends}
deberta = {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
deberta |= {"type_vocab_size": 0, "max_relative_positions": 10}
deberta3 = {**deberta, "position_buckets": 6, "share_att_key": True, "norm_rel_ebd": "layer_norm"}

DECODERS = {
    "gpt2": make("GPT2LMHeadModel", "GPT2Config", **gpt2, **ends | {"bos_token_id": 9}),
    "gpt2-own-head": make("GPT2LMHeadModel", "GPT2Config", **gpt2, **ends, n_inner=48, tie_word_embeddings=False),
    "llama": make("LlamaForCausalLM", "LlamaConfig", **BERT, **ends, num_key_value_heads=2),
    "llama-biased": make(
        "LlamaForCausalLM", "LlamaConfig", **BERT, **ends, attention_bias=True, mlp_bias=True, head_dim=6,
        num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    ),
    "mixtral": make(
        "MixtralForCausalLM", "MixtralConfig", **BERT, **ends, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "mamba2": make(
        "Mamba2ForCausalLM", "Mamba2Config", vocab_size=V, hidden_size=C, num_hidden_layers=LAYERS, state_size=10,
        num_heads=8, head_dim=8, n_groups=2, chunk_size=4, tie_word_embeddings=True, **ends,
    ),
    "mamba2-biased": make(
        "Mamba2ForCausalLM", "Mamba2Config", vocab_size=V, hidden_size=C, num_hidden_layers=LAYERS, state_size=6,
        num_heads=6, head_dim=16, expand=3, n_groups=1, conv_kernel=3, use_bias=True, use_conv_bias=False, **ends,
    ),
    "bloom": make("BloomForCausalLM", "BloomConfig", vocab_size=V, hidden_size=C, n_layer=LAYERS, n_head=H, **ends),
    "mamba": make("MambaForCausalLM", "MambaConfig", **recurrent, state_size=5),
    "mamba-biased": make(
        "MambaForCausalLM", "MambaConfig", **recurrent, state_size=4, time_step_rank=3, conv_kernel=3, expand=1,
        use_bias=True, use_conv_bias=False, tie_word_embeddings=False,
    ),
    "rwkv": make("RwkvForCausalLM", "RwkvConfig", **recurrent, intermediate_size=56, rescale_every=0, context_length=24),
}  # fmt: skip
ENCODERS = {
    "bert": make("BertForMaskedLM", "BertConfig", **BERT),
    "bert-pretraining": make("BertForPreTraining", "BertConfig", **BERT),
    "roberta": make("RobertaForMaskedLM", "RobertaConfig", **roberta),
    "roformer": make("RoFormerForMaskedLM", "RoFormerConfig", **BERT),
    "deberta-3": make("DebertaV2ForMaskedLM", "DebertaV2Config", **deberta3),
    "deberta-1": make("DebertaForMaskedLM", "DebertaConfig", **deberta),
}
PAIRS = {
    "t5": make("T5ForConditionalGeneration", "T5Config", **T5),
    "t5-1.1": make(
        "T5ForConditionalGeneration", "T5Config", **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    # The second, fourth, ... block has experts, each for at most two tokens of a row.
    "switch": make(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", **T5 | {"num_decoder_layers": 2},
        num_experts=4, expert_capacity=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    ),
    "bart": make("BartForConditionalGeneration", "BartConfig", **bart),
    "marian": make("MarianMTModel", "MarianConfig", **marian),
    "marian-two-embeddings": make("MarianMTModel", "MarianConfig", **marian, share_encoder_decoder_embeddings=False),
}  # fmt: skip
WITH_HEADS = {
    "bert-row": make("BertForSequenceClassification", "BertConfig", **BERT, num_labels=3),
    "bert-token": make("BertForTokenClassification", "BertConfig", **BERT, num_labels=5),
    "roberta-row": make("RobertaForSequenceClassification", "RobertaConfig", **roberta, num_labels=3),
    "gpt2-row": make(
        "GPT2ForSequenceClassification", "GPT2Config", **{**gpt2, **ends, "pad_token_id": 40}, num_labels=3
    ),
    "roberta-token": make("RobertaForTokenClassification", "RobertaConfig", **roberta, num_labels=3),
}
# Their configurations do not tie the head, which these classes do not have.
BARE_DECODERS = {
    "gpt2-bare": make("GPT2Model", "GPT2Config", **gpt2, **ends, n_inner=48, tie_word_embeddings=False),
    "mamba-bare": make("MambaModel", "MambaConfig", **recurrent, state_size=5, tie_word_embeddings=False),
    "mamba2-bare": make(
        "Mamba2Model", "Mamba2Config", **recurrent, state_size=10, num_heads=8, head_dim=8, n_groups=2, chunk_size=4
    ),
    "rwkv-bare": make("RwkvModel", "RwkvConfig", **recurrent, intermediate_size=56, rescale_every=0, context_length=24),
}
BARE = {
    "bert-bare": make("BertModel", "BertConfig", **BERT),
    "roberta-bare": make("RobertaModel", "RobertaConfig", **roberta),
    **BARE_DECODERS,
}
VIT = {
    "vit": make(
        "ViTForImageClassification", "ViTConfig", hidden_size=C, num_hidden_layers=LAYERS, num_attention_heads=H,
        intermediate_size=48, image_size=12, patch_size=4, num_labels=7,
    )
}  # fmt: skip
EVERY = {**DECODERS, **ENCODERS, **PAIRS, **WITH_HEADS, **BARE, **VIT}


def stirred(name: str) -> Any:
    """Return the model with no weight at a special value such as 0 or 1; T5 1.1 gets a head of its own, as published."""
    torch.manual_seed(0)
    peer = EVERY[name]()
    if name == "t5-1.1":
        peer.lm_head.weight = nn.Parameter(torch.empty_like(peer.lm_head.weight))
    if name == "bart":
        peer.generation_config.forced_bos_token_id = peer.config.bos_token_id
    with torch.no_grad():
        if name == "marian":  # a published one has learned it
            peer.final_logits_bias.normal_()
        for p in peer.parameters():
            if p.requires_grad:  # RoFormer's sinusoids are not learned
                p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1))
    return peer.eval()


def imported(name: str, folder: Path) -> tuple[Any, ModelPackage, ConversionReport]:
    peer = stirred(name)
    peer.save_pretrained(folder / name)
    return peer, *read_huggingface(folder / name, CPU)


LENGTHS = (11, 4, 8)


def texts(peer: Any, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of random tokens as they and as we read them, and which are real; padding is a token there, PAD here."""
    generator = torch.Generator().manual_seed(1)
    theirs = torch.randint(10, V - 1, (len(lengths), max(lengths)), generator=generator)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ours, padding = theirs.where(real, torch.tensor(PAD)), peer.config.pad_token_id
    return theirs.where(real, torch.tensor(V - 1 if padding is None else padding)), ours, real


def logits(name: str, peer: Any, package: ModelPackage) -> tuple[Tensor, Tensor]:
    """Return their logits and ours of the same input, of real tokens alone."""
    if name in VIT:
        images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
        return peer(pixel_values=images).logits, package.model(images)
    theirs, ours, real = texts(peer)
    if name in PAIRS:
        start = torch.tensor([[peer.config.decoder_start_token_id]] * len(theirs))
        first = torch.tensor([package.token_template.start[:1]] * len(theirs))
        said = peer(
            input_ids=theirs, attention_mask=real.long(), decoder_input_ids=torch.cat([start, theirs[:, :3]], 1)
        )
        return said.logits, package.model(ours, torch.cat([first, ours[:, :3]], 1))
    if name in DECODERS:
        return peer(input_ids=theirs, attention_mask=real.long()).logits[real], package.model(ours)[real]
    if name in BARE_DECODERS:
        said = peer(input_ids=theirs, attention_mask=real.long()).last_hidden_state
        return said[real], package.model.head_input(ours)[real]  # type: ignore[operator]
    types = (torch.arange(theirs.shape[1]) > 5).long().expand_as(theirs) * (package.config.token_types > 1)
    kinds = {} if name == "gpt2-row" else {"token_type_ids": types}  # to GPT-2 they are words
    said = peer(input_ids=theirs, attention_mask=real.long(), **kinds)
    if name in ENCODERS:
        found = said.prediction_logits if "prediction_logits" in said else said.logits
        return found[real], package.model(ours, types)[real]
    if name in BARE:
        return said.last_hidden_state[real], package.model.hidden(ours, types)[real]
    per_token = name.endswith("-token")
    outputs = package.model(ours, types)
    return (said.logits[real], outputs[real]) if per_token else (said.logits, outputs)
