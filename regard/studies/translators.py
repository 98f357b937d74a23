"""Five translators of Multi30k, German to English, from before attention to nothing but attention.

Each is trained once, by the settings of its recipe, on the same vocabulary and the same batches, for every study that
compares them: studies whose folders lie side by side share what is trained, in the folder `translators` beside them. A job
trains one model, counts what that cost, and translates the test sets, so that a study only has to score.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

from regard.config import Config
from regard.data.batches import PairBatches, batch_size
from regard.data.parallel_corpus import ParallelCorpus
from regard.device import cpu_cores, pick_device
from regard.errors import RegardError
from regard.files import read_json, write_text
from regard.inference.translator import Translator, load_translator
from regard.models.analysis.cost import Cost
from regard.studies.finetuning import Values, merged
from regard.studies.job import machine
from regard.studies.pool import result_of, run_missing
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config
from regard.tasks.translation import TranslationJob, prepare_job
from regard.training.checkpoint import Checkpoints, Progress
from regard.training.metrics_log import print_message

Pair = tuple[str, ...]  # source, target

# ---- what is trained: recipes/multi30k-*.toml, but one direction and one vocabulary for all ---------------------------

COMMON: Values = {
    "data": {
        **{"source": "de", "target": "en", "train": ["train.{lang}.xz"], "valid": ["val.{lang}.xz"]},
        "test": ["test_2016_flickr.{lang}.xz"],
    },
    "tokenizer": {"kind": "bpe", "vocab_size": 10000, "lowercase": True},
}
ATTENTIVE: Values = {  # how ConvS2S and the Transformer are trained
    **{"steps": 4000, "batch_tokens": 8192, "warmup": 1000, "weight_decay": 1e-4},
    **{"valid_every": 4000, "save_every": 200, "average": 8},
}
RECURRENT: Values = {
    "model": {
        **{"dropout": 0.4, "max_len": 256},
        "recurrent": {"hidden_dropout": 0.4, "output_dropout": 0.4, "weight_dropout": 0.1},
    },
    "train": {
        **{"steps": 5000, "batch_tokens": 8192, "lr": 2e-3, "warmup": 500, "schedule": "cosine", "weight_decay": 1e-4},
        **{"valid_every": 1000, "save_every": 200, "average": 8, "metric": "bleu"},
    },
    "decode": {"beam": 5},
}
MODELS: dict[str, Values] = {
    "lstm": merged(RECURRENT, {"model": {"preset": "sutskever-small"}}),
    "rnnenc": merged(RECURRENT, {"model": {"preset": "rnnenc-small"}}),
    "rnnsearch": merged(RECURRENT, {"model": {"preset": "rnnsearch-small"}}),
    "convs2s": {
        "model": {
            **{"preset": "convs2s-small", "dropout": 0.3, "attention_dropout": 0.1, "max_len": 256},
            "convolution": {"kernel": 3},
        },
        "train": {**ATTENTIVE, "lr": 3e-3},
        "decode": {"beam": 5},
    },
    "transformer": {  # of the sizes published for this corpus
        "model": {
            **{"preset": "transformer-tiny", "max_len": 256},
            **{"dropout": 0.3, "attention_dropout": 0.1, "ff_dropout": 0.1},
        },
        "train": {**ATTENTIVE, "lr": 5e-3},
        "decode": {"beam": 5},
    },
}
TITLES = {
    **{"lstm": "LSTM, one vector", "rnnenc": "RNNenc: GRU, one vector", "rnnsearch": "RNNsearch: GRU and attention"},
    **{"convs2s": "ConvS2S: convolution and attention", "transformer": "Transformer: attention alone"},
}
COLOURS = {  # can be told apart without red and green (Okabe and Ito)
    **{"lstm": "#000000", "rnnenc": "#D55E00", "rnnsearch": "#0072B2", "convs2s": "#009E73", "transformer": "#CC79A7"},
}

TESTS = ("test_2016_flickr", "test_2017_flickr")
JOINS = (1, 2, 3, 4)  # neighbouring sentences that are read as one
# What a study watches more often than a recipe asks for; nothing that is learned depends on it.
WATCHED: Values = {"train": {"valid_every": 500, "valid_sentences": 100, "samples": 0}}
QUICK: Values = {
    "train": {
        **{"steps": 4, "batch_tokens": 512, "warmup": 1, "average": 1, "compile": False},
        **{"valid_every": 2, "save_every": 2},
    },
    "decode": {"beam": 1, "max_len_a": 1.0, "max_len_b": 5},
}
QUICK_SENTENCES = 12  # of each test set


def values_of(name: str, quick: bool = False) -> Values:
    """The settings of a run: its recipe's, watched more closely."""
    values = merged(merged(COMMON, MODELS[name]), WATCHED)
    return merged({"name": name, **values}, QUICK if quick else {})


# ---- what is translated -------------------------------------------------------------------------------------------------


