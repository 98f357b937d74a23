"""`regard cost`: what it accepts, and that it prints the numbers of models/analysis/cost.py."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from regard.cli.cost_commands import cost, parse_tokens
from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.inference.model_spec import config_of
from regard.models.analysis.cost import report_costs
from regard.models.architectures import PRESETS
from regard.terminal import format_bytes, format_count
from regard.text.tokenizer import Tokenizer, Tokenizers

RECIPE = """
[tokenizer]
vocab_size = 1200
[model]
preset = "transformer-tiny"
n_encoder_layers = 2
max_len = 128
"""


def call(*words: str, **settings: str) -> Result:
    app = typer.Typer()
    app.command()(cost)
    return CliRunner().invoke(app, words, obj={f"model.{name}": value for name, value in settings.items()})


def test_gpt3_prints_what_its_model_has() -> None:
    done = call("gpt3", "--tokens", "300B")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "gpt3 (gpt)"
    for line in (
        "embedding.weight 50,257 x 12,288 1 617,558,016",
        "head.weight (tied) 50,257 x 12,288 1 617,558,016",
        "trained 174,604,259,328",
        "active 174,563,733,504",
    ):
        assert line in lines
    assert any(line.endswith("49,152 x 12,288 96 57,982,058,496") for line in lines)
    # 3.229e23 FLOPs at 0.4 * 989e12 a second
    assert any(line.startswith("300,000,000,000 tokens 3.229e+23: 9,447.") for line in lines)


def test_awd_lstm_prints_its_cells_and_a_state_in_the_place_of_a_cache() -> None:
    lines = [" ".join(line.split()) for line in call("awd-lstm", "--length", "10000").stdout.splitlines()]
    for line in (
        "awd-lstm (rnn)",
        "recurrent.layers.*.forward_.weight_ih 4,600 x 400 1 1,840,000",
        "recurrent.layers.*.forward_.weight_hh 4,600 x 1,150 2 10,580,000",
        "trained 33,545,278",
        "state 21.6 kB a row of any length",
    ):
        assert line in lines
    assert not any(line.startswith("cache") for line in lines)


def test_rnnsearch_keeps_a_state_and_what_it_looks_at() -> None:
    out = " ".join(call("rnnsearch", "--length", "50").stdout.split())
    assert "state 4.0 kB a row of any length" in out
    assert "cache 12.0 kB a token, 600.0 kB for 1 x 50" in out  # 2 x (1,000 each way + 1,000 to compare + 3 x 1,000)
    assert "A token is one of the target with one of the source" in out


def test_json_holds_the_same_numbers_as_the_function() -> None:
    done = call("llama-7b", "--json", "--batch", "2", "--length", "100", "--tokens", "1e9", n_kv_heads="8")
    answer = json.loads(done.stdout)
    config, assumed = config_of("llama-7b", {"n_kv_heads": "8"})
    expected = {"model": "llama-7b", "assumed": assumed, **report_costs(config, 2, 100, 10**9)}
    assert answer == json.loads(json.dumps(expected))
    assert any(row["shape"] == [(32 + 2 * 8) * 128, 4096] for row in answer["parameters"]["rows"])
    assert answer["flops"]["training"] == pytest.approx(1e9 * answer["flops"]["training_per_token"])


def test_without_a_name_every_preset_is_listed() -> None:
    lines = call().stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*PRESETS]
    assert lines[-1] == "Where a vocabulary comes from the data, 8,000 pieces are counted."
    llama = next(line for line in lines if line.startswith("llama-7b "))
    assert llama.split() == ["llama-7b", "gpt", "32", "4,096", "32", "6,738,415,616"]
    assert next(line for line in lines if line.startswith("awd-lstm ")).split()[1:5] == ["rnn", "3", "400", "-"]
    assert len(json.loads(call("--json").stdout)["presets"]) == len(PRESETS)


def test_recipes_runs_and_model_folders_cost_the_same(tmp_path: Path) -> None:
    recipe, run, model = tmp_path / "small.toml", tmp_path / "run", tmp_path / "model"
    recipe.write_text(RECIPE)
    run.mkdir()
    model.mkdir()
    vocabularies = "source_vocab = 1200\ntarget_vocab = 1200\n"
    (run / "config.toml").write_text(RECIPE + vocabularies)
    sizes = {"preset": "transformer-tiny", "n_encoder_layers": 2, "max_len": 128}
    (model / "config.json").write_text(json.dumps({"model": {**sizes, "source_vocab": 1200, "target_vocab": 1200}}))
    config, assumed = config_of(str(recipe), {})
    assert assumed == {"source_vocab": 1200, "target_vocab": 1200}  # as many as the tokenizer may learn
    assert config_of(str(run), {}) == config_of(str(model), {}) == (config, {})
    assert config_of(str(recipe), {"n_encoder_layers": "5"})[0].n_encoder_layers == 5


def test_a_run_knows_its_vocabulary_before_it_is_finished(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(RECIPE)
    assert config_of(str(tmp_path), {})[1] == {"source_vocab": 1200, "target_vocab": 1200}  # what it may become
    source, target = (Tokenizer.train([text], TokenizerConfig(kind="char", vocab_size=99)) for text in ("abc", "defgh"))
    Tokenizers(source, target).save(tmp_path)
    config, assumed = config_of(str(tmp_path), {"tie": "none", "source_vocab": "77"})
    assert (config.source_vocab, config.target_vocab, assumed) == (77, len(target), {})


def test_a_finished_run_knows_all_that_its_data_said(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('task = "image-classification"\n[model]\npreset = "vit-tiny"\n')
    assert config_of(str(tmp_path), {})[1] == {"n_classes": 10}
    (tmp_path / "model").mkdir()
    told = {"source_vocab": 0, "target_vocab": 0, "n_classes": 3, "max_len": 50}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model": told}))
    config, assumed = config_of(str(tmp_path), {})
    assert (config.n_classes, config.max_len, assumed) == (3, 50, {})
    assert config_of(str(tmp_path), {"max_len": "17"})[0].max_len == 17


def test_a_recipe_that_asks_for_answers_costs_their_head(tmp_path: Path) -> None:
    path = tmp_path / "tags.toml"
    path.write_text('task = "tagging"\n[model]\npreset = "bert-tiny"\n')
    assert config_of(str(path), {})[0].prediction_head == "token"


def test_a_recipe_has_the_style_of_its_preset(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text('[model]\npreset = "llama-7b"\nn_decoder_layers = 2\n')
    config, assumed = config_of(str(path), {})
    assert (config.feedforward, config.norm_kind, config.n_decoder_layers, assumed) == (("gated",), "rms", 2, {})


def test_what_data_would_tell_is_assumed_and_said() -> None:
    out = call("bert-tiny", prediction_head="sequence").stdout
    assert "model.source_vocab comes from the data: 8,000 assumed" in out
    assert "model.n_classes comes from the data: 10 assumed" in out
    assert "assumed" not in call("bert-tiny", source_vocab="77").stdout


@pytest.mark.parametrize(
    ("text", "number"),
    [("300e9", 300 * 10**9), ("300B", 300 * 10**9), ("1.4T", 14 * 10**11), ("20m", 2 * 10**7), ("5,000", 5000)],
)
def test_tokens_are_read_as_people_write_them(text: str, number: int) -> None:
    assert parse_tokens(text) == number


@pytest.mark.parametrize("text", ["", "many", "0", "-5", "3X", "1e", "1e999", "nan", "inf", "B"])
def test_other_tokens_are_refused(text: str) -> None:
    with pytest.raises(RegardError, match="--tokens is a number"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (7, "7 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (327_680, "327.7 kB"),
        (3 * 10**12, "3.0 TB"),
        (4 * 10**15, "4,000.0 TB"),
    ],
)
def test_bytes_are_written_in_a_unit_that_suits_them(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0"), (999, "999"), (20480, "20.48 k"), (79_047_426_048, "79.05 G"), (10**19, "1e+04 P")]
)
def test_flops_have_four_digits_and_a_unit(n: int, text: str) -> None:
    assert format_count(n) == text


@pytest.mark.parametrize(
    ("name", "settings", "batch", "length", "message"),
    [
        (None, {"d_model": "8"}, 1, None, "belong to a model"),
        ("gpt33", {}, 1, None, "no preset, recipe"),
        ("absent.toml", {}, 1, None, "no recipe at"),
        ("gpt-tiny", {"d_modle": "8"}, 1, None, "unknown setting"),
        ("gpt-tiny", {"n_kv_heads": "3"}, 1, None, "evenly"),
        ("gpt-tiny", {}, 0, None, "--batch 0"),
        ("gpt-tiny", {}, 1, 0, "--length 0"),
        ("awd-lstm", {}, 1, 0, "--length 0 from 1 on"),
        ("rnnsearch", {}, 1, 1025, "model.max_len 1024"),
        ("gpt-tiny", {}, 1, 1025, "model.max_len 1024"),
    ],
)
def test_what_has_no_cost_is_refused(
    name: str | None, settings: dict[str, str], batch: int, length: int | None, message: str
) -> None:
    words = [
        *([name] if name else []),
        "--batch",
        str(batch),
        *(["--length", str(length)] if length is not None else []),
    ]
    with pytest.raises(RegardError, match=message):
        raise call(*words, **settings).exception or AssertionError("nothing was refused")
