"""Training from Python: the same runs, folders and settings as the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard import config as configs
from regard.config import Config
from regard.errors import RegardError
from regard.models.transformer import resolve

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
    config = make_config(configs.load(Path(recipe)), {**_dotted(sections), **(settings or {})})
    return _train(config, Path(run) if run else RUNS / config.name, overwrite=overwrite, quiet=quiet)


def resume(run: str | Path, *, settings: Mapping[str, Any] | None = None, quiet: bool = False, **sections: Any) -> Path:
    """Go on with a run from its newest valid checkpoint; `train={"steps": 4000}` makes it longer."""
    path = Path(run) / "config.toml"
    if not path.exists():
        raise RegardError(f"no run at {run}: there is no config.toml in it; start one with `regard train RECIPE`")
    config = make_config(configs.load(path), {**_dotted(sections), **(settings or {})})
    return _train(config, Path(run), resuming=True, quiet=quiet)


def make_config(values: dict[str, Any], dotted: Mapping[str, Any]) -> Config:
    """A recipe with overrides, checked, the preset's sizes filled in and its folder made absolute."""
    config = configs.build(configs.override(values, dotted), Config)
    if config.model.tie == "all" and not config.tokenizer.joint:
        raise RegardError("model.tie 'all' needs one vocabulary: set tokenizer.joint true, or model.tie decoder")
    data = replace(config.data, root=str(Path(config.data.root).absolute()))
    return replace(config, data=data, model=resolve(config.model))


def _train(config: Config, run: Path, **how: bool) -> Path:
    from regard.training.loop import train as run_training

    return run_training(config, run, **how)


def _dotted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """{"train": {"steps": 1}} -> {"train.steps": 1}; plain values and dotted names stay."""
    dotted: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, Mapping):
            dotted.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            dotted[name] = value
    return dotted
