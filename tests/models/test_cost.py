"""The formula of models/cost.py against torch's own counter on a real forward and backward pass."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.config import ModelConfig
from regard.models.cost import forward_flops, training_flops
from regard.models.transformer import Transformer, resolve


def model(n_encoder: int, n_decoder: int, vocab: int, n_kv_heads: int = 0, d_head: int = 0) -> Transformer:
    return Transformer(
        ModelConfig(
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


def counted(net: Transformer, batch: int, s: int, t: int, *, backward: bool) -> int:
    source, target = torch.randint(5, 30, (batch, s)), torch.randint(5, 30, (batch, t))
    # Attention as plain products: the counter does not know the fused kernel for CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = net(source, target)
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
    config = resolve(ModelConfig(preset="transformer-base", source_vocab=37_000, target_vocab=37_000))
    encoder = 2 * (4 * 512 * 512 + 2 * 512 * 2048) + 4 * 512
    decoder = 2 * (8 * 512 * 512 + 2 * 512 * 2048) + 8 * 512
    assert forward_flops(config, 1, 1, 1) == 6 * encoder + 6 * decoder + 2 * 512 * 37_000


def test_multi_query_attention_by_hand() -> None:
    # Width 8, four heads of 3: queries 12 wide; one head of keys: 3 wide. One token on each side, one block each.
    config = resolve(
        ModelConfig(
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
