"""Mixtures of experts against loops over tokens in float64 NumPy, with padding, packed rows, capacity and noise."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from configured import model_config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from regard.config import TrainConfig
from regard.errors import RegardError
from regard.kernels import expert_step
from regard.layers.context import Context
from regard.layers.experts import (
    Dispatch,
    Experts,
    count_in_texts,
    expert_loads,
    limited_layers,
    noisy_top_k,
    sort_by_expert,
    summarize_loads,
)
from regard.layers.part import Place, make_part
from regard.layers.quantization import quantize_model
from regard.models import architectures
from regard.models.analysis.cost import Cost
from regard.models.architectures import make_model, preset
from regard.training.muon import find_matrices
from regard.training.optimizer import make_optimizer

C, F, E = 6, 10, 5
FORMS = ("noisy-experts", "switch", "mixtral")
every = pytest.mark.parametrize("name", FORMS)
NO_LIMIT = {"switch.capacity_factor": 0.0, "switch.eval_capacity_factor": 0.0}
RELU_OR_SILU = {"noisy-experts": "relu", "switch": "relu", "mixtral": "silu"}


def layer(name: str, **settings: Any) -> Any:
    """A layer in float64 whose router prefers different experts for different tokens."""
    torch.manual_seed(0)
    given = {f"{name}.experts": E, **(NO_LIMIT if name == "switch" else {}), **settings}
    config = model_config(d_model=C, d_ff=F, activation=RELU_OR_SILU[name], feedforward=name, **given)
    part = make_part("feedforward", name, config, Place("encoder")).double()
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    return part


def context(*lengths: int, width: int = 0) -> Context:
    t = torch.arange(max(width, *lengths))
    return Context(torch.where(t < torch.tensor(lengths)[:, None], t, -1))


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def run_expert(part: Any, e: int, x: np.ndarray) -> np.ndarray:
    inner, outer = part.inner[e].detach().numpy(), part.outer[e].detach().numpy()
    hidden = inner @ x
    if part.gated:  # F is no multiple of 4: blocks of 2 gates and their 2 values
        blocks = hidden.reshape(-1, 2, 2)
        gate, value = blocks[:, 0].ravel(), blocks[:, 1].ravel()
        return outer @ (gate * sigmoid(gate) * value)
    return outer @ np.maximum(hidden, 0)


def gates_by_hand(part: Any, x: np.ndarray) -> dict[int, float]:
    """The chosen experts of one token and their weights, without noise and capacity."""
    logits = part.router.detach().numpy() @ x
    order = np.argsort(-logits)
    if part.name == "switch":
        return {int(order[0]): softmax(logits)[order[0]]}
    return dict(zip(map(int, order[:2]), softmax(logits[order[:2]]), strict=True))


# ---- outputs ---------------------------------------------------------------------------------------------------------


@every
def test_the_output_is_the_weighted_sum_of_the_chosen_experts(name: str) -> None:
    part, x = layer(name).eval(), inputs(2, 7, C)
    y, _ = part(x, context(7, 4))
    for row, length in enumerate((7, 4)):
        for t in range(7):
            token = x[row, t].numpy()
            chosen = gates_by_hand(part, token)
            wanted = sum(g * run_expert(part, e, token) for e, g in chosen.items()) if t < length else np.zeros(C)
            np.testing.assert_allclose(y[row, t].detach().numpy(), wanted, atol=1e-12)


@every
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    part, x, ctx = layer(name).eval(), inputs(1, 4, C).requires_grad_(), context(4)
    names, weights = zip(*((n, p) for n, p in part.named_parameters() if n != "noise"), strict=True)

    def run(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(part, dict(zip(names, values, strict=True)), (x, ctx))

    assert torch.autograd.gradcheck(run, (x, *weights), atol=1e-6)


@every
@pytest.mark.parametrize("training", [False, True])
def test_padding_and_other_rows_change_neither_outputs_nor_losses(name: str, training: bool) -> None:
    """Alone, beside a row, and followed by padding of whatever values; in training the noise is switched off."""
    part = layer(name, **({"switch.jitter": 0.0} if name == "switch" else {})).train(training)
    if name == "noisy-experts":
        part.noise.data.fill_(-100.0)  # softplus(-100 sum x) is 0 for inputs above 0
    x = inputs(2, 6, C).abs()
    alone, loss = part(x[:1, :4], context(4))
    padded, loss_padded = part(x[:1], context(4, width=6))
    beside, _ = part(x, context(4, 6))
    torch.testing.assert_close(padded[:, :4], alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(beside[:1, :4], alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(loss_padded, loss, atol=1e-12, rtol=0)
    x[0, 4:] = 1e3
    torch.testing.assert_close(part(x[:1], context(4, width=6))[1], loss, atol=1e-12, rtol=0)


@every
def test_a_batch_of_padding_alone_gives_zeros_and_a_finite_loss(name: str) -> None:
    part, x = layer(name).train(), inputs(1, 3, C).requires_grad_()
    y, loss = part(x, Context(torch.full((1, 3), -1)))
    assert not y.any()
    assert loss.isfinite()
    (y.sum() + loss).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in part.parameters())


def test_assignments_are_sorted_by_expert_and_filled_up() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 1]])  # 3 = dropped
    plan = Dispatch(*sort_by_expert(chosen, 3, 4, 4))
    assert plan.counts.tolist() == [2, 1, 3]
    assert plan.ends.tolist() == [4, 8, 12]
    total = len(plan.slot)
    assert total == 8 + 3 * 4
    assert plan.row.tolist() == [[8, 0], [1, total], [total, 9], [10, 4]]
    assert plan.slot[:12].tolist() == [1, 2, 8, 8, 7, 8, 8, 8, 0, 5, 6, 8]
    assert (plan.slot[12:] == 8).all()


# ---- the gate of 2017 ------------------------------------------------------------------------------------------------


def noisy_by_hand(clean: np.ndarray, deviation: np.ndarray, noise: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The gates G(x) and the chances P(x, i) of one token, (E,) each."""
    h = clean + noise * deviation
    top = np.argsort(-h)[:k]
    gates = np.zeros_like(h)
    gates[top] = softmax(h[top])
    chances = np.zeros_like(h)
    for i in range(len(h)):
        kth = np.sort(np.delete(h, i))[-k]
        chances[i] = 0.5 * (1 + math.erf((clean[i] - kth) / deviation[i] / math.sqrt(2)))
    return gates, chances


