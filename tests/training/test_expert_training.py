"""Training with mixtures of experts: loads in the metrics, also after a resumption, and the figure of `regard look`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import RegardError
from regard.look.expert_figure import trace_experts
from regard.look.model_trace import package_of
from regard.look.record import record
from regard.look.statistics_figure import measure_statistics
from regard.look.training_curves import read_training_curves
from regard.models.architectures import make_model, preset

FORMS = ("dense", "switch", "mixtral", "noisy-experts")
SETTINGS = {
    "model.feedforward": ",".join(FORMS), "model.n_decoder_layers": "4", "model.d_model": "16", "model.n_heads": "2",
    "model.d_ff": "16", "model.max_len": "32", "model.mixtral.experts": "4", "tokenizer.kind": "char",
    "train.batch_tokens": "128", "train.log_every": "4", "train.valid_every": "100", "train.device": "cpu",
    "train.threads": "1",
}  # fmt: skip


def recipe(folder: Path, model: str = "gpt-tiny") -> Path:
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran to the tree.\n" * 40)
    path = folder / "gpt.toml"
    text = 'task = "causal-lm"\n[data]\ntrain = ["text.txt"]\nvalid = ["text.txt"]\n[model]\npreset = '
    path.write_text(f'{text}"{model}"\n')
    return path


def train(folder: Path, name: str, steps: int, **more: str) -> Path:
    given = {**SETTINGS, "data.root": str(folder), "train.steps": str(steps), **more}
    return regard.train(recipe(folder), folder / name, settings=given, quiet=True)


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("experts"), "run", 8)


def test_metrics_tell_how_evenly_experts_are_used(run: Path) -> None:
    found = metrics(run)
    assert [line["step"] for line in found] == [4, 8]
    for line in found:
        layers = line["expert_load_by_layer"]
        assert len(layers) == 3
        assert line["expert_load_max"] == pytest.approx(max(layers), abs=1e-4)
        assert 1 <= line["expert_load_max"] <= 8
        assert 0 <= line["expert_load_min"] <= 1
        assert 0 <= line["dropped_tokens"] < 1
        assert line["auxiliary_loss"] > 0


def test_a_model_without_experts_has_no_such_metrics(tmp_path: Path) -> None:
    given = {k: v for k, v in SETTINGS.items() if not k.startswith("model.mixtral")}
    given |= {"model.feedforward": "dense", "data.root": str(tmp_path), "train.steps": "4"}
    run = regard.train(recipe(tmp_path), tmp_path / "run", settings=given, quiet=True)
    assert not any(key.startswith("expert") for line in metrics(run) for key in line)
    with pytest.raises(RegardError, match=r"has no experts: its model\.feedforward is dense"):
        trace_experts(run, "the cat")


def test_a_resumed_run_counts_the_loads_from_before(run: Path, tmp_path: Path) -> None:
    """It stops at step 6, between two lines; noise comes from the generator, which is part of a checkpoint."""
    again = train(tmp_path, "run", 6)
    regard.resume(again, settings={"train.steps": "8"}, quiet=True)
    wanted, found = metrics(run)[-1], metrics(again)[-1]
    assert found["step"] == 8
    for key in ("expert_load_max", "expert_load_min", "expert_load_by_layer", "dropped_tokens"):
        assert found[key] == pytest.approx(wanted[key], abs=1e-6), key


def test_look_shows_the_experts_of_a_model_without_attention(tmp_path: Path) -> None:
    given = {k: v for k, v in SETTINGS.items() if k != "model.n_heads"} | {"model.feedforward": "mixtral"}
    given |= {"model.n_decoder_layers": "2", "data.root": str(tmp_path), "train.steps": "1"}
    run = regard.train(recipe(tmp_path, "mamba-tiny"), tmp_path / "run", settings=given, quiet=True)
    found = trace_experts(run, "the cat")
    assert [*found.layers] == ["decoder.0.ff", "decoder.1.ff"]
    assert all(len(found.tokens[name]) == len(weights) for name, weights in found.layers.items())
    with pytest.raises(RegardError, match="has no attention"):
        measure_statistics(run, ["the cat"])


TRANSLATION = {
    "data.train": "toy:60", "data.valid": "toy:10", "tokenizer.vocab_size": "150", "model.d_model": "12",
    "model.recurrent.d_hidden": "12", "model.recurrent_feedforward": "mixtral", "model.mixtral.experts": "3",
    "train.steps": "1", "train.batch_tokens": "256", "train.device": "cpu", "train.threads": "1", "decode.max_len_b": "4",
    "decode.max_len_a": "0.5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "layers"),
    [
        ("gnmt-small", ["encoder.0.ff", "encoder.1.ff", "encoder.2.ff", "decoder.0.ff", "decoder.1.ff"]),
        ("sutskever-small", ["encoder.0.ff", "decoder.0.ff"]),  # without attention
    ],
)
def test_look_shows_the_experts_between_recurrent_layers(preset: str, layers: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f'model.preset = "{preset}"\n')
    depth = {"model.n_encoder_layers": "4", "model.n_decoder_layers": "3"} if preset == "gnmt-small" else {}
    run = regard.train(tmp_path / "recipe.toml", tmp_path / "run", settings=TRANSLATION | depth, quiet=True)
    found = trace_experts(run, "I ate an apple.")
    assert [*found.layers] == layers
    for name, weights in found.layers.items():
        assert weights.shape == (len(found.tokens[name]), 3)
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
        assert found.loads[name] == [int((weights[:, e] > 0).sum()) for e in range(3)]
        assert sum(found.loads[name]) == 2 * len(weights)


def test_columns_that_read_backward_are_recorded_in_the_order_of_the_text() -> None:
    """A part that reads tokens alone is given the outputs of a layer; the layer has read one more of them at every step."""
    torch.manual_seed(0)
    sizes = {"source_vocab": 20, "target_vocab": 20, "d_model": 6, "recurrent.d_hidden": 6, "dropout": 0.0}
    model: Any = make_model(preset("deep-att-small", n_encoder_layers=3, recurrent_feedforward="mixtral", **sizes))
    one = torch.randint(5, 20, (1, 7))
    other = one.clone()
    other[0, 3] = 5 + (one[0, 3] - 4) % 15
    seen = []
    for ids in (one, other):
        with record(model.eval(), stream=True) as tape, torch.no_grad():
            model(ids, one[:, :2])
        seen.append(tape.vectors)
    assert not torch.equal(one, other)
    # After layer 0 the first column has read forward, the second backward (3 layers: the highest reads as the first did).
    for column, changed in (("forward", [*range(3, 7)]), ("backward", [*range(4)])):
        a, b = (vectors[f"encoder.{column}.0.ff.input"][-1][0] for vectors in seen)
        assert ((a - b).abs() > 1e-9).any(-1).nonzero().flatten().tolist() == changed


def test_look_shows_the_experts_of_every_token(run: Path, tmp_path: Path) -> None:
    found = trace_experts(run, "the cat")
    assert [*found.layers] == ["decoder.1.ff", "decoder.2.ff", "decoder.3.ff"]
    package, _ = package_of(run)
    model: Any = package.model
    ids = torch.tensor([[*package.token_template.before, *package.tokenizers.target.encode("the cat")]])  # type: ignore[union-attr]
    with record(model, stream=True) as tape, torch.no_grad():
        model(ids)
    for index, k in ((2, 2), (3, 2)):
        router = model.decoder.blocks[index].sublayers["ff"].router.detach().double()
        logits = tape.vectors[f"decoder.{index}.ff.input"][-1][0].double() @ router.T
        weights = found.layers[f"decoder.{index}.ff"]
        assert weights.shape == logits.shape
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
        best = logits.topk(k).indices.sort(1).values
        chosen = [np.flatnonzero(row).tolist() for row in weights]
        clear = logits.topk(k + 1).values.diff(dim=1).abs().amin(1) > 1e-5  # ties may go either way
        assert all(mine == wanted for mine, wanted, sure in zip(chosen, best.tolist(), clear, strict=True) if sure)
    assert "decoder.3.ff" in str(found)
    assert found.loads["decoder.2.ff"] == (found.layers["decoder.2.ff"] > 0).sum(0).tolist()
    assert f"decoder.2.ff {' '.join(map(str, found.loads['decoder.2.ff']))}" in " ".join(str(found).split())
    found.save_csv(tmp_path / "experts.csv")
    with (tmp_path / "experts.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 3 * ids.shape[1]
    found.save(tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(found.numbers()))["decoder.2.ff"]["load"] == found.loads["decoder.2.ff"]

    curves = {panel.title: panel.curves for panel in read_training_curves([run]).panels()}
    assert "tokens of the busiest expert, 1 = even" in curves
