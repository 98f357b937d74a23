"""The costs of models/analysis/cost.py against torch's own counter on real passes and the bytes of real tensors."""

import pkgutil
from typing import Any

import pytest
import torch
from configured import model_config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.config import ModelConfig, TrainConfig
from regard.kernels.cross_entropy import CHUNK_BYTES
from regard.kernels.weight_layout import gate_block
from regard.layers.part import settings_of
from regard.models import architectures
from regard.models.analysis.cost import (
    Cost,
    activation_bytes,
    decoding_bytes,
    forward_flops,
    report_costs,
    side_lengths,
    training_flops,
    training_memory,
)
from regard.models.architectures import make_model, preset
from regard.models.transformer import Transformer
from regard.training.objective import ClassificationObjective, Objective
from regard.training.optimizer import make_optimizer


def model(n_encoder: int, n_decoder: int, vocab: int, n_kv_heads: int = 0, d_head: int = 0) -> Transformer:
    return Transformer(
        model_config(
            preset="transformer-tiny",
            n_encoder_layers=n_encoder,
            n_decoder_layers=n_decoder,
            d_model=16,
            n_heads=4,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            d_ff=24,
            source_vocab=40,
            target_vocab=vocab,
            tie="decoder",
        )
    )


def counted(net: nn.Module, batch: int, s: int, t: int, *, backward: bool) -> int:
    return counted_on(net, torch.randint(5, 30, (batch, s)), torch.randint(5, 30, (batch, t)), backward=backward)


def counted_on(net: nn.Module, *inputs: Tensor, backward: bool) -> int:
    # Attention as plain products: torch's counter does not count the fused kernel for CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = net(*inputs)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


SHAPES = [(1, 1, 1), (1, 9, 7), (3, 9, 7), (2, 5, 12), (2, 8, 8)]


