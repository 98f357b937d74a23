"""The same weights give the same logits and gradients in torch.nn.Transformer and in Hugging Face's Marian, and the same
logits in their first GPT, which `regard import` does not read (tests/exchange compares the families that it reads).

A `Pair` ties a piece of one of our parameters to a piece of theirs; weights are copied over the pairs either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from fused_rows import fused, kv_rows, qkv_rows
from tokens import EOS, SOS
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.models.architectures import preset
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD

V, C, H, FF, N_ENCODER, N_DECODER, MAX_LEN = 29, 24, 4, 40, 2, 3, 32
LENGTHS = [(7, 6), (3, 9), (1, 1)]  # source and target, in tokens


class Pair(NamedTuple):
    ours: nn.Parameter
    our_rows: slice | list[int]
    theirs: nn.Parameter
    their_rows: slice


WHOLE = slice(None)
QKV, KV = qkv_rows(H, H, C // H), kv_rows(H, C // H)  # all queries, all keys, all values


def both(ours: nn.Module, theirs: nn.Module, our_rows: slice | list[int] = WHOLE) -> Iterator[Pair]:
    """The weight and the bias of two layers that do the same."""
    for name in ("weight", "bias"):
        yield Pair(getattr(ours, name), our_rows, getattr(theirs, name), WHOLE)


def copy(pairs: list[Pair], *, to_theirs: bool) -> None:
    with torch.no_grad():
        for ours, our_rows, theirs, their_rows in pairs:
            if to_theirs:
                theirs[their_rows] = ours[our_rows]
            else:
                ours[our_rows] = theirs[their_rows]


def stir(*modules: nn.Module) -> None:
    """Weights that differ everywhere, with none at a special value such as 0 or 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in modules:
            for p in module.parameters():
                p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2)


def covers(pairs: list[Pair], ours: nn.Module, theirs: nn.Module) -> bool:
    """Check that every parameter of both sides is compared."""
    elements = [sum(p.ours[p.our_rows].numel() for p in pairs), sum(p.theirs[p.their_rows].numel() for p in pairs)]
    return elements == [sum(p.numel() for p in module.parameters()) for module in (ours, theirs)]


def ours(**settings: Any) -> Transformer:
    return Transformer(
        ModelConfig(
            preset="transformer-tiny",
            n_encoder_layers=N_ENCODER,
            n_decoder_layers=N_DECODER,
            d_model=C,
            n_heads=H,
            d_ff=FF,
            max_len=MAX_LEN,
            dropout=0.0,
            source_vocab=V,
            target_vocab=V,
            **settings,
        )
    )


def sentences() -> tuple[Tensor, Tensor]:
    """Padded source and target ids, the target beginning with SOS."""
    torch.manual_seed(1)
    columns: list[Tensor] = []
    for side, edge in ((0, EOS), (1, SOS)):
        width = max(n[side] for n in LENGTHS)
        ids = torch.full((len(LENGTHS), width), PAD)
        for row, n in zip(ids, LENGTHS, strict=True):
            row[: n[side]] = torch.randint(5, V, (n[side],))
            row[n[side] - 1 if side == 0 else 0] = edge
        columns.append(ids)
    return columns[0], columns[1]


# ---- torch.nn.Transformer --------------------------------------------------------------------------------------------


def torch_pairs(a: Transformer, b: nn.Transformer) -> Iterator[Pair]:
    for ours, theirs in zip(
        [*a.encoder.blocks, *a.decoder.blocks], [*b.encoder.layers, *b.decoder.layers], strict=True
    ):
        parts = ours.sublayers
        attention, out = parts["self"], theirs.self_attn.out_proj
        yield Pair(attention.qkv.weight, QKV, theirs.self_attn.in_proj_weight, WHOLE)
        yield Pair(attention.qkv.bias, QKV, theirs.self_attn.in_proj_bias, WHOLE)
        yield from both(attention.out, out)
        if "cross" in parts:
            cross, peer = parts["cross"], theirs.multihead_attn
            for layer, mine, rows in ((cross.q, WHOLE, slice(C)), (cross.kv, KV, slice(C, 3 * C))):
                yield Pair(layer.weight, mine, peer.in_proj_weight, rows)
                yield Pair(layer.bias, mine, peer.in_proj_bias, rows)
            yield from both(cross.out, peer.out_proj)
        yield from both(parts["ff"].inner, theirs.linear1)
        yield from both(parts["ff"].outer, theirs.linear2)
        for i, name in enumerate(parts, 1):
            yield from both(ours.norms[name], getattr(theirs, f"norm{i}"))
    if isinstance(a.encoder.norm, nn.LayerNorm):
        yield from both(a.encoder.norm, b.encoder.norm)
        yield from both(a.decoder.norm, b.decoder.norm)


