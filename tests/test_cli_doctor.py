"""Which kernel each attention layer gets: rows written by hand from the rules, for devices that are not here too."""

import json
from pathlib import Path

import pytest
from configured import SCHEMES

from regard.cli.doctor_commands import explain
from regard.errors import RegardError
from regard.models.analysis.kernel_report import KernelChoice, format_choices

PLAIN = {"none", "linear", "sinusoidal", "learned", "rope", "yarn"}  # nothing is added to the scores
CONTEXTUAL = {"shaw", "cope"}


def brief(rows: list[KernelChoice]) -> list[tuple[str, str, str, str, bool]]:
    return [(row.layer, row.positions, row.when, row.kernel, row.fast) for row in rows]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A translation model with two encoder blocks and one decoder block."""
    path = tmp_path / "small.toml"
    sizes = 'preset = "transformer-small"\nn_encoder_layers = 2\nn_decoder_layers = 1\nmax_len = 512\n'
    path.write_text(f"[model]\n{sizes}")
    return path


def test_a_plain_translation_model_is_fused_everywhere(recipe: Path) -> None:
    assert brief(explain(recipe, {}, "cuda")) == [
        ("encoder.0-1.self", "sinusoidal", "training, 512 tokens", "sdpa", True),
        ("encoder.0-1.self", "sinusoidal", "reading a source", "sdpa", True),
        ("decoder.0.self", "sinusoidal", "training, 512 tokens", "sdpa", True),
        ("decoder.0.self", "sinusoidal", "decoding a token", "sdpa", True),
        ("decoder.0.cross", "none", "training, 512 tokens", "sdpa", True),
        ("decoder.0.cross", "none", "decoding a token", "sdpa", True),
    ]


def test_short_rows_are_one_tile_in_training_alone(recipe: Path) -> None:
    kernels = {
        (row.layer, row.when): row.kernel for row in explain(recipe, {"model.attention_dropout": "0.1"}, "cuda", 128)
    }
    assert len(kernels) == 6
    for (layer, when), kernel in kernels.items():
        assert kernel == ("short" if when.startswith("training") else "sdpa"), (layer, when)


def test_each_place_is_explained_by_its_own_scheme_and_mask(recipe: Path) -> None:
    settings = {"model.positions": "cope", "model.encoder_positions": "t5", "model.cross_positions": "alibi"}
    assert brief(explain(recipe, settings, "cuda:1", 300)) == [
        ("encoder.0-1.self", "t5", "training, 300 tokens", "toeplitz", True),
        ("encoder.0-1.self", "t5", "reading a source", "toeplitz", True),
        ("decoder.0.self", "cope", "training, 300 tokens", "reference", False),
        ("decoder.0.self", "cope", "decoding a token", "reference", False),
        ("decoder.0.cross", "alibi", "training, 300 tokens", "sdpa", False),
        ("decoder.0.cross", "alibi", "decoding a token", "sdpa", True),
    ]


def test_dropout_on_weights_slows_training_alone(recipe: Path) -> None:
    settings = {"model.positions": "t5", "model.attention_dropout": "0.1"}
    training, reading, *_ = explain(recipe, settings, "cuda")
    assert (training.kernel, training.fast) == ("sdpa", False)
    assert "dropout" in training.why
    assert (reading.kernel, reading.fast) == ("toeplitz", True)


def test_dropout_of_what_sublayers_give_slows_nothing(recipe: Path) -> None:
    training, *_ = explain(recipe, {"model.positions": "t5", "model.dropout": "0.1"}, "cuda")
    assert (training.kernel, training.fast) == ("toeplitz", True)


def test_without_a_model_every_scheme_of_a_causal_decoder_is_listed() -> None:
    rows = explain(None, {}, "cuda")
    when = ("training, 4096 tokens", "decoding a token")
    assert sorted((row.positions, row.when) for row in rows) == sorted((name, w) for name in SCHEMES for w in when)
    assert {row.layer for row in rows} == {"decoder.0-5.self"}
    for row in rows:
        training = "sdpa" if row.positions in PLAIN else "toeplitz"
        usual = training if row.when.startswith("training") else "sdpa"
        assert row.kernel == ("reference" if row.positions in CONTEXTUAL else usual)
        assert row.fast == (row.positions not in CONTEXTUAL)
    assert all("cache" in row.why for row in rows[1::2] if row.positions not in PLAIN | CONTEXTUAL)


def test_settings_narrow_and_change_the_table() -> None:
    windowed = explain(
        None, {"model.positions": "rope", "model.attention.window": "256", "model.n_decoder_layers": 1}, "cuda"
    )
    assert [(row.layer, row.positions, row.kernel) for row in windowed] == [
        ("decoder.0.self", "rope", "flex"),
        ("decoder.0.self", "rope", "sdpa"),
    ]
    assert "255 back" in windowed[0].why
    odd = explain(None, {"model.positions": "fire", "model.d_head": "48"}, "cuda")[0]
    assert (odd.kernel, odd.fast) == ("sdpa", False)
    assert {row.kernel for row in explain(None, {}, "cpu")} == {"sdpa", "reference"}
    assert explain(None, {"model.positions": "alibi"}, "cuda", 127)[0].kernel == "sdpa"


def test_runs_and_model_folders_are_read_like_recipes(recipe: Path, tmp_path: Path) -> None:
    expected = explain(recipe, {}, "cpu")
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (run / "config.toml").write_text(recipe.read_text())
    sizes = {"preset": "transformer-small", "n_encoder_layers": 2, "n_decoder_layers": 1, "max_len": 512}
    (model / "config.json").write_text(json.dumps({"model": sizes}))
    assert explain(run, {}, "cpu") == explain(model, {}, "cpu") == expected


def written(path: Path, preset: str, **settings: str) -> Path:
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    path.write_text(f'[model]\npreset = "{preset}"\nmax_len = 64\n{lines}')
    return path


def kernels(rows: list[KernelChoice]) -> list[tuple[str, str, str, bool]]:
    return [(row.layer, row.when, row.kernel, row.fast) for row in rows]


def test_recurrent_layers_are_fused_or_go_step_by_step(tmp_path: Path) -> None:
    search = explain(written(tmp_path / "a.toml", "rnnsearch-small", n_decoder_layers="3"), {}, "cuda")
    assert kernels(search) == [
        ("encoder.0", "training, 64 tokens", "fused", True),
        ("encoder.0", "reading a source", "fused", True),
        ("decoder.0", "training, 64 tokens", "scan", False),
        ("decoder.0", "decoding a token", "step", True),
        ("decoder.1-2", "training, 64 tokens", "fused", True),
        ("decoder.1-2", "decoding a token", "step", True),
    ]
    one = explain(written(tmp_path / "b.toml", "sutskever-small", cell='"mut2"'), {}, "cpu")
    assert {(row.layer, row.kernel) for row in one} == {
        ("encoder.0-1", "scan"),
        ("decoder.0-1", "scan"),
        ("decoder.0-1", "step"),
    }
    assert "no fused kernel for MUT2" in one[0].why


def test_where_padding_must_be_told_a_plain_cell_goes_step_by_step(tmp_path: Path) -> None:
    recipe = written(tmp_path / "a.toml", "lstm-small", cell='"rnn"')
    assert explain(recipe, {}, "cpu")[0].kernel == "fused"
    recipe.write_text('task = "classification"\n' + recipe.read_text() + "[model.recurrent]\nbidirectional = true\n")
    rows = explain(recipe, {}, "cpu")
    assert [(row.layer, row.when, row.kernel) for row in rows] == [
        ("recurrent.0-1", "training, 64 tokens", "scan"),
        ("recurrent.0-1", "reading a source", "scan"),
    ]
    assert "padding" in rows[0].why


def test_a_convolution_is_no_attention(tmp_path: Path) -> None:
    rows = explain(written(tmp_path / "a.toml", "convs2s-small"), {}, "cpu")
    assert {row.kernel for row in rows if row.layer.endswith("self")} == {"product"}
    assert {row.kernel for row in rows if row.layer.endswith("cross")} == {"sdpa"}


def test_the_table_marks_what_is_not_fast() -> None:
    rows = [
        KernelChoice("decoder.0-5.self", "alibi", "training, 8 tokens", "toeplitz", "inside", fast=True),
        KernelChoice("decoder.0.self", "cope", "decoding a token", "reference", "looks at queries", fast=False),
    ]
    assert format_choices(rows).splitlines() == [
        "  layer             positions  when                kernel     why",
        "  decoder.0-5.self  alibi      training, 8 tokens  toeplitz   inside",
        "! decoder.0.self    cope       decoding a token    reference  looks at queries",
        "! not on the fast path",
    ]
    assert "!" not in format_choices(rows[:1])


@pytest.mark.parametrize(
    ("target", "settings", "device", "length", "message"),
    [
        (None, {}, "tpu", None, "unknown device 'tpu'"),
        (None, {}, "cpu", 0, "--length"),
        (None, {"model.preset": "transformer-base"}, "cpu", None, "gpt-tiny"),
        (None, {"model.positionz": "rope"}, "cpu", None, "did you mean 'model.positions'"),
        ("small.toml", {"model.positions": "none"}, "cpu", None, "bag of tokens"),
        ("absent.toml", {}, "cpu", None, "no recipe at"),
        ("absent", {}, "cpu", None, "no model at"),
        ("broken", {}, "cpu", None, "not a model's configuration"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    recipe: Path, target: str | None, settings: dict[str, str], device: str, length: int | None, message: str
) -> None:
    (recipe.parent / "broken").mkdir()
    (recipe.parent / "broken" / "config.json").write_text("{}")
    with pytest.raises(RegardError, match=message):
        explain(recipe.parent / target if target else None, settings, device, length)