@pytest.mark.parametrize("layers", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_forward_pass_costs_what_torch_counts(layers: tuple[int, int], shape: tuple[int, int, int]) -> None:
    net = model(*layers, vocab=30)
    assert forward_flops(net.config, *shape) == counted(net, *shape, backward=False)


@pytest.mark.parametrize("heads", [(1, 0), (2, 0), (4, 6), (2, 3), (1, 8)])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_shared_keys_and_heads_of_any_width_cost_what_torch_counts(
    heads: tuple[int, int], shape: tuple[int, int, int]
) -> None:
    net = model(2, 1, 30, *heads)
    assert forward_flops(net.config, *shape) == counted(net, *shape, backward=False)
    assert training_flops(net.config, *shape) == counted(net, *shape, backward=True)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_training_costs_three_forwards(shape: tuple[int, int, int]) -> None:
    net = model(2, 2, vocab=33)
    assert training_flops(net.config, *shape) == counted(net, *shape, backward=True)


def test_the_papers_base_model_by_hand() -> None:
    # One sentence pair of 1 + 1 tokens: 2 FLOPs for each weight of a matrix that a token meets, and attention over one key.
    config = Transformer.resolve(model_config(preset="transformer-base", source_vocab=37_000, target_vocab=37_000))
    encoder = 2 * (4 * 512 * 512 + 2 * 512 * 2048) + 4 * 512
    decoder = 2 * (8 * 512 * 512 + 2 * 512 * 2048) + 8 * 512
    assert forward_flops(config, 1, 1, 1) == 6 * encoder + 6 * decoder + 2 * 512 * 37_000


def test_multi_query_attention_by_hand() -> None:
    # Width 8, four heads of 3: queries 12 wide; one head of keys: 3 wide. One token on each side, one block each.
    config = Transformer.resolve(
        model_config(
            preset="transformer-tiny",
            n_encoder_layers=1,
            n_decoder_layers=1,
            d_model=8,
            n_heads=4,
            n_kv_heads=1,
            d_head=3,
            d_ff=10,
            source_vocab=7,
            target_vocab=7,
        )
    )
    attention = 2 * (8 * 12 + 2 * 8 * 3 + 12 * 8) + 4 * 12  # 528: q, k and v, out; two products over one key
    feed_forward = 2 * 2 * 8 * 10  # 320
    assert forward_flops(config, 1, 1, 1) == 3 * attention + 2 * feed_forward + 2 * 8 * 7 == 2336


# ---- every architecture ------------------------------------------------------------------------------------------------

B, L, PATCH = (
    3,
    17,
    4,
)  # the default of patches; an image of 16 patches and the token of its class is as long as the texts


def small(architecture: str, **settings: Any) -> nn.Module:
    sizes = {"d_model": 32, "n_heads": 4, "d_ff": 40, "n_encoder_layers": 2, "n_decoder_layers": 3, "dropout": 0.0}
    data = {"source_vocab": 50, "target_vocab": 50, "n_classes": 6, "max_len": 64}
    torch.manual_seed(0)
    return make_model(preset(f"{architecture}-tiny", **{**sizes, **data, **settings}))


def inputs_of(architecture: str) -> tuple[Tensor, ...]:
    ids = torch.randint(5, 50, (2, B, L))
    images = torch.randn(B, 1, 4 * PATCH, 4 * PATCH)
    return {"transformer": (ids[0], ids[1]), "gpt": (ids[0],), "bert": (ids[0],), "vit": (images,)}[architecture]


STYLES: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 2, "d_head": 12, "positions": "rope"},
    {"feedforward": "gated", "activation": "silu", "bias": False, "norm_kind": "rms", "tie": "decoder"},
    {"norm": "post", "embedding_norm": True, "positions": "learned", "tie": "none"},
    {"parallel": True, "n_kv_heads": 1, "positions": "alibi"},
]
NAMES = ["transformer", "gpt", "bert", "vit"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("architecture", NAMES)
def test_every_architecture_costs_what_torch_counts(architecture: str, style: dict[str, Any]) -> None:
    net, inputs = small(architecture, **style), inputs_of(architecture)
    at = side_lengths(net.config, L)
    assert forward_flops(net.config, B, *at) == counted_on(net, *inputs, backward=False)
    counted_training = counted_on(net, *inputs, backward=True)
    if architecture == "vit":  # by convention three forwards; torch makes no gradient for the image itself
        counted_training += B * 2 * (L - 1) * PATCH**2 * 32
    assert training_flops(net.config, B, *at) == counted_training


@pytest.mark.parametrize("head", ["sequence", "token"])
@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_a_prediction_head_takes_the_place_of_the_logits(architecture: str, head: str) -> None:
    net = small(architecture, prediction_head=head)
    ids = torch.randint(5, 50, (B, L))
    expected = counted_on(net, ids, torch.zeros_like(ids), backward=False)
    assert forward_flops(net.config, B, *side_lengths(net.config, L)) == expected


@pytest.mark.parametrize(
    "name", ["transformer-tiny", "gpt-tiny", "bert-tiny", "lstm-small", "rnnsearch-small", "conv-lm"]
)
def test_a_polynomial_through_short_rows_tells_the_flops_of_long_ones(name: str) -> None:
    cost = Cost(preset_of(name, source_vocab=50, target_vocab=50))
    for at in ((37, 52), (2, 90)):
        s, t = (n * used for n, used in zip(at, side_lengths(cost.config, 1), strict=True))
        assert cost.fitted_flops(s, t) == cost.forward_flops(1, s, t)


def test_a_window_is_counted_in_full() -> None:
    at = (2, 0, 64)
    assert forward_flops(small("gpt", **{"attention.window": 4}).config, *at) == forward_flops(small("gpt").config, *at)


def test_gpt3_took_about_the_flops_that_its_paper_says() -> None:
    # Table D.1: 3.14e23 for 300 billion tokens by 6 per parameter and token, which leaves attention out.
    found = report_costs(preset_of("gpt3"), 1, 2048, 300 * 10**9)["flops"]
    attention = 3 * 4 * 2048 * 12_288 * 96
    assert found["training"] - 300e9 * attention == pytest.approx(3.14e23, rel=0.003)


def preset_of(name: str, **settings: Any) -> ModelConfig:
    return architectures.resolve(preset(name, **settings))


# ---- memory ------------------------------------------------------------------------------------------------------------


def nbytes(tensors: Any) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors)


