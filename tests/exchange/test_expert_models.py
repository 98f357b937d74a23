"""Mixtral and Switch Transformers of transformers: losses of their routers, gradients, capacity, and what is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from configured import model_config
from peers import CPU, V, imported, stirred, texts
from torch import Tensor
from torch.func import functional_call

from regard.errors import RegardError
from regard.exchange.families import FAMILIES, match_family
from regard.exchange.huggingface import read_huggingface
from regard.exchange.model_family import list_rules
from regard.layers.experts import Experts
from regard.models import architectures


def theirs_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def split_experts(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names in files: transformers stacks the experts of a Mixtral when it loads one."""
    found = {}
    for name, x in leaves.items():
        before = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, matrix in enumerate(x):
                w1, w3 = matrix.chunk(2)
                found |= {f"{before}.experts.{e}.w1.weight": w1, f"{before}.experts.{e}.w3.weight": w3}
        elif name.endswith("experts.down_proj"):
            found |= {f"{before}.experts.{e}.w2.weight": matrix for e, matrix in enumerate(x)}
        else:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = x
    return found


def test_gradients_of_mixtral_are_theirs(tmp_path: Path) -> None:
    """In fp64. Their router and norms are computed in fp32: some 10 results, each wrong by a few eps of its size."""
    peer, package, _ = imported("mixtral", tmp_path)
    peer.config._experts_implementation = "eager"  # the default has no fp64
    model, peer = package.model.double(), peer.double()
    leaves = {k: p.detach().clone().requires_grad_() for k, p in peer.named_parameters()}
    rules = list_rules(FAMILIES["mixtral"], package.config)
    weights = {rule.ours: rule.to_ours(split_experts(leaves)) for rule in rules}
    theirs, ours, real = texts(peer)
    said = peer(input_ids=theirs, attention_mask=real.long()).logits[real]
    found = functional_call(model, weights, (ours,))[real]
    wanted = theirs.roll(1, 1)[real]
    losses = F.cross_entropy(said, wanted), F.cross_entropy(found, wanted)
    rounding = 1024 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(losses[1], losses[0], atol=0, rtol=rounding)
    for loss in losses:
        loss.backward()
    for key, p in peer.named_parameters():
        assert (leaves[key].grad - p.grad).norm() < rounding * p.grad.norm() + 1e-12, key


def route(model: Any, *inputs: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Run a model, and return of each mixture of experts the logits of real tokens (M, E), their experts, and its loss."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(part: Any, args: Any, result: Any) -> None:
        x, ctx = args
        logits = (x @ part.router.T)[ctx.real]
        found.append((logits, logits.topk(part.top_k).indices, result[1]))

    hooks = [part.register_forward_hook(keep) for part in model.modules() if isinstance(part, Experts)]
    with torch.no_grad():
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return found


def test_the_balance_loss_of_mixtral_is_theirs_layer_by_layer(tmp_path: Path) -> None:
    peer, package, _ = imported("mixtral", tmp_path)
    theirs, ours, real = texts(peer)
    with torch.no_grad():
        said = peer(input_ids=theirs, attention_mask=real.long(), output_router_logits=True)
    loss = theirs_of("mixtral").load_balancing_loss_func
    found = route(package.model, ours)
    assert len(found) == len(said.router_logits) == 2
    for (_, _, mine), logits in zip(found, said.router_logits, strict=True):
        wanted = loss((logits,), 4, 2, real.long())
        assert mine.item() == pytest.approx(0.001 * wanted.item(), rel=1e-4)
    # of one layer alone, their model's loss is the same
    assert said.aux_loss.item() == pytest.approx(loss(said.router_logits, 4, 2, real.long()).item(), rel=1e-6)


def test_balance_and_z_loss_of_switch_are_theirs(tmp_path: Path) -> None:
    peer, package, _ = imported("switch", tmp_path)
    _, ours, _ = texts(peer)
    module = theirs_of("switch_transformers")
    found = route(package.model, ours, ours[:, :5])
    assert len(found) == 2
    for logits, chosen, mine in found:  # one group of real tokens
        balance = module.load_balancing_loss_func(logits.softmax(-1)[None], chosen[None, :, 0])
        z_loss = module.router_z_loss_func(logits[None])
        assert mine.item() == pytest.approx(0.001 * (balance + z_loss).item(), rel=1e-5)


def test_a_switch_without_limit_is_exported_as_one(tmp_path: Path) -> None:
    _, package, _ = imported("switch", tmp_path)
    family = FAMILIES["switch_transformers"]
    free = family.to_theirs(architectures.resolve(model_config(**switch())), {})
    assert free["expert_capacity"] == 1 << 30
    assert (
        family.to_ours(free | {"vocab_size": V}, family.classes["SwitchTransformersForConditionalGeneration"]).value(
            "switch.capacity"
        )
        == 0
    )
    assert package.config.value("switch.capacity") == 2


def switch(**more: Any) -> dict[str, Any]:
    style = {"norm": "pre", "norm_kind": "rms", "bias": False, "positions": "t5", "scale_embeddings": False}
    limits = {"switch.capacity_factor": 0.0, "switch.eval_capacity_factor": 0.0}
    sizes = {"preset": "transformer-tiny", "source_vocab": V, "target_vocab": V, "norm_eps": 1e-6}
    return {**sizes, **style, **limits, "scale_logits": True, "feedforward": ("dense", "switch"), **more}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"switch.capacity_factor": 1.25}, r"switch\.capacity_factor is 1\.25"),
        ({"feedforward": ("switch", "dense")}, r"the second of every few blocks"),
        ({"scale_logits": False}, r"scale_logits is False where tie is all"),
    ],
)
def test_what_switch_transformers_cannot_have_is_refused(settings: dict[str, Any], message: str) -> None:
    assert match_family(architectures.resolve(model_config(**switch()))).model_type == "switch_transformers"
    with pytest.raises(RegardError, match=message):
        match_family(architectures.resolve(model_config(**switch(**settings))))


@pytest.mark.parametrize("layers", [(1, 4), (2, 1), (5, 4)])
def test_transformers_puts_experts_into_the_blocks_that_have_them_here(layers: tuple[int, int]) -> None:
    config = architectures.resolve(model_config(**switch(n_encoder_layers=layers[0], n_decoder_layers=layers[1])))
    given = {"num_layers": layers[0], **FAMILIES["switch_transformers"].write_settings(config)}
    with torch.device("meta"):
        model = transformers.SwitchTransformersModel(transformers.SwitchTransformersConfig(**given))
    for stack, n in zip((model.encoder, model.decoder), layers, strict=True):
        assert [block.layer[-1].is_sparse for block in stack.block] == [i % 2 == 1 for i in range(n)]


def test_other_experts_have_no_family() -> None:
    for name in ("noisy-experts", "mixtral"):
        config = model_config(preset="transformer-tiny", source_vocab=V, target_vocab=V, feedforward=name)
        with pytest.raises(RegardError, match="no family of models elsewhere"):
            match_family(architectures.resolve(config))


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ((1, 2), "experts in other blocks of the encoder than of the decoder"),
        ((2, 1), "experts in other blocks of the encoder than of the decoder"),
        ((3, 3), "no block with experts"),  # more than there are blocks
    ],
)
def test_experts_in_other_blocks_of_each_side_or_in_none_are_refused(
    sparse: tuple[int, int], message: str, tmp_path: Path
) -> None:
    stirred("switch").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    changed = dict(zip(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), sparse, strict=True))
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(RegardError, match=message):
        read_huggingface(tmp_path, CPU)
