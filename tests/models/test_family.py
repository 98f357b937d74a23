"""Random weights of Hugging Face's models in ours: the same logits, with nothing but the presets to tell them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.models.architectures import preset
from regard.models.bert import Bert
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.models.vit import ViT

transformers = pytest.importorskip("transformers")
V, C, H, LAYERS = 41, 32, 4, 2
SIZES: dict[str, Any] = {"n_decoder_layers": LAYERS, "d_model": C, "n_heads": H, "target_vocab": V}


def pairs(w: Tensor, heads: int) -> Tensor:
    """Rows of a projection whose rotary pairs are (m, m + D/2), as rows whose pairs are (2m, 2m + 1)."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def stirred(peer: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in peer.parameters():
            if p.requires_grad:  # RoFormer's sinusoids are not learned
                p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1))
    return peer.eval()


def check(model: GPT, weights: dict[str, Tensor], peer: torch.nn.Module) -> None:
    own = dict(model.eval().named_parameters())
    assert own.keys() == weights.keys()
    ids = torch.randint(5, V, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
        torch.testing.assert_close(model(ids), peer(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_llama(groups: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=C, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=H,
        num_key_value_heads=groups, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    peer = stirred(transformers.LlamaForCausalLM(config))
    theirs = dict(peer.named_parameters())
    weights = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "decoder.norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for i in range(LAYERS):
        mine, layer = f"decoder.blocks.{i}.sublayers", {n: theirs[f"model.layers.{i}.{n}.weight"] for n in LLAMA}
        q, k, v = (layer[f"self_attn.{x}_proj"] for x in "qkv")
        weights |= {
            f"{mine}.self.norm.weight": layer["input_layernorm"],
            f"{mine}.self.sublayer.qkv.weight": torch.cat([pairs(q, H), pairs(k, groups), v]),
            f"{mine}.self.sublayer.out.weight": layer["self_attn.o_proj"],
            f"{mine}.ff.norm.weight": layer["post_attention_layernorm"],
            f"{mine}.ff.sublayer.inner.weight": torch.cat([layer["mlp.gate_proj"], layer["mlp.up_proj"]]),
            f"{mine}.ff.sublayer.outer.weight": layer["mlp.down_proj"],
        }
    check(GPT(preset("llama-7b", **SIZES, position_base=500.0, d_ff=48, n_kv_heads=groups)), weights, peer)


LLAMA = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


def test_bloom() -> None:
    config = transformers.BloomConfig(vocab_size=V, hidden_size=C, n_layer=LAYERS, n_head=H)
    peer = stirred(transformers.BloomForCausalLM(config))
    theirs = {name.removeprefix("transformer."): p for name, p in peer.named_parameters()}
    weights = {"embedding.weight": theirs["word_embeddings.weight"]}
    names = {
        "self.norm": "input_layernorm",
        "ff.norm": "post_attention_layernorm",
        "self.sublayer.out": "self_attention.dense",
    }
    names |= {"ff.sublayer.inner": "mlp.dense_h_to_4h", "ff.sublayer.outer": "mlp.dense_4h_to_h"}
    for kind in ("weight", "bias"):
        weights[f"embedding_norm.{kind}"] = theirs[f"word_embeddings_layernorm.{kind}"]
        weights[f"decoder.norm.{kind}"] = theirs[f"ln_f.{kind}"]
        for i in range(LAYERS):
            mine = f"decoder.blocks.{i}.sublayers"
            weights |= {f"{mine}.{a}.{kind}": theirs[f"h.{i}.{b}.{kind}"] for a, b in names.items()}
            qkv = theirs[f"h.{i}.self_attention.query_key_value.{kind}"]  # head by head
            weights[f"{mine}.self.sublayer.qkv.{kind}"] = qkv.unflatten(0, (H, 3, C // H)).transpose(0, 1).flatten(0, 2)
    check(GPT(preset("bloom", **SIZES, d_ff=4 * C)), weights, peer)


@pytest.mark.parametrize("name", ["gpt-1", "gpt2"])
def test_gpt(name: str) -> None:
    """The first is post-norm. Their matrices are transposed."""
    kind = {"gpt-1": "OpenAIGPT", "gpt2": "GPT2"}[name]
    config = getattr(transformers, f"{kind}Config")(vocab_size=V, n_embd=C, n_layer=LAYERS, n_head=H, n_positions=16)
    peer = stirred(getattr(transformers, f"{kind}LMHeadModel")(config))
    theirs = {name.removeprefix("transformer."): p for name, p in peer.named_parameters()}
    tokens, positions = ("tokens_embed", "positions_embed") if name == "gpt-1" else ("wte", "wpe")
    weights = {"embedding.weight": theirs[f"{tokens}.weight"]}
    weights["decoder.schemes.0.encoding"] = theirs[f"{positions}.weight"]
    names = {"self.norm": "ln_1", "self.sublayer.qkv": "attn.c_attn", "self.sublayer.out": "attn.c_proj"}
    names |= {"ff.norm": "ln_2", "ff.sublayer.inner": "mlp.c_fc", "ff.sublayer.outer": "mlp.c_proj"}
    for part in ("weight", "bias"):
        if name == "gpt2":
            weights[f"decoder.norm.{part}"] = theirs[f"ln_f.{part}"]
        for i in range(LAYERS):
            found = {f"decoder.blocks.{i}.sublayers.{a}.{part}": theirs[f"h.{i}.{b}.{part}"] for a, b in names.items()}
            weights |= {key: p.T if p.dim() == 2 else p for key, p in found.items()}
    check(GPT(preset(name, **SIZES, d_ff=4 * C, max_len=16)), weights, peer)


# ---- encoders ---------------------------------------------------------------------------------------------------------

BERT = {
    "self.norm": "attention.output.LayerNorm",
    "self.sublayer.out": "attention.output.dense",
    "ff.norm": "output.LayerNorm",
    "ff.sublayer.inner": "intermediate.dense",
    "ff.sublayer.outer": "output.dense",
}


def bert_weights(theirs: dict[str, Tensor], first_position: int) -> dict[str, Tensor]:
    weights = {
        "embedding.weight": theirs["embeddings.word_embeddings.weight"],
        "types.weight": theirs["embeddings.token_type_embeddings.weight"],
    }
    if "embeddings.position_embeddings.weight" in theirs:
        weights["encoder.schemes.0.encoding"] = theirs["embeddings.position_embeddings.weight"][first_position:]
    for kind in ("weight", "bias"):
        weights[f"embedding_norm.{kind}"] = theirs[f"embeddings.LayerNorm.{kind}"]
        for i in range(LAYERS):
            mine, layer = f"encoder.blocks.{i}.sublayers", f"encoder.layer.{i}"
            weights |= {f"{mine}.{a}.{kind}": theirs[f"{layer}.{b}.{kind}"] for a, b in BERT.items()}
            parts = [theirs[f"{layer}.attention.self.{x}.{kind}"] for x in ("query", "key", "value")]
            weights[f"{mine}.self.sublayer.qkv.{kind}"] = torch.cat(parts)
    return weights


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "RoFormer"])
def test_bert_and_its_kin(kind: str) -> None:
    """RoBERTa counts positions from 2 on, so the first two of its table are never read, and has other names for its head.
    RoFormer turns queries and keys, in the same pairs as here."""
    offset, prefix = (2 if kind == "Roberta" else 0), f"{kind.lower()}."
    settings = preset(
        f"{kind.lower()}-base", n_encoder_layers=LAYERS, d_model=C, n_heads=H, d_ff=48, source_vocab=V, max_len=16
    )
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=V, hidden_size=C, num_hidden_layers=LAYERS, num_attention_heads=H, intermediate_size=48,
        max_position_embeddings=16 + offset, type_vocab_size=2 - offset // 2,
        layer_norm_eps=settings.norm_eps, pad_token_id=offset // 2,
    )  # fmt: skip
    peer = stirred(getattr(transformers, f"{kind}ForMaskedLM")(config))
    theirs = {name.removeprefix(prefix): p for name, p in peer.named_parameters()}
    head = {"inner": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"}
    if kind == "Roberta":
        head = {"inner": "lm_head.dense", "norm": "lm_head.layer_norm"}
    weights = bert_weights(theirs, offset)
    weights |= {f"head.{a}.{k}": theirs[f"{b}.{k}"] for a, b in head.items() for k in ("weight", "bias")}
    weights["head.bias"] = theirs["lm_head.bias" if kind == "Roberta" else "cls.predictions.bias"]
    model = Bert(settings).eval()
    own = {name: p for name, p in model.named_parameters() if not name.startswith("pooler.")}
    assert own.keys() == weights.keys()
    ids = torch.randint(5, V, (3, 11), generator=torch.Generator().manual_seed(1))
    real = torch.arange(11) < torch.tensor([[11], [4], [8]])
    types = torch.zeros_like(ids) if kind == "Roberta" else (torch.arange(11) > 5).long().expand(3, -1)
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
        found = model(ids * real, types)
        padded = ids.where(real, torch.tensor(offset // 2))
        expected = peer(input_ids=padded, attention_mask=real.long(), token_type_ids=types).logits
    torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)


# ---- encoder-decoders -------------------------------------------------------------------------------------------------


def check_pair(model: Transformer, weights: dict[str, Tensor], peer: torch.nn.Module) -> None:
    own = dict(model.eval().named_parameters())
    assert own.keys() == weights.keys()
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(5, V, (3, n), generator=generator) for n in (9, 7))
    real = torch.arange(9) < torch.tensor([[9], [4], [7]])
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
        expected = peer(input_ids=source, attention_mask=real.long(), decoder_input_ids=target).logits
        torch.testing.assert_close(model(source * real, target), expected, atol=1e-4, rtol=1e-4)


def small(name: str, **settings: Any) -> Transformer:
    sizes = {**SIZES, "n_encoder_layers": LAYERS, "source_vocab": V, "d_ff": 48}
    return Transformer(preset(name, **sizes, **settings))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5(version: str) -> None:
    """Its cross-attention is not scaled either; here that is in the queries. The newer one's output matrix is its own."""
    new, d = version == "1.1", 6
    config = transformers.T5Config(
        vocab_size=V, d_model=C, d_kv=d, d_ff=48, num_layers=LAYERS, num_heads=H, relative_attention_num_buckets=8,
        relative_attention_max_distance=9, feed_forward_proj="gated-gelu" if new else "relu", tie_word_embeddings=not new,
    )  # fmt: skip
    peer = transformers.T5ForConditionalGeneration(config)
    if new:
        peer.lm_head.weight = torch.nn.Parameter(torch.empty(V, C))
    theirs = dict(stirred(peer).named_parameters())
    weights = {"source_embedding.weight": theirs["shared.weight"]}
    weights |= {"head.weight": theirs["lm_head.weight"]} if new else {}
    for side, parts in {"encoder": ("self", "ff"), "decoder": ("self", "cross", "ff")}.items():
        bias = theirs[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        weights |= {
            f"{side}.schemes.0.weight": bias.T,
            f"{side}.norm.weight": theirs[f"{side}.final_layer_norm.weight"],
        }
        for i in range(LAYERS):
            for n, part in enumerate(parts):
                layer = f"{side}.block.{i}.layer.{n}"
                found = t5_sublayer(
                    part, {k.removeprefix(f"{layer}."): p for k, p in theirs.items() if k.startswith(layer)}, d
                )
                weights |= {f"{side}.blocks.{i}.sublayers.{part}.{k}": p for k, p in found.items()}
    model = small("t5-v1.1-small" if new else "t5-small", d_head=d, t5_buckets=8, t5_max_distance=9)
    check_pair(model, weights, peer)


def t5_sublayer(part: str, theirs: dict[str, Tensor], d: int) -> dict[str, Tensor]:
    mine = {"norm.weight": theirs["layer_norm.weight"]}
    if part == "ff":
        wi = [p for k, p in theirs.items() if k.startswith("DenseReluDense.wi")]
        return mine | {
            "sublayer.inner.weight": torch.cat(wi),
            "sublayer.outer.weight": theirs["DenseReluDense.wo.weight"],
        }
    kind = "SelfAttention" if part == "self" else "EncDecAttention"
    q, k, v, o = (theirs[f"{kind}.{x}.weight"] for x in "qkvo")
    if part == "self":
        return mine | {"sublayer.qkv.weight": torch.cat([q, k, v]), "sublayer.out.weight": o}
    return mine | {"sublayer.q.weight": q * d**0.5, "sublayer.kv.weight": torch.cat([k, v]), "sublayer.out.weight": o}


def test_bart() -> None:
    config = transformers.BartConfig(
        vocab_size=V, d_model=C, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=H,
        decoder_attention_heads=H, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=16, pad_token_id=1,
    )  # fmt: skip
    peer = stirred(transformers.BartForConditionalGeneration(config))
    theirs = {name.removeprefix("model."): p for name, p in peer.named_parameters()}
    weights = {"source_embedding.weight": theirs["shared.weight"]}
    for side, norm in {"encoder": "source_norm", "decoder": "target_norm"}.items():
        weights[f"{side}.schemes.0.encoding"] = theirs[f"{side}.embed_positions.weight"][2:]
        for kind in ("weight", "bias"):
            weights[f"{norm}.{kind}"] = theirs[f"{side}.layernorm_embedding.{kind}"]
            for i in range(LAYERS):
                its = {k: f"{side}.layers.{i}.{k}.{kind}" for k in BART}
                layer = {k: theirs[name] for k, name in its.items() if name in theirs}
                found = bart_layer(layer)
                weights |= {f"{side}.blocks.{i}.sublayers.{k}.{kind}": p for k, p in found.items()}
    check_pair(small("bart-base", max_len=16), weights, peer)


BART = (
    *(f"{kind}.{x}_proj" for kind in ("self_attn", "encoder_attn") for x in ("q", "k", "v", "out")),
    *("self_attn_layer_norm", "encoder_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),
)


def bart_layer(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    mine = {
        "self.norm": theirs["self_attn_layer_norm"],
        "self.sublayer.qkv": torch.cat([theirs[f"self_attn.{x}_proj"] for x in "qkv"]),
        "self.sublayer.out": theirs["self_attn.out_proj"],
        "ff.norm": theirs["final_layer_norm"],
        "ff.sublayer.inner": theirs["fc1"],
        "ff.sublayer.outer": theirs["fc2"],
    }
    if "encoder_attn_layer_norm" not in theirs:
        return mine
    return mine | {
        "cross.norm": theirs["encoder_attn_layer_norm"],
        "cross.sublayer.q": theirs["encoder_attn.q_proj"],
        "cross.sublayer.kv": torch.cat([theirs[f"encoder_attn.{x}_proj"] for x in "kv"]),
        "cross.sublayer.out": theirs["encoder_attn.out_proj"],
    }


def test_vit() -> None:
    config = transformers.ViTConfig(
        hidden_size=C, num_hidden_layers=LAYERS, num_attention_heads=H, intermediate_size=48, image_size=12, patch_size=4,
        num_channels=3, num_labels=7, layer_norm_eps=1e-12,
    )  # fmt: skip
    peer = stirred(transformers.ViTForImageClassification(config))
    theirs = {name.removeprefix("vit."): p for name, p in peer.named_parameters()}
    weights = {
        "summary": theirs["embeddings.cls_token"].flatten(),
        "encoder.schemes.0.encoding": theirs["embeddings.position_embeddings"][0],
    }
    for kind in ("weight", "bias"):
        weights[f"patches.{kind}"] = theirs[f"embeddings.patch_embeddings.projection.{kind}"]
        weights |= {f"encoder.norm.{kind}": theirs[f"layernorm.{kind}"], f"head.{kind}": theirs[f"classifier.{kind}"]}
        for i in range(LAYERS):
            found = {k: theirs[f"layers.{i}.{k}.{kind}"] for k in VIT}
            weights |= {f"encoder.blocks.{i}.sublayers.{k}.{kind}": p for k, p in vit_layer(found).items()}
    settings: dict[str, Any] = {"n_encoder_layers": LAYERS, "d_model": C, "n_heads": H, "d_ff": 48}
    model = ViT(preset("vit-base-16", **settings, patch_size=4, max_len=10, n_classes=7)).eval()
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
        torch.testing.assert_close(model(images), peer(pixel_values=images).logits, atol=1e-4, rtol=1e-4)


VIT = (
    *(f"attention.{x}_proj" for x in "qkvo"),
    *("layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2"),
)


def vit_layer(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "self.norm": theirs["layernorm_before"],
        "self.sublayer.qkv": torch.cat([theirs[f"attention.{x}_proj"] for x in "qkv"]),
        "self.sublayer.out": theirs["attention.o_proj"],
        "ff.norm": theirs["layernorm_after"],
        "ff.sublayer.inner": theirs["mlp.fc1"],
        "ff.sublayer.outer": theirs["mlp.fc2"],
    }