def saved(net: nn.Module, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What a loss under autocast keeps for its backward: copies of matrices, and everything else that is no weight.

    The gradient of the output matrix, which comes with the loss, is none of these: gradients are counted as such.
    """
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    shapes = {frozenset(p.shape) for p in net.parameters() if p.dim() == 2}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    images = inputs[0].is_floating_point()
    objective = ClassificationObjective(net) if images else Objective(net)
    labels = torch.zeros(B, dtype=torch.long) if images else inputs[-1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        objective(*inputs, labels)
    shaped = [x for x in kept.values() if x.dim() == 2 and frozenset(x.shape) in shapes]
    return [x for x in shaped if x.dtype == torch.bfloat16], [
        x for x in kept.values() if not any(x is other for other in shaped)
    ]


@pytest.mark.parametrize("architecture", NAMES)
def test_weights_gradients_and_moments_take_the_bytes_of_their_tensors(architecture: str) -> None:
    net = small(architecture, tie="decoder")
    optimizer = make_optimizer(net, TrainConfig())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    found = training_memory(net.config, 1, *side_lengths(net.config, L))
    assert found["weights"] == nbytes(net.parameters())
    assert found["gradients"] == nbytes(p.grad for p in net.parameters())
    moments = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert found["moments"] == nbytes(moments)


MEMORY: list[dict[str, Any]] = [
    {"positions": "learned"},
    {"positions": "learned", "activation": "gelu", "n_kv_heads": 1},
    {"positions": "learned", "norm": "post", "embedding_norm": True},
    {"positions": "rope", "feedforward": "gated", "activation": "silu"},
    {"positions": "learned", "parallel": True},
]


@pytest.mark.parametrize("style", MEMORY)
@pytest.mark.parametrize("architecture", NAMES)
def test_activations_are_what_autograd_keeps(architecture: str, style: dict[str, Any]) -> None:
    """To the byte, but for ids and statistics: what is counted are vectors, as wide as the model, a layer or a head."""
    net = small(architecture, d_model=96, d_ff=160, **style)
    copies, others = saved(net, *inputs_of(architecture))
    widths = (96, 160, 24, gate_block(160))  # gates and values come in blocks
    expected = nbytes(x for x in others if x.shape[-1] in widths)
    if architecture == "bert":  # on a GPU its head's norm reads a copy in fp32, beside what relu keeps of itself
        expected += B * L * 96 * (2 if net.config.activation in ("gelu", "silu") else 4)
    if net.config.feedforward == ("gated",):  # there the activated gate is made again from the gate
        expected -= B * L * Cost(net.config).blocks * 2 * 160
    assert B * activation_bytes(net.config, *side_lengths(net.config, L)) == expected
    found = training_memory(net.config, B, *side_lengths(net.config, L))
    if architecture != "vit":  # the copy that the loss makes of the output matrix is gone with it
        found["bf16 copies"] -= 2 * 50 * 96
    assert found["bf16 copies"] == pytest.approx(nbytes(copies), rel=0.05)


def test_dropout_keeps_a_mask_except_where_its_numbers_are_drawn_again() -> None:
    plain, dropped = (small("gpt", dropout=p, ff_dropout=p).config for p in (0.0, 0.1))
    # a byte for each number: the embeddings, and the 40 inside 3 blocks; there what is left of the numbers as well
    assert activation_bytes(dropped, 0, L) - activation_bytes(plain, 0, L) == L * (32 + 3 * (40 + 2 * 40))


def test_logits_of_tokens_are_there_a_chunk_at_a_time() -> None:
    config = architectures.resolve(preset("gpt-small", target_vocab=50_000))
    few, many = (training_memory(config, 1, 0, t)["logits"] for t in (256, 10**6))
    assert few == 256 * 50_000 * 2
    assert 0.9 * CHUNK_BYTES["cuda"] < many <= 1.1 * CHUNK_BYTES["cuda"]
    assert training_memory(small("vit").config, B, L)["logits"] == B * 6 * 8  # classes: fp32, and their gradient


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_cache_of_a_language_model_is_what_decoding_keeps(groups: int) -> None:
    net = small("gpt", n_kv_heads=groups, d_head=12)
    _, state = net.begin(torch.randint(5, 50, (B, 16)))  # the cache doubles its columns: it is full at powers of two
    found = decoding_bytes(net, 0, 16, torch.float32)
    assert B * found["cache"] == state.nbytes() == 4 * B * 16 * 2 * 3 * groups * 12
    assert found["state"] == 0


def test_the_cache_of_a_translator_also_keeps_the_memory() -> None:
    net = small("transformer", n_kv_heads=2)
    state = net.begin(torch.randint(5, 50, (B, 9)))
    for _ in range(16):
        net.step(torch.full((B,), 7), state)
    by_hand = 4 * B * (16 + 9) * 2 * 3 * 2 * 8  # both sides' keys and values of three blocks, two heads of 8
    assert B * decoding_bytes(net, 9, 16, torch.float32)["cache"] == state.nbytes() == by_hand


def test_llama_2_by_hand_its_cache_is_an_eighth_of_what_64_heads_would_keep() -> None:
    found = report_costs(preset_of("llama2-70b"), 2, 4096)["memory"]["decoding"]
    per_token = 2 * 80 * 8 * 128 * 2  # keys and values, blocks, heads, width, bytes
    assert found["cache_bf16_per_token"] == per_token == 327_680
    assert found["cache_bf16"] == 2 * 4096 * per_token
    assert found["weights_bf16"] == 2 * 68_976_648_192
    assert "cache_bf16" not in report_costs(preset_of("bert-base"), 1, 512)["memory"]["decoding"]


RECURRENCES: list[tuple[str, str, str]] = [  # preset, mixer, and the kernel in the mixer's module
    ("gla-tiny", "gla", "linear_recurrence.gated_linear_attention"),
    ("linear-attention-tiny", "linear-attention", "linear_recurrence.gated_linear_attention"),
    ("based-tiny", "based", "linear_recurrence.gated_linear_attention"),
    ("based-tiny", "short-convolution", ""),
    ("mamba-tiny", "mamba", "mamba.selective_scan"),
    ("mamba2-tiny", "mamba2", "linear_recurrence.gated_linear_attention"),
    ("rwkv-tiny", "rwkv", "rwkv.wkv"),
    ("s4-tiny", "s4", "state_space_layer.long_convolution"),
    ("s4d-tiny", "s4d", "state_space_layer.long_convolution"),
]


@pytest.mark.parametrize(("name", "mixer", "kernel"), RECURRENCES)
def test_activations_of_a_recurrence_are_the_inputs_of_its_products_and_of_its_kernel(
    name: str, mixer: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are at least that. The rest is what enters norms, gates and feature maps, and what a kernel stores."""
    plain = {"positions": "none"} if name == "based-tiny" else {}
    net = make_model(preset(name, mixer=(mixer,), n_decoder_layers=1, target_vocab=50, max_len=L, **plain))
    part, kept = net.decoder.blocks[0].sublayers["self"], {}

    def keep(*tensors: Any) -> None:
        for x in tensors:
            if isinstance(x, Tensor) and x.shape[:2] == (B, L) and x.is_floating_point():
                kept[x.untyped_storage().data_ptr()] = x  # two parts of one result are one

    for module in part.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, given: keep(*given))
    if kernel:
        where = f"regard.layers.mixers.{kernel}"
        run = pkgutil.resolve_name(where)
        monkeypatch.setattr(where, lambda *given: [keep(*given), run(*given)][1])
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randint(5, 50, (B, L)))
    least = sum(2 * x.untyped_storage().nbytes() // x.itemsize for x in kept.values())
    assert least <= B * L * part.activation_bytes(settings_of(type(part), net.config), net.config) <= 2.6 * least
