"""Images in training: parts of folders and files, sizes that must agree, and what is remembered of the pictures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from little import config_of, learn, write_all
from PIL import Image

from regard import model_folder as folders
from regard.config import DataConfig
from regard.errors import RegardError
from regard.tasks.image_classification import LabelledImages, evaluate, read_spec

CPU = torch.device("cpu")


def draw(folder: Path, cats: int = 3, dogs: int = 3, size: int = 8) -> None:
    """Grey squares: cats from 0 on, dogs from 100."""
    for label, n, first in (("cat", cats, 0), ("dog", dogs, 100)):
        (folder / label).mkdir(parents=True)
        for i in range(n):
            Image.new("L", (size, size), first + i).save(folder / label / f"{i}.png")


def test_a_part_of_a_folder_is_that_part_of_every_class(tmp_path: Path) -> None:
    draw(tmp_path / "animals", cats=10, dogs=5)
    data = DataConfig(root=str(tmp_path))
    (first, some), (last, rest) = (read_spec(f"animals[{part}]", data, 1) for part in (":80%", "80%:"))
    assert (Counter(some), Counter(rest)) == ({"cat": 8, "dog": 4}, {"cat": 2, "dog": 1})
    assert last[:, 0, 0, 0].tolist() == [8, 9, 104]
    assert first[:, 0, 0, 0].tolist() == [*range(8), *range(100, 104)]


def test_a_part_of_idx_files_is_in_their_order(tmp_path: Path) -> None:
    write_all(tmp_path)
    images, labels = read_spec("pictures.idx|classes.idx[:25%]", DataConfig(root=str(tmp_path)), 1)
    assert labels == ["0", "1"] * 7 + ["0"]
    assert len(images) == 15


def test_pictures_are_known_by_every_pixel_and_class() -> None:
    images, classes = np.zeros((2, 3, 4, 1), np.uint8), np.array([0, 1])
    key, other = LabelledImages(images, classes).key(), images.copy()
    other[1, 2, 3] = 1
    assert len({key, LabelledImages(other, classes).key(), LabelledImages(images, classes[::-1]).key()}) == 3
    assert LabelledImages(images.copy(), classes.copy()).key() == key


@pytest.mark.parametrize("other", [4, 16])
@pytest.mark.parametrize(("train", "valid"), [(["animals"], ["more"]), (["animals", "more"], ["animals"])])
def test_pictures_of_two_sizes_are_refused(tmp_path: Path, other: int, train: list[str], valid: list[str]) -> None:
    draw(tmp_path / "animals")
    draw(tmp_path / "more", size=other)
    config = config_of(tmp_path, "image-classification", **{"data.train": train, "data.valid": valid})
    words = rf"images of more are {other} x {other} pixels, those of animals 8 x 8: set data\.image_size"
    with pytest.raises(RegardError, match=words):
        learn(config, tmp_path / "run")


def test_a_model_remembers_the_size_of_its_pictures_and_is_tested_on_no_other(tmp_path: Path) -> None:
    draw(tmp_path / "animals")
    draw(tmp_path / "more", size=4)
    changes = {"data.train": ["animals"], "data.valid": ["animals"], "data.test": ["more"], "train.steps": 1}
    config = config_of(tmp_path, "image-classification", **changes)
    package = folders.load(learn(config, tmp_path / "run"), CPU)
    assert package.pixels["size"] == [8, 8]
    with pytest.raises(RegardError, match=r"images of more are 4 x 4 pixels, those of training 8 x 8"):
        evaluate(package, config, CPU)
