"""The model that a user means by a name: a preset, a recipe, or a run or model folder. Nothing of it is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError
from regard.pretrained import place

if TYPE_CHECKING:
    from regard.config import ModelConfig


def config_of(name: str, settings: dict[str, str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Its configuration, sizes resolved, and what had to be assumed because data would tell."""
    import dataclasses

    from regard.config import TokenizerConfig
    from regard.doctor import recipe_of
    from regard.files import exists
    from regard.models.architectures import PRESETS, of, preset, resolve

    known, vocab, path = {}, TokenizerConfig.vocab_size, place(name)
    if name in PRESETS:
        config = preset(name, **settings)
    elif name.endswith(".toml") or (exists(path) and path.is_dir()):
        recipe = recipe_of(path, {f"model.{field}": value for field, value in settings.items()})
        config, vocab, known = recipe.model, recipe.tokenizer.vocab_size, told(path)
    else:
        raise RegardError(
            f"'{name}' is no preset, recipe (.toml) or folder: `regard cost` without a name lists the presets"
        )
    missing = assumptions(config, vocab)
    if "max_len" not in settings and of(config).sees_images:  # as long as its pictures have patches
        config = dataclasses.replace(config, max_len=known.get("max_len", config.max_len))
    assumed = {field: n for field, n in missing.items() if field not in known}
    return resolve(dataclasses.replace(config, **{field: known.get(field, n) for field, n in missing.items()})), assumed


def assumptions(config: ModelConfig, vocab: int) -> dict[str, Any]:
    """What data would fill in."""
    from regard.models.architectures import of

    used = [f"{side}_vocab" for side in of(config).vocabularies]
    missing = {field: vocab for field in used if not getattr(config, field)}
    if not config.n_classes and of(config).gives_classes(config):
        missing["n_classes"] = 10
    return missing


def told(run: Path) -> dict[str, int]:
    """What a run's data said: a finished model knows all of it, before that there is the vocabulary."""
    from regard.config import ModelConfig
    from regard.config.recipes import build
    from regard.files import exists, json_object
    from regard.text.tokenizer import Tokenizers

    finished = run / "model" / "config.json"
    if exists(finished):
        table = json_object(finished).get("model")
        if not isinstance(table, dict):
            raise RegardError(f"{finished} is not a model's configuration: it has no table of sizes; copy it anew")
        sizes = build(table, ModelConfig, "model.")
        return {field: getattr(sizes, field) for field in ("source_vocab", "target_vocab", "n_classes", "max_len")}
    if any(run.glob("tokenizer*.json")):
        both = Tokenizers.load(run)
        return {"source_vocab": len(both.source), "target_vocab": len(both.target)}
    return {}


def check_lengths(config: ModelConfig, batch: int, *lengths: int) -> None:
    """Refuse rows that the model cannot have."""
    from regard.models.architectures import of

    endless = of(config).carries_state  # it reads texts of any length
    for length in lengths:
        if batch < 1 or length < 1 or (length > config.max_len and not endless):
            most = "on" if endless else f"to model.max_len {config.max_len}"
            raise RegardError(f"--batch {batch} must be at least 1, and --length {length} from 1 {most}")
