"""Text classification, regression and tagging: a class or number for each text or pair of texts, or a tag for each word."""

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
from regard.data.batches import Batch, BucketedBatches
from regard.data.held_out import hold_out
from regard.data.labelled_text import (
    CONTINUES,
    ColumnNames,
    Example,
    label_ids,
    label_names,
    label_numbers,
    read_examples,
    read_tagged,
    tag_ids,
    tags_to_pieces,
)
from regard.data.parallel_corpus import parse_part
from regard.device import autocast
from regard.errors import RegardError
from regard.metrics.classification_scores import is_bio, score_predictions
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.model import names_where
from regard.tasks.initial_model import InitialModel
from regard.tasks.text_data import check_task, set_vocabulary
from regard.text.special_tokens import PAD, SpecialTokenTemplate, bert_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.metrics_log import print_message
from regard.training.objective import (
    ClassificationObjective,
    LanguageModelAuxiliaryObjective,
    Objective,
    RegressionObjective,
)
from regard.training.validation import BATCH_TOKENS

UNSCORED = {"classification": -1, "regression": np.nan, "tagging": CONTINUES}  # labels that are not scored
METRICS = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "tagging": ("accuracy", "f1"),
}


@dataclass(frozen=True)
class EncodedExamples:
    """Examples as token ids, token types (which of two texts a token is in) and labels, one a row or one a token."""

    ids: list[list[int]]
    types: list[list[int]]
    labels: Sequence[float] | Sequence[list[int]]

    def key(self) -> str:
        """Return a hash of all examples."""
        return hashlib.sha256(json.dumps([self.ids, self.types, self.labels]).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.ids)


class ExampleBatches(BucketedBatches):
    """Batches of (ids, types, labels): (B, W), (B, W), and (B,) or, for tagging, (B, W)."""

    def __init__(self, rows: EncodedExamples, task: str, batch_tokens: int, seed: int, filling: bool = True) -> None:
        lengths = np.array([len(ids) for ids in rows.ids])
        super().__init__(lengths, batch_tokens, seed)
        self.widths = np.minimum(
            self.widths, lengths.max()
        )  # no wider than the longest row: the model may read no more
        self.rows, self.task, self.filling = rows, task, filling

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        filled, data = self.fill_up(width, rows) if self.filling else rows, self.rows
        ids, types = np.full((len(filled), width), PAD), np.zeros((len(filled), width), np.int64)
        shape = (len(filled), width) if self.task == "tagging" else (len(filled),)
        labels = np.full(shape, UNSCORED[self.task], np.float32 if self.task == "regression" else np.int64)
        for i, row in enumerate(filled):
            n = len(data.ids[row])
            ids[i, :n], types[i, :n] = data.ids[row], data.types[row]
            if i < len(rows) and self.task == "tagging":
                labels[i, :n] = data.labels[row]
            elif i < len(rows):
                labels[i] = data.labels[row]
        scored = labels == labels if self.task == "regression" else labels != UNSCORED[self.task]  # NaN != NaN
        return Batch(tuple(torch.from_numpy(x) for x in (ids, types, labels)), int(scored.sum()))


@dataclass(frozen=True)
class TextClassificationJob(Job):
    """A run of classification, regression or tagging."""

    train: EncodedExamples
    valid: EncodedExamples
    names: tuple[str, ...]

    @property
    def scored(self) -> str:
        return "labels"

    @property
    def metrics(self) -> tuple[str, ...]:
        without_f1 = self.config.task == "tagging" and not is_bio(self.names)  # F1 is over entities
        return ("loss", "accuracy") if without_f1 else ("loss", *METRICS[self.config.task])

    def batches(self) -> ExampleBatches:
        train = self.config.train
        return ExampleBatches(self.train, self.config.task, train.batch_tokens, train.seed)

    def objective(self) -> Objective:
        train = self.config.train
        if train.auxiliary:
            return LanguageModelAuxiliaryObjective(self.model, train.label_smoothing, train.auxiliary)
        return make_objective(self.model, self.config.task, train.label_smoothing)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        return measure(model, self.valid, self.config.task, self.names, device, dtype, poll)

    def package(self) -> ModelPackage:
        return replace(super().package(), labels=self.names)

    def next_steps(self) -> list[str]:
        return [*super().next_steps(), f'regard classify {self.quoted_folder} "..."']


