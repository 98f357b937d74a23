"""The metadata of a Hugging Face folder beside its tensors: labels, decoding, token template, pooling, pixel values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.config import DecodeConfig, ModelConfig, ViTSettings
from regard.config.recipes import build
from regard.errors import RegardError
from regard.exchange.hf_tokenizer import HFTokenizer, find_start_ids
from regard.exchange.model_family import Family, ModelClass, read_size
from regard.exchange.safetensors_folder import SafetensorsCheckpoint
from regard.files import read_json_object
from regard.text.special_tokens import EMPTY_TEMPLATE, SpecialTokens, SpecialTokenTemplate


class TrackedConfig(dict[str, Any]):
    """The settings of a config.json, with a record of which keys were read; the report lists the others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read_keys = set(UNUSED_KEYS)

    def get(self, key: str, default: Any = None) -> Any:
        self.read_keys.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        return super().__getitem__(key)


# Keys that do not change what the model computes, or that are read elsewhere.
UNUSED_KEYS = (
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
    *("initializer_range", "initializer_factor", "init_std", "id2label", "label2id", "gradient_checkpointing"),
    *("output_attentions", "output_hidden_states", "return_dict", "_from_model_config"),
    *(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep", "mask", "unk", "forced_eos")),
)


def read_labels(
    family: Family, model_class: ModelClass, their: TrackedConfig, checkpoint: SafetensorsCheckpoint
) -> tuple[tuple[str, ...], str]:
    """Return the names of the labels, and the task of the model.

    Where num_labels and id2label differ, num_labels counts and the names are LABEL_0 and on, as in transformers.
    """
    if model_class.prediction_head == "none" and not family.model.classifies:
        return (), family.task
    if their.get("problem_type") == "multi_label_classification":
        raise RegardError("config.json asks for problem_type 'multi_label_classification', which Regard does not have")
    names = their.get("id2label") or {}
    if not names or their.get("num_labels") not in (None, len(names)):
        n = read_size(their, "num_labels", default=2)
        checkpoint.check_rows(n, "num_labels")
        names = {str(i): f"LABEL_{i}" for i in range(n)}
    labels = tuple(str(names[i]) for i in sorted(names, key=int))
    if model_class.prediction_head == "token":
        return labels, "tagging"
    if family.model.classifies:
        return labels, family.task
    return labels, "regression" if their.get("problem_type") == "regression" or len(labels) == 1 else "classification"


def read_decode_config(their: Mapping[str, Any]) -> DecodeConfig:
    """Return the decoding settings that a configuration has; defaults for the others."""
    default = DecodeConfig()
    beam, penalty = their.get("num_beams"), their.get("length_penalty")
    chosen = {"beam": beam or default.beam, "length_penalty": default.length_penalty if penalty is None else penalty}
    return build(chosen, DecodeConfig, "decode.")


def read_token_template(
    family: Family, tokenizer: HFTokenizer | None, their: Mapping[str, Any], special: SpecialTokens
) -> SpecialTokenTemplate:
    """Return the special tokens that the tokenizer puts around a text.

    Without a tokenizer it is the family's usual template, of those special tokens that exist.
    """
    if family.model.sees_images:
        return EMPTY_TEMPLATE
    start, end = find_start_ids(their, special, family.model), () if special.eos is None else (special.eos,)
    before = () if family.model.translates else start
    return (
        SpecialTokenTemplate(before, end, end, start, end)
        if tokenizer is None
        else tokenizer.token_template(start, end)
    )


def read_pooling(folder: Path) -> str:
    """Return how sentence-transformers pools token vectors into a text vector; the mean by default."""
    modes = read_json_object(folder / "1_Pooling" / "config.json")
    chosen = [name for name, on in modes.items() if name.startswith("pooling_mode_") and on is True]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
    if chosen and (len(chosen) > 1 or chosen[0] not in names):
        raise RegardError(f"1_Pooling/config.json asks for {', '.join(chosen)}: Regard has {' and '.join(names)}")
    return names[chosen[0]] if chosen else "mean"


def read_pixels(folder: Path, config: ModelConfig, notes: list[str]) -> dict[str, list[float]]:
    """Return the mean and standard deviation that normalize each channel of pixels in 0 to 1, and the size of images."""
    their, side = read_json_object(folder / "preprocessor_config.json"), get_image_side(config)
    if not their:
        notes.append(
            "no preprocessor_config.json in the folder: pixels are brought to mean 0.5 and std 0.5, as usual for ViT"
        )
    with refuse_malformed(folder / "preprocessor_config.json"):
        largest = 255 * their.get("rescale_factor", 1 / 255) if their.get("do_rescale", True) else 255
        mean, std = (their.get(name, 0.5) for name in ("image_mean", "image_std"))
        if not their.get("do_normalize", True):
            mean, std = 0.0, 1.0
        levels = {"mean": per_channel(mean, config, largest), "std": per_channel(std, config, largest)}
    return {**levels, "size": [side, side]}


def per_channel(numbers: float | list[float], config: ModelConfig, largest: float) -> list[float]:
    """Return the number of each channel on the scale 0 to 1, given one for all channels or one for each."""
    n = config.table(ViTSettings).image_channels
    each = numbers if isinstance(numbers, list) else [numbers] * n
    if len(each) != n:
        raise RegardError(f"preprocessor_config.json has {len(each)} numbers for {n} channels")
    return [float(x) / largest for x in each]


@contextmanager
def refuse_malformed(path: Path) -> Iterator[None]:
    """Turn the exceptions of reading values of the wrong type into an error that names the file."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise RegardError(
            f"{path} has a value that cannot be ({type(error).__name__}: {error}); copy it anew"
        ) from None


def get_image_side(config: ModelConfig) -> int:
    """Return the height and width of the square images that a model reads, in pixels."""
    return math.isqrt(config.max_len - 1) * config.table(ViTSettings).patch_size
