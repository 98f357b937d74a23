"""Bundled models: pretrained models that ship with Regard, each a model folder beside this file, loaded by its name."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
DEFAULT = "en-de-fr-zh"  # English to and from German, French and Chinese; `regard translate` uses it


def bundled_path(name: str | Path) -> Path:
    """Return where the bundled model of this name would be; any other path is returned unchanged."""
    return FOLDER / Path(name).name if len(Path(name).parts) == 1 else Path(name)


def resolve_name(name: str | Path) -> Path:
    """Return the path itself if it exists, or else the bundled model of this name."""
    return bundled_path(name) if str(name) in bundled_models() and not Path(name).exists() else Path(name)


def bundled_models() -> list[str]:
    """Return the names of the bundled models."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
