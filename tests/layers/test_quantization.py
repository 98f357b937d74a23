"""Column-major weights give the same model and the same file; quantized weights nearly the same model, and no file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from regard import model_folder
from regard.errors import RegardError
from regard.layers.embedding import Head
from regard.layers.quantization import (
    QUANTIZED_LINEAR,
    QuantizedHead,
    convert_weights,
    make_column_major,
    quantize_model,
)
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset

CPU = torch.device("cpu")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"n_encoder_layers": 2, "n_decoder_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "dropout": 0.0}
    return make_model(preset("transformer-tiny", **sizes, source_vocab=50, target_vocab=50)).eval()


def test_it_says_the_same_and_learns_the_same() -> None:
    plain, other = model(), model()
    make_column_major(other)
    matrices = [m.weight for m in other.modules() if isinstance(m, torch.nn.Linear)]
    assert matrices
    assert all(w.t().is_contiguous() for w in matrices)
    ids = torch.randint(5, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    results = [net(ids, ids) for net in (plain, other)]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    for result in results:
        result.square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_a_loaded_model_is_laid_out_and_saved_as_it_was(tmp_path: Path) -> None:
    model_folder.save(tmp_path / "a", ModelPackage(model(), None, "translation"), "")
    loaded = model_folder.load(tmp_path / "a", CPU)
    assert all(m.weight.t().is_contiguous() for m in loaded.model.modules() if isinstance(m, torch.nn.Linear))
    model_folder.save(tmp_path / "b", loaded, "")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---- quantization ----------------------------------------------------------------------------------------------------


def product(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> np.ndarray:
    w, b, rows = (t.double().numpy() for t in (weight, bias, x))
    return rows @ w.T + b


@pytest.mark.parametrize("most", [127, 63])
def test_a_row_in_int8_is_rounded_by_its_own_largest_number(most: int) -> None:
    """No row depends on the others of its batch, and the result is that of integer arithmetic, computed in float64."""
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 32, generator=rng), torch.randn(24, generator=rng)
    x = torch.randn(6, 32, generator=rng) * torch.logspace(-4, 4, 6)[:, None]
    x[3] = 0
    layer = QUANTIZED_LINEAR["int8"](weight, bias)
    layer.max_input = most  # as on a processor that sums in 32 bits, and on one that does in 16
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], together[i]) for i in range(6))
    w_step, x_step = weight.abs().amax(1).double() / 127, x.abs().amax(1).clamp(min=1e-30).double() / most
    w, rows = (weight / w_step[:, None]).round(), (x / x_step[:, None]).round()
    expected = (rows.double() @ w.double().t()) * x_step[:, None] * w_step + bias
    largest = (x.abs().amax(1)[:, None] * weight.abs().amax(1)).double()
    assert (
        (together - expected).abs() <= largest * 1.01 / 127 + 1e-5 * expected.abs()
    ).all()  # one rounding may differ
    assert torch.equal(together[3], bias)


@pytest.mark.parametrize(("kind", "digits"), [("int8", 7), ("fp16", 11), ("bf16", 7)])
def test_a_product_is_right_to_the_digits_its_numbers_have(kind: str, digits: int) -> None:
    """Each product is off by half a unit in the last place of its factors at most; a sum, by no more than all of them."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 96, generator=rng) * torch.logspace(-3, 1, 40)[:, None]  # outputs of very different sizes
    bias, x = torch.randn(40, generator=rng), torch.randn(5, 96, generator=rng)
    found = QUANTIZED_LINEAR[kind](weight, bias)(x).double().numpy()
    largest = weight.abs().amax(1).double().numpy() * x.abs().amax().double().numpy()
    bound = 96 * largest * 2.0**-digits + np.abs(bias.numpy()) * 2.0**-8 + np.abs(found) * 2.0**-8
    error = np.abs(found - product(weight, bias, x))
    assert (error <= bound).all()
    typical = np.sqrt((error**2).mean(0)) / np.sqrt((product(weight, bias * 0, x) ** 2).mean(0))
    assert np.median(typical[20:]) < 3 * 2.0**-digits  # of the larger outputs, whose bias does not count


def test_one_huge_output_leaves_the_others_their_digits() -> None:
    """A scale of its own for each output: with one for all, rows a thousand times smaller would round to zero."""
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    weight[0] *= 1e4
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    found = QUANTIZED_LINEAR["int8"](weight, torch.zeros(8))(x)[:, 1:]
    expected = torch.tensor(product(weight, torch.zeros(8), x))[:, 1:]
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("kind", QUANTIZED_LINEAR)
def test_a_packed_model_says_nearly_the_same(kind: str) -> None:
    plain, other = model(), quantize_model(model(), kind)
    assert not any(isinstance(m, torch.nn.Linear) or type(m) is Head for m in other.modules())
    ids = torch.randint(5, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = plain(ids, ids), other(ids, ids)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert torch.equal(plain.source_embedding(ids), other.source_embedding(ids))  # the embedding is not quantized


@pytest.mark.parametrize("kind", QUANTIZED_LINEAR)
def test_a_packed_head_keeps_its_scale(kind: str) -> None:
    weight = torch.randn(20, 16, generator=torch.Generator().manual_seed(3))
    head = Head(weight, scaled=True)
    x = torch.randn(2, 16)
    expected, found = head(x), QuantizedHead(head, QUANTIZED_LINEAR[kind])(x)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("kind", QUANTIZED_LINEAR)
def test_a_model_is_loaded_in_fewer_bytes_and_not_saved(kind: str, tmp_path: Path) -> None:
    model_folder.save(tmp_path / "a", ModelPackage(model(), None, "translation"), "")
    package = model_folder.load(tmp_path / "a", CPU, kind)
    assert any(isinstance(m, QUANTIZED_LINEAR[kind]) for m in package.model.modules())
    with pytest.raises(RegardError, match="rounded weights"):
        model_folder.save(tmp_path / "b", package, "")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RegardError, match="unknown weights 'int3': use auto, fp32"):
        convert_weights(model(), "int3", CPU)
    with pytest.raises(RegardError, match="int8 are for CPUs"):
        convert_weights(model(), "int8", torch.device("cuda"))
