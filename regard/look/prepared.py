"""What a run trains on and with, got ready to be looked at: its data, its objective and its trained weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import model_folder
from regard.config import Config, recipes
from regard.data.parallel_corpus import parse_direction
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import MANIFEST, write_text
from regard.models.weights import load_weights, weights_of
from regard.tasks import prepare_job
from regard.tasks.run_config import make_config
from regard.training.checkpoint import Checkpoints
from regard.training.job import Job
from regard.training.metrics_log import print_message
from regard.training.run_folder import save_initial_model_facts


@contextmanager
def prepared(path: Path, settings: Mapping[str, Any]) -> Iterator[Job]:
    """A run's data, objective and trained weights, without a change to its folder: a copy of what it began with is used."""
    begun = (path / "config.toml").exists()
    finished = not begun or (path / "model" / "config.json").exists()
    package = load_model(path, torch.device("cpu"), "fp32") if finished else None
    config = make_config(recipes.load(path / "config.toml"), settings) if begun else config_of(package, path, settings)
    with tempfile.TemporaryDirectory() as temporary:
        draft = Path(temporary)
        write_text(draft / "checkpoints" / "step-00000000" / MANIFEST, "")  # a run that has begun learns nothing anew
        for file in [*path.glob("tokenizer*.json"), *path.glob("start.json")] if begun else []:
            shutil.copy(file, draft)
        if package is not None and package.tokenizers and not any(draft.glob("tokenizer*.json")):
            package.tokenizers.save(draft)
        if package is not None and not begun:
            save_initial_model_facts(draft, package)
        job = prepare_job(draft, config, quiet=True)
        load_weights(job.model, newest(path) if package is None else weights_of(package.model), path)
        yield job


def newest(run: Path) -> dict[str, Tensor]:
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.newest(warn=print_message)
    if step is None:
        raise RegardError(f"the run {run} has no weights yet: go on with `regard resume {run}`")
    return checkpoints.average([step])


def config_of(package: model_folder.ModelPackage | None, path: Path, settings: Mapping[str, Any]) -> Config:
    """That of a model without a run, whose data are given."""
    assert package is not None
    if "data.train" not in settings:
        raise RegardError(f"{path} is a model without its run: say what it shall read with --data.train FILE")
    specs = settings["data.train"]
    if package.directions and not all(parse_direction(x)[1] for x in ([specs] if isinstance(specs, str) else specs)):
        raise RegardError(
            f"{path} translates {', '.join(package.directions)}: say which of them the file is for, as in --data.train "
            f"'{specs}@{package.directions[0]}'"
        )
    data = {"source": package.source, "target": package.target, "valid": settings["data.train"]}
    values = {"task": package.task, "data": data, "model": recipes.to_dict(package.config)}
    if package.tokenizers:
        values["tokenizer"] = {"joint": package.tokenizers.source is package.tokenizers.target}
    return make_config(values, settings)
