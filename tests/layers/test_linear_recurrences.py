"""Token mixers with a matrix as state, against their formulas, one token after the other on each document by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from configured import model_config, replaced
from formula import packed, ragged
from torch import Tensor

from regard.config import DecodeConfig
from regard.config.registry import find
from regard.decode.generation import generate
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, PAD_POSITION, document_starts, prefix
from regard.layers.context import Context, PrepareRequest, apply_step
from regard.layers.decoding_state import DecodingState
from regard.layers.mixers.based import taylor_features
from regard.layers.part import Place, make_part
from regard.layers.positions.scheme import NoPositions
from regard.models.architectures import make_model, preset, resolve
from regard.models.gpt import GPT
from regard.models.initialization import initialize

C, H = 16, 2
CONFIG = model_config(
    d_model=C, n_heads=H, n_kv_heads=H, d_head=C // H, bias=True, norm_eps=1e-5,
    **{"gla.gate_rank": 3, "gla.temperature": 2.0, "based.feature_dim": 3, "short-convolution.expand": 2},
    **{"mamba2.d_state": 6, "mamba2.d_head": 4, "mamba2.groups": 2, "mamba2.dt_most": 0.3, "mamba2.dt_least": 0.01},
)  # fmt: skip


# ---- formulas of one document (T, C) -----------------------------------------------------------------------------------


def linear_attention(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, -1)) for part in layer.qkv(x).chunk(3, -1))
    q, k = (torch.where(part > 0, part + 1, part.exp()) for part in (q, k))
    found = []
    for t in range(len(x)):
        weights = torch.einsum("hk,shk->hs", q[t], k[: t + 1])
        o = torch.einsum("hs,shv->hv", weights, v[: t + 1]) / (weights.sum(-1, keepdim=True) + 1e-6)
        found.append(o.flatten())
    return layer.out(torch.stack(found))


def gla(layer: Any, x: Tensor) -> Tensor:
    q, k, v, r = layer.qkvg(x).split([C // 2, C // 2, C, C], -1)
    alpha = torch.sigmoid(layer.gate_out(layer.gate_in(x))) ** (1 / 2.0)
    q, k, v, alpha = (part.unflatten(-1, (H, -1)) for part in (q, k, v, alpha))
    state, found = torch.zeros(H, q.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(len(x)):
        state = alpha[t][:, :, None] * state + k[t][:, :, None] * v[t][:, None]
        o = (q[t][:, None] @ state)[:, 0] / math.sqrt(q.shape[-1])
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
        found.append(o.flatten())
    return layer.out(torch.stack(found) * r * torch.sigmoid(r))


def based(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, -1)) for part in layer.qkv(x).split([3 * H, 3 * H, C], -1))
    scores = torch.einsum("thk,shk->hts", q, k) / math.sqrt(3)
    weights = (1 + scores + scores**2 / 2).tril()
    return layer.out(torch.einsum("hts,shv->thv", weights / weights.sum(-1, keepdim=True), v).flatten(1))


def short_convolution(layer: Any, x: Tensor) -> Tensor:
    a, b = layer.inner(x).chunk(2, -1)
    conv = layer.convolution
    mixed = F.conv1d(F.pad(a.t()[None], (conv.kernel - 1, 0)), conv.weight[:, None], conv.bias, groups=conv.width)[
        0
    ].t()
    return layer.out(mixed * torch.sigmoid(mixed) * b)


def mamba2(layer: Any, x: Tensor) -> Tensor:
    inner, keys, heads, groups, p = 2 * C, 12, 8, 2, 4
    z, xbc, dt = layer.inner(x).split([inner, inner + 2 * keys, heads], -1)
    conv = layer.convolution
    xbc = F.conv1d(F.pad(xbc.t()[None], (3, 0)), conv.weight[:, None], conv.bias, groups=conv.width)[0].t()
    v, b, c = (xbc * torch.sigmoid(xbc)).split([inner, keys, keys], -1)
    dt = torch.log1p(torch.exp(dt + layer.dt_bias)).clamp(0.01, 0.3)
    state, found = torch.zeros(heads, 6, p, dtype=x.dtype), []
    for t in range(len(x)):
        of = torch.arange(heads) // (heads // groups)
        key, query, value = b[t].view(groups, 6)[of], c[t].view(groups, 6)[of], v[t].view(heads, p)
        state = torch.exp(-dt[t] * layer.log_a.exp())[:, None, None] * state
        state = state + key[:, :, None] * (dt[t][:, None] * value)[:, None]
        found.append(((query[:, None] @ state)[:, 0] + layer.d[:, None] * value).flatten())
    y = torch.stack(found) * z * torch.sigmoid(z)
    return layer.out(y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight)


FORMULAS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear-attention": linear_attention,
    "gla": gla,
    "based": based,
    "short-convolution": short_convolution,
    "mamba2": mamba2,
}
every = pytest.mark.parametrize("name", FORMULAS)


def make(name: str) -> Any:
    """A mixer in float64, none of whose weights stands at a special value."""
    torch.manual_seed(0)
    layer = make_part("mixer", name, CONFIG, Place("decoder", causal=True))
    initialize(layer)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer.double()


def run(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    return layer(x, Context(positions, prepared(layer, positions)))


def prepared(layer: Any, positions: Tensor) -> Tensor:
    request = PrepareRequest(positions, positions, CAUSAL, NoPositions(), None, False)
    found = layer.prepare(request)
    assert torch.equal(found, document_starts(positions))
    return found


@every
def test_each_document_is_mixed_by_its_formula(name: str) -> None:
    """Rows of several documents and padding, longer than a chunk."""
    layer, lengths = make(name), [(5, 1, 66, 7), (30, 12), (70,)]
    positions = packed(*lengths)
    x = torch.randn(*positions.shape, C, dtype=torch.double)
    x[positions == PAD_POSITION] = 1e3
    found = run(layer, x, positions)
    for b, row in enumerate(lengths):
        for i, n in enumerate(row):
            here = slice(sum(row[:i]), sum(row[:i]) + n)
            torch.testing.assert_close(found[b, here], FORMULAS[name](layer, x[b, here]), atol=1e-9, rtol=1e-9)


@every
def test_gradients_are_those_of_the_formula(name: str) -> None:
    layer, x = make(name), torch.randn(1, 23, C, dtype=torch.double, requires_grad=True)
    grad = torch.randn(23, C, dtype=torch.double)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(run(layer, x, packed((9, 14)))[0], leaves, grad)
    parts = [FORMULAS[name](layer, part) for part in x[0].split([9, 14])]
    for a, b in zip(found, torch.autograd.grad(torch.cat(parts), leaves, grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-8)


@every
@pytest.mark.parametrize("hypotheses", [1, 3])
@torch.no_grad()
def test_prompts_in_pieces_and_steps_of_a_search_are_the_formula(name: str, hypotheses: int) -> None:
    """Two padded prompts, the second of which continues the first, then steps with beam reordering."""
    rng = torch.Generator().manual_seed(1)
    layer, pieces = make(name), [(19, 3, 0, 8), (1, 0, 4, 20)]
    state = DecodingState(layer, 4, torch.device("cpu"), torch.double)
    kept, said = state.parts[layer], [torch.zeros(0, C, dtype=torch.double) for _ in range(4)]
    for lengths in pieces:
        begun = torch.tensor([len(text) for text in said])[:, None]
        positions = ragged(*lengths)
        positions = torch.where(positions > PAD_POSITION, positions + begun, PAD_POSITION)
        x = torch.randn(*positions.shape, C, dtype=torch.double, generator=rng)
        found = layer.prefill(x, Context(positions, prepared(layer, positions), state=state), kept)
        state.advance(positions, is_prompt=True)
        for row, n in enumerate(lengths):
            said[row] = torch.cat([said[row], x[row, :n]])
            wanted = FORMULAS[name](layer, said[row])[len(said[row]) - n :] if n else found[row, :0]
            torch.testing.assert_close(found[row, :n], wanted, atol=1e-9, rtol=1e-9)
    texts = [[text] for text in said]  # sentence, hypothesis -> its inputs (T, C)
    for _ in range(4):
        parents = torch.randint(state.width, (4, hypotheses), generator=rng)
        state.reorder(parents)
        new = torch.randn(4, hypotheses, C, dtype=torch.double, generator=rng)
        texts = [
            [torch.cat([row[parent], vector[None]]) for parent, vector in zip(of, vectors, strict=True)]
            for row, of, vectors in zip(texts, parents.tolist(), new, strict=True)
        ]
        stepped = layer.step(new.flatten(0, 1), Context(state.position(), apply=apply_step, state=state), kept)
        state.advance(state.next[:, None].expand(-1, hypotheses))
        wanted = torch.stack([FORMULAS[name](layer, text)[-1] for row in texts for text in row])
        torch.testing.assert_close(stepped, wanted, atol=1e-9, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("d", [1, 3, 16])
def test_products_of_taylor_features_are_the_series(d: int) -> None:
    q, k = torch.randn(2, 7, d, dtype=torch.double)
    s = (q * k).sum(-1) / math.sqrt(d)
    features = taylor_features(q), taylor_features(k)
    assert features[0].shape[-1] == 1 + d + d * (d + 1) // 2
    torch.testing.assert_close((features[0] * features[1]).sum(-1), 1 + s + s**2 / 2)


@every
def test_what_reads_backwards_is_refused(name: str) -> None:
    with pytest.raises(RegardError, match="reads forwards only"):
        find("mixer", name).check(CONFIG.named(name) if name != "linear-attention" else None, CONFIG, Place("encoder"))
    request = PrepareRequest(ragged(4), ragged(4), prefix(2), NoPositions(), None, False)
    with pytest.raises(RegardError, match="sees no prefix"):
        make(name).prepare(request)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixer": "gla", "n_heads": 16}, "multiple of 32"),
        ({"mixer": "mamba2", "n_heads": 4, "mamba2.d_head": 5}, r"mamba2\.d_head 5 does not divide"),
        (
            {"mixer": "mamba2", "n_heads": 4, "mamba2.d_head": 4, "mamba2.dt_init_least": 0.2},
            r"dt_init_least 0\.2 is above",
        ),
        (
            {"mixer": "mamba2", "n_heads": 4, "mamba2.d_head": 4, "mamba2.dt_least": 0.2, "mamba2.dt_most": 0.1},
            r"dt_least 0\.2 is above",
        ),
        (
            {"mixer": "mamba2", "n_heads": 4, "mamba2.groups": 3, "mamba2.d_head": 4},
            r"mamba2\.groups 3 does not divide the 8 heads",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        resolve(model_config(preset="gpt-tiny", d_model=16, target_vocab=23, **settings))


# ---- whole models ------------------------------------------------------------------------------------------------------

TINY = {"n_decoder_layers": 3, "d_model": 16, "max_len": 64, "target_vocab": 23}
MODELS: dict[str, dict[str, Any]] = {
    "linear-attention-tiny": {"n_heads": 2},
    "gla-tiny": {"n_heads": 2},
    "based-tiny": {"n_heads": 2, "attention.window": 3, "based.feature_dim": 4},
    "mamba2-tiny": {"mamba2.d_head": 8, "mamba2.d_state": 16},
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "based without positions": ("based-tiny", {**MODELS["based-tiny"], "positions": "none"}),
    "mamba2 with attention": ("mamba2-tiny", {**MODELS["mamba2-tiny"], "mixer": ("mamba2", "attention"), "n_heads": 2}),
}
models = pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])


def tiny_model(name: str) -> GPT:
    torch.manual_seed(3)
    base, settings = HYBRIDS[name] if name in HYBRIDS else (name, MODELS[name])
    model = make_model(resolve(replaced(preset(base), **TINY, **settings)))
    return model.double().eval().requires_grad_(False)  # type: ignore[return-value]


@models
def test_cached_decoding_equals_the_whole(name: str) -> None:
    model = tiny_model(name)
    rows = torch.randint(5, 23, (3, 9))
    lengths = (9, 2, 6)
    prompt = torch.stack([row.where(torch.arange(9) < n, -1) for row, n in zip(rows, lengths, strict=True)])
    scores, state = model.begin(prompt)
    said = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    for _ in range(5):
        for text, score in zip(said, scores, strict=True):
            torch.testing.assert_close(score, model(torch.tensor([text]))[0, -1], atol=1e-9, rtol=1e-9)
        new = scores.argmax(-1)
        said = [[*text, int(token)] for text, token in zip(said, new, strict=True)]
        scores = model.step(new, state)


@models
def test_generation_finds_what_full_passes_find(name: str) -> None:
    model = tiny_model(name)
    prompts = [[7, 8, 9, 10, 11], [6], [12, 5]]
    found = generate(model, prompts, DecodeConfig(beam=1, min_len=4, max_new_tokens=4))
    for prompt, result in zip(prompts, found, strict=True):
        text = list(prompt)
        for _ in range(4):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert result.tokens == text[len(prompt) :]


@models
def test_packed_documents_are_texts_of_their_own(name: str) -> None:
    model = tiny_model(name)
    texts = [torch.randint(5, 23, (n,)) for n in (4, 7, 1)]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    found = model.packed(torch.cat(texts)[None], positions)[0]
    wanted = torch.cat([model(text[None])[0] for text in texts])
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


def test_attention_beside_mamba_needs_no_feedforward_layer() -> None:
    model = tiny_model("mamba2 with attention")
    assert not model.config.d_ff
    assert all("ff" not in block.sublayers for block in model.decoder.blocks)
    alone = make_model(replaced(preset("mamba2-tiny", target_vocab=23), mixer="attention", n_heads=4))
    assert all([*block.sublayers] == ["self"] for block in alone.decoder.blocks)
