"""Gradient flow: the norm of the gradient of one batch in every layer, and at every time step of recurrent layers.

    measure_gradients("runs/multi30k-en-de").save(Path("gradients.png"))

The batch is the first that the run trained on, in training mode, with its objective; the weights are those of its
finished model, or of its newest checkpoint. For recurrent layers |dL/dh_t|, and |dL/dc_t| of an LSTM, is shown twice:
of the whole loss, to which every step contributes directly, and of the loss at the last step alone, whose gradient
reaches step t only through time.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import Config, recipes
from regard.data.batches import Batch, Cursor
from regard.data.parallel_corpus import parse_direction
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import MANIFEST, write_text
from regard.layers.cells import Cell
from regard.layers.recurrent import Recurrent
from regard.look.figures import Drawable, Lines, Panel, XYLines, draw, finite, write_csv
from regard.look.record import patch_attribute, short_name
from regard.model_folder import ModelPackage
from regard.models.weights import load_weights, weights_of
from regard.tasks import prepare_job
from regard.tasks.run_config import make_config
from regard.text.special_tokens import PAD
from regard.training.checkpoint import Checkpoints
from regard.training.job import Job
from regard.training.metrics_log import print_message
from regard.training.objective import Objective
from regard.training.run_folder import save_initial_model_facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VANISHING, EXPLODING = 1e-3, 1e3  # thresholds of the gradient at the far end relative to that at the near end
LAST_STEP = ", loss at the last step"  # the end of a line's name
SUBLAYER_KINDS = {"self": "self", "cross": "cross", "ff": "ff", "schemes": "positions", "cross_scheme": "positions"}
OTHER_KINDS = {
    "head": "head",
    "prediction_head": "head",
    "pooler": "head",
    "weight_ih": "input",
    "weight_hh": "recurrent",
}


@dataclass(frozen=True)
class ParameterGroup:
    """All parameters of one kind in one layer."""

    layer: str
    kind: str
    parameters: int
    gradient: float  # norm of the gradient
    weight: float  # norm of the parameters

    @property
    def ratio(self) -> float:
        return self.gradient / self.weight if self.weight else math.nan

    def row(self) -> dict[str, Any]:
        return finite({**asdict(self), "gradient / weights": self.ratio})


@dataclass(frozen=True)
class GradientFlow(Drawable):
    """The gradient of one batch, by layer and kind of parameter, and through time."""

    title: str
    parts: tuple[ParameterGroup, ...]
    loss: float
    total: float  # norm of the whole gradient
    clip: float  # train.clip; 0: none
    time: dict[str, dict[str, np.ndarray]]  # recurrent layer -> line -> (T,): |dL/dh_t|

    def figure(self) -> Figure:
        layers = list(dict.fromkeys(part.layer for part in self.parts))
        clip = (("train.clip", self.clip),) if self.clip else ()
        marks = (*clip, (f"all of it: {self.total:.3g}", self.total))
        panels: list[Panel] = [
            self.panel("gradient by layer and kind", layers, "|gradient|", "gradient", marks),
            self.panel("gradient against weights", layers, "|gradient| / |weights|", "ratio"),
        ]
        for name, lines in self.time.items():
            curves = {line: (np.arange(len(values)), values) for line, values in lines.items()}
            panels.append(XYLines(f"{name}: through time", curves, "time step t", "norm of the gradient", log=True))
        figure, lines_above = draw("", panels, 2), [self.title, *self.verdicts()]
        figure.set_figheight(figure.get_figheight() + 0.17 * len(lines_above))
        figure.suptitle("\n".join(lines_above), fontsize=9, parse_math=False)
        return figure

    def panel(self, title: str, layers: list[str], y: str, what: str, marks: Any = ()) -> Lines:
        lines = {part.kind: np.full(len(layers), np.nan) for part in self.parts}
        for part in self.parts:
            value = getattr(part, what)
            lines[part.kind][layers.index(part.layer)] = value if value > 0 else math.nan
        return Lines(title, np.arange(len(layers)), lines, "layer", y, log=True, ticks=tuple(layers), marks=marks)

    def verdicts(self) -> list[str]:
        """Return sentences that compare the ends of every stack and of every time axis."""
        if not math.isfinite(self.total):
            return ["the gradient is not finite: it has exploded"]
        kept = f"makes it {self.clip:g}" if self.total > self.clip else "leaves it as it is"
        clipped = f", and train.clip {self.clip:g} {kept}" if self.clip else ""
        found = [f"the norm of the gradient is {self.total:.3g}{clipped}"]
        for stack, (first, last) in self.depths().items():
            found.append(f"{stack}: the first layer has {verdict(first / last)} of the last one's gradient (rms)")
        for name, lines in self.time.items():
            gains = gradient_over_distance(lines, name)
            if len(gains) > 1:
                left = f"{verdict(gains[-1] / gains[0])} of it arrives {len(gains) - 1} steps before"
                found.append(f"{name}: {left}, a factor of {decay_factor(gains.tolist()):.3f} a step")
        limits = f"vanishing: less than {VANISHING:g} of it is left; exploding: more than {EXPLODING:g} times as much"
        return [*found, limits]

    def depths(self) -> dict[str, tuple[float, float]]:
        """Return the root mean square of the gradient in the first and in the last layer of every stack."""
        squares: dict[str, dict[int, list[float]]] = {}
        for part in self.parts:
            stack, _, number = part.layer.rpartition(".")
            if number.isdigit() and part.kind not in ("norm", "positions"):
                at = squares.setdefault(stack, {}).setdefault(int(number), [0.0, 0.0])
                at[0] += part.gradient**2
                at[1] += part.parameters
        rms = {stack: [math.sqrt(g / n) for _, (g, n) in sorted(found.items())] for stack, found in squares.items()}
        return {stack: (found[0], found[-1]) for stack, found in rms.items() if len(found) > 1 and found[-1] > 0}

    def numbers(self) -> dict[str, Any]:
        time = {name: {line: x.tolist() for line, x in lines.items()} for name, lines in self.time.items()}
        given = {"model": self.title, "loss": self.loss, "norm": self.total, "clip": self.clip, "time": time}
        return finite({**given, "parts": [part.row() for part in self.parts], "verdicts": self.verdicts()})

    def save_csv(self, path: Path) -> None:
        write_csv(path, (part.row() for part in self.parts))

    def __str__(self) -> str:
        return "\n".join(self.verdicts())


def verdict(share: float) -> str:
    word = "vanishing" if share < VANISHING else "exploding" if share > EXPLODING else "even enough"
    return f"{share:.2g} ({word})"


# ---- measuring --------------------------------------------------------------------------------------------------------


def measure_gradients(
    path: Path | str, settings: Mapping[str, Any] | None = None, device: str = "auto"
) -> GradientFlow:
    """Measure the gradients of a run, or of a model with `settings={"data.train": FILE}`.

    Settings have dotted names, as on the command line."""
    with job_of_run(Path(path), settings or {}) as job:
        batch, _ = next(job.batches().iterate_from(Cursor()))
        where = pick_device(device)
        job.model.to(where).train()
        seed = job.config.train.seed
        return gradient_flow(job.objective().to(where), batch.to(where), job.config.train.clip, seed, str(path))


def gradient_flow(
    objective: Objective, batch: Batch, clip: float = 0.0, seed: int = 0, title: str = ""
) -> GradientFlow:
    """Return the gradient of the mean loss of a batch; gradients that parameters have already are discarded."""
    model = objective.model
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng([batch.labels.device] if batch.labels.is_cuda else []):
        loss = mean_loss(objective, batch.inputs, batch.tokens, seed)
        loss.backward()
        parts = tuple(parameter_groups(model))
        model.zero_grad(set_to_none=True)
        time = norms_through_time(objective, batch, seed)
    return GradientFlow(title, parts, loss.item(), math.sqrt(sum(part.gradient**2 for part in parts)), clip, time)


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """Yield the norms of gradients and parameters by layer and kind."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, p in model.named_parameters():
        sums = found.setdefault(layer_and_kind(name), [0.0, 0.0, 0.0])
        gradient = 0.0 if p.grad is None else float(p.grad.double().square().sum())
        for i, value in enumerate((p.numel(), gradient, float(p.detach().double().square().sum()))):
            sums[i] += value
    for (layer, kind), (n, gradient, weight) in found.items():
        yield ParameterGroup(layer, kind, int(n), math.sqrt(gradient), math.sqrt(weight))