def joined(pairs: Sequence[Pair], n: int) -> list[Pair]:
    """Each `n` neighbours as one pair; those left over at the end are left out."""
    groups = [pairs[i : i + n] for i in range(0, len(pairs) - n + 1, n)]
    return [tuple(" ".join(side) for side in zip(*group, strict=True)) for group in groups]


def corpus(data: Path, split: str) -> ParallelCorpus:
    return ParallelCorpus((f"{split}.{{lang}}.xz",), COMMON["data"]["source"], COMMON["data"]["target"], data, split)


def read_tests(data: Path, quick: bool = False) -> dict[str, list[Pair]]:
    """The sentences of each test set. Nothing was chosen by them: neither weights nor settings."""
    return {test: list(islice(corpus(data, test).rows(), QUICK_SENTENCES if quick else None)) for test in TESTS}


def translations(translator: Translator, tests: dict[str, list[Pair]]) -> dict[str, dict[str, list[str]]]:
    """{test set: {sentences joined: hypotheses}}"""

    def said(pairs: list[Pair]) -> list[str]:
        return [found.text for found in translator.translate_sentences([pair[0] for pair in pairs])]

    return {test: {str(n): said(joined(pairs, n)) for n in JOINS} for test, pairs in tests.items()}


# ---- what training cost -------------------------------------------------------------------------------------------------


def widths(batches: PairBatches) -> Iterator[int]:
    """Of the batches of a run, in order."""
    for epoch in count():
        yield from (width for width, _ in batches.plan(epoch))


def spent(job: TranslationJob, batches: int) -> list[int]:
    """FLOPs after each of the first batches of a run. Padding is computed too, so it counts."""
    data, passes = job.batches(), job.objective().passes

    cost = Cost(job.config.model)

    def flops(width: int) -> int:
        return passes * cost.training_flops(batch_size(data.batch_tokens, width), width, width)

    return list(accumulate(flops(width) for width in islice(widths(data), batches)))


def curve(run: Path, flops: Sequence[int], per_step: int) -> list[dict[str, float]]:
    """The validation loss during training, and the FLOPs up to there."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {"step": line["step"], "flops": flops[line["step"] * per_step - 1], "loss": line["loss"]}
        for line in lines
        if line["kind"] == "valid"
    ]


# ---- jobs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    name: str
    values: Values
    folder: Path
    data: Path
    texts: str  # a hash of all that is read
    device: str
    threads: int
    quick: bool

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def identity(self) -> dict[str, Any]:
        """What its numbers depend on, as JSON gives it back."""
        return json.loads(json.dumps({"values": self.values, "texts": self.texts, **machine(self.device)}))

    def config(self) -> Config:
        where = {"data.root": str(self.data), "train.device": self.device, "train.threads": self.threads}
        return make_config(self.values, where)


def run_job(job: Job) -> None:
    """Train, count, translate; the model and the numbers are kept."""
    config = job.config()
    train(config, job.run, overwrite=True, quiet=True)
    done, per_step = progress_of(job.run), config.train.accumulate
    flops = spent(prepare_job(job.run, config, quiet=True), done.step * per_step)
    translator = load_translator(job.run, job.device)
    found = {
        "of": job.identity(),
        "parameters": sum(p.numel() for p in translator.model.parameters()),
        "steps": done.step,
        "tokens": done.tokens,
        "seconds": done.seconds,
        "flops": flops[-1],
        "curve": curve(job.run, flops, per_step),
        "translations": translations(translator, read_tests(job.data, job.quick)),
    }
    Checkpoints(job.run / "checkpoints").remove()
    write_text(job.result, json.dumps(found, indent=1, ensure_ascii=False))


def progress_of(run: Path) -> Progress:
    """Where a finished run stood at its end."""
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.newest(warn=print_message)
    assert newest is not None  # training saves at its end
    return Progress.from_dict(read_json(checkpoints.path(newest) / "state.json")["progress"])


def plan(names: Sequence[str], out: Path, data: Path, jobs: int, device: str, quick: bool) -> list[Job]:
    """A job for each model. What is wrong with the data is said here, before anything is trained."""
    prints = [corpus(data, split).fingerprint() for split in ("train", "val", *TESTS)]
    texts = hashlib.sha256("".join(prints).encode()).hexdigest()
    folder = out.absolute().parent / ("translators-quick" if quick else "translators")
    where = (folder, data.absolute(), texts, str(pick_device(device)), max(1, cpu_cores() // jobs), quick)
    return [Job(name, values_of(name, quick), *where) for name in names]


def train_all(
    names: Sequence[str], out: Path, data: Path, jobs: int, device: str, quick: bool
) -> dict[str, dict[str, Any]]:
    """The results of the models named, of which only those are trained that were not yet."""
    if jobs < 1:
        raise RegardError(f"a study needs at least 1 job at a time, not {jobs}")
    todo = plan(names, out, data, jobs, device, quick)
    failures = run_missing(run_job, todo, jobs)
    if failures:
        told = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
        raise RegardError(
            f"{len(failures)} of {len(todo)} trainings failed ({told}); the same command tries only them again"
        )
    results = {job.name: result_of(job) for job in todo}
    return {name: result for name, result in results.items() if result is not None}
