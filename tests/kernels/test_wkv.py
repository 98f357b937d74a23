"""The weighted mean of RWKV-4: the walk in torch and the Triton kernels (interpreted on a CPU) against its formula."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from regard.kernels import wkv
from regard.kernels.masks import document_starts

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LENGTHS = [[4, 1, 6], [2, 9], [11]]  # documents of packed rows
T = 11


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Triton kernels, on a CPU interpreted."""
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    monkeypatch.setattr(wkv, "uses_kernels", lambda x: True)
    monkeypatch.setitem(wkv.SIZES, "STEPS", 4)


def make(width: int, dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    k, v = (torch.randn(3, T, width, dtype=torch.float64) * s for s in (size, 1.0))
    w, u = torch.randn(width, dtype=torch.float64).exp(), torch.randn(width, dtype=torch.float64)
    exact = torch.promote_types(dtype, torch.float32)
    kinds = (dtype, dtype, exact, exact)
    return [x.to(DEVICE, kind).requires_grad_() for x, kind in zip((k, v, w, u), kinds, strict=True)]


def starts() -> Tensor:
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    return document_starts(torch.stack(rows).to(DEVICE))


def formula(k: Tensor, v: Tensor, w: Tensor, u: Tensor, begins: Tensor) -> Tensor:
    """A softmax over the tokens seen, for each channel."""
    index = torch.arange(k.shape[1], device=k.device)
    apart = (index[:, None] - index)[..., None]  # (T, S, 1)
    weights = k[:, None] + torch.where(apart == 0, u, -(apart - 1) * w)  # (B, T, S, D)
    seen = (apart >= 0) & (index[None, None, :, None] >= begins[:, :, None, None])
    return (weights.masked_fill(~seen, -torch.inf).softmax(2) * v[:, None]).sum(2)


def compare(given: list[Tensor], share: float) -> None:
    exact = [x.detach().double().requires_grad_() for x in given]
    y, wanted = wkv.wkv(*given, starts())[0], formula(*exact, starts())
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    found = [y, *torch.autograd.grad(y, given, grad)]
    expected = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
    for name, a, b in zip(("y", "k", "v", "w", "u"), found, expected, strict=True):
        error, largest = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert error <= share * max(largest, 1e-6), f"{name} is off by {error:.2g} of {largest:.2g}"


@pytest.mark.parametrize("size", [1.0, 60.0])
def test_the_walk_is_the_formula(size: float) -> None:
    """Keys of 60 and more would overflow without the largest exponent: e^120 of e^-120."""
    compare(make(5, torch.float64, size), 1e-9)


@pytest.mark.usefixtures("interpreted")
def test_kernels_are_the_formula() -> None:
    """In fp32 a key of 60 is wrong by 4e-6, and so are the weights; sums over a dozen tokens."""
    compare(make(20, torch.float32, 30.0), 3e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    compare(make(96, dtype), 1e-5 if dtype == torch.float32 else 2e-2)


def check_states(share: float, dtype: torch.dtype) -> None:
    k, v, w, u = (x.detach() for x in make(5, dtype))
    begins = torch.full((3, T), -1, dtype=torch.int32, device=DEVICE)
    whole, last = wkv.wkv(k, v, w, u, begins)
    count = torch.tensor([3, 0, 6], device=DEVICE)
    first, state = wkv.wkv(k[:, :6], v[:, :6], w, u, begins[:, :6], None, count)
    for row, n in enumerate(count.tolist()):
        rest, final = (x[:, n:] for x in (k[row : row + 1], v[row : row + 1])), begins[:1, n:]
        y, end = wkv.wkv(*rest, w, u, final, state[row : row + 1])
        torch.testing.assert_close(torch.cat([first[row, :n], y[0]]), whole[row], atol=share, rtol=share)
        torch.testing.assert_close(end[0], last[row], atol=share, rtol=share)
        assert state[row].any() == (n > 0)


def test_a_text_in_pieces_is_the_whole() -> None:
    check_states(1e-12, torch.float64)


@pytest.mark.usefixtures("interpreted")
def test_a_text_in_pieces_is_the_whole_in_the_kernel() -> None:
    check_states(1e-5, torch.float32)


def test_the_operator_is_sound() -> None:
    torch.library.opcheck(wkv.forward.op, (*(x.detach() for x in make(3, torch.float64)), starts(), None, None))
