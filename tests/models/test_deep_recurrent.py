"""GNMT, Deep-Att and feed-forward layers between recurrent ones, against compositions of torch.nn and equations in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config
from torch import Tensor, nn

from regard.config import ModelConfig, TrainConfig
from regard.config.registry import register, setting, unregister
from regard.data.batches import Batch
from regard.errors import RegardError
from regard.layers.context import Context
from regard.layers.experts import Experts
from regard.layers.part import FeedForward, Place
from regard.layers.recurrent import Recurrent
from regard.models.architectures import make_model, preset
from regard.models.initialization import initialize
from regard.models.rnn import RNN
from regard.models.seq2seq import Seq2Seq
from regard.training.objective import Objective
from regard.training.training_step import TrainingStep

V, C, H = 17, 6, 8
exact: dict[str, Any] = {"atol": 1e-12, "rtol": 0}


def make(name: str, **changes: Any) -> Any:
    """A model in float64 and evaluation mode, none of whose weights has a special value."""
    sizes = {"source_vocab": V, "target_vocab": V, "d_model": C, "recurrent.d_hidden": H, "dropout": 0.0}
    left_out = {"lstm": "source_vocab", "transformer": "recurrent.d_hidden"}.get(name.split("-")[0])
    sizes = {key: value for key, value in sizes.items() if key != left_out}
    torch.manual_seed(0)
    model = make_model(preset(name, **{**sizes, **changes})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def torchs(cells: list[Any], bidirectional: bool = False) -> nn.LSTM:
    """One layer of torch's LSTM with the weights of our cell, or of our two cells."""
    theirs = nn.LSTM(cells[0].weight_ih.shape[1], H, batch_first=True, bidirectional=bidirectional).double()
    for cell, end in zip(cells, ("", "_reverse"), strict=False):
        for name, value in (("weight_ih", cell.weight_ih), ("weight_hh", cell.weight_hh), ("bias_ih", cell.bias)):
            getattr(theirs, f"{name}_l0{end}").data.copy_(value.data)
        getattr(theirs, f"bias_hh_l0{end}").data.zero_()
    return theirs


SOURCE, TARGET = [5, 9, 7, 12, 6], [8, 8, 13, 5]
PADDED = torch.tensor([[*SOURCE, -1, -1], [6, 7, -1, -1, -1, -1, -1], [6, 11, 7, 8, 9, 10, 6]])
TARGETS = torch.tensor([[*TARGET, -1], [7, -1, -1, -1, -1], [6, 7, 8, 9, 10]])


# ---- GNMT -------------------------------------------------------------------------------------------------------------