def make_objective(model: nn.Module, task: str, label_smoothing: float = 0.0) -> Objective:
    """Return the objective of a task, without auxiliary loss."""
    return RegressionObjective(model) if task == "regression" else ClassificationObjective(model, label_smoothing)


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> TextClassificationJob:
    """Prepare a run: examples, tokenizer, encoded examples and model."""
    check_task(config)
    initial = InitialModel.load(folder, config, quiet)
    forwards = architecture_of(config.model).generates and not config.model.table(RecurrentSettings).bidirectional
    if config.train.auxiliary and (not forwards or config.task == "regression"):
        kinds = names_where("generates")
        raise RegardError(
            f"train.auxiliary adds the loss of a language model: it needs a {kinds} that reads forwards and classes to learn"
        )
    examples = read_training_data(config, quiet)
    tokenizer = initial.get_text_tokenizer(lambda: chain.from_iterable(example.texts for example in examples["train"]))
    token_template = initial.get_token_template(bert_template(tokenizer.special)).with_end_tokens(tokenizer.special)
    # The classes are those of the training data, what is held out of it included.
    names = class_names(config.task, [*examples["train"], *([] if config.data.valid else examples["valid"])])
    where = {split: ", ".join(getattr(config.data, split) or config.data.train) for split in examples}
    encoded = partial(
        encode_examples,
        tokenizer=tokenizer,
        token_template=token_template,
        task=config.task,
        names=names,
        max_len=config.model.max_len,
        quiet=quiet,
    )
    train, valid = (encoded(examples[split], where=where[split]) for split in ("train", "valid"))
    model_config = replace(set_vocabulary(config.model, tokenizer), n_classes=len(names) or 1)
    model = initial.build_model(model_config)
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    both, amount = Tokenizers(tokenizer, tokenizer), f"{len(train):,} training examples"
    return TextClassificationJob(folder, config, model, both, token_template, train.key(), amount, train, valid, names)


def read_training_data(config: Config, quiet: bool) -> dict[str, list[Example]]:
    """Read the examples for training and validation; without data.valid, a share of the training examples is held out."""
    found = read_split(config.task, config.data, "train")
    if config.data.valid:
        return {"train": found, "valid": read_split(config.task, config.data, "valid")}
    keys = ["\t".join(example.texts) for example in found]
    held = hold_out(keys, config.data.valid_share, config.train.seed)
    print_message(held.describe("examples"), quiet)
    parts: dict[str, list[Example]] = {"train": [], "valid": []}
    for key, example in zip(keys, found, strict=True):
        parts["valid" if held.holds(key) else "train"].append(example)
    return parts


def read_split(task: str, data: DataConfig, split: str) -> list[Example]:
    """Read the examples of a split from all its files."""
    specs = getattr(data, split)
    if not specs:
        raise RegardError(f"data.{split} names no file: set it in the recipe or with --data.{split} FILE")
    return [example for spec in specs for example in read_spec(task, data, spec)]


def read_spec(task: str, data: DataConfig, spec: str) -> list[Example]:
    """Read the examples of one file, or a part of them: `FILE[:90%]`.

    Where `data.text_column` names a column by number, the file has no header.
    """
    name, (first, last) = parse_part(spec)
    text, label = data.text_column or "text", data.label_column or "label"
    columns = ColumnNames(text, data.pair_column, label, header=not text.isdigit())
    path = Path(data.root) / name
    found = list(read_tagged(path) if task == "tagging" else read_examples(path, columns))
    part = found[int(first * len(found)) : int(last * len(found))]
    if not part:
        raise RegardError(f"nothing of the {len(found):,} examples is left in {spec}; give a larger file or part")
    return part


def class_names(task: str, examples: list[Example]) -> tuple[str, ...]:
    """Return the classes or tags of the training data; there are none for regression."""
    if task == "tagging":
        return tuple(sorted({tag for example in examples for tag in example.tags}))
    return label_names(examples) if task == "classification" else ()


def encode_examples(
    examples: list[Example],
    tokenizer: Tokenizer,
    token_template: SpecialTokenTemplate,
    task: str,
    names: tuple[str, ...],
    max_len: int,
    where: str,
    quiet: bool = False,
) -> EncodedExamples:
    """Encode examples as rows of tokens; rows longer than the model reads are truncated, and their number is printed."""
    if task == "tagging":
        rows = encode_tagged(examples, tokenizer, token_template, tag_ids(examples, names, where))
    else:
        labels = label_numbers(examples, where) if task == "regression" else label_ids(examples, names, where)
        texts = [example.texts for example in examples]
        rows = EncodedExamples(*encode_texts(texts, tokenizer, token_template), labels)
    long = sum(len(ids) > max_len for ids in rows.ids)
    if not long:
        return rows
    print_message(
        f"{where}: {long:,} of {len(rows):,} texts are longer than model.max_len {max_len} and cut there", quiet
    )
    if task == "tagging":
        return truncate_tagged(rows, max_len, list(token_template.after))
    return EncodedExamples(*encode_texts(texts, tokenizer, token_template, max_len), labels)