def layer_and_kind(parameter: str) -> tuple[str, str]:
    """Return the layer and the kind of a parameter: encoder.0, self for "encoder.blocks.0.sublayers.self.qkv.weight"."""
    parts = [part for part in short_name(parameter).split(".") if part not in ("layers", "forward_", "backward_")]
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        layer = ".".join(part for part in parts[: number + 1] if part != "schemes")
    else:
        layer = ".".join(parts[:2]) if parts[0] in ("encoder", "decoder") and len(parts) > 2 else parts[0]
    if any(part.endswith(("norm", "norms")) for part in parts):
        return layer, "norm"
    if parts[-1] == "bias" and (parts[-2].isdigit() or parts[-2] == "cell"):
        return layer, "bias"
    for known in (SUBLAYER_KINDS, OTHER_KINDS):
        if kind := next((known[part] for part in parts if part in known), ""):
            return layer, kind
    return layer, "embedding" if "embedding" in parts[0] or parts[0] in ("types", "patches", "summary") else "other"


def decay_factor(gains: Sequence[float]) -> float:
    """Return the r of the least-squares line log G(k) = a + k log r."""
    k = np.arange(1, len(gains) + 1)
    return math.exp(np.polyfit(k, np.log(gains), 1)[0])


# ---- recurrent layers through time ------------------------------------------------------------------------------------


def mean_loss(objective: Objective, inputs: Sequence[Tensor], count: int, seed: int) -> Tensor:
    """Return the loss per scored label, with the dropout of this seed."""
    torch.manual_seed(seed)
    return objective(*inputs)[0] / count


