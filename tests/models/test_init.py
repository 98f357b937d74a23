"""Fresh weights have the sizes that models/init.py states."""

import math
from typing import Any

import pytest
import torch
from configured import SCHEMES, model_config, replaced
from torch import nn

from regard.layers.attention import CrossAttention, SelfAttention
from regard.layers.embedding import Embedding
from regard.layers.positions import Positions
from regard.models.architectures import make_model, preset
from regard.models.gpt import GPT
from regard.models.init import initialise
from regard.models.transformer import Transformer

C, H, V = 64, 4, 500
CONFIG = model_config(preset="transformer-tiny", d_model=C, n_heads=H, d_ff=128, source_vocab=V, target_vocab=V)


def fresh(tie: str = "none", seed: int = 0, **settings: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replaced(CONFIG, tie=tie, **settings))


def test_every_projection_is_xavier_uniform_with_a_zero_bias() -> None:
    for name, module in fresh().named_modules():
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6 / (module.in_features + module.out_features))
            assert 0.98 * bound < module.weight.abs().max().item() <= bound, name
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
            assert abs(module.weight.mean().item()) < 5 * bound / math.sqrt(3 * module.weight.numel()), name
            assert (module.bias == 0).all(), name


def test_joint_queries_keys_and_values_start_smaller_by_the_root_of_two() -> None:
    qkv = next(m for m in fresh().modules() if isinstance(m, nn.Linear) and m.out_features == 3 * C)
    own = math.sqrt(6 / (C + C)) / math.sqrt(3)  # of a C x C matrix by itself
    assert qkv.weight.std().item() == pytest.approx(own / math.sqrt(2), rel=0.03)


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
def test_embeddings_and_head_are_normal_of_one_over_root_c(tie: str) -> None:
    model = fresh(tie)
    for weight in (model.source_embedding.weight, model.target_embedding.weight, model.head.weight):
        assert weight.std().item() == pytest.approx(1 / math.sqrt(C), rel=0.02)
        assert weight.abs().max().item() > 3 / math.sqrt(C)  # a normal has tails
    assert model.source_embedding(torch.arange(V)).std().item() == pytest.approx(1, rel=0.02)


def test_norms_start_as_plain_standardisation() -> None:
    norms = [m for m in fresh().modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 4 * 2 + 4 * 3 + 2
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)


def test_a_fresh_model_says_little_and_knows_nothing() -> None:
    torch.manual_seed(1)
    logits = fresh("all").eval()(torch.randint(5, V, (4, 9)), torch.randint(5, V, (4, 7)))
    assert logits.std().item() == pytest.approx(1, rel=0.25)  # unit size, so the loss starts near ln V


def test_the_seed_decides_everything() -> None:
    a, b, c = fresh(seed=3).state_dict(), fresh(seed=3).state_dict(), fresh(seed=4).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


def test_nothing_of_torchs_own_start_is_left() -> None:
    """Every parameter is overwritten: those set to a mark beforehand have lost it."""
    model = fresh()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    initialise(model)
    assert all((p != 7.0).all() for p in model.parameters())


def test_linear_layers_without_a_bias_are_fine() -> None:
    module = nn.Sequential(Embedding(5, 4), nn.Linear(4, 4, bias=False))
    initialise(module)
    assert module[1].weight.abs().max() <= (6 / 8) ** 0.5  # Xavier's bound for a 4 x 4 matrix


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "cross"), [("t5", "none"), ("sinusoidal", "t5"), ("t5", "t5")])
def test_t5_queries_start_smaller_by_the_root_of_the_head_width(positions: str, cross: str) -> None:
    """T5 does not divide its scores by sqrt(D), here 4; keys and values start as ever."""
    plain = {name: m for name, m in fresh().named_modules() if isinstance(m, (SelfAttention, CrossAttention))}
    model = fresh(positions=positions, cross_positions=cross)
    for name, layer in plain.items():
        ours = model.get_submodule(name)
        if isinstance(layer, SelfAttention):
            assert isinstance(ours, SelfAttention)
            shrink = 4.0 if positions == "t5" else 1.0
            torch.testing.assert_close(ours.qkv.weight[:C] * shrink, layer.qkv.weight[:C])
            assert torch.equal(ours.qkv.weight[C:], layer.qkv.weight[C:])
        else:
            assert isinstance(ours, CrossAttention)
            torch.testing.assert_close(ours.q.weight * (4.0 if cross == "t5" else 1.0), layer.q.weight)
            assert torch.equal(ours.kv.weight, layer.kv.weight)


def test_only_the_queries_shrink_where_heads_share_keys() -> None:
    config = replaced(CONFIG, preset="gpt-tiny", n_kv_heads=1, d_head=9)
    weights = []
    for positions in ("none", "t5"):
        torch.manual_seed(0)
        layer = next(m for m in GPT(replaced(config, positions=positions)).modules() if isinstance(m, SelfAttention))
        weights.append(layer.qkv.weight)
    plain, ours = weights
    assert ours.shape == (9 * (H + 2), C)
    torch.testing.assert_close(ours[: 9 * H] * 3, plain[: 9 * H])
    assert torch.equal(ours[9 * H :], plain[9 * H :])


@pytest.mark.parametrize("positions", SCHEMES)
def test_schemes_keep_their_own_initial_values(positions: str) -> None:
    model = GPT(replaced(CONFIG, preset="gpt-tiny", positions=positions))
    schemes = [m for m in model.modules() if isinstance(m, Positions)]
    theirs = {p for scheme in schemes for p in scheme.parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    initialise(model)
    for name, p in model.named_parameters():
        assert (p == 7.0).all() if p in theirs else (p != 7.0).all(), name


def test_what_is_added_before_a_norm_weighs_the_same() -> None:
    """Otherwise the largest of token, position and type is all that the norm lets through, and nothing is learned."""
    torch.manual_seed(0)
    model = make_model(preset("bert-base", n_encoder_layers=1, source_vocab=V))
    positions = model.encoder.schemes[0].encoding
    for table in (model.embedding.weight, model.types.weight, positions):
        assert table.std().item() == pytest.approx(0.02, rel=0.05)
