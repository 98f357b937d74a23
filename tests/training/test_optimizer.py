"""AdamW against a float64 version in NumPy, and an update that never applies what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config
from tokens import EOS, SOS

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD
from regard.training.objective import Objective
from regard.training.optimizer import Updater, make_optimizer
from regard.training.training_step import TrainingStep

SIZES = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 16, "max_len": 16}


def transformer(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model_config(**{**SIZES, "source_vocab": 20, "target_vocab": 20, "dropout": 0.0, **changes}))


def set_gradients(model: torch.nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def snapshot(updater: Updater) -> list[torch.Tensor]:
    state = updater.optimizer.state
    return [t.clone() for p in updater.parameters for t in (p.detach(), *state[p].values())]


def test_five_steps_of_adamw() -> None:
    """m, v and the decoupled decay by hand, with clipping, in float64."""
    config = TrainConfig(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.98, clip=1.0)
    model = transformer()
    updater = Updater(model, config)
    embedding = model.source_embedding.weight
    names = [name for name, _ in model.named_parameters()]
    x = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    m, v = ({n: np.zeros_like(a) for n, a in x.items()} for _ in range(2))
    for t in range(1, 6):
        lr = 0.01 * t
        set_gradients(model, seed=t, scale=[0.001, 1.0][t % 2])  # below the clip, and above it
        g = {n: p.grad.double().numpy().copy() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        norm = np.sqrt(sum((a**2).sum() for a in g.values()))
        updater.set_lr(lr)
        assert updater.step(torch.tensor(1.0)).item() == pytest.approx(norm, rel=1e-5)
        for name, p in model.named_parameters():
            a = g[name] * min(1.0, 1.0 / (norm + 1e-6))
            m[name] = 0.9 * m[name] + 0.1 * a
            v[name] = 0.98 * v[name] + 0.02 * a**2
            decay = 0.1 if p.dim() == 2 and p is not embedding else 0.0
            x[name] = x[name] * (1 - lr * decay)
            x[name] -= lr * (m[name] / (1 - 0.9**t)) / (np.sqrt(v[name] / (1 - 0.98**t)) + 1e-9)
    for name in names:
        ours = dict(model.named_parameters())[name].detach().numpy()
        np.testing.assert_allclose(ours, x[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("tie", "embeddings"), [("all", 1), ("decoder", 2), ("none", 3)])
def test_decay_is_for_matrices_alone(tie: str, embeddings: int) -> None:
    model = transformer(tie=tie)
    decayed, others = make_optimizer(model, TrainConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 and 20 not in p.shape for p in decayed["params"])
    tables = [p for p in others["params"] if p.dim() == 2]
    assert [tuple(p.shape) for p in tables] == [(20, 8)] * embeddings  # each once, tied or not
    everything = [*decayed["params"], *others["params"]]
    assert sorted(map(id, everything)) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("scheme", ["learned", "shaw", "t5", "fire"])
def test_positions_do_not_decay(scheme: str) -> None:
    model = transformer(positions=scheme)
    decayed, _ = (group["params"] for group in make_optimizer(model, TrainConfig(weight_decay=0.1)).param_groups)
    theirs = {id(p) for stack in (model.encoder, model.decoder) for p in stack.schemes.parameters()}
    assert theirs
    assert not theirs & {id(p) for p in decayed}


def test_clip_zero_means_off() -> None:
    model = transformer()
    set_gradients(model, seed=1, scale=100.0)
    updater = Updater(model, TrainConfig(clip=0.0))
    before = [p.grad.clone() for p in updater.parameters]  # type: ignore[union-attr]
    updater.optimizer.step = lambda: check(updater, before)  # type: ignore[method-assign,assignment]
    updater.step(torch.tensor(1.0))


def check(updater: Updater, gradients: list[torch.Tensor]) -> None:
    for p, g in zip(updater.parameters, gradients, strict=True):
        assert torch.equal(p.grad, g)  # type: ignore[arg-type]


OPTIONS: list[dict[str, str]] = [
    {},
    {"optimizer": "muon"},
    {"param_dtype": "bf16"},
    {"optimizer": "muon", "param_dtype": "bf16"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("first", [1, 3])
def test_a_bad_step_freezes_weights_and_moments(bad: float, where: str, first: int, options: dict[str, Any]) -> None:
    model = transformer()
    updater = Updater(model, TrainConfig(lr=0.1, weight_decay=0.1, precision="bf16", **options))
    for t in range(1, first):
        set_gradients(model, t)
        updater.step(torch.tensor(1.0))
    assert updater.first_bad_step(0) is None
    weights, state = [p.detach().clone() for p in updater.parameters], snapshot(updater)
    for t in range(first, first + 3):  # the good ones after it change nothing either
        set_gradients(model, t)
        if t == first and where == "gradient":
            updater.parameters[3].grad.view(-1)[0] = bad  # type: ignore[union-attr]
        updater.step(torch.tensor(bad if t == first and where == "loss" else 1.0))
    assert updater.first_bad_step(0) == first
    assert updater.first_bad_step(100) == 100 + first
    assert all(torch.equal(a, b) for a, b in zip(updater.parameters, weights, strict=True))
    if first > 1:
        assert all(torch.equal(a, b) for a, b in zip(snapshot(updater), state, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_clipping_divides_every_gradient_by_one_number(options: dict[str, Any]) -> None:
    """Gradients 64 times as large leave the same moments behind, with every optimizer."""
    found = []
    for scale in (1.0, 64.0):
        model = transformer()
        updater = Updater(model, TrainConfig(clip=2**-10, precision="bf16", **options))
        set_gradients(model, seed=1, scale=scale)
        torch.manual_seed(2)
        assert updater.step(torch.tensor(1.0)).dtype == torch.float32
        found.append(snapshot(updater))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [*OPTIONS, {"activation_checkpointing": True}], ids=str)
def test_captured_steps_equal_plain_ones_with_every_option(options: dict[str, Any]) -> None:
    from test_gpu import run

    fast, plain = (run(compile, torch.bfloat16, precision="bf16", **options)[0] for compile in (True, False))
    torch.testing.assert_close(fast.sums, plain.sums, rtol=2e-2, atol=1.0)


# ---- accumulation ------------------------------------------------------------------------------------------------


def batch(rows: int, seed: int) -> Batch:
    """Rows of different lengths, so that batches hold different numbers of scored tokens."""
    generator = torch.Generator().manual_seed(seed)
    source, target, labels = torch.randint(5, 20, (3, rows, 8), generator=generator)
    source[:, -1] = EOS
    target[:, 0] = SOS
    lengths = torch.randint(1, 9, (rows, 1), generator=generator)
    labels[torch.arange(8) >= lengths] = PAD
    target[torch.arange(8) > lengths] = PAD
    return Batch((source, target, labels), int((labels != PAD).sum()))


def together(batches: list[Batch]) -> Batch:
    joined = tuple(torch.cat(parts) for parts in zip(*(b.inputs for b in batches), strict=True))
    return Batch(joined, sum(b.tokens for b in batches))


def test_four_accumulated_batches_are_one_large_one() -> None:
    """Where there is a gradient: a key's bias has none but rounding, and AdamW's first step is its sign."""
    batches = [batch(rows, seed) for seed, rows in enumerate([1, 5, 2, 4])]
    assert len({b.tokens for b in batches}) == 4
    updated = []
    for given in (batches, [together(batches)]):
        model = transformer()
        step = TrainingStep(Objective(model, 0.1), TrainConfig(clip=0.5), torch.device("cpu"), torch.float32)
        step(given, lr=0.01)
        updated.append((model, step))
    (four, a), (one, b) = updated
    for x, y in zip(four.parameters(), one.parameters(), strict=True):
        m, n = (s.updater.optimizer.state[p]["exp_avg"] for s, p in ((a, x), (b, y)))  # a tenth of the gradient
        torch.testing.assert_close(m, n, rtol=0, atol=1e-7)
        real = m.abs() > 1e-6
        torch.testing.assert_close(x[real], y[real], rtol=0, atol=1e-6)
    torch.testing.assert_close(a.norm, b.norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(a.sums, b.sums, rtol=1e-5, atol=0)
    assert a.sums[2].item() == sum(x.tokens for x in batches)