def norms_through_time(objective: Objective, batch: Batch, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Return |dL/dh_t|, and |dL/dc_t| of an LSTM, of every recurrent layer, over the rows of the batch.

    They are those of the whole loss, and of the last scored step where there are several."""
    if not any(isinstance(module, Cell) for module in objective.modules()):
        return {}
    found = norms_of_states(objective, batch.inputs, batch.tokens, seed, "")
    labels = batch.labels
    if labels.dim() == 2 and (scored := (labels != PAD).any(0).nonzero()).numel() > 1:
        last = torch.full_like(labels, PAD)
        last[:, scored[-1]] = labels[:, scored[-1]]
        count = max(1, int((last != PAD).sum()))
        for name, lines in norms_of_states(objective, (*batch.inputs[:-1], last), count, seed, LAST_STEP).items():
            found[name] |= lines
    return found


def norms_of_states(
    objective: Objective, inputs: Sequence[Tensor], count: int, seed: int, note: str
) -> dict[str, dict[str, np.ndarray]]:
    """Return the norms of the loss's gradient at every state of every recurrent layer; `note` ends their names."""
    with record_states(objective.model) as states:
        loss = mean_loss(objective, inputs, count, seed)
    flat = [part for steps in states.values() for state in steps for part in state]
    norms = iter(
        [0.0 if g is None else float(g.double().norm()) for g in torch.autograd.grad(loss, flat, allow_unused=True)]
    )
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, steps in states.items():
        by_part = np.array([[next(norms) for _ in state] for state in steps]).T  # (1 or 2, T)
        by_part = by_part[:, ::-1] if name.endswith("backward") else by_part
        found[name] = {f"|{line}|{note}": values for line, values in zip(("dL/dh", "dL/dc"), by_part, strict=False)}
    return found


@contextmanager
def record_states(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, ...]]]]:
    """Record the state after every step of every cell, with fused kernels off so that cells run step by step."""
    recorded: dict[str, list[tuple[Tensor, ...]]] = {}
    with ExitStack() as entered:
        for attribute in ("fuses", "fuses_padded"):
            layers = {m: False for m in model.modules() if isinstance(m, Recurrent)}
            entered.enter_context(patch_attribute(layers, attribute))
        for path, cell in model.named_modules():
            if isinstance(cell, Cell):
                steps = recorded.setdefault(cell_name(path), [])
                hook = cell.register_forward_hook(lambda _, given, result, steps=steps: steps.append(result[0]))
                entered.callback(hook.remove)
        yield recorded


def cell_name(path: str) -> str:
    """Return "recurrent.0.forward" for the module path "recurrent.layers.0.forward_"."""
    return ".".join(part.rstrip("_") for part in short_name(path).split(".") if part != "layers")


def gradient_over_distance(lines: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return |dL/ds| from the last step back to the first, where s is the whole state and L the loss at the last step.

    It is empty for encoders: the gradients of their states come from many steps of the decoder at once."""
    if name.startswith("encoder"):
        return np.zeros(0)
    alone = [values for line, values in lines.items() if line.endswith(LAST_STEP)]
    whole = np.sqrt(sum((values**2 for values in alone or lines.values()), np.zeros(1)))
    whole = whole if name.endswith("backward") else whole[::-1]
    return whole[whole > 0]


# ---- the training job of a run ----------------------------------------------------------------------------------------


@contextmanager
def job_of_run(path: Path, settings: Mapping[str, Any]) -> Iterator[Job]:
    """Yield the training job of a run with its trained weights; its folder is not changed, since a copy is used."""
    begun = (path / "config.toml").exists()
    finished = not begun or (path / "model" / "config.json").exists()
    package = load_model(path, torch.device("cpu"), "fp32") if finished else None
    config = (
        make_config(recipes.load(path / "config.toml"), settings) if begun else config_of_model(package, path, settings)
    )
    with tempfile.TemporaryDirectory() as temporary:
        draft = Path(temporary)
        # A folder with a checkpoint counts as a run that has begun (tasks/initial_model.py). Without this empty one,
        # preparing the job would load train.init_from and train.pretrained_embeddings again, and replace the facts about
        # the initial model.
        write_text(draft / "checkpoints" / "step-00000000" / MANIFEST, "")
        for file in [*path.glob("tokenizer*.json"), *path.glob("start.json")] if begun else []:
            shutil.copy(file, draft)
        if package is not None and package.tokenizers and not any(draft.glob("tokenizer*.json")):
            package.tokenizers.save(draft)
        if package is not None and not begun:
            save_initial_model_facts(draft, package)
        job = prepare_job(draft, config, quiet=True)
        load_weights(job.model, newest_weights(path) if package is None else weights_of(package.model), path)
        yield job


def newest_weights(run: Path) -> dict[str, Tensor]:
    """Return the weights of the newest checkpoint of a run."""
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.newest(warn=print_message)
    if step is None:
        raise RegardError(f"the run {run} has no weights yet: continue it with `regard resume {run}`")
    return checkpoints.average([step])


def config_of_model(package: ModelPackage | None, path: Path, settings: Mapping[str, Any]) -> Config:
    """Return the configuration of a model without a run, whose data are in `settings`."""
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
