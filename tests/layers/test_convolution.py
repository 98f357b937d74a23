"""The gated convolution against torch's own, and which tokens it sees against brute force."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from formula import packed, ragged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, FULL, PAD_POSITION, Mask, document_mask, prefix
from regard.layers.context import Context, apply_step
from regard.layers.decoding_state import DecodingState
from regard.layers.mixers.convolution import ConvIndices, Convolution, make_conv_indices, unfold
from regard.layers.part import Place

C = 4
both_ways = pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "both sides"])
sizes = pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (3, 2), (5, 3), (3, 9)])


def columns_of(reach: ConvIndices) -> Tensor:
    """(B, T, K)"""
    return torch.stack(reach.columns, -1)


def layer_of(kernel: int, bias: bool = True, dilation: int = 1) -> Convolution:
    torch.manual_seed(kernel)
    settings = Convolution.Settings(kernel=kernel, dilations=(dilation,))
    return Convolution(settings, ModelConfig(d_model=C, bias=bias), Place("decoder")).double()


def run(layer: Convolution, x: Tensor, positions: Tensor, mask: Mask, dilation: int) -> Tensor:
    return layer(x, Context(positions, make_conv_indices(mask, positions, layer.kernel, dilation)))


def expected(layer: Convolution, x: Tensor, causal: bool, dilation: int) -> Tensor:
    """torch's convolution over one row (B, T, C) without padding."""
    kernel = layer.taps.in_features // C
    weight = layer.taps.weight.view(2 * C, kernel, C).transpose(1, 2)  # (2C, C, K), as torch has it
    reach = (kernel - 1) * dilation
    around = (reach, 0) if causal else (reach // 2, reach // 2)
    return F.glu(F.conv1d(F.pad(x.mT, around), weight, layer.taps.bias, dilation=dilation), dim=1).mT


@both_ways
@sizes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_it_is_torchs_convolution_forward_and_backward(mask: Mask, kernel: int, dilation: int, bias: bool) -> None:
    layer = layer_of(kernel, bias)
    x = torch.randn(2, 11, C, dtype=torch.double, requires_grad=True)
    found = run(layer, x, ragged(11, 11), mask, dilation)
    wanted = expected(layer, x, mask.causal, dilation)
    torch.testing.assert_close(found, wanted)
    leaves = [x, *layer.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


@both_ways
@sizes
def test_padding_and_neighbours_do_not_exist(mask: Mask, kernel: int, dilation: int) -> None:
    """Rows equal those without padding, however large its values, and padding gets no gradient."""
    layer, lengths = layer_of(kernel), (9, 1, 6, 12)
    positions = ragged(*lengths, width=14)
    x = torch.randn(4, 14, C, dtype=torch.double)
    x[positions == PAD_POSITION] = 1e6
    x.requires_grad_()
    found = run(layer, x, positions, mask, dilation)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(found[i, :n], expected(layer, x[i : i + 1, :n], mask.causal, dilation)[0])
    (gradient,) = torch.autograd.grad(found[positions > PAD_POSITION].sum(), x)
    assert (gradient[positions == PAD_POSITION] == 0).all()
    assert (gradient[positions > PAD_POSITION] != 0).all()


@both_ways
@sizes
def test_packed_documents_do_not_see_each_other(mask: Mask, kernel: int, dilation: int) -> None:
    layer, lengths = layer_of(kernel), [(5, 1, 6), (8, 2), (1, 1, 1)]
    positions = packed(*lengths)
    x = torch.randn(3, 12, C, dtype=torch.double)
    found = run(layer, x, positions, document_mask(mask), dilation)
    for b, row in enumerate(lengths):
        for i, n in enumerate(row):
            here = slice(sum(row[:i]), sum(row[:i]) + n)
            torch.testing.assert_close(found[b, here], expected(layer, x[b : b + 1, here], mask.causal, dilation)[0])


@both_ways
def test_the_gradient_of_unfolding_is_that_of_its_look_ups(mask: Mask) -> None:
    """Compare gradients with finite differences and with autograd, with padding and packed documents."""
    reach = make_conv_indices(document_mask(mask), packed((3, 4), (5,)), 3, 2)
    x = torch.randn(2, 7, 2, dtype=torch.double, requires_grad=True)
    assert reach.seen_by is not None
    assert torch.autograd.gradcheck(lambda x: unfold(x, reach), x)
    weight = torch.randn(2, 7, 6, dtype=torch.double)
    plain = unfold(x, ConvIndices(reach.columns))
    ours, theirs = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (unfold(x, reach), plain))
    torch.testing.assert_close(ours, theirs)


def test_where_nothing_is_learned_nobody_asks_who_sees_whom() -> None:
    with torch.no_grad():
        assert make_conv_indices(CAUSAL, ragged(4), 3, 1).seen_by is None


def test_columns_by_hand() -> None:
    positions = packed((3, 2), (4,))  # the second row is padded
    back = columns_of(make_conv_indices(document_mask(CAUSAL), positions, 2, 1))
    assert back[0].tolist() == [[-1, 0], [0, 1], [1, 2], [-1, 3], [3, 4]]
    assert back[1].tolist() == [[-1, 0], [0, 1], [1, 2], [2, 3], [-1, -1]]
    around = columns_of(make_conv_indices(document_mask(FULL), positions, 3, 2))
    assert around[0].tolist() == [[-1, 0, 2], [-1, 1, -1], [0, 2, -1], [-1, 3, -1], [-1, 4, -1]]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    hypotheses=st.integers(1, 3),
    kernel=st.integers(1, 5),
    dilation=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
@torch.no_grad()
def test_in_a_search_each_hypothesis_finds_its_own_past(
    lengths: list[int], hypotheses: int, kernel: int, dilation: int, seed: int
) -> None:
    """Read a padded prompt, then step with beam reordering; compare with torch's convolution over whole rows."""
    rng = torch.Generator().manual_seed(seed)
    layer, b, positions = layer_of(kernel, dilation=dilation), len(lengths), ragged(*lengths)
    x = torch.randn(b, max(lengths), C, dtype=torch.double, generator=rng)
    state = DecodingState(layer, b, x.device, x.dtype)
    kept = state.parts[layer]
    found = layer.prefill(
        x, Context(positions, make_conv_indices(CAUSAL, positions, kernel, dilation), state=state), kept
    )
    state.advance(positions, is_prompt=True)
    said = [[row[:n]] for row, n in zip(x, lengths, strict=True)]  # sentence, hypothesis -> its inputs (T, C)
    for row, (inputs,) in zip(found, said, strict=True):
        torch.testing.assert_close(row[: len(inputs)], expected(layer, inputs[None], True, dilation)[0])
    for _ in range(kernel * dilation + 1):
        parents = torch.randint(state.width, (b, hypotheses), generator=rng)
        state.reorder(parents)
        new = torch.randn(b, hypotheses, C, dtype=torch.double, generator=rng)
        said = [
            [torch.cat([row[parent], vector[None]]) for parent, vector in zip(of, vectors, strict=True)]
            for row, of, vectors in zip(said, parents.tolist(), new, strict=True)
        ]
        stepped = layer.step(new.flatten(0, 1), Context(state.position(), apply=apply_step, state=state), kept)
        state.advance(state.next[:, None].expand(-1, hypotheses))
        for y, inputs in zip(stepped, [inputs for row in said for inputs in row], strict=True):
            torch.testing.assert_close(y, expected(layer, inputs[None], True, dilation)[0, -1])


def test_a_prefix_is_refused() -> None:
    with pytest.raises(RegardError, match="a convolution sees no prefix"):
        make_conv_indices(prefix(2), ragged(4), 3, 1)
