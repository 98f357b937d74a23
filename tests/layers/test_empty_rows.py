"""Batches without columns and without rows: empty outputs, gradients of zero, and states that stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.kernels.causal_convolution import causal_convolution
from regard.kernels.gated_linear_attention import gated_linear_attention
from regard.kernels.long_convolution import long_convolution
from regard.kernels.masks import CAUSAL
from regard.kernels.selective_scan import selective_scan
from regard.kernels.wkv import wkv
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import DecodingState
from regard.layers.mixers.attention import SelfAttention
from regard.layers.part import Mixer
from regard.layers.positions.scheme import NoPositions
from regard.models.architectures import make_model, preset

VOCAB = 23
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
PRESETS = ["gpt-tiny", *(f"{name}-tiny" for name in ("linear-attention", "gla", "based", "mamba", "mamba2"))]
PRESETS += ["rwkv-tiny", "s4-tiny", "s4d-tiny"]
every = pytest.mark.parametrize("name", PRESETS)
on_each = pytest.mark.parametrize("device", DEVICES)
SHAPES = pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])


def make(name: str, device: str) -> Any:
    torch.manual_seed(0)
    return make_model(preset(name, target_vocab=VOCAB, d_model=64, n_decoder_layers=3)).to(device)


@on_each
@SHAPES
@every
def test_a_batch_without_tokens_has_empty_outputs_and_no_gradient(
    name: str, shape: tuple[int, int], device: str
) -> None:
    model = make(name, device)
    logits = model(torch.zeros(shape, dtype=torch.long, device=device))
    assert logits.shape == (*shape, VOCAB)
    logits.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@on_each
@every
@torch.no_grad()
def test_a_prompt_without_columns_leaves_the_decoding_state_as_it_is(name: str, device: str) -> None:
    model, positions = make(name, device).eval(), torch.zeros(2, 0, dtype=torch.long, device=device)
    request = PrepareRequest(positions, positions, CAUSAL, NoPositions(), None, False, continues=True)
    parts = [part for block in model.decoder.blocks for part in block.sublayers.values() if part.state()]
    for part in (part for part in parts if not isinstance(part, SelfAttention)):
        state = DecodingState(part, 2, torch.device(device), torch.float32)
        kept = state.parts[part]
        before = {key: value.normal_().clone() for key, value in vars(kept).items()}
        prepared = part.prepare(request) if isinstance(part, Mixer) else None
        assert (
            part.prefill(torch.zeros(2, 0, 64, device=device), Context(positions, prepared, state=state), kept).numel()
            == 0
        )
        assert all(torch.equal(value, before[key]) for key, value in vars(kept).items())


@on_each
@pytest.mark.parametrize("rows", [0, 2])
@torch.no_grad()
def test_kernels_return_the_initial_state_of_rows_without_tokens(rows: int, device: str) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    starts = torch.zeros(rows, 0, dtype=torch.int32, device=device)
    q, v, decay, state = draw(rows, 0, 2, 16), draw(rows, 0, 4, 8), draw(rows, 0, 4), draw(rows, 4, 16, 8)
    x, b, rates, hidden = draw(rows, 0, 32), draw(rows, 0, 4), draw(32, 4), draw(rows, 32, 4)
    mean, vector = draw(rows, 3, 32), draw(32)
    for given in (False, True):
        o, last = gated_linear_attention(q, q, v, decay, starts, state if given else None)
        assert o.shape == v.shape
        assert torch.equal(last, state if given else torch.zeros_like(state))
        y, last = selective_scan(x, x, rates, b, b, vector, vector, starts, x, hidden if given else None)
        assert y.shape == x.shape
        assert torch.equal(last, hidden if given else torch.zeros_like(hidden))
        y, last = wkv(x, x, vector, vector, starts, mean if given else None)
        assert y.shape == x.shape
        assert torch.equal(last, mean if given else torch.zeros_like(mean))
    assert causal_convolution(x, rates, vector, starts, True).shape == x.shape
    assert long_convolution(x, draw(32, 0)).shape == long_convolution(x, draw(32, 0), starts).shape == x.shape
    assert long_convolution(draw(0, 3, 32), draw(32, 3)).shape == (0, 3, 32)
    assert long_convolution(draw(0, 3, 32), draw(32, 3), starts.new_zeros(0, 3)).shape == (0, 3, 32)
