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
    recipe: str | Path, run: str | Path | None = None, *, overwrite: bool = False, quiet: bool = False, **sections: Any
) -> Path:
    """Train a recipe, or go on with it if its run exists: `train("recipes/x.toml", train={"steps": 2000})`.

    `run` is the folder (by default runs/NAME); returns it.
    """
    config = make_config(configs.load(Path(recipe)), _dotted(sections))
    return _train(config, Path(run) if run else RUNS / config.name, overwrite=overwrite, quiet=quiet)


def resume(run: str | Path, *, quiet: bool = False, **sections: Any) -> Path:
    """Go on with a run from its newest valid checkpoint; `train={"steps": 4000}` makes it longer."""
    path = Path(run) / "config.toml"
    if not path.exists():
        raise RegardError(f"no run at {run}: there is no config.toml in it; start one with `regard train RECIPE`")
    return _train(make_config(configs.load(path), _dotted(sections)), Path(run), overwrite=False, quiet=quiet)


def make_config(values: dict[str, Any], dotted: Mapping[str, Any]) -> Config:
    """A recipe with overrides, checked, the preset's sizes filled in."""
    config = configs.build(configs.override(values, dotted), Config)
    return replace(config, model=resolve(config.model))


def _train(config: Config, run: Path, *, overwrite: bool, quiet: bool) -> Path:
    from regard.training.loop import train as run_training

    return run_training(config, run, overwrite=overwrite, quiet=quiet)


def _dotted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """{"train": {"steps": 1}} -> {"train.steps": 1}; plain values and dotted names stay."""
    dotted: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, Mapping):
            dotted.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            dotted[name] = value
    return dotted
