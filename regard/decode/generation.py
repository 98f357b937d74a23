"""One text that a language model goes on with: its prompt, its limit, what was written, and why it ended.

MERGED: A language model that goes on writing: prompts of any lengths in, continuations in the same order out.

The prompts of a batch are read at once, padded on the right, each once however many samples it gets. Rows that end leave
the batch. A row has its own limit and seed, so what it gets does not depend on its neighbours. The cache has
one column for each step of any row, so rows that began shorter may have room left when its columns are used up: then what
they hold is read anew, without the gaps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import DecodeConfig, ModelConfig
from regard.decode.constraints import check_options, pad_rows, token_budget, uses_cuda_graphs, warn_not_captured
from regard.decode.sampling import choose_next, seed_tensor, seen_tokens
from regard.errors import RegardError
from regard.kernels.cpu_threads import one_thread
from regard.layers.hooks import is_observed, labelled, paused
from regard.models.model import LanguageModel, StatefulLanguageModel
from regard.text.detokenizer import Detokenizer
from regard.text.special_tokens import PAD
from regard.text.tokenizer import Tokenizer


@dataclass
class GenerationRequest:
    """One continuation being written."""

    prompt: list[int]
    limit: int  # most tokens
    at_limit: str  # why it would end there
    seed: int
    eos: int = -1  # the token that ends it
    hear: Callable[[int], bool] = lambda token: False  # told every token; True: enough
    ids: list[int] = field(default_factory=list)  # the prompt and what was written, without the end token
    log_probs: list[float] = field(default_factory=list)  # of what was written, the end token included
    end: str = ""  # why it ended: end (token), stop (`hear` had enough), length (max_new_tokens), context (max_len)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def tokens(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    def add(self, token: int, log_prob: float) -> None:
        self.log_probs.append(log_prob)
        if token == self.eos:
            self.end = "end"
            return
        self.ids.append(token)
        if self.hear(token):
            self.end = "stop"
        elif len(self.log_probs) == self.limit:
            self.end = self.at_limit


def max_length_of(model: nn.Module) -> int:
    """The most tokens that a text may have; for a recurrent model, whose state does not grow, there is no most."""
    return sys.maxsize if isinstance(model, StatefulLanguageModel) else model.config.max_len  # type: ignore[union-attr,return-value]


def make_request(
    prompt: Sequence[int], seed: int, options: DecodeConfig, model: nn.Module, name: str = "the prompt"
) -> GenerationRequest:
    """Refuses a prompt that leaves no room for a single token."""
    max_len = max_length_of(model)
    room = max_len - len(prompt)
    if not prompt:
        raise RegardError(f"{name} is empty, and this model has no token that begins a text: give it a word")
    if room < 1:
        raise RegardError(
            f"{name} has {len(prompt)} tokens, but the model was built for at most {max_len} (model.max_len), "
            f"those it writes included: shorten it to {max_len - 1} at most"
        )
    new = options.max_new_tokens
    eos: int = model.config.eos_token_id  # type: ignore[union-attr,assignment]
    return GenerationRequest(list(prompt), min(new, room), "length" if new <= room else "context", seed, eos)


def unique_consecutive(rows: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Rows without those that repeat the one before, and which of them each row is: samples of a text are read once."""
    different: list[list[int]] = []
    which = []
    for ids in rows:
        if not different or ids != different[-1]:
            different.append(ids)
        which.append(len(different) - 1)
    return different, which


