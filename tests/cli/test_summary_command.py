"""`regard summary`: what it accepts, what it prints, and that a folder's model is loaded and run."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from regard import model_folder
from regard.cli.cost_commands import summary
from regard.config import TokenizerConfig
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES = {"n_encoder_layers": 2, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 64}


def call(*words: str, **settings: str) -> Result:
    app = typer.Typer()
    app.command()(summary)
    return CliRunner().invoke(app, words, obj={f"model.{name}": value for name, value in settings.items()})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a finished model, whose recipe does not know how large its vocabulary became."""
    tokenizer = Tokenizer.train(["I ate an apple."], TokenizerConfig(kind="char", vocab_size=50))
    n = len(tokenizer)
    model = make_model(preset("transformer-tiny", source_vocab=n, target_vocab=n, **SIZES))
    model_folder.save(
        tmp_path / "model", model_folder.ModelPackage(model, Tokenizers(tokenizer, tokenizer), "translation"), ""
    )
    sizes = "\n".join(f"{name} = {value}" for name, value in SIZES.items())
    (tmp_path / "config.toml").write_text(f'[model]\npreset = "transformer-tiny"\n{sizes}\n')
    return tmp_path


def test_a_run_is_shown_block_by_block(run: Path) -> None:
    done = call(str(run), "--length", "5", "--source-length", "7")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    n = len(Tokenizer.load(run / "model" / "tokenizer.json"))
    block = 4 * 16 * 16 + 4 * 16 + 2 * 16 * 32 + 32 + 16 + 4 * 16  # attention, feed-forward, two norms
    flops = 7 * 2 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 7 * 7 * 16
    assert lines[0].endswith("(transformer), 1 x 7 and 5 tokens")
    assert lines[2] == "layer output parameters FLOPs weights"
    assert lines[3].startswith(f"source_embedding 1 x 5 x 16 {n * 16} 0 ")
    assert lines[4].startswith(f"encoder.blocks.0 1 x 7 x 16 {block:,} {flops / 1000:.4g} k ")
    assert [line.split()[0] for line in lines[4:9]] == [
        "encoder.blocks.0",
        "encoder.blocks.1",
        "encoder.norm",
        "decoder.blocks.0",
        "decoder.norm",
    ]
    assert lines[9].startswith("head (tied) ")
    assert "assumed" not in done.stdout


def test_json_has_every_number(run: Path) -> None:
    found = json.loads(call(str(run), "--json", "--depth", "3", "--batch", "2", "--length", "5").stdout)
    assert (found["batch"], found["source_length"], found["target_length"]) == (2, 5, 5)
    line = next(
        line for line in found["lines"] if line["name"].startswith("decoder.blocks.0.") and line["name"].endswith("ff")
    )
    assert line["output"] == [2, 5, 16]
    assert line["flops"] == 20480  # 2 x 5 tokens, 2 x 2 x 16 x 32
    loaded = model_folder.load(run, torch.device("cpu")).model
    assert found["total"]["parameters"] == sum(p.numel() for p in loaded.parameters())


def test_settings_are_tried_without_the_weights(run: Path) -> None:
    (run / "model" / "model.safetensors").unlink()
    done = call(str(run), "--length", "5", n_encoder_layers="4")
    assert "encoder.blocks.3" in done.stdout
    assert "assumed" not in done.stdout  # the finished model knows its vocabulary


def test_presets_have_no_weights_to_load() -> None:
    done = call("gpt2", "--depth", "1", "--length", "16")
    total = next(line for line in done.stdout.splitlines() if line.startswith("total"))
    assert total.split()[1] == "124,439,808"


def test_what_data_would_tell_is_assumed_and_said() -> None:
    assert "model.target_vocab comes from the data: 8,000 assumed" in call("gpt-tiny", "--length", "4").stdout


def test_damaged_weights_are_not_summed_up(run: Path) -> None:
    (run / "model" / "model.safetensors").write_bytes(b"nothing")
    assert "damaged" in str(call(str(run)).exception)
