"""The next token: the likeliest, or one drawn at random.

Every row has its own noise, a pure function of (seed, step, token): what it gets depends neither on its batch nor on the
device, and a recorded step can make it. What is drawn from is made in this order: repetition penalty, temperature, top-k,
top-p, min-p.

MERGED: One token at a time: the likeliest (greedy), or one drawn at random, each sentence by its own seed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.config import DecodeConfig, ModelConfig
from regard.decode.constraints import Decoder, Hypothesis, mask_disallowed, start_decoding
from regard.kernels.hashing import UINT32_MAX, hash_bits
from regard.text.special_tokens import EOS_TEMPLATE


def choose_next(
    logits: Tensor,
    seen: Tensor | None,
    no_end: Tensor | bool,
    seeds: Tensor,
    steps: Tensor,
    options: DecodeConfig,
    config: ModelConfig,
) -> tuple[Tensor, Tensor]:
    """The next token of each row (N,), and its log p (N,) under the model itself, whatever shaped the choice.

    logits (N, V); seen (N, V): tokens that were read or written; no_end (N,): rows that may not end yet; seeds, steps (N,),
    which are not looked at when the temperature is 0; config: the model's, which says what is never generated.
    """
    logits = logits.float()
    scores, log_z = scores_and_normaliser(logits)  # before `forbid` writes into the logits
    wanted = logits if seen is None else penalize_repetition(logits, seen, options.repetition_penalty)
    token = choose(mask_disallowed(wanted, no_end, config), seeds, steps, options)
    return token, scores.gather(1, token[:, None]).squeeze(1) - log_z


def scores_and_normaliser(logits: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return scores (N, V) and what is to be subtracted from them for log p, (N,) or 0.

    On a CPU torch is faster at log_softmax, after which nothing is left to subtract, than at log sum exp."""
    return (logits, logits.logsumexp(-1)) if logits.is_cuda else (logits.log_softmax(-1), 0.0)


def choose(logits: Tensor, seeds: Tensor, steps: Tensor, options: DecodeConfig) -> Tensor:
    """The likeliest token of each row (N,) at temperature 0, else one drawn."""
    if options.temperature == 0:
        return argmax(logits)
    p = truncate(logits / options.temperature, options.top_k, options.top_p, options.min_p).softmax(-1)
    # The exponential race: argmax of p_i / e_i with e_i ~ Exp(1) picks i with probability p_i.
    return (p / exponential_noise(seeds, steps, logits.shape[1])).argmax(-1)


BLOCK = 128  # tokens


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest of each row (N, V) -> (N,), the first of equal ones.

    On a CPU, torch finds a maximum twenty times faster than its place, so the place is looked for in one block alone."""
    if logits.is_cuda or logits.shape[1] % BLOCK:
        return logits.argmax(-1)
    blocks = logits.unflatten(1, (-1, BLOCK))  # (N, V / BLOCK, BLOCK)
    block = blocks.amax(2).argmax(1)  # (N,)
    return block * BLOCK + blocks[torch.arange(len(blocks)), block].argmax(1)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """CTRL's rule: the logit of a token that was seen is divided by the penalty if positive, else multiplied by it."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


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


def exponential_noise(seeds: Tensor, steps: Tensor, n: int) -> Tensor:
    """Noise (N, n), distributed as Exp(1), by a hash of seed, step and column."""
    key = hash_bits(
        hash_bits(seeds & UINT32_MAX) ^ hash_bits((seeds >> 32) + 0x9E3779B9) ^ hash_bits(steps.long() + 0x7F4A7C15)
    )[:, None]
    column = torch.arange(n, device=seeds.device) * 0x9E3779B1 & UINT32_MAX
    bits = hash_bits(hash_bits(column ^ key) + key)
    return -((bits >> 9).float() + 0.5).mul_(2.0**-23).log_()  # exact in fp32, never 0 or 1 before the logarithm


@torch.inference_mode()
def sample(
    model: Decoder,
    source: Tensor,
    limits: Tensor,
    seeds: list[int],
    options: DecodeConfig,
    start: tuple[int, ...] = EOS_TEMPLATE.start,
) -> list[Hypothesis]:
    """One translation of each source row (B, S); greedy at temperature 0."""
    state, last = start_decoding(model, source, start)
    rows, most, chance = list(range(len(seeds))), limits.tolist(), seed_tensor(seeds, source.device)
    said = [list(start) for _ in seeds]
    log_probs, end = [0.0] * len(seeds), model.config.eos_token_id
    for step in range(max(most)):
        logits = model.step(last, state)
        seen = seen_tokens([said[i] for i in rows], logits) if options.repetition_penalty != 1 else None
        steps = torch.full_like(chance, step)
        last, gained = choose_next(logits, seen, step < options.min_len, chance, steps, options, model.config)
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


def seed_tensor(seeds: list[int], device: torch.device) -> Tensor:
    """(N,) int64"""
    return torch.tensor([seed % 2**63 for seed in seeds], device=device)


def seen_tokens(rows: list[list[int]], logits: Tensor) -> Tensor:
    """(N, V): the tokens that each row has read or written."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in zip(seen, rows, strict=True):
        row[ids] = True
    return seen.to(logits.device)
