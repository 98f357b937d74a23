"""Operators: torch's wrapper is left out in inference mode on a GPU alone, and the compiler never sees what is inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from regard.kernels import operators

SEEN: list[type] = []


@operators.operator("regard_test::twice")
def twice(x: Tensor) -> Tensor:
    """Return 2 x, and note what kind of tensor x is, and whether torch's wrapper called."""
    SEEN.append(type(x))
    return x + x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def run_backward(ctx: Any, grad: Tensor) -> Tensor:
    return twice(grad)


twice.register_autograd(run_backward)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let tensors count as those of a GPU, and note the calls of torch's operator."""
    SEEN.clear()
    calls: list[str] = []
    op = twice.op
    monkeypatch.setattr(operators, "on_gpu", lambda given: True)
    monkeypatch.setattr(twice, "op", lambda x: calls.append("op") or op(x))
    return calls


def test_inference_mode_calls_the_function_itself(wrapped: list[str]) -> None:
    x = torch.randn(3)
    with torch.no_grad():
        assert torch.equal(twice(x), 2 * x)
    assert wrapped == ["op"]
    with torch.inference_mode():
        assert torch.equal(twice(x), 2 * x)
    assert wrapped == ["op"]


def test_gradients_go_through_the_operator(wrapped: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(twice(x).sum(), x)
    assert torch.equal(grad, torch.full((3,), 2.0))
    assert wrapped == ["op", "op"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_compiler_does_not_look_inside(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the forward pass, not in the backward pass, and not in inference mode, where a trained model is validated."""
    SEEN.clear()
    monkeypatch.setattr(operators, "on_gpu", lambda given: True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: twice(x.sin()).cos(), backend=backend, fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(grad, -(2 * x.sin()).sin() * 2 * x.cos())
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x.detach()), (2 * x.detach().sin()).cos())
    assert SEEN
    assert not any(issubclass(kind, FakeTensor) for kind in SEEN)
