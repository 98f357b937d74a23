"""Translation models of Multi30k, German to English: the systems of Table 2 of the Transformer's paper at a small scale.

Each is trained once, by the settings of its recipe, for every study that compares them: studies whose folders lie side by
side share the trained models, in the folder `translators` beside them. All have the same vocabulary and the same batches,
but for Deep-Att, whose vocabulary is of words. A job trains one model, counts its FLOPs, and translates the validation
data and the test sets.
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
from regard.inference.translator import Translator
from regard.models.analysis.cost import Cost
from regard.studies.finetuning_study import Values, merge_settings
from regard.studies.job_pool import describe_machine, load_result, run_missing
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config
from regard.tasks.translation import TranslationJob, prepare_job
from regard.training.checkpoint import Checkpoints, Progress
from regard.training.metrics_log import print_message

Pair = tuple[str, ...]  # source, target

# ---- settings: those of the recipes multi30k-*, but with one direction and one vocabulary for all -----------------------

COMMON: Values = {
    "data": {
        **{"source": "de", "target": "en", "train": ["train.{lang}.xz"], "valid": ["val.{lang}.xz"]},
        "test": ["test_2016_flickr.{lang}.xz"],
    },
    "tokenizer": {"kind": "bpe", "vocab_size": 10000, "lowercase": True},
}
PARALLEL: Values = {  # training of ConvS2S and the Transformer
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
    "lstm": merge_settings(RECURRENT, {"model": {"preset": "sutskever-small"}}),
    "rnnenc": merge_settings(RECURRENT, {"model": {"preset": "rnnenc-small"}}),
    "rnnsearch": merge_settings(RECURRENT, {"model": {"preset": "rnnsearch-small"}}),
    "convs2s": {
        "model": {
            **{"preset": "convs2s-small", "dropout": 0.3, "attention_dropout": 0.1, "max_len": 256},
            "convolution": {"kernel": 3},
        },
        "train": {**PARALLEL, "lr": 3e-3},
        "decode": {"beam": 5},
    },
    "transformer": {  # the sizes published for this corpus
        "model": {
            **{"preset": "transformer-tiny", "max_len": 256},
            **{"dropout": 0.3, "attention_dropout": 0.1, "ff_dropout": 0.1},
        },
        "train": {**PARALLEL, "lr": 5e-3},
        "decode": {"beam": 5},
    },
}
MODELS["bytenet"] = merge_settings(MODELS["convs2s"], {"model": {"preset": "bytenet-small"}})
del MODELS["bytenet"]["model"]["convolution"]
MODELS["gnmt"] = merge_settings(RECURRENT, {"model": {"preset": "gnmt-small"}})
MODELS["experts"] = merge_settings(
    RECURRENT,
    {
        "model": {
            **{"preset": "gnmt-small", "n_encoder_layers": 3, "n_decoder_layers": 2},
            **{"recurrent_feedforward": "noisy-experts", "recurrent": {"d_ff": 512}},
        }
    },
)
MODELS["deep-att"] = merge_settings(
    RECURRENT,
    {
        "tokenizer": {"kind": "word", "positional_unknown": 7},
        "model": {"preset": "deep-att-small"},
        "decode": {"replace_unknown": "copy"},
    },
)
# Members of ensembles differ by their seed alone. Those of the Transformer are wider than `transformer`, so that they differ
# more in their errors.
WIDE: Values = {"model": {"d_model": 256, "d_ff": 1024, "dropout": 0.4}, "train": {"lr": 2e-3}}
MODELS |= {
    f"wide-{n}": merge_settings(merge_settings(MODELS["transformer"], WIDE), {"train": {"seed": n}}) for n in (1, 2, 3)
}
MODELS |= {
    f"{name}-seed-{n}": merge_settings(MODELS[name], {"train": {"seed": n}})
    for name in ("deep-att", "gnmt", "convs2s")
    for n in (1, 2)  # the recipes have seed 0
}
REWARD: Values = {  # fine-tuning on a reward: a model has the sizes and the vocabulary of the one that it starts from
    # Without dropout, so that what is scored is what was sampled.
    "model": {"max_len": 256, "dropout": 0.0},
    "train": {
        **{"objective": "reward", "steps": 400, "batch_tokens": 2048, "lr": 2e-4, "schedule": "constant", "warmup": 50},
        **{"label_smoothing": 0.0, "save_every": 100, "average": 4},
    },
    "decode": {"beam": 5, "max_len_a": 1.5, "max_len_b": 10},
}
UNDROPPED = {"recurrent": {"hidden_dropout": 0.0, "output_dropout": 0.0, "weight_dropout": 0.0}}
MODELS |= {"reward": merge_settings(REWARD, {"model": {"attention_dropout": 0.0, "ff_dropout": 0.0}})}
MODELS |= {"gnmt-reward": merge_settings(REWARD, {"model": UNDROPPED})}
MODELS |= {f"gnmt-reward-seed-{n}": merge_settings(MODELS["gnmt-reward"], {"train": {"seed": n}}) for n in (1, 2)}
STARTS_FROM = {  # models that begin with the weights of another one
    **{"reward": "transformer", "gnmt-reward": "gnmt"},
    **{f"gnmt-reward-seed-{n}": f"gnmt-seed-{n}" for n in (1, 2)},
}
TITLES = {
    **{"lstm": "LSTM, one vector", "rnnenc": "RNNenc: GRU, one vector", "rnnsearch": "RNNsearch: GRU and attention"},
    **{"convs2s": "ConvS2S: convolution and attention", "transformer": "Transformer: attention alone"},
    **{"bytenet": "ByteNet: dilated convolution and attention", "gnmt": "GNMT: deep LSTM with residuals"},
    **{"deep-att": "Deep-Att + PosUnk", "gnmt-reward": "GNMT + RL: fine-tuned on GLEU"},
    **{"experts": "MoE: experts between LSTM layers", "reward": "Transformer + RL: fine-tuned on GLEU"},
    **{f"wide-{n}": f"Transformer, 256 wide, seed {n}" for n in (1, 2, 3)},
    **{f"deep-att-seed-{n}": f"Deep-Att + PosUnk, seed {n}" for n in (1, 2)},
    **{f"gnmt-seed-{n}": f"GNMT, seed {n}" for n in (1, 2)},
    **{f"gnmt-reward-seed-{n}": f"GNMT + RL, seed {n}" for n in (1, 2)},
    **{f"convs2s-seed-{n}": f"ConvS2S, seed {n}" for n in (1, 2)},
    **{"deep-att-ensemble": "Deep-Att + PosUnk, ensemble of 3", "gnmt-ensemble": "GNMT + RL, ensemble of 3"},
    **{"convs2s-ensemble": "ConvS2S, ensemble of 3", "ensemble": "Transformers, 256 wide, ensemble of 3"},
    "mbr": "Transformer, minimum Bayes risk",
}
FAMILY_COLOURS = {  # safe for colour-blind readers (Okabe and Ito); a system takes that of its name's beginning
    **{"lstm": "#000000", "rnnenc": "#D55E00", "rnnsearch": "#0072B2", "bytenet": "#009E73", "convs2s": "#009E73"},
    **{"deep-att": "#D55E00", "gnmt": "#56B4E9", "experts": "#E69F00"},
}
COLOURS = {
    name: next((colour for first, colour in FAMILY_COLOURS.items() if name.startswith(first)), "#CC79A7")
    for name in TITLES
}
MARKERS = {  # of systems that share a colour
    **{"bytenet": "s", "wide-1": "P", "reward": "^", "gnmt-reward": "^", "mbr": "v"},
    **dict.fromkeys(("ensemble", "deep-att-ensemble", "gnmt-ensemble", "convs2s-ensemble"), "D"),
}

VALIDATION = "val"
TEST_SETS = ("test_2016_flickr", "test_2017_flickr")
JOINS = (1, 2, 3, 4)  # numbers of neighbouring sentences that are joined to one source
# Validation happens more often than in the recipes, which changes nothing that is learned.
MONITORING: Values = {"train": {"valid_every": 500, "valid_sentences": 100, "samples": 0}}
QUICK: Values = {
    "train": {
        **{"steps": 4, "batch_tokens": 512, "warmup": 1, "average": 1, "compile": False},
        **{"valid_every": 2, "save_every": 2},
    },
    "decode": {"beam": 1, "max_len_a": 1.0, "max_len_b": 5},
}
FORMAT = 2  # of results: those of another format are computed again
QUICK_SENTENCES = 12  # in each test set


def make_settings(name: str, quick: bool = False) -> Values:
    """Return the settings of a run: those of its recipe, with more validations.

    A model that starts from another one takes its vocabulary from there."""
    common = {"data": COMMON["data"]} if name in STARTS_FROM else COMMON
    values = merge_settings(merge_settings(common, MODELS[name]), MONITORING)
    return merge_settings({"name": name, **values}, QUICK if quick else {})


# ---- test sets --------------------------------------------------------------------------------------------------------


def join_sentences(pairs: Sequence[Pair], n: int) -> list[Pair]:
    """Return each `n` neighbours as one pair, without those left over at the end."""
    groups = [pairs[i : i + n] for i in range(0, len(pairs) - n + 1, n)]
    return [tuple(" ".join(side) for side in zip(*group, strict=True)) for group in groups]


def open_corpus(data: Path, split: str) -> ParallelCorpus:
    return ParallelCorpus((f"{split}.{{lang}}.xz",), COMMON["data"]["source"], COMMON["data"]["target"], data, split)


def read_split(data: Path, split: str, quick: bool = False) -> list[Pair]:
    """Return the sentences of the validation data or of a test set."""
    return list(islice(open_corpus(data, split).rows(), QUICK_SENTENCES if quick else None))


def read_tests(data: Path, quick: bool = False) -> dict[str, list[Pair]]:
    """Return the sentences of each test set, by which neither weights nor settings were chosen."""
    return {test: read_split(data, test, quick) for test in TEST_SETS}


def translate_pairs(translator: Translator, pairs: Sequence[Pair], **options: Any) -> list[str]:
    """Return the translations of the sources of some pairs; options are those of decoding."""
    return [found.text for found in translator.translate_sentences([pair[0] for pair in pairs], **options)]


def translate_tests(translator: Translator, tests: dict[str, list[Pair]]) -> dict[str, dict[str, list[str]]]:
    """Return {test set: {number of joined sentences: translations}}."""
    return {
        test: {str(n): translate_pairs(translator, join_sentences(pairs, n)) for n in JOINS}
        for test, pairs in tests.items()
    }


# ---- training FLOPs ---------------------------------------------------------------------------------------------------


def batch_widths(batches: PairBatches) -> Iterator[int]:
    """Yield the padded lengths of the batches of a run, in order."""
    for epoch in count():
        yield from (width for width, _ in batches.plan(epoch))


def count_flops(job: TranslationJob, batches: int) -> list[int]:
    """Return the FLOPs after each of the first batches of a run, including those of padding.

    Training on a reward reads n samples of each pair beside its reference, forward and backward, after sampling them; they
    are counted as long as the reference, and the encoder as run once for each."""
    data, passes, cost = job.batches(), job.objective().passes, Cost(job.config.model)
    samples = job.config.train.reward.samples if job.config.train.objective == "reward" else 0

    def flops(width: int) -> int:
        once = cost.training_flops(batch_size(data.batch_tokens, width), width, width)
        return once * (1 + samples) + once * samples // 3 if samples else passes * once

    return list(accumulate(flops(width) for width in islice(batch_widths(data), batches)))


def read_curve(run: Path, flops: Sequence[int], per_step: int) -> list[dict[str, float]]:
    """Return the validation losses of a run, with the FLOPs up to each."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {"step": line["step"], "flops": flops[line["step"] * per_step - 1], "loss": line["loss"]}
        for line in lines
        if line["kind"] == "valid"
    ]


