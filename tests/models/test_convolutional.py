"""Whole models of convolutions: what reaches what, padding, packed rows, caches, beams, sizes, refusals, learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configured import replaced
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import SOS
from torch import Tensor, nn

from regard.config import ModelConfig, TrainConfig
from regard.config.recipes import changed_settings
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, document_mask, prefix
from regard.look.record import record
from regard.models.architectures import PRESETS, make_model, preset, resolve
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD
from regard.training.objective import Objective
from regard.training.optimizer import prepare_model

V = 23
SIZES: dict[str, Any] = {"d_model": 16, "max_len": 96, "dropout": 0.0}
LM = preset("conv-lm", **SIZES, n_decoder_layers=3, target_vocab=V, **{"convolution.dilations": (1, 2, 3)})
PAIR = preset("convs2s-small", **SIZES, n_encoder_layers=2, n_decoder_layers=2, source_vocab=V, target_vocab=V)
close: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5}
STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-norm, learned positions": {"norm": "post", "positions": "learned"},
    "feed-forward layers, side by side": {"d_ff": 24, "parallel": True},
    "wider, dilated": {"convolution.kernel": 5, "convolution.dilations": (2, 1)},
}
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


def stirred(config: ModelConfig, **changes: Any) -> Any:
    """A model in evaluation mode, none of whose weights stands at a special value such as 0 or 1."""
    torch.manual_seed(0)
    model = make_model(replaced(config, **changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.requires_grad_(False)


def ids(*lengths: int, width: int = 0) -> Tensor:
    """Random rows of these lengths, padded on the right."""
    torch.manual_seed(1)
    width = max(width, *lengths)
    return torch.stack([torch.cat([torch.randint(5, V, (n,)), torch.full((width - n,), PAD)]) for n in lengths])


# ---- what reaches what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "dilations"), [(3, (1,)), (3, (1, 2, 4)), (2, (1, 2)), (4, (3, 1)), (1, (5,))])
@pytest.mark.parametrize("layers", [1, 4])
def test_a_language_model_sees_exactly_its_receptive_field(
    kernel: int, dilations: tuple[int, ...], layers: int
) -> None:
    """1 + (k - 1) * the sum of all blocks' dilations tokens, up to its own; by which inputs get a gradient."""
    steps = {0}  # back, over all ways through the blocks
    for i in range(layers):
        steps = {back + j * dilations[i % len(dilations)] for back in steps for j in range(kernel)}
    field = 1 + (kernel - 1) * sum(dilations[i % len(dilations)] for i in range(layers))
    model, length = (
        stirred(LM, **{"convolution.kernel": kernel, "convolution.dilations": dilations}, n_decoder_layers=layers),
        field + 5,
    )
    x = torch.randn(1, length, 16, requires_grad=True)
    hidden = model.decoder(x, torch.arange(length)[None])
    (gradient,) = torch.autograd.grad(hidden[:, -1].square().sum(), x)
    reached = (gradient[0].abs().amax(-1) > 0).nonzero().flatten().tolist()
    assert reached == sorted(length - 1 - back for back in steps)
    assert length - reached[0] == field


