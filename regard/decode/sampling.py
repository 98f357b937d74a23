"""One token at a time: the likeliest (greedy), or one drawn at random.

Every sentence has its own random generator, so what it gets does not depend on what else is in its batch.
What is drawn from is made in this order: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.rules import Decoder, Hypothesis, forbid, log_probabilities, opened
from regard.text.tokenizer import EOS, SOS


@torch.inference_mode()
def sample(
    model: Decoder,
    source: Tensor,
    limits: Tensor,
    seeds: list[int],
    options: DecodeConfig,
    start: tuple[int, ...] = (SOS,),
) -> list[Hypothesis]:
    """One translation of each source row (B, S); greedy at temperature 0."""
    state, last = opened(model, source, start)
    generators = [generator(seed) for seed in seeds]
    going = torch.arange(len(source), device=source.device)
    said = [list(start) for _ in seeds]
    log_probs = [0.0] * len(seeds)
    for step in range(int(limits.max())):
        rows = going.tolist()
        logits, seen = model.step(last, state), [said[i] for i in rows]
        last, gained = next_tokens(logits, seen, step, [generators[i] for i in rows], options)
        for i, token, log_prob in zip(rows, last.tolist(), gained.tolist(), strict=True):
            said[i].append(token)
            log_probs[i] += log_prob
        open_ = ((last != EOS) & (step + 1 < limits[going])).nonzero().squeeze(1)
        if len(open_) == 0:
            break
        if len(open_) < len(going):
            going, last = going[open_], last[open_]
            state.select_sentences(open_)
            state.select(open_)
    return [_hypothesis(ids[len(start) :], log_prob, options) for ids, log_prob in zip(said, log_probs, strict=True)]


def _hypothesis(ids: list[int], log_prob: float, options: DecodeConfig) -> Hypothesis:
    ended = ids[-1] == EOS
    return Hypothesis(ids[: len(ids) - ended], log_prob / len(ids) ** options.length_penalty, log_prob, ended)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**64)


def next_tokens(
    logits: Tensor, seen: list[list[int]], step: int, generators: list[torch.Generator], options: DecodeConfig
) -> tuple[Tensor, Tensor]:
    """The next token of each row (N,), and its log p (N,) under the model itself, whatever shaped the choice."""
    log_p = log_probabilities(logits, step, options)  # (N, V)
    wanted = log_p
    if options.repetition_penalty != 1:
        wanted = forbid(penalise(logits.float(), seen, options.repetition_penalty), step, options)
    tokens = choose(wanted, generators, options)
    return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)


def penalise(logits: Tensor, seen: list[list[int]], penalty: float) -> Tensor:
    """CTRL's rule: the logit of a token that was seen is divided by the penalty if positive, else multiplied by it."""
    was_seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in zip(was_seen, seen, strict=True):
        row[ids] = True
    lower = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(was_seen.to(logits.device), lower, logits)


def choose(logits: Tensor, generators: list[torch.Generator], options: DecodeConfig) -> Tensor:
    """The next token of each row (N,)."""
    if options.temperature == 0:
        return logits.argmax(-1)
    p = truncate(logits / options.temperature, options.top_k, options.top_p, options.min_p).softmax(-1)
    # The exponential race: argmax of p_i / e_i with e_i ~ Exp(1) picks i with probability p_i.
    noise = torch.stack([torch.empty(p.shape[1]).exponential_(generator=g) for g in generators])
    return (p / noise.to(p.device)).argmax(-1)


def truncate(logits: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """-inf for all but the k likeliest tokens, the smallest set that holds p of the probability, and those near the best."""
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # probability of all likelier tokens; the likeliest has 0 and always stays
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    if min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return logits