# ---- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TranslationStudyJob:
    """The training of one model."""

    name: str
    values: Values
    folder: Path
    data: Path
    texts: str  # a hash of all corpora
    device: str
    threads: int
    quick: bool
    first: Values | None = None  # the settings of the model that it starts from

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def identity(self) -> dict[str, Any]:
        """Return what the numbers of the job depend on, as JSON values."""
        own = {"values": self.values, "texts": self.texts, "first": self.first, "format": FORMAT}
        return json.loads(json.dumps({**own, **describe_machine(self.device)}))

    def config(self) -> Config:
        where = {"data.root": str(self.data), "train.device": self.device, "train.threads": self.threads}
        if self.first is not None:
            where["train.init_from"] = str(self.folder / self.first["name"])
        return make_config(self.values, where)


def run_job(job: TranslationStudyJob) -> None:
    """Train a model, count its FLOPs, translate the test sets; keep the model and the numbers."""
    config = job.config()
    train(config, job.run, overwrite=True, quiet=True)
    done, per_step = read_progress(job.run), config.train.accumulate
    flops = count_flops(prepare_job(job.run, config, quiet=True), done.step * per_step)
    translator = Translator.load(job.run, job.device)
    found = {
        "of": job.identity(),
        "parameters": sum(p.numel() for p in translator.model.parameters()),
        "steps": done.step,
        "tokens": done.tokens,
        "seconds": done.seconds,
        "flops": flops[-1],
        "curve": read_curve(job.run, flops, per_step),
        "valid": translate_pairs(translator, read_split(job.data, VALIDATION, job.quick)),
        "translations": translate_tests(translator, read_tests(job.data, job.quick)),
    }
    Checkpoints(job.run / "checkpoints").remove()
    write_text(job.result, json.dumps(found, indent=1, ensure_ascii=False))