@pytest.mark.parametrize("k", [1, 2, 4])
def test_noisy_gates_and_their_losses_are_those_of_the_paper(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part = layer("noisy-experts", **{"noisy-experts.top_k": k, "noisy-experts.importance": 0.3}).train()
    x, ctx = inputs(2, 6, C), context(6, 3)
    noise = inputs(12, E).flip(0)
    monkeypatch.setattr(torch, "randn_like", lambda clean: noise)
    kept: list[Tensor] = []
    part.gates.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    _, loss = part(x, ctx)
    gates, chances = [], []
    for m, token in enumerate(x.flatten(0, 1).numpy()):
        clean = part.router.detach().numpy() @ token
        deviation = np.log1p(np.exp(part.noise.detach().numpy() @ token))
        if ctx.real.flatten()[m]:
            g, p = noisy_by_hand(clean, deviation, noise[m].numpy(), k)
            gates, chances = [*gates, g], [*chances, p]
            np.testing.assert_allclose(kept[0].flatten(0, 1)[m].detach().numpy(), g, atol=1e-12)
    importance, load = np.sum(gates, 0), np.sum(chances, 0)
    wanted = 0.3 * importance.var() / importance.mean() ** 2 + 0.01 * load.var() / load.mean() ** 2
    assert loss.item() == pytest.approx(wanted, rel=1e-9)


def test_every_expert_is_certain_where_all_are_chosen() -> None:
    clean = inputs(3, E)
    chosen, weight, chance = noisy_top_k(clean, torch.ones_like(clean), inputs(3, E), E)
    assert (chosen.sort(1).values == torch.arange(E)).all()
    torch.testing.assert_close(weight.sum(1), torch.ones(3, dtype=torch.float64))
    assert (chance == 1).all()


def test_the_gate_starts_at_zero_and_noise_alone_chooses() -> None:
    part = make_part("feedforward", "noisy-experts", model_config(d_model=C, d_ff=F), Place("encoder")).train()
    assert not part.router.any()
    assert not part.noise.any()
    for matrices in (part.inner, part.outer):
        nn.init.normal_(matrices)
    part(torch.randn(1, 4000, C), context(4000))
    assert (part.load[:-1] > 800).all(), "8 experts with 1000 of 8000 assignments each"
    with torch.no_grad():
        first, again = (part.eval()(torch.ones(1, 2, C), context(2))[0] for _ in range(2))
    assert torch.equal(first, again), "there is no noise outside of training"


# ---- capacity --------------------------------------------------------------------------------------------------------


def capacity_by_hand(chosen: list[int], capacity: int) -> list[bool]:
    return [chosen[:t].count(e) < capacity for t, e in enumerate(chosen)]


@pytest.mark.parametrize("training", [False, True])
def test_tokens_over_capacity_are_dropped_in_their_order(training: bool) -> None:
    settings = {"switch.capacity_factor": 0.5, "switch.eval_capacity_factor": 2.1, "switch.jitter": 0.0}
    part, x = layer("switch", **settings).train(training), inputs(2, 12, C)
    y, _ = part(x, context(12, 8))
    assert not training or (y[0] == 0).all(-1).any(), "something was dropped"
    for row, length in enumerate((12, 8)):
        chosen = [next(iter(gates_by_hand(part, token.numpy()))) for token in x[row, :length]]
        capacity = math.ceil((0.5 if training else 2.1) * length / E)
        kept = capacity_by_hand(chosen, capacity)
        assert (y[row, :length] != 0).any(-1).tolist() == kept


def test_packed_texts_have_the_capacity_that_they_have_alone() -> None:
    part, x = layer("switch", **{"switch.capacity": 1}).eval(), inputs(1, 9, C)
    packed, _ = part(x, Context(torch.tensor([[0, 1, 2, 3, 0, 1, 2, -1, -1]])))
    for begin, end in ((0, 4), (4, 7)):
        alone, _ = part(x[:, begin:end], context(end - begin))
        torch.testing.assert_close(packed[:, begin:end], alone, atol=1e-12, rtol=0)
    assert (packed[0, :7] == 0).all(-1).any(), "something was dropped"


def test_earlier_tokens_of_a_text_are_counted() -> None:
    chosen = torch.tensor([[1, 1, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, -1]])
    number, length = count_in_texts(chosen, 2, positions)
    assert number[0, :6].tolist() == [0, 1, 0, 2, 0, 1]
    assert length[0, :6].tolist() == [4, 4, 4, 4, 2, 2]


def test_the_losses_of_switch_are_those_of_the_paper() -> None:
    part, x = layer("switch", **{"switch.jitter": 0.0, "switch.z_loss": 0.2, "switch.balance": 0.5}), inputs(2, 7, C)
    _, loss = part(x, context(7, 5))
    tokens = torch.cat([x[0], x[1, :5]]).numpy()
    logits = tokens @ part.router.detach().numpy().T
    p = np.array([softmax(row) for row in logits])
    f = np.bincount(p.argmax(1), minlength=E) / len(p)
    wanted = 0.5 * E * (f * p.mean(0)).sum() + 0.2 * (np.log(np.exp(logits).sum(1)) ** 2).mean()
    assert loss.item() == pytest.approx(wanted, rel=1e-12)


# ---- models ----------------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"preset": "gpt-tiny", "n_decoder_layers": 2, "target_vocab": 30},
    "bert": {"preset": "bert-tiny", "source_vocab": 30},
    "transformer": {
        "preset": "transformer-tiny", "n_encoder_layers": 2, "n_decoder_layers": 2, "source_vocab": 30, "target_vocab": 30,
    },
}  # fmt: skip
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 24, "max_len": 16, "dropout": 0.0}


