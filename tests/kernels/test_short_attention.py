"""The attention kernel for short rows (interpreted on a CPU) against `reference` in float64."""

from __future__ import annotations

import os

import pytest
import torch
from formula import ragged
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from regard.kernels.masks import CAUSAL, FULL, Mask
from regard.layers.attention_kernels import make_plan

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
if not CUDA and not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("Triton has neither a GPU nor its interpreter", allow_module_level=True)

from regard.kernels import short_attention  # noqa: E402 (it needs Triton)

DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies no bf16
H = 2


def projected(rows: int, n: int, heads: list[int], d: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return tensors (B, heads, n, D) that are views of one (B, n, all heads * D), like those of a fused projection."""
    whole = torch.randn(rows, n, sum(heads) * d).bfloat16().to(DEVICE, dtype)
    return [x.unflatten(-1, (-1, d)).transpose(1, 2) for x in whole.split([h * d for h in heads], -1)]


def qkv(
    rows: int, t: int, s: int, d: int, groups: int = H, dtype: torch.dtype = torch.float32, heads: int = H
) -> list[Tensor]:
    torch.manual_seed(t + s)
    if t == s:
        return projected(rows, t, [heads, groups, groups], d, dtype)
    return [*projected(rows, t, [heads], d, dtype), *projected(rows, s, [groups, groups], d, dtype)]


def positions(lengths: list[int], width: int) -> Tensor:
    return ragged(*lengths, width=width).to(DEVICE)


def both(mask: Mask, q_at: Tensor, k_at: Tensor, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the result and gradients of the kernel, and those of the formula in float64."""
    g = torch.randn(given[0].shape).to(given[0])
    return run("short", mask, q_at, k_at, given, g), run("reference", mask, q_at, k_at, [x.double() for x in given], g)


def run(kernel: str, mask: Mask, q_at: Tensor, k_at: Tensor, given: list[Tensor], g: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    result = make_plan(mask, q_at, k_at, kernel=kernel)(*leaves, 0.0)
    return [result.detach(), *torch.autograd.grad(result, leaves, g.to(result.dtype))]


def assert_near(found: list[Tensor], expected: list[Tensor], share: float) -> None:
    """Errors are a share of the largest number, and of 1 where that is smaller.

    The gradient of a query with a single key is 0: the difference of two sums of D products, each of which is about 1 and
    rounded in an order that depends on the processor."""
    for name, a, b in zip("oqkv", found, expected, strict=True):
        error, largest = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert error <= share * max(largest, 1.0), f"{name} is off by {error:.2g} of {largest:.2g}"


# ---- the formula -----------------------------------------------------------------------------------------------------

OWN = [  # lengths of rows, width, D, heads, heads of keys, mask
    ([1], 1, 16, H, H, FULL),
    ([3, 1, 0], 3, 16, H, H, FULL),
    ([3, 1, 0], 3, 16, H, H, CAUSAL),
    ([17, 16, 5], 17, 32, 3, 1, CAUSAL),
    ([64, 31], 64, 16, 4, 2, FULL),
    ([64, 31], 64, 16, 1, 1, CAUSAL),
    ([128, 70], 128, 16, H, H, CAUSAL),
    ([65], 128, 128, 1, 1, FULL),
]


@pytest.mark.parametrize(("lengths", "width", "d", "heads", "groups", "mask"), OWN)
def test_rows_that_look_at_themselves_are_the_formula(
    lengths: list[int], width: int, d: int, heads: int, groups: int, mask: Mask
) -> None:
    at = positions(lengths, width)
    assert_near(*both(mask, at, at, qkv(len(lengths), width, width, d, groups, heads=heads)), 1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "lengths", "d", "groups"),
    [
        (1, 128, [100, 128], 16, H),
        (128, 1, [1, 1], 16, 1),
        (17, 64, [64, 0, 33], 16, H),
        (33, 3, [3, 2], 32, 1),
        (64, 17, [17, 9], 64, H),
    ],
)
def test_rows_that_look_at_others_are_the_formula(
    queries: int, keys: int, lengths: list[int], d: int, groups: int
) -> None:
    """In cross-attention, queries that are padding attend as well; their result is not used."""
    q_at = positions([queries, *(max(1, queries // 2) for _ in lengths[1:])], queries)
    given = qkv(len(lengths), queries, keys, d, groups)
    assert_near(*both(FULL, q_at, positions(lengths, keys), given), 1e-5)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize(("width", "d"), [(20, 32), (64, 64), (100, 16)])
def test_in_half_precision_it_is_the_formula_but_for_roundings(width: int, d: int, mask: Mask) -> None:
    at = positions([width, width // 3], width)
    given = qkv(2, width, width, d, 1, HALF)
    found, exact = both(mask, at, at, given)
    assert {x.dtype for x in found} == {HALF}
    assert_near(found, exact, 2e-2)


def test_a_scheme_may_scale_the_scores() -> None:
    q, k, v = qkv(1, 5, 5, 16)
    rows = short_attention.LengthMask(torch.tensor([5], dtype=torch.int32, device=DEVICE), False)
    expected = ((q @ k.mT) * 0.7).softmax(-1) @ v
    torch.testing.assert_close(short_attention.attend(q, k, v, rows, 0.7, 0.0), expected, rtol=0, atol=1e-5)


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
def test_padding_is_not_even_read(mask: Mask) -> None:
    at, given = positions([9, 0, 20], 20), qkv(3, 20, 20, 16)
    clean = run("short", mask, at, at, given, g := torch.randn_like(given[0]))
    empty = (at < 0)[:, None, :, None]
    for x in given if mask is CAUSAL else given[1:]:
        x.masked_fill_(empty, torch.nan)
    g = g.masked_fill(empty, torch.nan) if mask is CAUSAL else g
    torch.testing.assert_close(run("short", mask, at, at, given, g), clean, rtol=0, atol=0)


def test_who_sees_nothing_gets_zeros_and_gives_none() -> None:
    """A row without keys, and queries that are padding under a causal mask."""
    at, given = positions([0, 4], 6), qkv(2, 6, 6, 16)
    for mask in (FULL, CAUSAL):
        result, dq, dk, dv = run("short", mask, at, at, given, torch.ones_like(given[0]))
        assert not torch.cat([x[0] for x in (result, dq, dk, dv)]).any()
        assert not torch.cat([x[1, :, 4:] for x in (dk, dv)]).any()
        assert result[1, :, 4:].any() == dq[1, :, 4:].any() == (mask is FULL)


def test_what_all_layers_share_is_how_long_rows_are() -> None:
    at = positions([3, 0, 5], 5)
    ready = make_plan(CAUSAL, at, at, kernel="short").kernel_input
    assert (ready.lengths.tolist(), ready.lengths.dtype) == ([3, 0, 5], torch.int32)
    assert ready.causal
    ready = make_plan(FULL, positions([1, 1, 1], 1), at, kernel="short").kernel_input
    assert (ready.lengths.tolist(), ready.causal) == ([3, 0, 5], False)
    with pytest.raises(AssertionError, match="their own keys"):
        make_plan(CAUSAL, at[:, -1:], at, kernel="short")


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_heads_are_merged_without_a_copy() -> None:
    """The result and the gradients are stored as (B, T, H, D)."""
    at, given = positions([7, 7], 7), qkv(2, 7, 7, 16, 1)
    for x in run("short", CAUSAL, at, at, given, torch.randn_like(given[0])):
        assert x.transpose(1, 2).is_contiguous()


def test_any_layout_of_its_inputs_gives_the_same() -> None:
    at, given = positions([7, 3], 7), qkv(2, 7, 7, 16, 1)
    g = torch.randn_like(given[0])
    expected = run("short", CAUSAL, at, at, given, g)
    others = [x.mT.contiguous().mT for x in given]  # the last dimension is not dense
    assert not any(x.stride(-1) == 1 for x in others)
    for layout in ([x.contiguous() for x in given], others):
        torch.testing.assert_close(run("short", CAUSAL, at, at, layout, g), expected, rtol=0, atol=1e-6)
    one = torch.ones((), device=DEVICE).expand(g.shape)  # the gradient of a sum has no strides at all
    found = run("short", CAUSAL, at, at, given, one)
    torch.testing.assert_close(found, run("short", CAUSAL, at, at, given, torch.ones_like(g)), rtol=0, atol=0)


# ---- dropout ---------------------------------------------------------------------------------------------------------

P = 0.25


def multipliers(seed: int, rows: int, n: int, groups: int = H) -> Tensor:
    """Return the dropout factor of each weight, (rows, H, n, n), by equal weights and one-hot values."""
    q = torch.zeros(rows, H, n, 64, device=DEVICE)
    k = torch.zeros(rows, groups, n, 64, device=DEVICE)
    v = torch.eye(n, 64, device=DEVICE).expand(rows, groups, n, 64)
    torch.manual_seed(seed)
    return short_attention.attend(q, k, v, whole(rows, n), None, P)[..., :n] * n


def whole(rows: int, n: int, causal: bool = False) -> short_attention.LengthMask:
    return short_attention.LengthMask(torch.full((rows,), n, dtype=torch.int32, device=DEVICE), causal)


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    found = multipliers(0, 4, 50)  # (rows, H, queries, keys)
    dropped = found == 0
    torch.testing.assert_close(found[~dropped], torch.full_like(found[~dropped], 1 / (1 - P)))
    n = found.numel()
    assert abs(dropped.float().mean().item() - P) < 4 * (P * (1 - P) / n) ** 0.5
    each = dropped.float().mean((2, 3))  # of every row and head
    assert (each - P).abs().max() < 4.5 * (P * (1 - P) / 2500) ** 0.5


def test_what_is_dropped_in_one_place_says_nothing_of_another() -> None:
    """Dropout is independent for neighbouring keys, queries, heads, rows and seeds, and for indices a power of two apart."""
    x = multipliers(1, 3, 64) - 1
    pairs = {"seeds": (x, multipliers(2, 3, 64) - 1), "mirrored": (x[..., :32, 32:], x[..., 32:, :32].mT)}
    for dim, name in enumerate(("rows", "heads", "queries", "keys")):
        for n in [n for n in (1, 2, 16) if n < x.shape[dim]]:
            rest = x.shape[dim] - n
            pairs[f"{n} {name} apart"] = x.narrow(dim, 0, rest), x.narrow(dim, n, rest)
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean().item() * (1 - P) / P  # the variance of a multiplier is P / (1 - P)
        assert abs(correlation) < 4 / a.numel() ** 0.5, name


def test_dropout_changes_nothing_on_average() -> None:
    """Sixteen rows of two equal heads have 32 dropout masks for each of two seeds."""
    n = 16
    q, k, v = (x[:, :1].expand(n, H, 6, 16) for x in qkv(1, 6, 6, 16))
    exact = short_attention.attend(q[:1], k[:1], v[:1], whole(1, 6, True), None, 0.0)[0, 0]
    found = torch.cat(
        [short_attention.attend(q, k, v, whole(n, 6, True), None, P).flatten(0, 1) for _ in range(2)]
    )  # (64, T, D)
    assert (found.std(0) > 0).all()
    errors = (found.mean(0) - exact) / (
        found.std(0) / len(found) ** 0.5
    )  # in standard errors; 4.5 where nothing is scaled
    assert errors.square().mean().sqrt() < 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "groups"), [(6, H), (50, 1)])
def test_gradients_drop_what_the_result_dropped(n: int, groups: int, causal: bool) -> None:
    """Compare with the formula in float64, with the dropout factors that another call has shown."""
    drop = multipliers(5, 1, n, groups).double()
    given = [x.detach().requires_grad_() for x in qkv(1, n, n, 16, groups)]
    torch.manual_seed(5)
    result = short_attention.attend(*given, whole(1, n, causal), None, P)
    g = torch.randn(result.shape).to(result)
    exact = [x.detach().double().requires_grad_() for x in given]
    q, k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in exact)
    seen = torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril(0 if causal else n)
    expected = ((q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) * drop) @ v
    found, by_formula = torch.autograd.grad(result, given, g), torch.autograd.grad(expected, exact, g.double())
    assert_near([result, *found], [expected, *by_formula], 1e-5)


def test_gradients_with_dropout_are_the_slope_of_the_result() -> None:
    """For rows too long to show their factors: finite differences along the gradient, with one seed."""
    given, rows = qkv(1, 100, 100, 16), whole(1, 100, causal=True)
    g = torch.randn_like(given[0])

    def loss(*moved: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (short_attention.attend(*moved, rows, None, P) * g).double().sum()

    leaves = [x.detach().requires_grad_() for x in given]
    found = torch.autograd.grad(loss(*leaves), leaves)
    norm = torch.stack([x.double().square().sum() for x in found]).sum().sqrt()
    along = [0.01 * x / norm.float() for x in found]
    up, down = (loss(*(x + sign * dx for x, dx in zip(given, along, strict=True))) for sign in (1, -1))
    torch.testing.assert_close((up - down) / 0.02, norm, rtol=1e-3, atol=0)


def test_without_dropout_nothing_is_drawn() -> None:
    q, k, v = qkv(1, 4, 4, 16)
    torch.manual_seed(0)
    first = torch.rand(1, device=DEVICE)
    torch.manual_seed(0)
    short_attention.attend(q, k, v, whole(1, 4), None, 0.0)
    assert torch.rand(1, device=DEVICE) == first


# ---- operators of torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torch_accepts_the_operators(dropout: float) -> None:
    """Check schemas, fake tensors and autograd; with dropout also tracing with dynamic shapes, which takes longest."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] if dropout else []
    q, k, v = (x.detach().requires_grad_() for x in qkv(2, 5, 5, 16, 1))
    lengths = torch.tensor([5, 3], dtype=torch.int32, device=DEVICE)
    seed = torch.tensor([7], device=DEVICE) if dropout else None
    settings = (True, None, dropout)
    torch.library.opcheck(short_attention.forward.op, (q, k, v, lengths, seed, *settings), test_utils=checks)
    lse = short_attention.forward(q, k, v, lengths, seed, *settings)[1]
    plain = [x.detach() for x in (torch.randn_like(q), q, k, v, lengths, lse)]
    torch.library.opcheck(short_attention.backward, (*plain, seed, *settings), test_utils=checks)


class Layer(nn.Module):
    """A projection, attention and an operation after it, as in a block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor, rows: short_attention.LengthMask) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (x * 2).split([32, 16, 16], -1))
        return short_attention.attend(q, k, v, rows, None, self.dropout).transpose(1, 2).flatten(2).sin()


def gradient(layer: nn.Module, x: Tensor, rows: short_attention.LengthMask) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    result = layer(x, rows)
    return result.detach(), torch.autograd.grad(result.square().sum(), x)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_compiled_layer_is_one_graph_for_all_shapes(dropout: float) -> None:
    counter, layer = CompileCounterWithBackend("aot_eager"), Layer(dropout)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend=counter)
    counts = []
    for rows, n in ((2, 5), (3, 9), (2, 20)):
        x, ready = torch.randn(rows, n, 64, device=DEVICE), whole(rows, n - 1, True)
        torch.testing.assert_close(gradient(compiled, x, ready), gradient(layer, x, ready))
        counts.append(counter.frame_count)
    assert len({*counts}) == 1  # compiled with the first shape, and never again


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_compiled_layer_is_recorded_and_drops_anew_when_replayed(dropout: float) -> None:
    layer = Layer(dropout).cuda()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    x, rows = torch.randn(8, 40, 64, device="cuda", dtype=torch.bfloat16), whole(8, 33, True)
    x.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        result = compiled(x, rows)
        return result, torch.autograd.grad(result.square().sum(), x)[0]

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places = step()
    graph.replay()
    first = [place.clone() for place in places]
    graph.replay()
    assert [bool((a == b).all()) for a, b in zip(first, places, strict=True)] == [not dropout] * 2
    if not dropout:
        plain = layer(x, rows)
        torch.testing.assert_close(places[0], plain, rtol=2e-2, atol=2e-2)
        expected = torch.autograd.grad(plain.square().sum(), x)[0]
        torch.testing.assert_close(places[1], expected, rtol=3e-2, atol=3e-2)
