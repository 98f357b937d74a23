"""Gated linear attention: all forms against the recurrence, and the Triton kernels (interpreted on a CPU) in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.kernels import gated_linear_attention as attention
from regard.kernels.gated_linear_attention import chunked_form, gated_linear_attention, parallel_form, recurrent_form
from regard.models.analysis.counting import FORMULAS

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MODES = {"no decay": 0, "one a head": 1, "one a channel": 2}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
NAMES = ("q", "k", "v", "log_decay", "initial")


def case(
    mode: int,
    t: int,
    *,
    b: int = 2,
    h: int = 4,
    g: int = 2,
    k: int = 16,
    v: int = 8,
    strength: float = 0.5,
    state: bool = True,
) -> list[Any]:
    """Return q, k, v, log decays, starts and a first state in float64, with numbers that bf16 holds exactly.

    The first row has documents of 1, 9 and more tokens, and begins with the end of one; the others continue a text."""
    rng = torch.Generator().manual_seed(mode + t)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).bfloat16().double().to(DEVICE)

    decay = None
    if mode:
        shape = (b, t, h) if mode == 1 else (b, t, h, k)
        decay = -strength * torch.rand(*shape, generator=rng).double().to(DEVICE)
    starts = torch.full((b, t), -4, dtype=torch.int32)
    for begin in (5, 6, 15, 2 * t // 3):
        starts[0, begin:] = starts[0, begin:].clamp(min=begin)
    first = normal(b, h, k, v) if state else None
    return [normal(b, t, g, k), normal(b, t, g, k), normal(b, t, h, v), decay, starts.to(DEVICE), first]


def with_gradients(form: Any, given: list[Any], grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return both results of a form, and the gradients of all inputs that have one."""
    leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    results = form(*leaves)
    needed = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return [
        *results,
        *torch.autograd.grad(results, needed, [g.to(r.dtype) for g, r in zip(grads, results, strict=True)]),
    ]


def gradients_like(given: list[Any]) -> tuple[Tensor, Tensor]:
    q, v = given[0], given[2]
    rng = torch.Generator().manual_seed(7)
    shapes = v.shape, (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return tuple(torch.randn(*shape, generator=rng).bfloat16().double().to(DEVICE) for shape in shapes)  # type: ignore[return-value]


@modes
@pytest.mark.parametrize("strength", [0.5, 60.0])
def test_all_forms_are_the_recurrence(mode: int, strength: float) -> None:
    """With strong decays, exp(-B) of 70 tokens would be infinite in float64 too."""
    given = case(mode, 70, strength=strength)
    grads = gradients_like(given)
    wanted = with_gradients(recurrent_form, given, grads)
    for form in (parallel_form, chunked_form, lambda *x: chunked_form(*x, chunk=7)):
        for found, value in zip(with_gradients(form, given, grads), wanted, strict=True):
            torch.testing.assert_close(found, value, atol=1e-9, rtol=1e-9)


@modes
def test_the_gradient_is_that_of_finite_differences(mode: int) -> None:
    q, k, v, decay, starts, first = case(mode, 7, b=1, h=2, g=1, k=2, v=2)
    leaves = [x.requires_grad_() for x in (q, k, v, first, *([] if decay is None else [decay]))]

    def run(q: Tensor, k: Tensor, v: Tensor, first: Tensor, decay: Tensor | None = None) -> Any:
        return chunked_form(q, k, v, decay, starts, first, chunk=3)

    assert torch.autograd.gradcheck(run, leaves)


@modes
def test_steps_are_the_recurrence(mode: int) -> None:
    q, k, v, decay, starts, first = case(mode, 5)
    starts.fill_(-1)
    wanted, last = recurrent_form(q, k, v, decay, starts, first)
    state = first.clone() if not CUDA else first.float()
    close = {"atol": 1e-9, "rtol": 1e-9} if not CUDA else {"atol": 1e-4, "rtol": 1e-4}
    for t in range(5):
        o = attention.step(q[:, t], k[:, t], v[:, t], None if decay is None else decay[:, t], state)
        torch.testing.assert_close(o.double(), wanted[:, t], **close)
    torch.testing.assert_close(state.double(), last, **close)


@modes
def test_results_have_the_dtype_of_values_and_states_are_fp32(mode: int) -> None:
    given = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case(mode, 9)]
    o, last = gated_linear_attention(*given)
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_flops_are_those_of_the_products() -> None:
    """Scores inside of a chunk, their sums of values, and states that are made and read: 2 FLOPs a product."""
    b, t, h, k, v = 3, 256, 4, 16, 8
    q, values = torch.empty(b, t, h, k, device="meta"), torch.empty(b, t, h, v, device="meta")
    starts = torch.empty(b, t, dtype=torch.int32, device="meta")
    o, last = gated_linear_attention(q, q, values, None, starts)
    assert (o.shape, last.shape) == ((b, t, h, v), (b, h, k, v))
    inside, outside = 2 * b * t * h * attention.CHUNK * (k + v), 2 * b * t * h * k * v
    assert FORMULAS["regard::gated_linear_attention"](q, q, values, None, starts, None) == inside + 2 * outside
    found = FORMULAS["regard::gated_linear_attention_backward"](o, None, q, q, values, None, starts, None)
    assert found == 3 * inside + 5 * outside