def read_progress(run: Path) -> Progress:
    """Return the progress at the end of a finished run."""
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.newest(warn=print_message)
    assert newest is not None  # training saves at its end
    return Progress.from_dict(read_json(checkpoints.path(newest) / "state.json")["progress"])


def translators_folder(out: Path, quick: bool) -> Path:
    """Return the folder of the trained models of all studies beside `out`."""
    return out.absolute().parent / ("translators-quick" if quick else "translators")


def plan_jobs(
    names: Sequence[str], out: Path, data: Path, jobs: int, device: str, quick: bool
) -> list[TranslationStudyJob]:
    """Return a job for each model. Errors in the data are raised here, before anything is trained."""
    fingerprints = [open_corpus(data, split).fingerprint() for split in ("train", "val", *TEST_SETS)]
    texts = hashlib.sha256("".join(fingerprints).encode()).hexdigest()
    folder = translators_folder(out, quick)
    where = (folder, data.absolute(), texts, str(pick_device(device)), max(1, cpu_cores() // jobs), quick)

    def plan(name: str) -> TranslationStudyJob:
        first = make_settings(STARTS_FROM[name], quick) if name in STARTS_FROM else None
        return TranslationStudyJob(name, make_settings(name, quick), *where, first)

    return [plan(name) for name in names]


def train_models(
    names: Sequence[str], out: Path, data: Path, jobs: int, device: str, quick: bool
) -> dict[str, dict[str, Any]]:
    """Return the results of the models; only those without a result are trained."""
    if jobs < 1:
        raise RegardError(f"a study needs at least 1 job at a time, not {jobs}")
    todo = plan_jobs(names, out, data, jobs, device, quick)
    for wave in ([job for job in todo if job.first is None], [job for job in todo if job.first is not None]):
        failures = run_missing(run_job, wave, jobs)
        if failures:
            reasons = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
            raise RegardError(
                f"{len(failures)} of {len(todo)} trainings failed ({reasons}); the same command tries only them again"
            )
    results = {job.name: load_result(job) for job in todo}
    return {name: result for name, result in results.items() if result is not None}