def gnmt_encoder(model: Seq2Seq, source: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs and final state: a bidirectional layer, then others; x is added to the output from the third layer on."""
    x = C**0.5 * model.source_embedding.weight[torch.tensor(source)][None]
    for i, layer in enumerate(model.encoder.layers):
        out, (h, _) = torchs(list(layer.values()), bidirectional=i == 0)(x)
        x = out + x if i >= 2 else out
        end = h
    return x[0], end[-1, 0]


def test_gnmt_is_torchs_lstms_with_residual_sums_and_a_loop_over_steps_that_feeds_the_context_to_every_layer() -> None:
    model = make("gnmt", n_encoder_layers=4, n_decoder_layers=4)
    with torch.no_grad():
        found = model(PADDED, TARGETS)
        h, end = gnmt_encoder(model, SOURCE)  # (S, H), (H,)
        decoder, score = model.decoder, model.decoder.attentive.cross.score
        cells = [decoder.attentive.cell, *(layer["forward_"] for layer in decoder.above.layers)]
        runs = [torchs([cell]) for cell in cells]
        first = decoder.bridge(end).tanh().view(2, 1, 1, H)
        states = [(first[0], first[1]), *[(torch.zeros(1, 1, H).double(),) * 2] * 3]
        for t, token in enumerate(TARGET):
            query = states[0][0][0, 0]  # the output of the lowest layer at the step before
            energies = torch.stack([score.v @ torch.tanh(score.W(query) + score.U(each)) for each in h])
            c = (energies.softmax(0)[:, None] * h).sum(0)
            x = C**0.5 * model.target_embedding.weight[token]
            for i, run in enumerate(runs):
                out, states[i] = run(torch.cat([x, c])[None, None], states[i])
                x = out[0, 0] + x if i >= 2 else out[0, 0]
            torch.testing.assert_close(found[0, t], model.head.weight @ torch.cat([x, c]), **exact)


def test_a_new_gnmt_has_annotations_that_tell_words_apart() -> None:
    """Every LSTM makes small numbers smaller: with embeddings of length 1, annotations differed six times less."""
    torch.manual_seed(0)
    model = make_model(preset("gnmt-small", source_vocab=50, target_vocab=50)).eval()
    with torch.no_grad():
        annotations = model.encode(torch.randint(5, 50, (20, 9)))[0][-1]  # (B, S, M)
    assert annotations.std(0).mean() > 0.1


def test_residual_sums_of_a_language_model_are_those_of_torchs_lstms() -> None:
    model = make("lstm-small", n_decoder_layers=3, d_model=H, **{"recurrent.residual": 2})
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    x = model.embedding.weight[ids]
    for i, layer in enumerate(model.recurrent.layers):
        out, _ = torchs([layer["forward_"]])(x)
        x = out + x if i else out
    torch.testing.assert_close(model(ids), x @ model.embedding.weight.T, **exact)


# ---- Deep-Att ---------------------------------------------------------------------------------------------------------


def sigma(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class DeepAtt:
    """Deep-Att in NumPy, from the parameters alone.

    f^1 = W x,   f^k = W [h^{k-1}; Half(f^{k-1})],   h^k_t = LSTM(f^k_t + U h^k_{t-1} + b), in directions that alternate."""

    def __init__(self, model: Seq2Seq) -> None:
        self.p = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def lstm(self, name: str, f: np.ndarray, state: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        i, g_f, g, o = np.split(f + self.p[f"{name}.weight_hh"] @ state[0] + self.p[f"{name}.bias"], 4)
        c = sigma(g_f) * state[1] + sigma(i) * np.tanh(g)
        return sigma(o) * np.tanh(c), c

    def column(self, name: str, words: list[np.ndarray], depth: int, backward: bool) -> tuple[list[Any], np.ndarray]:
        """[h; f] of the highest layer at each word, and its final h; `backward` is the direction of the lowest layer."""
        read = words
        for k in range(depth):
            layer = f"encoder.columns.{name}.layers.{k}.forward_"
            fs = [self.p[f"{layer}.weight_ih"] @ x for x in read]
            state, hs = (np.zeros(H), np.zeros(H)), [np.zeros(H)] * len(words)
            order = range(len(words))[:: -1 if backward == (k % 2 == 0) else 1]
            for t in order:
                state = self.lstm(layer, fs[t], state)
                hs[t] = state[0]
            read = [np.concatenate([h, f[: 2 * H]]) for h, f in zip(hs, fs, strict=True)]
        return [np.concatenate([h, f]) for h, f in zip(hs, fs, strict=True)], state[0]

    def __call__(self, source: list[int], target: list[int], depth: int, above: int) -> np.ndarray:
        p, e = self.p, self.p["source_embedding.weight"]
        words = [e[i] for i in source]
        odd = depth % 2 == 1
        first, _ = self.column("forward_", words, depth, backward=not odd)
        second, end = self.column("backward_", words, depth, backward=odd)
        notes = [p["annotate.weight"] @ np.concatenate(pair) for pair in zip(first, second, strict=True)]
        start = np.tanh(p["decoder.bridge.weight"] @ end + p["decoder.bridge.bias"])
        zero = (np.zeros(H), np.zeros(H))
        states, logits, score = [(start[:H], start[H:]), *[zero] * above], [], "decoder.attentive.cross.score"
        for token in target:
            query = p[f"{score}.W.weight"] @ states[0][0]
            energies = np.array([p[f"{score}.v"] @ np.tanh(query + p[f"{score}.U.weight"] @ note) for note in notes])
            a = np.exp(energies) / np.exp(energies).sum()
            c = sum(weight * note for weight, note in zip(a, notes, strict=True))
            f = p["decoder.attentive.cell.weight_ih"] @ np.concatenate([e[token], c])
            states[0] = self.lstm("decoder.attentive.cell", f, states[0])
            for k in range(above):
                layer = f"decoder.above.layers.{k}.forward_"
                f = p[f"{layer}.weight_ih"] @ np.concatenate([states[k][0], f[: 2 * H]])
                states[k + 1] = self.lstm(layer, f, states[k + 1])
            logits.append(e @ (p["decoder.readout.weight"] @ np.concatenate([states[-1][0], c])))
        return np.stack(logits)


@pytest.mark.parametrize("depth", [3, 4])
def test_deep_att_is_what_its_equations_say(depth: int) -> None:
    model = make("deep-att-small", n_encoder_layers=depth, n_decoder_layers=3)
    found = model(PADDED, TARGETS).detach().numpy()
    for row in range(3):
        source, target = (x[row][x[row] >= 0].tolist() for x in (PADDED, TARGETS))
        np.testing.assert_allclose(found[row, : len(target)], DeepAtt(model)(source, target, depth, 2), atol=1e-12)


def test_the_sizes_of_the_papers_are_those_of_the_presets() -> None:
    with torch.device("meta"):
        gnmt, deep = (make_model(preset(name, source_vocab=V, target_vocab=V)) for name in ("gnmt", "deep-att"))
    assert isinstance(gnmt, Seq2Seq)
    assert isinstance(deep, Seq2Seq)
    assert [len(layer) for layer in gnmt.encoder.layers] == [2, *[1] * 7]
    assert gnmt.encoder.residual == [False, False, *[True] * 6]
    assert gnmt.decoder.above.residual == [False, *[True] * 6]  # the second layer, and from the third on
    assert gnmt.head.weight.shape == (V, 2048)
    assert deep.annotate.weight.shape == (1280, 5120)
    assert [len(column.layers) for column in deep.encoder.columns.values()] == [9, 9]
    assert len(deep.decoder.above.layers) == 6
    assert deep.decoder.above.layers[0]["forward_"].weight_ih.shape == (2048, 512 + 1024)


# ---- feed-forward layers between recurrent ones -------------------------------------------------------------------------


@pytest.fixture
def counted_experts() -> Iterator[None]:
    """A part with an auxiliary loss, the mean square of its outputs at tokens."""

    @register("counted")
    class Counted(FeedForward):
        """A matrix whose outputs are penalized."""

        auxiliary = True

        @dataclass(frozen=True)
        class Settings:
            weight: float = setting(0.1, "weight of the penalty")

        def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
            super().__init__(settings, config, place)
            self.weight = settings.weight
            self.inner = nn.Linear(config.d_model, config.d_model)

        def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
            y = self.inner(x)
            return y, self.weight * y[ctx.real].square().mean()

    yield
    unregister("feedforward", "counted")


def test_a_feed_forward_part_adds_a_sigmoid_of_its_output_to_that_of_each_layer_but_the_last() -> None:
    model = make("lstm-small", n_decoder_layers=3, d_model=H, recurrent_feedforward="dense", **{"recurrent.d_ff": 5})
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    x = model.embedding.weight[ids]
    for i, layer in enumerate(model.recurrent.layers):
        x, _ = torchs([layer["forward_"]])(x)
        if i < 2:
            part = model.recurrent.feedforwards[i].part
            inner = torch.relu(x @ part.inner.weight.T + part.inner.bias)
            x = x + torch.sigmoid(inner @ part.outer.weight.T + part.outer.bias)
    assert len(model.recurrent.feedforwards) == 2
    assert part.inner.weight.shape == (5, H)
    torch.testing.assert_close(model(ids), x @ model.embedding.weight.T, **exact)


@pytest.mark.usefixtures("counted_experts")
@pytest.mark.parametrize("name", ["gnmt-small", "lstm-small"])
def test_auxiliary_losses_between_recurrent_layers_reach_the_training_step_and_leave_out_padding(name: str) -> None:
    model = make(name, n_decoder_layers=3, recurrent_feedforward="counted", tie="none").float().train()
    inputs = (TARGETS, TARGETS) if name == "lstm-small" else (PADDED, TARGETS, TARGETS)
    seen: list[tuple[Tensor, Tensor]] = []
    layers = [m for m in model.modules() if type(m).__name__ == "RecurrentFeedForward"]
    assert len(layers) == (2 if name == "lstm-small" else 3 + 2)
    for layer in layers:
        layer.register_forward_hook(lambda m, given, out: seen.append((m.part.inner(given[0]), given[1])))
    step = TrainingStep(Objective(model), TrainConfig(compile=False), torch.device("cpu"), torch.float32)
    assert step.has_auxiliary
    n = int((inputs[-1] >= 0).sum())
    step([Batch(inputs, n)], lr=0.0)
    wanted = sum(0.1 * y[real].square().mean() for y, real in seen)
    torch.testing.assert_close(step.auxiliary, wanted, rtol=1e-5, atol=1e-7)
    assert all(real.sum() in (n, int((inputs[0] >= 0).sum())) for _, real in seen)


@pytest.mark.usefixtures("counted_experts")
def test_the_settings_of_a_part_between_layers_are_its_table_and_are_refused_without_it() -> None:
    model = make("lstm-small", recurrent_feedforward="counted", **{"counted.weight": 0.5})
    assert model.recurrent.feedforwards[0].part.weight == 0.5
    with pytest.raises(RegardError, match=r"choose model\.recurrent_feedforward counted to use it"):
        make("lstm-small", **{"counted.weight": 0.5})
    with pytest.raises(RegardError, match=r"choose model\.feedforward counted to use it"):
        preset("transformer-tiny", **{"counted.weight": 0.5})


@pytest.mark.usefixtures("counted_experts")
def test_the_gradient_of_an_auxiliary_loss_is_part_of_the_step() -> None:
    """With a loss of zero weight on the labels only the auxiliary loss changes the weights of the part."""
    model = make("lstm-small", n_decoder_layers=2, recurrent_feedforward="counted", tie="none").float().train()
    part = model.recurrent.feedforwards[0].part
    step = TrainingStep(Objective(model), TrainConfig(compile=False, clip=0.0), torch.device("cpu"), torch.float32)
    step.updater.step = lambda loss: torch.zeros(())  # type: ignore[method-assign]
    step([Batch((TARGETS, TARGETS), int((TARGETS >= 0).sum()))], lr=0.0)
    with_loss = part.inner.weight.grad.clone()
    model.zero_grad()
    sums = Objective(model)(TARGETS, TARGETS)
    (sums[0] / sums[2]).backward()
    without = part.inner.weight.grad.clone()
    model.zero_grad()
    Objective(model)(TARGETS, TARGETS)
    model.recurrent.feedforwards[0].auxiliary_loss.backward()
    torch.testing.assert_close(with_loss, without + part.inner.weight.grad, rtol=1e-5, atol=1e-7)
    assert part.inner.weight.grad.abs().max() > 1e-4


EXPERTS = ("noisy-experts", "switch", "mixtral")


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", ["gnmt-small", "deep-att-small"])
def test_experts_between_layers_read_each_text_as_if_it_were_alone(name: str, experts: str) -> None:
    """Padding is sent to no expert, also where a column reads backward, and decoding is the full forward pass."""
    depth = {"n_encoder_layers": 3, "n_decoder_layers": 3}
    model = make(name, recurrent_feedforward=experts, **depth, **{"recurrent.d_ff": 7})
    found = model(PADDED, TARGETS)
    for row in range(len(PADDED)):
        source, target = (x[row][x[row] >= 0][None] for x in (PADDED, TARGETS))
        torch.testing.assert_close(found[row, : target.shape[1]][None], model(source, target), **exact)
    state = model.begin(PADDED)
    for t in range(2):
        rows = TARGETS[:, t] >= 0
        torch.testing.assert_close(model.step(TARGETS[:, t].clamp(min=0), state)[rows], found[rows, t], **exact)


# ---- texts in parts, kernels and refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"recurrent.residual": 2},
        {"recurrent.fast_forward": True},
        {"recurrent_feedforward": "dense"},
        *({"recurrent_feedforward": name} for name in EXPERTS),
        {"recurrent.fast_forward": True, "recurrent.residual": 1, "recurrent_feedforward": "gated"},
    ],
)
@pytest.mark.parametrize("cell", ["lstm", "mut1"])
def test_a_text_in_two_parts_or_in_steps_is_the_text(changes: dict[str, Any], cell: str) -> None:
    model = make("lstm-small", n_decoder_layers=3, d_model=H, cell=cell, **changes)
    assert isinstance(model, RNN)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [6, 6, 9, 12, 5, 7]])
    whole, _ = model.hidden(ids)
    first, state = model.hidden(ids[:, :4])
    second, _ = model.hidden(ids[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **exact)
    logits, kept = model.begin(ids[:, :4])
    torch.testing.assert_close(logits, model.head(whole[:, 3]), **exact)
    for t in (4, 5):
        torch.testing.assert_close(model.step(ids[:, t], kept), model.head(whole[:, t]), **exact)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("options", [{"alternating": True}, {"bidirectional": True, "bidirectional_layers": 1}])
def test_fused_layers_with_padding_do_what_scans_do_to_rows_alone(options: dict[str, Any], side: str) -> None:
    torch.manual_seed(0)
    layers = Recurrent("lstm", C, [H] * 3, residual=3, fast_forward=True, returns_fast=True, **options).double()
    initialize(layers)
    x = torch.randn(2, 7, C).double()
    real = torch.tensor([[True] * 7, [False] * 4 + [True] * 3])
    real = real if side == "before" else real.flip(1)
    out, _ = layers(x, None, real)
    assert out.shape[-1] == layers.d_out
    layers.fuses = layers.fuses_padded = False
    for row in range(2):
        alone, _ = layers(x[row][real[row]][None])
        torch.testing.assert_close(out[row][real[row]][None], alone, **exact)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lstm-small", {"recurrent.residual": 3}, "would do nothing: the model has 2 layers"),
        ("lstm-small", {"recurrent.residual": 1}, "adds the input of layer 1"),
        ("lstm-small", {"recurrent.interleaved": True}, "for encoders of seq2seq models"),
        ("lstm-small", {"recurrent.d_ff": 8}, "which names no part"),
        ("lstm-small", {"recurrent_feedforward": "dens"}, "dens"),
        ("lstm-small", {"recurrent_feedforward": "dense", "n_decoder_layers": 1}, "stands between recurrent layers"),
        ("lstm-small", {"recurrent.fast_forward": True, "n_decoder_layers": 1}, "connects layers"),
        (
            "transformer-tiny",
            {"recurrent_feedforward": "dense", "d_model": 8},
            "recurrent_feedforward is for rnn, seq2seq",
        ),
        ("gnmt-small", {"recurrent.bidirectional_layers": 5}, "no more layers than there are"),
        ("gnmt-small", {"recurrent.interleaved": True}, "reads in both directions already"),
        ("gnmt-small", {"seq2seq.readout": "concat"}, "choose model.tie inputs or none"),
        ("gnmt-small", {"recurrent.residual": 2}, "adds the input of layer 2"),
        ("gnmt-small", {"n_decoder_layers": 1, "recurrent.residual": 0}, "there are none"),
        ("sutskever-small", {"seq2seq.context": "all"}, "for decoders with attention"),
        ("sutskever-small", {"recurrent.interleaved": True, "seq2seq.reverse_source": False}, "attention looks at"),
    ],
)
def test_settings_that_do_nothing_or_contradict_each_other_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        make(name, **changes)


def test_capacity_is_counted_in_each_text_between_recurrent_layers() -> None:
    """An expert that may take one token of a text passes the others by; each text is counted by itself."""
    sizes = {"preset": "lstm-small", "d_model": 6, "n_decoder_layers": 2, "target_vocab": V, "source_vocab": V}
    given = {**sizes, "recurrent.d_hidden": 6, "recurrent_feedforward": "switch", "switch.experts": 2}
    model: Any = make_model(model_config(**given, **{"switch.capacity": 1, "switch.jitter": 0.0}))
    part = next(module for module in model.modules() if isinstance(module, Experts))
    model.head_input(torch.arange(5, 13).view(2, 4))
    *tokens, dropped = part.load.tolist()
    assert sum(tokens) <= 2 * 2
    assert sum(tokens) + dropped == 8
