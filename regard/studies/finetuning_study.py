"""`regard study pretraining` and `regard study roformer`: pre-train a few models, fine-tune them on GLUE, compare scores.

Every job is a training run of its own, by the same tasks and training loop as `regard train`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from regard.device import cpu_cores, pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import write_text
from regard.studies.job_pool import describe_machine, describe_setting, load_result, run_missing

Values = dict[str, Any]  # the settings of a recipe


@dataclass(frozen=True)
class Variant:
    """A row of the table: which pre-trained model is fine-tuned, and which settings are changed.

    A `fresh` variant takes only the vocabulary of that model and starts from random weights.
    """

    name: str
    init: str
    fresh: bool = False
    changes: Values = field(default_factory=dict)


@dataclass(frozen=True)
class FinetuningStudy:
    """The models that are pre-trained, and the variants that are fine-tuned on each task."""

    pretrained: dict[str, Values]  # name -> recipe
    tasks: tuple[str, ...]  # names in GLUE_TASKS
    variants: tuple[Variant, ...]
    tune: Values  # the [train] table of fine-tuning


# ---- GLUE -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE: its files and columns, its metric and its training steps.

    The last tenth of the training file chooses the checkpoint. The reported score is measured once, on the labelled test set
    where there is one, else on the development set.
    """

    task: str
    metric: str
    test: str  # the file of the test set, or of the development set where the test has no labels
    columns: dict[str, str]
    steps: int
    test_columns: dict[str, str] | None = None  # where the test file has others

    def data(self, name: str, root: str) -> dict[str, Any]:
        train = f"{name}.train.tsv.xz"
        return {
            "root": root,
            "train": [f"{train}[:90%]"],
            "valid": [f"{train}[90%:]"],
            "test": [self.test],
            **self.columns,
        }


PAIR = {"text_column": "sentence1", "pair_column": "sentence2"}
GLUE_TASKS = {
    "SST-2": GlueTask(
        "classification", "accuracy", "SST-2.test-labeled.tsv.xz",
        {"text_column": "sentence", "label_column": "label"}, 1500,
    ),
    "CoLA": GlueTask("classification", "matthews", "CoLA.dev.tsv.xz", {"text_column": "4", "label_column": "2"}, 800),
    "MRPC": GlueTask(
        "classification", "f1", "MRPC.test-labeled.tsv.xz",
        {"text_column": "#1 String", "pair_column": "#2 String", "label_column": "Quality"}, 600,
    ),
    "STS-B": GlueTask(
        "regression", "spearman", "STS-B.test-labeled.tsv.xz", {**PAIR, "label_column": "score"}, 800,
        {"text_column": "6", "pair_column": "7", "label_column": "5"},
    ),
    "RTE": GlueTask("classification", "accuracy", "RTE.dev.tsv.xz", {**PAIR, "label_column": "label"}, 500),
}  # fmt: skip


# ---- the studies ------------------------------------------------------------------------------------------------------

# `regard study pretraining`: the ablation of the first GPT paper at a small scale. A GPT learns WikiText-2 and is then
# fine-tuned with the language-modelling loss beside the task's, without it, and from random weights.
GPT_SIZES = {"n_decoder_layers": 6, "d_model": 256, "n_heads": 4, "d_ff": 1024, "max_len": 256}
GPT_RECIPE = {
    "task": "causal-lm",
    "tokenizer": {"kind": "bpe", "vocab_size": 8000, "lowercase": True},
    "model": {
        "preset": "gpt-small",
        **GPT_SIZES,
        "positions": "learned",
        "activation": "gelu",
        "scale_embeddings": False,
    },
    "train": {
        **{"steps": 3000, "batch_tokens": 16384, "lr": 1e-3, "warmup": 200, "schedule": "cosine", "weight_decay": 0.1},
        **{"label_smoothing": 0.0, "valid_every": 500, "save_every": 500, "keep": 1, "samples": 0},
    },
}
FINETUNING = {"lr": 3e-4, "schedule": "linear", "batch_tokens": 4096, "label_smoothing": 0.0, "weight_decay": 0.01}
FINETUNING |= {"compile": False}  # compiling takes longer than it saves in a few hundred steps
AUXILIARY = {"train": {"auxiliary": 0.5}}

