"""Chunked cross-entropy against torch's own on all logits at once, in float64: losses and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.kernels import cross_entropy
from regard.kernels.cross_entropy import linear_cross_entropy
from regard.text.special_tokens import PAD

M, C, V = 300, 8, 21
SHARE = 0.37  # what comes in from above: never one


@dataclass
class Case:
    """Hidden vectors, the weight and bias of an output layer, and labels."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight, self.bias) if t is not None]

    def to(self, dtype: torch.dtype) -> Case:
        """Return the case in another dtype, with leaves of its own."""
        x, weight, bias = (
            None if t is None else t.detach().to(dtype).requires_grad_() for t in (self.x, self.weight, self.bias)
        )
        assert x is not None
        assert weight is not None
        return Case(x, weight, bias, self.labels)


def case(m: int = M, biased: bool = True, seed: int = 0, v: int = V) -> Case:
    """Return random numbers that bf16 represents exactly."""
    g = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(size, generator=g).bfloat16().double().requires_grad_() for size in ((m, C), (v, C), (v,))
    )
    labels = torch.randint(PAD, v, (m,), generator=g)
    return Case(x, weight, bias if biased else None, labels)


def expected(c: Case, label_smoothing: float = 0.0, z_loss: float = 0.0, shares: Tensor | None = None) -> Tensor:
    """Return the three sums by torch's cross-entropy."""
    scored = c.labels != PAD
    labels, logits = c.labels[scored], F.linear(c.x, c.weight, c.bias)[scored]
    weights = (torch.ones(len(c.labels)) if shares is None else shares).to(logits.dtype)[scored]
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    plain = F.cross_entropy(logits, labels, reduction="sum")
    loss = ((loss + z_loss * logits.logsumexp(-1) ** 2) * weights).sum()
    counted = scored if shares is None else scored & (shares != 0)
    return torch.stack([loss, plain.detach(), counted.sum()])


def gradients(sums: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(sums[0] * SHARE, leaves))


def check(c: Case, tolerance: float = 1e-12, **options: object) -> None:
    ours = linear_cross_entropy(c.x, c.weight, c.bias, c.labels, **options)  # type: ignore[arg-type]
    exact = c.to(torch.float64)
    theirs = expected(exact, **options)  # type: ignore[arg-type]
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(ours.double(), theirs, **near)
    for name, a, b in zip(
        ("x", "weight", "bias"), gradients(ours, c.leaves), gradients(theirs, exact.leaves), strict=False
    ):
        torch.testing.assert_close(a.double(), b, msg=lambda m, name=name: f"{name}: {m}", **near)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 128 rows."""
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 128 * V * 4)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Triton kernel, interpreted, with several blocks per row; vocabularies are padded, as on a GPU."""
    kernels = pytest.importorskip("regard.kernels.cross_entropy_triton")
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(cross_entropy, "select_row_losses", lambda x: kernels.row_losses)
    monkeypatch.setitem(cross_entropy.TILE, "cpu", 8)


OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"label_smoothing": 0.1}, id="smoothed"),
    pytest.param({"z_loss": 0.01}, id="z-loss"),
    pytest.param({"label_smoothing": 0.2, "z_loss": 0.02}, id="all"),
]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_torchs_cross_entropy_with_every_gradient(options: dict[str, object], biased: bool) -> None:
    check(case(biased=biased), **options)


