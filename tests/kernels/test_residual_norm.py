"""Residual sum and norm: the definition and the kernels (interpreted on a CPU) against formulas in float64."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from regard.kernels import residual_norm

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KINDS = ["layer", "layer without bias", "rms"]
P = 0.25
HALF = torch.bfloat16
with_kernels = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.fixture
def kernels() -> None:
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")


def make_norm(kind: str, c: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    norm = nn.RMSNorm(c, eps=1e-5) if kind == "rms" else nn.LayerNorm(c, bias=kind == "layer")
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return norm.to(DEVICE, dtype)


def inputs(*shape: int, x: torch.dtype = torch.float32, y: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return x and y; no y is so small that the sum would not show whether it was dropped."""
    given = torch.randn(shape)
    added = (0.5 + torch.rand(shape)) * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)  # never 0: a sum shows it
    return given.to(DEVICE, x).requires_grad_(), added.to(DEVICE, y).requires_grad_()


def by_formula(total: Tensor, norm: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Return the norm in float64, and its parameters in float64."""
    weight, *bias = exact = [w.detach().double().requires_grad_() for w in norm.parameters()]
    centred = total if isinstance(norm, nn.RMSNorm) else total - total.mean(-1, keepdim=True)
    z = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight  # type: ignore[operator]
    return z + bias[0] if bias else z, exact


def near(found: Tensor, expected: Tensor, share: float) -> bool:
    """Return whether the error is at most a share of the largest number."""
    return bool((found.double() - expected).abs().max() <= share * expected.abs().max().clamp(min=1e-3))


def compare(
    x: Tensor, y: Tensor, norm: nn.Module, p: float, share: float, dtype: torch.dtype, used: str = "both"
) -> None:
    """Compare results and gradients with float64; the sum shows what was dropped. `used`: which results have a gradient."""
    total, normal = residual_norm.fused(x, y, norm, p, dtype)
    x64, y64 = (part.detach().double().requires_grad_() for part in (x, y))
    gone = ((total - x) == 0) if p else torch.zeros_like(y, dtype=torch.bool)
    exact = x64 + y64.masked_fill(gone, 0) / (1 - p)
    assert near(total, exact, share)
    assert (total.dtype, normal.dtype) == (x.dtype, dtype)
    exact = exact + (total.double() - exact).detach()  # from here on, with the sum as it was rounded
    expected, weights = by_formula(exact, norm)
    assert near(normal, expected, share)
    pairs = {"both": [(total, exact), (normal, expected)], "total": [(total, exact)], "normal": [(normal, expected)]}[
        used
    ]
    gs = [torch.randn_like(a) for a, _ in pairs]
    leaves = [x, y, *norm.parameters()] if used != "total" else [x, y]
    exact_leaves = [x64, y64, *weights][: len(leaves)]
    found = torch.autograd.grad([a for a, _ in pairs], leaves, gs)
    truth = torch.autograd.grad([b for _, b in pairs], exact_leaves, [g.double() for g in gs])
    for leaf, a, b in zip(leaves, found, truth, strict=True):
        assert (a.dtype, a.shape) == (leaf.dtype, leaf.shape)
        assert near(a, b, share)


# ---- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_without_kernels_it_is_torch_one_after_the_other(kind: str) -> None:
    x, y = (part.detach().cpu() for part in inputs(2, 3, 8))
    norm = make_norm(kind, 8).cpu()
    torch.manual_seed(0)
    total, normal = residual_norm.add_norm(x, y, norm, P)
    torch.manual_seed(0)
    expected = x + F.dropout(y, P)
    assert torch.equal(total, expected)
    assert torch.equal(normal, norm(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_is_of_the_residuals_dtype_and_its_norm_of_autocasts(kind: str) -> None:
    norm = make_norm(kind, 8)
    for a, b in ((torch.float32, HALF), (HALF, torch.float32), (HALF, HALF)):
        x, y = inputs(3, 8, x=a, y=b)
        assert [z.dtype for z in residual_norm.add_norm(x, y, norm, 0.0)] == [a, a]
        with torch.autocast(DEVICE, torch.bfloat16):
            assert [z.dtype for z in residual_norm.add_norm(x, y, norm, 0.0)] == [a, HALF]


def test_kernels_are_for_norms_of_whole_rows_that_fit_into_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_norm, "TRITON", True)

    def fits(norm: nn.Module, c: int = 8, dtype: torch.dtype = torch.float32) -> bool:
        return residual_norm.can_fuse(torch.empty(2, c, dtype=dtype), torch.empty(2, c, dtype=HALF), norm)

    assert fits(nn.LayerNorm(8))
    assert fits(nn.LayerNorm(8, bias=False))
    assert fits(nn.RMSNorm(8, eps=1e-6))
    assert fits(nn.LayerNorm(8192), 8192)
    assert fits(nn.LayerNorm(8), dtype=HALF)
    assert not fits(nn.LayerNorm(8193), 8193)
    assert not fits(nn.LayerNorm(8), dtype=torch.float64)
    assert not fits(nn.LayerNorm(8, elementwise_affine=False))
    assert not fits(nn.RMSNorm(8))  # its eps depends on the dtype
    assert not fits(nn.LayerNorm((2, 8)))
    assert not fits(nn.Identity())
    monkeypatch.setattr(residual_norm, "TRITON", False)
    assert not fits(nn.LayerNorm(8))


# ---- the kernels -----------------------------------------------------------------------------------------------------


@with_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("c", "rows"), [(1, 200), (3, 7), (64, 1), (96, 40), (512, 2), (1000, 30)])
def test_the_kernels_are_the_definition(c: int, rows: int, kind: str) -> None:
    norm = make_norm(kind, c)
    compare(*inputs(rows, c), norm, 0.0, 2e-5, torch.float32)
    compare(*inputs(rows, c), norm, P, 2e-5, torch.float32)


@with_kernels
@pytest.mark.parametrize(("weights", "p"), [(torch.float32, 0.0), (HALF, P)])
@pytest.mark.parametrize(
    ("x", "y", "out"), [(HALF, HALF, HALF), (torch.float32, HALF, HALF), (HALF, torch.float32, HALF)]
)
def test_in_half_precision_they_are_the_definition_but_for_roundings(
    x: torch.dtype, y: torch.dtype, out: torch.dtype, p: float, weights: torch.dtype
) -> None:
    for kind, c in (("layer", 96), ("rms", 512), ("layer without bias", 3)):
        compare(*inputs(2, 5, c, x=x, y=y), make_norm(kind, c, weights), p, 2**-7, out)


@with_kernels
@pytest.mark.parametrize("used", ["total", "normal"])
@pytest.mark.parametrize("p", [0.0, P])
def test_either_result_may_be_left_unused(used: str, p: float) -> None:
    for kind in KINDS:
        compare(*inputs(2, 5, 64), make_norm(kind, 64), p, 2e-5, torch.float32, used)


@with_kernels
def test_the_norm_is_that_of_the_rounded_sum() -> None:
    """Where rounding removes almost all of y from the sum, almost none of it is in the norm."""
    x = torch.full((1, 4), 256.0, dtype=HALF, device=DEVICE)
    y = torch.tensor([[0.0, 0.25, 0.5, 4.0]], dtype=HALF, device=DEVICE)
    total, normal = residual_norm.fused(x, y, nn.LayerNorm(4, device=DEVICE), 0.0, torch.float32)
    assert total.tolist() == [[256.0, 256.0, 256.0, 260.0]]
    expected = torch.tensor([[-1.0, -1.0, -1.0, 3.0]], device=DEVICE) / 3**0.5
    torch.testing.assert_close(normal, expected, rtol=0, atol=1e-5)


@with_kernels
@pytest.mark.parametrize("p", [0.0, P])
def test_any_layout_of_its_inputs_will_do(p: float) -> None:
    norm = make_norm("layer", 6)
    x, y = inputs(6, 4, 3)
    compare(x.mT.transpose(0, 2), y.mT.transpose(0, 2), norm, p, 2e-5, torch.float32)
    total, normal = residual_norm.fused(x := inputs(5, 6)[0], y := inputs(5, 6)[1], norm, 0.0, torch.float32)
    found = torch.autograd.grad(total.sum() + normal.sum(), [x, y])  # gradients without strides
    expected = torch.autograd.grad((x + y).sum() + norm(x + y).sum(), [x, y])
    torch.testing.assert_close(found, expected)


@with_kernels
def test_without_dropout_x_and_y_share_one_gradient_and_nothing_is_drawn() -> None:
    norm, (x, y) = make_norm("layer", 8), inputs(3, 8)
    torch.manual_seed(0)
    first = torch.rand(1, device=DEVICE)
    torch.manual_seed(0)
    total, normal = residual_norm.fused(x, y, norm, 0.0, torch.float32)
    assert torch.rand(1, device=DEVICE) == first
    by_x, by_y = torch.autograd.grad((total * normal).sum(), [x, y])
    assert by_x.data_ptr() == by_y.data_ptr()


@with_kernels
def test_the_gradient_of_a_finer_y_is_no_coarser_than_y() -> None:
    norm, (x, y) = make_norm("layer", 64), inputs(3, 64, x=HALF)
    by_y = torch.autograd.grad(residual_norm.fused(x, y, norm, 0.0, torch.float32)[1].square().sum(), y)[0]
    assert not torch.equal(by_y, by_y.to(HALF).float())


@with_kernels
def test_no_rows_are_no_matter() -> None:
    norm, (x, y) = make_norm("layer", 8), inputs(0, 8)
    total, normal = residual_norm.fused(x, y, norm, P, torch.float32)
    found = torch.autograd.grad((total * normal).sum(), [x, y, *norm.parameters()])
    assert [part.shape for part in found] == [(0, 8), (0, 8), (8,), (8,)]
    assert not found[2].any()
    assert not found[3].any()


# ---- dropout ---------------------------------------------------------------------------------------------------------


def multipliers(seed: int, rows: int, c: int) -> Tensor:
    y = torch.ones(rows, c, device=DEVICE)
    torch.manual_seed(seed)
    return residual_norm.fused(torch.zeros_like(y), y, make_norm("rms", c), P, torch.float32)[0]


@with_kernels
def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    found = multipliers(0, 200, 200)
    dropped = found == 0
    torch.testing.assert_close(found[~dropped], torch.full_like(found[~dropped], 1 / (1 - P)))
    assert abs(dropped.float().mean().item() - P) < 4 * (P * (1 - P) / found.numel()) ** 0.5
    for dim in (0, 1):  # in every column and every row
        assert (dropped.float().mean(dim) - P).abs().max() < 4.5 * (P * (1 - P) / 200) ** 0.5


@with_kernels
def test_what_is_dropped_in_one_place_says_nothing_of_another() -> None:
    """Dropout is independent for neighbouring rows, columns and seeds, and for indices a power of two apart."""
    x = multipliers(1, 128, 256) - 1
    pairs = {"seeds": (x, multipliers(2, 128, 256) - 1)}
    for dim, name in enumerate(("rows", "columns")):
        for n in (1, 2, 4, 64):
            rest = x.shape[dim] - n
            pairs[f"{n} {name} apart"] = x.narrow(dim, 0, rest), x.narrow(dim, n, rest)
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean().item() * (1 - P) / P  # the variance of a multiplier is P / (1 - P)
        assert abs(correlation) < 4 / a.numel() ** 0.5, name


# ---- operators of torch ----------------------------------------------------------------------------------------------


@with_kernels
@pytest.mark.parametrize(("kind", "p"), [("layer", 0.0), ("layer", P), ("rms", P)])
def test_torch_accepts_the_operators(kind: str, p: float) -> None:
    """Check schemas, fake tensors, autograd and tracing with dynamic shapes."""
    norm, (x, y) = make_norm(kind, 8), inputs(2, 3, 8)
    weight, *bias = norm.parameters()
    seed = torch.tensor([7], device=DEVICE) if p else None
    given = (x, y, weight, bias[0] if bias else None, seed, kind == "rms", 1e-5, p, torch.float32)
    torch.library.opcheck(residual_norm.forward.op, given)
    total, _, stats = (part.detach() for part in residual_norm.forward(*given))
    for by_total in (None, torch.randn_like(total)):
        grads = by_total, torch.randn_like(total)
        settings = seed, bool(bias), p, torch.float32
        torch.library.opcheck(residual_norm.backward, (*grads, total, stats, weight.detach(), *settings))


class Layer(nn.Module):
    """Two sublayers of one kind, as in a block."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        self.norm, self.dropout = make_norm(kind, 16), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        total, normal = self.add(x, x.sin())
        return self.add(total, normal.cos())[1]  # the last sum is only normalised, as in post-norm blocks

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = self.dropout.p if self.training else 0.0
        if x.is_cuda:
            return residual_norm.add_norm(x, y, self.norm, p)
        assert residual_norm.can_fuse(x, y, self.norm)
        return residual_norm.fused(x, y, self.norm, p, x.dtype)


def gradient(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    result = call(x)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), [x, *layer.parameters()])]


