"""What a folder from elsewhere says beside its tensors: classes, decoding, frames, pooling, pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.config import DecodeConfig, ModelConfig, ViTSettings
from regard.config.recipes import build
from regard.errors import RegardError
from regard.exchange.checkpoint import Checkpoint
from regard.exchange.family import Family, Kind, whole
from regard.exchange.vocabulary import Foreign, start_of
from regard.files import read_json_object
from regard.text.special_tokens import EMPTY_TEMPLATE, SpecialTokens, SpecialTokenTemplate


class Watched(dict[str, Any]):
    """A config.json that remembers what was asked of it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked = set(HOUSEKEEPING)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


HOUSEKEEPING = (
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
    *("initializer_range", "initializer_factor", "init_std", "id2label", "label2id", "gradient_checkpointing"),
    *("output_attentions", "output_hidden_states", "return_dict", "_from_model_config"),
    *(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep", "mask", "unk", "forced_eos")),
)


def answers(family: Family, kind: Kind, their: Watched, checkpoint: Checkpoint) -> tuple[tuple[str, ...], str]:
    """Return the names of the classes, and what the model learned last.

    Where num_labels and id2label differ, num_labels counts and the names are LABEL_0 and on, as in transformers.
    """
    if kind.answer == "none" and not family.model.classifies:
        return (), family.task
    if their.get("problem_type") == "multi_label_classification":
        raise RegardError("config.json asks for problem_type 'multi_label_classification', which Regard does not have")
    names = their.get("id2label") or {}
    if not names or their.get("num_labels") not in (None, len(names)):
        n = whole(their, "num_labels", default=2)
        checkpoint.check_rows(n, "num_labels")
        names = {str(i): f"LABEL_{i}" for i in range(n)}
    labels = tuple(str(names[i]) for i in sorted(names, key=int))
    if kind.answer == "token":
        return labels, "tagging"
    if family.model.classifies:
        return labels, family.task
    return labels, "regression" if their.get("problem_type") == "regression" or len(labels) == 1 else "classification"


def decoding(their: Mapping[str, Any]) -> DecodeConfig:
    plain = DecodeConfig()
    beam, penalty = their.get("num_beams"), their.get("length_penalty")
    chosen = {"beam": beam or plain.beam, "length_penalty": plain.length_penalty if penalty is None else penalty}
    return build(chosen, DecodeConfig, "decode.")


def frame_of(
    family: Family, foreign: Foreign | None, their: Mapping[str, Any], special: SpecialTokens
) -> SpecialTokenTemplate:
    """What the tokenizer puts around a text; without one, the family's usual token_template of those tokens that are there."""
    if family.model.sees_images:
        return EMPTY_TEMPLATE
    start, end = start_of(their, special, family.model), () if special.eos is None else (special.eos,)
    before = () if family.model.translates else start
    return SpecialTokenTemplate(before, end, end, start, end) if foreign is None else foreign.token_template(start, end)


def pooling(folder: Path) -> str:
    """How sentence-transformers makes one vector of a text; the mean where nothing is said."""
    modes = read_json_object(folder / "1_Pooling" / "config.json")
    chosen = [name for name, on in modes.items() if name.startswith("pooling_mode_") and on is True]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
    if chosen and (len(chosen) > 1 or chosen[0] not in names):
        raise RegardError(f"1_Pooling/config.json asks for {', '.join(chosen)}: Regard has {' and '.join(names)}")
    return names[chosen[0]] if chosen else "mean"


def pixels(folder: Path, config: ModelConfig, notes: list[str]) -> dict[str, list[float]]:
    """The mean and spread of each channel that images were brought to, on our scale from 0 to 1, and their size."""
    their, side = read_json_object(folder / "preprocessor_config.json"), image_side(config)
    if not their:
        notes.append(
            "no preprocessor_config.json in the folder: pixels are brought to mean 0.5 and std 0.5, as usual for ViT"
        )
    with well_formed(folder / "preprocessor_config.json"):
        largest = 255 * their.get("rescale_factor", 1 / 255) if their.get("do_rescale", True) else 255
        mean, std = (their.get(name, 0.5) for name in ("image_mean", "image_std"))
        if not their.get("do_normalize", True):
            mean, std = 0.0, 1.0
        levels = {"mean": channels(mean, config, largest), "std": channels(std, config, largest)}
    return {**levels, "size": [side, side]}


def channels(numbers: float | list[float], config: ModelConfig, largest: float) -> list[float]:
    """One number for all channels, or one for each."""
    n = config.table(ViTSettings).image_channels
    each = numbers if isinstance(numbers, list) else [numbers] * n
    if len(each) != n:
        raise RegardError(f"preprocessor_config.json has {len(each)} numbers for {n} channels")
    return [float(x) / largest for x in each]


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Values of a kind that no version of transformers writes, where reading them trips over one."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise RegardError(
            f"{path} has a value that cannot be ({type(error).__name__}: {error}); copy it anew"
        ) from None


def image_side(config: ModelConfig) -> int:
    """Of the square images that a model reads."""
    return math.isqrt(config.max_len - 1) * config.table(ViTSettings).patch_size