PRETRAINING = FinetuningStudy(
    pretrained={"gpt": GPT_RECIPE},
    tasks=("SST-2", "CoLA", "MRPC", "RTE"),
    variants=(
        Variant("pre-trained, auxiliary loss", "gpt", changes=AUXILIARY),
        Variant("pre-trained", "gpt"),
        Variant("from scratch, auxiliary loss", "gpt", fresh=True, changes=AUXILIARY),
        Variant("from scratch", "gpt", fresh=True),
    ),
    tune=FINETUNING,
)


# `regard study roformer`: BERT against RoFormer. They differ only in positions, which are learned vectors added to the
# embeddings or rotations of queries and keys (RoPE). Both learn WikiText-2 by masked language modelling.
BERT_SIZES = {"n_encoder_layers": 6, "d_model": 256, "n_heads": 4, "d_ff": 1024, "max_len": 256, "token_types": 2}


def make_bert_recipe(positions: str) -> dict[str, Any]:
    return {
        "task": "masked-lm",
        "tokenizer": {"kind": "wordpiece", "vocab_size": 8000, "lowercase": True},
        "model": {
            **{"preset": "bert-tiny", **BERT_SIZES, "positions": positions, "activation": "gelu"},
            **{"scale_embeddings": False, "embedding_norm": True},
        },
        "train": {
            **{"steps": 5000, "batch_tokens": 16384, "lr": 1e-3, "warmup": 500, "schedule": "cosine"},
            **{"weight_decay": 0.01, "label_smoothing": 0.0, "valid_every": 1000, "save_every": 1000, "keep": 1},
        },
    }


ROFORMER = FinetuningStudy(
    pretrained={"bert": make_bert_recipe("learned"), "roformer": make_bert_recipe("rope")},
    tasks=("MRPC", "SST-2", "STS-B", "CoLA", "RTE"),
    variants=(
        Variant("BERT", "bert"),
        Variant("RoFormer", "roformer"),
    ),
    tune=FINETUNING,
)


# ---- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinetuningStudyJob:
    """A training run of the study, for pre-training or for fine-tuning."""

    name: str
    values: Values
    folder: Path
    device: str
    threads: int
    task: str = ""  # one of GLUE_TASKS; empty for pre-training

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def identity(self) -> dict[str, Any]:
        """Return what the numbers of the job depend on, as JSON values."""
        return json.loads(json.dumps({"values": self.values, **describe_machine(self.device)}))


def run_job(job: FinetuningStudyJob) -> None:
    """Train and score a model, and write the scores; only the model is kept of its run."""
    from regard import tasks
    from regard.device import set_up_device
    from regard.tasks.run import train_config as train
    from regard.tasks.run_config import make_config
    from regard.training.checkpoint import Checkpoints

    config = make_config(job.values, {"train.device": job.device, "train.threads": job.threads})
    train(config, job.run, overwrite=True, quiet=True)
    package = load_model(job.run, set_up_device(config.train)[0])
    columns = GLUE_TASKS[job.task].test_columns if job.task else None
    if columns:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **columns))  # type: ignore[arg-type]
    config = dataclasses.replace(config, model=package.config)
    found = tasks.evaluate(package, config, set_up_device(config.train)[0])
    Checkpoints(job.run / "checkpoints").remove()
    write_text(job.result, json.dumps({"of": job.identity(), "loss": found.loss, "scores": found.scores}, indent=1))


def study(
    plan: FinetuningStudy,
    out: Path,
    text: Path,
    glue: Path,
    tasks: list[str],
    seeds: int = 3,
    jobs: int = 1,
    device: str = "auto",
    quick: bool = False,
) -> Path:
    """Run the jobs that are not done yet; write results.json and table.md into `out`, and return it."""
    wrong = [task for task in tasks if task not in GLUE_TASKS]
    if wrong:
        raise RegardError(f"unknown task '{wrong[0]}': choose among {', '.join(GLUE_TASKS)}")
    where: dict[str, Any] = {"device": str(pick_device(device)), "threads": max(1, cpu_cores() // jobs)}
    first = plan_pretraining(plan, text, out, quick, **where)
    failures = run_missing(run_job, first, jobs)
    second = [] if failures else plan_finetuning(plan, glue, tasks, seeds, out, quick, **where)
    failures += run_missing(run_job, second, jobs)
    if failures:
        reasons = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
        raise RegardError(f"{len(failures)} jobs failed ({reasons}); the same command tries only them again")
    results = collect_results(plan, first, second, tasks, seeds) | {"setting": describe_setting(where["device"], quick)}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results, tasks))
    return out


