"""The short causal convolution, against torch's Conv1d on every document by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.kernels.masks import document_starts
from regard.layers.mixers.short_convolution import ShortConvolution


def make(width: int = 5, kernel: int = 4, bias: bool = True) -> ShortConvolution:
    torch.manual_seed(0)
    layer = ShortConvolution(width, kernel, bias).double()
    layer.reset_parameters()
    return layer


def conv1d(layer: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    """Convolve one document (T, C) by torch's own convolution."""
    padded = F.pad(x.t()[None], (layer.kernel - 1, 0))
    return F.conv1d(padded, layer.weight[:, None], layer.bias, groups=layer.width)[0].t()


def test_document_starts_are_the_columns_of_position_zero() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, -1], [3, 4, 0, 1, -1, -1], [-1, -1, -1, -1, -1, -1]])
    found = document_starts(positions)
    assert found[0].tolist() == [0, 0, 0, 3, 3, 3]
    assert found[1].tolist() == [-3, -3, 2, 2, 2, 2]
    assert (found[2] < 0).all()


@pytest.mark.parametrize("kernel", [1, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_documents_are_convolved_one_by_one(kernel: int, bias: bool) -> None:
    layer, lengths = make(kernel=kernel, bias=bias), [2, 5, 1, 4]
    x = torch.randn(1, sum(lengths), 5, dtype=torch.float64)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    wanted = torch.cat([conv1d(layer, document) for document in x[0].split(lengths)])
    torch.testing.assert_close(layer(x, document_starts(positions))[0], wanted)


def test_prompts_of_any_length_and_steps_continue_a_text() -> None:
    layer = make()
    texts = [torch.randn(n, 5, dtype=torch.float64) for n in (7, 3, 1, 9)]
    whole = [conv1d(layer, text) for text in texts]
    kept = torch.zeros(4, *layer.storage().shape, dtype=torch.float64)
    at = [0] * 4
    for width in (2, 3):  # two prompts one after the other, the second one continues the first
        x, positions = torch.zeros(4, width, 5, dtype=torch.float64), torch.full((4, width), -1)
        for row, text in enumerate(texts):
            n = min(width, len(text) - at[row])
            x[row, :n], positions[row, :n] = text[at[row] : at[row] + n], torch.arange(at[row], at[row] + n)
        y = layer(x, document_starts(positions), kept)
        layer.store_last(x, positions, kept)
        for row in range(4):
            n = int((positions[row] >= 0).sum())
            torch.testing.assert_close(y[row, :n], whole[row][at[row] : at[row] + n])
            at[row] += n
    long = [row for row in range(4) if at[row] < len(texts[row])]
    kept = kept[long]
    step = layer.step(torch.stack([texts[row][at[row]] for row in long]), kept)
    torch.testing.assert_close(step, torch.stack([whole[row][at[row]] for row in long]))
