"""The operations of a captured decoding step, kernels and references alike, against the formulas in float64.

Kernels run on the GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
from fused_rows import gate_rows, qkv_rows
from tokens import EOS, MASK, PADDING, SOS, UNK
from torch import Tensor

from regard.decode.graphs import top_candidates as choosing
from regard.decode.graphs.top_candidates import best_candidate, greedy_token, top_candidates
from regard.kernels import step_attention as attend
from regard.kernels import step_linear as linear
from regard.kernels.step_attention import cross_attend, cross_attend_reference, self_attend, self_attend_reference
from regard.kernels.step_linear import Norm, add_norm, add_norm_reference, linear_one_row, linear_one_row_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
FP32, BF16 = torch.float32, torch.bfloat16
FORBIDDEN = (PADDING, SOS, UNK, MASK)


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, size: float = 1.0, shift: float = 0.0) -> Tensor:
    """Draw weights on the CPU: with programmatic dependent launch a kernel may start before the GPU has written them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape))) * size + shift
    return x.to(dtype).to(DEVICE)


def exact(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def close(found: Tensor, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(exact(found), expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


def skip_where_bits_are_multiplied(function: Any, dtype: torch.dtype, queries: int) -> None:
    if DEVICE == "cpu" and dtype == BF16 and queries > 1 and function in (self_attend, cross_attend):
        pytest.skip("Triton's interpreter takes matrices in bf16 for whole numbers")


# ---- linear ------------------------------------------------------------------------------------------------------------

ERF = np.vectorize(math.erf)
FORMULAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    "gelu-tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def normal(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    if norm is None:
        return x
    centred = x if norm.kind == "rms" else x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps) * exact(norm.weight)
    return y if norm.bias is None else y + exact(norm.bias)


def make_norm(kind: str, c: int, dtype: torch.dtype) -> Norm | None:
    """Also "unshifted", which is a LayerNorm without beta."""
    if not kind:
        return None
    bias = draw(c, dtype=dtype, seed=8) if kind == "layer" else None
    return Norm("rms" if kind == "rms" else "layer", draw(c, dtype=dtype, seed=7, shift=1), bias, 1e-3)


@pytest.mark.parametrize("function", [linear_one_row, linear_one_row_reference])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("n", "c", "norm", "activation", "gated"),
    [
        (50, 96, "", "", False),
        (27, 192, "layer", "relu", False),  # eight rows a program, the last not full
        (9, 4224, "layer", "gelu", False),
        (21, 96, "unshifted", "gelu-tanh", False),
        (13, 128, "rms", "silu", True),
        (9, 2304, "rms", "gelu", True),
        (96, 64, "layer", "silu", True),  # three blocks of gates and values
        (1, 20, "layer", "", False),
    ],
)
def test_a_matrix_times_one_row_is_the_formula(
    function: Any,
    dtype: torch.dtype,
    n: int,
    c: int,
    norm: str,
    activation: str,
    gated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "MIN_PROGRAMS", 2)  # so that a program has more than one row of the matrix
    x = draw(1, c, dtype=dtype, shift=1)
    weight, bias = (
        draw((1 + gated) * n, c, dtype=dtype, seed=1, size=c**-0.5),
        draw((1 + gated) * n, dtype=dtype, seed=2),
    )
    residual, how = draw(1, n, dtype=dtype, seed=3), make_norm(norm, c, dtype)
    y = normal(exact(x), how) @ exact(weight).T
    for b, r in ((None, None), (bias, residual)):
        z = y if b is None else y + exact(b)
        z = z[:, gate_rows(n)] if gated else z
        z = FORMULAS[activation](z[:, :n]) * (z[:, n:] if gated else 1) + (0 if r is None else exact(r))
        close(function(x, weight, b, norm=how, activation=activation, gated=gated, residual=r), z)


def test_the_row_may_be_part_of_a_longer_one() -> None:
    wide, weight, residual = draw(1, 200), draw(40, 96, seed=1, size=0.1), draw(1, 90, seed=2)
    found = linear_one_row(wide[:, 8:104], weight, residual=residual[:, 5:45])
    close(found, exact(wide)[:, 8:104] @ exact(weight).T + exact(residual)[:, 5:45])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_fill_the_machine_and_no_more_registers_than_there_are(size: int, gated: bool) -> None:
    for n in (1, 700, 3000, 60000):
        for c in (20, 768, 3072, 5504, 8192):
            rows, warps = linear.tile_size(n, c, size, gated)
            held = rows * triton.next_power_of_2(c) * size * (1 + gated) / (32 * warps)  # bytes of one thread
            assert held <= 256
            assert rows == 1 or n / rows >= linear.MIN_PROGRAMS


@pytest.mark.parametrize("function", [add_norm, add_norm_reference])
@pytest.mark.parametrize("kind", ["layer", "unshifted", "rms"])
@pytest.mark.parametrize("c", [96, 768])
def test_a_sum_and_its_norm_are_the_formula(function: Any, kind: str, c: int) -> None:
    for dtype in (FP32, BF16):
        x, y, norm = draw(7, c, dtype=dtype, shift=3), draw(7, c, dtype=dtype, seed=1), make_norm(kind, c, dtype)
        total, found = function(x, y, norm)
        close(total, exact(x) + exact(y))
        close(found, normal(exact(total), norm))
        same, found = function(x, None, norm)
        assert torch.equal(same, x)
        close(found, normal(exact(x), norm))


# ---- self-attention ----------------------------------------------------------------------------------------------------


def turn_pairs(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """(.., D) as complex numbers 2m + i (2m+1), times cos + i sin."""
    z = (x[..., ::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x).to(dtype).double().numpy()


def mean_of(scores: np.ndarray, v: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


def attend_by_hand(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, *, scale: float, heads: tuple[int, int], **more: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query after the other: the result, and the keys and values after it."""
    (h, g), d = heads, keys.shape[3]
    owner, cos, sin, bias, back = (more.get(name) for name in ("owner", "cos", "sin", "bias", "back"))
    new = exact(qkv)[:, qkv_rows(h, g, d)].reshape(len(qkv), -1, d)
    k, v = exact(keys).copy(), exact(values).copy()
    out = np.zeros((len(qkv), h, d))
    for n, at in enumerate(position.tolist()):
        if cos is not None:
            new[n, : h + g] = rounded(turn_pairs(new[n, : h + g], exact(cos)[at], exact(sin)[at]), keys.dtype)
        k[n, :, at], v[n, :, at] = new[n, h : h + g], new[n, h + g :]
    for n, at in enumerate(position.tolist()):
        columns = np.arange(0 if back is None else max(0, at - back), at + 1)
        rows = np.full(len(columns), n) if owner is None else owner[n].cpu().numpy()[columns].copy()
        rows[-1] = n
        for i in range(h):
            scores = k[rows, i * g // h, columns] @ new[n, i] * scale
            scores = scores if bias is None else scores + exact(bias)[i, at - columns]
            out[n, i] = mean_of(scores, v[rows, i * g // h, columns])
    return out.reshape(len(qkv), -1), k, v


def memory(n: int, h: int, g: int, length: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(n, (h + 2 * g) * d, dtype=dtype),
        draw(n, g, length, d, dtype=dtype, seed=1),
        draw(n, g, length, d, dtype=dtype, seed=2),
    )


def owners(position: Tensor, length: int) -> Tensor:
    """In which row each column of a row's past lies: any, but not one that its owner writes in the same step."""
    n, mine = len(position), torch.arange(len(position), dtype=torch.int32)[:, None]
    found = torch.randint(n, (n, length), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    written = position.cpu()[found.long()] == torch.arange(length)
    return torch.where(written, mine, found).to(DEVICE)


def whole_numbers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("function", [self_attend, self_attend_reference])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("h", "g", "d", "length", "options"),
    [
        (3, 3, 16, 40, ()),
        (2, 2, 64, 100, ("owner", "bias")),
        (4, 2, 32, 40, ("owner", "turn")),
        (6, 1, 20, 90, ("owner", "turn", "bias", "back")),
        (2, 2, 22, 40, ("turn", "back")),
        (1, 1, 128, 300, ("owner", "bias", "turn", "back")),  # cut in three
        (2, 1, 64, 600, ("owner", "bias")),  # cut in five
    ],
)
def test_a_new_token_looks_at_its_past_wherever_it_lies(
    function: Any, dtype: torch.dtype, h: int, g: int, d: int, length: int, options: tuple[str, ...]
) -> None:
    skip_where_bits_are_multiplied(function, dtype, h // g)
    n, position = 4, whole_numbers(0, 17, length - 1, length // 2)
    every = {
        "owner": owners(position, length),
        "bias": draw(h, length, seed=4),
        "back": length // 3,
    }
    chosen: dict[str, Any] = {name: every[name] for name in options if name != "turn"}
    chosen |= {"scale": d**-0.5, "heads": (h, g)}
    if "turn" in options:
        angle = torch.arange(length, device=DEVICE)[:, None] * torch.linspace(0.01, 1, d // 2, device=DEVICE)
        chosen |= {"cos": 1.1 * angle.cos(), "sin": 1.1 * angle.sin()}
    qkv, keys, values = memory(n, h, g, length, d, dtype)
    expected, k, v = attend_by_hand(qkv, keys, values, position, **chosen)
    close(function(qkv, keys, values, position, **chosen), expected)
    close(keys, k)
    assert np.array_equal(exact(values), v)


@pytest.mark.parametrize("function", [self_attend, self_attend_reference])
@pytest.mark.parametrize(("h", "g", "window"), [(2, 2, 1), (2, 1, 7), (1, 1, 100)])
@pytest.mark.parametrize("positions", [(0, 5, 77, 200), (150, 150, 150, 150)])
def test_a_window_needs_a_ring_of_no_more_columns(
    function: Any, h: int, g: int, window: int, positions: tuple[int, ...]
) -> None:
    """The hypotheses of a sentence, which are at one position, may have each other's columns."""
    n, length, d, position = 4, 256, 16, whole_numbers(*positions)
    chosen: dict[str, Any] = {"back": window - 1, "bias": draw(h, length, seed=4), "scale": 0.25, "heads": (h, g)}
    if len(set(positions)) == 1:
        chosen["owner"] = owners(position, length)
    qkv, keys, values = memory(n, h, g, length, d, FP32)
    ring_keys, ring_values = (torch.full((n, g, window, d), torch.nan, device=DEVICE) for _ in range(2))
    for row, at in enumerate(positions):
        for j in range(max(0, at - window + 1), at):
            ring_keys[row, :, j % window], ring_values[row, :, j % window] = keys[row, :, j], values[row, :, j]
    expected, k, v = attend_by_hand(qkv, keys, values, position, **chosen)
    close(function(qkv, ring_keys, ring_values, position, **chosen), expected)
    for row, at in enumerate(positions):
        assert np.array_equal(exact(ring_keys[row, :, at % window]), k[row, :, at])
        assert np.array_equal(exact(ring_values[row, :, at % window]), v[row, :, at])


def test_keys_are_cut_into_parts_only_where_few_rows_have_long_caches() -> None:
    assert attend.count_splits(1, 12, 256, 64) == attend.count_splits(64, 12, 2048, 64) == 1
    assert attend.count_splits(1, 16, 2048, 128) == 8
    assert attend.count_splits(4, 1, 300, 128) == 5  # as the tests of self_attend want it


def test_only_the_columns_of_new_tokens_are_written() -> None:
    qkv, keys, values = memory(3, 2, 2, 20, 16, FP32)
    before, position = keys.clone(), whole_numbers(4, 0, 19)
    self_attend(qkv, keys, values, position, scale=1.0, heads=(2, 2))
    changed = (keys != before).any(-1).any(1)  # (N, L)
    assert changed.nonzero().tolist() == [[0, 4], [1, 0], [2, 19]]


@pytest.mark.parametrize("function", [self_attend, self_attend_reference])
@pytest.mark.parametrize(("at", "length"), [(10, 40), (200, 300)])  # in one block of keys, in two
def test_what_stands_beyond_the_position_is_not_read(function: Any, at: int, length: int) -> None:
    qkv, keys, values = memory(1, 2, 1, length, 16, FP32)
    keys[:, :, at + 1 :], values[:, :, at + 1 :] = torch.nan, torch.nan
    position = whole_numbers(at)
    expected, _, _ = attend_by_hand(qkv, keys, values, position, scale=1.0, heads=(2, 1))
    close(function(qkv, keys, values, position, scale=1.0, heads=(2, 1)), expected)


@pytest.mark.parametrize("function", [self_attend, self_attend_reference])
def test_far_positions_are_turned_exactly(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "NUM_SMS", 1)  # nothing is cut
    at, length, d = 100_003, 100_010, 16
    qkv, keys, values = memory(1, 1, 1, length, d, FP32)
    angle = torch.arange(length, device=DEVICE)[:, None] * torch.linspace(1, 0.37, d // 2, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    function(qkv, keys, values, whole_numbers(at), cos=cos, sin=sin, back=4, scale=1.0, heads=(1, 1))
    expected = turn_pairs(exact(qkv)[0, d : 2 * d], exact(cos)[at], exact(sin)[at])
    np.testing.assert_allclose(exact(keys)[0, 0, at], expected, atol=4e-6)


# ---- cross-attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [cross_attend, cross_attend_reference])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("each", "h", "g", "d", "s"),
    [
        (1, 2, 2, 16, 20),
        (1, 2, 2, 24, 90),
        (4, 4, 2, 32, 70),
        (5, 2, 2, 64, 33),
        (17, 4, 1, 16, 20),
    ],
)
def test_hypotheses_look_at_the_source_of_their_sentence(
    function: Any, dtype: torch.dtype, each: int, h: int, g: int, d: int, s: int
) -> None:
    skip_where_bits_are_multiplied(function, dtype, each * h // g)
    length, b = whole_numbers(s, 0, s // 2), 3
    q = draw(b * each, h * d, dtype=dtype)
    keys, values = (draw(b, g, s, d, dtype=dtype, seed=seed) for seed in (1, 2))
    keys[2, :, s // 2 :], values[2, :, s // 2 :] = torch.nan, torch.nan
    expected = np.zeros((b * each, h, d))
    for n, i in np.ndindex(b * each, h):
        real = int(length[n // each])
        if real:
            seen = exact(keys)[n // each, i * g // h, :real], exact(values)[n // each, i * g // h, :real]
            scores = seen[0] @ exact(q).reshape(-1, h, d)[n, i] * 0.25
            expected[n, i] = mean_of(scores, seen[1])
    found = function(q, keys, values, length, scale=0.25, heads=(h, g))
    close(found, expected.reshape(b * each, -1))


# ---- candidates --------------------------------------------------------------------------------------------------------


def logits_with_ties(n: int, v: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, some of them absent."""
    generator = torch.Generator().manual_seed(n + v)
    x = torch.randint(-20, 20, (n, v), generator=generator).to(dtype)
    return x.masked_fill(torch.rand(n, v, generator=generator) < 0.2, -torch.inf).to(DEVICE)


def ranked(row: np.ndarray, hidden: set[int], begin: int, width: int, best: int) -> tuple[list[float], list[int]]:
    """The best of a part, by a stable sort."""
    allowed = [i for i in range(begin, min(begin + width, len(row))) if i not in hidden and row[i] > -math.inf]
    order = sorted(allowed, key=lambda i: -row[i])[:best]
    empty = best - len(order)
    return [row[i] for i in order] + [-math.inf] * empty, order + [0] * empty


def check_candidates(
    logits: Tensor, best: int, no_end: Tensor, forbidden: tuple[int, ...] = FORBIDDEN, end: int = EOS
) -> None:
    (n, v), x = logits.shape, exact(logits)
    value, index, log_z = top_candidates(logits, best, no_end, forbidden, end)
    assert (value.dtype, index.dtype, log_z.dtype) == (FP32, torch.int32, FP32)
    width = choosing.part_width(n, v, 2048 if n >= 64 else 1024)
    for row in range(n):
        hidden = {*forbidden, *([end] if no_end[row] else [])}
        parts = [ranked(x[row], hidden, begin, width, best) for begin in range(0, v, width)]
        assert value[row].tolist() == [one for values, _ in parts for one in values]
        assert index[row].tolist() == [one for _, ids in parts for one in ids]
    top = x.max(1)
    close(log_z, top + np.log(np.exp(x - top[:, None]).sum(1)))


@pytest.fixture(params=["kernel", "reference"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(choosing, "runs_kernels", lambda x: False)
    return str(request.param)


def flags(n: int) -> Tensor:
    return torch.arange(n, device=DEVICE) % 2 == 0


@pytest.mark.parametrize(("best", "dtype"), [(1, BF16), (2, FP32), (10, BF16), (32, FP32)])
@pytest.mark.usefixtures("either")
def test_candidates_are_the_best_of_each_part_lower_ids_first(best: int, dtype: torch.dtype) -> None:
    for n, v in ((2, 1003), (1, 3000), (1, 11)):
        check_candidates(logits_with_ties(n, v, dtype), best, flags(n))


@pytest.mark.usefixtures("either")
def test_candidates_are_kept_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "NUM_SMS", 1)  # four rows fill it, so none is cut
    check_candidates(logits_with_ties(4, 4500, FP32), 5, flags(4))
    rising = torch.arange(3000.0, device=DEVICE).repeat(4, 1) / 100  # every block is better than the one before
    check_candidates(rising, 6, flags(4))
    check_candidates(rising.flip(1).contiguous(), 6, flags(4))
    equal = torch.zeros(4, 3000, device=DEVICE)
    equal[:, [10, 20, 2500]] = torch.tensor([5.0, 5.0, 7.0], device=DEVICE)  # of the two 5s, the later must go
    check_candidates(equal, 2, flags(4))
    check_candidates(draw(64, 2100, dtype=BF16), 3, flags(64))


@pytest.mark.parametrize(("forbidden", "end"), [((), -1), ((), 2999), ((0, 1500, 2998), 1023), ((1024,), 0)])
@pytest.mark.usefixtures("either")
def test_special_tokens_may_stand_anywhere(
    forbidden: tuple[int, ...], end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_candidates(logits_with_ties(2, 3000, FP32), 4, flags(2), forbidden, end)
    monkeypatch.setattr(choosing, "NUM_SMS", 1)
    logits = logits_with_ties(4, 3000, FP32)
    logits[:, [*forbidden, max(end, 0)]] = 30.0
    check_candidates(logits, 2, flags(4), forbidden, end)


@pytest.mark.usefixtures("either")
def test_the_end_token_is_a_candidate_only_where_a_row_may_end() -> None:
    logits = torch.zeros(2, 1003, device=DEVICE)
    logits[:, :6] = torch.tensor([9.0, 9, 8, 9, 9, 7], device=DEVICE)
    value, index, _ = top_candidates(logits, 2, flags(2), FORBIDDEN, EOS)
    assert (value.tolist(), index.tolist()) == ([[7, 0], [8, 7]], [[5, 6], [EOS, 5]])


@pytest.mark.usefixtures("either")
def test_greedy_says_the_likeliest_token_of_the_lowest_id() -> None:
    logits = draw(5, 3000, dtype=BF16)
    logits[0, 2500], logits[0, 700], logits[1, EOS], logits[2, EOS], logits[3] = 9.0, 9.0, 20.0, 20.0, -torch.inf
    logits[3, 2999] = 4.0
    logits[4, PADDING] = 30.0
    x, no_end = exact(logits), flags(5)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    allowed = x.copy()
    allowed[:, list(FORBIDDEN)] = -np.inf
    allowed[::2, EOS] = -np.inf
    expected = allowed.argmax(1)
    for token, log_prob in (
        greedy_token(logits, no_end, FORBIDDEN, EOS),
        best_candidate(*top_candidates(logits, 1, no_end, FORBIDDEN, EOS)),
        best_candidate(*top_candidates(logits, 3, no_end, FORBIDDEN, EOS)),
    ):
        assert token.dtype == torch.int64
        assert token.tolist() == expected.tolist()
        close(log_prob, log_p[np.arange(5), expected])
    assert expected[:4].tolist() == [700, EOS, expected[2], 2999]
