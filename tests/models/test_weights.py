"""Weights quantized to int8: a quarter of the bytes in a file, and loading them into a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard import model_folder
from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.files import write_manifest
from regard.layers.quantization import Int8Linear, is_quantized
from regard.models.architectures import make_model, preset
from regard.models.weights import SCALE_SUFFIX, are_quantized, dequantize_weights, quantize_weights, weights_of
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES = {"n_encoder_layers": 2, "n_decoder_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 64, "max_len": 64}


def test_a_matrix_by_hand() -> None:
    x = torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0], [-254.0, 1.0, 2.9]])
    made = quantize_weights({"a": x, "b": x[0]})
    assert made["a"].tolist() == [[127, -50, 0], [0, 0, 0], [-127, 0, 1]]
    assert made["a"].dtype == torch.int8
    assert made["a" + SCALE_SUFFIX].flatten().tolist() == pytest.approx([0.01, 1e-12, 2.0])
    assert made["b"].dtype == torch.float16
    back = dequantize_weights(made)
    assert set(back) == {"a", "b"}
    assert torch.allclose(back["a"], torch.tensor([[1.27, -0.5, 0.0], [0.0, 0.0, 0.0], [-254.0, 0.0, 2.0]]))
    assert torch.equal(dequantize_weights({"c": x})["c"], x)


def test_every_number_is_within_half_a_step_and_rounding_twice_changes_nothing() -> None:
    x = torch.randn(50, 40) * torch.logspace(-4, 3, 50)[:, None]
    made = quantize_weights({"x": x})
    back = dequantize_weights(made)["x"]
    assert ((back - x).abs() <= made["x" + SCALE_SUFFIX] * 0.5001).all()
    assert torch.equal(quantize_weights({"x": back})["x"], made["x"])


def package(**sizes: Any) -> model_folder.ModelPackage:
    tokenizer = Tokenizer.train(["I ate an apple."], TokenizerConfig(kind="char", vocab_size=50))
    torch.manual_seed(3)
    config = preset("transformer-tiny", source_vocab=len(tokenizer), target_vocab=len(tokenizer), **(SIZES | sizes))
    model = make_model(config).eval()
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.1  # biases and norms that are not zeros and ones
    return model_folder.ModelPackage(model, Tokenizers(tokenizer, tokenizer), "translation", source="en", target="de")


def logits(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    source, target = (torch.randint(5, 14, (3, 9), generator=generator) for _ in range(2))
    with torch.no_grad():
        return model(source, target)


@pytest.mark.parametrize(
    "sizes", [{"tie": "all"}, {"tie": "none"}, {"positions": "learned"}, {"positions": "t5", "cross_positions": "t5"}]
)
def test_bytes_from_the_disk_are_the_model_that_was_rounded_in_memory(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Oracle: the same folder loaded in fp32 and then rounded to int8, whose scales are the same."""
    model_folder.save(tmp_path / "m", package(**sizes), "", small=True)
    exact = model_folder.load(tmp_path / "m", torch.device("cpu"), "fp32").model
    straight = model_folder.load(tmp_path / "m", torch.device("cpu"), "int8").model
    from regard.layers.quantization import quantize_model

    expected, found = logits(exact), logits(straight)
    assert is_quantized(straight)
    assert not is_quantized(exact)
    assert not any(isinstance(m, nn.Linear) for name, m in straight.named_modules() if "scheme" not in name)
    assert torch.allclose(found, logits(quantize_model(exact, "int8")), atol=1e-4)
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_a_small_folder_is_small_and_close_to_the_whole(tmp_path: Path) -> None:
    whole = package(d_model=64, d_ff=256)
    for name, small in (("big", False), ("small", True)):
        model_folder.save(tmp_path / name, whole, "", small=small)
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("big", "small")}
    assert sizes["small"] < 0.3 * sizes["big"]
    again = model_folder.load(tmp_path / "small", torch.device("cpu"), "fp32").model
    for name, x in weights_of(whole.model).items():
        mine = weights_of(again)[name]
        limit = x.abs().amax(-1, keepdim=True) / 250 if x.ndim == 2 else x.abs() / 1000 + 1e-6
        assert ((mine - x).abs() <= limit).all(), name


def test_int8_of_given_bytes_is_int8_of_the_matrix() -> None:
    weight, bias, x = torch.randn(8, 16), torch.randn(8), torch.randn(3, 16)
    made = quantize_weights({"w": weight})
    straight = Int8Linear(made["w"], bias, made["w" + SCALE_SUFFIX].squeeze(1))
    assert torch.allclose(straight(x), Int8Linear(weight, bias)(x), atol=1e-5)
    exact = x @ dequantize_weights(made)["w"].T + bias
    assert (straight(x) - exact).abs().max() < 0.1


def load_harmed(path: Path, way: str, harm: Any) -> None:
    """Load a model whose tensors were changed by `harm(tensors, name of a quantized matrix)` and sealed again."""
    model_folder.save(path, package(), "", small=True)
    tensors = load_file(path / "model.safetensors")
    assert are_quantized(tensors)
    harm(tensors, next(name for name in tensors if name.endswith("weight") and name + SCALE_SUFFIX in tensors))
    save_file(tensors, path / "model.safetensors")
    (path / "manifest.json").unlink()
    write_manifest(path)
    model_folder.load(path, torch.device("cpu"), way)


@pytest.mark.parametrize("way", ["int8", "fp32"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda t, name: t.pop(name), "is missing"),
        (lambda t, name: t.update({k: t[k][:-1].contiguous() for k in (name, name + SCALE_SUFFIX)}), "the model has"),
        (lambda t, name: t.update({name + SCALE_SUFFIX: t[name + SCALE_SUFFIX] * math.nan}), "not finite|missing or broken"),
        (lambda t, name: t.update({"more": torch.zeros(3)}), "more is not in the model"),
    ],
)  # fmt: skip
def test_broken_weights_are_named(tmp_path: Path, way: str, harm: Any, said: str) -> None:
    with pytest.raises(RegardError, match=said):
        load_harmed(tmp_path / "m", way, harm)


@pytest.mark.parametrize("way", ["auto", "int8"])
def test_a_matrix_without_its_scales_is_refused(tmp_path: Path, way: str) -> None:
    with pytest.raises(RegardError, match="missing or broken"):
        load_harmed(tmp_path / "m", way, lambda tensors, name: tensors.pop(name + SCALE_SUFFIX))


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"en": 5}', '{"en": {"the": "often"}}'])
def test_broken_profiles_of_languages_are_named(tmp_path: Path, text: str) -> None:
    model_folder.save(tmp_path / "m", package(), "")
    (tmp_path / "m" / "languages.json").write_text(text)
    (tmp_path / "m" / "manifest.json").unlink()
    write_manifest(tmp_path / "m")
    with pytest.raises(RegardError, match=r"languages\.json has no profiles of languages"):
        model_folder.load(tmp_path / "m", torch.device("cpu"))


def test_languages_come_with_the_folder(tmp_path: Path) -> None:
    from dataclasses import replace

    profiles = {"en": {" th": -1.5}, "zh": {"ü": -2.0}}
    model_folder.save(tmp_path / "m", replace(package(), languages=profiles, directions=("en>de",)), "")
    again = model_folder.load(tmp_path / "m", torch.device("cpu"))
    assert again.languages == profiles
    assert again.directions == ("en>de",)
    model_folder.save(tmp_path / "n", package(), "")
    assert model_folder.load(tmp_path / "n", torch.device("cpu")).languages == {}
    assert not (tmp_path / "n" / "languages.json").exists()
