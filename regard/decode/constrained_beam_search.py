"""Lexically constrained beam search: every translation contains given phrases, or repeats no n-gram of tokens.

Dynamic beam allocation (Post and Vilar 2018): hypotheses are sorted into banks by the number of constraint tokens that
they already contain, and the K places of the beam are divided among the banks that have candidates, the fullest bank
first. Otherwise hypotheses that do not contain the phrases, which are more probable, would take all places. To the
candidates of ordinary beam search are added, for each hypothesis, the next token of each phrase that it lacks and its most
probable token. The end token is allowed only after all phrases. A candidate is dropped if the phrases it lacks would not
fit before the length limit, so near the limit phrases are forced. Without phrases there is one bank, and the search is that
of decode/beam_search.py.

The bookkeeping is done by the host, hypothesis by hypothesis: the search is for the few sentences that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.batch_decoding import make_batches
from regard.decode.beam_search import best_extensions
from regard.decode.constraints import (
    DecodableModel,
    Hypothesis,
    check_options,
    length_limits,
    length_normalizer,
    log_probabilities,
    pad_rows,
    start_decoding,
)
from regard.errors import RegardError
from regard.kernels.cpu_threads import one_thread
from regard.layers.hooks import paused
from regard.text.special_tokens import EOS_TEMPLATE, SpecialTokenTemplate


@dataclass(frozen=True)
class Phrase:
    """A sequence of tokens that a translation must contain, as it is written inside a sentence and at its beginning."""

    inside: tuple[int, ...]
    at_start: tuple[int, ...] = ()  # empty: as `inside`


@dataclass(frozen=True)
class OutputConstraints:
    """What the translation of one sentence must contain and must not repeat."""

    phrases: tuple[Phrase, ...] = ()
    only_after: frozenset[int] = (
        frozenset()
    )  # tokens that are not allowed before all phrases are there, such as full stops
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens occurs twice; 0: any may


@dataclass(frozen=True)
class OpenHypothesis:
    """An open hypothesis: its tokens, and how much of each phrase it contains."""

    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0
    lacking: tuple[int, ...] = ()  # numbers of the phrases that it does not contain yet
    begin: int = 0  # where the last phrase that it contains ends: phrases do not overlap
    current: tuple[int, ...] = ()  # the rest of the phrase that its last tokens begin
    current_phrase: int = -1
    follows_phrase: bool = False  # its last token completes a phrase

    def add(self, token: int, log_prob: float, phrases: Sequence[Phrase]) -> OpenHypothesis:
        """Return the hypothesis with one more token."""
        tokens = (*self.tokens, token)
        rest, phrase = find_progress(tokens, self.begin, self.lacking, phrases)
        made = OpenHypothesis(tokens, log_prob, self.lacking, self.begin, rest, phrase)
        if phrase < 0 or rest:
            return made
        lacking = tuple(i for i in self.lacking if i != phrase)
        return replace(made, lacking=lacking, begin=len(tokens), current_phrase=-1, follows_phrase=True)

    def needed(self, phrases: Sequence[Phrase]) -> int:
        """Return how many more tokens the phrases take that it lacks."""
        others = sum(len(phrases[i].inside) for i in self.lacking if i != self.current_phrase)
        return others + len(self.current)

    def next_tokens(self, phrases: Sequence[Phrase]) -> set[int]:
        """Return the tokens that continue the phrase it is in, or begin one that it lacks."""
        if self.current:
            return {self.current[0]}
        begins = (phrases[i].inside if self.tokens else phrases[i].at_start or phrases[i].inside for i in self.lacking)
        return {ids[0] for ids in begins}

    def repeated(self, n: int) -> set[int]:
        """Return the tokens that would complete an n-gram for the second time."""
        if n < 1 or len(self.tokens) < n:
            return set()
        last = self.tokens[len(self.tokens) - n + 1 :]
        return {self.tokens[i + n - 1] for i in range(len(self.tokens) - n + 1) if self.tokens[i : i + n - 1] == last}


def find_progress(
    tokens: tuple[int, ...], begin: int, lacking: Sequence[int], phrases: Sequence[Phrase]
) -> tuple[tuple[int, ...], int]:
    """Return what is still missing of the phrase that the last tokens begin, and its number; -1: they begin none.

    Of several phrases that they begin or complete, it is the one with the longest part already there."""
    best: tuple[int, tuple[int, ...], int] = (0, (), -1)  # a complete phrase goes before another of the same length
    for i in lacking:
        forms = [(phrases[i].inside, range(len(phrases[i].inside), 0, -1))]
        if phrases[i].at_start:  # only the whole hypothesis can be the beginning of such a phrase
            forms.append((phrases[i].at_start, range(len(tokens), len(tokens) - 1, -1)))
        for ids, lengths in forms:
            for n in lengths:
                is_better = best[0] < n or (best[0] == n == len(ids) and bool(best[1]))
                if is_better and n <= min(len(ids), len(tokens) - begin) and tokens[len(tokens) - n :] == ids[:n]:
                    best = n, ids[n:], i
                    break
    return best[1], best[2]


@dataclass
class Search:
    """The search for the translations of one sentence."""

    number: int  # of its source
    limit: int  # tokens, the end token included
    constraints: OutputConstraints
    open: list[OpenHypothesis]
    done: list[Hypothesis] = field(default_factory=list)  # best first

    @property
    def total(self) -> int:
        """The number of tokens of all phrases."""
        return sum(len(phrase.inside) for phrase in self.constraints.phrases)

    def places(self, k: int) -> int:
        """Return how many of K places the hypotheses with all phrases have, where every bank has candidates."""
        return -(-k // (self.total + 1))

    def advance(
        self, candidates: list[tuple[float, int, int]], k: int, step: int, options: DecodeConfig, end: int
    ) -> list[int]:
        """Replace the open hypotheses by extensions of them; return the parent of each.

        `candidates` are (log-probability, parent, token), best first."""
        phrases = self.constraints.phrases
        ending: list[tuple[OpenHypothesis, int]] = []
        every: list[tuple[OpenHypothesis, int, bool]] = []
        for log_prob, parent, token in candidates:
            if token == end:
                if not self.open[parent].lacking:
                    every.append((replace(self.open[parent], log_prob=log_prob), parent, True))
                continue
            made = self.open[parent].add(token, log_prob, phrases)
            if made.needed(phrases) <= self.limit - step - 1:
                every.append((made, parent, False))
        is_last = step + 1 >= self.limit
        banks = [self.total - made.needed(phrases) for made, _, _ in every]
        for i in allocate(banks, k):
            made, parent, ends = every[i]
            if ends or is_last:
                ending.append((made, step + 1))
        for made, length in ending:
            score = made.log_prob / length_normalizer(length, options)
            self.done.append(Hypothesis(list(made.tokens), score, made.log_prob, len(made.tokens) < length))
        self.done = sorted(self.done, key=lambda h: -h.score)[:k]
        kept = [] if is_last else [i for i, (_, _, ends) in enumerate(every) if not ends]
        chosen = [kept[i] for i in allocate([banks[i] for i in kept], k)]
        chosen.sort(key=lambda i: -every[i][0].log_prob)
        self.open = [every[i][0] for i in chosen]
        return [every[i][1] for i in chosen]

    def has_stopped(self, k: int, step: int, options: DecodeConfig) -> bool:
        """Return whether no open hypothesis that contains all phrases will beat the finished ones."""
        if not self.open or step + 1 >= self.limit:
            return True
        enough = max(options.nbest, self.places(k))
        if len(self.done) < enough:
            return False
        complete = [one.log_prob for one in self.open if not one.lacking]
        proven = options.beam_stop == "proven" and options.length_penalty > 0
        length = self.limit if proven else step + 1
        return not complete or self.done[enough - 1].score >= max(complete) / length_normalizer(length, options)


def allocate(banks: Sequence[int], k: int) -> list[int]:
    """Return which K candidates are kept, given the bank of each: in turn the next of every bank, the fullest bank first."""
    members: dict[int, list[int]] = {}
    for i, bank in enumerate(banks):
        members.setdefault(bank, []).append(i)
    order = [members[bank] for bank in sorted(members, reverse=True)]
    rounds = range(max(map(len, order), default=0))
    kept = [own[turn] for turn in rounds for own in order if turn < len(own)]
    return sorted(kept[:k])


@torch.inference_mode()
def constrained_beam_search(
    model: DecodableModel,
    source: Tensor,
    limits: Tensor,
    constraints: Sequence[OutputConstraints],
    options: DecodeConfig,
    start: tuple[int, ...] = EOS_TEMPLATE.start,
    continues_word: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """Return the `nbest` best translations of each source row (B, S) that satisfy its constraints, best first.

    A limit that leaves no room for the phrases and the end token is raised. After a phrase no token of `continues_word`
    (V,) follows, so that a phrase ends where a word ends."""
    k, end = options.beam, model.config.eos_token_id
    state, last = start_decoding(model, source, start, options)
    running = []
    for i, (limit, own) in enumerate(zip(limits.tolist(), constraints, strict=True)):
        longest = sum(max(len(phrase.inside), len(phrase.at_start)) for phrase in own.phrases)
        lacking = tuple(range(len(own.phrases)))
        running.append(Search(i, max(limit, longest + 1) if longest else limit, own, [OpenHypothesis(lacking=lacking)]))
    found: dict[int, list[Hypothesis]] = {}
    step = 0
    while running:
        log_p = log_probabilities(model.step(last, state), step, options, model.config)  # (B*K or B, V)
        rows = log_p.shape[0] // len(running)
        log_p = log_p.view(len(running), rows, -1)
        mask_forbidden(log_p, running, end, continues_word)
        offers = list_candidates(log_p, running, k)
        parents = [one.advance(own, k, step, options, end) for one, own in zip(running, offers, strict=True)]
        stopped = [one.has_stopped(k, step, options) for one in running]
        for one, is_over in zip(running, stopped, strict=True):
            if is_over:
                found[one.number] = one.done[: options.nbest]
        remaining = [i for i, is_over in enumerate(stopped) if not is_over]
        running = [running[i] for i in remaining]
        if not running:
            break
        if any(stopped):
            state.select(torch.tensor(remaining, device=source.device))
        width = [[*parents[i], *[0] * (k - len(parents[i]))] for i in remaining]
        state.reorder(torch.tensor(width, device=source.device))
        tokens = [[*(h.tokens[-1] for h in one.open), *[0] * (k - len(one.open))] for one in running]
        last = torch.tensor(tokens, device=source.device).flatten()
        step += 1
    return [found[i] for i in range(len(source))]


def mask_forbidden(log_p: Tensor, running: Sequence[Search], end: int, continues_word: Tensor | None) -> None:
    """Mask to -inf, in log_p (B, K, V), tokens that come too early, repeat an n-gram or lengthen a phrase's last word.

    Tokens that a hypothesis needs for its phrases are left, and so is the end token."""
    for i, one in enumerate(running):
        for row, hypothesis in enumerate(one.open):
            needed = hypothesis.next_tokens(one.constraints.phrases)
            banned = hypothesis.repeated(one.constraints.no_repeat_ngram_size)
            banned = (banned | one.constraints.only_after if hypothesis.lacking else banned) - needed - {end}
            if banned:
                log_p[i, row, list(banned)] = -torch.inf
            if hypothesis.follows_phrase and continues_word is not None:
                kept = log_p[i, row, list(needed)] if needed else None
                log_p[i, row].masked_fill_(continues_word.to(log_p.device), -torch.inf)
                if kept is not None:
                    log_p[i, row, list(needed)] = kept


def list_candidates(log_p: Tensor, running: Sequence[Search], k: int) -> list[list[tuple[float, int, int]]]:
    """Return the candidates (log-probability, parent, token) of each sentence, best first, for log_p (B, K, V).

    They are the 2K best extensions of all hypotheses and, in a sentence with phrases, the most probable token of each
    hypothesis and the tokens that its phrases need next."""
    rows = log_p.shape[1]
    totals = [[*(h.log_prob for h in one.open), *[-torch.inf] * (rows - len(one.open))] for one in running]
    log_prob = torch.tensor(totals, device=log_p.device)  # (B, K)
    best = [x.tolist() for x in best_extensions(log_p, log_prob, 2 * k)]
    found = []
    for i, one in enumerate(running):
        offers = {(parent, token): value for value, parent, token in zip(*(x[i] for x in best), strict=True)}
        if one.constraints.phrases:
            for row, (value, token) in enumerate(zip(*(x.tolist() for x in log_p[i].max(-1)), strict=True)):
                if row < len(one.open):
                    offers.setdefault((row, token), value + one.open[row].log_prob)
                    needed = list(one.open[row].next_tokens(one.constraints.phrases))
                    values = log_p[i, row, needed].tolist() if needed else []
                    offers |= {(row, t): v + one.open[row].log_prob for t, v in zip(needed, values, strict=True)}
        ranked = sorted(((value, *place) for place, value in offers.items()), key=lambda offer: -offer[0])
        found.append([offer for offer in ranked if offer[0] > -torch.inf])
    return found


def decode_constrained(
    model: DecodableModel,
    sources: Sequence[Sequence[int]],
    constraints: Sequence[OutputConstraints],
    options: DecodeConfig,
    max_len: int,
    device: torch.device,
    token_template: SpecialTokenTemplate = EOS_TEMPLATE,
    continues_word: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """Return the translations of each source that satisfy its constraints, best first, as `batch_decoding.decode` does."""
    check_options(options)
    if options.coverage_penalty or options.prune or options.mbr:
        raise RegardError(
            "a constrained search ranks by length and log p alone: set decode.coverage_penalty, decode.prune and "
            "decode.mbr to 0"
        )
    found: dict[int, list[Hypothesis]] = {}
    with paused(model), one_thread():
        for rows in make_batches(sources, options, device):
            source = pad_rows([token_template.wrap(sources[i]) for i in rows], device)
            limits = length_limits((source >= 0).sum(1), options, max_len - len(token_template.start) + 1)
            own = [constraints[i] for i in rows]
            ranked = constrained_beam_search(model, source, limits, own, options, token_template.start, continues_word)
            found.update(zip(rows, ranked, strict=True))
    return [found[i] for i in range(len(sources))]
