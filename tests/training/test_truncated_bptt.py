"""Truncated back-propagation through time: what is carried, what is cut, what is kept over an interruption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal_tensors, assert_same_run, fit, fit_until, metrics
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.data.text_batches import StatefulBatches
from regard.data.token_cache import FilterReport, Filters, Store, TokenStore
from regard.models.architectures import preset
from regard.models.rnn import RNN
from regard.tasks import language_modeling
from regard.tasks.run_config import make_config
from regard.text.special_tokens import PAD
from regard.training.training_step import TrainingStep
from regard.training.truncated_bptt import RecurrentObjective, StatefulObjective, make_recurrent_objective

V = 19
close: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-7}


def make(**changes: Any) -> RNN:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 8,
        "recurrent.d_hidden": 10,
        "n_decoder_layers": 2,
        "target_vocab": V,
        "dropout": 0.0,
    }
    return RNN(preset("lstm-small", **{**sizes, **changes})).double()


def text(rows: int, n: int, seed: int = 3) -> Tensor:
    return torch.randint(5, V, (rows, n), generator=torch.Generator().manual_seed(seed))


def parts(ids: Tensor, width: int, fresh: tuple[int, ...] = (0,)) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches that go on; all rows begin anew in those numbered `fresh`."""
    n = ids.shape[1] - 1
    begins = [torch.full((len(ids),), k in fresh) for k in range(n // width)]
    return [(ids[:, i * width :][:, :width], begins[i], ids[:, i * width + 1 :][:, :width]) for i in range(n // width)]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}", **close)


# ---- what is carried -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["lstm", "gru", "mut2"])
def test_batches_that_go_on_have_the_loss_of_one_long_unroll(cell: str) -> None:
    model, ids = make(cell=cell), text(3, 13)
    carried, whole = StatefulObjective(model, 3), RecurrentObjective(model)
    found = torch.stack([carried(*batch) for batch in parts(ids, 4)]).sum(0)
    torch.testing.assert_close(found, whole(ids[:, :-1], ids[:, 1:]), **close)
    cold = torch.stack([carried(*batch) for batch in parts(ids, 4, fresh=(0, 1, 2))]).sum(0)
    assert abs(cold[0] - found[0]) > 1e-3  # it matters


def test_nothing_is_truncated_where_a_batch_is_the_whole_text() -> None:
    model, ids = make(), text(3, 13)
    StatefulObjective(model, 3)(*parts(ids, 12)[0])[0].backward()
    found = gradients(model)
    RecurrentObjective(model)(ids[:, :-1], ids[:, 1:])[0].backward()
    assert_close_gradients(found, gradients(model))


def test_gradients_stop_where_a_batch_begins_and_nowhere_else() -> None:
    """The oracle: the long unroll, layer by layer, whose states are cut out of the graph between the two parts."""
    model, ids = make(), text(3, 13)
    carried = StatefulObjective(model, 3)
    for batch in parts(ids, 6):
        carried(*batch)[0].backward()
    found = gradients(model)
    first, state = model.hidden(ids[:, :6])
    second, _ = model.hidden(ids[:, 6:-1], tuple(x.detach() for x in state))
    logits = model.head(torch.cat([first, second], 1))
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    assert_close_gradients(found, gradients(model))
    RecurrentObjective(model)(ids[:, :-1], ids[:, 1:])[0].backward()
    full = gradients(model)
    assert max((full[name] - found[name]).abs().max() for name in found) > 1e-3  # something was truncated


def test_a_fresh_stream_begins_at_zero_and_the_others_go_on() -> None:
    model, ids = make(), text(3, 9)
    carried = StatefulObjective(model, 3)
    (_, none, _), second = parts(ids, 4)
    carried(ids[:, :4], none, ids[:, 1:5])
    carried(second[0], torch.tensor([False, True, False]), second[2])
    on, anew = model.hidden(ids[:, :8])[1], model.hidden(ids[:, 4:8])[1]
    for place, a, b in zip(carried.state, on, anew, strict=True):
        torch.testing.assert_close(place, torch.stack([a[0], b[1], a[2]]), **close)
    assert [x.shape for x in carried.state] == [(3, 10), (3, 10), (3, 8), (3, 8)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_carry_the_state_whether_or_not_batches_are_accumulated(accumulate: int) -> None:
    model, ids = make().float(), text(2, 17)
    config = TrainConfig(accumulate=accumulate, label_smoothing=0.0)
    objective = make_recurrent_objective(model, config, 2)
    assert isinstance(objective, StatefulObjective)
    step = TrainingStep(objective, config, torch.device("cpu"), torch.float32)
    places = [x.data_ptr() for x in objective.state]
    batches = [Batch(inputs, inputs[0].numel()) for inputs in parts(ids, 4)]
    for i in range(0, 4, accumulate):
        step(batches[i : i + accumulate], lr=0.0)
    for place, x in zip(objective.state, model.hidden(ids[:, :16])[1], strict=True):
        torch.testing.assert_close(place, x, atol=1e-5, rtol=1e-5)
    assert places == [x.data_ptr() for x in objective.state]  # in place, because a CUDA graph reads fixed memory
    assert step.sums[2] == 32


# ---- what is asked of the last layer's outputs -----------------------------------------------------------------------


@pytest.mark.parametrize("output_dropout", [0.0, 0.5])
def test_activity_and_slowness_by_their_formulas(output_dropout: float) -> None:
    """Means over the batch times its labels, so that they weigh as in loss + a mean(dropped h^2) + b mean(dh^2)."""
    model, ids = make(**{"recurrent.output_dropout": output_dropout}).train(), text(3, 8)
    hidden = model.hidden(ids[:, :-1])[0]
    torch.manual_seed(5)
    dropped = model.output_dropout(hidden)
    n = ids[:, 1:].numel()
    expected = n * (2 * (dropped**2).mean() + 0.7 * ((hidden[:, 1:] - hidden[:, :-1]) ** 2).mean())
    sums = []
    for weights in ((0.0, 0.0), (2.0, 0.7)):
        torch.manual_seed(5)
        sums.append(RecurrentObjective(model, 0.0, 0.0, *weights)(ids[:, :-1], ids[:, 1:]))
    torch.testing.assert_close(sums[1][0] - sums[0][0], expected, atol=1e-4, rtol=1e-5)  # summed in fp32
    assert torch.equal(sums[1][1:], sums[0][1:])  # what is reported stays plain


def test_what_is_not_scored_is_not_asked_to_be_small() -> None:
    """A row that fills a batch up, and the end of one where the text is over."""
    model, ids = make(), text(2, 9)
    objective, labels = RecurrentObjective(model, 0.0, 0.0, 1.0, 1.0), ids[:, 1:].clone()
    labels[1], labels[0, 5:] = PAD, PAD
    alone = objective(ids[:1, :5], ids[:1, 1:6])
    torch.testing.assert_close(objective(ids[:, :-1], labels), alone, atol=1e-5, rtol=1e-5)


def test_smoothing_and_carrying_are_as_the_settings_say() -> None:
    model = make()
    kept = make_recurrent_objective(model, TrainConfig(ar_weight=2.0, tar_weight=1.0, label_smoothing=0.1), 4)
    assert isinstance(kept, StatefulObjective)
    assert (kept.label_smoothing, kept.ar_weight, kept.tar_weight) == (0.1, 2.0, 1.0)
    plain = make_recurrent_objective(model, TrainConfig(carry_state=False, label_smoothing=0.0), 4)
    assert not isinstance(plain, StatefulObjective)
    assert not dict(plain.named_buffers(recurse=False))


# ---- validation ------------------------------------------------------------------------------------------------------


def stored(n: int) -> Store:
    return Store((TokenStore(text(1, n, seed=8)[0].numpy(), np.array([0, n])),), FilterReport(Filters()))


def unrolled(model: RNN, store: Store) -> float:
    """Nats a token, by one forward over all of the text."""
    ids = torch.from_numpy(store.source.ids.astype("int64"))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(ids[None, :-1])[0], ids[1:]))


@pytest.mark.parametrize("streams", [1, 4])
def test_validation_reads_the_whole_text_as_one(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = make().eval(), stored(1601)
    config = make_config({"task": "causal-lm", "model": {"preset": "lstm-small"}}, {})
    for name, value in {"SCORED_WIDTH": 16, "LEAD_BATCHES": 12, "MAX_STREAMS": streams, "STREAM_LEADS": 2}.items():
        monkeypatch.setattr(language_modeling, name, value)
    _, batches = language_modeling.make_evaluation(model, store, config)
    assert isinstance(batches, StatefulBatches)
    assert (batches.streams, batches.lead) == (streams, 12 if streams > 1 else 0)
    found = language_modeling.measure(model, store, 3200, config, torch.device("cpu"))
    assert found.loss == pytest.approx(unrolled(model, store), abs=1e-5 if streams > 1 else 1e-6)
    assert found.scores["perplexity"] == pytest.approx(math.exp(found.loss))
    assert found.scores["bits_per_character"] == pytest.approx(found.loss / 2 / math.log(2))


def test_streams_without_a_lead_would_be_worse() -> None:
    """What the lead is for."""
    model, store = make().eval(), stored(400)
    losses = []
    for lead in (0, 12):  # an LSTM forgets about half of its state with each token
        batches = StatefulBatches(store.source, 8, 20, 0, shifting=False, lead=lead)
        objective = StatefulObjective(model, 20)
        losses.append(sum(objective(*batch.inputs)[1].item() for batch in batches.iterate_once()) / 399)
    expected = unrolled(model, store)
    assert abs(losses[1] - expected) < 0.1 * abs(losses[0] - expected)


# ---- runs ------------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    **{"task": "causal-lm", "data.train": ["text.txt[:80%]"], "data.valid": ["text.txt[80%:]"]},
    **{"model.preset": "lstm-small", "model.recurrent.d_hidden": 20, "model.n_decoder_layers": 2, "model.tie": "all"},
    **{
        "model.recurrent.weight_dropout": 0.2,
        "model.recurrent.word_dropout": 0.1,
        "model.recurrent.hidden_dropout": 0.1,
        "train.bptt": 8,
    },
    **{
        "model.attention_dropout": 0.0,
        "model.n_heads": 0,
        "model.d_ff": 0,
        "train.ar_weight": 1.0,
        "train.tar_weight": 0.5,
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried")
    (folder / "text.txt").write_text("a dog sat on a mat and a cat ran up a hill .\n" * 10)
    return folder


@pytest.fixture(scope="module")
def reference(corpus: Path) -> Path:
    return fit(corpus / "reference", **RUN)


def test_the_run_under_test_carries_something(reference: Path) -> None:
    kept = load_file(max((reference / "checkpoints").iterdir()) / "carried.safetensors")
    assert {name: tuple(x.shape) for name, x in kept.items()} == {
        **{"state0": (4, 20), "state1": (4, 20), "state2": (4, 16), "state3": (4, 16)}
    }
    assert all((x != 0).all() for x in kept.values())
    losses = [line["loss"] for line in metrics(reference) if line["kind"] == "train"]
    assert len(losses) == 7


@pytest.mark.parametrize("stops", [[5], [8], [3, 4], [1] * 13], ids=str)
def test_interrupted_and_resumed_it_is_the_same_run(
    corpus: Path, reference: Path, stops: list[int], tmp_path: Path
) -> None:
    run = corpus / tmp_path.name
    for steps in stops:
        fit_until(run, steps, **RUN)
    fit(run, **RUN)
    assert_same_run(run, reference)
    for name in (p.name for p in (reference / "checkpoints").iterdir()):
        assert_equal_tensors(*(load_file(r / "checkpoints" / name / "carried.safetensors") for r in (run, reference)))


def test_without_carrying_windows_are_shuffled_and_nothing_is_kept(corpus: Path, tmp_path: Path) -> None:
    run = fit(corpus / tmp_path.name, **{**RUN, "train.carry_state": False})
    assert not list((run / "checkpoints").glob("*/carried.safetensors"))
    assert [line["kind"] for line in metrics(run)].count("valid") == 5


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def descended(compile: bool, accumulate: int, cell: str) -> tuple[TrainingStep, RNN]:
    net = make(cell=cell, d_model=16, **{"recurrent.d_hidden": 32}).float().cuda().train()
    config = TrainConfig(compile=compile, accumulate=accumulate, label_smoothing=0.0, ar_weight=1.0, tar_weight=1.0)
    step = TrainingStep(make_recurrent_objective(net, config, 6), config, torch.device("cuda"), torch.float32)
    batches = [Batch(inputs, inputs[0].numel()) for inputs in parts(text(6, 81), 8, fresh=(0, 5))]
    for i in range(0, len(batches), accumulate):
        step(batches[i : i + accumulate], lr=1e-3)
    return step, net


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("cell", ["lstm", "gru", "mut1"])
def test_captured_steps_carry_what_plain_ones_carry(cell: str, accumulate: int) -> None:
    """The recording reads and writes the states where they are."""
    fast, fast_net = descended(True, accumulate, cell)
    plain, plain_net = descended(False, accumulate, cell)
    torch.testing.assert_close(fast.sums, plain.sums, rtol=1e-4, atol=1e-3)
    for a, b in zip(fast.objective.buffers(recurse=False), plain.objective.buffers(recurse=False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    for a, b in zip(fast_net.parameters(), plain_net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
