"""From a configuration to everything a run needs: its folder, tokenizers, token shards and a model with fresh weights."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from regard import config as configs
from regard.config import Config
from regard.data.corpus import Corpus
from regard.data.shards import Filters, PairStore, cache_folder, prepare
from regard.decode import rules
from regard.errors import RegardError
from regard.files import disk_errors, remove, remove_drafts, write_text
from regard.models.transformer import Transformer, resolve
from regard.progress import counted, progress_bar
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.log import say


@dataclass(frozen=True)
class Job:
    """A run, ready to train."""

    folder: Path
    config: Config  # complete: preset sizes and vocabulary sizes filled in
    tokenizers: Tokenizers
    train: PairStore
    valid: PairStore
    valid_pairs: list[tuple[str, str]]  # raw text, for real decoding
    model: Transformer


@contextlib.contextmanager
def open_run(folder: Path, config: Config, *, overwrite: bool = False, resuming: bool = False) -> Iterator[None]:
    """Hold the run folder for this process; a run that has checkpoints must agree with `config`."""
    rules.check(config.decode)
    with _locked(folder):
        remove_drafts(folder, "config.toml", "metrics.jsonl", "model", "tokenizer*.json")
        path = folder / "config.toml"
        begun = (folder / "model").exists() or any((folder / "checkpoints").glob("step-*"))
        if overwrite:
            _empty(folder)
        elif not begun:  # what a start that failed left: a vocabulary learnt under other settings, perhaps
            for tokenizer in folder.glob("tokenizer*.json"):
                remove(tokenizer)
        elif path.exists():
            old = configs.build(configs.load(path), Config)
            old = replace(old, model=resolve(old.model))  # sizes that settings newer than the run have by default
            _check_same(folder, old, config, FREE_ON_RESUME if resuming else FREE)
        write_text(path, configs.to_toml(config))
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(
                f"another process is training in {folder}: wait for it, or choose another --run"
            ) from None
        yield


def _empty(folder: Path) -> None:
    """Remove a run's files but not its lock; a folder that holds something else is left alone."""
    held = {path.name: path for path in folder.iterdir() if path.name != ".lock"}
    if held and "config.toml" not in held:
        raise RegardError(f"{folder} is not a run (it has no config.toml) and is not deleted: choose another --run")
    for name in sorted(held, key="config.toml".__eq__):  # that one last: a run until all else is gone
        remove(held[name])


# What a run may change: where it runs, how long, and what it shows; with `regard resume`, how it goes on learning too.
FREE: tuple[str, ...] = ("name", "data.root", "data.test", "decode.", "train.steps", "train.patience", "train.samples")
FREE += ("train.keep", "train.device", "train.threads")
FREE_ON_RESUME = (*FREE, "train.lr", "train.schedule", "train.warmup", "train.clip", "train.precision", "train.compile")


def _check_same(folder: Path, old: Config, new: Config, free: tuple[str, ...]) -> None:
    """A run goes on only as what it was."""
    changed = [name for name in configs.differences(old, new) if not name.startswith(free)]
    if changed:
        raise RegardError(
            f"{folder} holds a run with other settings ({', '.join(changed)}): "
            f"choose another folder with --run, or start over with --overwrite"
        )


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> Job:
    config = replace(config, model=resolve(replace(config.model, source_vocab=0, target_vocab=0)))
    corpora = {split: corpus_of(config, split) for split in ("train", "valid")}
    valid_pairs = [pair for pair in corpora["valid"].pairs() if pair[0].strip() and pair[1].strip()]
    tokenizers = _tokenizers(folder, config, corpora["train"], quiet)
    longest = config.model.max_len - 1  # and the end token
    filters = Filters(min(config.data.max_len, longest), config.data.max_ratio)
    train = _store(corpora["train"], tokenizers, filters, "training", quiet)
    valid = _store(corpora["valid"], tokenizers, Filters(longest), "validation", quiet)
    if valid.report.too_long:
        raise RegardError(
            f"{valid.report.too_long} validation pairs are longer than model.max_len {config.model.max_len} allows: "
            f"raise model.max_len or shorten them"
        )
    sizes = replace(config.model, source_vocab=len(tokenizers.source), target_vocab=len(tokenizers.target))
    torch.manual_seed(config.train.seed)
    model = Transformer(sizes)
    return Job(folder, replace(config, model=model.config), tokenizers, train, valid, valid_pairs, model)


def corpus_of(config: Config, split: str) -> Corpus:
    data = config.data
    specs = getattr(data, split)
    if not specs:
        raise RegardError(f"data.{split} names no corpus: set it in the recipe or with --data.{split} FILE")
    return Corpus(specs, data.source, data.target, Path(data.root), split)


def _tokenizers(folder: Path, config: Config, corpus: Corpus, quiet: bool) -> Tokenizers:
    """Those in the run folder, or new ones trained on the training corpus."""
    names = ["tokenizer.json"] if config.tokenizer.joint else ["tokenizer.source.json", "tokenizer.target.json"]
    if all((folder / name).exists() for name in names):  # one of two is what a killed run left
        return Tokenizers.load(folder)
    say(f"training a {config.tokenizer.kind} tokenizer of {config.tokenizer.vocab_size:,} pieces", quiet)
    with progress_bar("reading pairs", quiet=quiet) as advance:
        if config.tokenizer.joint:
            joint = Tokenizer.train(chain.from_iterable(counted(corpus.pairs(), advance)), config.tokenizer)
            tokenizers = Tokenizers(joint, joint)
        else:
            tokenizers = Tokenizers(
                Tokenizer.train((source for source, _ in counted(corpus.pairs(), advance)), config.tokenizer),
                Tokenizer.train((target for _, target in counted(corpus.pairs(), advance)), config.tokenizer),
            )
    tokenizers.save(folder)
    return tokenizers


def _store(corpus: Corpus, tokenizers: Tokenizers, filters: Filters, what: str, quiet: bool) -> PairStore:
    with progress_bar("tokenising pairs", quiet=quiet) as advance:
        store = prepare(corpus, tokenizers.source, tokenizers.target, filters, cache_folder(), advance)
    say(f"{what} data: {store.report.describe()}", quiet)
    return store
