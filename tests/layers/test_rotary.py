"""Rotary positions: the tables by hand, the rotation as complex numbers, both against Llama's."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from configured import scheme as scheme_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import masked_scores
from torch import Tensor

from regard.kernels.attention_functions import rotate
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import make_plan
from regard.layers.positions.rotary import Rotary

B, H, T, D = 2, 3, 5, 8
PLACES = torch.tensor([[0, 1, 2, 3, 4], [7, 2, 90, 0, 31]])


def rope(d_head: int, base: float, scaling: str = "none", factor: float = 1.0) -> Rotary:
    found: Rotary = scheme_of("rope", d_head=d_head, base=base, scaling=scaling, factor=factor)
    return found


def yarn(d_head: int, base: float, factor: float, trained_len: int, slow: float = 1.0, fast: float = 32.0) -> Rotary:
    settings = {"base": base, "factor": factor, "trained_len": trained_len, "slow": slow, "fast": fast}
    found: Rotary = scheme_of("yarn", d_head=d_head, **settings)
    return found


def turned_by(turn: Tensor) -> Rotary:
    """Plain rope with other angles."""
    found = rope(2 * len(turn), 10000.0)
    found.inv_freq = turn.float()
    return found


def theta(d_head: int, base: float) -> np.ndarray:
    return np.array([base ** (-2 * m / d_head) for m in range(d_head // 2)])


def test_each_frequency_by_hand() -> None:
    # Width 8, base 10,000: each frequency is a tenth of the one before.
    plain = [1, 0.1, 0.01, 0.001]
    assert rope(8, 10000.0).inv_freq.tolist() == pytest.approx(plain)
    assert rope(8, 10000.0, "linear", 4.0).inv_freq.tolist() == pytest.approx([t / 4 for t in plain])
    # NTK: base 10,000 * 4^(8/6), so frequency m is divided by 4^(m/3); 4^(1/3) = 1.587401.
    assert rope(8, 10000.0, "ntk", 4.0).inv_freq.tolist() == pytest.approx(
        [1, 0.0629961, 0.00396850, 0.00025], rel=1e-5
    )
    assert rope(8, 10000.0, "none", 4.0).inv_freq.tolist() == pytest.approx(plain)  # a factor alone does nothing


@given(half=st.integers(2, 64), base=st.floats(10.0, 1e6), factor=st.floats(1.0, 64.0))
def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor(
    half: int, base: float, factor: float
) -> None:
    ratio = rope(2 * half, base, "ntk", factor).inv_freq.double().numpy() / theta(2 * half, base)
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(1 / factor, rel=1e-5)
    assert (np.diff(ratio) <= 1e-6).all()


def test_quarter_turns_by_hand() -> None:
    # Two pairs, the first rotated by 90 degrees per position, the second by 180.
    scheme = turned_by(torch.tensor([math.pi / 2, math.pi]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 1, 4, 4)
    turned = rotate(x, scheme.rotation(torch.arange(4)[None]))[0, 0]
    expected = torch.tensor([[1.0, 2, 3, 4], [-2, 1, -3, -4], [-1, -2, 3, 4], [2, -1, -3, -4]])
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("scaling", "factor", "paces"), [("none", 1.0, theta(D, 500.0)), ("linear", 8.0, theta(D, 500.0) / 8)]
)
def test_rotating_is_multiplying_complex_numbers(scaling: str, factor: float, paces: np.ndarray) -> None:
    x = torch.randn(B, H, T, D)
    turned = rotate(x, rope(D, 500.0, scaling, factor).rotation(PLACES))
    numbers = x.double().numpy()
    pairs = numbers[..., 0::2] + 1j * numbers[..., 1::2]  # (B, H, T, D/2)
    pairs = pairs * np.exp(1j * PLACES.numpy()[:, None, :, None] * paces)
    np.testing.assert_allclose(turned[..., 0::2].numpy(), pairs.real, atol=3e-5)
    np.testing.assert_allclose(turned[..., 1::2].numpy(), pairs.imag, atol=3e-5)


def test_without_a_rotation_nothing_moves() -> None:
    x = torch.randn(1, 1, 2, 4)
    assert rotate(x, None) is x


def test_half_precision_is_turned_in_fp32_and_stays_half() -> None:
    x = torch.randn(B, H, T, D).bfloat16()
    rotation = rope(D, 10000.0).rotation(PLACES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        turned, again = rotate(x, rotation), rope(D, 10000.0).rotation(PLACES)
    assert [part.dtype for part in again] == [torch.float32, torch.float32]
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rotation).bfloat16())


def test_the_table_is_neither_trained_nor_saved() -> None:
    scheme = yarn(D, 10000.0, 4.0, 64)
    assert not list(scheme.parameters())
    assert not scheme.state_dict()


# ---- YaRN ------------------------------------------------------------------------------------------------------------


def test_the_worked_yarn_of_width_64() -> None:
    # Base 10,000, 8 times 4,096 tokens. Pair m makes 4096 * theta_m / 2 pi rotations in the trained length: 32 at
    # m = 10.5, 1 at m = 22.5, so frequencies up to m = 10 stay, those from 23 on are divided by 8, with a ramp between.
    ratio = yarn(64, 10000.0, 8.0, 4096).inv_freq.double().numpy() / theta(64, 10000.0)
    expected = {0: 1, 5: 1, 10: 1, 15: 0.663, 20: 0.327, 23: 0.125, 25: 0.125, 31: 0.125}
    assert {m: round(float(ratio[m]), 3) for m in expected} == expected
    assert ratio[11] == pytest.approx(1 - 7 / 8 / 13, rel=1e-6)
    assert ratio[22] == pytest.approx(1 - 7 / 8 * 12 / 13, rel=1e-6)


@pytest.mark.parametrize(("factor", "temperature"), [(1.0, 1.0), (8.0, 1.2079442), (32.0, 1.3465736)])
def test_yarn_sharpens_scores_by_the_square_of_its_temperature(factor: float, temperature: float) -> None:
    scheme = yarn(D, 10000.0, factor, 64)
    cos, sin = scheme.rotation(PLACES)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, temperature**2))
    q, k = torch.randn(2, B, H, T, D)
    plain = turned_by(scheme.inv_freq)
    sharp, calm = ((rotate(q, r) * rotate(k, r)).sum(-1) for r in (scheme.rotation(PLACES), plain.rotation(PLACES)))
    torch.testing.assert_close(sharp, calm * temperature**2, atol=1e-5, rtol=1e-5)


def test_yarn_for_the_trained_length_is_plain_rope() -> None:
    torch.testing.assert_close(yarn(64, 10000.0, 1.0, 4096).inv_freq, rope(64, 10000.0).inv_freq)


@given(
    half=st.integers(2, 64),
    base=st.sampled_from([500.0, 10000.0, 500000.0]),
    factor=st.floats(1.5, 64.0),
    trained_len=st.integers(16, 8192),
    slow=st.sampled_from([1.0, 2.0]),
    fast=st.sampled_from([16.0, 32.0]),
)
def test_high_frequencies_stay_and_low_ones_are_divided_by_the_factor(
    half: int, base: float, factor: float, trained_len: int, slow: float, fast: float
) -> None:
    """High frequencies stay, because many rotations in the trained length have covered every angle."""
    plain = theta(2 * half, base)
    ratio = yarn(2 * half, base, factor, trained_len, slow, fast).inv_freq.double().numpy() / plain
    turns = trained_len * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > fast * 1.001], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < slow * 0.999], 1 / factor, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-6).all()


# ---- peers -----------------------------------------------------------------------------------------------------------


def llama(**parameters: Any) -> Any:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = modeling.LlamaConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        head_dim=D,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 700.0, **parameters},
    )
    return modeling, modeling.LlamaRotaryEmbedding(config)


def halves(x: Tensor) -> Tensor:
    """Llama's layout: the first numbers of all pairs, then the second ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    ("ours", "parameters"),
    [
        (rope(D, 700.0), {"rope_type": "default"}),
        (rope(D, 700.0, "linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (yarn(D, 700.0, 4.0, 64, slow=1.0, fast=8.0), YARN),
    ],
    ids=["plain", "linear", "yarn"],
)
def test_it_is_llamas_rotation_with_the_pairs_in_another_order(ours: Rotary, parameters: dict[str, Any]) -> None:
    modeling, theirs = llama(**parameters)
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq)
    assert ours.temperature == pytest.approx(theirs.attention_scaling)
    q, k = torch.randn(2, B, H, T, D)
    expected = modeling.apply_rotary_pos_emb(halves(q), halves(k), *theirs(q, PLACES))
    rotation = ours.rotation(PLACES)
    for x, there in zip((q, k), expected, strict=True):
        torch.testing.assert_close(halves(rotate(x, rotation)), there, atol=1e-5, rtol=1e-5)


