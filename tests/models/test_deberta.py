"""DeBERTa 1 and 3: Hugging Face's random weights in ours give the same logits; and what it shares with its layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_rows import fused, kv_rows, qkv_rows
from torch import Tensor

from regard.config import TrainConfig
from regard.errors import RegardError
from regard.layers.positions.contextual import Disentangled, log_buckets
from regard.look.record import record
from regard.models.architectures import preset
from regard.models.bert import Bert
from regard.text.special_tokens import PAD
from regard.training.optimizer import make_optimizer

V, C, H, D, LAYERS, T = 41, 32, 4, 8, 2, 13
REAL = torch.arange(T) < torch.tensor([[T], [4], [9]])
IDS = torch.randint(5, V, (3, T), generator=torch.Generator().manual_seed(1)).where(REAL, PAD)


def bert(version: int, **settings: Any) -> Bert:
    """Thirteen tokens reach buckets that distances share (3), and distances beyond the table (1)."""
    sizes = {"n_encoder_layers": LAYERS, "d_model": C, "n_heads": H, "d_ff": 48, "source_vocab": V}
    small = {1: {"disentangled.reach": 5}, 3: {"disentangled.buckets": 6, "disentangled.reach": 10}}[version]
    name = {1: "deberta-base", 3: "deberta-v3-base"}[version]
    return Bert(preset(name, **{**sizes, **small, **settings})).eval()


def peer_of(version: int, **settings: Any) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": C, "num_hidden_layers": LAYERS, "num_attention_heads": H, "intermediate_size": 48}
    style: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    style |= {"vocab_size": V, "type_vocab_size": 0, "max_position_embeddings": 64, "layer_norm_eps": 1e-7}
    if version == 3:
        style |= {"position_buckets": 6, "max_relative_positions": 10, "share_att_key": True}
        config = transformers.DebertaV2Config(**sizes, **style, norm_rel_ebd="layer_norm", **settings)
        peer = transformers.DebertaV2ForMaskedLM(config)
    else:
        peer = transformers.DebertaForMaskedLM(
            transformers.DebertaConfig(**sizes, **style, max_relative_positions=5, **settings)
        )
    torch.manual_seed(0)
    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1))
    return peer.eval()


LAYER = {
    "norms.self": "attention.output.LayerNorm",
    "sublayers.self.out": "attention.output.dense",
    "norms.ff": "output.LayerNorm",
    "sublayers.ff.inner": "intermediate.dense",
    "sublayers.ff.outer": "output.dense",
}


def weights_of(peer: torch.nn.Module, version: int, legacy: bool) -> dict[str, Tensor]:
    theirs = {name.removeprefix("deberta."): p for name, p in peer.named_parameters()}
    head = "cls.predictions" if legacy else "lm_predictions.lm_head"
    inner = f"{head}.transform" if legacy else head
    weights = {
        "embedding.weight": theirs["embeddings.word_embeddings.weight"],
        "encoder.schemes.0.distances.table": theirs["encoder.rel_embeddings.weight"],
        "head.bias": theirs[f"{head}.bias"],
    }
    for kind in ("weight", "bias"):
        weights[f"embedding_norm.{kind}"] = theirs[f"embeddings.LayerNorm.{kind}"]
        weights[f"head.inner.{kind}"] = theirs[f"{inner}.dense.{kind}"]
        weights[f"head.norm.{kind}"] = theirs[f"{inner}.LayerNorm.{kind}"]
        if version == 3:
            weights[f"encoder.schemes.0.distances.norm.{kind}"] = theirs[f"encoder.LayerNorm.{kind}"]
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        layer = {k.removeprefix(at): p for k, p in theirs.items() if k.startswith(at)}
        mine = f"encoder.blocks.{i}"
        weights |= {f"{mine}.{a}.{kind}": layer[f"{b}.{kind}"] for a, b in LAYER.items() for kind in ("weight", "bias")}
        inside = {k.removeprefix("attention.self."): p for k, p in layer.items()}
        qkv, positions = projections_of_3(inside) if version == 3 else projections_of_1(inside)
        weights |= {f"{mine}.sublayers.self.qkv.{kind}": p for kind, p in qkv.items()}
        weights |= {f"encoder.schemes.{i}.projection.{kind}": p for kind, p in positions.items()}
    return weights


Weights = dict[str, Tensor]


def projections_of_3(theirs: Weights) -> tuple[Weights, Weights]:
    names = ("query", "key", "value")
    stacked = {kind: torch.cat([theirs[f"{x}_proj.{kind}"] for x in names]) for kind in ("weight", "bias")}
    return {kind: fused(p, qkv_rows(H, H, D)) for kind, p in stacked.items()}, {}


def projections_of_1(theirs: Weights) -> tuple[Weights, Weights]:
    """Queries, keys and values head by head in one matrix, as ours; keys have no bias, neither those of words nor of
    positions."""
    none = torch.zeros(C)
    qkv = {
        "weight": theirs["in_proj.weight"],
        "bias": fused(torch.cat([theirs["q_bias"], none, theirs["v_bias"]]), qkv_rows(H, H, D)),
    }
    positions = {
        "weight": torch.cat([theirs["pos_q_proj.weight"], theirs["pos_proj.weight"]]),
        "bias": torch.cat([theirs["pos_q_proj.bias"], none]),
    }
    return qkv, {kind: fused(p, kv_rows(H, D)) for kind, p in positions.items()}  # head by head too


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("version", [1, 3])
def test_its_logits_are_hugging_faces(version: int, legacy: bool) -> None:
    peer, model = peer_of(version, legacy=legacy), bert(version)
    weights = weights_of(peer, version, legacy)
    own = {name: p for name, p in model.named_parameters() if not name.startswith("pooler.")}
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
        expected = peer(input_ids=IDS * REAL, attention_mask=REAL.long()).logits
        torch.testing.assert_close(model(IDS)[REAL], expected[REAL], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("buckets", "reach"), [(256, 512), (6, 10), (4, 9), (32, 128), (256, 300)])
def test_buckets_are_those_of_the_published_models(buckets: int, reach: int) -> None:
    module = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distance = torch.arange(-reach, reach + 1)
    expected = module.make_log_bucket_position(distance, buckets, reach).long()
    assert log_buckets(distance, buckets, reach).tolist() == expected.tolist()


def test_distances_from_the_reach_on_are_the_last_rows() -> None:
    for version in (1, 3):
        scheme = bert(version).encoder.schemes[0]
        assert isinstance(scheme, Disentangled)
        q, k = torch.tensor([[0, 1000]]), torch.tensor([[0, 10, 1000]])
        rows, n = scheme.distances.row_index((q, k))[0, 0].tolist(), len(scheme.distances.table)
        assert rows == [[n // 2, 0, 0], [n - 1, n - 1, n // 2]]


# ---- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 3])
def test_all_layers_read_one_table(version: int) -> None:
    model = bert(version)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if "table" in name] == ["encoder.schemes.0.distances.table"]
    first, second = model.encoder.schemes
    assert first.distances is second.distances
    assert sum("projection" in name for name in names) == (0 if version == 3 else 2 * LAYERS)


def test_the_third_version_projects_with_the_queries_and_keys_of_its_layer() -> None:
    model = bert(3)
    for block, scheme in zip(model.encoder.blocks, model.encoder.schemes, strict=True):
        qkv = block.get_submodule("sublayers.self.qkv")
        assert isinstance(scheme, Disentangled)
        expected = torch.nn.functional.linear(scheme.distances(), qkv.weight, qkv.bias)  # type: ignore[arg-type]
        expected = expected[:, qkv_rows(H, H, D)]
        for i, found in enumerate(scheme.project_distances()):  # (1, H, rows, D)
            torch.testing.assert_close(found[0].transpose(0, 1).flatten(1), expected[:, i * C : (i + 1) * C])


def test_lent_matrices_stay_matrices_of_the_layer() -> None:
    """They start as all projections do, they decay, and those of a copied model are lent to the copy."""
    torch.manual_seed(0)
    model = bert(3)
    qkv = model.encoder.blocks[0].get_submodule("sublayers.self.qkv").weight
    assert isinstance(qkv, Tensor)
    assert qkv.abs().max().item() == pytest.approx((6 / (4 * C)) ** 0.5, rel=0.02)  # Xavier: sqrt(6 / (C + 3C))
    decayed = make_optimizer(model, TrainConfig(weight_decay=0.1)).param_groups[0]["params"]
    assert any(p is qkv for p in decayed)
    twin = copy.deepcopy(model)
    before = twin(IDS)
    torch.nn.init.zeros_(qkv)
    assert torch.equal(twin(IDS), before)
    assert not torch.equal(model(IDS), before)


@pytest.mark.parametrize("version", [1, 3])
def test_every_parameter_learns(version: int) -> None:
    model = bert(version)
    model(IDS)[REAL].square().sum().backward()
    still = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert still == {"pooler.inner.weight", "pooler.inner.bias"}


@pytest.mark.parametrize("version", [1, 3])
def test_records_outlive_what_the_layer_lent(version: int) -> None:
    model = bert(version)
    with record(model, "encoder.1.self") as tape:
        model(IDS)
    record_of = tape["encoder.1.self"][0]
    before, some = record_of.weights(), record_of.weights(rows=[2, 5])
    torch.testing.assert_close(some, before[:, :, [2, 5]])
    for p in model.parameters():
        torch.nn.init.normal_(p)
    assert torch.equal(record_of.weights(), before)


def test_shared_keys() -> None:
    """Grouped queries are as many heads whose keys and values are copies."""
    few, many = bert(3, n_kv_heads=2), bert(3)
    weights = dict(few.named_parameters())
    with torch.no_grad():
        for name, p in many.named_parameters():
            if ".qkv." in name:
                q, k, v = weights[name][qkv_rows(H, 2, D)].split([C, C // 2, C // 2])
                k, v = (x.unflatten(0, (2, D)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))
                p.copy_(fused(torch.cat([q, k, v]), qkv_rows(H, H, D)))
            else:
                p.copy_(weights[name])
    torch.testing.assert_close(few(IDS)[REAL], many(IDS)[REAL], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disentangled.buckets": 2}, r"disentangled\.buckets 2 must be 0, or at least 4"),
        ({"disentangled.buckets": 20, "disentangled.reach": 11}, r"half of it below model\.disentangled\.reach 11 - 1"),
        (
            {"disentangled.buckets": 0, "disentangled.reach": 0},
            r"disentangled\.reach' must be a number from 1 up, not 0",
        ),
    ],
)
def test_impossible_tables_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        Bert(preset("deberta-v3-base", **settings))


def test_the_smallest_tables_that_are_possible() -> None:
    for buckets, reach in ((4, 4), (20, 12), (0, 1)):
        assert bert(1, **{"disentangled.buckets": buckets, "disentangled.reach": reach})(IDS)[REAL].isfinite().all()