@with_kernels
@pytest.mark.parametrize(("kind", "p"), [("layer", 0.0), ("rms", P)])
def test_a_compiled_layer_is_one_graph_for_all_shapes(kind: str, p: float) -> None:
    counter, layer = CompileCounterWithBackend("aot_eager"), Layer(kind, p)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend=counter)
    counts = []
    for shape in ((2, 5), (3, 9), (4, 40)):
        x = torch.randn(*shape, 16, device=DEVICE)
        torch.testing.assert_close(gradient(compiled, layer, x), gradient(layer, layer, x))
        counts.append(counter.frame_count)
    assert len({*counts}) == 1  # compiled with the first shape, and never again


def test_the_definition_compiles_too_under_autocast() -> None:
    norm, (x, y) = make_norm("layer", 8), inputs(3, 8)
    call = torch.compile(residual_norm.add_norm, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(call(x, y, norm, 0.0), residual_norm.add_norm(x, y, norm, 0.0))
        assert [z.dtype for z in call(x, y, norm, 0.0)] == [torch.float32, HALF]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "c"), [(1, 16), (5000, 128), (3000, 768), (40, 8192), (9000, 512)])
def test_on_a_gpu_many_rows_of_every_width_are_the_definition(rows: int, c: int, kind: str) -> None:
    for p in (0.0, P):
        compare(*inputs(rows, c, x=HALF, y=HALF), make_norm(kind, c), p, 2**-7, HALF)
        compare(*inputs(rows, c), make_norm(kind, c), p, 1e-4, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_on_a_gpu_the_kernels_are_what_runs() -> None:
    norm, (x, y) = make_norm("layer", 64), inputs(3, 64)
    with torch.profiler.profile() as profile:
        residual_norm.add_norm(x, y, norm, P)
    assert any(event.key == "regard::add_norm" for event in profile.key_averages())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("p", [0.0, P])
def test_a_compiled_layer_is_recorded_and_drops_anew_when_replayed(p: float) -> None:
    layer = Layer("layer", p)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    x = torch.randn(8, 40, 16, device="cuda", dtype=HALF, requires_grad=True)

    def step(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        result = call(x)
        return result, *torch.autograd.grad(result.square().sum(), [x, *layer.parameters()])

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            step(compiled)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places = step(compiled)
    graph.replay()
    first = [place.clone() for place in places]
    graph.replay()
    assert [bool((a == b).all()) for a, b in zip(first, places, strict=True)] == [not p] * 4
    if not p:
        for found, expected in zip(places, step(layer), strict=True):
            assert near(found, expected.double(), 2e-2)
