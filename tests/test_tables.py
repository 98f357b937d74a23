"""The registry of parts, and the tables of settings that exist where a part is chosen."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import model_folder
from regard.cli import settings_listing
from regard.config import Config, ModelConfig, RecurrentSettings
from regard.config.recipes import (
    MODEL_DEFAULTS,
    build,
    changed_settings,
    differences,
    every_setting,
    merge_tables,
    to_dict,
    to_toml,
)
from regard.config.registry import PARTS, TABLES, chosen_tables, help_of, register, register_table, setting, unregister
from regard.errors import RegardError
from regard.layers.part import NoSettings, Part
from regard.layers.positions.relative import Relative
from regard.layers.positions.scheme import PositionScheme
from regard.models.architectures import PRESETS, make_model, preset, resolve, with_preset
from regard.models.presets import TABLES as PRESET_TABLES
from regard.tasks.run_config import make_config

# ---- where a table exists --------------------------------------------------------------------------------------------


def test_a_table_exists_where_its_part_is_chosen() -> None:
    for field in ("positions", "encoder_positions"):
        config = resolve(preset("transformer-tiny", **{field: "yarn", "yarn.factor": "4"}))
        assert config.value("yarn.factor") == 4.0
    config = preset("transformer-tiny", cross_positions="alibi", alibi={"max_exponent": 4})
    assert config.value("alibi.max_exponent") == 4.0
    assert type(config.value("alibi.max_exponent")) is float


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "gpt-tiny",
            {"yarn": {"factor": 4}},
            r"\[model\.yarn\] .*: choose model\.positions yarn to use it, or leave it out",
        ),
        ("gpt-tiny", {"convolution": {"kernel": 5}}, r"\[model\.convolution\] .*choose model\.mixer convolution"),
        ("conv-lm", {"attention": {"window": 5}}, r"\[model\.attention\] .*choose model\.mixer attention"),
        ("gpt-tiny", {"recurrent": {"norm": True}}, r"\[model\.recurrent\] .*rnn, seq2seq models, and this is a gpt"),
        ("gpt-tiny", {"vit": {}}, r"\[model\.vit\] .*it is for vit models, and this is a gpt; leave it out"),
        (
            "lstm-small",
            {"rope": {"base": 3}},
            r"\[model\.rope\] .*transformer, gpt, bert, vit models, and this is a rnn",
        ),
        ("lstm-small", {"seq2seq": {"reverse_source": True}}, r"\[model\.seq2seq\] .*it is for seq2seq models"),
        (
            "gpt-tiny",
            {"positions": "yarn", "yarn": {"facter": 4}},
            r"'model\.yarn\.facter': did you mean 'model\.yarn\.factor'",
        ),
        (
            "gpt-tiny",
            {"positions": "yarn", "yarm": {"factor": 4}},
            r"unknown setting 'model\.yarm': did you mean 'model\.yarn'",
        ),
        ("gpt-tiny", {"positions": "yarn", "yarn": 4}, r"'model\.yarn' is a table of settings, \[model\.yarn\], not 4"),
        (
            "gpt-tiny",
            {"positions": "yarm"},
            r"'model\.positions' must be one of .*\(did you mean 'yarn'\?\), not 'yarm'",
        ),
        (
            "gpt-tiny",
            {"mixer": ["attention", "convolutoin"]},
            r"'model\.mixer' must be one of .*did you mean 'convolution'",
        ),
        ("gpt-tiny", {"mixer": []}, r"model\.mixer names no part"),
        (
            "gpt-tiny",
            {"positions": "yarn", "yarn": {"factor": 0.5}},
            r"'model\.yarn\.factor' must be a number from 1 up",
        ),
        (
            "conv-lm",
            {"convolution": {"dilations": [1, 0]}},
            r"'model\.convolution\.dilations' must be of numbers, each",
        ),
        ("gpt-tiny", {"rope_factor": 4}, r"unknown setting 'model\.rope_factor': did you mean 'model\.rope\.factor'"),
        ("gpt-tiny", {"window": 4}, r"unknown setting 'model\.window': did you mean 'model\.attention\.window'"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message) as error:
        resolve(preset(name, target_vocab=9, **settings))
    assert "\n" not in str(error.value)


def test_a_misspelt_setting_of_a_part_on_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text('task = "causal-lm"\n[model]\npreset = "gpt-tiny"\npositions = "yarn"\n')
    with pytest.raises(RegardError, match=r"unknown setting 'model\.yarn\.facter': did you mean 'model\.yarn\.factor'"):
        regard.train(recipe, tmp_path / "run", settings={"model.yarn.facter": "4"})
    assert not (tmp_path / "run").exists()


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_a_table_that_only_the_preset_has_is_dropped_with_its_part() -> None:
    assert preset("llama3-8b").value("rope.base") == 500000.0
    config = resolve(preset("llama3-8b", positions="alibi"))
    assert sorted(config.parts) == ["alibi", "attention"]
    assert "convolution" not in resolve(preset("bytenet-small", mixer="attention", d_ff=8)).parts


def test_tables_are_merged_setting_by_setting() -> None:
    config = preset("awd-lstm", recurrent={"d_hidden": 8})
    assert config.table(RecurrentSettings) == RecurrentSettings(8, False, False, True, 0.2, 0.4, 0.5, 0.1)
    assert PRESETS["awd-lstm"]["recurrent"]["d_hidden"] == 1150


def test_an_override_of_the_choice_takes_the_recipes_table_with_it() -> None:
    recipe = {"task": "causal-lm", "model": {"preset": "gpt-tiny", "positions": "rope", "rope": {"base": 50.0}}}
    assert make_config(recipe, {"model.rope.factor": 1.0}).model.value("rope.base") == 50.0
    assert "rope" not in make_config(recipe, {"model.positions": "alibi"}).model.parts
    wrong = {"task": "causal-lm", "model": {"preset": "gpt-tiny", "rope": {"base": 50.0}}}
    for overrides in ({}, {"model.positions": "alibi"}):
        with pytest.raises(RegardError, match=r"choose model\.positions rope to use it"):
            make_config(wrong, overrides)
    assert make_config(wrong, {"model.positions": "rope"}).model.value("rope.base") == 50.0


def test_over_keeps_what_both_say() -> None:
    base = {"architecture": "gpt", "positions": "rope", "rope": {"base": 5.0, "factor": 2.0}}
    assert merge_tables(base, {"rope": {"base": 7.0}})["rope"] == {"base": 7.0, "factor": 2.0}
    assert "rope" not in merge_tables(base, {"positions": "alibi"})
    assert merge_tables(base, {"positions": "alibi", "rope": {"base": 7.0}})["rope"]["base"] == 7.0  # build refuses it


# ---- out and in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_resolved_preset_survives_toml_and_json(name: str) -> None:
    config = Config(model=resolve(preset(name)))
    assert build(tomllib.loads(to_toml(config)), Config) == config
    again = build(json.loads(json.dumps(to_dict(config.model))), ModelConfig, "model.")
    assert again == config.model
    assert hash(again) == hash(config.model)


def test_configurations_are_keys_and_compared_with_their_tables() -> None:
    a, b, c = (resolve(preset("gpt-tiny", positions="yarn", yarn={"factor": f})) for f in (2.0, 2, 3))
    assert a == b != c
    assert len({a: 1, b: 2, c: 3}) == 2
    assert differences(Config(model=a), Config(model=c)) == ["model.yarn.factor"]
    rope = changed_settings(a, positions="rope")
    named = differences(Config(model=a), Config(model=resolve(rope)))
    assert {"model.positions", "model.yarn.factor", "model.rope.base"} <= set(named)
    with pytest.raises(TypeError):
        a.parts["yarn"] = 3  # type: ignore[index]


def test_a_model_folder_keeps_the_tables(tmp_path: Path) -> None:
    model = make_model(preset("gpt-tiny", n_decoder_layers=1, target_vocab=9, positions="yarn", **{"yarn.factor": 4}))
    model_folder.save(tmp_path / "model", model_folder.ModelPackage(model, None, "causal-lm"), "")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())["model"]
    assert saved["yarn"]["factor"] == 4.0
    assert "rope" not in saved
    assert model_folder.load(tmp_path / "model", torch.device("cpu")).config == model.config


def test_a_flat_file_of_old_is_refused(tmp_path: Path) -> None:
    model = make_model(preset("gpt-tiny", n_decoder_layers=1, target_vocab=9))
    model_folder.save(tmp_path / "model", model_folder.ModelPackage(model, None, "causal-lm"), "")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "format": 1}))
    with pytest.raises(RegardError, match=r"format 1 .*this Regard reads format 3"):
        model_folder.read_config(tmp_path / "model")


# ---- several mixers --------------------------------------------------------------------------------------------------


def test_mixers_are_a_list_or_one_name() -> None:
    assert preset("gpt-tiny", mixer="convolution").mixer == ("convolution",)
    assert preset("gpt-tiny", mixer=["convolution", "attention"]).mixer == ("convolution", "attention")
    both = resolve(preset("gpt-tiny", mixer="convolution,attention", target_vocab=9))
    assert {"convolution", "attention"} <= set(both.parts)


# ---- the registry ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plain() -> Iterator[list[tuple[str, str]]]:
    """Remove the parts that a test registers."""
    before = {kind: set(parts) for kind, parts in PARTS.items()}
    yield []
    for kind, parts in PARTS.items():
        for name in set(parts) - before[kind]:
            unregister(kind, name)


@pytest.mark.usefixtures("plain")
def test_a_part_of_a_test_has_settings_help_and_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    @register("slope")
    class Slope(Relative):
        """A bias that falls with distance (et al. and all), s . d. It is the same for all heads."""

        @dataclass(frozen=True)
        class Settings:
            slope: float = setting(0.1, "how fast the bias falls", above=0)

        def __init__(self, settings: Any, config: ModelConfig, place: Any) -> None:
            super().__init__(settings, config, place)
            self.slope, self.heads = settings.slope, config.n_heads

        def bias_at(self, distance: torch.Tensor) -> torch.Tensor:
            return (-self.slope * distance.abs().float()).expand(self.heads, *distance.shape)

    sizes: dict[str, Any] = {"n_decoder_layers": 1, "target_vocab": 9, "d_model": 8, "n_heads": 2}
    model = make_model(preset("gpt-tiny", positions="slope", **{"slope.slope": "0.5"}, **sizes))
    assert model.decoder.schemes[0].slope == 0.5
    assert model(torch.tensor([[5, 6, 7]])).shape == (1, 3, 9)
    with pytest.raises(RegardError, match=r"'model\.slope\.slop': did you mean 'model\.slope\.slope'"):
        preset("gpt-tiny", positions="slope", **{"slope.slop": "0.5"})
    settings_listing.print_settings("slope")
    shown = capsys.readouterr().out
    assert "slope         A bias that falls with distance (et al. and all), s . d\n" in shown
    assert "model.slope.slope" in shown


@pytest.mark.usefixtures("plain")
def test_names_that_are_taken_are_refused() -> None:
    @dataclass(frozen=True)
    class Own:
        x: int = setting(1, "a number")

    def part(kind: type[Part], settings: type) -> Any:
        return type("Made", (kind,), {"Settings": settings, "embed": lambda self, x, positions: x})

    with pytest.raises(RegardError, match="two parts of kind positions are called 'rope'"):
        register("rope")(part(PositionScheme, NoSettings))
    with pytest.raises(RegardError, match=r"two tables of settings would be called \[model\.vit\]"):
        register("vit")(part(PositionScheme, Own))
    with pytest.raises(RegardError, match=r"cannot be told from the setting model\.d_model"):
        register("d_model")(part(PositionScheme, Own))
    with pytest.raises(RegardError, match=r"\[model\.yarn\]"):
        register_table("yarn", ("gpt",))(Own)
    register("gated")(part(PositionScheme, NoSettings))  # no settings: names may be shared by kinds
    assert "d_model" not in TABLES


def test_every_part_has_help_and_every_setting_too() -> None:
    for kind, parts in PARTS.items():
        for name, part in parts.items():
            assert len(help_of(part)) > 8, (kind, name)
            assert part.kind == kind
    assert all(help for _, _, help in every_setting())
    assert all(dataclasses.fields(table.settings) for table in TABLES.values())


def test_presets_name_parts_that_there_are_and_tables_that_they_have() -> None:
    for table in PRESET_TABLES.values():
        for name, settings in table.items():
            full = {**MODEL_DEFAULTS, **with_preset({"preset": name})}
            assert (settings.keys() & TABLES.keys()) <= set(chosen_tables(full)), name


def test_settings_are_listed_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    settings_listing.print_settings("")
    shown = capsys.readouterr().out
    assert "\nposition schemes (model.positions, model.encoder_positions, model.cross_positions)\n" in shown
    assert shown.index("model.yarn.factor") < shown.index("token mixers") < shown.index("model.attention.window")
    assert "[model.recurrent] Layers of recurrent cells (rnn, seq2seq)" in shown
    settings_listing.print_settings("train")
    assert all(line.startswith("train.") for line in capsys.readouterr().out.splitlines())
    with pytest.raises(RegardError, match="no section, part or table 'yarm': did you mean 'yarn'"):
        settings_listing.print_settings("yarm")


def test_the_declarations_import_no_torch() -> None:
    code = "import sys, regard.config, regard.config.recipes, regard.config.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
