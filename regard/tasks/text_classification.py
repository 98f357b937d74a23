"""Texts with answers: a class or a number for each text or pair, or a tag for each word."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import nn

from regard.config import Config, DataConfig, RecurrentSettings
from regard.data.batches import Batch, Bucketed
from regard.data.labelled_text import (
    CONTINUES,
    Columns,
    Example,
    label_ids,
    label_names,
    label_numbers,
    read_examples,
    read_tagged,
    tag_ids,
    tags_to_pieces,
)
from regard.data.parallel_corpus import part_of
from regard.device import autocast
from regard.errors import RegardError
from regard.metrics.classification_scores import is_bio, score_predictions
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.model import names_where
from regard.tasks.initial_model import Start
from regard.tasks.text_data import check_task, with_vocabulary
from regard.text.special_tokens import PAD, SpecialTokenTemplate, bert_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.metrics_log import print_message
from regard.training.objective import AuxiliaryObjective, ClassObjective, Objective, RegressionObjective
from regard.training.validation import BATCH_TOKENS

UNSCORED = {"classification": -1, "regression": np.nan, "tagging": CONTINUES}


@dataclass(frozen=True)
class Rows:
    """Texts as tokens, which of two texts each token is in, and the answers: one a row, or one a token."""

    ids: list[list[int]]
    types: list[list[int]]
    answers: Sequence[float] | Sequence[list[int]]

    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.ids, self.types, self.answers]).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.ids)


class RowBatches(Bucketed):
    """(ids, types, labels): (B, W) twice, and (B,) or, for tags, (B, W)."""

    def __init__(self, rows: Rows, task: str, batch_tokens: int, seed: int, filling: bool = True) -> None:
        lengths = np.array([len(ids) for ids in rows.ids])
        super().__init__(lengths, batch_tokens, seed)
        self.widths = np.minimum(self.widths, lengths.max())  # the longest row may be all that the model reads
        self.rows, self.task, self.filling = rows, task, filling

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        filled, data = self.filled(width, rows) if self.filling else rows, self.rows
        ids, types = np.full((len(filled), width), PAD), np.zeros((len(filled), width), np.int64)
        shape = (len(filled), width) if self.task == "tagging" else (len(filled),)
        labels = np.full(shape, UNSCORED[self.task], np.float32 if self.task == "regression" else np.int64)
        for i, row in enumerate(filled):
            n = len(data.ids[row])
            ids[i, :n], types[i, :n] = data.ids[row], data.types[row]
            if i < len(rows) and self.task == "tagging":
                labels[i, :n] = data.answers[row]
            elif i < len(rows):
                labels[i] = data.answers[row]
        scored = labels == labels if self.task == "regression" else labels != UNSCORED[self.task]  # NaN is not itself
        return Batch(tuple(torch.from_numpy(x) for x in (ids, types, labels)), int(scored.sum()))


@dataclass(frozen=True)
class LabellingJob(Job):
    train: Rows
    valid: Rows
    names: tuple[str, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        words = self.config.task == "tagging" and not is_bio(self.names)  # no entities to find
        return ("loss", "accuracy") if words else ("loss", *MEASURES[self.config.task])

    def batches(self) -> RowBatches:
        train = self.config.train
        return RowBatches(self.train, self.config.task, train.batch_tokens, train.seed)

    def objective(self) -> Objective:
        train = self.config.train
        if train.auxiliary:
            return AuxiliaryObjective(self.model, train.label_smoothing, train.auxiliary)
        return plain_objective(self.model, self.config.task, train.label_smoothing)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        return measure(model, self.valid, self.config.task, self.names, device, dtype, poll)

    def package(self) -> ModelPackage:
        return replace(super().package(), labels=self.names)

    def next_steps(self) -> list[str]:
        return [*super().next_steps(), f'regard classify {self.folder} "..."']


MEASURES = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "tagging": ("accuracy", "f1"),
}


def plain_objective(model: nn.Module, task: str, label_smoothing: float = 0.0) -> Objective:
    return RegressionObjective(model) if task == "regression" else ClassObjective(model, label_smoothing)


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> LabellingJob:
    check_task(config)
    start = Start.of(folder, config, quiet)
    forwards = architecture_of(config.model).generates and not config.model.table(RecurrentSettings).bidirectional
    if config.train.auxiliary and (not forwards or config.task == "regression"):
        kinds = names_where("generates")
        raise RegardError(
            f"train.auxiliary adds the loss of a language model: it needs a {kinds} that reads forwards and classes to learn"
        )
    examples = {split: read(config.task, config.data, split) for split in ("train", "valid")}
    tokenizer = start.text_tokenizer(lambda: chain.from_iterable(example.texts for example in examples["train"]))
    token_template = start.token_template(bert_template(tokenizer.special)).with_end_tokens(tokenizer.special)
    names = answer_names(config.task, examples["train"])
    longest, where = config.model.max_len, {split: ", ".join(getattr(config.data, split)) for split in examples}
    encoded = partial(
        encode,
        tokenizer=tokenizer,
        token_template=token_template,
        task=config.task,
        names=names,
        max_len=longest,
        quiet=quiet,
    )
    train, valid = (encoded(examples[split], where=where[split]) for split in ("train", "valid"))
    sizes = with_vocabulary(config.model, tokenizer)
    model = start.model(replace(sizes, n_classes=len(names) or 1))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    both, amount = Tokenizers(tokenizer, tokenizer), f"{len(train):,} training examples"
    return LabellingJob(folder, config, model, both, token_template, train.key(), amount, train, valid, names)


def read(task: str, data: DataConfig, split: str) -> list[Example]:
    """The examples of a split, in all its files."""
    specs = getattr(data, split)
    if not specs:
        raise RegardError(f"data.{split} names no file: set it in the recipe or with --data.{split} FILE")
    return [example for spec in specs for example in read_part(task, data, spec)]


def read_part(task: str, data: DataConfig, spec: str) -> list[Example]:
    """The examples of one file; `[:90%]` at its end means the first of them. Columns by number: a file without a header."""
    name, (first, last) = part_of(spec)
    columns = Columns(data.text or "text", data.pair, data.label or "label", header=not data.text.isdigit())
    path = Path(data.root) / name
    found = list(read_tagged(path) if task == "tagging" else read_examples(path, columns))
    part = found[int(first * len(found)) : int(last * len(found))]
    if not part:
        raise RegardError(f"nothing of the {len(found):,} examples is left in {spec}; give a larger file or part")
    return part


def answer_names(task: str, examples: list[Example]) -> tuple[str, ...]:
    """The classes or tags of the training data; none for numbers."""
    if task == "tagging":
        return tuple(sorted({tag for example in examples for tag in example.tags}))
    return label_names(examples) if task == "classification" else ()


def encode(
    examples: list[Example],
    tokenizer: Tokenizer,
    token_template: SpecialTokenTemplate,
    task: str,
    names: tuple[str, ...],
    max_len: int,
    where: str,
    quiet: bool = False,
) -> Rows:
    """Examples as rows of tokens; what is longer than the model reads is cut, and counted."""
    if task == "tagging":
        rows = tagged_rows(examples, tokenizer, token_template, tag_ids(examples, names, where))
    else:
        answers = label_numbers(examples, where) if task == "regression" else label_ids(examples, names, where)
        texts = [example.texts for example in examples]
        rows = Rows(*framed(texts, tokenizer, token_template), answers)
    long = sum(len(ids) > max_len for ids in rows.ids)
    if not long:
        return rows
    print_message(
        f"{where}: {long:,} of {len(rows):,} texts are longer than model.max_len {max_len} and cut there", quiet
    )
    if task == "tagging":
        return shortened(rows, max_len, list(token_template.after))
    return Rows(*framed(texts, tokenizer, token_template, max_len), answers)


def shortened(rows: Rows, length: int, end: list[int]) -> Rows:
    """Tagged rows of at most `length` tokens, which still end on `end`."""
    answers = [cut(row, length, [CONTINUES] * len(end)) for row in rows.answers]  # type: ignore[arg-type]
    return Rows([cut(row, length, end) for row in rows.ids], [row[:length] for row in rows.types], answers)


def cut(row: list[int], length: int, end: list[int]) -> list[int]:
    return row if len(row) <= length else row[: length - len(end)] + end


def framed(
    texts: Sequence[tuple[str, ...]],
    tokenizer: Tokenizer,
    token_template: SpecialTokenTemplate,
    max_len: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Single texts or pairs as ids and types; with a `max_len`, what is longer is cut."""
    pieces = iter(tokenizer.encode_batch([text for row in texts for text in row]))
    rows = []
    for row in texts:
        parts = [next(pieces) for _ in row]
        around = len(token_template.wrap(())) if len(row) == 1 else len(token_template.wrap_pair((), ())[0])
        if max_len is not None:
            parts = fitted(parts, max(0, max_len - around))
        rows.append(alone(parts[0], token_template) if len(row) == 1 else token_template.wrap_pair(*parts))
    return [ids for ids, _ in rows], [types for _, types in rows]


