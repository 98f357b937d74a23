"""Weights in another order of memory: the same model, and the same file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from regard import folder
from regard.folder import Bundle
from regard.layers.packed import column_major
from regard.models.architectures import make_model, preset

CPU = torch.device("cpu")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"n_encoder_layers": 2, "n_decoder_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "dropout": 0.0}
    return make_model(preset("transformer-tiny", **sizes, source_vocab=50, target_vocab=50)).eval()


def test_it_says_the_same_and_learns_the_same() -> None:
    plain, other = model(), model()
    column_major(other)
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
    folder.save(tmp_path / "a", Bundle(model(), None, "translation"), "")
    loaded = folder.load(tmp_path / "a", CPU)
    assert all(m.weight.t().is_contiguous() for m in loaded.model.modules() if isinstance(m, torch.nn.Linear))
    folder.save(tmp_path / "b", loaded, "")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