@pytest.mark.parametrize(("kernel", "dilations"), [(3, (1,)), (5, (1, 2))])
def test_an_encoder_sees_as_far_ahead_as_back(kernel: int, dilations: tuple[int, ...]) -> None:
    model = stirred(PAIR, **{"convolution.kernel": kernel, "convolution.dilations": dilations})
    half = (kernel // 2) * sum(dilations[i % len(dilations)] for i in range(2))
    x = torch.randn(1, 25, 16, requires_grad=True)
    hidden = model.encoder(x, torch.arange(25)[None])
    (gradient,) = torch.autograd.grad(hidden[:, 12].square().sum(), x)
    assert (gradient[0].abs().amax(-1) > 0).nonzero().flatten().tolist() == [*range(12 - half, 12 + half + 1)]


@every_style
def test_a_token_changes_nothing_before_it(style: dict[str, Any]) -> None:
    source, target = ids(5, 5), ids(9, 9)
    changed = target.clone()
    changed[:, 4] = (target[:, 4] - 5 + 1) % (V - 5) + 5
    lm, pair = stirred(LM, **style), stirred(PAIR, **style)
    for before, after in ((lm(target), lm(changed)), (pair(source, target), pair(source, changed))):
        assert torch.equal(after[:, :4], before[:, :4])
        assert ((after - before)[:, 4].abs().amax(-1) > 1e-4).all()


def test_without_positions_a_text_may_begin_anywhere() -> None:
    """The output of convolutions depends only on the tokens of their receptive field."""
    model, row = stirred(LM), ids(40)
    field = 1 + 2 * (1 + 2 + 3)
    torch.testing.assert_close(model(row)[:, -1], model(row[:, -field:])[:, -1], **close)
    assert (model(row)[:, -1] - model(row[:, -field + 1 :])[:, -1]).abs().max() > 1e-4


# ---- padding, batches, packed rows -----------------------------------------------------------------------------------


@every_style
@settings(max_examples=10)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    more=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_neither_padding_nor_neighbours_change_a_row(
    style: dict[str, Any], lengths: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    lm, pair = stirred(LM, **style), stirred(PAIR, **style)
    widths = [max(n) + extra for n, extra in zip(zip(*lengths, strict=True), more, strict=True)]
    source = ids(*(s for s, _ in lengths), width=widths[0])
    target = ids(*(t for _, t in lengths), width=widths[1])
    said, translated = lm(target), pair(source, target)
    for i, (s, t) in enumerate(lengths):
        torch.testing.assert_close(said[i, :t], lm(target[i : i + 1, :t])[0], **close)
        alone = pair(source[i : i + 1, :s], target[i : i + 1, :t])
        torch.testing.assert_close(translated[i, :t], alone[0], **close)


@every_style
def test_packed_documents_have_the_logits_they_have_alone(style: dict[str, Any]) -> None:
    model, lengths = stirred(LM, **style), [(5, 1, 6), (8, 2)]  # the second row is padded
    rows, positions = torch.full((2, 12), PAD), torch.full((2, 12), -1)
    texts = {(b, i): ids(n)[0].roll(i) for b, row in enumerate(lengths) for i, n in enumerate(row)}
    for b, row in enumerate(lengths):
        rows[b, : sum(row)] = torch.cat([texts[b, i] for i in range(len(row))])
        positions[b, : sum(row)] = torch.cat([torch.arange(n) for n in row])
    packed = model.head(model.hidden(rows, positions, mask=document_mask(CAUSAL)))
    for (b, i), text in texts.items():
        start = sum(lengths[b][:i])
        torch.testing.assert_close(packed[b, start : start + len(text)], model(text[None])[0], **close)


# ---- decoding --------------------------------------------------------------------------------------------------------


@every_style
def test_ragged_prompts_go_on_as_whole_rows_would(style: dict[str, Any]) -> None:
    """Prompts read at once, then token by token past the first columns of the cache; one row leaves, another is copied."""
    model, lengths = stirred(LM, **style), (9, 1, 4)
    prompts = ids(*lengths)
    logits, state = model.begin(prompts)
    rows = [prompts[i, :n] for i, n in enumerate(lengths)]
    for step in range(30):
        for found, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(found, model(row[None])[0, -1], **close)
        if step == 12:
            state.select(torch.tensor([2, 0, 2]))
            rows = [rows[2], rows[0], rows[2]]
        tokens = torch.randint(5, V, (3,))
        rows = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens, strict=True)]
        logits = model.step(tokens, state)


@every_style
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), width=st.integers(2, 4))
def test_hypotheses_that_change_places_keep_their_own_past(style: dict[str, Any], seed: int, width: int) -> None:
    """A search of three sentences with parents at random, one of which leaves"""
    model, source = stirred(PAIR, **style), ids(7, 3, 5)
    rng = torch.Generator().manual_seed(seed)
    state, owner, rows = model.begin(source), torch.arange(3), torch.empty(3, 0, dtype=torch.long)
    tokens = torch.full((3,), SOS)
    for t in range(16):
        rows = torch.cat([rows, tokens[:, None]], 1)
        torch.testing.assert_close(model.step(tokens, state), model(source[owner], rows)[:, -1], **close)
        if t == 9:
            state.select(torch.tensor([0, 2]))
        kept = owner.unique() if t != 9 else torch.tensor([0, 2])
        parents = torch.randint(0, state.width, (len(kept), width), generator=rng)
        state.reorder(parents)
        which = torch.cat([(owner == i).nonzero()[own, 0] for i, own in zip(kept, parents, strict=True)])
        owner, rows = owner[which], rows[which]
        tokens = torch.randint(5, V, (len(owner),), generator=rng)