def fitted(parts: list[list[int]], room: int) -> list[list[int]]:
    """One or two texts in at most `room` tokens; of two, the longer gives way first."""
    if len(parts) == 1 or sum(map(len, parts)) <= room:
        return [part[:room] for part in parts]
    first, second = map(len, parts)
    kept = min(first, max(room - second, room - room // 2))
    return [parts[0][:kept], parts[1][: room - kept]]


def alone(ids: list[int], token_template: SpecialTokenTemplate) -> tuple[list[int], list[int]]:
    row = token_template.wrap(ids)
    return row, [0] * len(row)


def tagged_rows(
    examples: list[Example], tokenizer: Tokenizer, token_template: SpecialTokenTemplate, tags: list[list[int]]
) -> Rows:
    ids, answers = [], []
    for example, numbers in zip(examples, tags, strict=True):
        pieces, marks = tags_to_pieces(example.words, numbers, tokenizer)
        ids.append(token_template.wrap(pieces))
        answers.append([CONTINUES for _ in token_template.before] + marks + [CONTINUES for _ in token_template.after])
    return Rows(ids, [[0] * len(row) for row in ids], answers)


@torch.inference_mode()
def outputs(
    model: nn.Module, rows: Rows, task: str, device: torch.device, dtype: torch.dtype, poll: Poll = lambda: None
) -> tuple[list[np.ndarray], float]:
    """What the model answers to each row, in order, and the loss summed over them."""
    objective, batches = plain_objective(model, task), RowBatches(rows, task, BATCH_TOKENS, 0, filling=False)
    found: dict[int, np.ndarray] = {}
    total = 0.0
    for i, (_, numbers) in enumerate(batches.plan(0)):
        ids, types, labels = batches.batch(0, i).to(device).inputs
        with autocast(device, dtype):
            answers = model(ids, types).float()  # (B, n) or (B, W, n)
        total += objective.losses(answers, labels)[1].item()
        found |= {int(row): answer for row, answer in zip(numbers, answers.cpu().numpy(), strict=False)}
        poll()
    return [found[i] for i in range(len(rows))], total


def measure(
    model: nn.Module,
    rows: Rows,
    task: str,
    names: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Loss and scores on labelled rows."""
    answers, total = outputs(model, rows, task, device, dtype, poll)
    if task == "regression":
        return Validation(
            total / len(rows), score_predictions(task, [float(a[0]) for a in answers], rows.answers, names)
        )
    if task == "classification":
        return Validation(
            total / len(rows), score_predictions(task, [int(a.argmax()) for a in answers], rows.answers, names)
        )
    places = [[i for i, tag in enumerate(row) if tag != CONTINUES] for row in rows.answers]  # type: ignore[arg-type]
    said = [a[at].argmax(-1).tolist() for a, at in zip(answers, places, strict=True)]
    right = [[row[i] for i in at] for row, at in zip(rows.answers, places, strict=True)]  # type: ignore[index]
    return Validation(total / max(1, sum(map(len, right))), score_predictions(task, said, right, names))


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    assert package.tokenizers is not None
    where, names = ", ".join(config.data.test), package.labels
    examples, longest = read(config.task, config.data, "test"), package.config.max_len
    rows = encode(examples, package.tokenizers.source, package.token_template, config.task, names, longest, where)
    return measure(package.model, rows, config.task, names, device)
