"""The model that a user means by a name: a preset, a recipe, or a run or model folder. Nothing of it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from regard.config import Config, ModelConfig, TokenizerConfig, recipes
from regard.config.recipes import build
from regard.errors import RegardError
from regard.files import exists, read_json, read_json_object
from regard.layers.quantization import is_quantized
from regard.models.analysis import summary as analysis
from regard.models.analysis.counting import meta_model
from regard.models.analysis.summary import Summary
from regard.models.architectures import PRESETS, architecture_of, preset, resolve
from regard.pretrained import resolve_name
from regard.tasks.run_config import ANSWERS, model_settings
from regard.text.tokenizer import Tokenizers


def config_of(name: str, settings: dict[str, str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Its configuration, sizes resolved, and what had to be assumed because data would tell."""
    known, vocab, path = {}, TokenizerConfig.vocab_size, resolve_name(name)
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
    if "max_len" not in settings and architecture_of(config).sees_images:  # as long as its pictures have patches
        config = replace(config, max_len=known.get("max_len", config.max_len))
    assumed = {field: n for field, n in missing.items() if field not in known}
    return resolve(replace(config, **{field: known.get(field, n) for field, n in missing.items()})), assumed


def assumptions(config: ModelConfig, vocab: int) -> dict[str, Any]:
    """What data would fill in."""
    used = [f"{side}_vocab" for side in architecture_of(config).vocabularies]
    missing = {field: vocab for field in used if not getattr(config, field)}
    if not config.n_classes and architecture_of(config).gives_classes(config):
        missing["n_classes"] = 10
    return missing


def told(run: Path) -> dict[str, int]:
    """What a run's data said: a finished model knows all of it, before that there is the vocabulary."""
    finished = run / "model" / "config.json"
    if exists(finished):
        table = read_json_object(finished).get("model")
        if not isinstance(table, dict):
            raise RegardError(f"{finished} is not a model's configuration: it has no table of sizes; copy it anew")
        sizes = build(table, ModelConfig, "model.")
        return {field: getattr(sizes, field) for field in ("source_vocab", "target_vocab", "n_classes", "max_len")}
    if any(run.glob("tokenizer*.json")):
        both = Tokenizers.load(run)
        return {"source_vocab": len(both.source), "target_vocab": len(both.target)}
    return {}


def recipe_of(target: Path, settings: Mapping[str, Any]) -> Config:
    """The recipe of a run (finished or not), or what a model folder says in its place, with settings written over it."""
    recipe = target / "config.toml" if exists(target / "config.toml") else target
    if (exists(recipe) and recipe.is_file()) or recipe.suffix == ".toml":
        return built(recipes.load(recipe), settings)
    from regard import model_folder

    path = model_folder.find(target) / "config.json"
    try:
        return built({"model": read_json(path)["model"]}, settings)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RegardError(f"{path} is not a model's configuration ({type(error).__name__}: {error})") from None


def built(values: dict[str, Any], settings: Mapping[str, Any]) -> Config:
    """With the style of the preset where nothing is said, and the answers that its task asks for."""
    config = recipes.build({**recipes.override(values, settings), "model": model_settings(values, settings)}, Config)
    return replace(config, model=replace(config.model, answer=ANSWERS.get(config.task, config.model.answer)))


def summary(
    model: Any,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    depth: int = 2,
    settings: dict[str, str] | None = None,
) -> Summary:
    """Of a model, of what holds one (such as a Translator), or of a preset, a recipe or a folder by name.

    `length` is that of the rows, by default the model's longest; `source_length` that of a translator's source, if it is
    another. `depth` 1 shows stacks, 2 their blocks, 3 the sublayers of those. `settings` change a model that is not there
    yet.
    """
    name, built, assumed = found_model(model, settings or {})
    sizes = {"batch": batch, "length": length, "source_length": source_length, "depth": depth}
    return analysis.summarize(built, name, assumed=assumed, **sizes)  # type: ignore[arg-type]


def found_model(model: Any, settings: dict[str, str]) -> tuple[str, nn.Module, dict[str, int]]:
    """Return its name, the model, whose numbers do not matter, and what was assumed."""
    if isinstance(model, (str, Path)):
        there = any((Path(model) / place / "config.json").exists() for place in ("", "model"))
        if settings or not there:
            config, assumed = config_of(str(model), settings)
            return str(model), meta_model(config), assumed
        import torch

        from regard.exchange.loader import load_model

        return str(model), load_model(Path(model), torch.device("cpu"), "fp32").model, {}
    model = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise RegardError("a summary is of a model of Regard, of what holds one, or of a preset, a recipe or a folder")
    if is_quantized(model):
        raise RegardError(
            "this model was loaded with rounded weights, which are no parameters: load it without weights="
        )
    return type(model).__name__, model, {}
