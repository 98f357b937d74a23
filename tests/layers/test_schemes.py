"""Schemes by name: what each reads from the settings, where it is refused, how a stack uses it, and what order means."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configured import SCHEMES, model_config, replaced
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.recipes import choices_of, fields_of
from regard.config.registry import PARTS
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, FULL
from regard.layers.block import make_blocks
from regard.layers.positions.absolute import Learned, Linear, Sinusoidal
from regard.layers.positions.contextual import CoPE, Disentangled, Shaw
from regard.layers.positions.relative import FIRE, ALiBi, KerpleLog, KerplePower, T5Bias
from regard.layers.positions.rotary import RoPE, Rotary, YaRN
from regard.layers.positions.scheme import NoPositions, make_positions, schemes_for
from regard.layers.stack import Stack
from regard.models.gpt import GPT
from regard.models.transformer import Transformer

C, H, T = 16, 2, 6
CONFIG = model_config(
    preset="transformer-tiny",
    n_encoder_layers=2,
    n_decoder_layers=3,
    d_model=C,
    n_heads=H,
    n_kv_heads=H,
    d_head=C // H,
    d_ff=24,
    dropout=0.0,
    max_len=32,
    source_vocab=20,
    target_vocab=20,
    **{"fire.threshold": 4.0},
)
KINDS = {
    **{"none": NoPositions, "linear": Linear, "sinusoidal": Sinusoidal, "learned": Learned, "shaw": Shaw},
    **{"t5": T5Bias, "rope": RoPE, "yarn": YaRN, "alibi": ALiBi, "kerple-log": KerpleLog},
    **{"kerple-power": KerplePower, "fire": FIRE, "cope": CoPE},
}
IN_ENCODERS = {"disentangled": Disentangled}  # alone
PER_LAYER = {"shaw", "fire", "cope"}


def having(**settings: object) -> ModelConfig:
    return replaced(CONFIG, **settings)


def stir(module: nn.Module) -> None:
    """No parameter stays at a special value such as 0, where T5 and CoPE begin."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5 * torch.rand_like(p) + 0.1)


@pytest.fixture
def no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (NoPositions, CoPE):
        monkeypatch.setattr(kind, "check", lambda settings, config, place: None)


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_every_name_is_a_scheme_and_a_choice_of_the_settings() -> None:
    assert set(KINDS) == set(SCHEMES) == set(schemes_for(CONFIG, "decoder"))
    assert set(PARTS["positions"]) == {*KINDS, *IN_ENCODERS}
    assert choices_of(fields_of(ModelConfig)["positions"]) == tuple(PARTS["positions"])
    for place, kinds in {"decoder": KINDS, "encoder": IN_ENCODERS}.items():
        for name, kind in kinds.items():
            assert type(make_positions(CONFIG, place, name)) is kind


def test_the_settings_name_the_scheme_unless_the_caller_does() -> None:
    assert isinstance(make_positions(having(positions="alibi"), "decoder"), ALiBi)
    assert isinstance(make_positions(having(positions="alibi"), "decoder", "fire"), FIRE)


def turn(name: str, **settings: object) -> Tensor:
    scheme = make_positions(having(**settings), "decoder", name)
    assert isinstance(scheme, Rotary)
    return scheme.inv_freq