def model(architecture: str, feedforward: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    given = {**MODELS[architecture], **SMALL, "feedforward": feedforward, **settings}
    made: Any = make_model(model_config(**given))
    for parameter in made.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("feedforward", [*FORMS, "dense,switch", "mixtral,gated,noisy-experts"])
@pytest.mark.parametrize("architecture", ["gpt", "transformer"])
def test_cached_decoding_equals_full_forward(architecture: str, feedforward: str) -> None:
    """With the default capacity, which encoders have and decoders do not."""
    net = model(architecture, feedforward, n_decoder_layers=3).eval()
    source, target = torch.randint(5, 30, (3, 6)), torch.randint(5, 30, (3, 7))
    source[1, 4:] = -1
    with torch.no_grad():
        whole = net(target) if architecture == "gpt" else net(source, target)
        if architecture == "gpt":
            first, state = net.begin(target[:, :2])
            torch.testing.assert_close(first, whole[:, 1], atol=1e-4, rtol=1e-4)
        else:
            state = net.begin(source)
        for t in range(2 if architecture == "gpt" else 0, 7):
            torch.testing.assert_close(net.step(target[:, t], state), whole[:, t], atol=1e-4, rtol=1e-4)


@every
def test_later_tokens_change_nothing_before_them(name: str) -> None:
    """Not even by the capacity, which is a share of the length, with default settings."""
    net, ids = model("gpt", name).eval(), torch.randint(5, 30, (4, 16))
    with torch.no_grad():
        whole = net(ids)
        for length in (1, 5, 11):
            torch.testing.assert_close(net(ids[:, :length]), whole[:, :length], atol=1e-4, rtol=1e-4)


def test_a_list_of_feedforward_layers_is_repeated_over_the_blocks() -> None:
    net = model("gpt", "dense,switch", n_decoder_layers=5)
    names = [block.sublayers["ff"].name for block in net.decoder.blocks]
    assert names == ["dense", "switch", "dense", "switch", "dense"]
    assert net.config.feedforward == ("dense", "switch")
    with pytest.raises(RegardError, match=r"model\.feedforward names no part"):
        make_model(model_config(preset="gpt-tiny", target_vocab=30, feedforward=()))
    with pytest.raises(RegardError, match=r"mixtral\.top_k 9 is more than model\.mixtral\.experts 8"):
        model("gpt", "mixtral", **{"mixtral.top_k": 9})


@every
@pytest.mark.parametrize("architecture", MODELS)
def test_parameters_and_flops_are_those_of_the_formula(name: str, architecture: str) -> None:
    """Compared with a dense model: a router in each block, and k experts a token of E that there are."""
    c, f, length = 16, 24, 5
    dense, sparse = (
        Cost(architectures.resolve(model_config(**{**MODELS[architecture], **SMALL, "bias": False, "feedforward": ff})))
        for ff in ("dense", name)
    )
    blocks, k, matrices = dense.blocks, 1 if name == "switch" else 2, 3 if name == "mixtral" else 2
    routers = 2 if name == "noisy-experts" else 1
    assert sparse.parameters - dense.parameters == blocks * (8 * matrices * c * f - 2 * c * f + routers * 8 * c)
    more = blocks * (k * matrices * c * f - 2 * c * f + 8 * c)  # noise is for training
    assert sparse.active - dense.active == more
    sides = (length, length) if architecture == "transformer" else (0, length) if architecture == "gpt" else (length, 0)
    assert sparse.forward_flops(3, *sides) - dense.forward_flops(3, *sides) == 3 * length * 2 * more


def test_active_parameters_of_an_image_are_those_of_one_token() -> None:
    """With 4 experts and with 8, of which 2 are chosen, they differ by the router alone."""
    few, many = (Cost(preset("vit-tiny", n_classes=10, feedforward="mixtral", mixtral={"experts": n})) for n in (4, 8))
    assert many.active - few.active == few.blocks * 4 * few.config.d_model
    dense = Cost(preset("vit-tiny", n_classes=10, feedforward="gated", bias=False))
    assert few.active - dense.active == few.blocks * (3 * few.config.d_model * few.config.d_ff + 4 * few.config.d_model)


def test_activation_memory_grows_with_the_experts_of_a_token() -> None:
    def found(**settings: Any) -> int:
        config = architectures.resolve(model_config(**{**MODELS["gpt"], **SMALL, **settings}))
        return Cost(config).training_memory(1, 0, 8)["activations"]

    one, two, dense = (
        found(**given)
        for given in (
            {"feedforward": "noisy-experts", "noisy-experts.top_k": 1},
            {"feedforward": "noisy-experts"},
            {"feedforward": "dense"},
        )
    )
    # an input, an output and relu's result of one more expert; and the router's input in fp32
    assert two - one == 8 * 2 * (2 * 16 + 2 * 16 + 2 * 24)
    assert one - dense == 8 * 2 * (2 * 16 + 2 * 16 + 4 * 16)


# ---- training --------------------------------------------------------------------------------------------------------


def test_muon_takes_every_expert_as_a_matrix_and_leaves_the_router_to_adamw() -> None:
    net = model("gpt", "mixtral", n_decoder_layers=1)
    experts = net.decoder.blocks[0].sublayers["ff"]
    found = [m for m in find_matrices(net) if m.weight is experts.inner or m.weight is experts.outer]
    shapes = sorted(tuple(m.view(m.weight).flatten(0, 1).shape) for m in found)
    assert shapes == [(16, 24)] * 8 + [(24, 16)] * 16
    touched = torch.zeros_like(experts.inner)
    for matrix in found:
        if matrix.weight is experts.inner:
            matrix.view(touched).add_(1)
    assert (touched == 1).all(), "each row is in one matrix"
    assert not any(m.weight is experts.router for m in find_matrices(net))
    optimizer = make_optimizer(net, TrainConfig(optimizer="muon", lr=0.1, weight_decay=0.0))
    before = experts.inner.detach().clone()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    experts.inner.grad[3] = torch.randn_like(experts.inner[3])
    optimizer.step()
    changed = (experts.inner != before).any(-1).any(-1)
    assert changed.tolist() == [e == 3 for e in range(8)]
    update = ((experts.inner - before)[3].unflatten(0, (3, 2, 8))[:, 0].flatten(0, 1) / (0.1 * 0.2 * 24**0.5)).detach()
    values = torch.linalg.svdvals(update)  # of the gates alone, (24, 16): about 1 by Newton-Schulz
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_weight_decay_is_on_experts_and_router() -> None:
    net = model("gpt", "switch", n_decoder_layers=1)
    optimizer = make_optimizer(net, TrainConfig(weight_decay=0.5))
    experts = net.decoder.blocks[0].sublayers["ff"]
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in (experts.router, experts.inner, experts.outer)] == [0.5] * 3