def test_pieces_of_any_length_are_read_one_after_the_other() -> None:
    model, row = stirred(LM), ids(20, 20)
    _, state = model.begin(row[:, :6])
    for start, end in ((6, 7), (7, 12), (12, 20)):
        found = model.head(model.hidden(row[:, start:end], torch.arange(start, end).expand(2, -1), state))
        torch.testing.assert_close(found, model(row[:, :end])[:, start:], **close)


def test_attention_of_every_decoder_block_is_recorded() -> None:
    model = stirred(PAIR)
    source, target = ids(6, 4), ids(5, 5)
    with record(model) as tape:
        model(source, target)
    assert tape.names == ["decoder.0.cross", "decoder.1.cross"]
    weights = tape.weights("decoder.1.cross")  # (B, H, T, S)
    assert weights.shape == (2, 4, 5, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    assert (weights[1, :, :, 4:] == 0).all()


# ---- sizes and refusals ----------------------------------------------------------------------------------------------


def test_parameters_by_hand() -> None:
    # A block 16 wide over 3 tokens: 3*16 x 32 weights, 32 biases, a norm of 32; feed-forward layers 24 wide: 808 and a norm.
    block, ff = 3 * 16 * 32 + 32 + 32, 808 + 32
    assert numbers(stirred(LM)) == V * 16 + 3 * block + 32
    assert numbers(stirred(LM, d_ff=24)) == V * 16 + 3 * (block + ff) + 32
    cross = 4 * 16 * 16 + 4 * 16 + 32
    assert numbers(stirred(PAIR)) == V * 16 + 4 * block + 2 * cross + 2 * (96 * 16) + 2 * 32  # and learned positions


def numbers(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name, settings in PRESETS.items() if settings.get("mixer") == "convolution"])
def test_presets_are_built_of_convolutions(name: str) -> None:
    with torch.device("meta"):
        model = make_model(preset(name, source_vocab=V, target_vocab=V))
    stacks = [model.encoder, model.decoder] if isinstance(model, Transformer) else [model.decoder]  # type: ignore[list-item]
    for stack in stacks:
        assert {type(block.sublayers["self"]).__name__ for block in stack.blocks} == {"Convolution"}  # type: ignore[index, union-attr]


@pytest.mark.parametrize("name", ["rope", "t5", "alibi", "shaw", "cope", "fire", "disentangled"])
def test_positions_that_act_inside_self_attention_are_refused(name: str) -> None:
    for config, place in ((LM, "positions"), (PAIR, "positions"), (PAIR, "encoder_positions")):
        if name == "disentangled" and place == "positions":
            continue
        with pytest.raises(RegardError, match=f"positions '{name}' act inside self-attention"):
            make_model(replaced(config, **{place: name}))


def test_an_encoder_of_convolutions_needs_no_positions() -> None:
    model, source = stirred(PAIR, positions="none"), torch.arange(5, 11)[None]
    order = [1, 0, 2, 4, 5, 3]
    assert (model.encode(source[:, order])[0] - model.encode(source)[0][:, order]).abs().max() > 1e-3


def test_biases_between_target_and_source_are_as_good_as_ever() -> None:
    assert stirred(PAIR, cross_positions="alibi").decoder.cross_scheme.relative


