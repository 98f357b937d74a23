"""The model folder: a model on disk, which every command that uses a model takes; a run leaves one in `runs/NAME/model`.

    config.json   model.safetensors   README.md (the model card)   manifest.json (checksums)
    tokenizer.json, or tokenizer.source.json and tokenizer.target.json; none for images
    vocabulary.json: special tokens and number of ids of a vocabulary from elsewhere
    languages.json: language profiles of a model with several directions (text/language_identification.py)

The configuration chooses sizes, never code; weights are safetensors, never pickle; checksums are verified on loading.
Folders of Hugging Face transformers are read by exchange/loader.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from regard import pretrained
from regard.config import DecodeConfig, ModelConfig
from regard.config.recipes import build, fields_of, format_value, to_dict
from regard.config.schema import TASKS
from regard.errors import RegardError
from regard.files import atomic_folder, check_regular, exists, find_damage, read_json, refuse_pickle
from regard.layers.part import full_precision_parameters
from regard.layers.quantization import convert_weights, is_quantized
from regard.models.architectures import architecture_of, make_model, resolve
from regard.models.sizes import DERIVED
from regard.models.weights import (
    SizeLimit,
    SkipInit,
    are_quantized,
    check_scales,
    dequantize_weights,
    load_quantized,
    load_weights,
    quantize_weights,
    shapes_in,
    weights_of,
)
from regard.text.language_identification import Profiles
from regard.text.special_tokens import EOS_TEMPLATE, SpecialTokenTemplate
from regard.text.tokenizer import TOKENIZER_FILES, VOCABULARY_FILE, Tokenizers

FORMAT = 3  # of config.json and of the parameter names in model.safetensors; other formats are not read
LANGUAGES = "languages.json"
# All files that `save` may write, but the manifest.
MODEL_FILES = ("config.json", "README.md", "model.safetensors", LANGUAGES, *TOKENIZER_FILES, VOCABULARY_FILE)


@dataclass(frozen=True)
class ModelPackage:
    """A model with everything that its model folder holds."""

    model: nn.Module
    tokenizers: Tokenizers | None
    task: str  # the task of its last training, one of config.TASKS
    decode: DecodeConfig = field(default_factory=DecodeConfig)  # default decoding settings of this model
    source: str = ""  # source language
    target: str = ""  # target language
    directions: tuple[str, ...] = ()  # "en>de", ... of a model that is told which language to translate to
    labels: tuple[str, ...] = ()  # names of its classes or tags
    token_template: SpecialTokenTemplate = EOS_TEMPLATE  # special tokens around texts
    pooling: str = "mean"  # how the token vectors of a text become one vector: mean or first
    pixels: dict[str, list[float]] = field(default_factory=dict)  # size of images, mean and std of each channel
    origin: dict[str, Any] = field(default_factory=dict)  # of an imported model: what its export restores
    languages: Profiles = field(default_factory=dict)  # for language identification

    @property
    def config(self) -> ModelConfig:
        return self.model.config  # type: ignore[return-value]


def save(folder: Path, package: ModelPackage, card: str, small: bool = False, own: Collection[str] = ()) -> None:
    """Write a model folder.

    `card` is the text of its README.md. `small`: int8 quantization of matrices (models/weights.py), a quarter of the
    size. `own` is as in `files.atomic_folder`.
    """
    if is_quantized(package.model):
        raise RegardError(
            "this model was loaded with rounded weights, to be used and not saved: load it without weights="
        )
    config = {
        "format": FORMAT,
        "task": package.task,
        "source": package.source,
        "target": package.target,
        "directions": list(package.directions),
        "labels": list(package.labels),
        "token_template": package.token_template.to_dict(),
        "pooling": package.pooling,
        "pixels": package.pixels,
        "origin": package.origin,
        "model": to_dict(package.config),
        "decode": asdict(package.decode),
    }
    with atomic_folder(folder, own) as draft:
        (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text(card, encoding="utf-8")
        if package.tokenizers:
            package.tokenizers.save(draft)
        if package.languages:
            (draft / LANGUAGES).write_text(json.dumps(package.languages, ensure_ascii=False), encoding="utf-8")
        weights = {k: v.cpu() for k, v in weights_of(package.model).items()}
        if small:
            kept = full_precision_parameters(package.model)
            weights = quantize_weights(weights, {name for name, p in package.model.named_parameters() if p in kept})
        save_file({k: v.contiguous() for k, v in weights.items()}, draft / "model.safetensors")


def load(path: Path, device: torch.device, weights: str = "auto") -> ModelPackage:
    """Load a model folder, a run folder with a finished model in it, or a bundled model by its name.

    `weights`: auto (bf16 for models that generate on a GPU, else fp32), fp32, bf16, or on a CPU also int8 and fp16
    (layers/quantization.py).
    """
    folder = find(path)
    refuse_pickle(folder)
    with verify_checksums(folder):
        package = _read(folder, device, weights == "int8" and device.type == "cpu")
    if not is_quantized(package.model):
        convert_weights(package.model, weights, device)
    return package


@contextmanager
def verify_checksums(folder: Path) -> Iterator[None]:
    """Verify the checksums of a folder in the background while it is read inside the context.

    Damage takes precedence over any error inside, which it is the likely cause of.
    """
    with ThreadPoolExecutor(1) as background:
        verification = background.submit(find_damage, folder)
        try:
            yield
        finally:
            if what := verification.result():
                bundled = folder.parent == pretrained.FOLDER
                advice = "install Regard anew" if bundled else "copy it anew, or make it again with `regard resume`"
                raise RegardError(f"the model in {folder} is damaged: {what}; {advice}") from None


def _read(folder: Path, device: torch.device, keep_int8: bool) -> ModelPackage:
    """Return the content of a model folder; `keep_int8`: matrices that are int8 on disk stay so."""
    config = read_config(folder)
    sizes = _resolve_saved(config["model"], folder)
    _check_ids(config, sizes, folder)
    try:
        weights = check_regular(folder / "model.safetensors")
        with SkipInit(), SizeLimit(sizes, shapes_in(weights), folder):
            model = make_model(sizes)
        tokenizers = _load_tokenizers(folder, sizes)
        tensors = load_file(weights)
        check_scales(tensors, folder)
        if keep_int8 and are_quantized(tensors):
            load_quantized(model, tensors, folder)
        else:
            load_weights(model, dequantize_weights(tensors), folder)
    except (SafetensorError, OSError) as error:
        raise RegardError(f"cannot read the weights in {folder}: {error}; copy the folder anew") from None
    own = {name: config[name] for name in ("task", "source", "target", "pooling", "pixels", "origin")}
    own |= {"directions": tuple(config["directions"]), "labels": tuple(config["labels"])}
    own |= {"token_template": SpecialTokenTemplate.from_dict(config["token_template"])}
    own["languages"] = read_languages(folder / LANGUAGES)
    decode = build(config["decode"], DecodeConfig, "decode.")
    return ModelPackage(model.to(device).eval(), tokenizers, decode=decode, **own)


def _resolve_saved(table: dict[str, Any], folder: Path) -> ModelConfig:
    """Return the configuration of a saved model; a size of 0, which would be taken from a preset, is a RegardError."""
    config = build(table, ModelConfig, "model.")
    sizes = resolve(config)
    for name in fields_of(ModelConfig):
        if table.get(name) == 0 and getattr(sizes, name) != getattr(config, name) and name not in DERIVED:
            raise RegardError(f"{folder / 'config.json'} has model.{name} 0, which is no size: copy the folder anew")
    for name, settings in config.parts.items():
        if settings != sizes.parts[name]:
            raise RegardError(f"{folder / 'config.json'} has a size of 0 in [model.{name}]: copy the folder anew")
    return sizes


def _check_ids(config: dict[str, Any], sizes: ModelConfig, folder: Path) -> None:
    """Raise a RegardError for special tokens outside the vocabulary, or for another number of labels than classes."""
    pieces = max(sizes.source_vocab, sizes.target_vocab)
    ids = [
        *sizes.suppress_tokens,
        *[sizes.eos_token_id] * (sizes.eos_token_id != -1),
        *(i for part in config["token_template"].values() for i in part),
    ]
    if not all(0 <= i < pieces for i in ids) and architecture_of(sizes).vocabularies:
        raise RegardError(f"{folder / 'config.json'} names a special token outside its vocabulary of {pieces} pieces")
    if architecture_of(sizes).gives_classes(sizes) and config["labels"] and len(config["labels"]) != sizes.n_classes:
        raise RegardError(f"{folder / 'config.json'} has {len(config['labels'])} labels for {sizes.n_classes} classes")


def read_languages(path: Path) -> Profiles:
    """Return the language profiles of a model, empty where it has none."""
    try:
        found = read_json(path) if exists(path) else {}
        return {name: {t: float(value) for t, value in profile.items()} for name, profile in found.items()}
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise RegardError(f"{path} has no profiles of languages ({type(error).__name__}: {error})") from None


def _load_tokenizers(folder: Path, config: ModelConfig) -> Tokenizers | None:
    if not any(exists(folder / name) for name in TOKENIZER_FILES):
        return None
    tokenizers = Tokenizers.load(folder)
    for side, vocab in (("source", config.source_vocab), ("target", config.target_vocab)):
        pieces = len(getattr(tokenizers, side))
        if vocab and pieces != vocab:  # 0: the model has no vocabulary on this side
            raise RegardError(
                f"the {side} tokenizer in {folder} has {pieces} pieces but the model was trained with {vocab}: "
                f"put back the tokenizer it was trained with"
            )
    return tokenizers


def find(path: Path) -> Path:
    """Return the model folder at `path`: itself, the model of a run, or a bundled model of this name."""
    for folder in (path, path / "model", pretrained.bundled_path(path)):
        if exists(folder / "config.json"):
            return folder
    if exists(path / "config.toml"):
        steps = sorted(int(folder.name[5:]) for folder in path.glob("checkpoints/step-*") if folder.name[5:].isdigit())
        end = f", or end it here with `regard resume {path} --train.steps {steps[-1]}`" if steps else ""
        raise RegardError(f"the run {path} has no finished model yet: continue with `regard resume {path}`{end}")
    refuse_pickle(path)
    raise RegardError(
        f"no model at {path}: give a run folder such as runs/toy-en-de, a model folder with a config.json, or the name of a "
        f"bundled model ({', '.join(pretrained.bundled_models()) or 'there is none'})"
    )


OPTIONAL = {  # fields that config.json may lack, with their defaults
    "task": "translation",
    "directions": [],
    "labels": [],
    "token_template": {},
    "pooling": "mean",
    "pixels": {},
    "origin": {},
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a model folder after checking its format and fields."""
    path = folder / "config.json"
    try:
        config = {**OPTIONAL, **read_json(path)}
        wrong = [name for name, fits in FIELD_CHECKS.items() if not fits(config[name])]
    except (ValueError, KeyError, TypeError, OSError) as error:
        what = getattr(error, "strerror", None) or error
        raise RegardError(f"{path} is not a model's configuration ({type(error).__name__}: {what})") from None
    if config["format"] != FORMAT or config["task"] not in TASKS:
        raise RegardError(
            f"{path} has format {format_value(config['format'])} and task {format_value(config['task'])}; "
            f"this Regard reads format {FORMAT} and the tasks {', '.join(TASKS)}"
        )
    if wrong:
        raise RegardError(f"{path} is not a model's configuration: {wrong[0]} is {format_value(config[wrong[0]])}")
    return config


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _are_lists(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is an object of lists of numbers."""
    return _is_table(value) and all(isinstance(x, list) and all(type(y) in kinds for y in x) for x in value.values())


FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {  # for each field of config.json: whether a value has its type
    **dict.fromkeys(("source", "target"), _is_text),
    **dict.fromkeys(("directions", "labels"), _are_texts),
    **dict.fromkeys(("model", "decode", "origin"), _is_table),
    "token_template": lambda value: _are_lists(value, (int,)) and value.keys() <= EOS_TEMPLATE.to_dict().keys(),
    "pooling": ("mean", "first").__contains__,
    "pixels": lambda value: _are_lists(value, (int, float)),
}