def test_an_expert_starts_as_a_dense_layer() -> None:
    torch.manual_seed(0)
    config = model_config(preset="gpt-tiny", target_vocab=30, feedforward="noisy-experts", n_decoder_layers=1)
    experts = make_model(config).decoder.blocks[0].sublayers["ff"]  # type: ignore[union-attr, operator, index]
    bound = math.sqrt(6 / (128 + 512))  # Xavier uniform of one matrix, not of all together
    for matrix in (*experts.inner, *experts.outer):
        assert matrix.abs().max() <= bound
        assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_loads_count_real_tokens_in_training_alone() -> None:
    part = layer("switch", **{"switch.capacity": 1, "switch.jitter": 0.0})
    x, ctx = inputs(1, 9, C), context(7, width=9)
    part.eval()(x, ctx)
    assert not part.load.any()
    for _ in range(2):
        part.train()(x, ctx)
    chosen = [next(iter(gates_by_hand(part, token.numpy()))) for token in x[0, :7]]
    kept = capacity_by_hand(chosen, 1)
    wanted = [2.0 * sum(k for e, k in zip(chosen, kept, strict=True) if e == i) for i in range(E)]
    assert part.load.tolist() == [*wanted, 2.0 * (7 - sum(kept))]
    assert "load" not in part.state_dict()


