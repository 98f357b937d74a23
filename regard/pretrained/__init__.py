"""Trained models that Regard brings along, each a model folder (folder.py) beside this file; `regard.load` takes a name."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
DEFAULT = "en-de-fr-zh"  # English to and from German, French and Chinese: what `regard translate` uses


def bundled_path(name: str | Path) -> Path:
    """Where the model of this name is, if there is one."""
    return FOLDER / Path(name).name if len(Path(name).parts) == 1 else Path(name)


def resolve_name(name: str | Path) -> Path:
    """The folder or file of this name, or else the model that comes along under it."""
    return bundled_path(name) if str(name) in bundled_models() and not Path(name).exists() else Path(name)


def bundled_models() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
