"""The configuration of the model that a name stands for: a preset, a recipe, or a run or model folder."""

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
from regard.models.architectures import PRESETS, architecture_of, preset, resolve, suggest_preset
from regard.pretrained import resolve_name
from regard.tasks.run_config import PREDICTION_HEADS, model_settings
from regard.text.tokenizer import Tokenizers


def config_of(name: str, settings: dict[str, str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the configuration of a named model, with `settings` applied and sizes resolved.

    Also returned is what had to be assumed because only the data determine it, such as the size of the vocabulary.
    """
    known, vocab, path = {}, TokenizerConfig.vocab_size, resolve_name(name)
    if name in recipes.shipped_recipes() and not exists(path):
        path = recipes.find_recipe(name)
    if name in PRESETS:
        config = preset(name, **settings)
    elif path.suffix == ".toml" or (exists(path) and path.is_dir()):
        recipe = recipe_of(path, {f"model.{field}": value for field, value in settings.items()})
        config, vocab, known = recipe.model, recipe.tokenizer.vocab_size, sizes_of_data(path)
    else:
        raise RegardError(f"'{name}' is no preset, recipe or folder: {suggest_preset(name)}")
    missing = assumptions(config, vocab)
    if "max_len" not in settings and architecture_of(config).sees_images:  # one token for each patch of its images
        config = replace(config, max_len=known.get("max_len", config.max_len))
    assumed = {field: n for field, n in missing.items() if field not in known}
    return resolve(replace(config, **{field: known.get(field, n) for field, n in missing.items()})), assumed


def assumptions(config: ModelConfig, vocab: int) -> dict[str, Any]:
    """Return values for the sizes that the data would determine and `config` leaves open."""
    used = [f"{side}_vocab" for side in architecture_of(config).vocabularies]
    missing = {field: vocab for field in used if not getattr(config, field)}
    if not config.n_classes and architecture_of(config).gives_classes(config):
        missing["n_classes"] = 10
    return missing


def sizes_of_data(run: Path) -> dict[str, int]:
    """Return the sizes that the data of a run determined: all for a finished run, before that those of the vocabulary."""
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
    """Return the recipe of a run, finished or not, or the configuration of a model folder, with `settings` applied."""
    recipe = target / "config.toml" if exists(target / "config.toml") else target
    if (exists(recipe) and recipe.is_file()) or recipe.suffix == ".toml":
        return build_config(recipes.load(recipe), settings)
    from regard import model_folder

    path = model_folder.find(target) / "config.json"
    try:
        return build_config({"model": read_json(path)["model"]}, settings)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RegardError(f"{path} is not a model's configuration ({type(error).__name__}: {error})") from None


def build_config(values: dict[str, Any], settings: Mapping[str, Any]) -> Config:
    """Return a configuration: defaults from the preset, then `values`, then `settings`; its head is that of the task."""
    config = recipes.build({**recipes.override(values, settings), "model": model_settings(values, settings)}, Config)
    head = PREDICTION_HEADS.get(config.task, config.model.prediction_head)
    return replace(config, model=replace(config.model, prediction_head=head))


def summary(
    model: Any,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    depth: int = 2,
    settings: dict[str, str] | None = None,
) -> Summary:
    """Summarize a model layer by layer: parameters, FLOPs and bytes.

    `model` is a module, an object that holds one (such as a Translator), or the name of a preset, a recipe or a folder.
    `length` is the number of tokens in a row, by default the model's max_len; `source_length` that of a translator's source
    rows, if it differs. `depth` 1 shows stacks, 2 their blocks, 3 the sublayers of those. `settings` are model settings to
    try on a preset or a recipe.
    """
    name, module, assumed = find_model(model, settings or {})
    sizes = {"batch": batch, "length": length, "source_length": source_length, "depth": depth}
    return analysis.summarize(module, name, assumed=assumed, **sizes)  # type: ignore[arg-type]


def find_model(model: Any, settings: dict[str, str]) -> tuple[str, nn.Module, dict[str, int]]:
    """Return the name of a model, the module, which may be on the meta device, and the sizes that were assumed."""
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