SETTINGS: list[tuple[str, dict[str, object], Callable[[Any], object], object]] = [
    ("linear", {"d_model": 6}, lambda s: tuple(s.a.shape), (6,)),
    ("sinusoidal", {"d_model": 6, "max_len": 9}, lambda s: tuple(s.encoding.shape), (9, 6)),
    ("sinusoidal", {"d_model": 4, "sinusoidal.base": 100.0}, lambda s: s.encoding[1, 2].item(), math.sin(0.1)),
    ("learned", {"d_model": 6, "max_len": 9}, lambda s: tuple(s.encoding.shape), (9, 6)),
    ("shaw", {"d_head": 6, "shaw.clip": 3}, lambda s: {tuple(p.shape) for p in (s.keys, s.added)}, {(7, 6)}),
    ("t5", {"n_heads": 4, "t5.buckets": 12}, lambda s: tuple(s.weight.shape), (4, 12)),
    ("t5", {"t5.max_distance": 77}, lambda s: s.max_distance, 77),
    ("rope", {"d_head": 4, "rope.base": 100.0}, lambda s: s.inv_freq.tolist(), [1, 0.1]),
    (
        "rope",
        {"d_head": 4, "rope.scaling": "linear", "rope.factor": 8.0},
        lambda s: s.inv_freq.tolist(),
        [1 / 8, 1 / 800],
    ),
    ("rope", {"d_head": 4, "rope.scaling": "ntk", "rope.factor": 8.0}, lambda s: s.inv_freq.tolist(), [1, 1 / 800]),
    ("yarn", {"d_head": 4, "yarn.factor": 8.0}, lambda s: s.temperature, 0.1 * math.log(8) + 1),
    ("yarn", {"d_head": 4, "yarn.factor": 8.0, "yarn.trained_len": 10**7}, lambda s: s.inv_freq.tolist(), [1, 1 / 100]),
    ("yarn", {"d_head": 4, "yarn.factor": 8.0, "yarn.trained_len": 10}, lambda s: s.inv_freq.tolist(), [1, 1 / 800]),
    ("alibi", {"n_heads": 4}, lambda s: s.slopes.tolist(), [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
    ("kerple-log", {"n_heads": 4}, lambda s: {tuple(p.shape) for p in (s.r1, s.r2)}, {(4,)}),
    ("kerple-power", {"n_heads": 4}, lambda s: {tuple(p.shape) for p in (s.a, s.p)}, {(4,)}),
    ("fire", {"n_heads": 4, "fire.width": 5}, lambda s: tuple(s.outer.weight.shape), (4, 5)),
    ("fire", {"fire.threshold": 9.0}, lambda s: s.relative_distance(torch.tensor([9]), torch.tensor([0])).item(), 1),
    ("cope", {"d_head": 6, "cope.positions": 7}, lambda s: tuple(s.vectors.shape), (7, 6)),
    ("cope", {"d_head": 6, "max_len": 9}, lambda s: tuple(s.vectors.shape), (9, 6)),
]


@pytest.mark.parametrize(("name", "settings", "look", "expected"), SETTINGS)
def test_each_scheme_reads_its_settings(
    name: str, settings: dict[str, object], look: Callable[[Any], object], expected: object
) -> None:
    found = look(make_positions(having(**settings), "decoder", name))
    assert found == (expected if isinstance(expected, set) else pytest.approx(expected, rel=1e-5))


def test_a_factor_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(
        RegardError, match=r"rope\.factor 8 does nothing without model\.rope\.scaling: choose linear or ntk"
    ):
        make_positions(having(**{"rope.factor": 8.0}), "decoder", "rope")


def test_yarn_reads_where_slow_ends_and_fast_begins() -> None:
    # Width 16, base 10,000, 200 tokens: pairs 0 to 7 make 31.8, 10.1, 3.2, 1.007, .3, ... rotations.
    yarn = {"yarn.factor": 4.0, "yarn.trained_len": 200, "yarn.slow": 1.005, "yarn.fast": 10.0}
    ratio = turn("yarn", d_head=16, **yarn) / turn("rope", d_head=16)
    # Kept ones end between pairs 1 and 2, so at 1; interpolated ones begin between 3 and 4, so at 4: a ramp of three steps.
    assert ratio.tolist() == pytest.approx([1, 1, 0.75, 0.5, 0.25, 0.25, 0.25, 0.25], rel=1e-5)


@pytest.mark.parametrize(("place", "ahead"), [("encoder", 17), ("cross", 17), ("decoder", 0)])
def test_t5_has_buckets_for_what_is_ahead_except_in_a_decoder(place: str, ahead: int) -> None:
    scheme = make_positions(CONFIG, place, "t5")
    assert isinstance(scheme, T5Bias)
    with torch.no_grad():
        scheme.weight.copy_(torch.arange(32).expand(H, -1))
    assert scheme.bias(torch.tensor([4]), torch.tensor([5])).flatten().tolist() == [ahead, ahead]


# ---- refusals --------------------------------------------------------------------------------------------------------

NO_ABSOLUTE = "absolute positions are part of the vectors that cross-attention compares"
REFUSALS = [
    ("none", "encoder", r"an encoder: without positions an encoder sees a bag of tokens"),
    ("cope", "encoder", r"an encoder: CoPE counts from a key up to a later query"),
    ("cope", "cross", r"cross-attention: CoPE counts from a key up to a later query"),
    ("linear", "cross", f"cross-attention: {NO_ABSOLUTE}"),
    ("sinusoidal", "cross", f"cross-attention: {NO_ABSOLUTE}"),
    ("learned", "cross", f"cross-attention: {NO_ABSOLUTE}"),
    ("rope", "cross", "cross-attention: rotary positions compare a place in the target with a place in the source"),
    ("yarn", "cross", "cross-attention: rotary positions compare a place in the target with a place in the source"),
    ("shaw", "cross", "cross-attention: Shaw's vectors stand for distances within one sentence"),
    ("fire", "cross", "cross-attention: FIRE measures distances against the query's position"),
    ("disentangled", "cross", "cross-attention: its table is of distances within one sentence"),
    ("disentangled", "decoder", "a decoder: disentangled attention reads a whole text at once, in an encoder"),
]


@pytest.mark.parametrize(("name", "place", "reason"), REFUSALS)
def test_a_scheme_out_of_place_is_refused_with_its_reason(name: str, place: str, reason: str) -> None:
    message = f"positions '{name}' make no sense in {reason}"
    with pytest.raises(RegardError, match=message):
        make_positions(CONFIG, place, name)
    fields = {
        "encoder": {"encoder_positions": name},
        "decoder": {"positions": name},
        "cross": {"cross_positions": name},
    }[place]
    with pytest.raises(RegardError, match=message):
        Transformer(having(**fields))


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_whatever_is_not_refused_is_allowed(name: str, place: str) -> None:
    if (name, place) not in [refusal[:2] for refusal in REFUSALS]:
        assert isinstance(make_positions(CONFIG, place, name), KINDS[name])


@pytest.mark.parametrize("name", ["none", "cope"])
def test_what_an_encoder_cannot_use_is_refused_for_both_and_fine_for_the_decoder_alone(name: str) -> None:
    with pytest.raises(RegardError, match=f"'{name}' make no sense in an encoder"):
        Transformer(having(positions=name))
    model = Transformer(having(positions=name, encoder_positions="alibi"))
    assert isinstance(model.encoder.schemes[0], ALiBi)
    assert isinstance(model.decoder.schemes[0], KINDS[name])
    GPT(having(preset="gpt-tiny", positions=name))


@pytest.mark.parametrize("name", ["rope", "yarn"])
def test_rotary_positions_need_pairs(name: str) -> None:
    with pytest.raises(RegardError, match=f"{name} turns pairs of numbers, but heads are 5 wide"):
        make_positions(having(d_head=5), "decoder", name)
    with pytest.raises(RegardError, match=f"{name} turns pairs of numbers, but heads are 3 wide"):
        Transformer(having(d_head=0, d_model=6, positions=name))


def test_disentangled_reads_its_settings() -> None:
    for buckets, rows in ((0, 10), (6, 12)):  # one for each distance, or for each bucket, on either side
        settings = having(**{"disentangled.buckets": buckets, "disentangled.reach": 5})
        scheme = make_positions(settings, "encoder", "disentangled")
        assert isinstance(scheme, Disentangled)
        assert tuple(scheme.distances.table.shape) == (rows, C)
        assert (scheme.projection is None) == bool(buckets)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RegardError, match=r"unknown positions 'clock': there are none, linear, .*, cope"):
        make_positions(CONFIG, "decoder", "clock")
    for field in ("positions", "encoder_positions", "cross_positions"):
        with pytest.raises(RegardError, match=rf"'model\.{field}' must be one of none, linear, .*, not 'clock'"):
            Transformer(having(**{field: "clock"}))


# ---- in a stack ------------------------------------------------------------------------------------------------------


def stack_of(name: str, place: str, n_blocks: int = 3) -> Stack:
    config, causal = having(positions=name), place == "decoder"
    torch.manual_seed(0)
    stack = Stack(config, make_blocks(config, n_blocks, place, causal), CAUSAL if causal else FULL, place)
    stir(stack.schemes)
    return stack


def run(stack: Stack, x: Tensor, start: int = 0) -> Tensor:
    positions = torch.arange(start, start + x.shape[1]).expand(len(x), -1)
    return stack(stack.embed(x, positions), positions)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_schemes_are_shared_by_the_blocks_or_one_each(name: str) -> None:
    schemes = list(stack_of(name, "decoder").schemes)
    assert len(schemes) == (3 if name in PER_LAYER else 1)
    assert len({id(p) for scheme in schemes for p in scheme.parameters()}) == sum(
        len(list(scheme.parameters())) for scheme in schemes
    )


@pytest.mark.parametrize("name", sorted(PER_LAYER))
def test_each_block_looks_through_its_own_scheme(name: str) -> None:
    stack, x = stack_of(name, "decoder"), torch.randn(1, T, C)
    results: list[Tensor] = []
    for block in stack.blocks:
        block.register_forward_hook(lambda _, __, stream: results.append(stream[0] + stream[1]))
    run(stack, x)
    stir(stack.schemes[1])
    run(stack, x)
    assert [torch.equal(results[i], results[i + 3]) for i in range(3)] == [True, False, False]


def test_cross_attention_has_no_bias_unless_it_is_given_one() -> None:
    assert isinstance(Transformer(CONFIG).decoder.cross_scheme, NoPositions)
    assert isinstance(Transformer(having(cross_positions="t5")).decoder.cross_scheme, T5Bias)
    assert isinstance(stack_of("alibi", "encoder").cross_scheme, NoPositions)  # nothing to cross to


@pytest.mark.parametrize("name", ["t5", "alibi", "kerple-log", "kerple-power"])
def test_a_bias_between_target_and_source_depends_on_both_positions(name: str) -> None:
    config = having(positions="none", cross_positions=name)
    stack = Stack(config, make_blocks(config, 1, "decoder", causal=True, crosses=True), CAUSAL, "decoder")
    stir(stack.cross_scheme)
    x, memory, zero = torch.randn(1, 1, C), torch.randn(1, 4, C), torch.zeros(1, 1, dtype=torch.long)
    places = torch.arange(4)[None]
    here = stack(x, zero, memory, places)
    torch.testing.assert_close(stack(x, zero + 5, memory, places + 5), here)
    assert not torch.allclose(stack(x, zero + 5, memory, places), here, atol=1e-4)
    assert not torch.allclose(stack(x, zero, memory.flip(1), places), here, atol=1e-4)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_gradients_reach_every_parameter(name: str) -> None:
    stack, x = stack_of(name, "decoder", n_blocks=2), torch.randn(2, T, C)
    run(stack, x).mul(torch.randn(2, T, C)).sum().backward()
    for where, p in stack.schemes.named_parameters():
        assert p.grad is not None, where
        assert p.grad.isfinite().all(), where
        if not where.endswith(
            "outer.bias"
        ):  # FIRE's output bias is the same for all keys, and softmax is invariant to it
            assert p.grad.abs().max() > 1e-5, where
    if name.startswith("kerple"):
        assert all((p.grad != 0).all() for p in stack.schemes.parameters() if p.grad is not None)  # each head's own


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_refusals")
@pytest.mark.parametrize("name", sorted(KINDS))
def test_without_positions_a_stack_is_permutation_equivariant_and_with_any_other_scheme_not(name: str) -> None:
    """f(s(x)) = s(f(x)) for a permutation s of the tokens."""
    stack = stack_of(name, "encoder")
    for part in (stack.blocks, stack.norm):
        part.double()
    x, order = torch.randn(2, T, C, dtype=torch.float64), torch.tensor([3, 0, 5, 1, 4, 2])
    difference = (run(stack, x[:, order]) - run(stack, x)[:, order]).abs().max().item()
    if name == "none":
        assert difference < 1e-12
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("name", sorted(KINDS))
def test_where_a_text_begins_matters_to_absolute_positions_alone(name: str) -> None:
    """And to FIRE, whose queries here are all beyond its threshold the second time."""
    stack, x = stack_of(name, "decoder"), torch.randn(2, T, C)
    difference = (run(stack, x, start=20) - run(stack, x)).abs().max().item()
    if name in ("linear", "sinusoidal", "learned", "fire"):
        assert difference > 1e-3
    else:
        assert difference < 1e-5


@pytest.mark.usefixtures("no_refusals")
@pytest.mark.parametrize("name", ["t5", "cope"])
def test_schemes_that_start_at_zero_start_without_positions(name: str) -> None:
    stack, x = stack_of(name, "encoder"), torch.randn(1, T, C)
    for p in stack.schemes.parameters():
        nn.init.zeros_(p)
    torch.testing.assert_close(run(stack, x.flip(1)), run(stack, x).flip(1), atol=1e-5, rtol=1e-5)


def test_a_causal_mask_alone_breaks_the_symmetry() -> None:
    """Why a decoder can do without positions (NoPE)."""
    stack, x = stack_of("none", "decoder"), torch.randn(1, T, C)
    assert not torch.allclose(run(stack, x.flip(1)), run(stack, x).flip(1), atol=1e-2)
