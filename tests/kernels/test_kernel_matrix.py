"""Every kernel with every position scheme under every mask, forward and backward, against formula.py in float64.

On a GPU the same matrix compares the kernels that run only there with `reference` in fp32: `pytest -m gpu` on this
file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from configured import SCHEMES, replaced
from formula import SETTINGS, D, H, attention, visible
from kernel_cases import ADDITIVE, CONTEXTUAL, Case, allowed, cases, scheme_of
from torch import Tensor

from regard.config import TrainConfig
from regard.device import set_up_device
from regard.kernels.attention_functions import masked_softmax, repeat_kv, rotate
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import make_plan
from regard.layers.positions.scheme import PositionScheme

PLAIN = ("result", "q", "k", "v")
Outcome = dict[str, Tensor]  # the result, and the gradients of q, k, v and of the scheme's parameters


def inputs(name: str, case: Case, d: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return q, k and v, and weights of the result in the loss, which are 0 on padding; all are exact in bf16."""
    torch.manual_seed(1)
    (b, t), s = case.q.shape, case.keys.shape[1]
    size = d**-0.5 if name == "t5" else 1.0  # T5 does not divide the scores by sqrt(D): smaller queries instead
    drawn = [torch.randn(b, h, n, d) for h, n in ((H, t), (case.groups, s), (case.groups, s), (H, t))]
    q, k, v, g = (x.bfloat16().float() for x in (drawn[0] * size, *drawn[1:]))
    return {"q": q, "k": k, "v": v}, g * (case.q >= 0)[:, None, :, None]


def outcome(f: Callable[..., Tensor], qkv: dict[str, Tensor], parameters: dict[str, Tensor], g: Tensor) -> Outcome:
    """Return f(q, k, v) on every real query, and the gradients of sum(f * g)."""
    qkv = {name: x.detach().requires_grad_() for name, x in qkv.items()}
    result = f(*qkv.values())
    leaves = {**qkv, **parameters}
    gradients = torch.autograd.grad((result * g).sum(), list(leaves.values()), allow_unused=True)
    assert result.isfinite().all()  # padding too: the next layer multiplies it with weights of 0
    found = {"result": result.detach().where(g != 0, 0)}
    return found | {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}


def ours(kernel: str, scheme: PositionScheme, case: Case, qkv: dict[str, Tensor], g: Tensor) -> Outcome:
    q_at = case.q.to(g.device)
    k_at = q_at if case.k is None else case.k.to(g.device)
    mask = case.mask
    if isinstance(mask.prefix, Tensor):
        mask = dataclasses.replace(mask, prefix=mask.prefix.to(g.device))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        named = None if kernel == "chosen" else kernel
        plan = make_plan(mask, q_at, k_at, scheme, d_head=q.shape[-1], kernel=named)
        return plan(rotate(q, scheme.rotation(q_at)), rotate(k, scheme.rotation(k_at)), v, 0.0)

    return outcome(f, qkv, dict(scheme.named_parameters()), g)


def assert_near(
    found: Outcome,
    expected: Outcome,
    share: float,
    of_parameters: float,
    where: str = "",
    summed: dict[str, Tensor] | None = None,
) -> None:
    """Compare up to a share of the largest number of the result, of each gradient, and of all parameter gradients together.

    `summed`: the error allowed in a parameter's gradient instead, where that is known.
    """
    assert found.keys() == expected.keys()
    learned = [x.abs().max().item() for name, x in expected.items() if name not in PLAIN]
    for name, x in expected.items():
        error = (found[name].double() - x.double()).abs()
        allowed = torch.tensor(share * x.abs().max().item() if name in PLAIN else of_parameters * max(learned))
        if summed and name in summed:
            allowed = summed[name].double()
        worst = (error - allowed.to(error)).argmax()
        assert (error <= allowed.to(error)).all(), (
            f"{name} is off by {error.flatten()[worst]:.2g}, {allowed.expand_as(error).flatten()[worst]:.2g} allowed{where}"
        )


