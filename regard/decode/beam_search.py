"""Beam search keeps the K most probable hypotheses of each sentence at every step.

A hypothesis y is ranked by  log p(y | x) / |y|^a,  where a is the length penalty and |y| counts the generated tokens with
the end token. Each step takes the 2K best candidates, extensions of the K open hypotheses by one token: those among the
first K that end are kept as finished, the best K others stay open (2K, because each of the K has one extension that ends).
A sentence stops when K hypotheses are finished and the worst of them scores at least as well as any open one

- at its present length (`beam_stop = "likely"`: fast, and what most toolkits do), or
- at any length it could still reach (`beam_stop = "proven"`: log p only falls, so log p / limit^a bounds it for a > 0).

Sentences that have stopped leave the batch. Everything stays on the device; the host reads only the flags that say so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import DecodableModel, Hypothesis, log_probabilities, start_decoding
from regard.text.special_tokens import EOS_TEMPLATE

BLOCK = 128  # tokens whose maximum `best_extensions` computes first


@dataclass
class Beams:
    """The open and finished hypotheses of B sentences, K of each, with up to L tokens."""

    sentence: Tensor  # (B,) which source a row belongs to
    limit: Tensor  # (B,) at most this many tokens
    tokens: Tensor  # (B, K, L) of open hypotheses
    log_prob: Tensor  # (B, K) of open hypotheses; -inf: there is none in this place
    done: Tensor  # (B, K, L) tokens of finished hypotheses
    done_score: Tensor  # (B, K) of finished hypotheses, best first; -inf: there is none in this place
    done_log_prob: Tensor  # (B, K)
    done_length: Tensor  # (B, K) tokens, the end token included

    @classmethod
    def start(cls, limits: Tensor, k: int) -> Beams:
        """Return the beams before the first step: one open hypothesis of each sentence, without a token."""
        b, room = len(limits), int(limits.max())
        device = limits.device
        tokens = torch.zeros((b, k, room), dtype=torch.long, device=device)  # empty places read token 0
        log_prob = torch.full((b, k), -torch.inf, device=device)
        log_prob[:, 0] = 0.0
        empty = torch.full_like(log_prob, -torch.inf)
        length = torch.zeros((b, k), dtype=torch.long, device=device)
        return cls(
            torch.arange(b, device=device), limits, tokens, log_prob, tokens.clone(), empty, empty.clone(), length
        )

    def keep(self, rows: Tensor) -> None:
        """Drop all sentences but these."""
        for name, value in vars(self).items():
            setattr(self, name, value[rows])


@torch.inference_mode()
def beam_search(
    model: DecodableModel,
    source: Tensor,
    limits: Tensor,
    options: DecodeConfig,
    start: tuple[int, ...] = EOS_TEMPLATE.start,
) -> list[list[Hypothesis]]:
    """Return the `nbest` best translations of each source row (B, S), best first."""
    k, end = options.beam, model.config.eos_token_id
    state, last = start_decoding(model, source, start)  # one hypothesis each; the first reordering makes K of it
    beams = Beams.start(limits, k)
    found: dict[int, list[Hypothesis]] = {}
    for step in range(int(limits.max())):
        log_p = log_probabilities(model.step(last, state), step, options, model.config)  # (B*K or B, V)
        parents = extend(beams, log_p, step, options, end)  # (B, K)
        stopped = has_stopped(beams, step, options)
        if stopped.any():
            collect(beams, stopped, options, found, end)
            remaining = (~stopped).nonzero().squeeze(1)
            if len(remaining) == 0:
                break
            beams.keep(remaining)
            parents = parents[remaining]
            state.select(remaining)
        state.reorder(parents)  # beam reordering
        last = beams.tokens[:, :, step].flatten()
    return [found[i] for i in range(len(source))]


def extend(beams: Beams, log_p: Tensor, step: int, options: DecodeConfig, end: int) -> Tensor:
    """Replace the open hypotheses by their K best extensions; return the parents (B, K) to reorder the decoding state by.

    A parent is the hypothesis, numbered within its sentence, that an open hypothesis continues."""
    b, k = beams.log_prob.shape
    rows = log_p.shape[0] // b  # 1 at the first step, else K
    value, parent, token = best_extensions(log_p.view(b, rows, -1), beams.log_prob[:, :rows], 2 * k)
    ends = (token == end) | (step + 1 >= beams.limit)[:, None]
    if ends.any():
        candidates = beams.tokens.gather(1, parent[:, :, None].expand(-1, -1, beams.tokens.shape[2]))
        candidates[:, :, step] = token
        finish(beams, candidates[:, :k], value[:, :k].masked_fill(~ends[:, :k], -torch.inf), step + 1, options)
        # stable: equal scores keep the order topk gave them
        value, place = value.masked_fill(ends, -torch.inf).sort(dim=1, descending=True, stable=True)
        parent, token = parent.gather(1, place), token.gather(1, place)

    parent = _pad(parent[:, :k], k, 0)
    beams.log_prob = _pad(value[:, :k], k, -torch.inf)
    beams.tokens = beams.tokens.gather(1, parent[:, :, None].expand(-1, -1, beams.tokens.shape[2]))
    beams.tokens[:, :, step] = _pad(token[:, :k], k, 0)
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


def finish(beams: Beams, tokens: Tensor, log_prob: Tensor, length: int, options: DecodeConfig) -> None:
    """Merge newly ended hypotheses (those above -inf) with the finished ones and keep the K best."""
    k = beams.done_score.shape[1]
    score = torch.cat([beams.done_score, log_prob / length**options.length_penalty], 1)
    best, place = score.sort(dim=1, descending=True, stable=True)
    best, place = best[:, :k], place[:, :k]
    pool = torch.cat([beams.done, tokens], 1)
    lengths = torch.cat([beams.done_length, torch.full_like(log_prob, length, dtype=torch.long)], 1)
    beams.done_score = best
    beams.done = pool.gather(1, place[:, :, None].expand(-1, -1, pool.shape[2]))
    beams.done_log_prob = torch.cat([beams.done_log_prob, log_prob], 1).gather(1, place)
    beams.done_length = lengths.gather(1, place)


def has_stopped(beams: Beams, step: int, options: DecodeConfig) -> Tensor:
    """Return which sentences (B,) have K finished hypotheses that no open one will beat, or are at their limit."""
    proven = options.beam_stop == "proven" and options.length_penalty > 0
    length = beams.limit if proven else step + 1
    best_open = beams.log_prob[:, 0] / length**options.length_penalty  # open hypotheses are sorted
    return (beams.done_score[:, -1] >= best_open) | (step + 1 >= beams.limit)


def collect(beams: Beams, stopped: Tensor, options: DecodeConfig, found: dict[int, list[Hypothesis]], end: int) -> None:
    """Put the finished hypotheses of sentences that have stopped into `found`, by the number of their source."""
    rows = stopped.nonzero().squeeze(1)
    fields = (beams.sentence, beams.done, beams.done_score, beams.done_log_prob, beams.done_length)
    for sentence, tokens, scores, log_probs, lengths in zip(*(x[rows].tolist() for x in fields), strict=True):
        ranked = zip(tokens, scores, log_probs, lengths, strict=True)
        found[sentence] = [
            Hypothesis(ids[: n - (ids[n - 1] == end)], score, log_prob, ids[n - 1] == end)
            for ids, score, log_prob, n in ranked
            if n > 0 and score > -torch.inf
        ][: options.nbest]