def torch_peer(norm: str, activation: str) -> nn.Transformer:
    peer = nn.Transformer(
        C, H, N_ENCODER, N_DECODER, FF, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre"
    )
    if norm == "post":  # there, a second norm follows the last block's own; the paper has none
        peer.encoder.norm = peer.decoder.norm = None
    return peer


def torch_logits(peer: nn.Transformer, embedding: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Embeddings, positions and a tied head around nn.Transformer, which has none of them."""
    table = torch.tensor(
        [
            [(math.cos if d % 2 else math.sin)(p / 10000 ** ((d - d % 2) / C)) for d in range(C)]
            for p in range(max(source.shape[1], target.shape[1]))
        ]
    )
    x, y = (F.embedding(ids.clamp(min=0), embedding) * math.sqrt(C) + table[: ids.shape[1]] for ids in (source, target))
    hidden = peer(
        x,
        y,
        tgt_mask=torch.ones(y.shape[1], y.shape[1]).triu(1).bool(),  # torch: True = masked
        tgt_is_causal=True,
        src_key_padding_mask=source == PAD,
        tgt_key_padding_mask=target == PAD,
        memory_key_padding_mask=source == PAD,
    )
    return hidden @ embedding.T


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("to_theirs", [True, False], ids=["ours-to-theirs", "theirs-to-ours"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_torch_transformer(norm: str, activation: str, to_theirs: bool) -> None:
    model, peer = ours(norm=norm, activation=activation), torch_peer(norm, activation)
    pairs = list(torch_pairs(model, peer))
    assert covers(pairs, nn.ModuleList([model.encoder, model.decoder]), peer)
    stir(model, peer)
    copy(pairs, to_theirs=to_theirs)
    embedding = model.source_embedding.weight.detach().clone().requires_grad_()
    source, target = sentences()
    real = target != PAD

    with torch.no_grad():
        expected = torch_logits(peer.eval(), embedding, source, target)
        torch.testing.assert_close(model.eval()(source, target)[real], expected[real], atol=1e-4, rtol=1e-4)

    weights = torch.randn(int(real.sum()), V)
    (model.train()(source, target)[real] * weights).sum().backward()
    (torch_logits(peer.train(), embedding, source, target)[real] * weights).sum().backward()
    assert model.source_embedding.weight.grad is not None
    torch.testing.assert_close(model.source_embedding.weight.grad, embedding.grad, atol=1e-4, rtol=1e-4)
    for a, our_rows, b, their_rows in pairs:
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad[our_rows], b.grad[their_rows], atol=1e-4, rtol=1e-4)


# ---- Hugging Face Marian ---------------------------------------------------------------------------------------------


def marian_pairs(a: Transformer, b: Any) -> Iterator[Pair]:
    for ours, theirs in zip(
        [*a.encoder.blocks, *a.decoder.blocks], [*b.model.encoder.layers, *b.model.decoder.layers], strict=True
    ):
        parts = ours.sublayers
        attention = parts["self"]
        for i, name in enumerate("qkv"):
            yield from both(attention.qkv, getattr(theirs.self_attn, f"{name}_proj"), QKV[i * C : (i + 1) * C])
        yield from both(attention.out, theirs.self_attn.out_proj)
        yield from both(ours.norms["self"], theirs.self_attn_layer_norm)
        if "cross" in parts:
            cross, peer = parts["cross"], theirs.encoder_attn
            yield from both(cross.q, peer.q_proj)
            yield from both(cross.kv, peer.k_proj, KV[:C])
            yield from both(cross.kv, peer.v_proj, KV[C:])
            yield from both(cross.out, peer.out_proj)
            yield from both(ours.norms["cross"], theirs.encoder_attn_layer_norm)
        yield from both(parts["ff"].inner, theirs.fc1)
        yield from both(parts["ff"].outer, theirs.fc2)
        yield from both(ours.norms["ff"], theirs.final_layer_norm)
    yield Pair(a.target_embedding.weight, WHOLE, b.lm_head.weight, WHOLE)
    if a.source_embedding is not a.target_embedding:
        yield Pair(a.source_embedding.weight, WHOLE, b.model.encoder.embed_tokens.weight, WHOLE)


def marian(tie: str, activation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=V,
            decoder_vocab_size=V,
            d_model=C,
            encoder_layers=N_ENCODER,
            decoder_layers=N_DECODER,
            encoder_attention_heads=H,
            decoder_attention_heads=H,
            encoder_ffn_dim=FF,
            decoder_ffn_dim=FF,
            max_position_embeddings=MAX_LEN,
            activation_function=activation,
            scale_embedding=True,
            share_encoder_decoder_embeddings=tie == "all",
            pad_token_id=0,
            eos_token_id=EOS,
            bos_token_id=SOS,
            decoder_start_token_id=SOS,
            dropout=0.0,
        )
    )


def trainable(module: nn.Module) -> nn.ParameterList:
    return nn.ParameterList(p for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("to_theirs", [True, False], ids=["ours-to-theirs", "theirs-to-ours"])
@pytest.mark.parametrize(("tie", "activation"), [("all", "relu"), ("decoder", "gelu")])
def test_marian(tie: str, activation: str, to_theirs: bool) -> None:
    model, peer = ours(norm="post", tie=tie, activation=activation).eval(), marian(tie, activation).eval()
    pairs = list(marian_pairs(model, peer))
    assert covers(pairs, model, trainable(peer))
    with torch.no_grad():
        for stack, side in ((peer.model.encoder, model.encoder), (peer.model.decoder, model.decoder)):
            table = side.schemes[0].encoding
            assert isinstance(table, Tensor)
            # The same waves in another order there, all sines before all cosines.
            halves = torch.cat([table[:, 0::2], table[:, 1::2]], 1)
            torch.testing.assert_close(stack.embed_positions.weight, halves, atol=1e-6, rtol=0)
            stack.embed_positions.weight.copy_(table)
    stir(model, trainable(peer))
    copy(pairs, to_theirs=to_theirs)

    source, target = sentences()
    real = target != PAD
    read, begun = source.clamp(min=0), target.clamp(min=0)
    theirs = peer(input_ids=read, attention_mask=(source != PAD).long(), decoder_input_ids=begun, use_cache=False)
    logits = model(source, target)
    torch.testing.assert_close(logits[real], theirs.logits[real], atol=1e-4, rtol=1e-4)

    weights = torch.randn(int(real.sum()), V)
    for result in (logits, theirs.logits):
        (result[real] * weights).sum().backward()
    for a, our_rows, b, their_rows in pairs:
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad[our_rows], b.grad[their_rows], atol=1e-4, rtol=1e-4)


# ---- GPT-1 -----------------------------------------------------------------------------------------------------------


def test_the_first_gpt() -> None:
    """Post-norm, with learned positions. Their matrices are transposed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "n_embd": C, "n_layer": 2, "n_head": H, "n_positions": 16}
    peer = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes)).eval()
    stir(peer)
    theirs = {name.removeprefix("transformer."): p for name, p in peer.named_parameters()}
    names = {"norms.self": "ln_1", "sublayers.self.qkv": "attn.c_attn", "sublayers.self.out": "attn.c_proj"}
    names |= {"norms.ff": "ln_2", "sublayers.ff.inner": "mlp.c_fc", "sublayers.ff.outer": "mlp.c_proj"}
    weights = {"embedding.weight": theirs["tokens_embed.weight"]}
    weights["decoder.schemes.0.encoding"] = theirs["positions_embed.weight"]
    for i, part in product(range(2), ("weight", "bias")):
        found = {f"decoder.blocks.{i}.{a}.{part}": theirs[f"h.{i}.{b}.{part}"] for a, b in names.items()}
        found = {key: p.T if p.dim() == 2 else p for key, p in found.items()}
        weights |= {key: fused(p, QKV) if ".qkv." in key else p for key, p in found.items()}
    settings = {"n_decoder_layers": 2, "d_model": C, "n_heads": H, "d_ff": 4 * C, "target_vocab": V, "max_len": 16}
    model = GPT(preset("gpt-1", **settings)).eval()
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    ids = torch.randint(5, V, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
        torch.testing.assert_close(model(ids), peer(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
