"""Fresh weights have the sizes that models/initialization.py states."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configured import SCHEMES, model_config, replaced
from fused_rows import qkv_rows
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.cells import GRU
from regard.layers.embedding import Embedding
from regard.layers.mixers.attention import CrossAttention, SelfAttention
from regard.models.architectures import make_model, preset
from regard.models.gpt import GPT
from regard.models.initialization import initialize, materialize
from regard.models.transformer import Transformer

C, H, V = 64, 4, 500
CONFIG = model_config(preset="transformer-tiny", d_model=C, n_heads=H, d_ff=128, source_vocab=V, target_vocab=V)


def fresh(tie: str = "none", seed: int = 0, **settings: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replaced(CONFIG, tie=tie, **settings))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
    initialize(model)
    assert all((p != 7.0).all() for p in model.parameters())


def test_linear_layers_without_a_bias_are_fine() -> None:
    module = nn.Sequential(Embedding(5, 4), nn.Linear(4, 4, bias=False))
    initialize(module)
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
            found, plainly = (x.qkv.weight[qkv_rows(H, H, C // H)] for x in (ours, layer))
            torch.testing.assert_close(found[:C] * shrink, plainly[:C])
            assert torch.equal(found[C:], plainly[C:])
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
def test_schemes_draw_their_own_initial_values(positions: str) -> None:
    try:
        model = GPT(replaced(CONFIG, preset="gpt-tiny", positions=positions))
    except RegardError:
        pytest.skip("not for a decoder")
    before = {name: x.clone() for name, x in tensors(model).items()}
    with torch.no_grad():
        for x in tensors(model).values():
            x.fill_(7)
    initialize(model, model.seed)  # type: ignore[arg-type]
    for name, x in tensors(model).items():
        assert torch.equal(x, before[name]), name


def test_what_is_added_before_a_norm_weighs_the_same() -> None:
    """Otherwise the largest of token, position and type is all that the norm lets through, and nothing is learned."""
    torch.manual_seed(0)
    model = make_model(preset("bert-base", n_encoder_layers=1, source_vocab=V))
    positions = model.encoder.schemes[0].encoding
    for table in (model.embedding.weight, model.types.weight, positions):
        assert table.std().item() == pytest.approx(0.02, rel=0.05)


# ---- seeds by path -----------------------------------------------------------------------------------------------------


def test_a_block_keeps_its_weights_whatever_stands_before_it() -> None:
    """Two blocks or five, with a wider vocabulary and other positions: the second block starts the same."""
    few, many = (
        fresh(n_encoder_layers=2),
        fresh(n_encoder_layers=5, positions="learned", source_vocab=V + 7, target_vocab=9),
    )
    ours = tensors(many.encoder.blocks[1])
    assert ours
    for name, x in tensors(few.encoder.blocks[1]).items():
        assert torch.equal(x, ours[name]), name
    assert not torch.equal(ours[name], tensors(many.encoder.blocks[2])[name]) or x.std() == 0


class Hybrid(nn.Module):
    """Blocks of the kinds that are named."""

    def __init__(self, *kinds: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(6, 6) for kind in kinds)


def gru(d_in: int, d_hidden: int) -> GRU:
    return GRU(GRU.Settings(), d_in, d_hidden)


def test_a_block_of_a_hybrid_keeps_its_weights_if_another_changes_its_kind() -> None:
    pair = []
    for kinds in ((nn.Linear, nn.Linear, nn.Linear), (gru, nn.Linear, nn.Linear)):
        model = Hybrid(*kinds)
        initialize(model, 5)
        pair.append(model)
    plain, mixed = pair
    for i in (1, 2):
        assert torch.equal(plain.blocks[i].weight, mixed.blocks[i].weight)  # type: ignore[arg-type]
    assert not torch.equal(plain.blocks[1].weight, plain.blocks[2].weight)  # type: ignore[arg-type]


def test_weights_do_not_depend_on_the_order_of_construction() -> None:
    torch.manual_seed(0)
    one, two = (
        nn.ModuleDict({"a": nn.Linear(3, 3), "b": gru(3, 4)}),
        nn.ModuleDict({"b": gru(3, 4), "a": nn.Linear(3, 3)}),
    )
    for model in (one, two):
        initialize(model, 1)
    for name, x in tensors(one).items():
        assert torch.equal(x, tensors(two)[name]), name


SMALL: dict[str, Any] = {"d_model": 32, "source_vocab": 40, "target_vocab": 40, "n_classes": 3}
HEADS: dict[str, Any] = {"n_heads": 2, "d_ff": 48}


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("transformer-tiny", HEADS),
        ("transformer-tiny", {**HEADS, "positions": "t5", "cross_positions": "kerple-log", "tie": "none"}),
        ("gpt-tiny", {**HEADS, "positions": "yarn", "yarn.trained_len": 64, "yarn.factor": 2.0}),
        ("gpt-tiny", {**HEADS, "positions": "fire"}),
        ("gpt-tiny", {**HEADS, "positions": "alibi", "prediction_head": "sequence"}),
        ("bert-tiny", {**HEADS, "encoder_positions": "disentangled", "prediction_head": "token"}),
        ("vit-tiny", HEADS),
        ("lstm-small", {}),
        ("rnnsearch-small", {"recurrent.d_hidden": 16, "recurrent.norm": True}),
        ("conv-lm", {"n_heads": 1}),
    ],
)
def test_a_model_of_the_meta_device_becomes_the_one_that_is_built_directly(name: str, style: dict[str, Any]) -> None:
    config = preset(name, **SMALL, **style)
    torch.manual_seed(3)
    direct = make_model(config)
    torch.manual_seed(3)
    with torch.device("meta"):
        later = make_model(config)
    materialize(later, "cpu")
    assert tensors(direct).keys() == tensors(later).keys()
    for path, x in tensors(direct).items():
        assert torch.equal(x, tensors(later)[path]), path


def test_the_global_generator_moves_on_by_itself() -> None:
    """Two modules in a row differ, and initialization with a given seed leaves torch's generator as it was."""
    torch.manual_seed(0)
    a, b = (nn.Linear(3, 3) for _ in range(2))
    initialize(a)
    initialize(b)
    assert not torch.equal(a.weight, b.weight)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initialize(a, 5)
    assert torch.equal(torch.rand(3), expected)