def test_metrics_of_loads() -> None:
    loads = [torch.tensor([10.0, 30.0, 0.0]), torch.tensor([15.0, 20.0, 25.0, 20.0])]
    found = summarize_loads(loads, [True, True])
    assert found["expert_load_max"] == 1.5
    assert found["expert_load_min"] == 0.5
    assert found["expert_load_by_layer"] == [1.5, 1.25]
    assert found["dropped_tokens"] == 20 / 120
    assert summarize_loads(loads, [False, True])["dropped_tokens"] == 20 / 80  # the first layer drops none
    assert summarize_loads(loads[:1], [False])["dropped_tokens"] == 0


@pytest.mark.parametrize(("limits", "limited"), [((0.5, 0.0), True), ((0.0, 2.0), False), ((0.0, 0.0), False)])
def test_dropped_tokens_are_a_share_of_those_of_layers_that_drop_in_training(
    limits: tuple[float, float], limited: bool
) -> None:
    names = ("capacity_factor", "eval_capacity_factor")
    settings = {f"switch.{name}": value for name, value in zip(names, limits, strict=True)}
    net = model("gpt", "switch", **settings).train()
    net(torch.randint(5, 30, (4, 16)))
    assert limited_layers(net) == [limited] * 2
    assert (0 < summarize_loads(expert_loads(net), limited_layers(net))["dropped_tokens"] < 1) == limited


