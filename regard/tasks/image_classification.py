"""Image classification: pictures in idx files or folders, lightly moved about in training."""

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
from regard.data.image_files import augment, mean_and_std, normalize, read_images, to_floats
from regard.data.parallel_corpus import part_of
from regard.data.text_batches import in_batches
from regard.device import autocast
from regard.errors import RegardError
from regard.metrics.classification_scores import score_predictions
from regard.model_folder import ModelPackage
from regard.tasks.initial_model import Start
from regard.tasks.text_data import check_task
from regard.text.special_tokens import EMPTY_TEMPLATE
from regard.training.job import Job, Poll, Validation
from regard.training.objective import ClassObjective, Objective
from regard.training.validation import BATCH_TOKENS

Pixels = dict[str, list[float]]  # mean and std of each channel; size: height and width


@dataclass(frozen=True)
class Pictures:
    images: np.ndarray  # (N, H, W, channels), uint8
    classes: np.ndarray  # (N,)

    def __len__(self) -> int:
        return len(self.images)

    def key(self) -> str:
        found = hashlib.sha256(np.ascontiguousarray(self.images).data)
        found.update(np.ascontiguousarray(self.classes).data)
        return found.hexdigest()[:32]


class ImageBatches(Batches):
    """(images, labels): (B, channels, H, W) fp32, and (B,), -1 = not scored."""

    def __init__(
        self, pictures: Pictures, pixels: Pixels, size: int, seed: int, moves: DataConfig | None = None
    ) -> None:
        super().__init__(seed)
        self.pictures, self.pixels, self.size, self.moves = pictures, pixels, size, moves

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        return in_batches(rng.permutation(len(self.pictures)), self.size, self.pictures.images.shape[1])

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        filled = np.resize(rows, self.size)
        labels = self.pictures.classes[filled]
        labels[len(rows) :] = -1
        images = to_floats(torch.from_numpy(self.pictures.images[filled]))
        if self.moves is not None:
            generator, data = torch.Generator().manual_seed(int(rng.integers(1 << 62))), self.moves
            images = augment(images, generator, data.shift, data.rotate, data.scale, data.flip)
        images = normalize(images, self.pixels["mean"], self.pixels["std"])
        return Batch((images.contiguous(), torch.from_numpy(labels)), len(rows))


@dataclass(frozen=True)
class ImagesJob(Job):
    train: Pictures
    valid: Pictures
    names: tuple[str, ...]
    pixels: Pixels

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "f1", "matthews")

    def batches(self) -> ImageBatches:
        train, data = self.config.train, self.config.data
        moves = data if data.shift or data.rotate or data.scale or data.flip else None
        return ImageBatches(
            self.train, self.pixels, batch_size(train.batch_tokens, self.sizes.max_len), train.seed, moves
        )

    def objective(self) -> Objective:
        return ClassObjective(self.model, self.config.train.label_smoothing)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        return measure(model, self.valid, self.names, self.pixels, device, dtype, poll)

    def package(self) -> ModelPackage:
        return replace(super().package(), labels=self.names, pixels=self.pixels)

    def next_steps(self) -> list[str]:
        return [*super().next_steps(), f"regard classify {self.folder} picture.png"]


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> ImagesJob:
    check_task(config)
    start = Start.of(folder, config, quiet)
    images, labels = read(config, "train")
    names = tuple(sorted(set(labels), key=lambda name: (len(name), name) if name.isdigit() else (0, name)))
    train = Pictures(images, class_numbers(labels, names, config.data.train))
    valid_images, valid_labels = read(config, "valid")
    valid = Pictures(valid_images, class_numbers(valid_labels, names, config.data.valid))
    same_size(size_of(valid_images), ", ".join(config.data.valid), size_of(images), ", ".join(config.data.train))
    pixels = start.kept.get("pixels") or dict(zip(("mean", "std"), map(list, mean_and_std(images)), strict=True))
    pixels = {**pixels, "size": list(size_of(images))}
    rows, columns = (side // config.model.value("vit.patch_size") for side in size_of(images))
    model = start.model(replace(config.model, max_len=1 + rows * columns, n_classes=len(names)))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    amount = f"{len(train):,} training images"
    return ImagesJob(folder, config, model, None, EMPTY_TEMPLATE, train.key(), amount, train, valid, names, pixels)


def read(config: Config, split: str) -> tuple[np.ndarray, list[str]]:
    data = config.data
    specs = getattr(data, split)
    if not specs:
        raise RegardError(f"data.{split} names no images: set it in the recipe or with --data.{split} FILES")
    parts = [read_part(spec, data, config.model.value("vit.image_channels")) for spec in specs]
    side = config.model.value("vit.patch_size")
    for spec, (images, _) in zip(specs, parts, strict=True):
        if images.shape[1] % side or images.shape[2] % side:
            raise RegardError(
                f"the images of {spec} are {images.shape[2]} x {images.shape[1]} pixels, which patches of {side} x {side} "
                f"do not fill: set model.vit.patch_size to a divisor, or data.image_size to a multiple"
            )
        same_size(size_of(images), spec, size_of(parts[0][0]), specs[0])
    return np.concatenate([images for images, _ in parts]), [label for _, labels in parts for label in labels]


def size_of(images: np.ndarray) -> tuple[int, int]:
    """Height and width of (N, H, W, channels)."""
    return images.shape[1], images.shape[2]


def same_size(size: Sequence[float], where: str, first: Sequence[float], there: str) -> None:
    if list(size) != list(first):
        (h, w), (first_h, first_w) = size, first
        raise RegardError(
            f"the images of {where} are {w} x {h} pixels, those of {there} {first_w} x {first_h}: set data.image_size"
        )


def read_part(spec: str, data: DataConfig, channels: int) -> tuple[np.ndarray, list[str]]:
    """The images a spec names; `[:90%]` at its end means the first of them, in a folder the first of every class."""
    name, (first, last) = part_of(spec)
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


def class_numbers(labels: list[str], names: tuple[str, ...], where: tuple[str, ...]) -> np.ndarray:
    number = {name: i for i, name in enumerate(names)}
    unknown = sorted(set(labels) - set(number))
    if unknown:
        raise RegardError(
            f"{', '.join(where)}: the class {unknown[0]!r} is not in the training data ({', '.join(names)})"
        )
    return np.array([number[label] for label in labels])


@torch.inference_mode()
def answers(
    model: nn.Module, images: np.ndarray, pixels: Pixels, device: torch.device, dtype: torch.dtype, poll: Poll
) -> Tensor:
    """Logits (N, classes) of images (N, H, W, channels)."""
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
    pictures: Pictures,
    names: tuple[str, ...],
    pixels: Pixels,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    logits = answers(model, pictures.images, pixels, device, dtype, poll)
    truths = torch.from_numpy(pictures.classes)
    loss = nn.functional.cross_entropy(logits, truths).item()
    return Validation(loss, score_predictions("classification", logits.argmax(-1).tolist(), truths.tolist(), names))


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    images, labels = read(config, "test")
    pictures = Pictures(images, class_numbers(labels, package.labels, config.data.test))
    same_size(size_of(images), ", ".join(config.data.test), package.pixels.get("size", size_of(images)), "training")
    return measure(package.model, pictures, package.labels, package.pixels, device)
