"""The selective scan: its torch form and its Triton kernels (interpreted on a CPU) against the recurrence in float64."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.kernels import selective_scan
from regard.kernels.masks import document_starts

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NAMES = ("x", "u", "a", "b", "c", "skip", "bias", "gate", "initial")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Triton kernels, on a CPU interpreted, with small chunks, so that a few tokens make several of them."""
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    monkeypatch.setattr(selective_scan, "uses_kernels", lambda x: True)
    for name, size in {} if CUDA else {"TOKENS": 4, "BLOCK": 4, "IN_REGISTERS": 2}.items():
        monkeypatch.setattr(selective_scan, name, size)


def make(
    batch: int, length: int, width: int, states: int, dtype: torch.dtype = torch.float64, gated: bool = True,
    begun: bool = True,
) -> dict[str, Tensor | None]:  # fmt: skip
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    given: dict[str, Tensor | None] = {
        "x": draw(batch, length, width),
        "u": draw(batch, length, width) - 1,
        "a": -torch.exp(draw(width, states)),
        "b": draw(batch, length, states),
        "c": draw(batch, length, states),
        "skip": draw(width),
        "bias": draw(width) * 0.5,
        "gate": draw(batch, length, width) if gated else None,
        "initial": draw(batch, width, states) if begun else None,
    }
    exact = ("a", "skip", "bias", "initial")
    for name, value in given.items():
        if value is not None:
            kind = torch.promote_types(dtype, torch.float32) if name in exact else dtype
            given[name] = value.to(DEVICE, kind).requires_grad_()
    return given


def packed(batch: int, length: int) -> Tensor:
    """Return positions of rows with documents of several lengths; the first row continues a text."""
    rows = []
    for row in range(batch):
        lengths, at = [3 + 2 * row, 1, 6, length], 5 if row == 0 else 0
        rows.append(torch.cat([torch.arange(n) + (at if i == 0 else 0) for i, n in enumerate(lengths)])[:length])
    return torch.stack(rows).to(DEVICE)


def run(function: Any, given: dict[str, Tensor | None], starts: Tensor, grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return y, the last state, and the gradients of all inputs."""
    y, final = function(**given, starts=starts)
    leaves = [value for value in given.values() if value is not None]
    found = torch.autograd.grad((y, final), leaves, (grads[0].to(y), grads[1].to(final)))
    return [y.detach(), final.detach(), *found]


def compare(given: dict[str, Tensor | None], starts: Tensor, share: float) -> None:
    x, a = given["x"], given["a"]
    assert x is not None
    assert a is not None
    torch.manual_seed(1)
    grads = torch.randn(x.shape, device=DEVICE), torch.randn(len(x), *a.shape, device=DEVICE)
    exact = {k: None if v is None else v.detach().double().requires_grad_() for k, v in given.items()}
    wanted = run(selective_scan.recurrence, exact, starts, grads)
    found = run(selective_scan.selective_scan, given, starts, grads)
    names = ["y", "final", *(name for name in NAMES if given[name] is not None)]
    for name, mine, theirs in zip(names, found, wanted, strict=True):
        error, largest = (mine.double() - theirs).abs().max().item(), theirs.abs().max().item()
        assert error <= share * max(largest, 1e-6), f"{name} is off by {error:.2g} of {largest:.2g}"


@pytest.mark.parametrize("length", [1, 5, 64, 70])
@pytest.mark.parametrize(("gated", "begun"), [(True, True), (False, False)])
def test_chunks_are_the_recurrence(length: int, gated: bool, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if length < 64:
        monkeypatch.setattr(selective_scan, "CHUNK", 2)
    compare(make(2, length, 6, 4, gated=gated, begun=begun), document_starts(packed(2, length)), 1e-12)


@pytest.mark.skipif(CUDA, reason="for CPUs")
@pytest.mark.parametrize(
    ("length", "width", "states", "gated", "begun"), [(70, 80, 16, True, True), (9, 6, 3, False, False)]
)
def test_the_compiled_scan_of_a_cpu_is_the_recurrence(
    length: int, width: int, states: int, gated: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32; 80 channels are two blocks, and 70 tokens two chunks."""
    monkeypatch.setattr(selective_scan, "LARGE", 0)
    given = make(2, length, width, states, torch.float32, gated, begun)
    compare(given, document_starts(packed(2, length)), 2e-5)


def test_powers_of_two_of_the_compiled_scan() -> None:
    """Its polynomial leaves out (f ln 2)^7 / 7!, f up to 0.5, which is 1.2e-7; each of six sums rounds by 6e-8."""
    pytest.importorskip("numba")
    from regard.kernels.selective_scan_numba import exp2

    x = -np.concatenate([np.linspace(0, 4, 999), np.linspace(4, 126, 999), [1e9]]).astype(np.float32)
    found = np.array([exp2(value) for value in x])
    assert np.allclose(found, np.exp2(np.maximum(x.astype(np.float64), -126)), rtol=4e-7, atol=0)


def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_scan, "CHUNK", 2)
    given = make(1, 5, 2, 2)
    starts = torch.tensor([[-2, -2, 2, 2, 2]], dtype=torch.int32, device=DEVICE)
    torch.autograd.gradcheck(
        lambda *values: selective_scan.selective_scan(**dict(zip(NAMES, values, strict=True)), starts=starts),
        tuple(given[name] for name in NAMES),
    )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("length", "width", "states", "gated", "begun", "splits"),
    [
        (8, 4, 2, True, True, 1),
        (9, 5, 5, True, True, 1),  # three chunks, three pairs of states, of which two are in registers at once
        (13, 5, 3, False, True, 2),  # two chunks in each split
        (14, 4, 1, True, False, 2),
        (1, 3, 2, False, False, 1),
    ],
)
def test_kernels_are_the_recurrence(
    length: int, width: int, states: int, gated: bool, begun: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32: sums of some dozen terms, each wrong by a few roundings; powers of 2 are those of the GPU or of NumPy."""
    chunk = selective_scan.TOKENS
    monkeypatch.setattr(selective_scan, "split_size", lambda x: -(-length // (splits * chunk)) * chunk)
    given = make(2, length, width, states, torch.float32, gated, begun)
    compare(given, document_starts(packed(2, length)), 2e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_of_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are rounded to 8 bits in bf16, and so are the stored states."""
    monkeypatch.setattr(selective_scan, "split_size", lambda x: 2 * selective_scan.TOKENS)
    compare(make(1, 18, 6, 4, dtype), document_starts(packed(1, 18)), 2e-2)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("width", "states"), [(6, 3), (40, 16)])