@pytest.mark.parametrize(
    ("factor", "length", "experts", "capacity"),
    [(1.2, 25, 5, 6), (1.1, 800, 8, 110), (4 / 3, 1024, 4, 342), (1e17, 100, 4, 100), (1e-9, 100, 4, 1)],
)
def test_the_capacity_is_rounded_up_from_the_exact_product(
    factor: float, length: int, experts: int, capacity: int
) -> None:
    """Some products are a little more than that, in fp32 or in fp64, and would be rounded up to one more; numerators of
    other factors would not fit into 64 bits."""
    settings = {"switch.capacity_factor": 0.0, "switch.eval_capacity_factor": factor, "switch.experts": experts}
    part = layer("switch", **settings).eval().float()
    with torch.no_grad():
        part.router.zero_()  # all tokens choose the same expert
    chosen = part.route(torch.ones(length, C), torch.ones(length, dtype=torch.bool), context(length)).chosen
    assert (chosen < experts).sum() == capacity


def test_int8_leaves_experts_and_router_in_fp32() -> None:
    net = model("gpt", "mixtral").eval()
    quantize_model(net, "int8")
    part = next(module for module in net.modules() if isinstance(module, Experts))
    assert {p.dtype for p in part.parameters()} == {torch.float32}
    assert len(expert_loads(net)) == 2
    assert net(torch.randint(5, 30, (2, 5))).isfinite().all()


# ---- compiled --------------------------------------------------------------------------------------------------------