# ---- scores know distances alone -------------------------------------------------------------------------------------


def turned_scores(scheme: Rotary, q: Tensor, k: Tensor, q_places: Tensor, k_places: Tensor) -> Tensor:
    plan = make_plan(FULL, q_places, k_places, scheme, kernel="reference")
    return masked_scores(rotate(q, scheme.rotation(q_places)), rotate(k, scheme.rotation(k_places)), plan)


@settings(max_examples=40)
@given(
    scheme=st.sampled_from([rope(D, 10000.0), rope(D, 100.0, "ntk", 4.0), yarn(D, 10000.0, 8.0, 64)]),
    q_places=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    k_places=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    shift=st.integers(1, 500),
)
def test_shifting_both_positions_changes_no_score(
    scheme: Rotary, q_places: list[int], k_places: list[int], shift: int
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, H, len(q_places), D), torch.randn(1, H, len(k_places), D)
    at, of = torch.tensor([q_places]), torch.tensor([k_places])
    here = turned_scores(scheme, q, k, at, of)
    torch.testing.assert_close(turned_scores(scheme, q, k, at + shift, of + shift), here, atol=5e-4, rtol=0)
    assert not torch.allclose(turned_scores(scheme, q, k, at + shift, of), here, atol=5e-3)  # one alone: it does