@pytest.mark.parametrize("config", [LM, PAIR])
def test_windows_and_prefixes_are_refused(config: ModelConfig) -> None:
    with pytest.raises(RegardError, match=r"\[model\.attention\] would do nothing here: choose model\.mixer attention"):
        changed_settings(config, **{"attention.window": 4})
    if config is LM:
        with pytest.raises(RegardError, match="a convolution sees no prefix"):
            stirred(LM)(ids(5), prefix(3))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gpt-tiny",
            {"convolution.kernel": 5},
            r"\[model\.convolution\] would do nothing here: choose model\.mixer convolution",
        ),
        ("conv-lm", {"n_heads": 4}, r"model\.n_heads would do nothing here, where model.mixer is convolution"),
        ("conv-lm", {"attention_dropout": 0.1}, r"model\.attention_dropout would do nothing"),
        ("gla-tiny", {"n_kv_heads": 1}, r"model\.n_kv_heads would do nothing here, where model\.mixer is gla"),
        ("gla-tiny", {"d_head": 8}, r"model\.d_head would do nothing here, where model\.mixer is gla"),
        ("linear-attention-tiny", {"attention_dropout": 0.1}, r"model\.attention_dropout would do nothing"),
        ("mamba-tiny", {"d_head": 8}, r"model\.d_head would do nothing here, where model\.mixer is mamba"),
        ("conv-lm", {"feedforward": "gated"}, r"model\.feedforward would do nothing here, where model\.d_ff is 0"),
        ("mamba-tiny", {"parallel": True}, r"model\.parallel would do nothing here, where model\.d_ff is 0"),
        ("rwkv-tiny", {"activation": "silu"}, "activation would do nothing here, where .* is rwkv-channel-mix"),
        ("convs2s-small", {"activation": "gelu"}, r"model\.activation would do nothing"),
        ("convs2s-small", {"ff_dropout": 0.1}, r"model\.ff_dropout would do nothing"),
        ("convs2s-small", {"d_ff": -1}, r"'model\.d_ff' must be a number from 0 up, not -1"),
    ],
)
def test_settings_that_nothing_reads_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        resolve(preset(name, **{"source_vocab": V, "target_vocab": V, **changes}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"mixer": "convolution"}),  # whose preset has heads, and dropout of theirs
        ("bytenet-small", {"mixer": "attention", "d_ff": 8}),  # whose preset has dilations
        ("conv-lm", {"d_ff": 8, "feedforward": "gated", "activation": "silu", "ff_dropout": 0.1}),
        ("convs2s-small", {"n_heads": 2, "attention_dropout": 0.1}),  # of its attention to the source
        ("linear-attention-tiny", {"d_head": 8}),
        ("gla-tiny", {"mixer": ("gla", "attention"), "n_kv_heads": 1}),
    ],
)
def test_what_a_preset_says_is_no_question(name: str, changes: dict[str, Any]) -> None:
    config = resolve(preset(name, **{"source_vocab": V, "target_vocab": V, **changes}))
    assert resolve(config) == config  # as a saved model is read


# ---- learning --------------------------------------------------------------------------------------------------------


def learn(model: Any, make: Any, steps: int) -> float:
    """Mean loss of the last few steps."""
    objective, losses = Objective(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss, _, count = objective(*make())
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append((loss / count).item())
    return sum(losses[-10:]) / 10


def test_a_dilated_language_model_learns_to_look_eight_tokens_back() -> None:
    """Each token is that eight before it plus one; blocks without dilation see seven tokens back, which is too few."""

    def texts() -> tuple[Tensor, Tensor]:
        first = torch.randint(0, V - 5, (16, 8))
        row = torch.cat([(first + i) % (V - 5) + 5 for i in range(4)], 1)
        labels = row[:, 1:].clone()
        labels[:, :7] = PAD  # the first eight cannot be predicted
        return row[:, :-1], labels

    torch.manual_seed(0)
    found = {
        dilations: learn(
            make_model(replaced(LM, **{"convolution.kernel": 2, "convolution.dilations": dilations})),
            texts,
            150,
        )
        for dilations in ((1, 2, 4), (1,))
    }
    assert found[1, 2, 4] < 0.1
    assert found[1,] > 2.0


def test_a_convolutional_pair_learns_to_copy_through_its_attention() -> None:
    def pairs() -> tuple[Tensor, Tensor, Tensor]:
        source = torch.randint(5, V, (32, 6))
        return source, torch.cat([torch.full((32, 1), SOS), source[:, :-1]], 1), source

    torch.manual_seed(0)
    assert learn(make_model(PAIR), pairs, 200) < 0.2


@pytest.mark.parametrize("config", [LM, PAIR])
def test_computing_blocks_again_gives_the_same_gradients(config: ModelConfig) -> None:
    rows, found = ids(9, 4), []
    inputs = (rows, rows) if config is LM else (rows, rows, rows)
    for recompute in (False, True):
        torch.manual_seed(0)
        model = make_model(replaced(config, dropout=0.2))
        prepare_model(model, TrainConfig(activation_checkpointing=recompute))
        torch.manual_seed(1)
        Objective(model)(*inputs)[0].backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    assert isinstance(model, GPT if config is LM else Transformer)
