"""Image preprocessing of an imported ViT: read from the folder, or the usual values with a note in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import CPU, imported, transformers
from PIL import Image

from regard import model_folder as folders
from regard.errors import RegardError
from regard.exchange.huggingface import read_huggingface
from regard.inference.classifier import Classifier

SAID: dict[str, Any] = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_resize": True}
SAID |= {"size": {"height": 12, "width": 12}, "image_processor_type": "ViTImageProcessor"}


@pytest.mark.parametrize(
    "said",
    [SAID, {**SAID, "do_normalize": False}, {**SAID, "do_rescale": False}, {**SAID, "rescale_factor": 1 / 100}, {}],
    ids=["normalised", "not normalised", "not rescaled", "rescaled otherwise", "nothing said"],
)
def test_a_picture_gets_the_class_it_has_there(said: dict[str, Any], tmp_path: Path) -> None:
    peer, _, _ = imported("vit", tmp_path)
    if said:
        (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(said))
    array = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    Image.fromarray(array).save(tmp_path / "x.png")
    processor = transformers.ViTImageProcessor(**(said or {"size": SAID["size"]}))
    with torch.no_grad():
        theirs = peer(**processor(Image.fromarray(array), return_tensors="pt")).logits.softmax(-1)[0]
    package, report = read_huggingface(tmp_path / "vit", CPU)
    folders.save(tmp_path / "saved", package, "")
    ours = Classifier.load(tmp_path / "saved", "cpu").classify([str(tmp_path / "x.png")])[0]
    torch.testing.assert_close(torch.tensor(list(ours.probabilities.values())), theirs, atol=1e-4, rtol=1e-3)
    assert package.pixels["size"] == [12, 12]
    assert any("no preprocessor_config.json" in note for note in report.notes) == (not said)


@pytest.mark.parametrize("said", [{"image_mean": [0.5]}, {"image_mean": "grey"}, {"image_std": None}])
def test_numbers_that_do_not_fit_are_refused(said: dict[str, Any], tmp_path: Path) -> None:
    imported("vit", tmp_path)
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps({**SAID, **said}))
    with pytest.raises(RegardError, match=r"preprocessor_config\.json has"):
        read_huggingface(tmp_path / "vit", CPU)