def truncate_tagged(rows: EncodedExamples, length: int, end: list[int]) -> EncodedExamples:
    """Truncate tagged rows to `length` tokens; they still end with the tokens `end`."""
    labels = [truncate_row(row, length, [CONTINUES] * len(end)) for row in rows.labels]  # type: ignore[arg-type]
    ids = [truncate_row(row, length, end) for row in rows.ids]
    return EncodedExamples(ids, [row[:length] for row in rows.types], labels)


def truncate_row(row: list[int], length: int, end: list[int]) -> list[int]:
    """Truncate a row to `length` tokens, so that it ends with `end`."""
    return row if len(row) <= length else row[: length - len(end)] + end


def encode_texts(
    texts: Sequence[tuple[str, ...]],
    tokenizer: Tokenizer,
    token_template: SpecialTokenTemplate,
    max_len: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids and token types of single texts or pairs, truncated to `max_len` tokens if it is given."""
    pieces = iter(tokenizer.encode_batch([text for row in texts for text in row]))
    rows = []
    for row in texts:
        parts = [next(pieces) for _ in row]
        around = len(token_template.wrap(())) if len(row) == 1 else len(token_template.wrap_pair((), ())[0])
        if max_len is not None:
            parts = truncate_texts(parts, max(0, max_len - around))
        if len(row) == 1:
            ids = token_template.wrap(parts[0])
            rows.append((ids, [0] * len(ids)))
        else:
            rows.append(token_template.wrap_pair(*parts))
    return [ids for ids, _ in rows], [types for _, types in rows]


def truncate_texts(parts: list[list[int]], room: int) -> list[list[int]]:
    """Truncate one or two texts to `room` tokens in all; of two, the longer is cut first."""
    if len(parts) == 1 or sum(map(len, parts)) <= room:
        return [part[:room] for part in parts]
    first, second = map(len, parts)
    kept = min(first, max(room - second, room - room // 2))
    return [parts[0][:kept], parts[1][: room - kept]]


def encode_tagged(
    examples: list[Example], tokenizer: Tokenizer, token_template: SpecialTokenTemplate, tags: list[list[int]]
) -> EncodedExamples:
    """Encode tagged sentences; special tokens and all but the first piece of a word are not scored."""
    ids, labels = [], []
    for example, numbers in zip(examples, tags, strict=True):
        pieces, marks = tags_to_pieces(example.words, numbers, tokenizer)
        ids.append(token_template.wrap(pieces))
        labels.append([CONTINUES for _ in token_template.before] + marks + [CONTINUES for _ in token_template.after])
    return EncodedExamples(ids, [[0] * len(row) for row in ids], labels)


@torch.inference_mode()
def predict(
    model: nn.Module,
    rows: EncodedExamples,
    task: str,
    device: torch.device,
    dtype: torch.dtype,
    poll: Poll = lambda: None,
) -> tuple[list[np.ndarray], float]:
    """Return the outputs of the model for each row, in order, and the loss summed over all."""
    objective, batches = make_objective(model, task), ExampleBatches(rows, task, BATCH_TOKENS, 0, filling=False)
    found: dict[int, np.ndarray] = {}
    total = 0.0
    for i, (_, numbers) in enumerate(batches.plan(0)):
        ids, types, labels = batches.batch(0, i).to(device).inputs
        with autocast(device, dtype):
            outputs = model(ids, types).float()  # (B, n) or (B, W, n)
        total += objective.loss_from_outputs(outputs, labels)[1].item()
        found |= {int(row): output for row, output in zip(numbers, outputs.cpu().numpy(), strict=False)}
        poll()
    return [found[i] for i in range(len(rows))], total


def measure(
    model: nn.Module,
    rows: EncodedExamples,
    task: str,
    names: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Return loss and scores on encoded examples."""
    outputs, total = predict(model, rows, task, device, dtype, poll)
    if task == "regression":
        return Validation(
            total / len(rows), score_predictions(task, [float(output[0]) for output in outputs], rows.labels, names)
        )
    if task == "classification":
        return Validation(
            total / len(rows), score_predictions(task, [int(output.argmax()) for output in outputs], rows.labels, names)
        )
    places = [[i for i, tag in enumerate(row) if tag != CONTINUES] for row in rows.labels]  # type: ignore[arg-type]
    predicted = [output[at].argmax(-1).tolist() for output, at in zip(outputs, places, strict=True)]
    truths = [[row[i] for i in at] for row, at in zip(rows.labels, places, strict=True)]  # type: ignore[index]
    return Validation(total / max(1, sum(map(len, truths))), score_predictions(task, predicted, truths, names))


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    """Return loss and scores on `data.test`."""
    assert package.tokenizers is not None
    where, names = ", ".join(config.data.test), package.labels
    examples, longest = read_split(config.task, config.data, "test"), package.config.max_len
    rows = encode_examples(
        examples, package.tokenizers.source, package.token_template, config.task, names, longest, where
    )
    return measure(package.model, rows, config.task, names, device)