# ---- Triton ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    from regard.kernels import gated_linear_attention_triton

    return gated_linear_attention_triton


def assert_near(names: tuple[str, ...], found: list[Tensor], wanted: list[Tensor], share: float) -> None:
    for name, a, b in zip(names, found, wanted, strict=True):
        error, largest = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert error <= share * max(largest, 1e-6), f"{name} is off by {error:.2g} of {largest:.2g}"


def names_of(given: list[Any]) -> tuple[str, ...]:
    return tuple(n for n, x in zip(NAMES, [*given[:4], given[5]], strict=True) if x is not None)


@modes
@pytest.mark.parametrize(
    ("t", "chunk", "h", "g", "state", "strength"),
    [(19, 16, 2, 1, True, 0.5), (41, 32, 1, 1, False, 30.0)],
)
def test_kernels_are_the_recurrence(
    kernels: Any, mode: int, t: int, chunk: int, h: int, g: int, state: bool, strength: float
) -> None:
    """In fp32: lengths that no chunk divides, documents, groups, a first state, and strong decays."""
    given = case(mode, t, b=1, h=h, g=g, state=state, strength=strength)
    grads = gradients_like(given)
    wanted = with_gradients(recurrent_form, given, grads)
    q, k, v, decay, starts, first = (x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
    found = kernels.run_forward(q, k, v, decay, starts, first, chunk)
    assert_near(("o", "last"), list(found), wanted[:2], 1e-5)
    gradients = kernels.run_backward(grads[0].float(), grads[1].float(), q, k, v, decay, starts, first, chunk)
    assert_near(names_of(given), gradients, wanted[2:], 3e-5)


def strong_and_weak_decays(mode: int, t: int) -> tuple[list[Any], list[Tensor], tuple[Tensor, Tensor]]:
    """Return a case with a strong decay now and then, what float64 makes of it with all gradients, and those given."""
    given = case(mode, t, b=1, h=2, g=1)
    given[3] = torch.where(given[3] < -0.35, -300.3, -0.01).float().double()
    grads = gradients_like(given)
    return given, with_gradients(recurrent_form, given, grads), grads


@pytest.mark.parametrize("mode", [1, 2], ids=["one a head", "one a channel"])
def test_strong_decays_among_weak_ones_leave_fp32_its_digits(mode: int) -> None:
    """Sums of decays reach -6,000, whose fp32 neighbours are 5e-4 apart; errors are compared with the largest number."""
    given, wanted, grads = strong_and_weak_decays(mode, 64)
    low = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    assert_near(("o", "last"), list(chunked_form(*low)), wanted[:2], 3e-6)
    found = with_gradients(chunked_form, low, grads)[2:]
    assert_near(names_of(given), found, wanted[2:], 3e-6)


@pytest.mark.parametrize("mode", [1, 2], ids=["one a head", "one a channel"])
def test_strong_decays_among_weak_ones_leave_the_kernels_their_digits(kernels: Any, mode: int) -> None:
    given, wanted, grads = strong_and_weak_decays(mode, 48)
    q, k, v, decay, starts, first = (x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
    found = kernels.run_forward(q, k, v, decay, starts, first, 32)
    assert_near(("o", "last"), list(found), wanted[:2], 3e-6)
    gradients = kernels.run_backward(grads[0].float(), grads[1].float(), q, k, v, decay, starts, first, 32)
    assert_near(names_of(given), gradients, wanted[2:], 3e-6)


@modes
def test_the_kernel_of_a_step(kernels: Any, mode: int) -> None:
    q, k, v, decay, starts, first = (
        x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case(mode, 2, k=20, v=18)
    )
    starts.fill_(-1)
    wanted, last = recurrent_form(q, k, v, decay, starts, first)
    for t in range(2):
        o = kernels.run_step(q[:, t], k[:, t], v[:, t], None if decay is None else decay[:, t], first)
    torch.testing.assert_close(o, wanted[:, 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(first, last, atol=1e-4, rtol=1e-4)


def test_a_text_whose_numbers_do_not_fit_into_32_bits_is_refused(kernels: Any) -> None:
    q = torch.empty(1, 1 << 20, 8, 256, device="meta")
    with pytest.raises(RegardError, match="1,048,576 tokens is too long for this model: give it fewer than 1,048,576"):
        kernels.run_forward(q, q, q, None, torch.empty(1, 1 << 20, dtype=torch.int32, device="meta"), None, 128)


def test_the_operator_pads_sizes_and_has_gradients(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: 9 columns of values, 5 of keys, views of a projection, and no gradient of the last state."""
    monkeypatch.setattr(attention, "CHUNK", 16)
    given = case(1, 19, b=1, h=2, g=1, k=5, v=9, state=False)
    o = recurrent_form(*given)[0]
    grad = gradients_like(given)[0]
    leaves = [x.detach().requires_grad_() for x in given[:4]]
    wanted = torch.autograd.grad(recurrent_form(*leaves, given[4])[0], leaves, grad)
    padded = [torch.nn.functional.pad(x, (0, n)) for x, n in zip(given[:3], (11, 11, 7), strict=True)]
    both = torch.cat([padded[0].flatten(2), padded[1].flatten(2)], -1).float()
    q, k = (x.unflatten(-1, (1, 16)) for x in both.split(16, -1))
    inputs = [x.detach().requires_grad_() for x in (q, k, padded[2].float(), given[3].float())]
    found, _ = attention.forward(*inputs, given[4], None)
    assert_near(("o",), [found[..., :9]], [o], 1e-5)
    gradients = torch.autograd.grad(found, inputs, torch.nn.functional.pad(grad, (0, 7)).float())
    cut = [gradients[0][..., :5], gradients[1][..., :5], gradients[2][..., :9], gradients[3]]
    assert_near(NAMES[:4], cut, list(wanted), 3e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("t", "h", "g", "k", "v"), [(300, 4, 1, 128, 64), (257, 2, 2, 64, 65), (130, 2, 2, 153, 33)])
def test_on_a_gpu_it_is_the_recurrence(mode: int, dtype: torch.dtype, t: int, h: int, g: int, k: int, v: int) -> None:
    """Sizes of Mamba-2, linear attention and Based; bf16 rounds queries, keys, scores and states once each."""
    given = case(mode, t, h=h, g=g, k=k, v=v)
    grads = gradients_like(given)
    wanted = with_gradients(recurrent_form, given, grads)
    q, key, value, decay, starts, first = given
    cast = [
        q.to(dtype),
        key.to(dtype),
        value.to(dtype),
        None if decay is None else decay.float(),
        starts,
        first.float(),
    ]
    found = with_gradients(gated_linear_attention, cast, grads)
    assert_near(("o", "last", *names_of(given)), found, wanted, 3e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@modes
def test_on_a_gpu_a_compiled_call_is_one_graph(mode: int) -> None:
    given = [x.bfloat16() if isinstance(x, Tensor) and i < 3 else x for i, x in enumerate(case(mode, 200, k=64, v=64))]
    given[3] = None if given[3] is None else given[3].float()
    given[5] = given[5].float()
    compiled = torch.compile(lambda *x: gated_linear_attention(*x)[0] * 2, fullgraph=True)
    torch.testing.assert_close(compiled(*given), gated_linear_attention(*given)[0] * 2)


def test_autocast_leaves_states_in_full_precision() -> None:
    given = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case(2, 40)]
    expected = gated_linear_attention(*given)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = gated_linear_attention(*given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
