"""Generation with a language model: prompts of any lengths in, continuations in the same order out.

The prompts of a batch are read at once, padded on the right; a prompt with several samples is read once. Rows that end
leave the batch. A row has its own limit and seed, so its result does not depend on its neighbours. The key/value cache has
one column for each step of any row, so a row with a short prompt may have tokens left when the columns are used up: then the
rows are read again from the start, without the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.config import DecodeConfig, ModelConfig
from regard.decode.constraints import (
    check_language_model_options,
    check_options,
    pad_rows,
    token_budget,
    uses_cuda_graphs,
    warn_not_captured,
)
from regard.decode.sampling import choose_next, seed_tensor, seen_tokens
from regard.errors import RegardError
from regard.kernels.cpu_threads import one_thread
from regard.layers.hooks import is_observed, labelled, paused
from regard.models.model import LanguageModel
from regard.text.special_tokens import PAD
from regard.text.streaming_detokenizer import Detokenizer
from regard.text.tokenizer import Tokenizer

CHUNK = 1024  # tokens whose logits are in memory at a time when texts are scored

# ---- one continuation --------------------------------------------------------------------------------------------------


@dataclass
class GenerationRequest:
    """A prompt and its continuation, with the limit, the seed and the reason why it ended."""

    prompt: list[int]
    limit: int  # at most this many new tokens
    limit_reason: str  # `end` of a continuation that reaches the limit: length or context
    seed: int
    eos: int = -1  # the token that ends it
    on_token: Callable[[int], bool] = lambda token: False  # called with every new token; True stops the continuation
    ids: list[int] = field(default_factory=list)  # prompt and continuation, without the end token
    log_probs: list[float] = field(default_factory=list)  # of the new tokens, the end token included
    end: str = ""  # why it ended: end (token), stop (by `on_token`), length (max_new_tokens), context (max_len)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def tokens(self) -> list[int]:
        """The new tokens, without the end token."""
        return self.ids[len(self.prompt) :]

    def add(self, token: int, log_prob: float) -> None:
        """Append a token, and set `end` if it is the last one."""
        self.log_probs.append(log_prob)
        if token == self.eos:
            self.end = "end"
            return
        self.ids.append(token)
        if self.on_token(token):
            self.end = "stop"
        elif len(self.log_probs) == self.limit:
            self.end = self.limit_reason


def max_length_of(model: nn.Module) -> int:
    """Return how many tokens a text may have; a model whose decoding state does not grow has no limit."""
    return model.longest if isinstance(model, LanguageModel) else model.config.max_len  # type: ignore[union-attr,return-value]


def make_request(
    prompt: Sequence[int], seed: int, options: DecodeConfig, model: nn.Module, name: str = "the prompt"
) -> GenerationRequest:
    """Return the request for one continuation; refuse a prompt that is empty or leaves no room for a new token."""
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


Ids = TypeVar("Ids", bound=Sequence[int])


def unique_consecutive(rows: Sequence[Ids]) -> tuple[list[Ids], list[int]]:
    """Return the rows without repetitions of the row before, and for each row its index among them.

    The samples of one prompt are neighbours, so that it is read once."""
    unique: list[Ids] = []
    index = []
    for ids in rows:
        if not unique or ids != unique[-1]:
            unique.append(ids)
        index.append(len(unique) - 1)
    return unique, index


# A function like `generation_steps`.
GenerationSteps = Callable[[LanguageModel, list[GenerationRequest], DecodeConfig], Iterator[list[GenerationRequest]]]

# ---- generating --------------------------------------------------------------------------------------------------------


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: DecodeConfig,
    on_token: Callable[[int, int], bool] = lambda row, token: False,
    progress: Callable[[int], None] = lambda done: None,
    steps: GenerationSteps | None = None,
) -> list[GenerationRequest]:
    """Return `nbest` continuations of each prompt, those of a prompt one after the other.

    `on_token` is called with (row, token) for every new token and stops the row by returning True; `progress` is called
    with the number of prompts that have ended since the last call. `steps` writes the tokens, by default
    `generation_steps`."""
    check_generation(options)
    n = options.nbest
    rows = [
        make_request(prompt, (options.seed + i) * n + j, options, model, f"prompt {i + 1}")
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    for number, row in enumerate(rows):
        row.on_token = partial(on_token, number)
    lengths = [len(row.prompt) + row.limit for row in rows[::n]]
    tokens = token_budget(options, model.embedding.weight.device)
    groups = group_by_size(lengths) if uses_cuda_graphs(model) else length_batches(lengths, tokens, n)
    for group in groups:
        ended = 0
        with paused(model):  # rows leave the batch, so a recorder could not tell whose step it sees
            chosen = [row for i in group for row in rows[i * n : i * n + n]]
            for written in (steps or generation_steps)(model, chosen, options):
                before, ended = ended, ended + sum(bool(row.end) for row in written)
                progress(ended // n - before // n)
    if is_observed(model):
        for group in length_batches(lengths, tokens):
            record_forced_forward(model, group, [rows[i * n] for i in group])
    return rows


def check_generation(options: DecodeConfig) -> None:
    """Refuse settings with which nothing can be generated."""
    if options.nbest > 1 and options.temperature == 0:
        raise RegardError(f"{options.nbest} samples at temperature 0 are all the same: give a temperature above 0")
    if options.max_new_tokens < 1:
        raise RegardError(f"decode.max_new_tokens must be at least 1, not {options.max_new_tokens}")
    check_language_model_options(options)
    check_options(options)


def group_by_size(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of rows of similar length, the longest first: a slot is as long as the longest row of a group."""
    size = [max(6, (n - 1).bit_length()) for n in lengths]  # 2^size tokens at most
    for wanted in sorted(set(size), reverse=True):
        yield [i for i, found in enumerate(size) if found == wanted]