def test_steps_are_the_recurrence(width: int, states: int) -> None:
    """The kernel of a decoding step, in fp32; B and C are parts of one tensor, as in the layer."""
    length, given = 4, make(2, 4, width, states, torch.float32)
    x, u, a, b, c, skip, bias, gate, initial = (given[name].detach() for name in NAMES)  # type: ignore[union-attr]
    starts = torch.full((2, length), -1, dtype=torch.int32, device=DEVICE)
    exact = [each.double() for each in (x, u, a, b, c, skip, bias)]
    wanted, last = selective_scan.recurrence(*exact, starts, gate.double(), initial.double())
    state, vectors = initial.clone(), torch.cat([b, c], -1)
    found = [
        selective_scan.decoding_step(
            state, x[:, t], u[:, t], (-a).log(), *vectors[:, t].chunk(2, -1), skip, bias, gate[:, t]
        )
        for t in range(length)
    ]
    torch.testing.assert_close(torch.stack(found, 1).double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("length", "width", "states", "gated", "chunks"),
    [
        (256, 96, 16, True, 32),
        (333, 96, 16, True, 3),
        (61, 40, 6, False, 8),
        (64, 40, 18, True, 3),
        (40, 64, 3, True, 2),
    ],
)
def test_kernels_on_a_gpu(
    length: int, width: int, states: int, gated: bool, chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 rounds outputs and gradients to 8 bits, and the addends of the gradients of B and C."""
    monkeypatch.setattr(selective_scan, "split_size", lambda x: chunks * selective_scan.TOKENS)
    given = make(2, length, width, states, dtype, gated)
    compare(given, document_starts(packed(2, length)), 1e-4 if dtype == torch.float32 else 2e-2)


def test_the_operator_is_sound() -> None:
    given = {k: None if v is None else v.detach() for k, v in make(2, 6, 4, 2).items()}
    starts = document_starts(packed(2, 6))
    vectors = torch.cat([given.pop("b"), given.pop("c")], -1)
    args = (*(given[name] for name in ("x", "u", "a")), vectors, given["skip"], given["bias"], starts)
    torch.library.opcheck(selective_scan.forward.op, (*args, given["gate"], given["initial"]))


def test_autocast_leaves_sums_over_states_in_full_precision() -> None:
    given: Any = {**make(2, 9, 4, 8, torch.float32), "starts": document_starts(packed(2, 9)).to(DEVICE)}
    torch.manual_seed(1)
    state, x, dt, b, c = (torch.randn(2, *shape, device=DEVICE) for shape in ((4, 8), (4,), (4,), (8,), (8,)))
    step = state, x, dt.abs(), -torch.ones(4, 8, device=DEVICE), b, c
    expected = *selective_scan.selective_scan(**given), *selective_scan.step(*step)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = *selective_scan.selective_scan(**given), *selective_scan.step(*step)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
