"""Mamba and RWKV of transformers: gradients, folders that are rescaled in inference, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from configured import model_config, replaced
from peers import CPU, V, imported, stirred, texts
from torch.func import functional_call

from regard.errors import RegardError
from regard.exchange.families import FAMILIES, match_family
from regard.exchange.huggingface import read_huggingface
from regard.exchange.model_family import list_rules
from regard.models import architectures


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    """In fp64. Theirs computes norms and states in fp32: some dozen results, each wrong by a few eps of its size."""
    peer, package, _ = imported(name, tmp_path)
    model, peer = package.model.double(), peer.double().train()
    leaves = {k: p.detach().clone().requires_grad_() for k, p in peer.named_parameters()}
    weights = {rule.ours: rule.to_ours(leaves) for rule in list_rules(FAMILIES[name], package.config)}
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
        assert (leaves[key].grad - p.grad).norm() < rounding * p.grad.norm() + 1e-12, key


def test_a_folder_that_is_rescaled_in_inference_is_the_same_model(tmp_path: Path) -> None:
    """transformers then halves the stream and two matrices of each block, which is neutral but for the eps of norms."""
    peer = stirred("rwkv")
    peer.config.rescale_every = 1
    peer.save_pretrained(tmp_path)
    package, _ = read_huggingface(tmp_path, CPU)
    theirs, ours, real = texts(peer)
    with torch.no_grad():
        said = peer(input_ids=theirs).logits[real]
        torch.testing.assert_close(package.model(ours)[real], said, atol=2e-3, rtol=0)
    assert FAMILIES["rwkv"].to_theirs(package.config, {})["rescale_every"] == 0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mamba", {"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
        ("mamba", {"intermediate_size": 33}, r"intermediate_size 33, which must be expand 2 times hidden_size"),
        ("mamba", {"time_step_rank": "some"}, r"time_step_rank 'some', which must be"),
        ("rwkv", {"attention_hidden_size": 16}, r"attention_hidden_size 16: Regard has hidden_size"),
        ("rwkv", {"layer_norm_epsilon": 1e-3}, r"layer_norm_epsilon 0\.001: .* only 1e-05 can be read"),
    ],
)
def test_what_regard_has_not_is_refused(name: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    stirred(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RegardError, match=said):
        read_huggingface(tmp_path, CPU)


def test_a_hybrid_has_no_family() -> None:
    style = {"norm_kind": "rms", "bias": False, "positions": "none", "scale_embeddings": False, "target_vocab": V}
    mamba = model_config(preset="mamba-tiny", mixer=("mamba",), **style)
    assert match_family(architectures.resolve(mamba)).model_type == "mamba"
    hybrid = model_config(preset="mamba-tiny", mixer=("mamba", "attention"), **style)
    with pytest.raises(RegardError, match="no family of models elsewhere"):
        match_family(architectures.resolve(hybrid))


def test_an_rwkv_with_other_norms_has_no_family() -> None:
    own = architectures.preset("rwkv-tiny", target_vocab=V)
    assert match_family(architectures.resolve(own)).model_type == "rwkv"
    with pytest.raises(RegardError, match="the nearest is RWKV, but bias is False, not True"):
        match_family(architectures.resolve(replaced(own, bias=False)))
    with pytest.raises(RegardError, match=r"the nearest is RWKV, but norm_eps is 0\.001, not 1e-05"):
        match_family(architectures.resolve(replaced(own, norm_eps=1e-3)))
