"""One token at a time: the likeliest (greedy), or one drawn at random, each sentence by its own seed."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.draw import draw
from regard.decode.rules import Decoder, Hypothesis, opened
from regard.text.frame import OWN


@torch.inference_mode()
def sample(
    model: Decoder,
    source: Tensor,
    limits: Tensor,
    seeds: list[int],
    options: DecodeConfig,
    start: tuple[int, ...] = OWN.start,
) -> list[Hypothesis]:
    """One translation of each source row (B, S); greedy at temperature 0."""
    state, last = opened(model, source, start)
    rows, most, chance = list(range(len(seeds))), limits.tolist(), seeds_of(seeds, source.device)
    said = [list(start) for _ in seeds]
    log_probs, end = [0.0] * len(seeds), model.config.eos_token_id
    for step in range(max(most)):
        logits = model.step(last, state)
        seen = seen_of([said[i] for i in rows], logits) if options.repetition_penalty != 1 else None
        steps = torch.full_like(chance, step)
        last, gained = draw(logits, seen, step < options.min_len, chance, steps, options, model.config)
        tokens = last.tolist()
        for i, token, log_prob in zip(rows, tokens, gained.tolist(), strict=True):
            said[i].append(token)
            log_probs[i] += log_prob
        open_ = [j for j, i in enumerate(rows) if tokens[j] != end and step + 1 < most[i]]
        if not open_:
            break
        if len(open_) < len(rows):
            kept = torch.tensor(open_, device=source.device)
            rows, chance, last = [rows[j] for j in open_], chance[kept], last[kept]
            state.select(kept)
    found = zip(said, log_probs, strict=True)
    return [_hypothesis(ids[len(start) :], log_prob, options, end) for ids, log_prob in found]


def _hypothesis(ids: list[int], log_prob: float, options: DecodeConfig, end: int) -> Hypothesis:
    ended = ids[-1] == end
    return Hypothesis(ids[: len(ids) - ended], log_prob / len(ids) ** options.length_penalty, log_prob, ended)


def seeds_of(seeds: list[int], device: torch.device) -> Tensor:
    """(N,) int64"""
    return torch.tensor([seed % 2**63 for seed in seeds], device=device)


def seen_of(rows: list[list[int]], logits: Tensor) -> Tensor:
    """(N, V): the tokens that each row has read or written."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in zip(seen, rows, strict=True):
        row[ids] = True
    return seen.to(logits.device)