def plan_pretraining(
    plan: FinetuningStudy, text: Path, out: Path, quick: bool, **where: Any
) -> list[FinetuningStudyJob]:
    """Return a job for each model to pre-train on WikiText-2."""
    data: dict[str, Any] = {"root": str(text.absolute()), "documents": "line"}
    data |= {split: [f"wikitext2.{split}.txt.xz"] for split in ("train", "valid", "test")}
    quick_settings = {"train": {"steps": 4, "valid_every": 4, "save_every": 4, "warmup": 1}} if quick else {}
    return [
        FinetuningStudyJob(
            name,
            merge_settings(merge_settings(values, {"name": name, "data": data}), quick_settings),
            out / "jobs",
            **where,
        )
        for name, values in plan.pretrained.items()
    ]


def plan_finetuning(
    plan: FinetuningStudy, glue: Path, tasks: list[str], seeds: int, out: Path, quick: bool, **where: Any
) -> list[FinetuningStudyJob]:
    """Return a job for each variant, task and seed."""
    jobs = []
    for variant in plan.variants:
        for task in tasks:
            for seed in range(seeds):
                values = make_finetuning_recipe(
                    plan, variant, task, glue, seed, out, 5 if quick else GLUE_TASKS[task].steps
                )
                jobs.append(FinetuningStudyJob(values["name"], values, out / "jobs", **where, task=task))
    return jobs


def make_finetuning_recipe(
    plan: FinetuningStudy, variant: Variant, task: str, glue: Path, seed: int, out: Path, steps: int
) -> Values:
    """Return the recipe of a fine-tuning job."""
    glue_task, init = GLUE_TASKS[task], str((out / "jobs" / variant.init).absolute())
    train = {**plan.tune, "steps": steps, "metric": glue_task.metric, "seed": seed, "warmup": steps // 10, "keep": 1}
    train |= {"valid_every": max(1, steps // 5), "save_every": max(1, steps // 5)}
    values: Values = {
        "name": f"{variant.name}-{task}-{seed}".replace(",", "").replace(" ", "-"),
        "task": glue_task.task,
        "train": train,
    }
    values["data"] = glue_task.data(task, str(glue.absolute()))
    if variant.fresh:
        values |= {"tokenizer": {"file": init}, "model": plan.pretrained[variant.init]["model"]}
    else:
        train["init_from"] = init
    return merge_settings(values, variant.changes)


def merge_settings(values: Values, changes: Values) -> Values:
    """Return `values` with `changes` over them, table by table."""
    both = {k for k, v in changes.items() if isinstance(v, dict) and isinstance(values.get(k), dict)}
    return {**values, **changes, **{k: merge_settings(values[k], changes[k]) for k in both}}


def collect_results(
    plan: FinetuningStudy,
    first: list[FinetuningStudyJob],
    second: list[FinetuningStudyJob],
    tasks: list[str],
    seeds: int,
) -> dict[str, Any]:
    """Return {variant: {task: scores, one a seed}}, and the losses of pre-training."""
    found = {job.name: load_result(job) for job in (*first, *second)}
    rows: dict[str, dict[str, list[float]]] = {v.name: {task: [] for task in tasks} for v in plan.variants}
    jobs = iter(second)
    for variant in plan.variants:
        for task in tasks:
            for _ in range(seeds):
                result = found[next(jobs).name]
                assert result is not None
                rows[variant.name][task].append(result["scores"][GLUE_TASKS[task].metric])
    losses = {job.name: found[job.name]["loss"] for job in first}  # type: ignore[index]
    return {"rows": rows, "pretraining": losses}


def format_table(results: dict[str, Any], tasks: list[str]) -> str:
    """Return a Markdown table of means over seeds with their standard deviation, and the mean over tasks."""
    head = ["", *(f"{task} ({GLUE_TASKS[task].metric})" for task in tasks), "mean"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in results["rows"].items():
        cells = [format_scores(row[task]) for task in tasks]
        lines.append([name, *cells, f"{mean(mean(row[task]) for task in tasks):.1f}"])
    where = results["setting"]
    losses = "; ".join(f"{name} {loss:.3f}" for name, loss in results["pretraining"].items())
    note = f"{where['device']}, torch {where['torch']}, {where['date'][:10]}. Test loss of pre-training: {losses}."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{note}\n\n```\n{where['command']}\n```\n"


def format_scores(scores: list[float]) -> str:
    return f"{mean(scores):.1f} ± {stdev(scores):.1f}" if len(scores) > 1 else f"{scores[0]:.1f}"
