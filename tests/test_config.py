"""Settings: TOML, overrides, and errors that name the nearest valid key."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.config import Config, ModelConfig, TrainConfig, recipes
from regard.config.recipes import build, differences, every_setting, override, to_toml
from regard.errors import RegardError


def test_defaults_survive_toml() -> None:
    assert build(tomllib.loads(to_toml(Config())), Config) == Config()


@given(
    st.builds(
        TrainConfig,
        steps=st.integers(1, 10**9),
        lr=st.floats(1e-8, 10, allow_nan=False),
        schedule=st.sampled_from(["cosine", "linear"]),
        compile=st.booleans(),
    ),
    st.lists(
        st.text(alphabet=st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(lambda s: "," not in s)
    ),
)
def test_any_configuration_survives_toml(train: TrainConfig, corpora: list[str]) -> None:
    config = dataclasses.replace(Config(), train=train, data=dataclasses.replace(Config().data, train=tuple(corpora)))
    assert build(tomllib.loads(to_toml(config)), Config) == config


def test_overrides_are_cast_to_the_declared_type() -> None:
    words = {
        "train.steps": "2e3",
        "train.lr": "1",
        "train.compile": "false",
        "data.train": "a.tsv,b.tsv",
        "model.norm": "post",
    }
    config = build(override({"train": {"warmup": 7}}, words), Config)
    assert (config.train.steps, config.train.lr, config.train.compile) == (2000, 1.0, False)
    assert isinstance(config.train.lr, float)
    assert config.train.warmup == 7
    assert config.data.train == ("a.tsv", "b.tsv")
    assert config.model.norm == "post"


def test_a_single_corpus_may_be_a_plain_string() -> None:
    assert build({"data": {"train": "x.{lang}"}}, Config).data.train == ("x.{lang}",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"stepz": 3}}, "unknown setting 'train.stepz': did you mean 'train.steps'?"),
        ({"model": {"steps": 3}}, "unknown setting 'model.steps': did you mean 'train.steps'?"),
        ({"modle": {"norm": "pre"}}, "unknown table [modle]: did you mean [model]?"),
        ({"train": {"steps": 1.5}}, "'train.steps' must be of type int, not 1.5"),
        ({"train": {"steps": "many"}}, "'train.steps' must be of type int, not 'many'"),
        ({"train": {"steps": True}}, "'train.steps' must be of type int, not True"),
        ({"train": {"compile": "yes"}}, "'train.compile' must be of type bool"),
        (
            {"train": {"schedule": "cosin"}},
            "'train.schedule' must be one of inverse-sqrt, cosine, linear, constant, not 'cosin'",
        ),
        ({"train": {"log_every": 0}}, "'train.log_every' must be a number from 1 up, not 0"),
        ({"train": {"beta1": 1.0}}, "'train.beta1' must be from 0 to below 1, not 1.0"),
        ({"train": {"lr": -1.0}}, "'train.lr' must be above 0, not -1.0"),
        ({"train": {"lr": "nan"}}, "'train.lr' must be above 0, not 'nan'"),
        ({"train": 3}, "'train' must be of type TrainConfig, not 3"),
        ({"name": 3}, "'name' must be of type str, not 3"),
        ({"train": {"lr": "nan?"}}, "'train.lr' must be of type float"),
    ],
)
def test_bad_settings_are_named(values: dict, message: str) -> None:
    with pytest.raises(RegardError) as error:
        build(values, Config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_override_below_a_plain_value_is_an_unknown_setting() -> None:
    with pytest.raises(RegardError, match=r"unknown setting 'name\.x'"):
        override({"name": "a"}, {"name.x": "1"})


def test_every_setting_has_help_and_a_dotted_name() -> None:
    rows = list(every_setting())
    assert ("train.steps", 10000, "optimizer steps") in rows
    assert all(help for _, _, help in rows)
    assert len({name for name, _, _ in rows}) == len(rows)
    assert {"model.positions", "model.yarn.factor", "model.vit.patch_size"} <= {name for name, _, _ in rows}


def test_differences_names_what_changed() -> None:
    other = dataclasses.replace(Config(), model=ModelConfig(dropout=0.2), train=TrainConfig(steps=1))
    assert differences(Config(), other) == ["model.dropout", "train.steps"]
    assert differences(Config(), Config()) == []


def test_a_recipe_takes_its_name_from_its_file(tmp_path) -> None:
    path = tmp_path / "my-run.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert build(recipes.load(path), Config).name == "my-run"


@pytest.mark.parametrize("content", [b"[train\n", b"\xff\xfe", b"a = "])
def test_broken_recipes_are_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(RegardError, match=r"cannot read the recipe .*broken\.toml"):
        recipes.load(path)


def test_a_missing_recipe_is_named(tmp_path) -> None:
    with pytest.raises(RegardError, match="no recipe at"):
        recipes.load(tmp_path / "none.toml")
