"""Choosing the next token: greedy, or a random sample after temperature, top-k, top-p, min-p and epsilon.

The noise of a row is a pure function of (seed, step, token), so a sample depends neither on the other rows of the batch nor
on the device, and a step that is captured in a CUDA graph can compute it. The logits are changed in this order: repetition
penalty, temperature, top-k, top-p, min-p, epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.config import DecodeConfig, ModelConfig
from regard.decode.constraints import (
    DecodableModel,
    Hypothesis,
    length_normalizer,
    mask_disallowed,
    start_decoding,
    with_allowed_tokens,
)
from regard.kernels.hashing import UINT32_MAX, hash_bits
from regard.kernels.residual_norm import TRITON
from regard.text.special_tokens import EOS_TEMPLATE

# ---- translating -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def sample(
    model: DecodableModel,
    source: Tensor,
    limits: Tensor,
    seeds: Sequence[int],
    options: DecodeConfig,
    start: tuple[int, ...] = EOS_TEMPLATE.start,
) -> list[Hypothesis]:
    """Return one sampled translation of each source row (B, S); at temperature 0, the greedy one."""
    search = Sampling(model, options, start)
    search.add(source, limits, range(len(source)), seeds)
    found: dict[int, Hypothesis] = {}
    while search.rows:
        found |= search.step()
    return [found[i] for i in range(len(source))]


@dataclass
class SampledRow:
    """A translation while it is sampled."""

    number: int
    limit: int  # at most this many tokens
    seed: int
    written: list[int]  # the start tokens and those that were generated
    step: int = 0  # tokens generated
    log_prob: float = 0.0


class Sampling:
    """Sampling, or greedy decoding, of a batch of sentences, which others can join between two steps."""

    def __init__(
        self, model: DecodableModel, options: DecodeConfig, start: tuple[int, ...] = EOS_TEMPLATE.start
    ) -> None:
        self.model, self.options, self.start = model, options, start
        self.rows: list[SampledRow] = []
        self.state: Any = None
        self.last = torch.empty(0)  # (N,) the last token of each row
        self.seeds = torch.empty(0)  # (N,)

    @torch.inference_mode()
    def add(self, source: Tensor, limits: Tensor, numbers: Sequence[int], seeds: Sequence[int]) -> None:
        """Add source rows (B, S) with their length limits (B,); `numbers` identify them in the results of `step`."""
        # Several samples of a sentence follow each other; it is read once.
        unique, copies = source.unique_consecutive(dim=0, return_inverse=True)
        state, last = start_decoding(self.model, unique, self.start, self.options)
        if len(unique) < len(source):
            state.select(copies)
            last = last[copies]
        given = zip(numbers, limits.tolist(), seeds, strict=True)
        rows, row_seeds = [SampledRow(*each, list(self.start)) for each in given], seed_tensor(seeds, source.device)
        if not self.rows:
            self.rows, self.state, self.last, self.seeds = rows, state, last, row_seeds
            return
        self.state.shorten()
        self.state.join(state)
        self.rows, self.last = self.rows + rows, torch.cat([self.last, last])
        self.seeds = torch.cat([self.seeds, row_seeds])

    @torch.inference_mode()
    def step(self) -> dict[int, Hypothesis]:
        """Add a token to every row; return the translations of those that have ended, which leave the batch."""
        options, config, end = self.options, self.model.config, self.model.config.eos_token_id
        logits = self.model.step(self.last, self.state)
        seen = seen_tokens([row.written for row in self.rows], logits) if options.repetition_penalty != 1 else None
        steps = torch.tensor([row.step for row in self.rows], device=self.seeds.device)
        too_short = steps < options.min_len if options.min_len else False
        self.last, gained = choose_next(logits, seen, too_short, self.seeds, steps, options, config)
        for row, token, log_prob in zip(self.rows, self.last.tolist(), gained.tolist(), strict=True):
            row.written.append(token)
            row.log_prob += log_prob
            row.step += 1
        ended = {row.number: row for row in self.rows if row.written[-1] == end or row.step == row.limit}
        self.remove(ended.keys())
        return {number: self._hypothesis(row) for number, row in ended.items()}

    def remove(self, numbers: Collection[int]) -> None:
        """Remove rows from the batch."""
        kept = [i for i, row in enumerate(self.rows) if row.number not in numbers]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        if kept:
            places = torch.tensor(kept, device=self.last.device)
            self.last, self.seeds = self.last[places], self.seeds[places]
            self.state.select(places)

    def _hypothesis(self, row: SampledRow) -> Hypothesis:
        ids = row.written[len(self.start) :]
        ended = ids[-1] == self.model.config.eos_token_id
        score = row.log_prob / length_normalizer(len(ids), self.options)
        return Hypothesis(ids[: len(ids) - ended], score, row.log_prob, ended)


def text_seed(seed: int, number: int) -> int:
    """Return the seed of text `number` of several, counted from 0; those of consecutive texts are consecutive.

    After 2^62 - 1, the largest seed that the setting decode.seed can have for all texts, they begin at 0 again."""
    return (seed + number) % 2**62


def part_seed(seed: int, part: int) -> int:
    """Return the seed of a part of a text, such as its second sentence (1); the first part (0) has the text's own.

    The seeds of parts are far from each other and from those of the next texts, which follow that of the text."""
    return seed + part * 0x9E3779B97F4A7C15


def sample_seeds(seed: int, n: int) -> list[int]:
    """Return the seeds of n samples of a sentence that has the seed `seed`."""
    return [(seed * n + j) % 2**63 for j in range(n)]


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
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
    config = with_allowed_tokens(config, options)
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
    # The exponential race: argmax of p_i / e_i with e_i ~ Exp(1) picks i with probability p_i.
    if TRITON and logits.is_cuda and not options.top_k and options.top_p == 1:
        from regard.kernels import exponential_race_triton as race

        return race.run_race(logits, row_keys(seeds, steps), options.temperature, options.min_p, options.epsilon)
    kept = (options.top_k, options.top_p, options.min_p, options.epsilon)
    p = truncate(logits / options.temperature, *kept).softmax(-1)
    if p.device.type == "cpu" and p.dtype == torch.float32:
        from regard.kernels.exponential_race_numba import run_race

        return run_race(p, row_keys(seeds, steps))
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


def truncate(logits: Tensor, top_k: int, top_p: float, min_p: float = 0.0, epsilon: float = 0.0) -> Tensor:
    """Mask to -inf all tokens outside of top-k, top-p (nucleus), min-p and epsilon, in this order.

    top_k: the k likeliest tokens; top_p: the smallest set with this probability; min_p: this fraction of the best p;
    epsilon: this probability, but always the likeliest token (Hewitt et al. 2022)."""
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
    if epsilon:
        least = (logits.logsumexp(-1, keepdim=True) + math.log(epsilon)).minimum(logits.amax(-1, keepdim=True))
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def row_keys(seeds: Tensor, steps: Tensor) -> Tensor:
    """Return 32 random bits for each row (N,), a hash of its seed and its step."""
    return hash_bits(
        hash_bits(seeds & UINT32_MAX) ^ hash_bits((seeds >> 32) + 0x9E3779B9) ^ hash_bits(steps.long() + 0x7F4A7C15)
    )


def exponential_noise(seeds: Tensor, steps: Tensor, n: int) -> Tensor:
    """Return noise (N, n) distributed as Exp(1): a hash of seed, step and column."""
    key = row_keys(seeds, steps)[:, None]
    column = torch.arange(n, device=seeds.device) * 0x9E3779B1 & UINT32_MAX
    bits = hash_bits(hash_bits(column ^ key) + key)
    return -((bits >> 9).float() + 0.5).mul_(2.0**-23).log_()  # exact in fp32, never 0 or 1 before the logarithm
