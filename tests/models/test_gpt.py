"""The decoder-only model with every position scheme: caches, ragged prompts, windows, prefixes, packed rows, a peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configured import SCHEMES, model_config, replaced
from fused_rows import qkv_rows
from torch import Tensor

from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, FULL, Mask, document_mask, prefix, with_window
from regard.models.architectures import preset as named
from regard.models.gpt import GPT
from regard.models.sizes import SIZES
from regard.text.special_tokens import PAD

V = 23
# A dozen tokens reach far buckets, clipped distances, queries beyond FIRE's threshold, CoPE's last position.
TINY = model_config(
    preset="gpt-tiny",
    n_decoder_layers=2,
    d_model=16,
    n_heads=4,
    d_ff=24,
    max_len=64,
    target_vocab=V,
    **{
        "shaw.clip": 3,
        "t5.buckets": 8,
        "t5.max_distance": 11,
        "fire.width": 5,
        "fire.threshold": 4.0,
        "cope.positions": 5,
        "yarn.trained_len": 16,
        "rope.factor": 2.0,
        "rope.scaling": "linear",
    },
)
close: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def make(name: str = "sinusoidal", **changes: object) -> GPT:
    """A model in evaluation mode, none of whose weights stands at a special value such as 0 or 1."""
    torch.manual_seed(0)
    model = GPT(replaced(TINY, positions=name, **changes)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for scheme in model.decoder.schemes:  # learned positions that make a difference
            for p in scheme.parameters():
                p.add_(0.5 * torch.rand_like(p))
    return model.requires_grad_(False)


def ids(*lengths: int) -> Tensor:
    """Random rows of these lengths, padded on the right."""
    torch.manual_seed(1)
    rows = [torch.randint(5, V, (n,)) for n in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def other(tokens: Tensor) -> Tensor:
    return (tokens - 5 + 1) % (V - 5) + 5


# ---- causality, padding, order ---------------------------------------------------------------------------------------


@every_scheme
def test_a_token_changes_nothing_before_it_and_something_from_it_on(name: str) -> None:
    model, row = make(name), ids(9, 9)
    changed = row.clone()
    changed[:, 4] = other(row[:, 4])
    before, after = model(row), model(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4], atol=1e-6, rtol=0)
    assert ((after - before)[:, 4:].abs().amax(-1) > 1e-5).all()


@every_scheme
def test_neither_padding_nor_neighbours_change_a_row(name: str) -> None:
    model, lengths = make(name, n_kv_heads=2), (12, 1, 7, 4)
    rows = ids(*lengths)
    together = model(rows)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(together[i, :n], model(rows[i : i + 1, :n])[0], **close)


@every_scheme
def test_the_order_of_earlier_tokens_matters(name: str) -> None:
    """Even without positions the causal mask lets a second layer count tokens; a single layer reads a bag of words."""
    row = torch.tensor([[5, 6, 7, 8, 9, 10]])
    swapped = row[:, [1, 3, 0, 4, 2, 5]]
    assert (make(name)(row) - make(name)(swapped))[:, -1].abs().max() > 1e-4
    if name == "none":
        model = make(name, n_decoder_layers=1)
        torch.testing.assert_close(model(row)[:, -1], model(swapped)[:, -1], **close)


# ---- cached decoding -------------------------------------------------------------------------------------------------


def assert_cached_equals_full(model: GPT, lengths: tuple[int, ...], steps: int) -> None:
    """Prompts read at once, then token by token: the logits of a forward over each row alone."""
    prompts = ids(*lengths)
    logits, state = model.begin(prompts)
    rows = [prompts[i, :n] for i, n in enumerate(lengths)]
    for _ in range(steps + 1):
        for found, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(found, model(row[None])[0, -1], **close)
        tokens = torch.randint(5, V, (len(rows),))
        rows = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens, strict=True)]
        logits = model.step(tokens, state)


@every_scheme
@pytest.mark.parametrize("width", [0, 3], ids=["all", "window"])
@pytest.mark.parametrize("groups", [4, 1], ids=["heads", "multi-query"])
def test_cached_equals_full_forward_at_every_step(name: str, width: int, groups: int) -> None:
    model = make(name, **{"attention.window": width}, n_kv_heads=groups)
    assert_cached_equals_full(
        model, (7, 2, 5), 12
    )  # a window shorter than the prompts, and past the first columns of the cache


@every_scheme
def test_one_token_of_prompt_is_enough(name: str) -> None:
    assert_cached_equals_full(make(name), (1,), 4)


@every_scheme
def test_rows_of_the_cache_multiply_move_and_leave(name: str) -> None:
    model, prompts = make(name, n_kv_heads=2), ids(4, 6)
    _, state = model.begin(prompts)
    rows = [prompts[0, :4], prompts[1]]
    for chosen in ([1, 0, 1], [2, 1], [1]):
        state.select(torch.tensor(chosen))
        tokens = torch.randint(5, V, (len(chosen),))
        rows = [torch.cat([rows[i], token[None]]) for i, token in zip(chosen, tokens, strict=True)]
        for found, row in zip(model.step(tokens, state), rows, strict=True):
            torch.testing.assert_close(found, model(row[None])[0, -1], **close)


def test_shared_keys_make_a_smaller_cache() -> None:
    for groups in (4, 2, 1):
        model = make(n_kv_heads=groups)
        _, state = model.begin(ids(5, 3))
        assert {tuple(kept.keys.shape) for _, kept in state} == {(2, groups, 16, 4)}


# ---- masks -----------------------------------------------------------------------------------------------------------


@every_scheme
@pytest.mark.parametrize("width", [1, 4])
def test_a_window_sees_its_last_tokens_alone(name: str, width: int) -> None:
    """Two layers of a window of w reach 2(w - 1) tokens back, and not one more."""
    model, row = make(name, **{"attention.window": width}), ids(14)
    reach = 2 * (width - 1)
    for t in (0, 3):
        changed = row.clone()
        changed[:, t] = other(row[:, t])
        difference = (model(changed) - model(row))[0].abs().amax(-1)
        assert (difference[: t + reach + 1][t:] > 1e-6).all()
        assert (difference[t + reach + 1 :] < 1e-6).all()
        assert (difference[:t] < 1e-6).all()


@every_scheme
def test_a_prefix_sees_itself_and_the_rest_is_causal(name: str) -> None:
    model, row = make(name), ids(8)
    for t, first in ((3, 0), (6, 6)):  # a token of the prefix reaches its beginning; the mask of one after it is causal
        changed = row.clone()
        changed[:, t] = other(row[:, t])
        difference = (model(changed, prefix(5)) - model(row, prefix(5)))[0].abs().amax(-1)
        assert (difference[first:] > 1e-6).all()
        assert (difference[:first] < 1e-6).all()


@every_scheme
def test_prefixes_from_nothing_to_everything(name: str) -> None:
    model, rows = make(name, n_kv_heads=2), ids(6, 6, 6)
    torch.testing.assert_close(model(rows, prefix(0)), model(rows), **close)
    torch.testing.assert_close(model(rows, prefix(6)), model(rows, FULL), **close)
    each = model(rows, prefix(torch.tensor([[0], [3], [6]])))
    for i, n in enumerate((0, 3, 6)):
        torch.testing.assert_close(each[i], model(rows[i : i + 1], prefix(n))[0], **close)


@every_scheme
@pytest.mark.parametrize("mask", [CAUSAL, with_window(CAUSAL, 3), prefix(2)], ids=str)
def test_packed_documents_have_the_logits_they_have_alone(name: str, mask: Mask) -> None:
    model = make(name, n_kv_heads=2)
    lengths = [(5, 1, 6), (8, 2)]  # the second row is padded
    width = max(map(sum, lengths))
    rows, positions = torch.full((2, width), PAD), torch.full((2, width), -1)
    texts = {(b, i): ids(n)[0].roll(i) for b, row in enumerate(lengths) for i, n in enumerate(row)}
    for b, row in enumerate(lengths):
        rows[b, : sum(row)] = torch.cat([texts[b, i] for i in range(len(row))])
        positions[b, : sum(row)] = torch.cat([torch.arange(n) for n in row])
    packed = model.head(model.hidden(rows, positions, mask=document_mask(mask)))
    for (b, i), text in texts.items():
        start = sum(lengths[b][:i])
        torch.testing.assert_close(packed[b, start : start + len(text)], model(text[None], mask)[0], **close)


@every_scheme
def test_a_prompt_can_be_read_as_a_prefix(name: str) -> None:
    model, prompt = make(name), ids(7)
    logits, state = model.begin(prompt, prefix(7))
    torch.testing.assert_close(logits, model(prompt, prefix(7))[:, -1], **close)
    assert (logits - model.begin(prompt)[0]).abs().max() > 1e-3  # it sees more than a causal one
    more = torch.cat([prompt, torch.tensor([[9]])], 1)
    torch.testing.assert_close(model.step(more[:, -1], state), model(more, prefix(7))[:, -1], **close)


def test_another_mask_keeps_the_models_window() -> None:
    model, row = make(**{"attention.window": 3}), ids(9)
    torch.testing.assert_close(model(row, document_mask(CAUSAL)), model(row), **close)
    with pytest.raises(ValueError, match="two spans"):
        model(row, prefix(4))


def test_more_tokens_than_the_model_was_built_for_are_refused() -> None:
    model = make(max_len=6)
    for call in (model, model.begin):
        with pytest.raises(RegardError, match="7 tokens, but the model was built for at most 6"):
            call(ids(7))
    _, state = model.begin(ids(6))
    with pytest.raises(RegardError, match="7 tokens"):
        model.step(torch.tensor([5]), state)


# ---- sizes and sharing -----------------------------------------------------------------------------------------------


def test_parameters_by_hand() -> None:
    # A block of 16 wide, 4 heads of 4 and one head of keys: qkv 16 x (16 + 2*4) + 24, out 272, feed-forward 808, two norms.
    block = 408 + 272 + 808 + 2 * 32
    for tie, matrices in (("all", 1), ("decoder", 1), ("none", 2)):
        model = GPT(replaced(TINY, n_kv_heads=1, tie=tie))
        assert sum(p.numel() for p in model.parameters()) == matrices * V * 16 + 2 * block + 32
        assert (model.head.weight is model.embedding.weight) == (matrices == 1)


@pytest.mark.parametrize("preset", GPT.presets)
def test_presets(preset: str) -> None:
    with torch.device("meta"):
        config = GPT(named(preset, target_vocab=V)).config
    sizes = {name: size for name, size in GPT.presets[preset].items() if name in SIZES} | {"target_vocab": V}
    assert {name: getattr(config, name) for name in sizes} == sizes


def test_presets_of_other_models_are_refused() -> None:
    with pytest.raises(RegardError, match=r"model\.preset transformer-tiny is not known here.*gpt-tiny"):
        GPT(model_config(preset="transformer-tiny", target_vocab=V))


# ---- Hugging Face GPT-2 ----------------------------------------------------------------------------------------------


def gpt2(model: GPT) -> torch.nn.Module:
    """The same weights in their GPT-2, whose matrices are transposed and whose embedding is not scaled."""
    transformers = pytest.importorskip("transformers")
    c, (positions,) = model.config, model.decoder.schemes[0].parameters()
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=c.max_len,
        n_embd=c.d_model,
        n_layer=c.n_decoder_layers,
        n_head=c.n_heads,
        n_inner=c.d_ff,
        activation_function="gelu",
        tie_word_embeddings=False,
    )
    embedding = model.embedding.weight
    weights = {
        "transformer.wte.weight": 4.0 * embedding,
        "transformer.wpe.weight": positions,
        "lm_head.weight": embedding,
    }
    theirs = {"self": ("ln_1", {"qkv": "attn.c_attn", "out": "attn.c_proj"})}
    theirs["ff"] = ("ln_2", {"inner": "mlp.c_fc", "outer": "mlp.c_proj"})
    for kind in ("weight", "bias"):
        weights[f"transformer.ln_f.{kind}"] = getattr(model.decoder.norm, kind)
        for i, block in enumerate(model.decoder.blocks):
            for part, (norm, layers) in theirs.items():
                sublayer = block.get_submodule(f"sublayers.{part}")
                weights[f"transformer.h.{i}.{norm}.{kind}"] = getattr(block.norms[part], kind)
                for mine, name in layers.items():
                    p = getattr(getattr(sublayer, mine), kind)
                    p = p[qkv_rows(c.n_heads, c.n_heads, c.d_head)] if mine == "qkv" else p
                    weights[f"transformer.h.{i}.{name}.{kind}"] = p.T
    peer = transformers.GPT2LMHeadModel(config).eval()
    peer.load_state_dict(weights)
    return peer


@pytest.mark.filterwarnings("ignore:The use of .x.T.:UserWarning")
def test_gpt2() -> None:
    model = make("learned", activation="gelu")
    rows = ids(11, 4, 7)
    real = rows != PAD
    with torch.no_grad():
        expected = gpt2(model)(input_ids=rows.clamp(min=0), attention_mask=real.long()).logits
    torch.testing.assert_close(model(rows)[real], expected[real], atol=1e-4, rtol=1e-4)


# ---- padding is no token ---------------------------------------------------------------------------------------------


@every_scheme
def test_token_0_is_a_piece_like_any_other(name: str) -> None:
    """Rows with this token anywhere, also at their ends, have the logits that they have alone, without padding."""
    model = make(name)
    rows = [torch.tensor(row) for row in ([0, 5, 0], [7, 0, 0, 0, 9, 0], [0])]
    together = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    logits = model(together)
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found[: len(row)], model(row[None])[0], **close)
    other = model(torch.where(together == 0, 3, together))
    assert not torch.allclose(other[0, :3], logits[0, :3])
    begun, _ = model.begin(together)
    for row, found in zip(rows, begun, strict=True):
        torch.testing.assert_close(found, model(row[None])[0, -1], **close)
