"""Choosing the next token: greedy, or a random sample after temperature, top-k, top-p and min-p.

The noise of a row is a pure function of (seed, step, token), so a sample depends neither on the other rows of the batch nor
on the device, and a step that is captured in a CUDA graph can compute it. The logits are changed in this order: repetition
penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.config import DecodeConfig, ModelConfig
from regard.decode.constraints import DecodableModel, Hypothesis, mask_disallowed, start_decoding
from regard.kernels.hashing import UINT32_MAX, hash_bits
from regard.text.special_tokens import EOS_TEMPLATE

# ---- translating -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def sample(
    model: DecodableModel,
    source: Tensor,
    limits: Tensor,
    seeds: list[int],
    options: DecodeConfig,
    start: tuple[int, ...] = EOS_TEMPLATE.start,
) -> list[Hypothesis]:
    """Return one sampled translation of each source row (B, S); at temperature 0, the greedy one."""
    state, last = start_decoding(model, source, start)
    rows, most, row_seeds = list(range(len(seeds))), limits.tolist(), seed_tensor(seeds, source.device)
    written = [list(start) for _ in seeds]
    log_probs, end = [0.0] * len(seeds), model.config.eos_token_id
    for step in range(max(most)):
        logits = model.step(last, state)
        seen = seen_tokens([written[i] for i in rows], logits) if options.repetition_penalty != 1 else None
        steps = torch.full_like(row_seeds, step)
        last, gained = choose_next(logits, seen, step < options.min_len, row_seeds, steps, options, model.config)
        tokens = last.tolist()
        for i, token, log_prob in zip(rows, tokens, gained.tolist(), strict=True):
            written[i].append(token)
            log_probs[i] += log_prob
        open_ = [j for j, i in enumerate(rows) if tokens[j] != end and step + 1 < most[i]]
        if not open_:
            break
        if len(open_) < len(rows):
            kept = torch.tensor(open_, device=source.device)
            rows, row_seeds, last = [rows[j] for j in open_], row_seeds[kept], last[kept]
            state.select(kept)
    found = []
    for row, log_prob in zip(written, log_probs, strict=True):
        ids = row[len(start) :]
        ended = ids[-1] == end
        score = log_prob / len(ids) ** options.length_penalty
        found.append(Hypothesis(ids[: len(ids) - ended], score, log_prob, ended))
    return found


def seed_tensor(seeds: list[int], device: torch.device) -> Tensor:
    """Return the seeds of the rows as int64 (N,)."""
    return torch.tensor([seed % 2**63 for seed in seeds], device=device)


def seen_tokens(rows: list[list[int]], logits: Tensor) -> Tensor:
    """Return a mask (N, V) of the tokens that each row has read or written."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in zip(seen, rows, strict=True):
        row[ids] = True
    return seen.to(logits.device)


# ---- one token ---------------------------------------------------------------------------------------------------------


def choose_next(
    logits: Tensor,
    seen: Tensor | None,
    no_end: Tensor | bool,
    seeds: Tensor,
    steps: Tensor,
    options: DecodeConfig,
    config: ModelConfig,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row (N,) and its log p (N,) under the model itself, before any penalty or truncation.

    logits (N, V); seen (N, V): tokens that were read or written; no_end (N,): rows that may not end yet; seeds, steps (N,),
    which are unused at temperature 0; config: the model's, which lists the tokens that are never generated.
    """
    logits = logits.float()
    scores, log_z = unnormalized_log_probs(logits)  # before `mask_disallowed` writes into the logits
    wanted = logits if seen is None else penalize_repetition(logits, seen, options.repetition_penalty)
    token = choose(mask_disallowed(wanted, no_end, config), seeds, steps, options)
    return token, scores.gather(1, token[:, None]).squeeze(1) - log_z


def unnormalized_log_probs(logits: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return scores (N, V) and the normalizer (N,) or 0 that log p = score - normalizer needs.

    On a CPU torch computes log_softmax, which needs no normalizer any more, faster than logsumexp."""
    return (logits, logits.logsumexp(-1)) if logits.is_cuda else (logits.log_softmax(-1), 0.0)


def choose(logits: Tensor, seeds: Tensor, steps: Tensor, options: DecodeConfig) -> Tensor:
    """Return the likeliest token of each row (N,) at temperature 0, otherwise a sampled one."""
    if options.temperature == 0:
        return argmax(logits)
    p = truncate(logits / options.temperature, options.top_k, options.top_p, options.min_p).softmax(-1)
    # The exponential race: argmax of p_i / e_i with e_i ~ Exp(1) picks i with probability p_i.
    return (p / exponential_noise(seeds, steps, logits.shape[1])).argmax(-1)


BLOCK = 128  # tokens


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest of each row (N, V) -> (N,), the first of equal ones.

    On a CPU torch computes a maximum twenty times faster than an argmax, so the argmax is taken in one block only."""
    if logits.is_cuda or logits.shape[1] % BLOCK:
        return logits.argmax(-1)
    blocks = logits.unflatten(1, (-1, BLOCK))  # (N, V / BLOCK, BLOCK)
    block = blocks.amax(2).argmax(1)  # (N,)
    return block * BLOCK + blocks[torch.arange(len(blocks)), block].argmax(1)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens that were seen by the penalty if positive, else multiply them by it (CTRL's rule)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncate(logits: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Mask to -inf all tokens outside of top-k, top-p (nucleus) and min-p, in this order.

    top_k: the k likeliest tokens; top_p: the smallest set with this probability; min_p: this fraction of the best p."""
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
    """Return noise (N, n) distributed as Exp(1): a hash of seed, step and column."""
    key = hash_bits(
        hash_bits(seeds & UINT32_MAX) ^ hash_bits((seeds >> 32) + 0x9E3779B9) ^ hash_bits(steps.long() + 0x7F4A7C15)
    )[:, None]
    column = torch.arange(n, device=seeds.device) * 0x9E3779B1 & UINT32_MAX
    bits = hash_bits(hash_bits(column ^ key) + key)
    return -((bits >> 9).float() + 0.5).mul_(2.0**-23).log_()  # exact in fp32, never 0 or 1 before the logarithm
