"""A decoder-only model that goes on writing: prompts of any lengths in, continuations in the same order out.

The prompts of a batch are read at once, padded on the right, each once however many samples it gets. Rows that end leave
the batch. A row has its own limit and random generator, so what it gets does not depend on its neighbours. The cache has
one column for each step of any row, so rows that began shorter may have room left when its columns are used up: then what
they hold is read anew, without the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.engine import pad
from regard.decode.rules import check
from regard.decode.sampling import generator, next_tokens
from regard.errors import RegardError
from regard.layers.cache import StepCache
from regard.layers.masks import positions_of
from regard.look.record import labelled, listening, paused
from regard.models.gpt import GPT
from regard.text.stream import Detokenizer
from regard.text.tokenizer import EOS, PAD, Tokenizer

CHUNK = 1024  # tokens whose logits are in memory at a time when text is scored


@dataclass
class Row:
    """One continuation being written."""

    prompt: list[int]
    limit: int  # most tokens
    at_limit: str  # why it would end there
    generator: torch.Generator
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
        if token == EOS:
            self.end = "end"
            return
        self.ids.append(token)
        if self.hear(token):
            self.end = "stop"
        elif len(self.log_probs) == self.limit:
            self.end = self.at_limit


def make_row(prompt: Sequence[int], seed: int, options: DecodeConfig, max_len: int, name: str = "the prompt") -> Row:
    """Refuses a prompt that leaves no room for a single token."""
    room = max_len - len(prompt)
    if not prompt:
        raise RegardError(f"{name} is empty, and this model has no token that begins a text: give it a word")
    if room < 1:
        raise RegardError(
            f"{name} has {len(prompt)} tokens, but the model was built for at most {max_len} (model.max_len), "
            f"those it writes included: shorten it to {max_len - 1} at most"
        )
    new = options.max_new_tokens
    return Row(list(prompt), min(new, room), "length" if new <= room else "context", generator(seed))


def write(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    options: DecodeConfig,
    hear: Callable[[int, int], bool] = lambda row, token: False,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """`nbest` continuations of each prompt, one after the other; `hear` is told (row, token) and may say it is enough."""
    check_writing(options)
    n = options.nbest
    rows = [
        make_row(prompt, (options.seed + i) * n + j, options, model.config.max_len, f"prompt {i + 1}")
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    for number, row in enumerate(rows):
        row.hear = partial(hear, number)
    for group in batches([len(rows[i * n].prompt) + rows[i * n].limit for i in range(len(prompts))], options, n):
        chosen = [row for i in group for row in rows[i * n : i * n + n]]
        with paused(model):  # rows change places
            for _ in steps(model, chosen, options):
                pass
        if listening(model):
            reread(model, group, chosen[::n])
        progress(len(group))
    return rows


def check_writing(options: DecodeConfig) -> None:
    if options.nbest > 1 and options.temperature == 0:
        raise RegardError(f"{options.nbest} samples at temperature 0 are all the same: give a temperature above 0")
    if options.max_new_tokens < 1:
        raise RegardError(f"decode.max_new_tokens must be at least 1, not {options.max_new_tokens}")
    check(options)


def batches(lengths: Sequence[int], options: DecodeConfig, n: int = 1) -> Iterator[list[int]]:
    """Indices of rows to read together, longest first, by a budget of padded tokens."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, options.batch_tokens // (lengths[order[0]] * n))
        yield order[:size]
        order = order[size:]


@torch.inference_mode()
def steps(model: GPT, rows: list[Row], options: DecodeConfig) -> Iterator[list[Row]]:
    """One token more for every open row at a time, until all have ended; samples of one prompt stand together."""
    logits, state = begin(model, rows)
    for step in count():
        tokens, gained = next_tokens(logits, [r.ids for r in rows], step, [r.generator for r in rows], options)
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
        if state.filled == model.config.max_len:
            logits, state = begin(model, rows)
        else:
            logits = model.step(tokens, state)


def begin(model: GPT, rows: list[Row]) -> tuple[Tensor, StepCache]:
    """Read what the rows hold; neighbours that hold the same are read once. Logits (N, V) and the state after it."""
    distinct: list[list[int]] = []
    which = []
    for row in rows:
        if not distinct or row.ids != distinct[-1]:
            distinct.append(row.ids)
        which.append(len(distinct) - 1)
    device = model.embedding.weight.device
    logits, state = model.begin(pad(distinct, device))
    if len(distinct) == len(rows):
        return logits, state
    copies = torch.tensor(which, device=device)
    state.select(copies)
    return logits[copies], state


@torch.no_grad()
def reread(model: GPT, prompts: list[int], rows: list[Row]) -> None:
    """One forward over what was written, for whoever records."""
    written = [[*row.ids, *([EOS] if row.end == "end" else [])] for row in rows]
    with labelled(model, prompts, written):
        model(pad([ids[:-1] for ids in written], model.embedding.weight.device))


@torch.inference_mode()
def token_log_probs(model: GPT, texts: Sequence[Sequence[int]], options: DecodeConfig) -> list[list[float]]:
    """log p(x_t | x_<t) of every token but the first, in each text."""
    found: dict[int, list[float]] = {}
    for group in batches([len(ids) for ids in texts], options):
        ids = pad([texts[i] for i in group], model.embedding.weight.device)  # (B, T)
        hidden = model.hidden(ids, positions_of(ids, PAD))[:, :-1].flatten(0, 1)  # (B*(T-1), C)
        pieces = zip(hidden.split(CHUNK), ids[:, 1:].flatten().split(CHUNK), strict=True)
        scored = [-torch.nn.functional.cross_entropy(model.head(h).float(), t, reduction="none") for h, t in pieces]
        for i, row in zip(group, torch.cat(scored).view(len(group), -1).tolist(), strict=True):
            found[i] = row[: len(texts[i]) - 1]
    return [found[i] for i in range(len(texts))]


class Teller:
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
