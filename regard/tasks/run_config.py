"""The complete configuration of a run: a recipe with overrides, over its preset or its initial model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from regard.config import Config, RewardConfig, TrainConfig, recipes
from regard.data.parallel_corpus import parse_weight
from regard.errors import RegardError
from regard.models.architectures import architecture_of, resolve, with_preset
from regard.models.model import names_where
from regard.pretrained import resolve_name

# What model.prediction_head is for a task.
PREDICTION_HEADS = {"classification": "sequence", "regression": "sequence", "tagging": "token"}
DEFAULT_SENTINELS = {"span-corruption": 100}  # what tokenizer.n_sentinels is for a task where the recipe has none


def make_config(values: dict[str, Any], dotted: Mapping[str, Any]) -> Config:
    """Return the checked configuration of a recipe with overrides; model settings come from its preset or initial model."""
    recipes.check_names(dotted)
    config = recipes.build({**recipes.override(values, dotted), "model": model_settings(values, dotted)}, Config)
    if config.train.auxiliary and config.task not in ("classification", "tagging"):
        raise RegardError(f"train.auxiliary is for classification and tagging, not for {config.task}: leave it out")
    check_recurrent_settings(config)
    check_objective(config)
    check_sampling(config)
    if config.tokenizer.positional_unknown and config.task != "translation":
        raise RegardError(f"tokenizer.positional_unknown is for translation, and this is {config.task}: leave it out")
    if config.model.tie == "all" and not config.tokenizer.joint:
        raise RegardError("model.tie 'all' needs one vocabulary: set tokenizer.joint true, or model.tie decoder")
    data = replace(config.data, root=str(Path(config.data.root).absolute()))
    train = replace(
        config.train,
        init_from=_absolute_path(config.train.init_from),
        pretrained_embeddings=_absolute_path(config.train.pretrained_embeddings),
    )
    words = config.decode.unknown_dictionary
    decode = replace(config.decode, unknown_dictionary=str(Path(words).absolute()) if words else "")
    n_sentinels = config.tokenizer.n_sentinels or DEFAULT_SENTINELS.get(config.task, 0)
    tokenizer = replace(config.tokenizer, n_sentinels=n_sentinels)
    # Vocabulary and classes are those of the data, whatever the recipe or the initial model says.
    head = PREDICTION_HEADS.get(config.task, "none")
    fresh = replace(config.model, source_vocab=0, target_vocab=0, prediction_head=head, n_classes=1)
    return replace(config, data=data, train=train, tokenizer=tokenizer, decode=decode, model=resolve(fresh))


def recipe_warnings(config: Config) -> list[str]:
    """Return warnings about settings that cannot do what they say, though the run can go ahead."""
    found, train, data = [], config.train, config.data
    if train.warmup >= train.steps:
        found.append(
            f"train.warmup {train.warmup:,} is as long as the run (train.steps {train.steps:,}): the learning rate rises to "
            f"the end, and reaches only {train.lr * train.steps / max(1, train.warmup):.2g} instead of train.lr {train.lr:g}"
        )
    saved = train.steps // train.save_every
    if train.average > max(1, saved):
        found.append(
            f"train.average {train.average} wants as many checkpoints, but train.steps {train.steps:,} with "
            f"train.save_every {train.save_every:,} {f'saves only {saved}' if saved else 'saves none before the end'}"
        )
    is_dropout = re.compile(r"model\..*dropout").fullmatch
    dropouts = [f"{name} {value:g}" for name, value, _ in recipes.flatten(config) if is_dropout(name) and value]
    if train.objective == "reward" and dropouts:
        found.append(
            f"train.objective reward is usually trained without dropout, but {', '.join(dropouts)} is that of the initial "
            f"model or of the recipe: set it to 0"
        )
    same = [spec for spec in data.test if spec in data.valid and not spec.startswith("toy:")]
    if same and not set(data.train) & set(same):
        found.append(
            f"data.test is also data.valid ({', '.join(same)}): checkpoints are chosen on it, so its score will be too good"
        )
    if data.train and not any(spec.startswith("toy:") for spec in data.train):
        found += [
            f"data.{split} is {spec}, the embedded corpus, but data.train is not: leave it out, or give files"
            for split in ("valid", "test")
            for spec in getattr(data, split)
            if spec.startswith("toy:")
        ]
    return found


def check_sampling(config: Config) -> None:
    """Refuse sampling weights and the temperature where they would have no effect: they are for translation."""
    weighted = [spec for spec in config.data.train if parse_weight(spec)[1] != 1]
    if config.task != "translation" and (weighted or config.data.temperature != 1):
        what = f"the weight of {weighted[0]!r}" if weighted else "data.temperature"
        raise RegardError(f"{what} is for translation, and this is {config.task}: leave it out")


def check_objective(config: Config) -> None:
    """Refuse training on a reward where it cannot work, and settings of it that would have no effect."""
    train, reward, default = config.train, config.train.reward, RewardConfig()
    unused: dict[str, str] = (
        {"baseline": "reinforce"} if reward.form == "minimum-risk" else {"sharpness": "minimum-risk"}
    )
    for name in (f.name for f in fields(RewardConfig)):
        if getattr(reward, name) == getattr(default, name):
            continue
        if train.objective != "reward":
            raise RegardError(f"train.reward.{name} is for train.objective reward: set that, or leave it out")
        if name in unused:
            raise RegardError(f"train.reward.{name} is for train.reward.form {unused[name]}: leave it out")
    if train.objective != "reward":
        return
    if config.task != "translation":
        raise RegardError(f"train.objective reward is for translation, and this is {config.task}: leave it out")
    if not train.init_from:
        raise RegardError(
            "train.objective reward needs a trained translator, whose samples have rewards to learn from: "
            "name its run or model folder in train.init_from"
        )
    if train.parallel != "ddp" or train.mesh.tensor > 1:
        raise RegardError(
            "train.objective reward samples from the whole model in every process: "
            "set train.parallel ddp, and leave train.mesh.tensor out"
        )


def check_recurrent_settings(config: Config) -> None:
    """Refuse settings of recurrent language models where they would have no effect."""
    if config.task == "causal-lm" and architecture_of(config.model).carries_state:
        return
    default = TrainConfig()
    for name in ("bptt", "carry_state", "ar_weight", "tar_weight"):
        if getattr(config.train, name) != getattr(default, name):
            kinds = names_where("carries_state")
            raise RegardError(f"train.{name} is for recurrent language models (causal-lm with {kinds}): leave it out")


def model_settings(values: Mapping[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[model]` table of a recipe with overrides, merged over that of its preset or of its initial model."""
    own, more = values.get("model", {}), recipes.nest(dotted).get("model", {})
    train = recipes.override(dict(values), dotted).get("train", {})
    if not all(isinstance(table, Mapping) for table in (own, more, train)):
        raise RegardError("model and train must be tables of settings, [model] and [train]")
    if train.get("init_from") and "architecture" not in {**own, **more}:
        from regard.exchange.loader import model_settings as settings_of_model

        return recipes.merge_tables(recipes.merge_tables(settings_of_model(Path(train["init_from"])), own), more)
    return with_preset(own, more)


def _absolute_path(path: str) -> str:
    """Return an absolute path, valid wherever the run is resumed; the name of a bundled model stays a name."""
    return path if not path or resolve_name(path) != Path(path) else str(Path(path).absolute())
