"""PaLM: attention and feed-forward side by side, by hand and against Hugging Face's Cohere, which is built the same way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from configured import replaced
from fused_rows import gate_rows, qkv_rows
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.block import ParallelBlock, PreNormBlock, make_blocks
from regard.models.architectures import preset
from regard.models.gpt import GPT

V, C, H, D, LAYERS = 41, 32, 4, 8, 2
SIZES = {"n_decoder_layers": LAYERS, "d_model": C, "n_heads": H, "d_head": D, "target_vocab": V, "d_ff": 48}
CONFIG = preset("palm-8b", **SIZES, **{"rope.base": 500.0})


def palm() -> GPT:
    """With norms that are not at 1 and a tied embedding of unit size."""
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (1.0 if name == "embedding.weight" else 0.3) + (p.dim() == 1))
    return model


# ---- Cohere -----------------------------------------------------------------------------------------------------------


def cohere(model: GPT) -> nn.Module:
    """Our weights in their model, whose rotary pairs are neighbours too. It has a factor for its logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CohereConfig(
        vocab_size=V, hidden_size=C, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=H,
        num_key_value_heads=1, layer_norm_eps=1e-5, logit_scale=C**-0.5, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    own = dict(model.named_parameters())
    weights = {"model.embed_tokens": own["embedding.weight"], "model.norm": own["decoder.norm.weight"]}
    for i in range(LAYERS):
        mine, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        q, k, v = own[f"{mine}.sublayers.self.qkv.weight"][qkv_rows(H, 1, D)].split([C, D, D])
        gate, up = own[f"{mine}.sublayers.ff.inner.weight"][gate_rows(48)].chunk(2)
        weights |= {f"{theirs}.self_attn.{x}_proj": w for x, w in zip("qkv", (q, k, v), strict=True)}
        weights |= {f"{theirs}.mlp.gate_proj": gate, f"{theirs}.mlp.up_proj": up}
        weights[f"{theirs}.self_attn.o_proj"] = own[f"{mine}.sublayers.self.out.weight"]
        weights[f"{theirs}.mlp.down_proj"] = own[f"{mine}.sublayers.ff.outer.weight"]
        weights[f"{theirs}.input_layernorm"] = own[f"{mine}.norm.weight"]
    peer = transformers.CohereForCausalLM(config).eval()
    assert {f"{name}.weight" for name in weights} == {name for name, _ in peer.named_parameters()}
    with torch.no_grad():
        for name, w in weights.items():
            peer.get_parameter(f"{name}.weight").copy_(w)
    return peer


def test_its_logits_are_those_of_cohere() -> None:
    model = palm()
    ids = torch.randint(5, V, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), cohere(model)(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


# ---- by hand ----------------------------------------------------------------------------------------------------------


def block_by_hand(block: nn.Module, x: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """x + attention(norm(x)) + ff(norm(x)) of one row (T, C), in float64; all heads of queries share one of keys."""
    w = {name: p.detach().double().numpy() for name, p in block.named_parameters()}
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w["norm.weight"]
    q, k, v = np.split(normal @ w["sublayers.self.qkv.weight"][qkv_rows(H, 1, D)].T, [C, C + D], axis=-1)
    turn = np.exp(1j * np.arange(len(x))[:, None] * theta)  # (T, D/2)
    key = (k[:, 0::2] + 1j * k[:, 1::2]) * turn
    heads = []
    for h in range(H):
        query = q[:, h * D : (h + 1) * D]
        scores = ((query[:, 0::2] + 1j * query[:, 1::2]) * turn @ key.conj().T).real / np.sqrt(D)
        weights = np.tril(np.exp(scores - scores.max(-1, keepdims=True)))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    attention = np.concatenate(heads, -1) @ w["sublayers.self.out.weight"].T
    gate, up = np.split(normal @ w["sublayers.ff.inner.weight"][gate_rows(48)].T, 2, axis=-1)
    ff = gate / (1 + np.exp(-gate)) * up @ w["sublayers.ff.outer.weight"].T
    return x + attention + ff


def test_a_model_is_its_formula() -> None:
    model = palm()
    ids = torch.randint(5, V, (7,), generator=torch.Generator().manual_seed(1))
    table = model.embedding.weight.detach().double().numpy()
    x = table[ids.numpy()]
    for block in model.decoder.blocks:
        x = block_by_hand(block, x, 500.0 ** -(np.arange(0, D, 2) / D))
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * model.decoder.norm.weight.detach().double().numpy()  # type: ignore[union-attr, operator]
    expected = x @ table.T / np.sqrt(C)
    found = model(ids[None])[0].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_parallel_block_has_one_norm_and_the_names_of_any_other() -> None:
    config = palm().config
    sequential = replaced(config, parallel=False)
    for side, crosses in (("encoder", False), ("decoder", True)):
        (together,), (apart,) = (make_blocks(c, 1, side, side == "decoder", crosses) for c in (config, sequential))
        assert type(together) is ParallelBlock
        assert type(apart) is PreNormBlock
        names, others = ({name for name, _ in block.named_parameters()} for block in (together, apart))
        assert names - others == {"norm.weight"}
        assert {name.split(".")[0] for name in others - names} == {"norms"}


def test_sublayers_do_not_see_each_other() -> None:
    """The output of attention changes the sum, but not what the feed-forward layer adds to it."""
    model, x = palm(), torch.randn(2, 5, C)
    seen: list[Tensor] = []
    for block in model.decoder.blocks:
        block.get_submodule("sublayers.ff").register_forward_hook(lambda m, inputs, result: seen.append(result))
    places = torch.arange(5).expand(2, -1)
    model.decoder(x, places)
    with torch.no_grad():
        model.decoder.blocks[0].get_parameter("sublayers.self.out.weight").zero_()
    model.decoder(x, places)
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[1], seen[3])


def test_decoding_with_a_cache_is_reading_again() -> None:
    model = palm()
    ids = torch.randint(5, V, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(ids)
        found, state = model.begin(ids[:, :4])
        steps = [found, *(model.step(ids[:, t], state) for t in range(4, 9))]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 3:], atol=1e-4, rtol=1e-4)


def test_parallel_blocks_cannot_be_post_norm() -> None:
    with pytest.raises(RegardError, match=r"model\.parallel .* needs model\.norm pre"):
        GPT(replaced(CONFIG, norm="post"))