CHUNK = 1024  # tokens whose logits are in memory at a time when text is scored


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: DecodeConfig,
    hear: Callable[[int, int], bool] = lambda row, token: False,
    progress: Callable[[int], None] = lambda done: None,
) -> list[GenerationRequest]:
    """`nbest` continuations of each prompt, one after the other; `hear` is told (row, token) and may say it is enough."""
    check_generation(options)
    n = options.nbest
    rows = [
        make_request(prompt, (options.seed + i) * n + j, options, model, f"prompt {i + 1}")
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    for number, row in enumerate(rows):
        row.hear = partial(hear, number)
    lengths = [len(row.prompt) + row.limit for row in rows[::n]]
    tokens = token_budget(options, model.embedding.weight.device)
    together = by_size(lengths) if uses_cuda_graphs(model) else length_batches(lengths, tokens, n)
    for group in together:
        ended = 0
        with paused(model):  # rows change places
            for heard in generation_steps(model, [row for i in group for row in rows[i * n : i * n + n]], options):
                before, ended = ended, ended + sum(bool(row.end) for row in heard)
                progress(ended // n - before // n)
    if is_observed(model):
        for group in length_batches(lengths, tokens):
            record_forced_forward(model, group, [rows[i * n] for i in group])
    return rows


def check_generation(options: DecodeConfig) -> None:
    if options.nbest > 1 and options.temperature == 0:
        raise RegardError(f"{options.nbest} samples at temperature 0 are all the same: give a temperature above 0")
    if options.max_new_tokens < 1:
        raise RegardError(f"decode.max_new_tokens must be at least 1, not {options.max_new_tokens}")
    check_options(options)


def by_size(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of rows of similar length, the longest first: slots are as long as the longest that uses them."""
    size = [max(6, (n - 1).bit_length()) for n in lengths]  # 2^size tokens at most
    for wanted in sorted(set(size), reverse=True):
        yield [i for i, found in enumerate(size) if found == wanted]


def length_batches(lengths: Sequence[int], tokens: int, n: int = 1) -> Iterator[list[int]]:
    """Indices of rows to read together, longest first, by a budget of padded tokens."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, tokens // (lengths[order[0]] * n))
        yield order[:size]
        order = order[size:]


def generation_steps(
    model: LanguageModel, rows: list[GenerationRequest], options: DecodeConfig
) -> Iterator[list[GenerationRequest]]:
    """A token more, or a few, for every open row at a time, until all have ended; samples of one prompt stand together.

    Yields the rows that got some, those that ended with them for the last time."""
    if uses_cuda_graphs(model):
        from regard.decode.graphs import decoding
        from regard.decode.graphs.engine import NotCapturable

        try:
            return decoding.graph_steps(model, rows, options)
        except NotCapturable as error:
            warn_not_captured(model, str(error))
            return plain_groups(model, rows, options)  # slots take more rows than a batch does
    return eager_steps(model, rows, options)


def plain_groups(
    model: LanguageModel, rows: list[GenerationRequest], options: DecodeConfig
) -> Iterator[list[GenerationRequest]]:
    """The steps of as many rows at a time as the budget of tokens allows."""
    lengths = [len(row.prompt) + row.limit for row in rows]
    for group in length_batches(lengths, token_budget(options, model.embedding.weight.device)):
        yield from eager_steps(model, [rows[i] for i in group], options)


@torch.inference_mode()
def eager_steps(
    model: LanguageModel, rows: list[GenerationRequest], options: DecodeConfig
) -> Iterator[list[GenerationRequest]]:
    logits, state = begin(model, rows)
    on_cpu = logits.device.type == "cpu"
    for step in count():
        tokens, gained = chosen(logits, rows, step, options, model.config)
        for row, token, log_prob in zip(rows, tokens.tolist(), gained.tolist(), strict=True):
            row.add(token, log_prob)
        yield rows
        open_ = [i for i, row in enumerate(rows) if not row.end]
        if not open_:
            return
        if len(open_) < len(rows):
            kept = torch.tensor(open_, device=tokens.device)
            rows, tokens = [rows[i] for i in open_], tokens[kept]
            state.select(kept)
        if state.length == max_length_of(model):
            logits, state = begin(model, rows)
        else:
            with one_thread() if on_cpu else nullcontext():
                logits = model.step(tokens, state)


def chosen(
    logits: Tensor, rows: list[GenerationRequest], step: int, options: DecodeConfig, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log p."""
    device = logits.device
    seen = seen_tokens([row.ids for row in rows], logits) if options.repetition_penalty != 1 else None
    early = torch.full((len(rows),), step < options.min_len, device=device)
    seeds, steps = seed_tensor([row.seed for row in rows], device), torch.full((len(rows),), step, device=device)
    return choose_next(logits, seen, early, seeds, steps, options, config)


def begin(model: LanguageModel, rows: list[GenerationRequest]) -> tuple[Tensor, Any]:
    """Read what the rows hold; neighbours that hold the same are read once. Logits (N, V) and the state after it."""
    device = model.embedding.weight.device
    different, which = unique_consecutive([row.ids for row in rows])
    logits, state = model.begin(pad_rows(different, device))
    if len(different) == len(rows):
        return logits, state
    copies = torch.tensor(which, device=device)
    state.select(copies)
    return logits[copies], state


@torch.no_grad()
def record_forced_forward(model: LanguageModel, prompts: list[int], rows: list[GenerationRequest]) -> None:
    """One forward over what was written, for whoever records."""
    written = [[*row.ids, *([row.eos] if row.end == "end" else [])] for row in rows]
    with labelled(model, prompts, written):
        model(pad_rows([ids[:-1] for ids in written], model.embedding.weight.device))


@torch.inference_mode()
def token_log_probs(model: LanguageModel, texts: Sequence[Sequence[int]], options: DecodeConfig) -> list[list[float]]:
    """log p(x_t | x_<t) of every token but the first, in each text."""
    found: dict[int, list[float]] = {}
    device = model.embedding.weight.device
    for group in length_batches([len(ids) for ids in texts], token_budget(options, device)):
        ids = pad_rows([texts[i] for i in group], device)  # (B, T)
        hidden = model.read(ids)[:, :-1].flatten(0, 1)  # (B*(T-1), C)
        pieces = zip(hidden.split(CHUNK), ids[:, 1:].flatten().split(CHUNK), strict=True)
        scored = [
            -torch.nn.functional.cross_entropy(model.head(h).float(), t, ignore_index=PAD, reduction="none")
            for h, t in pieces
        ]
        for i, row in zip(group, torch.cat(scored).view(len(group), -1).tolist(), strict=True):
            found[i] = row[: len(texts[i]) - 1]
    return [found[i] for i in range(len(texts))]


def generate_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: DecodeConfig,
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[str, GenerationRequest]]:
    """Return the text and the row of each continuation that `write` makes, ended before the stop strings of the options."""
    tellers = [TextStreamer(tokenizer, ids, options.stop_strings) for ids in prompts for _ in range(options.nbest)]
    texts = [""] * len(tellers)

    def hear(row: int, token: int) -> bool:
        texts[row] += tellers[row].push(token)
        return tellers[row].stopped

    rows = generate(model, prompts, options, hear, progress)
    return [(texts[i] + tellers[i].flush(), row) for i, row in enumerate(rows)]


class TextStreamer:
    """The text of one continuation while its tokens arrive, up to the stop string that is complete first.

    What may be the beginning of a stop string is held back, so nothing of one is ever told. The prompt is known, because
    whether a first word has a space in front depends on what it follows.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self.stop, self.stopped, self._held = stop, False, ""
        self._detokenizer = Detokenizer(tokenizer)
        for id in prompt[-8:]:  # further back it does not look
            self._detokenizer.push(id)

    def push(self, token: int) -> str:
        return self._tell(self._held + self._detokenizer.push(token), last=False)

    def flush(self) -> str:
        """What was held back, at the end."""
        return "" if self.stopped else self._tell(self._held + self._detokenizer.flush(), last=True)

    def _tell(self, text: str, last: bool) -> str:
        found = [(text.index(s) + len(s), text.index(s)) for s in self.stop if s in text]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        keep = 0 if last else max((begun(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def begun(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
