"""Image classification: images from idx files or folders, with light augmentation in training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import Config, DataConfig
from regard.data.batches import Batch, Batches, Rows, batch_size
from regard.data.held_out import hold_out
from regard.data.image_files import augment, mean_and_std, normalize, read_images, to_floats
from regard.data.parallel_corpus import parse_part
from regard.data.text_batches import split_into_batches
from regard.device import autocast
from regard.errors import RegardError
from regard.metrics.classification_scores import score_predictions
from regard.model_folder import ModelPackage
from regard.tasks.initial_model import InitialModel
from regard.tasks.text_data import check_task
from regard.text.special_tokens import EMPTY_TEMPLATE
from regard.training.job import Job, Poll, Validation
from regard.training.metrics_log import print_message
from regard.training.objective import ClassificationObjective, Objective
from regard.training.validation import BATCH_TOKENS

Pixels = dict[str, list[float]]  # mean and std of each channel; size: height and width


@dataclass(frozen=True)
class LabelledImages:
    """Images and their classes."""

    images: np.ndarray  # (N, H, W, channels), uint8
    classes: np.ndarray  # (N,)

    def __len__(self) -> int:
        return len(self.images)

    def key(self) -> str:
        """Return a hash of all images and classes."""
        found = hashlib.sha256(np.ascontiguousarray(self.images).data)
        found.update(np.ascontiguousarray(self.classes).data)
        return found.hexdigest()[:32]


class ImageBatches(Batches):
    """Batches of (images, labels): (B, channels, H, W) fp32, and (B,), where -1 is not scored."""

    def __init__(
        self, data: LabelledImages, pixels: Pixels, size: int, seed: int, augmentation: DataConfig | None = None
    ) -> None:
        super().__init__(seed)
        self.data, self.pixels, self.size, self.augmentation = data, pixels, size, augmentation

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        return split_into_batches(rng.permutation(len(self.data)), self.size, self.data.images.shape[1])

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        filled = np.resize(rows, self.size)
        labels = self.data.classes[filled]
        labels[len(rows) :] = -1
        images = to_floats(torch.from_numpy(self.data.images[filled]))
        if self.augmentation is not None:
            generator, how = torch.Generator().manual_seed(int(rng.integers(1 << 62))), self.augmentation
            images = augment(images, generator, how.shift, how.rotate, how.scale, how.flip)
        images = normalize(images, self.pixels["mean"], self.pixels["std"])
        return Batch((images.contiguous(), torch.from_numpy(labels)), len(rows))


@dataclass(frozen=True)
class ImageClassificationJob(Job):
    """A run of image classification."""

    train: LabelledImages
    valid: LabelledImages
    names: tuple[str, ...]
    pixels: Pixels

    @property
    def scored(self) -> str:
        return "images"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "f1", "matthews")

    def batches(self) -> ImageBatches:
        train, data = self.config.train, self.config.data
        augmentation = data if data.shift or data.rotate or data.scale or data.flip else None
        return ImageBatches(
            self.train, self.pixels, batch_size(train.batch_tokens, self.config.model.max_len), train.seed, augmentation
        )

    def objective(self) -> Objective:
        return ClassificationObjective(self.model, self.config.train.label_smoothing)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        return measure(model, self.valid, self.names, self.pixels, device, dtype, poll)

    def package(self) -> ModelPackage:
        return replace(super().package(), labels=self.names, pixels=self.pixels)

    def next_steps(self) -> list[str]:
        return [*super().next_steps(), f"regard classify {self.quoted_folder} picture.png"]


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> ImageClassificationJob:
    """Prepare a run: images, their mean and standard deviation, and model."""
    check_task(config)
    initial = InitialModel.load(folder, config, quiet)
    images, labels, valid_images, valid_labels = read_training_data(config, quiet)
    every = {*labels, *(() if config.data.valid else valid_labels)}  # what is held out is training data too
    names = tuple(sorted(every, key=lambda name: (len(name), name) if name.isdigit() else (0, name)))
    train = LabelledImages(images, class_ids(labels, names, config.data.train))
    valid = LabelledImages(valid_images, class_ids(valid_labels, names, config.data.valid))
    where, there = ", ".join(config.data.valid or config.data.train), ", ".join(config.data.train)
    check_same_size(image_size(valid_images), where, image_size(images), there)
    pixels = initial.facts.get("pixels") or dict(zip(("mean", "std"), map(list, mean_and_std(images)), strict=True))
    pixels = {**pixels, "size": list(image_size(images))}
    rows, columns = (side // config.model.value("vit.patch_size") for side in image_size(images))
    model = initial.build_model(replace(config.model, max_len=1 + rows * columns, n_classes=len(names)))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    amount = f"{len(train):,} training images"
    return ImageClassificationJob(
        folder, config, model, None, EMPTY_TEMPLATE, train.key(), amount, train, valid, names, pixels
    )


def read_training_data(config: Config, quiet: bool) -> tuple[np.ndarray, list[str], np.ndarray, list[str]]:
    """Read images and labels for training and for validation; without data.valid, a share of the former is held out."""
    images, labels = read_split(config, "train")
    if config.data.valid:
        return images, labels, *read_split(config, "valid")
    held = hold_out((image.tobytes() for image in images), config.data.valid_share, config.train.seed)
    print_message(held.describe("images"), quiet)
    kept = np.array([held.holds(image.tobytes()) for image in images])
    train, valid = ([labels[i] for i in np.flatnonzero(which)] for which in (~kept, kept))
    return images[~kept], train, images[kept], valid


def read_split(config: Config, split: str) -> tuple[np.ndarray, list[str]]:
    """Read the images (N, H, W, channels) and labels of a split; all must have one size, a multiple of the patch size."""
    data = config.data
    specs = getattr(data, split)
    if not specs:
        raise RegardError(f"data.{split} names no images: set it in the recipe or with --data.{split} FILES")
    parts = [read_spec(spec, data, config.model.value("vit.image_channels")) for spec in specs]
    side = config.model.value("vit.patch_size")
    for spec, (images, _) in zip(specs, parts, strict=True):
        if images.shape[1] % side or images.shape[2] % side:
            raise RegardError(
                f"the images of {spec} are {images.shape[2]} x {images.shape[1]} pixels, which patches of {side} x {side} "
                f"do not fill: set model.vit.patch_size to a divisor, or data.image_size to a multiple"
            )
        check_same_size(image_size(images), spec, image_size(parts[0][0]), specs[0])
    return np.concatenate([images for images, _ in parts]), [label for _, labels in parts for label in labels]


def image_size(images: np.ndarray) -> tuple[int, int]:
    """Return height and width of images (N, H, W, channels)."""
    return images.shape[1], images.shape[2]


def check_same_size(size: Sequence[float], where: str, first: Sequence[float], there: str) -> None:
    """Refuse images whose height and width differ from those of others."""
    if list(size) != list(first):
        (h, w), (first_h, first_w) = size, first
        raise RegardError(
            f"the images of {where} are {w} x {h} pixels, those of {there} {first_w} x {first_h}: set data.image_size"
        )


def read_spec(spec: str, data: DataConfig, channels: int) -> tuple[np.ndarray, list[str]]:
    """Read images, or a part of them: `IMAGES[:90%]` means the first 90%, in a folder the first 90% of every class."""
    name, (first, last) = parse_part(spec)
    images, labels = read_images(name, Path(data.root), data.image_size, channels)
    counts = [len(labels)] if "|" in name else [len(list(group)) for _, group in groupby(labels)]
    rows = [
        end - n + i
        for n, end in zip(counts, accumulate(counts), strict=True)
        for i in range(int(first * n), int(last * n))
    ]
    if not rows:
        raise RegardError(f"nothing of the {len(images):,} images is left in {spec}; give a larger part")
    part = images if len(rows) == len(images) else images[rows]
    return part, [labels[i] for i in rows]


def class_ids(labels: list[str], names: tuple[str, ...], where: tuple[str, ...]) -> np.ndarray:
    """Return the index of each label in the class names of the training data."""
    number = {name: i for i, name in enumerate(names)}
    unknown = sorted(set(labels) - set(number))
    if unknown:
        raise RegardError(
            f"{', '.join(where)}: the class {unknown[0]!r} is not in the training data ({', '.join(names)})"
        )
    return np.array([number[label] for label in labels])


@torch.inference_mode()
def predict_logits(
    model: nn.Module, images: np.ndarray, pixels: Pixels, device: torch.device, dtype: torch.dtype, poll: Poll
) -> Tensor:
    """Return the logits (N, classes) of images (N, H, W, channels)."""
    found = []
    size = batch_size(4 * BATCH_TOKENS, model.config.max_len)  # type: ignore[union-attr,arg-type]
    for i in range(0, len(images), size):
        part = normalize(to_floats(torch.from_numpy(images[i : i + size])), pixels["mean"], pixels["std"])
        with autocast(device, dtype):
            found.append(model(part.to(device)).float().cpu())
        poll()
    return torch.cat(found)


def measure(
    model: nn.Module,
    data: LabelledImages,
    names: tuple[str, ...],
    pixels: Pixels,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Return loss and scores on labelled images."""
    logits = predict_logits(model, data.images, pixels, device, dtype, poll)
    truths = torch.from_numpy(data.classes)
    loss = nn.functional.cross_entropy(logits, truths).item()
    return Validation(loss, score_predictions("classification", logits.argmax(-1).tolist(), truths.tolist(), names))


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    """Return loss and scores on `data.test`."""
    images, labels = read_split(config, "test")
    data = LabelledImages(images, class_ids(labels, package.labels, config.data.test))
    check_same_size(
        image_size(images), ", ".join(config.data.test), package.pixels.get("size", image_size(images)), "training"
    )
    return measure(package.model, data, package.labels, package.pixels, device)
