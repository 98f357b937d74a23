"""Linear layer and activation: the definition and the kernels (interpreted on a CPU) against formulas in float64."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
from configured import model_config
from fused_rows import gate_rows
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from regard.kernels import linear_activation
from regard.layers.part import Place, make_part
from regard.layers.quantization import QUANTIZED_LINEAR

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # what such an exp divides is 0
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: z.clamp(min=0),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu-tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z * torch.sigmoid(z),
}
NAMES = list(FORMULAS)
with_kernels = pytest.mark.usefixtures("kernels")
all_kinds = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.fixture
def kernels() -> None:
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")


def make_linear(
    c: int, f: int, gated: bool = False, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    linear = nn.Linear(c, f * (1 + gated), bias=bias)
    for parameter in linear.parameters():
        nn.init.normal_(parameter)
    return linear.to(DEVICE, dtype)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def by_formula(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, gated: bool) -> Tensor:
    z = x @ weight.t() if bias is None else x @ weight.t() + bias
    f = z.shape[-1] // (1 + gated)
    z = z[..., gate_rows(f)] if gated else z
    y = FORMULAS[name](z[..., :f])
    return y * z[..., f:] if gated else y


def near(found: Tensor, expected: Tensor, share: float) -> bool:
    """Return whether the error is at most a share of the largest number."""
    if not expected.numel():
        return found.shape == expected.shape
    return bool((found.double() - expected).abs().max() <= share * expected.abs().max().clamp(min=1e-3))


def with_gradients(result: Tensor, leaves: list[Tensor], g: Tensor) -> list[Tensor]:
    return [result.detach(), *torch.autograd.grad(result, leaves, g)]


def compare(x: Tensor, linear: nn.Linear, name: str, gated: bool, share: float) -> None:
    """Compare the result and all gradients with the formula in float64."""
    leaves = [x, *linear.parameters()]
    x64, weight, *bias = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    result = linear_activation.fused(x, linear, name, gated)
    g = torch.randn_like(result)
    expected = by_formula(x64, weight, bias[0] if bias else None, name, gated)
    pairs = zip(with_gradients(result, leaves, g), with_gradients(expected, exact, g.double()), strict=True)
    for what, (a, b) in zip(("result", "dx", "dW", "db"), pairs, strict=False):
        assert (a.dtype, a.shape) == (x.dtype if what == "result" else linear.weight.dtype, b.shape), what
        assert near(a, b, share), what


# ---- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@all_kinds
@with_and_without_bias
def test_without_kernels_it_is_the_formula(name: str, gated: bool, bias: bool) -> None:
    linear = make_linear(6, 5, gated, bias, torch.float64).cpu()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = by_formula(x, linear.weight, linear.bias, name, gated)
    torch.testing.assert_close(linear_activation.linear_activation(x, linear, name, gated), expected)


def test_a_case_worked_by_hand() -> None:
    linear = nn.Linear(1, 4, bias=False)
    linear.weight.data = torch.tensor([[2.0], [-3.0], [5.0], [7.0]])
    x = torch.tensor([[1.0], [-1.0]])
    assert linear_activation.linear_activation(x, linear, "relu", False).tolist() == [
        [2.0, 0.0, 5.0, 7.0],
        [0.0, 3.0, 0.0, 0.0],
    ]
    assert linear_activation.linear_activation(x, linear, "relu", True).tolist() == [[10.0, 0.0], [0.0, -21.0]]


@pytest.mark.parametrize("kind", list(QUANTIZED_LINEAR))
@all_kinds
def test_whatever_stands_for_a_matrix_is_called(kind: str, gated: bool) -> None:
    linear = make_linear(16, 8, gated).cpu()
    packed = QUANTIZED_LINEAR[kind](linear.weight.detach(), linear.bias.detach())
    x = torch.randn(3, 16)
    expected = by_formula(x, linear.weight, linear.bias, "gelu", gated)
    assert near(linear_activation.linear_activation(x, packed, "gelu", gated), expected.double(), 0.05)


def test_kernels_are_for_plain_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_activation, "TRITON", True)
    x, linear = torch.empty(2, 8), nn.Linear(8, 4)
    assert linear_activation.can_fuse(x, linear)
    assert linear_activation.can_fuse(x.to(HALF), linear)
    assert not linear_activation.can_fuse(x.double(), linear)
    assert not linear_activation.can_fuse(x, nn.Sequential(linear))
    assert not linear_activation.can_fuse(x, nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    with torch.autocast("cpu", HALF):
        assert linear_activation.can_fuse(x.double(), linear)  # what is multiplied is in half precision
    monkeypatch.setattr(linear_activation, "TRITON", False)
    assert not linear_activation.can_fuse(x, linear)


@all_kinds
def test_a_feed_forward_layer_is_two_matrices_around_it(gated: bool) -> None:
    config = model_config(
        d_model=8, d_ff=12, feedforward="gated" if gated else "dense", activation="silu", ff_dropout=0.0
    )
    layer = make_part("feedforward", *config.feedforward, config, Place("encoder"))
    x = torch.randn(2, 3, 8)
    inner = by_formula(x, layer.inner.weight, layer.inner.bias, "silu", gated)
    expected = inner @ layer.outer.weight.t()
    expected = expected if layer.outer.bias is None else expected + layer.outer.bias
    torch.testing.assert_close(layer(x, None), expected)  # type: ignore[arg-type]


# ---- the kernels -----------------------------------------------------------------------------------------------------


@with_kernels
@pytest.mark.parametrize("name", NAMES)
@all_kinds
@pytest.mark.parametrize(
    ("rows", "f", "bias"), [(1, 40, True), (7, 1, False), (7, 160, True), (130, 96, False), (130, 160, True)]
)
def test_the_kernels_are_the_formula(rows: int, f: int, bias: bool, gated: bool, name: str) -> None:
    compare(inputs(rows, 5), make_linear(5, f, gated, bias), name, gated, 1e-5)


@with_kernels
@pytest.mark.parametrize("name", NAMES)
@all_kinds
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_in_half_precision_they_are_the_formula_but_for_roundings(dtype: torch.dtype, gated: bool, name: str) -> None:
    for f in (3, 40):
        compare(inputs(2, 9, 8, dtype=dtype), make_linear(8, f, gated, True, dtype), name, gated, 2**-6)


@with_kernels
@pytest.mark.parametrize("name", NAMES)
@all_kinds
def test_far_from_zero_nothing_overflows(name: str, gated: bool) -> None:
    compare((100 * inputs(9, 4).detach()).requires_grad_(), make_linear(4, 8, gated), name, gated, 1e-5)
    x = torch.tensor([[-1e4], [1e4], [0.0]], device=DEVICE, requires_grad=True)
    compare(x, make_linear(1, 8, gated), name, gated, 1e-5)


@with_kernels
def test_where_relu_gives_zero_it_has_no_slope_and_nothing_but_its_result_is_kept() -> None:
    linear = nn.Linear(1, 3, device=DEVICE)
    linear.weight.data = torch.tensor([[1.0], [0.0], [-1.0]], device=DEVICE)
    linear.bias.data.zero_()
    x = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    result, kept = linear_activation.forward(x, linear.weight, linear.bias, "relu", False)
    assert result.tolist() == [[1.0, 0.0, 0.0]] * 2
    assert kept.numel() == 0
    found = torch.autograd.grad(result.sum(), [x, linear.weight, linear.bias])
    assert [part.tolist() for part in found] == [[[1.0], [1.0]], [[2.0], [0.0], [0.0]], [2.0, 0.0, 0.0]]


@with_kernels
@all_kinds
def test_under_autocast_products_are_in_half_precision_and_gradients_as_their_parameters(gated: bool) -> None:
    linear, x = make_linear(8, 40, gated), inputs(2, 9, 8)
    with torch.autocast(DEVICE, HALF):
        result = linear_activation.fused(x, linear, "gelu", gated)
        assert result.dtype == HALF
        z = linear(x)[..., gate_rows(40)] if gated else linear(x)
        expected = nn.functional.gelu(z[..., :40])
        expected = expected * z[..., 40:] if gated else expected
    g, leaves = torch.randn_like(result), [x, *linear.parameters()]
    found = with_gradients(result, leaves, g)
    assert {part.dtype for part in found[1:]} == {torch.float32}
    for a, b in zip(found, with_gradients(expected, leaves, g), strict=True):
        assert near(a, b.double(), 2e-2)


@with_kernels
def test_the_bias_gradient_of_many_rows_is_not_rounded_on_the_way() -> None:
    """In half precision, adding 1/256 to 256 a thousand times would change nothing."""
    linear = nn.Linear(1, 1, device=DEVICE)
    x = torch.zeros(1001, 1, device=DEVICE, requires_grad=True)
    linear.bias.data.fill_(1.0)
    with torch.autocast(DEVICE, HALF):
        result = linear_activation.fused(x, linear, "relu", False)
    g = torch.full_like(result, 2**-8)
    g[0] = 256
    assert torch.autograd.grad(result, linear.bias, g)[0].item() == 256 + 1000 / 256


@with_kernels
@all_kinds
def test_any_layout_of_its_inputs_will_do(gated: bool) -> None:
    linear = make_linear(6, 5, gated)
    compare(inputs(6, 4, 3).transpose(0, 2), linear, "silu", gated, 1e-5)
    linear.weight.data = linear.weight.data.t().contiguous().t()
    compare(inputs(4, 6), linear, "silu", gated, 1e-5)
    x = inputs(4, 6)
    found = torch.autograd.grad(linear_activation.fused(x, linear, "relu", gated).sum(), x)[
        0
    ]  # a gradient without strides
    expected = torch.autograd.grad(by_formula(x, linear.weight, linear.bias, "relu", gated).sum(), x)[0]
    torch.testing.assert_close(found, expected)


@with_kernels
@pytest.mark.parametrize("name", ["relu", "silu"])
@all_kinds
def test_no_rows_are_no_matter(name: str, gated: bool) -> None:
    linear, x = make_linear(6, 5, gated), inputs(2, 0, 6)
    result = linear_activation.fused(x, linear, name, gated)
    assert result.shape == (2, 0, 5)
    found = torch.autograd.grad(result.sum(), [x, *linear.parameters()])
    assert [part.shape for part in found] == [x.shape, linear.weight.shape, linear.bias.shape]
    assert not any(part.any() for part in found)


@with_kernels
@pytest.mark.parametrize("name", ["relu", "gelu"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_has_no_gradient_gets_none(name: str, frozen: int) -> None:
    linear, x = make_linear(6, 5), inputs(3, 6)
    leaves = [x, linear.weight, linear.bias]
    leaves[frozen].requires_grad_(False)
    linear_activation.fused(x, linear, name, False).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [i == frozen for i in range(3)]


# ---- operators of torch ----------------------------------------------------------------------------------------------


@with_kernels
@pytest.mark.parametrize(
    ("name", "gated", "bias"),
    [("relu", False, True), ("relu", True, False), ("gelu", True, True), ("gelu", False, False)],
)
def test_torch_accepts_the_operators(name: str, gated: bool, bias: bool) -> None:
    """Check schemas, fake tensors, autograd and tracing with dynamic shapes."""
    linear, x = make_linear(6, 5, gated, bias), inputs(3, 6)
    torch.library.opcheck(linear_activation.forward.op, (x, linear.weight, linear.bias, name, gated))
    kept = torch.randn(3, 5 * (1 + gated), device=DEVICE)
    torch.library.opcheck(linear_activation.backward, (torch.randn(3, 5, device=DEVICE), kept, name, gated, bias))


class Layer(nn.Module):
    """A linear layer with activation between other operations, as in a feed-forward layer."""

    def __init__(self, name: str, gated: bool) -> None:
        super().__init__()
        self.linear, self.name, self.gated = make_linear(16, 24, gated), name, gated

    def forward(self, x: Tensor) -> Tensor:
        project = linear_activation.linear_activation if x.is_cuda else linear_activation.fused
        return project(x.sin(), self.linear, self.name, self.gated).cos()


def gradient(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    result = call(x)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), [x, *layer.parameters()])]


@with_kernels
@pytest.mark.parametrize(
    ("name", "gated", "half"),
    [("relu", False, True), ("relu", True, False), ("gelu-tanh", True, True), ("gelu-tanh", False, False)],
)
def test_a_compiled_layer_is_one_graph_for_all_shapes(name: str, gated: bool, half: bool) -> None:
    counter, layer = CompileCounterWithBackend("aot_eager"), Layer(name, gated)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend=counter)
    counts = []
    for shape in ((2, 5), (3, 9), (4, 40)):
        x = torch.randn(*shape, 16, device=DEVICE)
        with torch.autocast(DEVICE, HALF, enabled=half):
            torch.testing.assert_close(gradient(compiled, layer, x), gradient(layer, layer, x))
        counts.append(counter.frame_count)
    assert len({*counts}) == 1  # compiled with the first shape, and never again


# ---- on a GPU --------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", NAMES)
@all_kinds
@with_and_without_bias
def test_on_a_gpu_many_rows_are_the_formula(name: str, gated: bool, bias: bool) -> None:
    for rows, f in ((1, 16), (5000, 256), (3001, 1000)):
        linear = make_linear(64, f, gated, bias, HALF)
        linear.weight.data *= 0.25
        compare(inputs(rows, 64, dtype=HALF), linear, name, gated, 2**-6)


@pytest.mark.gpu
@on_a_gpu
def test_on_a_gpu_the_kernels_are_what_runs_in_training_and_not_elsewhere() -> None:
    linear, x = make_linear(64, 64), inputs(3, 64)

    def runs() -> bool:
        with torch.profiler.profile() as profile:
            linear_activation.linear_activation(x, linear, "relu", False)
        return any(event.key == "regard::activated" for event in profile.key_averages())

    assert runs()
    with torch.no_grad():
        assert not runs()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["relu", "gelu"])
@all_kinds
def test_a_compiled_layer_is_recorded_and_replayed_under_autocast(name: str, gated: bool) -> None:
    layer = Layer(name, gated)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    x = torch.randn(8, 40, 16, device="cuda")

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cuda", HALF):
            return gradient(call, layer, x)

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            step(compiled)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places = step(compiled)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for found, expected in zip(places, step(layer), strict=True):
        assert near(found, expected.double(), 2e-2)