def terms(scheme: PositionScheme, case: Case, qkv: dict[str, Tensor], g: Tensor) -> dict[str, Tensor]:
    """By how much rounding to bf16 may move the gradient of each parameter of a bias.

    The gradient is a sum of many terms that cancel: of each score, its gradient times the derivative of its bias.
    Rounding moves a term by a share of itself, and by that share times the bias, which is rounded before it is added to
    the score. So the terms are summed without their signs (the derivatives of one parameter have one sign), and four
    roundings of 2^-9 are allowed."""
    q_at, k_at = case.q.to(g.device), case.keys.to(g.device)
    mask = case.mask
    if isinstance(mask.prefix, Tensor):
        mask = dataclasses.replace(mask, prefix=mask.prefix.to(g.device))
    plan = make_plan(mask, q_at, q_at if case.k is None else k_at, scheme, d_head=g.shape[-1], kernel="reference")
    bias, seen = plan.bias(), plan.seen()
    leaf = bias.detach().expand(len(g), -1, -1, -1).clone().requires_grad_()
    scores = qkv["q"] @ repeat_kv(qkv["k"], qkv["q"]).transpose(-2, -1) * (scheme.scale or g.shape[-1] ** -0.5)
    result = masked_softmax(scores + leaf, seen) @ repeat_kv(qkv["v"], qkv["q"])
    (by_score,) = torch.autograd.grad((result * g).sum(), leaf)
    largest = bias.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    size = by_score.abs() * (1 + (bias - largest).abs().where(by_score != 0, 0)).detach()
    found = torch.autograd.grad(bias, list(scheme.parameters()), size.sum_to_size(bias.shape), allow_unused=True)
    names = [name for name, _ in scheme.named_parameters()]
    return {name: x.abs() * 2**-7 for name, x in zip(names, found, strict=True) if x is not None}


# ---- on a CPU --------------------------------------------------------------------------------------------------------

SMALL = cases(10)
# bf16 keeps 8 bits, so a rounding moves a number by up to 2^-9 = 0.2 % of itself: five of them on the way to a result,
# ten to a gradient. A parameter sums gradients that mostly cancel and leave their roundings behind: twice as much.
TOLERANCE = {torch.float32: (5e-6, 5e-6), torch.bfloat16: (2e-2, 4e-2)}


@functools.cache
def expected(name: str, case_name: str) -> Outcome:
    case, scheme = SMALL[case_name], scheme_of(name, SMALL[case_name].place)
    parameters = {n: p.detach().double().requires_grad_() for n, p in scheme.named_parameters()}
    q_at, k_at = case.q.tolist(), case.keys.tolist()
    seen = visible(q_at, k_at, **case.rule)
    formula = "t5-two-sided" if name == "t5" and case.place != "decoder" else name
    qkv, g = inputs(name, case, D)
    f = functools.partial(attention, formula, parameters, seen=seen, q_at=q_at, k_at=k_at)
    return outcome(f, {n: x.double() for n, x in qkv.items()}, parameters, g.double())


def on_cpu() -> Iterator[Any]:
    """Return every kernel, scheme and mask in fp32, and in bf16 every pair of them, with the kernels in turn."""
    for i, (name, case_name) in enumerate(allowed(SMALL)):
        kernels = ("reference",) if name in CONTEXTUAL else ("reference", "sdpa")
        for kernel in kernels:
            yield pytest.param(kernel, name, case_name, torch.float32, id=f"fp32-{kernel}-{name}-{case_name}")
        kernel = kernels[i % len(kernels)]
        yield pytest.param(kernel, name, case_name, torch.bfloat16, id=f"bf16-{kernel}-{name}-{case_name}")


@pytest.mark.parametrize(("kernel", "name", "case_name", "dtype"), on_cpu())
def test_kernels_are_the_formula_forward_and_backward(
    kernel: str, name: str, case_name: str, dtype: torch.dtype
) -> None:
    case = SMALL[case_name]
    qkv, g = inputs(name, case, D)
    found = ours(kernel, scheme_of(name, case.place), case, {n: x.to(dtype) for n, x in qkv.items()}, g.to(dtype))
    assert found["result"].dtype == dtype
    assert_near(found, expected(name, case_name), *TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["alibi", "kerple-power"])
def test_a_bias_far_from_zero_keeps_its_differences_in_bf16(name: str) -> None:
    """The softmax depends on differences alone, so a bias shared by all keys of a query must not cost precision."""
    case = Case("cross", FULL, {}, torch.tensor([[1003]]), torch.arange(300, 360)[None])
    scheme = scheme_of(name, "cross")
    qkv, g = inputs(name, case, D)
    exact = ours("reference", scheme, case, qkv, g)
    found = ours("sdpa", scheme, case, {n: x.bfloat16() for n, x in qkv.items()}, g.bfloat16())
    found, exact = ({n: x[n] for n in PLAIN} for x in (found, exact))  # those of parameters cancel out
    assert_near(found, exact, *TOLERANCE[torch.bfloat16])


# ---- Triton's kernels, interpreted ------------------------------------------------------------------------------------


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton's interpreter on the CPU, with small tiles, so that a few tokens make several of them."""
    pytest.importorskip("triton")
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("there is a GPU: the kernels themselves are tested here")
    from regard.kernels import fire_attention, toeplitz_attention

    monkeypatch.setattr(toeplitz_attention, "TILE", 16)
    monkeypatch.setattr(fire_attention, "TILE", 16)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # where a mask will put a zero