def length_batches(lengths: Sequence[int], tokens: int, n: int = 1) -> Iterator[list[int]]:
    """Yield the indices of rows to read together, longest first, by a budget of padded tokens; each row has n copies."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, tokens // (lengths[order[0]] * n))
        yield order[:size]
        order = order[size:]


def generation_steps(
    model: LanguageModel, rows: list[GenerationRequest], options: DecodeConfig
) -> Iterator[list[GenerationRequest]]:
    """Add one token, or a few, to every open row until all have ended; samples of one prompt must be neighbours.

    Yields the rows that got new tokens; a row is yielded for the last time when it has ended."""
    if uses_cuda_graphs(model):
        from regard.decode.graphs import decoding
        from regard.decode.graphs.engine import NotCapturable

        try:
            return decoding.graph_steps(model, rows, options)
        except NotCapturable as error:
            warn_not_captured(model, str(error))
            return eager_batches(model, rows, options)  # the rows were grouped for slots, which hold more than a batch
    return eager_steps(model, rows, options)


def eager_batches(
    model: LanguageModel, rows: list[GenerationRequest], options: DecodeConfig
) -> Iterator[list[GenerationRequest]]:
    """Run `eager_steps` for as many rows at a time as the budget of tokens allows."""
    lengths = [len(row.prompt) + row.limit for row in rows]
    for group in length_batches(lengths, token_budget(options, model.embedding.weight.device)):
        yield from eager_steps(model, [rows[i] for i in group], options)


@torch.inference_mode()
def eager_steps(
    model: LanguageModel, rows: list[GenerationRequest], options: DecodeConfig
) -> Iterator[list[GenerationRequest]]:
    """Add one token at a time to all open rows, without CUDA graphs; yield the rows that got one."""
    batch = GenerationBatch(model, options)
    yield batch.add(rows)
    while batch.rows:
        yield batch.step()


class GenerationBatch:
    """Continuations that are written together, one token at a time; others can join them between two steps."""

    def __init__(self, model: LanguageModel, options: DecodeConfig) -> None:
        self.model, self.options = model, options
        self.rows: list[GenerationRequest] = []  # the open ones
        self.state: Any = None
        self.last: Tensor | None = None  # (N,) the last token of each row

    @torch.inference_mode()
    def add(self, rows: list[GenerationRequest]) -> list[GenerationRequest]:
        """Read the prompts of rows and write the first token of each; return the rows. Equal neighbours are read once."""
        logits, state = prefill_prompts(self.model, rows)
        tokens = self._write(rows, logits)
        open_ = [i for i, row in enumerate(rows) if not row.end]
        if not open_:
            return rows
        if len(open_) < len(rows):
            kept = torch.tensor(open_, device=tokens.device)
            tokens = tokens[kept]
            state.select(kept)
        if not self.rows:
            self.state, self.last = state, tokens
        else:
            assert self.last is not None
            self.state.shorten()
            self.state.join(state)
            self.last = torch.cat([self.last, tokens])
        self.rows = self.rows + [rows[i] for i in open_]
        return rows

    @torch.inference_mode()
    def step(self) -> list[GenerationRequest]:
        """Write a token of every open row and return these rows; those that end leave the batch."""
        rows, model = self.rows, self.model
        assert self.last is not None
        if self.state.length == max_length_of(model):
            logits, self.state = prefill_prompts(model, rows)
        else:
            with one_thread() if self.last.device.type == "cpu" else nullcontext():
                logits = model.step(self.last, self.state)
        self.last = self._write(rows, logits)
        self._keep_open()
        return rows

    def remove(self, rows: Collection[GenerationRequest]) -> None:
        """Remove rows whose continuations nobody waits for."""
        for row in rows:
            row.end = row.end or "stop"
        self._keep_open()

    def _keep_open(self) -> None:
        open_ = [i for i, row in enumerate(self.rows) if not row.end]
        if len(open_) < len(self.rows):
            self.rows = [self.rows[i] for i in open_]
            if open_:
                assert self.last is not None
                kept = torch.tensor(open_, device=self.last.device)
                self.last = self.last[kept]
                self.state.select(kept)

    def _write(self, rows: list[GenerationRequest], logits: Tensor) -> Tensor:
        """Choose the next token of each row, add it to the row and return all (N,)."""
        tokens, gained = choose_tokens(logits, rows, self.options, self.model.config)
        for row, token, log_prob in zip(rows, tokens.tolist(), gained.tolist(), strict=True):
            row.add(token, log_prob)
        return tokens


def choose_tokens(
    logits: Tensor, rows: list[GenerationRequest], options: DecodeConfig, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row (N,) and its log p (N,)."""
    device = logits.device
    seen = seen_tokens([row.ids for row in rows], logits) if options.repetition_penalty != 1 else None
    steps = torch.tensor([len(row.log_probs) for row in rows], device=device)
    seeds = seed_tensor([row.seed for row in rows], device)
    return choose_next(logits, seen, steps < options.min_len, seeds, steps, options, config)