def multiply_by_masks(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Grouped products that ask for no sizes, as on a GPU."""
    group = (torch.arange(len(x))[:, None] >= ends).sum(1)  # (P,)
    return sum(torch.where((group == e)[:, None], x @ w.T, 0) for e, w in enumerate(weight))  # type: ignore[return-value]


@pytest.mark.slow
@every
def test_a_layer_is_compiled_once_for_all_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the products, which are an operator on a GPU, nothing needs the host: neither sizes nor numbers."""
    monkeypatch.setattr("regard.layers.experts.grouped_linear", multiply_by_masks)
    part = layer(name, **{"switch.jitter": 0.0, "switch.capacity": 2} if name == "switch" else {}).float()
    if name == "noisy-experts":
        part.noise.data.fill_(-100.0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(part, backend=counter, dynamic=True, fullgraph=True)
    graphs = []
    for width in (7, 9, 12):
        x, ctx = inputs(2, width, C).float().abs(), context(width, 4)
        found, wanted = (run(x.requires_grad_(), ctx) for run in (compiled, part))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        grads = [torch.autograd.grad(y.sum() + loss, x)[0] for y, loss in (found, wanted)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiled_layer_has_the_gradients_of_the_eager_one(name: str, dtype: torch.dtype) -> None:
    """Traced, not compiled to machine code: torch 2.11 lost gradients of functions whose result is an intermediate."""
    part = layer(name).to(dtype).eval()
    x, ctx = inputs(2, 7, C).to(dtype), context(7, 4)
    found = []
    torch._dynamo.reset()
    for run in (part, torch.compile(part, backend="aot_eager")):
        part.zero_grad()
        given = x.clone().requires_grad_()
        y, loss = run(given, ctx)
        (y.float().square().sum() + loss).backward()
        weights = {key: p.grad for key, p in part.named_parameters() if p.grad is not None}
        found.append({"y": y.detach(), "x": given.grad, **weights})
    assert found[0].keys() == found[1].keys() >= {"y", "x", "router", "inner", "outer"}
    for key, expected in found[0].items():
        assert expected.abs().max() > 0
        torch.testing.assert_close(found[1][key], expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(RegardError, match=r"capacity_factor another: leave one out"):
        layer("switch", **{"switch.capacity": 3, "switch.capacity_factor": 7.0})
    with pytest.raises(RegardError, match="lists 3 parts, and the model has 2 blocks: switch would do nothing"):
        architectures.resolve(model_config(preset="gpt-tiny", n_decoder_layers=2, feedforward="dense,dense,switch"))


def test_few_experts_only_are_multiplied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that holds the logits of all experts must not be given thousands."""
    monkeypatch.setattr(expert_step, "TRITON", True)
    x = cast(Any, SimpleNamespace(shape=(256, 8), is_cuda=True, dtype=torch.bfloat16))
    with torch.no_grad():
        assert expert_step.can_multiply_all(x, 8, 2, 10**9)
        assert expert_step.can_multiply_all(x, 64, 2, 10**9)
        assert not expert_step.can_multiply_all(x, 65, 2, 10**9)
        x.shape = (2048, 8)  # a prompt: by the arithmetic of all experts
        assert expert_step.can_multiply_all(x, 8, 2, 10**6)
        assert not expert_step.can_multiply_all(x, 8, 2, 10**8)


@pytest.mark.parametrize("name", ["noisy-experts", "mixtral", "switch"])
@torch.no_grad()
def test_prompts_that_all_experts_multiply_give_what_sorted_tokens_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding gives 0. A layer that drops tokens sorts them."""
    limited = {"switch.eval_capacity_factor": 1.0} if name == "switch" else {}
    part, x = layer(name, **limited).float().eval(), torch.randn(2, 5, C)
    ctx = context(5, 2)
    wanted, _ = part(x, ctx)
    asked: list[int] = []
    monkeypatch.setattr(type(part), "can_multiply_all", lambda self, rows: asked.append(len(rows)) or True)
    found, _ = part.prefill(x, ctx, None)
    assert asked == ([] if name == "switch" else [10])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found[1, 2:] == 0).all()
