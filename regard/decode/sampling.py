"""One token at a time: the likeliest (greedy), or one drawn at random.

Every sentence has its own random generator, so what it gets does not depend on what else is in its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.rules import Decoder, Hypothesis, log_probabilities
from regard.text.tokenizer import EOS, SOS


@torch.inference_mode()
def sample(model: Decoder, source: Tensor, limits: Tensor, seeds: list[int], options: DecodeConfig) -> list[Hypothesis]:
    """One translation of each source row (B, S); greedy at temperature 0."""
    state = model.begin(source)
    generators = [torch.Generator().manual_seed(seed % 2**64) for seed in seeds]
    going = torch.arange(len(source), device=source.device)
    said: list[list[int]] = [[] for _ in seeds]
    log_probs = [0.0] * len(seeds)
    last = torch.full((len(source),), SOS, device=source.device)
    for step in range(int(limits.max())):
        log_p = log_probabilities(model.step(last, state), step, options)  # (N, V)
        rows = going.tolist()
        last = choose(log_p, [generators[i] for i in rows], options)  # (N,)
        gained = log_p.gather(1, last[:, None]).squeeze(1)
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
    return [_hypothesis(ids, log_prob, options) for ids, log_prob in zip(said, log_probs, strict=True)]


def _hypothesis(ids: list[int], log_prob: float, options: DecodeConfig) -> Hypothesis:
    ended = ids[-1] == EOS
    return Hypothesis(ids[: len(ids) - ended], log_prob / len(ids) ** options.length_penalty, log_prob, ended)


def choose(log_p: Tensor, generators: list[torch.Generator], options: DecodeConfig) -> Tensor:
    """The next token of each row (N,)."""
    if options.temperature == 0:
        return log_p.argmax(-1)
    p = truncate(log_p / options.temperature, options.top_k, options.top_p).softmax(-1)
    # The exponential race: argmax of p_i / e_i with e_i ~ Exp(1) picks i with probability p_i.
    noise = torch.stack([torch.empty(p.shape[1]).exponential_(generator=g) for g in generators])
    return (p / noise.to(p.device)).argmax(-1)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf for all but the k likeliest tokens and the smallest set that holds p of the probability."""
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # probability of all likelier tokens; the likeliest has 0 and always stays
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return logits
