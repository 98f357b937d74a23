"""Training from Python: the same runs, folders and settings as the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.config import Config, TrainConfig, recipes
from regard.errors import RegardError
from regard.files import exists
from regard.model_folder import settings as settings_of
from regard.models.architectures import of, resolve, with_preset
from regard.models.model import names_where
from regard.pretrained import place
from regard.training.run_folder import MARKER, holds_run

RUNS = Path("runs")


def train(
    recipe: str | Path,
    run: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    **sections: Any,
) -> Path:
    """Train a recipe, or go on with it if its run exists: `train("recipes/x.toml", train={"steps": 2000})`.

    `run` is the folder (by default runs/NAME); `settings` are dotted names, as on the command line. Returns the folder.
    """
    values, dotted = recipes.load(Path(recipe)), {**_dotted(sections), **(settings or {})}
    name = recipes.build({"name": dotted.get("name", values["name"])}, Config).name  # checked before it becomes a path
    place = Path(run) if run else RUNS / name
    begun = place / "config.toml"
    if holds_run(place) and exists(begun) and not overwrite:  # the model it began with may be gone
        values["model"] = recipes.over(recipes.load(begun).get("model", {}), values.get("model", {}))
    return _train(make_config(values, dotted), place, overwrite=overwrite, quiet=quiet)


def resume(run: str | Path, *, settings: Mapping[str, Any] | None = None, quiet: bool = False, **sections: Any) -> Path:
    """Go on with a run from its newest valid checkpoint; `train={"steps": 4000}` makes it longer."""
    path = Path(run) / "config.toml"
    if not exists(path):
        raise RegardError(f"no run at {run}: there is no config.toml in it; start one with `regard train RECIPE`")
    if not (Path(run) / MARKER).exists():
        raise RegardError(
            f"{run} has a config.toml but no {MARKER}, so Regard did not begin a run there: "
            f"start one elsewhere with `regard train {path} --run FOLDER`"
        )
    config = make_config(recipes.load(path), {**_dotted(sections), **(settings or {})})
    return _train(config, Path(run), resuming=True, quiet=quiet)


def make_config(values: dict[str, Any], dotted: Mapping[str, Any]) -> Config:
    """A recipe with overrides, checked; what it leaves open comes from its preset, or from the model it begins with."""
    config = recipes.build({**recipes.override(values, dotted), "model": model_settings(values, dotted)}, Config)
    if config.train.auxiliary and config.task not in ("classification", "tagging"):
        raise RegardError(f"train.auxiliary is for classification and tagging, not for {config.task}: leave it out")
    check_carried(config)
    if config.model.tie == "all" and not config.tokenizer.joint:
        raise RegardError("model.tie 'all' needs one vocabulary: set tokenizer.joint true, or model.tie decoder")
    data = replace(config.data, root=str(Path(config.data.root).absolute()))
    train = replace(config.train, init=_absolute(config.train.init), vectors=_absolute(config.train.vectors))
    tokenizer = replace(config.tokenizer, extra=config.tokenizer.extra or (100 if config.task == "spans" else 0))
    # the vocabulary and the classes are those of the data, whatever the recipe or its beginning says
    fresh = replace(config.model, source_vocab=0, target_vocab=0, answer=ANSWERS.get(config.task, "none"), n_classes=1)
    return replace(config, data=data, train=train, tokenizer=tokenizer, model=resolve(fresh))


def check_carried(config: Config) -> None:
    """Settings of recurrent language models are refused where they would do nothing."""
    if config.task == "causal-lm" and of(config.model).carries_state:
        return
    usual = TrainConfig()
    for name in ("bptt", "carry", "activity", "slowness"):
        if getattr(config.train, name) != getattr(usual, name):
            kinds = names_where("carries_state")
            raise RegardError(f"train.{name} is for recurrent language models (causal-lm with {kinds}): leave it out")


def model_settings(values: Mapping[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """The `[model]` table of a recipe with overrides, over that of its preset or of the model it begins with."""
    own, more = values.get("model", {}), recipes.nested(dotted).get("model", {})
    train = recipes.override(dict(values), dotted).get("train", {})
    if not all(isinstance(table, Mapping) for table in (own, more, train)):
        raise RegardError("model and train must be tables of settings, [model] and [train]")
    if train.get("init") and "architecture" not in {**own, **more}:
        return recipes.over(recipes.over(settings_of(Path(train["init"])), own), more)
    return with_preset(own, more)


ANSWERS = {"classification": "row", "regression": "row", "tagging": "token"}


def load(path: str | Path, device: str = "auto", weights: str = "auto") -> Any:
    """A model by what it learned: a Translator, Writer, Labeller or Embedder, from a run folder or a model folder; or
    WordVectors, from their file or folder.

    `weights`: auto, fp32 or bf16, on a CPU also int8 and fp16."""
    from regard.device import pick_device
    from regard.inference.classifier import TASKS, Labeller
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Writer
    from regard.inference.translator import Translator
    from regard.model_folder import load as load_bundle
    from regard.vectors.word_vectors import WordVectors, is_folder

    if (exists(Path(path)) and Path(path).is_file()) or is_folder(Path(path)):
        return WordVectors.load(path)
    bundle = load_bundle(Path(path), pick_device(device), weights)
    if bundle.task in TASKS:
        return Labeller(bundle)
    kind = of(bundle.config)
    if kind.translates:
        return Translator(bundle)
    if kind.writes:
        return Writer(bundle)
    if kind.embeds:
        return Embedder(bundle)
    raise RegardError(f"{path} holds a {bundle.config.architecture} that learned {bundle.task}; nothing here uses it")


def _train(config: Config, run: Path, **how: bool) -> Path:
    from regard.training.trainer import train as run_training

    return run_training(config, run, **how)


def _absolute(path: str) -> str:
    """Wherever the run is gone on with; the name of a model that comes along is a name everywhere."""
    return path if not path or place(path) != Path(path) else str(Path(path).absolute())


def _dotted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """{"model": {"rope": {"base": 1e6}}} -> {"model.rope.base": 1e6}; plain values and dotted names stay."""
    dotted: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, Mapping):
            dotted.update({f"{name}.{key}": inner for key, inner in _dotted(value).items()})
        else:
            dotted[name] = value
    return dotted
