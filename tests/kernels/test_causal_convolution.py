"""The short causal convolution: its Triton kernels (interpreted on a CPU) against torch's Conv1d on single documents."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import causal_convolution
from regard.kernels.masks import document_starts

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Triton kernels, on a CPU interpreted, with small tiles, so that a few tokens make several of them."""
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    monkeypatch.setattr(causal_convolution, "uses_kernels", lambda x, weight: True)
    if not CUDA:
        monkeypatch.setattr(causal_convolution, "SIZES", {"BLOCK": 4, "TOKENS": 4, "TILES": 2})


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[list[int]], silu: bool) -> Tensor:
    """Convolve every document of the rows x (B, T, C) by itself with torch's own convolution."""
    rows = []
    for row, sizes in zip(x, lengths, strict=True):
        documents = [F.pad(part.t()[None], (weight.shape[1] - 1, 0)) for part in row.split(sizes)]
        rows.append(torch.cat([F.conv1d(each, weight[:, None], bias, groups=len(weight))[0].t() for each in documents]))
    y = torch.stack(rows)
    return F.silu(y) if silu else y


def make(width: int, k: int, bias: bool, lengths: list[list[int]], dtype: torch.dtype) -> list[Tensor | None]:
    """Return x, whose rows are parts of wider ones as those of a fused projection are, the weight, and the bias."""
    torch.manual_seed(0)
    rows = torch.randn(len(lengths), sum(lengths[0]), 2 * width)
    given = [rows.to(DEVICE, dtype).chunk(2, -1)[1], torch.randn(width, k).to(DEVICE)]
    return [*given, torch.randn(width).to(DEVICE) if bias else None]


def compare(given: list[Tensor | None], lengths: list[list[int]], silu: bool, share: float) -> None:
    """Compare outputs and all gradients with those of torch's convolution in float64."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in lengths]).to(DEVICE)
    leaves = [each.detach().requires_grad_() for each in given if each is not None]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    none: list[Tensor | None] = [] if len(leaves) == 3 else [None]
    y = causal_convolution.causal_convolution(*leaves, *none, document_starts(positions), silu)  # type: ignore[arg-type]
    wanted = conv1d(*exact, *none, lengths, silu)  # type: ignore[arg-type]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]
    expected = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
    for name, mine, theirs in zip(("y", "x", "weight", "bias"), found, expected, strict=False):
        error, largest = (mine.double() - theirs).abs().max().item(), theirs.abs().max().item()
        assert error <= share * largest, f"{name} is off by {error:.2g} of {largest:.2g}"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("width", "k", "bias", "silu", "lengths"),
    [
        (4, 4, True, True, [[16]]),  # whole tiles, in two programs
        (6, 4, False, True, [[1, 2, 8, 2], [6, 7]]),
        (5, 3, True, False, [[9, 1], [10]]),
        (4, 1, True, True, [[3, 5]]),
    ],
)
def test_kernels_are_torchs_convolution(
    width: int, k: int, bias: bool, silu: bool, lengths: list[list[int]]
) -> None:  # fmt: skip
    """In fp32: sums of a few terms, and gradients of weights over a dozen tokens."""
    compare(make(width, k, bias, lengths, torch.float32), lengths, silu, 3e-6)


@pytest.mark.parametrize("silu", [False, True])
def test_the_torch_form_is_torchs_convolution(silu: bool) -> None:
    lengths = [[1, 2, 8, 2], [6, 7]]
    compare(make(6, 4, True, lengths, torch.float64), lengths, silu, 1e-6)  # the weights are fp32


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("k", "bias", "silu"), [(4, True, True), (2, False, False), (1, True, True)])
def test_steps_are_the_convolution(k: int, bias: bool, silu: bool) -> None:
    lengths = [[6], [6]]
    x, weight, b = make(5, k, bias, lengths, torch.float32)
    assert x is not None
    assert weight is not None
    kept = torch.zeros(2, k - 1, 5, device=DEVICE)
    found = [causal_convolution.step(x[:, t], weight, b, silu, kept) for t in range(6)]
    wanted = conv1d(x.double(), weight.double(), None if b is None else b.double(), lengths, silu)
    torch.testing.assert_close(torch.stack(found, 1).double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept, x[:, 6 - (k - 1) :])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("cut", [1, 2, 5])
@torch.no_grad()
def test_a_text_continues_from_the_tokens_before_it(cut: int) -> None:
    lengths = [[9], [9]]
    x, weight, bias = make(5, 4, True, lengths, torch.float32)
    assert x is not None
    earlier, positions = torch.zeros(2, 3, 5, device=DEVICE), torch.arange(9, device=DEVICE).expand(2, -1)
    found = []
    for part, here in ((x[:, :cut], positions[:, :cut]), (x[:, cut:], positions[:, cut:])):
        found.append(causal_convolution.causal_convolution(part, weight, bias, document_starts(here), True, earlier))
        earlier = torch.cat([earlier, part], 1)[:, -3:]
    torch.testing.assert_close(torch.cat(found, 1), conv1d(x, weight, bias, lengths, True), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[[256], [100, 156]], [[333], [1, 332]]])
def test_kernels_on_a_gpu(dtype: torch.dtype, lengths: list[list[int]]) -> None:
    """bf16 rounds outputs and gradients to 8 bits."""
    compare(make(96, 4, True, lengths, dtype), lengths, True, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.usefixtures("interpreted")
def test_the_operator_is_sound() -> None:
    x, weight, bias = make(4, 3, True, [[8]], torch.float32)
    assert x is not None
    starts = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(causal_convolution.forward.op, (x.contiguous(), weight, bias, starts, True, None))