@pytest.mark.parametrize("m", [1, 127, 128, 129, 256, 300, 512])
def test_rows_fall_into_chunks_of_any_number(m: int, monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    sizes = []
    plain = cross_entropy.row_losses
    monkeypatch.setattr(
        cross_entropy, "row_losses", lambda logits, *rest: (sizes.append(len(logits)), plain(logits, *rest))
    )
    check(case(m, seed=m), label_smoothing=0.1, z_loss=0.01)
    # float64 rows are twice as long as `small_chunks` counts, but no chunk is shorter than a tile
    assert sizes == [128] * (m // 128) + [m % 128] * (m % 128 > 0)


def test_chunks_are_few_and_of_one_size() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert cross_entropy.chunk_rows(32768, 2 * 50304, gpu) == 8192  # GPT-2's, 32 rows of 1024 tokens
    assert cross_entropy.chunk_rows(8192, 2 * 10048, gpu) == 8192
    assert cross_entropy.chunk_rows(4000, 4 * 10000, cpu) == 896  # 5 x 896 rows hold 4,000 of them
    assert cross_entropy.chunk_rows(1, 4 * 10**9, cpu) == 128


@settings(max_examples=30)
@given(
    m=st.integers(1, 200),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    seed=st.integers(0, 99),
)
def test_any_batch(m: int, label_smoothing: float, z_loss: float, seed: int) -> None:
    check(case(m, seed=seed), label_smoothing=label_smoothing, z_loss=z_loss)


@pytest.mark.parametrize("kind", ["torch", "kernel"])
def test_what_is_not_scored_adds_exactly_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "kernel":
        request.getfixturevalue("fused")
    c = case(30).to(torch.float32)
    c.labels[:20] = PAD
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    sums = linear_cross_entropy(c.x, c.weight, c.bias, c.labels, **options)  # type: ignore[arg-type]
    (dx, _, _) = gradients(sums, c.leaves)
    assert sums[2] == (c.labels[20:] != PAD).sum()
    assert (dx[c.labels == PAD] == 0).all()
    assert (dx[c.labels != PAD] != 0).any(1).all()
    nothing = linear_cross_entropy(c.x, c.weight, c.bias, torch.full((30,), PAD), **options)  # type: ignore[arg-type]
    assert nothing.tolist() == [0, 0, 0]
    assert all((g == 0).all() for g in gradients(nothing, c.leaves))


def test_no_rows_at_all() -> None:
    c = case(0)
    sums = linear_cross_entropy(c.x, c.weight, c.bias, c.labels, label_smoothing=0.1)
    assert sums.tolist() == [0, 0, 0]
    assert all((g == 0).all() for g in gradients(sums, c.leaves))


@pytest.mark.parametrize("kind", ["torch", "kernel"])
def test_answers_weigh_what_their_shares_say(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "kernel":
        request.getfixturevalue("fused")
    m = M if kind == "torch" else 20
    shares = torch.rand(m, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    check(case(m).to(torch.float32), 1e-4, label_smoothing=0.1, z_loss=0.01, shares=shares)


def test_only_the_loss_to_descend_has_a_gradient() -> None:
    c = case()
    sums = linear_cross_entropy(c.x, c.weight, c.bias, c.labels, label_smoothing=0.1)
    assert all((g == 0).all() for g in torch.autograd.grad(sums[1] + sums[2], c.leaves, retain_graph=True))
    once, thrice = (torch.autograd.grad(k * sums[0], c.leaves, retain_graph=True) for k in (1.0, 3.0))
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    c, whole = case(), case()
    c.leaves[frozen].requires_grad_(False)
    for each in (c, whole):
        linear_cross_entropy(each.x, each.weight, each.bias, each.labels)[0].backward()
    for i, (a, b) in enumerate(zip(c.leaves, whole.leaves, strict=True)):
        assert (a.grad is None) == (i == frozen)
        assert a.grad is None or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_without_gradients_only_the_losses_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    c, wanted = case(), []
    before = linear_cross_entropy(c.x, c.weight, c.bias, c.labels, label_smoothing=0.1)
    plain = cross_entropy.row_losses
    monkeypatch.setattr(cross_entropy, "row_losses", lambda *given: (wanted.append(given[-1]), plain(*given)))
    with torch.inference_mode():
        assert torch.equal(linear_cross_entropy(c.x, c.weight, c.bias, c.labels, label_smoothing=0.1), before)
    assert wanted == [False]


def test_a_tied_matrix_learns_from_both_ends_and_from_every_batch() -> None:
    """With tied weights the gradient adds to that of the embedding, and to that of the previous batch."""
    ours, theirs = (nn.Embedding.from_pretrained(case().weight.detach().clone(), freeze=False) for _ in range(2))
    for seed in (0, 1):
        ids, labels = torch.randint(0, V, (2, M), generator=torch.Generator().manual_seed(seed))
        (linear_cross_entropy(ours(ids).tanh(), ours.weight, None, labels, label_smoothing=0.1)[0] * SHARE).backward()
        logits = F.linear(theirs(ids).tanh(), theirs.weight)
        loss = F.cross_entropy(logits, labels, ignore_index=PAD, label_smoothing=0.1, reduction="sum")
        (loss * SHARE).backward()
    assert ours.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_kernel_is_the_formula(options: dict[str, object], fused: None, small_chunks: None) -> None:
    c = case(130 if len(options) > 1 else 20)
    check(c.to(torch.float32), 1e-4, **options)


@pytest.mark.parametrize("kind", ["torch", "kernel"])
def test_products_in_bf16_are_as_good_as_bf16(kind: str, request: pytest.FixtureRequest, small_chunks: None) -> None:
    """Under autocast with fp32 weights, gradients have the dtype of their parameters, and are exact up to bf16 rounding."""
    if kind == "kernel":
        request.getfixturevalue("fused")
    m = M if kind == "torch" else 20
    c, exact = case(m).to(torch.float32), case(m)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(c.x, c.weight, c.bias, c.labels, label_smoothing=0.1, z_loss=0.01)
    theirs = expected(exact, 0.1, 0.01)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=5e-3, atol=0)
    for a, b in zip(gradients(ours, c.leaves), gradients(theirs, exact.leaves), strict=True):
        assert a.dtype == torch.float32
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_products_are_in_bf16_under_autocast_and_sums_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = cross_entropy.row_losses
    monkeypatch.setattr(
        cross_entropy,
        "row_losses",
        lambda logits, labels, shares, terms, losses, grad: (
            seen.append((logits.dtype, losses.dtype)),
            plain(logits, labels, shares, terms, losses, grad),
        ),
    )
    c = case().to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(c.x, c.weight, c.bias, c.labels)
    linear_cross_entropy(c.x.bfloat16(), c.weight, None, c.labels)
    linear_cross_entropy(c.x, c.weight, None, c.labels)
    low, full = torch.bfloat16, torch.float32
    assert seen == [(low, full), (low, full), (full, full)]


@pytest.mark.parametrize("kind", ["torch", "kernel"])
def test_a_logit_that_is_no_number_is_seen_in_the_loss(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "kernel":
        request.getfixturevalue("fused")
    c = case(9, biased=False).to(torch.float32)
    c.labels[:] = 5
    with torch.no_grad():
        c.x[7, 3] = torch.nan
    assert linear_cross_entropy(c.x, c.weight, None, c.labels, label_smoothing=0.1)[0].isnan()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_the_same(
    dtype: torch.dtype, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks and blocks, and a vocabulary that is no multiple of a tile."""
    torch.set_float32_matmul_precision("highest")
    vocabulary = 9001
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cuda", 128 * vocabulary * 2)
    c = case(500, v=vocabulary)
    gpu = Case(*(t.detach().cuda().to(torch.float32).requires_grad_() for t in c.leaves), c.labels.cuda())
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        ours = linear_cross_entropy(gpu.x, gpu.weight, gpu.bias, gpu.labels, **options)  # type: ignore[arg-type]
    theirs = expected(c, **options)  # type: ignore[arg-type]
    share = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double().cpu(), theirs, rtol=share, atol=0)
    for a, b in zip(gradients(ours, gpu.leaves), gradients(theirs, c.leaves), strict=True):
        assert (a.double().cpu() - b).norm() < share * b.norm()
