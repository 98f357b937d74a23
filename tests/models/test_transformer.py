"""The encoder-decoder's properties: causality, padding, batches, permutations, caches, sharing, sizes, refusals."""

from typing import Any

import pytest
import torch
from configured import SCHEMES as DECODER_SCHEMES
from configured import model_config, replaced
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import SOS
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.masks import positions_of
from regard.layers.decoding_state import DecodingState
from regard.layers.positions.scheme import NoPositions
from regard.models.architectures import preset as named
from regard.models.sizes import SIZES
from regard.models.transformer import Transformer
from regard.tasks.run_config import make_config
from regard.text.special_tokens import PAD

V = 23
TINY = model_config(
    preset="transformer-tiny",
    n_encoder_layers=2,
    n_decoder_layers=2,
    d_model=16,
    n_heads=4,
    d_ff=24,
    max_len=64,
    source_vocab=V,
    target_vocab=V,
    **{
        "shaw.clip": 3,  # these are small enough that a dozen tokens reach every corner of every position scheme
        "t5.buckets": 8,
        "t5.max_distance": 11,
        "fire.threshold": 4.0,
        "cope.positions": 5,
        "yarn.trained_len": 16,
        "rope.factor": 2.0,
        "rope.scaling": "linear",
    },
)
close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def make(**changes: object) -> Transformer:
    """A model in evaluation mode, none of whose weights stands at a special value such as 0 or 1."""
    torch.manual_seed(0)
    model = Transformer(replaced(TINY, **changes)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.requires_grad_(False)


MODELS = {norm: make(norm=norm) for norm in ("pre", "post")}
both = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def ids(*lengths: int, width: int = 0) -> Tensor:
    """Random rows of these lengths, padded on the right."""
    width = max(width, *lengths)
    return torch.stack([torch.cat([torch.randint(5, V, (n,)), torch.full((width - n,), PAD)]) for n in lengths])


# ---- causality -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("t", [0, 3, 6])
def test_a_token_changes_nothing_before_it_and_something_from_it_on(model: Transformer, t: int) -> None:
    source, target = ids(5, 5), ids(7, 7)
    changed = target.clone()
    changed[:, t] = (target[:, t] - 5 + 1) % (V - 5) + 5
    before, after = model(source, target), model(source, changed)
    torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
    assert ((after - before)[:, t:].abs().amax(-1) > 1e-4).all()


@both
def test_no_gradient_flows_from_a_position_to_a_later_one(model: Transformer) -> None:
    memory, places = model.encode(ids(5))
    x = torch.randn(1, 6, 16, requires_grad=True)
    hidden = model.decoder(x, torch.arange(6)[None], memory, places)
    (gradient,) = torch.autograd.grad(hidden[:, 2].square().sum(), x)
    assert (gradient[:, 3:] == 0).all()
    assert (gradient[:, :3].abs().amax(-1) > 0).all()


@both
def test_every_source_token_reaches_every_logit(model: Transformer) -> None:
    source, target = ids(5), ids(4)
    before = model(source, target)
    for s in range(5):
        changed = source.clone()
        changed[:, s] = (source[:, s] - 5 + 1) % (V - 5) + 5
        assert ((model(changed, target) - before).abs().amax(-1) > 1e-6).all()


# ---- padding and batches ---------------------------------------------------------------------------------------------


@both
@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    more=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_neither_padding_nor_neighbours_change_a_row(
    model: Transformer, lengths: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    widths = [max(n) + extra for n, extra in zip(zip(*lengths, strict=True), more, strict=True)]
    source = ids(*(s for s, _ in lengths), width=widths[0])
    target = ids(*(t for _, t in lengths), width=widths[1])
    together = model(source, target)
    for i, (s, t) in enumerate(lengths):
        alone = model(source[i : i + 1, :s], target[i : i + 1, :t])
        torch.testing.assert_close(together[i, :t], alone[0], **close)


@both
def test_what_stands_in_padding_is_never_read(model: Transformer) -> None:
    """However large the vectors of padded positions, no real one changes."""
    positions = positions_of(ids(3, 5))
    x = torch.randn(2, 5, 16)
    spoilt = x.clone()
    spoilt[0, 3:] = 1e4
    for stack, rest in ((model.encoder, ()), (model.decoder, (torch.randn(2, 4, 16), torch.arange(4).expand(2, 4)))):
        clean, dirty = (stack(y, positions, *rest) for y in (x, spoilt))
        torch.testing.assert_close(dirty[positions >= 0], clean[positions >= 0])


# ---- permutations ----------------------------------------------------------------------------------------------------


def blind() -> Transformer:
    """A model whose encoder knows no positions: none that can be configured, since such a one is refused."""
    model = make(positions="none", encoder_positions="sinusoidal")
    model.encoder.schemes[0] = NoPositions()
    return model


@settings(max_examples=10)
@given(order=st.permutations(range(6)))
def test_without_positions_the_encoder_is_permutation_equivariant(order: list[int]) -> None:
    model = blind()
    source = ids(6, 6)
    torch.testing.assert_close(model.encode(source[:, order])[0], model.encode(source)[0][:, order], **close)


def test_with_sinusoids_it_is_not() -> None:
    source, order = torch.arange(5, 11)[None], [1, 0, 2, 3, 4, 5]
    for model in MODELS.values():
        moved, stayed = model.encode(source[:, order])[0], model.encode(source)[0][:, order]
        assert ((moved - stayed).abs().amax(-1) > 1e-3).all()


def test_without_positions_the_decoder_reads_the_source_as_a_bag() -> None:
    model = blind()
    source, target = ids(6), ids(4)
    torch.testing.assert_close(model(source.flip(1), target), model(source, target), **close)
    assert (model(source, target.flip(1)) - model(source, target)).abs().max() > 1e-3  # but the mask orders the target


# ---- cached decoding -------------------------------------------------------------------------------------------------


@both
def test_cached_equals_uncached_at_every_step(model: Transformer) -> None:
    source, target = ids(7, 3, 5), ids(40, 40, 40)  # the cache doubles its columns twice
    state = model.begin(source)
    whole = model(source, target)
    for t in range(40):
        logits = model.step(target[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], **close)
        if t % 10 == 0:  # a forward pass over the prefix alone gives the same
            torch.testing.assert_close(logits, model(source, target[:, : t + 1])[:, -1], **close)


def read(model: Transformer, target: Tensor, positions: Tensor, state: DecodingState) -> Tensor:
    """Hidden vectors (B, T, C) of several target tokens at once, which the state then holds."""
    x = model.decoder.embed(model.target_embedding(target), positions)
    return model.decoder(x, positions, None, state.memory_positions, state)


@both
@settings(max_examples=15)
@given(pieces=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_pieces_of_any_length_are_read_one_after_the_other(model: Transformer, pieces: list[int]) -> None:
    source, target = ids(4, 6), ids(sum(pieces), sum(pieces))
    state, parts, start = model.begin(source), [], 0
    for n in pieces:
        positions = torch.arange(start, start + n).expand(2, n)
        parts.append(read(model, target[:, start : start + n], positions, state))
        start += n
    torch.testing.assert_close(model.head(torch.cat(parts, 1)), model(source, target), **close)


@both
def test_prompts_of_different_lengths_go_on_from_where_each_ended(model: Transformer) -> None:
    source, prompts, lengths = ids(4, 6), ids(2, 5), torch.tensor([2, 5])
    state = model.begin(source)
    read(model, prompts, positions_of(prompts), state)
    rows = [prompts[0, :2], prompts[1]]
    for i in range(3):
        token = ids(1, 1)
        assert torch.equal(state.position(), lengths + i)
        logits = model.step(token[:, 0], state)
        rows = [torch.cat([row, new]) for row, new in zip(rows, token, strict=True)]
        for b, row in enumerate(rows):
            torch.testing.assert_close(logits[b], model(source[b : b + 1], row[None])[0, -1], **close)


@both
def test_hypotheses_multiply_move_and_leave_with_their_sentences(model: Transformer) -> None:
    source = ids(7, 3, 5)
    state = model.begin(source)
    prefixes, owner = torch.empty(3, 0, dtype=torch.long), torch.arange(3)

    def say(tokens: Tensor) -> None:
        nonlocal prefixes
        prefixes = torch.cat([prefixes, tokens[:, None]], 1)
        torch.testing.assert_close(model.step(tokens, state), model(source[owner], prefixes)[:, -1], **close)

    def become(rows: list[int]) -> None:
        nonlocal prefixes, owner
        prefixes, owner = prefixes[rows], owner[rows]

    say(torch.full((3,), SOS))
    state.reorder(torch.tensor([[0, 0], [0, 0], [0, 0]]))
    become([0, 0, 1, 1, 2, 2])  # two hypotheses each
    say(torch.randint(5, V, (6,)))
    state.reorder(torch.tensor([[1, 1], [0, 1], [1, 0]]))
    become([1, 1, 2, 3, 5, 4])  # survivors, within their sentences
    say(torch.randint(5, V, (6,)))
    state.select(torch.tensor([0, 2]))  # the middle sentence has stopped
    become([0, 1, 4, 5])
    say(torch.randint(5, V, (4,)))
    say(torch.randint(5, V, (4,)))


# ---- every position scheme -------------------------------------------------------------------------------------------

IN_CROSS = ("none", "t5", "alibi", "kerple-log", "kerple-power")
SCHEMES = [(name, "none") for name in DECODER_SCHEMES] + [("rope", name) for name in IN_CROSS[1:]] + [("t5", "t5")]
every_scheme = pytest.mark.parametrize(("name", "cross"), SCHEMES)


def with_scheme(name: str, cross: str, **changes: object) -> Transformer:
    """Where an encoder refuses a scheme, the decoder has it alone."""
    in_encoder = "sinusoidal" if name in ("none", "cope") else ""
    model = make(positions=name, encoder_positions=in_encoder, cross_positions=cross, **changes)
    for part in (model.encoder.schemes, model.decoder.schemes, model.decoder.cross_scheme):
        for p in part.parameters():
            p.add_(0.5 * torch.rand_like(p))
    return model


@every_scheme
@pytest.mark.parametrize(
    "sizes", [{}, {"attention.window": 3, "n_kv_heads": 1, "d_head": 6}], ids=["plain", "window, multi-query"]
)
def test_every_scheme_decodes_as_it_trains(name: str, cross: str, sizes: dict[str, int]) -> None:
    """Step by step, two hypotheses a sentence that change places: the logits of teacher forcing."""
    model, source = with_scheme(name, cross, **sizes), ids(7, 3, 5)
    state = model.begin(source)
    owner, rows = torch.arange(3), torch.empty(3, 0, dtype=torch.long)
    for t in range(18):  # past the first columns of the cache
        if t in (2, 9):
            chosen = [0, 0, 1, 1, 2, 2] if t == 2 else [1, 0, 2, 2, 5, 4]
            state.select(torch.tensor(chosen))
            owner, rows = owner[chosen], rows[chosen]
        tokens = torch.randint(5, V, (len(rows),))
        rows = torch.cat([rows, tokens[:, None]], 1)
        logits = model.step(tokens, state)
        if t in (0, 1, 2, 3, 9, 17):
            torch.testing.assert_close(logits, model(source[owner], rows)[:, -1], **close)


@every_scheme
def test_every_scheme_is_causal_and_blind_to_padding_and_neighbours(name: str, cross: str) -> None:
    model, lengths = with_scheme(name, cross, n_kv_heads=2), [(9, 4), (2, 12), (5, 1)]
    source, target = ids(*(s for s, _ in lengths)), ids(*(t for _, t in lengths))
    together = model(source, target)
    for i, (s, t) in enumerate(lengths):
        alone = model(source[i : i + 1, :s], target[i : i + 1, :t])
        torch.testing.assert_close(together[i, :t], alone[0], **close)
        shorter = model(source[i : i + 1, :s], target[i : i + 1, : (t + 1) // 2])
        torch.testing.assert_close(alone[:, : (t + 1) // 2], shorter, **close)


@pytest.mark.parametrize(("name", "cross"), [s for s in SCHEMES if s[0] not in ("none", "cope")])
def test_with_every_scheme_the_encoder_knows_the_order(name: str, cross: str) -> None:
    model = with_scheme(name, cross)
    source, order = torch.arange(5, 11)[None], [1, 0, 2, 4, 5, 3]
    moved, stayed = model.encode(source[:, order])[0], model.encode(source)[0][:, order]
    assert (moved - stayed).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sinusoidal", "t5", "shaw"])
def test_a_window_reaches_both_ways_in_the_encoder_and_back_in_the_decoder(name: str) -> None:
    """Two layers of a window of 3 reach 4 tokens, and not one more."""
    model, x, positions = (
        make(positions=name, **{"attention.window": 3}),
        torch.randn(1, 12, 16),
        torch.arange(12)[None],
    )
    spoilt = x.clone()
    spoilt[:, 5] = torch.randn(16)
    memory = (torch.randn(1, 1, 16), torch.zeros(1, 1, dtype=torch.long))
    for stack, rest, reached in ((model.encoder, (), range(1, 10)), (model.decoder, memory, range(5, 10))):
        difference = (stack(spoilt, positions, *rest) - stack(x, positions, *rest))[0].abs().amax(-1)
        assert [t for t in range(12) if difference[t] > 1e-6] == [*reached]


@pytest.mark.parametrize("cross", IN_CROSS[1:])
def test_a_bias_in_cross_attention_tells_the_order_of_the_memory(cross: str) -> None:
    """The decoder alone: the same memory in another order, and the same memory at other positions."""
    model = with_scheme("sinusoidal", cross)
    memory, places, target = torch.randn(1, 6, 16), torch.arange(6)[None], ids(4)
    before = model.read_target((memory, places), target)
    assert (model.read_target((memory.flip(1), places), target) - before).abs().max() > 1e-4
    torch.testing.assert_close(model.read_target((memory.flip(1), places.flip(1)), target), before, **close)


@pytest.mark.parametrize("name", [name for name in DECODER_SCHEMES if name not in IN_CROSS])
def test_schemes_that_mean_nothing_between_two_texts_are_refused(name: str) -> None:
    with pytest.raises(RegardError, match=f"positions '{name}' make no sense in cross-attention"):
        make(cross_positions=name)


@pytest.mark.parametrize("name", ["none", "cope"])
def test_schemes_that_mean_nothing_in_an_encoder_are_refused(name: str) -> None:
    with pytest.raises(RegardError, match=f"positions '{name}' make no sense in an encoder"):
        make(positions=name)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_is_for_training() -> None:
    model, source, target = make(dropout=0.3, attention_dropout=0.2, ff_dropout=0.2), ids(5), ids(4)
    quiet = make()
    assert torch.equal(model(source, target), model(source, target))
    torch.testing.assert_close(model(source, target), quiet(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


# ---- sharing and sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tie", "shared"), [("all", {"source", "target", "head"}), ("decoder", {"target", "head"}), ("none", set())]
)
def test_which_matrices_are_one(tie: str, shared: set[str]) -> None:
    model = Transformer(replaced(TINY, tie=tie))
    places = {
        "source": model.source_embedding.weight.data_ptr(),
        "target": model.target_embedding.weight.data_ptr(),
        "head": model.head.weight.data_ptr(),
    }
    assert {name for name, place in places.items() if list(places.values()).count(place) > 1} == shared
    assert len(set(places.values())) == {"all": 1, "decoder": 2, "none": 3}[tie]


def count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize(("tie", "matrices"), [("all", 1), ("decoder", 2), ("none", 3)])
def test_parameters_of_a_small_model_by_hand(tie: str, matrices: int) -> None:
    attention = 4 * (16 * 16 + 16)  # 1,088: q, k, v and out
    feed_forward = 16 * 24 + 24 + 24 * 16 + 16  # 808
    encoder = attention + feed_forward + 2 * 32  # 1,960 with two norms
    decoder = 2 * attention + feed_forward + 3 * 32  # 3,080 with three
    by_hand = matrices * 23 * 16 + 2 * encoder + 2 * decoder + 2 * 32  # 2 * 32: the norms after the stacks
    assert by_hand == {1: 10_512, 2: 10_880, 3: 11_248}[matrices]
    assert count(replaced(TINY, tie=tie)) == by_hand


@pytest.mark.parametrize(
    ("preset", "by_hand", "paper"),
    [
        # base: 37,000 x 512 = 18,944,000 of embeddings; attention 1,050,624, feed-forward 2,099,712, a norm 1,024:
        # 6 encoder blocks of 3,152,384 and 6 decoder blocks of 4,204,032
        ("transformer-base", 63_082_496, 65e6),
        # big: 37,888,000; 4,198,400, 8,393,728, 2,048: 6 of 12,596,224 and 6 of 16,796,672
        ("transformer-big", 214_245_376, 213e6),
    ],
)
def test_parameters_of_the_papers_models(preset: str, by_hand: int, paper: float) -> None:
    config = model_config(preset=preset, norm="post", source_vocab=37_000, target_vocab=37_000)
    assert count(config) == by_hand
    assert by_hand == pytest.approx(paper, rel=0.03)  # the paper rounds, and counts its vocabulary roughly


def test_the_papers_sizes() -> None:
    base, big = (Transformer.resolve(model_config(preset=f"transformer-{size}")) for size in ("base", "big"))
    assert (base.n_encoder_layers, base.n_decoder_layers, base.d_model, base.n_heads, base.d_ff) == (6, 6, 512, 8, 2048)
    assert (big.n_encoder_layers, big.n_decoder_layers, big.d_model, big.n_heads, big.d_ff) == (6, 6, 1024, 16, 4096)


# ---- resolving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", Transformer.presets)
def test_sizes_left_open_are_the_presets_and_others_stay(preset: str) -> None:
    resolved = Transformer.resolve(named(preset, d_ff=40))
    assert resolved.d_ff == 40
    sizes = {name: size for name, size in Transformer.presets[preset].items() if name in SIZES} | {"d_ff": 40}
    assert {name: getattr(resolved, name) for name in sizes} == sizes
    assert Transformer.resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_model": 30, "n_heads": 4}, r"model\.d_model 30 cannot be split into model\.n_heads 4"),
        ({"preset": "transformer-huge"}, r"model\.preset transformer-huge is not known here.*transformer-base"),
        ({"source_vocab": 10, "target_vocab": 12}, r"model\.tie 'all'.*10 and 12 pieces.*tokenizer\.joint"),
        ({"dropout": 1.0}, r"'model\.dropout' must be from 0 to below 1, not 1\.0"),
        ({"attention_dropout": -0.1}, r"'model\.attention_dropout' must be from 0 to below 1, not -0\.1"),
        ({"ff_dropout": float("nan")}, r"'model\.ff_dropout' must be from 0 to below 1, not nan"),
        ({"n_heads": -2}, r"model\.n_heads must be at least 1, not -2"),
        ({"n_encoder_layers": -1}, r"model\.n_encoder_layers must be at least 1, not -1"),
        ({"max_len": 0}, r"'model\.max_len' must be a number from 1 up, not 0"),
        ({"positions": "rope", "rope.base": 0.0}, r"\'model\.rope\.base\' must be above 1, not 0\.0"),
        ({"positions": "rope", "rope.base": -10.0}, r"\'model\.rope\.base\' must be above 1, not -10\.0"),
    ],
)
def test_impossible_models_are_refused_in_one_line(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RegardError, match=message) as caught:
        Transformer(replaced(TINY, **wrong))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_vocabularies_of_two_sizes_are_fine_when_the_encoder_has_its_own() -> None:
    model = Transformer(replaced(TINY, source_vocab=10, target_vocab=12, tie="decoder"))
    assert model(torch.tensor([[9, 5]]), torch.tensor([[SOS, 11, 7]])).shape == (1, 3, 12)


def test_a_scheme_is_refused_before_anything_is_read_or_written() -> None:
    with pytest.raises(RegardError, match="'none' make no sense in an encoder"):
        make_config({}, {"model.positions": "none"})


@both
def test_token_0_is_a_piece_like_any_other(model: Transformer) -> None:
    """As T5's start token, and at the end of a source: whatever padding stands beside it."""
    sources, targets = [[5, 0], [0, 6, 7, 0], [0]], [[0, 8], [0], [0, 9, 0]]
    rows = [
        torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in side], batch_first=True, padding_value=PAD)
        for side in (sources, targets)
    ]
    together = model(*rows)
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = model(torch.tensor([source]), torch.tensor([target]))[0]
        torch.testing.assert_close(together[i, : len(target)], alone, **close)
