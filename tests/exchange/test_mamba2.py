"""Mamba-2 of transformers: gradients, limits of step sizes, and which models of ours are one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from configured import replaced
from peers import CPU, V, imported, stirred, texts
from torch.func import functional_call

from regard.errors import RegardError
from regard.exchange.families import FAMILIES, match_family
from regard.exchange.huggingface import read_huggingface
from regard.exchange.model_family import list_rules
from regard.models.architectures import preset, resolve


@pytest.mark.parametrize("name", ["mamba2", "mamba2-biased"])
def test_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    """In fp64. Their scan and norms are computed in fp32: some 10 results, each wrong by a few eps of its size."""
    peer, package, _ = imported(name, tmp_path)
    model, peer = package.model.double(), peer.double()
    leaves = {k: p.detach().clone().requires_grad_() for k, p in peer.named_parameters()}
    weights = {rule.ours: rule.to_ours(leaves) for rule in list_rules(FAMILIES["mamba2"], package.config)}
    theirs, ours, real = texts(peer)
    said = peer(input_ids=theirs, attention_mask=real.long()).logits[real]
    found = functional_call(model, weights, (ours,))[real]
    wanted = theirs.roll(1, 1)[real]
    losses = F.cross_entropy(said.double(), wanted), F.cross_entropy(found, wanted)
    rounding = 4096 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(losses[1], losses[0], atol=0, rtol=rounding)
    for loss in losses:
        loss.backward()
    for key, p in peer.named_parameters():
        assert (leaves[key].grad - p.grad).norm() < rounding * p.grad.norm() + 1e-9, key


def test_limits_of_step_sizes_are_theirs(tmp_path: Path) -> None:
    """Of whole rows; one more token is not limited in transformers."""
    stirred("mamba2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time_step_limit": [0.05, 0.4]}))
    package, _ = read_huggingface(tmp_path, CPU)
    assert (package.config.value("mamba2.dt_least"), package.config.value("mamba2.dt_most")) == (0.05, 0.4)
    peer: Any = __import__("transformers").Mamba2ForCausalLM.from_pretrained(tmp_path).eval()
    theirs, ours, real = texts(peer)
    with torch.no_grad():
        found, said = package.model(ours)[real], peer(input_ids=theirs, attention_mask=real.long()).logits[real]
    torch.testing.assert_close(found, said, atol=1e-4, rtol=1e-4)


def test_limits_that_leave_no_step_size_are_refused(tmp_path: Path) -> None:
    """In Regard an upper limit of 0 means that there is none."""
    stirred("mamba2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time_step_limit": [0.0, 0.0]}))
    with pytest.raises(RegardError, match=r"time_step_limit \[0\.0, 0\.0\]"):
        read_huggingface(tmp_path, CPU)


def test_a_preset_is_a_model_of_the_family_and_a_hybrid_is_not() -> None:
    config = resolve(preset("mamba2-tiny", target_vocab=V))
    assert match_family(config).model_type == "mamba2"
    hybrid = replaced(config, mixer=("mamba2", "attention"), n_heads=4)
    with pytest.raises(RegardError, match="no family of models elsewhere"):
        match_family(hybrid)


def test_heads_that_do_not_fill_the_width_are_refused(tmp_path: Path) -> None:
    stirred("mamba2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_heads": 7}))
    with pytest.raises(RegardError, match=r"num_heads 7 \* head_dim 8, which must be expand 2 \* hidden_size 32"):
        read_huggingface(tmp_path, CPU)