def prefill_prompts(model: LanguageModel, rows: list[GenerationRequest]) -> tuple[Tensor, Any]:
    """Read prompts and what has been written after them; return the logits (N, V) and the state after the last tokens.

    Neighbours with the same tokens are read once."""
    device = model.embedding.weight.device
    unique, index = unique_consecutive([row.ids for row in rows])
    logits, state = model.begin(pad_rows(unique, device))
    if len(unique) == len(rows):
        return logits, state
    copies = torch.tensor(index, device=device)
    state.select(copies)
    return logits[copies], state


@torch.no_grad()
def record_forced_forward(model: LanguageModel, prompts: list[int], rows: list[GenerationRequest]) -> None:
    """Run one teacher-forced forward pass over prompts and continuations, so that active recorders see it."""
    written = [[*row.ids, *([row.eos] if row.end == "end" else [])] for row in rows]
    with labelled(model, prompts, written):
        model(pad_rows([ids[:-1] for ids in written], model.embedding.weight.device))


@torch.inference_mode()
def token_log_probs(model: LanguageModel, texts: Sequence[Sequence[int]], options: DecodeConfig) -> list[list[float]]:
    """Return log p(x_t | x_<t) of every token but the first, for each text."""
    found: dict[int, list[float]] = {}
    device = model.embedding.weight.device
    for group in length_batches([len(ids) for ids in texts], token_budget(options, device)):
        ids = pad_rows([texts[i] for i in group], device)  # (B, T)
        hidden = model.head_input(ids)[:, :-1].flatten(0, 1)  # (B*(T-1), C)
        pieces = zip(hidden.split(CHUNK), ids[:, 1:].flatten().split(CHUNK), strict=True)
        scored = [
            -torch.nn.functional.cross_entropy(model.head(h).float(), t, ignore_index=PAD, reduction="none")
            for h, t in pieces
        ]
        for i, row in zip(group, torch.cat(scored).view(len(group), -1).tolist(), strict=True):
            found[i] = row[: len(texts[i]) - 1]
    return [found[i] for i in range(len(texts))]


# ---- text --------------------------------------------------------------------------------------------------------------


def generate_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: DecodeConfig,
    progress: Callable[[int], None] = lambda done: None,
    steps: GenerationSteps | None = None,
) -> list[tuple[str, GenerationRequest]]:
    """Return the text and the request of each continuation that `generate` makes, ended before a stop string."""
    streamers = [TextStreamer(tokenizer, ids, options.stop_strings) for ids in prompts for _ in range(options.nbest)]
    texts = [""] * len(streamers)

    def on_token(row: int, token: int) -> bool:
        texts[row] += streamers[row].push(token)
        return streamers[row].stopped

    rows = generate(model, prompts, options, on_token, progress, steps)
    return [(texts[i] + streamers[i].flush(), row) for i, row in enumerate(rows)]


class TextStreamer:
    """Incremental detokenizer of one continuation, up to the stop string that is complete first.

    Text that may be the beginning of a stop string is held back, so no part of a stop string is ever returned. The prompt
    is needed because whether the first word has a space in front depends on what it follows.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self.stop, self.stopped, self._held = stop, False, ""
        self._detokenizer = Detokenizer(tokenizer)
        for id in prompt[-8:]:  # tokens further back do not change how the next one is detokenized
            self._detokenizer.push(id)

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain by now, which may be empty."""
        return self._release(self._held + self._detokenizer.push(token), last=False)

    def flush(self) -> str:
        """Return the text that was held back, after the last token."""
        return "" if self.stopped else self._release(self._held + self._detokenizer.flush(), last=True)

    def _release(self, text: str, last: bool) -> str:
        found = [(text.index(s) + len(s), text.index(s)) for s in self.stop if s in text]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        keep = 0 if last else max((overlap(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