@pytest.mark.parametrize("name", ADDITIVE)
def test_regards_own_kernels_are_the_formula_when_interpreted(name: str) -> None:
    """The interpreter is slow, so there are two tiles of 16 tokens per side, the second of them not full."""
    some = {
        "recurrent.bidirectional": 20,
        "causal window": 37 if name in ("t5", "fire") else 20,
    }  # 37: a tile outside the window
    if name not in ("alibi", "kerple-power"):  # to a kernel what T5 and KERPLE's other scheme are
        some |= {"causal, grouped queries": 20}
    if name == "t5":
        some |= {"prefix of each row": 20, "causal documents, window": 20}
    for case_name, length in some.items():
        every = cases(length)
        if (name, case_name) not in allowed(every, (name,)) or not can_run("toeplitz", name, every[case_name]):
            continue
        case = every[case_name]
        scheme = scheme_of(name, case.place, replaced(SETTINGS, d_model=16 * H, d_head=16))
        qkv, g = inputs(name, case, 16)
        exact, found = (ours(kernel, scheme, case, qkv, g) for kernel in ("reference", "toeplitz"))
        assert_near(found, exact, 1e-5, 1e-5, where=f" ({case_name})")


# ---- on a GPU --------------------------------------------------------------------------------------------------------

WIDE = replaced(SETTINGS, **{"t5.buckets": 32, "t5.max_distance": 128, "fire.width": 32, "fire.threshold": 64.0})
# fp32: products may be rounded to TF32. Parameters sum what mostly cancels, over more pairs than above: twice as much again.
GPU_TOLERANCE = {torch.float32: (1e-3, 6e-3), torch.bfloat16: (2e-2, 8e-2)}


RUNS = {  # which schemes are tried with each kernel; those left out are to a kernel what one of these is
    "sdpa": ("none", "rope", *ADDITIVE),
    "flex": ("none", "t5"),  # without a bias, and with one that is looked up
    "toeplitz": ADDITIVE,
    "chosen": [name for name in SCHEMES if name not in CONTEXTUAL],
}


ONE_SIGN = ("kerple-log", "kerple-power")  # learned biases, each parameter of which moves all scores one way


def can_run(kernel: str, name: str, case: Case) -> bool:
    if kernel in ("sdpa", "chosen"):
        return True
    in_order = case.mask.causal and not case.mask.packed  # elsewhere FIRE's bias is not made inside the kernel
    return case.k is None and (name != "fire" or in_order)


SIZES = [(200, 64), (130, 32), (130, 128)]  # tokens, which never fill the last tile, and the width of a head


def on_gpu() -> Iterator[Any]:
    """Return every kernel with every scheme it supports, in each dtype and each size, but not all combinations.

    FlexAttention takes minutes to compile a table at D = 128 and is not selected there.
    """
    for kernel, names in RUNS.items():
        for i, name in enumerate(names):
            for j, (t, d) in enumerate(SIZES):
                if not (kernel == "flex" and d == 128):
                    dtype = torch.float32 if (i + j) % 3 == 2 else torch.bfloat16
                    number = "fp32" if dtype == torch.float32 else "bf16"
                    yield pytest.param(kernel, name, t, d, dtype, id=f"{kernel}-{name}-{t}-{d}-{number}")


@pytest.fixture
def _exact_products() -> Iterator[None]:
    """Set up the GPU as training does, but with exact fp32 products, since `reference` is the formula."""
    set_up_device(TrainConfig(device="cuda", threads=1))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("_exact_products")
@pytest.mark.parametrize(("kernel", "name", "t", "d", "dtype"), on_gpu())
def test_kernels_are_the_reference_on_a_gpu(kernel: str, name: str, t: int, d: int, dtype: torch.dtype) -> None:
    config = dataclasses.replace(WIDE, d_model=H * d, d_head=d)
    every = cases(t)
    for case_name in [c for _, c in allowed(every, (name,)) if can_run(kernel, name, every[c])]:
        case = every[case_name]
        scheme = scheme_of(name, case.place, config).cuda()
        qkv, g = inputs(name, case, d)
        qkv, g = {n: x.cuda() for n, x in qkv.items()}, g.cuda()
        exact = ours("reference", scheme, case, qkv, g)
        found = ours(kernel, scheme, case, {n: x.to(dtype) for n, x in qkv.items()}, g.to(dtype))
        summed = terms(scheme, case, qkv, g) if name in ONE_SIGN and dtype == torch.bfloat16 else None
        assert_near(found, exact, *GPU_TOLERANCE[dtype], where=f" ({case_name})", summed=summed)
