"""Model folders: round trips, and damaged or foreign folders that are not loaded."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokens import SETTINGS

from regard import model_folder
from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.errors import RegardError
from regard.files import write_manifest
from regard.model_folder import ModelPackage
from regard.models.transformer import Transformer
from regard.text.tokenizer import Tokenizer, Tokenizers

CPU = torch.device("cpu")
SIZES = ModelConfig(n_encoder_layers=1, n_decoder_layers=2, d_model=8, n_heads=2, d_ff=16, max_len=32, **SETTINGS)


def tokenizer(letters: str) -> Tokenizer:
    return Tokenizer.train([letters], TokenizerConfig(kind="char", vocab_size=100))


def package(joint: bool = True, seed: int = 0, **changes: Any) -> ModelPackage:
    source = tokenizer("abcdefgh")
    target = source if joint else tokenizer("abcdefghijklm")
    torch.manual_seed(seed)
    sizes = replace(SIZES, source_vocab=len(source), target_vocab=len(target), tie="all" if joint else "none")
    model = Transformer(replace(sizes, **changes)).eval()
    return ModelPackage(
        model, Tokenizers(source, target), "translation", DecodeConfig(beam=3, length_penalty=0.7), "en", "de"
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model_folder.save(tmp_path / "model", package(), "# card\n")
    return tmp_path / "model"


def change(path: Path, change_config: Any) -> None:
    """Change config.json and write matching checksums."""
    config = json.loads((path / "config.json").read_text())
    change_config(config)
    (path / "config.json").write_text(json.dumps(config))
    rewrite_manifest(path)


def rewrite_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    write_manifest(path)


@pytest.mark.parametrize("joint", [True, False])
def test_round_trip(tmp_path: Path, joint: bool) -> None:
    before = package(joint, norm="post", activation="gelu")
    model_folder.save(tmp_path / "model", before, "# card\n")
    after = model_folder.load(tmp_path / "model", CPU)
    assert (after.source, after.target, after.decode) == ("en", "de", before.decode)
    assert after.model.config == before.model.config
    assert (after.tokenizers.source is after.tokenizers.target) == joint
    assert after.tokenizers.target.fingerprint() == before.tokenizers.target.fingerprint()
    assert not after.model.training
    saved, loaded = before.model.state_dict(), after.model.state_dict()
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == loaded[name].dtype, name
        assert torch.equal(tensor, loaded[name]), name
    assert (tmp_path / "model" / "README.md").read_text() == "# card\n"


@pytest.mark.parametrize("joint", [True, False])
def test_a_loaded_model_computes_what_the_saved_one_did(tmp_path: Path, joint: bool) -> None:
    """The outputs agree up to rounding: matrices have another memory layout, so products sum in another order.

    A logit passes through about 20 products, of at most 16 terms each; each term adds an error of eps/2 at most, relative
    to numbers of the size of the logits.
    """
    before = package(joint, norm="post", activation="gelu")
    model_folder.save(tmp_path / "model", before, "# card\n")
    after = model_folder.load(tmp_path / "model", CPU)
    source, target = torch.randint(5, 13, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = copy.deepcopy(before.model).double()(source, target)
        bound = 20 * 16 * torch.finfo(torch.float32).eps / 2 * float(exact.abs().max())
        for model in (before.model, after.model):
            torch.testing.assert_close(model(source, target).double(), exact, atol=bound, rtol=0)


def test_a_run_folder_leads_to_its_model(saved: Path) -> None:
    assert model_folder.find(saved.parent) == model_folder.find(saved) == saved


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no model at .*nowhere"):
        model_folder.find(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RegardError, match=r"no finished model yet: continue with `regard resume"):
        model_folder.find(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "README.md", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_damage_is_refused(saved: Path, name: str, how: str) -> None:
    file = saved / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if how == "flipped" else content[:-1])
    if how == "missing":
        file.unlink()
    with pytest.raises(RegardError) as error:
        model_folder.load(saved, CPU)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_a_tokenizer_of_another_vocabulary(saved: Path) -> None:
    tokenizer("abcde").save(saved / "tokenizer.json")
    rewrite_manifest(saved)
    pieces = len(tokenizer("abcde"))
    with pytest.raises(RegardError, match=rf"source tokenizer .* has {pieces} pieces but the model was trained with"):
        model_folder.load(saved, CPU)


@pytest.mark.parametrize("missing", ["tokenizer.source.json", "tokenizer.target.json"])
def test_one_tokenizer_of_two(tmp_path: Path, missing: str) -> None:
    model_folder.save(tmp_path / "model", package(joint=False), "")
    (tmp_path / "model" / missing).unlink()
    rewrite_manifest(tmp_path / "model")
    with pytest.raises(RegardError, match="tokenizer"):
        model_folder.load(tmp_path / "model", CPU)


def test_weights_of_another_model_are_listed(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = "source_embedding.weight"
    rows, width = tensors[name].shape
    tensors[name] = torch.zeros(rows + 1, width)
    tensors["surplus"] = torch.zeros(1)
    save_file(tensors, saved / "model.safetensors")
    rewrite_manifest(saved)
    with pytest.raises(RegardError) as error:
        model_folder.load(saved, CPU)
    assert f"{name} is ({rows + 1}, {width}), the model has ({rows}, {width})" in str(error.value)
    assert "surplus is not in the model" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", (2**60).to_bytes(8, "little") + b"{}"])
def test_weights_that_are_no_safetensors(saved: Path, content: bytes) -> None:
    (saved / "model.safetensors").write_bytes(content)
    rewrite_manifest(saved)
    with pytest.raises(RegardError, match="cannot read the weights"):
        model_folder.load(saved, CPU)


def test_weights_that_the_manifest_forgot(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    rewrite_manifest(saved)
    with pytest.raises(RegardError, match="cannot read the weights"):
        model_folder.load(saved, CPU)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["model"].update(d_modle=8), "d_modle.*did you mean 'model.d_model'"),
        (lambda c: c["model"].update(d_model="wide"), "model.d_model"),
        (lambda c: c["model"].update(n_heads=3), "n_heads"),
        (lambda c: c["decode"].update(beams=2), "decode.beams.*did you mean 'decode.beam'"),
        (lambda c: c.update(format=1), "format 1 .*reads format 3"),
        (lambda c: c.update(task="singing"), "task 'singing'"),
        (
            lambda c: c["model"].update(architecture="mamba"),
            "architecture .mamba.: there are transformer, gpt",
        ),
        (lambda c: c.pop("decode"), "KeyError: 'decode'"),
        (lambda c: c.update(model=3), "not a model's configuration"),
    ],
)
def test_configurations_that_are_refused(saved: Path, edit: Any, words: str) -> None:
    change(saved, edit)
    with pytest.raises(RegardError, match=words) as error:
        model_folder.load(saved, CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(tmp_path: Path, name: str, config: bool) -> None:
    """Refuse a folder with pickled weights, whose code a loader of pickles would run."""
    torch.save({"w": torch.zeros(1)}, tmp_path / name)
    if config:
        (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    with pytest.raises(RegardError, match=rf"pickled \({name}\).*safetensors alone"):
        model_folder.load(tmp_path, CPU)
