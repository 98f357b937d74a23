"""Beam search keeps the K most probable hypotheses of each sentence at every step.

A hypothesis y is ranked by  log p(y | x) / |y|^a,  where a is the length penalty and |y| counts the generated tokens with
the end token. GNMT (Wu et al. 2016) divides by ((5 + |y|) / 6)^a instead (`decode.length_norm`), and adds

    b * sum over source tokens i of log(min(sum over generated tokens j of p_ij, 1))        (`decode.coverage_penalty` b)

where p_ij is the attention weight of source token i in the step that generated token j (decode/source_attention.py): a
translation that leaves a part of its source out scores less. Source tokens are all that the encoder reads, special tokens
included; a sum below 1e-9 counts as that. `decode.prune` drops candidates whose log p is that much below the best candidate
of the same step, which is as long, and finished hypotheses whose score is that much below the best finished one.

Each step takes the 2K best candidates, extensions of the K open hypotheses by one token: those among the
first K that end are kept as finished, the best K others stay open (2K, because each of the K has one extension that ends).
A sentence stops when K hypotheses are finished and the worst of them scores at least as well as any open one

- at its present length (`beam_stop = "likely"`: fast, and what most toolkits do), or
- at any length it could still reach (`beam_stop = "proven"`: log p only falls, so log p / limit^a bounds it for a > 0).

An open hypothesis may still attend to every source token, so its coverage is taken to be complete, which is 0, here.

Sentences that have stopped leave the batch, and others may join it between two steps (continuous batching): each sentence
counts its own steps. Everything stays on the device; the host reads only the flags that say which sentences have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import (
    DecodableModel,
    Hypothesis,
    length_normalizer,
    mask_disallowed,
    start_decoding,
    with_allowed_tokens,
)
from regard.decode.source_attention import AttentiveStep
from regard.layers.decoding_state import concatenate_padded, without_rows
from regard.text.special_tokens import EOS_TEMPLATE

BLOCK = 128  # tokens whose maximum `best_extensions` computes first
LEAST_COVERAGE = 1e-9  # a source token without any attention does not make a score -inf


@dataclass
class Beams:
    """The open and finished hypotheses of B sentences, K of each, with up to L tokens."""

    sentence: Tensor  # (B,) which source a row belongs to
    limit: Tensor  # (B,) at most this many tokens
    step: Tensor  # (B,) tokens of the open hypotheses
    tokens: Tensor  # (B, K, L) of open hypotheses
    log_prob: Tensor  # (B, K) of open hypotheses; -inf: there is none in this place
    done: Tensor  # (B, K, L) tokens of finished hypotheses
    done_score: Tensor  # (B, K) of finished hypotheses, best first; -inf: there is none in this place
    done_log_prob: Tensor  # (B, K)
    done_length: Tensor  # (B, K) tokens, the end token included
    source_length: Tensor  # (B,) tokens of the source
    coverage: Tensor  # (B, K, S) attention that source tokens have had from open hypotheses; S is 0 if it is not needed

    @classmethod
    def start(cls, source: Tensor, limits: Tensor, k: int, numbers: Sequence[int]) -> Beams:
        """Return the beams before the first step: one open hypothesis of each sentence, without a token.

        `numbers` are those of the sentences."""
        lengths = (source >= 0).sum(1)
        b, room = len(limits), int(limits.max())
        device = limits.device
        tokens = torch.zeros((b, k, room), dtype=torch.long, device=device)  # empty places read token 0
        log_prob = torch.full((b, k), -torch.inf, device=device)
        log_prob[:, 0] = 0.0
        empty = torch.full_like(log_prob, -torch.inf)
        length = torch.zeros((b, k), dtype=torch.long, device=device)
        sentence, step = torch.tensor(numbers, device=device), torch.zeros_like(limits)
        done = tokens.clone(), empty, empty.clone(), length
        return cls(sentence, limits, step, tokens, log_prob, *done, lengths, log_prob.new_zeros(b, k, 0))

    def keep(self, rows: Tensor) -> None:
        """Drop all sentences but these."""
        for name, value in vars(self).items():
            setattr(self, name, value[rows])

    def join(self, other: Beams) -> None:
        """Append the sentences of other beams."""
        for name, value in vars(self).items():
            theirs = getattr(other, name)
            joined = concatenate_padded(value, theirs, 2) if value.ndim == 3 else torch.cat([value, theirs])
            setattr(self, name, joined)


@torch.inference_mode()
def beam_search(
    model: DecodableModel,
    source: Tensor,
    limits: Tensor,
    options: DecodeConfig,
    start: tuple[int, ...] = EOS_TEMPLATE.start,
) -> list[list[Hypothesis]]:
    """Return the `nbest` best translations of each source row (B, S), best first."""
    search = BeamSearch(model, options, start)
    search.add(source, limits, range(len(source)))
    found: dict[int, list[Hypothesis]] = {}
    while search.sentences:
        found |= search.step()
    return [found[i] for i in range(len(source))]


class BeamSearch:
    """A beam search over a batch of sentences, which others can join between two steps."""

    def __init__(
        self, model: DecodableModel, options: DecodeConfig, start: tuple[int, ...] = EOS_TEMPLATE.start
    ) -> None:
        self.model, self.options, self.start = model, options, start
        self.attentive_step = AttentiveStep(model) if options.coverage_penalty else None
        self.batch: BeamBatch | None = None
        self.ended: dict[int, list[Hypothesis]] = {}  # sentences that ended while they joined the batch

    @property
    def sentences(self) -> int:
        """The number of sentences in the batch, and of those whose results the next step returns."""
        return (len(self.batch.beams.sentence) if self.batch else 0) + len(self.ended)

    @torch.inference_mode()
    def add(self, source: Tensor, limits: Tensor, numbers: Sequence[int]) -> None:
        """Add source rows (B, S) with their length limits (B,); `numbers` identify them in the results of `step`."""
        state, last = start_decoding(self.model, source, self.start, self.options)  # one hypothesis each
        fresh = BeamBatch(Beams.start(source, limits, self.options.beam, numbers), state, last)
        if self.batch is None:
            self.batch = fresh
            return
        # The first step makes K hypotheses of one, as all others in the batch have.
        for batch in (self.batch, fresh):
            if not bool(batch.beams.step.any()):
                self.ended |= self._step(batch)
        if len(fresh.beams.sentence) and len(self.batch.beams.sentence):
            self.batch.beams.join(fresh.beams)
            self.batch.state.shorten()
            self.batch.state.join(fresh.state)
            self.batch.last = torch.cat([self.batch.last, fresh.last])
        elif len(fresh.beams.sentence):
            self.batch = fresh
        elif not len(self.batch.beams.sentence):
            self.batch = None

    @torch.inference_mode()
    def step(self) -> dict[int, list[Hypothesis]]:
        """Add a token to every open hypothesis; return the translations of the sentences that have stopped."""
        found, self.ended = self.ended, {}
        if self.batch is not None:
            found |= self._step(self.batch)
            if not len(self.batch.beams.sentence):
                self.batch = None
        return found

    @torch.inference_mode()
    def remove(self, numbers: set[int]) -> None:
        """Remove sentences whose translations nobody waits for."""
        self.ended = {number: found for number, found in self.ended.items() if number not in numbers}
        if self.batch is not None:
            kept = [i for i, number in enumerate(self.batch.beams.sentence.tolist()) if number not in numbers]
            self.batch.keep(torch.tensor(kept, device=self.batch.last.device, dtype=torch.long))
            self.batch = self.batch if kept else None

    def _step(self, batch: BeamBatch) -> dict[int, list[Hypothesis]]:
        beams, state, options, config = batch.beams, batch.state, self.options, self.model.config
        config = with_allowed_tokens(config, options)
        if self.attentive_step is None:
            logits = self.model.step(batch.last, state)
        else:
            logits, weights = self.attentive_step(batch.last, state)
            add_attention(beams, weights)
        log_p = logits.float().log_softmax(-1)  # (B*K or B, V)
        too_short: Tensor | bool = False
        if options.min_len:
            too_short = (beams.step < options.min_len).repeat_interleave(len(log_p) // len(beams.step))
        parents = extend(beams, mask_disallowed(log_p, too_short, config), options, config.eos_token_id)  # (B, K)
        stopped = has_stopped(beams, options)
        found: dict[int, list[Hypothesis]] = {}
        if stopped.any():
            collect(beams, stopped, options, found, config.eos_token_id)
            remaining = without_rows(stopped)
            beams.keep(remaining)
            if len(remaining) == 0:
                return found
            parents = parents[remaining]
            state.select(remaining)
        state.reorder(parents)  # beam reordering
        at = (beams.step - 1)[:, None, None].expand(-1, options.beam, 1)
        batch.last = beams.tokens.gather(2, at).flatten()
        return found


@dataclass
class BeamBatch:
    """The hypotheses of some sentences, their decoding state, and the last token of each hypothesis."""

    beams: Beams
    state: Any
    last: Tensor  # (B*K,), or (B,) before the first step

    def keep(self, rows: Tensor) -> None:
        """Drop all sentences but these."""
        rows_each = len(self.last) // len(self.beams.sentence)
        self.last = self.last.unflatten(0, (-1, rows_each))[rows].flatten()
        self.beams.keep(rows)
        self.state.select(rows)


def extend(beams: Beams, log_p: Tensor, options: DecodeConfig, end: int) -> Tensor:
    """Replace the open hypotheses by their K best extensions; return the parents (B, K) to reorder the decoding state by.

    A parent is the hypothesis, numbered within its sentence, that an open hypothesis continues."""
    b, k = beams.log_prob.shape
    rows = log_p.shape[0] // b  # 1 at the first step, else K
    value, parent, token = best_extensions(log_p.view(b, rows, -1), beams.log_prob[:, :rows], 2 * k)
    if options.prune:
        value = value.masked_fill(value < value[:, :1] - options.prune, -torch.inf)  # all have the same length
    at = beams.step[:, None, None]  # (B, 1, 1), where the new tokens are written
    ends = (token == end) | (beams.step + 1 >= beams.limit)[:, None]
    if ends.any():
        candidates = beams.tokens.gather(1, parent[:, :, None].expand(-1, -1, beams.tokens.shape[2]))
        candidates.scatter_(2, at.expand(-1, parent.shape[1], 1), token[:, :, None])
        ended = value[:, :k].masked_fill(~ends[:, :k], -torch.inf)
        finish(beams, candidates[:, :k], ended, parent[:, :k], options)
        # stable: equal scores keep the order topk gave them
        value, place = value.masked_fill(ends, -torch.inf).sort(dim=1, descending=True, stable=True)
        parent, token = parent.gather(1, place), token.gather(1, place)

    parent = _pad(parent[:, :k], k, 0)
    beams.log_prob = _pad(value[:, :k], k, -torch.inf)
    beams.tokens = beams.tokens.gather(1, parent[:, :, None].expand(-1, -1, beams.tokens.shape[2]))
    beams.tokens.scatter_(2, at.expand(-1, k, 1), _pad(token[:, :k], k, 0)[:, :, None])
    if options.coverage_penalty:
        beams.coverage = beams.coverage.gather(1, parent[:, :, None].expand(-1, -1, beams.coverage.shape[2]))
    beams.step = beams.step + 1
    return parent


def best_extensions(log_p: Tensor, log_prob: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, hypotheses and tokens, (B, n) each, of the n largest of log_prob (B, K) + log_p (B, K, V), best first.

    A top-k over K V numbers takes longer than reading them. The n best lie in the n blocks whose maxima are the largest, so
    a top-k over blocks comes first. Its addition of log_prob to maxima is safe: rounding never reverses an order.
    """
    _, k, vocab = log_p.shape
    block = min(BLOCK, vocab)
    whole = vocab - vocab % block
    largest = log_p[:, :, :whole].unflatten(2, (-1, block)).amax(3)  # (B, K, V / block)
    if whole < vocab:
        largest = torch.cat([largest, log_p[:, :, whole:].amax(2, keepdim=True)], 2)
    blocks = largest.shape[2]
    places = (largest + log_prob[:, :, None]).flatten(1).topk(min(n, k * blocks)).indices  # (B, n)
    parent = (places // blocks)[:, :, None].expand(-1, -1, block).flatten(1)  # (B, n * block)
    token = ((places % blocks)[:, :, None] * block + torch.arange(block, device=log_p.device)).flatten(1)
    beyond, token = token >= vocab, token.clamp(max=vocab - 1)  # the last block may be short
    total = log_p.flatten(1).gather(1, parent * vocab + token) + log_prob.gather(1, parent)
    value, place = total.masked_fill(beyond, -torch.inf).topk(min(n, k * vocab))
    return value, parent.gather(1, place), token.gather(1, place)


def _pad(x: Tensor, k: int, value: float) -> Tensor:
    """Pad (B, <=K) to (B, K): a tiny vocabulary has fewer candidates than the beam has places."""
    return x if x.shape[1] == k else torch.nn.functional.pad(x, (0, k - x.shape[1]), value=value)


def add_attention(beams: Beams, weights: Tensor) -> None:
    """Add the attention weights (B, K or 1, S) of a step to the coverage of the open hypotheses.

    Padding of the source comes and goes with the sentences of the batch, so S may differ from one step to the next."""
    (b, rows, s), k, before = weights.shape, beams.coverage.shape[1], beams.coverage.shape[2]
    coverage = weights.new_zeros(b, k, s)
    coverage[:, :, : min(s, before)] = beams.coverage[:, :, :s]
    coverage[:, :rows] += weights
    beams.coverage = coverage


def coverage_score(beams: Beams, options: DecodeConfig) -> Tensor:
    """Return b * sum of log(min(attention, 1)) over the source tokens of each open hypothesis, (B, K), at most 0."""
    lacking = beams.coverage.clamp(LEAST_COVERAGE, 1.0).log()
    real = torch.arange(lacking.shape[2], device=lacking.device) < beams.source_length[:, None, None]
    return options.coverage_penalty * lacking.where(real, 0.0).sum(2)


def finish(beams: Beams, tokens: Tensor, log_prob: Tensor, parent: Tensor, options: DecodeConfig) -> None:
    """Merge newly ended hypotheses (those above -inf) with the finished ones and keep the K best.

    `parent` (B, K) is the open hypothesis that each of them continues."""
    k = beams.done_score.shape[1]
    length = (beams.step + 1)[:, None]  # (B, 1), the end token included
    fresh = log_prob / normalizer(length, options)
    if options.coverage_penalty:
        fresh = fresh + coverage_score(beams, options).gather(1, parent)
    score = torch.cat([beams.done_score, fresh], 1)
    best, place = score.sort(dim=1, descending=True, stable=True)
    best, place = best[:, :k], place[:, :k]
    pool = torch.cat([beams.done, tokens], 1)
    lengths = torch.cat([beams.done_length, length.expand_as(log_prob)], 1)
    beams.done_score = best
    beams.done = pool.gather(1, place[:, :, None].expand(-1, -1, pool.shape[2]))
    beams.done_log_prob = torch.cat([beams.done_log_prob, log_prob], 1).gather(1, place)
    beams.done_length = lengths.gather(1, place)


def normalizer(length: Tensor, options: DecodeConfig) -> Tensor:
    """Return what the log-probability of a hypothesis of this length is divided by, computed in fp64."""
    found: Tensor = length_normalizer(length.double(), options).float()
    return found


def has_stopped(beams: Beams, options: DecodeConfig) -> Tensor:
    """Return which sentences (B,) have K finished hypotheses that no open one will beat, or are at their limit."""
    proven = options.beam_stop == "proven" and options.length_penalty > 0
    length = beams.limit if proven else beams.step
    best_open = beams.log_prob[:, 0] / normalizer(length, options)  # open hypotheses are sorted
    return (beams.done_score[:, -1] >= best_open) | (beams.step >= beams.limit)


def collect(beams: Beams, stopped: Tensor, options: DecodeConfig, found: dict[int, list[Hypothesis]], end: int) -> None:
    """Put the finished hypotheses of sentences that have stopped into `found`, by the number of their source."""
    rows = stopped.nonzero().squeeze(1)
    fields = (beams.sentence, beams.done, beams.done_score, beams.done_log_prob, beams.done_length)
    for sentence, tokens, scores, log_probs, lengths in zip(*(x[rows].tolist() for x in fields), strict=True):
        ranked = zip(tokens, scores, log_probs, lengths, strict=True)
        found[sentence] = [
            Hypothesis(ids[: n - (ids[n - 1] == end)], score, log_prob, ids[n - 1] == end)
            for ids, score, log_prob, n in ranked
            if n > 0 and score > -torch.inf and (not options.prune or score >= scores[0] - options.prune)
        ][: options.nbest]
