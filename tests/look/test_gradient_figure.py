"""Gradient flow: norms against autograd and against an unrolled recurrence, verdicts, and whole runs left untouched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from regard.cli.look_commands import look_gradients
from regard.data.batches import Batch
from regard.errors import RegardError
from regard.look.gradient_figure import (
    LAST_STEP,
    GradientFlow,
    ParameterGroup,
    gradient_flow,
    gradient_over_distance,
    layer_and_kind,
    measure_gradients,
    record_states,
    verdict,
)
from regard.models.architectures import make_model, preset
from regard.models.rnn import RNN
from regard.signals import Interrupted
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config
from regard.text.special_tokens import PAD
from regard.training.objective import Objective
from regard.training.truncated_bptt import RecurrentObjective

PAIR = {"n_encoder_layers": 2, "n_decoder_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "dropout": 0.0}
VOCABULARY = {"source_vocab": 12, "target_vocab": 12}


def translator(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return make_model(preset("transformer-tiny", **{**PAIR, **VOCABULARY, "attention_dropout": 0.0, **settings}))


def recurrent(cell: str, layers: int = 1) -> RNN:
    torch.manual_seed(0)
    sizes = {"d_model": 6, "recurrent.d_hidden": 6, "n_decoder_layers": layers, "tie": "none", **VOCABULARY}
    model = make_model(preset("lstm-small", cell=cell, **sizes, dropout=0.0)).double()
    assert isinstance(model, RNN)
    return model


def pairs(seed: int = 0) -> Batch:
    """Two translations, the second of them shorter."""
    rng = torch.Generator().manual_seed(seed)
    source, target, labels = (torch.randint(5, 12, (2, 7), generator=rng) for _ in range(3))
    source[1, 5:], target[1, 4:], labels[1, 4:] = PAD, PAD, PAD
    return Batch((source, target, labels), int((labels != PAD).sum()))


def text(length: int = 9) -> Batch:
    ids = torch.randint(5, 12, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return Batch((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), 3 * length)


# ---- by layer and kind -----------------------------------------------------------------------------------------------


def test_norms_are_those_of_autograd_layer_by_layer() -> None:
    model, batch = translator(), pairs()
    source, target, labels = batch.inputs
    logits = model(source, target)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    found = gradient_flow(Objective(model), batch)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    names = [name for name, _ in model.named_parameters()]
    by_name = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    own = dict(model.named_parameters())
    for layer, kind, prefix in [
        ("encoder.0", "self", "encoder.blocks.0.sublayers.self."),
        ("decoder.1", "cross", "decoder.blocks.1.sublayers.cross."),
        ("decoder.0", "ff", "decoder.blocks.0.sublayers.ff."),
        ("decoder.norm", "norm", "decoder.norm."),
    ]:
        chosen = [name for name in names if name.startswith(prefix)]
        (part,) = [part for part in found.parts if (part.layer, part.kind) == (layer, kind)]
        assert part.parameters == sum(own[name].numel() for name in chosen)
        assert part.gradient == pytest.approx(norm([by_name[name] for name in chosen]), rel=1e-4)
        assert part.weight == pytest.approx(norm([own[name] for name in chosen]), rel=1e-5)
        assert part.ratio == pytest.approx(part.gradient / part.weight)
    assert found.total == pytest.approx(norm(list(by_name.values())), rel=1e-4)
    assert sum(part.parameters for part in found.parts) == sum(p.numel() for p in model.parameters())


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(x.detach().double().square().sum()) for x in tensors))


def test_measuring_leaves_no_gradient_no_hook_and_no_random_number_behind() -> None:
    model, before = recurrent("lstm"), torch.get_rng_state()
    gradient_flow(RecurrentObjective(model), text(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert model.recurrent.fuses
    assert not any(module._forward_hooks for module in model.modules())


def test_dropout_is_on_and_the_same_every_time() -> None:
    model = translator(dropout=0.5).train()
    first, again, other = (gradient_flow(Objective(model), pairs(), seed=seed).total for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("encoder.blocks.0.sublayers.self.qkv.weight", ("encoder.0", "self")),
        ("body.encoder.blocks.11.sublayers.ff.outer.bias", ("encoder.11", "ff")),
        ("decoder.blocks.3.norms.cross.weight", ("decoder.3", "norm")),
        ("decoder.blocks.0.norm.weight", ("decoder.0", "norm")),
        ("decoder.norm.bias", ("decoder.norm", "norm")),
        ("decoder.schemes.2.inner.weight", ("decoder.2", "positions")),
        ("source_embedding.weight", ("source_embedding", "embedding")),
        ("types.weight", ("types", "embedding")),
        ("patches.weight", ("patches", "embedding")),
        ("summary", ("summary", "embedding")),
        ("head.inner.weight", ("head", "head")),
        ("prediction_head.bias", ("prediction_head", "head")),
        ("recurrent.layers.1.forward_.weight_hh", ("recurrent.1", "recurrent")),
        ("encoder.layers.0.backward_.weight_ih", ("encoder.0", "input")),
        ("decoder.attentive.cross.score.v", ("decoder.cross", "cross")),
        ("decoder.attentive.cell.weight_hh", ("decoder.cell", "recurrent")),
        ("decoder.attentive.cell.bias", ("decoder.cell", "bias")),
        ("recurrent.layers.0.forward_.bias", ("recurrent.0", "bias")),
        ("decoder.bridge.weight", ("decoder.bridge", "other")),
    ],
)
def test_a_parameter_belongs_to_a_layer_and_a_kind(parameter: str, expected: tuple[str, str]) -> None:
    assert layer_and_kind(parameter) == expected


# ---- through time ----------------------------------------------------------------------------------------------------


def by_hand(model: RNN, batch: Batch, last_only: bool) -> list[np.ndarray]:
    """|dL/dh_t| and, of an LSTM, |dL/dc_t|: the recurrence written out."""
    ids, labels = batch.inputs
    cell: Any = model.recurrent.layers[0]["forward_"]  # type: ignore[index]
    x = model.embedding.weight[ids] * model.embedding.scale
    h = c = x.new_zeros(len(ids), 6)
    hs, cs = [], []
    for t in range(ids.shape[1]):
        gates = x[:, t] @ cell.weight_ih.T + h @ cell.weight_hh.T + cell.bias
        if model.config.cell == "rnn":
            h = torch.tanh(gates)
        else:
            i, f, g, o = gates.chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            cs.append(c)
        hs.append(h)
    losses = F.cross_entropy((torch.stack(hs, 1) @ model.head.weight.T).transpose(1, 2), labels, reduction="none")
    loss = losses[:, -1].mean() if last_only else losses.mean()
    found = (torch.autograd.grad(loss, states, retain_graph=True, allow_unused=True) for states in (hs, cs) if states)
    return [np.array([0.0 if g is None else float(g.norm()) for g in by_states]) for by_states in found]


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_gradients_of_states_are_those_of_the_recurrence_written_out(cell: str) -> None:
    model, batch = recurrent(cell), text()
    found = gradient_flow(RecurrentObjective(model), batch).time
    assert list(found) == ["recurrent.0.forward"]
    lines = found["recurrent.0.forward"]
    names = ["|dL/dh|", "|dL/dc|"][: len(model.recurrent.zero_state(1, torch.zeros(1)))]
    assert list(lines) == [*names, *(f"{name}{LAST_STEP}" for name in names)]
    for last_only in (False, True):
        for name, expected in zip(names, by_hand(model, batch, last_only), strict=True):
            np.testing.assert_allclose(lines[name + LAST_STEP * last_only], expected, rtol=1e-6)


def test_the_fused_kernel_and_the_steps_have_one_loss() -> None:
    model, batch = recurrent("lstm", layers=2), text()
    objective = RecurrentObjective(model)
    plain = objective(*batch.inputs)[0].item()
    with record_states(model) as states:
        stepped = objective(*batch.inputs)[0].item()
    assert stepped == pytest.approx(plain, rel=1e-9)
    assert {name: len(steps) for name, steps in states.items()} == {f"recurrent.{i}.forward": 9 for i in range(2)}


def test_both_directions_of_an_encoder_are_shown_by_position() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 6, "recurrent.d_hidden": 6, "recurrent.bidirectional": True, "dropout": 0.0, **VOCABULARY}
    model = make_model(preset("rnnsearch-small", **sizes)).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    with record_states(model) as states:
        annotations, _ = model.encoder(x)  # type: ignore[operator]
    backward = [h for h, *_ in states["encoder.0.backward"]]
    np.testing.assert_allclose(torch.stack(backward[::-1], 1).detach(), annotations[..., 6:].detach())
    found = gradient_flow(Objective(model), pairs()).time
    assert set(found) == {"encoder.0.forward", "encoder.0.backward", "decoder.cell"}
    assert {len(lines["|dL/dh|"]) for lines in found.values()} == {7}
    steps = stepwise(model, pairs())
    np.testing.assert_allclose(found["encoder.0.backward"]["|dL/dh|"], steps["encoder.0.backward"][::-1])
    np.testing.assert_allclose(found["encoder.0.forward"]["|dL/dh|"], steps["encoder.0.forward"])


def stepwise(model: nn.Module, batch: Batch) -> dict[str, list[float]]:
    """|dL/dh| in the order in which each cell made its steps."""
    source, target, labels = batch.inputs
    with record_states(model) as states:
        logits = model(source, target)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    hs = {name: [h for h, *_ in steps] for name, steps in states.items()}
    return {name: [float(g.norm()) for g in torch.autograd.grad(loss, h, retain_graph=True)] for name, h in hs.items()}


# ---- verdicts --------------------------------------------------------------------------------------------------------


def flow(parts: list[ParameterGroup], clip: float = 0.0, **time: Any) -> GradientFlow:
    total = math.sqrt(sum(part.gradient**2 for part in parts))
    lines = {name.replace("_", "."): {f"|dL/dh|{LAST_STEP}": np.array(values)} for name, values in time.items()}
    return GradientFlow("a run", tuple(parts), 1.0, total, clip, lines)


def test_the_ends_of_a_stack_are_compared_by_what_each_weight_gets() -> None:
    parts = [ParameterGroup("encoder.0", "self", 100, 0.03, 1.0), ParameterGroup("encoder.0", "ff", 100, 0.04, 1.0)]
    parts += [ParameterGroup("encoder.0", "norm", 10, 9.0, 1.0), ParameterGroup("encoder.1", "ff", 50, 0.05, 1.0)]
    parts += [ParameterGroup("encoder.10", "ff", 2, 100.0, 1.0)]  # the last by its number
    assert list(flow(parts).depths()) == ["encoder"]
    assert flow(parts).depths()["encoder"] == pytest.approx((0.05 / math.sqrt(200), 100 / math.sqrt(2)))
    assert "encoder: the first layer has 5e-05 (vanishing)" in "\n".join(flow(parts).verdicts())


def test_verdicts_say_what_they_go_by() -> None:
    assert [verdict(x) for x in (0.5, 0.0009, 1001)] == ["0.5 (even enough)", "0.0009 (vanishing)", "1e+03 (exploding)"]
    one = ParameterGroup("head", "head", 4, 3.0, 2.0)
    said = flow([one], clip=1.0).verdicts()
    assert said[0] == "the norm of the gradient is 3, and train.clip 1 makes it 1"
    assert said[-1] == "vanishing: less than 0.001 of it is left; exploding: more than 1000 times as much"
    assert flow([one], clip=5.0).verdicts()[0].endswith("train.clip 5 leaves it as it is")
    assert flow([one]).verdicts()[0] == "the norm of the gradient is 3"
    assert flow([ParameterGroup("head", "head", 4, math.inf, 2.0)]).verdicts() == [
        "the gradient is not finite: it has exploded"
    ]


def test_what_arrives_through_time_has_a_factor_a_step() -> None:
    halves = 0.5 ** np.arange(11)[::-1]  # the last step has all of it
    said = "\n".join(flow([], recurrent_0_forward=[*halves, 0.0]).verdicts())
    assert "recurrent.0.forward: 0.00098 (vanishing) of it arrives 10 steps before, a factor of 0.500 a step" in said
    backward = gradient_over_distance({f"|dL/dh|{LAST_STEP}": halves[::-1]}, "recurrent.0.backward")
    np.testing.assert_allclose(backward, 0.5 ** np.arange(11))
    assert len(gradient_over_distance({"|dL/dh|": halves}, "encoder.0.forward")) == 0
    both = gradient_over_distance(
        {f"|dL/dh|{LAST_STEP}": np.array([3.0]), f"|dL/dc|{LAST_STEP}": np.array([4.0])}, "decoder.cell"
    )
    assert both.tolist() == [5.0]


# ---- the drawing -----------------------------------------------------------------------------------------------------


def test_the_picture_has_layers_kinds_the_clip_and_time() -> None:
    parts = [ParameterGroup("encoder.0", "self", 4, 0.5, 5.0), ParameterGroup("encoder.1", "self", 4, 0.25, 5.0)]
    parts += [ParameterGroup("encoder.1", "ff", 4, 0.1, 1.0), ParameterGroup("head", "head", 4, 0.0, 1.0)]
    figure = flow(parts, 1.0, decoder_cell=[0.1, 1.0, 0.0]).figure()
    gradient, ratio, time = figure.axes
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] * 3
    assert (gradient.get_xlabel(), gradient.get_ylabel()) == ("layer", "|gradient|")
    assert [text.get_text() for text in gradient.get_xticklabels()] == ["encoder.0", "encoder.1", "head"]
    drawn = {line.get_label(): line.get_ydata() for line in gradient.lines}
    np.testing.assert_array_equal(drawn["self"], [0.5, 0.25, math.nan])
    assert list(drawn["train.clip"]) == [1, 1]
    assert [label for label in drawn if label.startswith("all of it")] == ["all of it: 0.568"]
    np.testing.assert_array_equal(ratio.lines[1].get_ydata(), [math.nan, 0.1, math.nan])
    assert time.get_title() == "decoder.cell: through time"
    np.testing.assert_array_equal(time.lines[0].get_ydata(), [0.1, 1.0, math.nan])
    assert "vanishing: less than 0.001" in figure.get_suptitle()
    assert flow(parts)._repr_png_()[:4] == b"\x89PNG"


def test_numbers_are_json_even_where_weights_are_all_zero() -> None:
    found = flow([ParameterGroup("types", "embedding", 4, 0.1, 0.0)])
    numbers = json.loads(json.dumps(found.numbers(), allow_nan=False))
    assert numbers["parts"] == [
        {
            "layer": "types",
            "kind": "embedding",
            "parameters": 4,
            "gradient": 0.1,
            "weight": 0.0,
            "gradient / weights": None,
        }
    ]


def test_what_is_no_number_is_null_in_json() -> None:
    broken = flow([ParameterGroup("head", "head", 4, math.nan, 2.0)], decoder_cell=[0.5, math.inf])
    numbers = json.loads(json.dumps(broken.numbers(), allow_nan=False))
    assert numbers["norm"] is numbers["parts"][0]["gradient"] is None
    assert [*numbers["time"]["decoder.cell"].values()] == [[0.5, None]]
    assert numbers["loss"] == 1.0


# ---- runs ------------------------------------------------------------------------------------------------------------


def config(root: Path, **changes: Any) -> Any:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    lines = [" ".join(words[i % 8 : i % 8 + 3]) for i in range(40)]
    (root / "train.tsv").write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines), encoding="utf-8")
    (root / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    values = {
        "name": "little",
        "data": {"root": str(root), "train": ["train.tsv"], "valid": ["train.tsv"]},
        "tokenizer": {"kind": "char", "vocab_size": 40},
        "model": {"preset": "transformer-tiny", **PAIR, "max_len": 64},
        "train": {"steps": 2, "batch_tokens": 128, "device": "cpu", "threads": 1, "samples": 0, "clip": 0.5},
        "decode": {"max_len_b": 2, "max_len_a": 0.0},
    }
    return make_config(values, changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gradients")
    return train(config(root), root / "run", quiet=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_measured_on_its_own_first_batch_and_left_as_it_was(finished: Path) -> None:
    before = contents(finished)
    found = measure_gradients(finished, device="cpu")
    assert contents(finished) == before
    assert found.clip == 0.5
    assert {part.layer for part in found.parts} >= {"source_embedding", "encoder.0", "encoder.1", "decoder.1"}
    assert math.isfinite(found.loss)
    assert found.time == {}
    smaller = measure_gradients(finished, {"train.batch_tokens": "32"}, device="cpu")
    assert smaller.total != found.total


def test_a_model_without_its_run_reads_what_it_is_given(finished: Path) -> None:
    files = {"data.root": str(finished.parent), "data.train": "train.tsv"}
    same = {"train.batch_tokens": "128", "train.label_smoothing": "0.1", "train.clip": "0.5"}
    given = measure_gradients(finished / "model", {**files, **same}, device="cpu")
    own = measure_gradients(finished, {"train.label_smoothing": "0.1"}, device="cpu")
    assert [part.gradient for part in given.parts] == pytest.approx([part.gradient for part in own.parts])
    with pytest.raises(RegardError, match=r"without its run: .*--data\.train FILE"):
        measure_gradients(finished / "model", device="cpu")


def test_an_unfinished_run_has_the_weights_of_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(tmp_path, **{"train.save_every": "1"})
    with monkeypatch.context() as patch:
        patch.setattr("regard.training.trainer.Trainer._finish", stopped)
        with pytest.raises(Interrupted):
            train(chosen, tmp_path / "run", quiet=True)
    unfinished = measure_gradients(tmp_path / "run", device="cpu")
    assert unfinished.total > 0
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    with pytest.raises(RegardError, match="no weights yet"):
        measure_gradients(tmp_path / "run", device="cpu")


def stopped(trainer: Any, stop: Any) -> None:
    raise Interrupted(2, trainer.job.folder, trainer.progress.step, trainer.config.steps)


def test_a_recurrent_language_model_is_shown_through_time(tmp_path: Path) -> None:
    model = {
        "model.preset": "lstm-small",
        "model.recurrent.d_hidden": "8",
        "model.n_decoder_layers": "2",
        "model.d_model": "8",
    }
    text_data = {"task": "causal-lm", "data.train": "text.txt", "data.valid": "text.txt", "train.bptt": "12"}
    config(tmp_path)  # writes the text
    values = {
        "name": "words",
        "data": {"root": str(tmp_path)},
        "tokenizer": {"kind": "char", "vocab_size": 40},
        "train": {"steps": 1, "batch_tokens": 48, "device": "cpu", "threads": 1, "samples": 0},
    }
    run = train(
        make_config(values | {"model": {"preset": "lstm-small"}}, {**model, **text_data}), tmp_path / "run", quiet=True
    )
    found = measure_gradients(run, device="cpu")
    assert list(found.time) == ["recurrent.0.forward", "recurrent.1.forward"]
    assert {len(values) for lines in found.time.values() for values in lines.values()} == {12}
    assert any("of it arrives 11 steps before" in line for line in found.verdicts())


def call(*words: str, **settings: str) -> Result:
    app = typer.Typer()
    app.command()(look_gradients)
    return CliRunner().invoke(app, [*words, "--device", "cpu"], obj=settings)


def test_the_command_says_its_verdict_and_draws(finished: Path, tmp_path: Path) -> None:
    png, table = tmp_path / "g.svg", tmp_path / "g.csv"
    done = call(str(finished), "--output", str(png), "--csv", str(table))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("the norm of the gradient is ")
    assert done.stdout.splitlines()[-2:] == [str(table), str(png)]
    assert b"<svg" in png.read_bytes()[:1000]
    numbers = json.loads(call(str(finished), "--json").stdout)
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "layer,kind,parameters,gradient,weight,gradient / weights"
    assert len(lines) == 1 + len(numbers["parts"])
    assert "unknown setting 'train.nonsense'" in str(call(str(finished), **{"train.nonsense": "1"}).exception)
