"""Batched decoding of encoder-decoders: sentences of any lengths in, translations in the same order out.

Sentences of similar length are decoded together, by a budget of tokens. Each keeps its own length limit and seed, so its
result does not depend on its neighbours. On a GPU the CUDA-graph engine decodes them (decode/graphs/), on a CPU several
processes may share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.beam_search import beam_search
from regard.decode.constraints import (
    DecodableModel,
    Hypothesis,
    check_options,
    length_limits,
    pad_rows,
    token_budget,
    uses_cuda_graphs,
    warn_not_captured,
)
from regard.decode.cpu_processes import CAN_FORK, fork_map, idle_cores
from regard.decode.sampling import sample, sample_seeds
from regard.errors import RegardError
from regard.kernels.cpu_threads import one_thread, undivided_threads
from regard.layers.hooks import is_observed, labelled, paused
from regard.layers.quantization import count_weights
from regard.models.ensemble import Ensemble
from regard.text.special_tokens import EOS_TEMPLATE, SpecialTokenTemplate


def decode(
    model: DecodableModel,
    sources: Sequence[Sequence[int]],
    options: DecodeConfig,
    max_len: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
    token_template: SpecialTokenTemplate = EOS_TEMPLATE,
    seeds: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Return the translations of each source, best first; `progress` is called with the size of each finished batch.

    `sources` are ids without the special tokens of the template; `max_len` is the model's longest source. `seeds` are the
    random seeds of the sources; by default source i has `options.seed` + i."""
    check_options(options)
    check_decoding(model, options)
    check_lengths(sources, max_len, token_template, model)
    if uses_cuda_graphs(model, options.beam, options):
        from regard.decode.graphs.engine import NotCapturable

        try:
            return decode_in_graphs(model, sources, options, device, token_template, progress, seeds)
        except NotCapturable as error:
            warn_not_captured(model, str(error))
    batches = plan_batches(model, sources, options, device)
    results = decode_batches(model, sources, batches, options, max_len, device, progress, token_template, seeds)
    return [results[i] for i in range(len(sources))]


def check_decoding(model: Any, options: DecodeConfig) -> None:
    """Refuse settings that do nothing for this model, and those that need texts and not only tokens."""
    if options.mbr:
        raise RegardError(
            "decode.mbr compares texts, and this decodes tokens: translate with Translator.translate, or set it to 0"
        )
    if options.ensemble != "mean" and not isinstance(model, Ensemble):
        raise RegardError(
            f"decode.ensemble {options.ensemble} is for several models: give a second one, or leave it out"
        )
    if options.repetition_penalty != 1 and isinstance(model, Ensemble):
        raise RegardError(
            "decode.repetition_penalty divides the logits of one model, and several models together have none: set it to 1"
        )


def plan_batches(
    model: Any, sources: Sequence[Sequence[int]], options: DecodeConfig, device: torch.device
) -> list[list[int]]:
    """Return the indices of the sentences of each batch.

    The batches are the same whatever else runs on the machine, and in each of several processes that share its cores: a sum
    in another order may round to another word.
    """
    processes = count_processes(model, sources, options, undivided_threads()) if device.type == "cpu" else 1
    return list(make_batches(sources, options, device, processes))


def decode_batches(
    model: DecodableModel,
    sources: Sequence[Sequence[int]],
    batches: Sequence[list[int]],
    options: DecodeConfig,
    max_len: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
    token_template: SpecialTokenTemplate = EOS_TEMPLATE,
    seeds: Sequence[int] | None = None,
) -> dict[int, list[Hypothesis]]:
    """Return the translations, best first, of the sources whose indices are in `batches`, by their indices.

    `seeds` are those of all sources."""
    results: dict[int, list[Hypothesis]] = {}
    of_all = seeds if seeds is not None else range(options.seed, options.seed + len(sources))

    def work(rows: list[int]) -> list[list[Hypothesis]]:
        source = pad_rows([token_template.wrap(sources[i]) for i in rows], device)
        own = [of_all[i] for i in rows]
        return decode_batch(model, source, rows, own, options, max_len, token_template.start)

    def done(rows: list[int], found: list[list[Hypothesis]]) -> None:
        results.update(zip(rows, found, strict=True))
        progress(len(rows))

    if device.type != "cpu":
        for rows in batches:
            done(rows, work(rows))
        return results
    with one_thread() as threads:
        given = [sources[i] for rows in batches for i in rows]
        most = count_processes(model, given, options, threads) if len(batches) > 1 else 1
        n = min(most, 1 + idle_cores()) if most > 1 else 1
        if n == 1:
            for rows in batches:
                done(rows, work(rows))
        else:
            fork_map(
                lambda rows: [[astuple(h) for h in ranked] for ranked in work(rows)],
                batches,
                n,
                lambda i, found: done(batches[i], [[Hypothesis(*h) for h in ranked] for ranked in found]),
            )
    return results


class OverlongSentence(RegardError):
    """A sentence that a model cannot read, by its number among all that are translated, counted from 1."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"sentence {number} {reason}: split it into shorter sentences")
        self.number, self.reason = number, reason


def check_lengths(
    sources: Sequence[Sequence[int]], max_len: int, token_template: SpecialTokenTemplate, model: Any = None
) -> None:
    """Refuse sources that are longer than the model's longest, `max_len`, or too long for a member of an ensemble."""
    around = len(token_template.wrap(()))
    for i, ids in enumerate(sources):
        if len(ids) + around > max_len:
            raise OverlongSentence(
                i + 1,
                f"has {len(ids)} tokens, but the model was built for at most {max_len - around} (model.max_len)",
            )
        if isinstance(model, Ensemble) and (found := model.find_overlong(token_template.wrap(ids))):
            raise OverlongSentence(
                i + 1,
                f"has {found[0]} tokens in the vocabulary of another member of the ensemble, which reads at most "
                f"{found[1]} (model.max_len)",
            )


FORKED_ROWS = 8  # hypotheses per process: fewer cost little less than these, so they are not worth a process
FORKED_SECONDS = 0.2  # seconds of decoding for which processes are started, which takes a tenth of that
STEP_SECONDS, PRODUCTS_PER_SECOND = 3e-3, 5e10  # of one core: the least time of a step, and its multiplications
ROWS = 64  # hypotheses in a batch with which a core reaches its full speed


def count_processes(model: Any, sources: Sequence[Sequence[int]], options: DecodeConfig, threads: int) -> int:
    """Return how many processes may share these sentences on a CPU: one where the work is small, otherwise `threads`.

    As many are started as there are idle cores. A model that is being recorded is decoded in this process, where the
    recorder is."""
    width = max(options.beam, options.nbest)
    most = min(threads, len(sources), len(sources) * width // FORKED_ROWS)
    if most < 2 or not CAN_FORK or is_observed(model):
        return 1
    # A translation is taken to be as long as its source.
    tokens = width * sum(map(len, sources))
    steps = max(map(len, sources)) * -(-len(sources) * width // ROWS)
    seconds = tokens * count_weights(model) / PRODUCTS_PER_SECOND + steps * STEP_SECONDS
    return most if seconds >= FORKED_SECONDS else 1


def decode_in_graphs(
    model: Any,
    sources: Sequence[Sequence[int]],
    options: DecodeConfig,
    device: torch.device,
    token_template: SpecialTokenTemplate,
    progress: Callable[[int], None],
    seeds: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Decode by CUDA graphs; active recorders see a teacher-forced forward pass over the best translations afterwards."""
    from regard.decode.graphs.decoding import translate

    complete = [token_template.wrap(ids) for ids in sources]
    with paused(model):
        found = translate(model, complete, options, token_template.start, progress, seeds) if complete else []
    if is_observed(model):
        for rows in make_batches(sources, options, device):
            source = pad_rows([complete[i] for i in rows], device)
            record_forced_forward(model, source, rows, [found[i][0] for i in rows], token_template.start)
    return found


def decode_batch(
    model: DecodableModel,
    source: Tensor,
    rows: list[int],
    seeds: Sequence[int],
    options: DecodeConfig,
    max_len: int,
    start: tuple[int, ...],
) -> list[list[Hypothesis]]:
    """Decode source rows (B, S) eagerly; `rows` are their numbers among all sources, and `seeds` their random seeds."""
    with paused(model):  # beams are reordered at every step, so a recorder could not tell whose step it sees
        found = search(model, source, seeds, options, max_len, start)
    if is_observed(model):
        record_forced_forward(model, source, rows, [ranked[0] for ranked in found], start)
    return found


def search(
    model: DecodableModel,
    source: Tensor,
    seeds: Sequence[int],
    options: DecodeConfig,
    max_len: int,
    start: tuple[int, ...],
) -> list[list[Hypothesis]]:
    """Return the translations of source rows (B, S) with these random seeds, by beam search, greedily or by sampling."""
    limits = length_limits((source >= 0).sum(1), options, max_len - len(start) + 1)
    if options.temperature == 0 and options.beam > 1:
        return beam_search(model, source, limits, options, start)
    n = options.nbest  # samples of each sentence
    own = [each for seed in seeds for each in sample_seeds(seed, n)]
    flat = sample(model, source.repeat_interleave(n, 0), limits.repeat_interleave(n), own, options, start)
    ranked = (sorted(flat[i : i + n], key=lambda h: -h.score) for i in range(0, len(flat), n))
    return list(ranked)


@torch.no_grad()
def record_forced_forward(
    model: Any, source: Tensor, rows: list[int], best: list[Hypothesis], start: tuple[int, ...]
) -> None:
    """Run one teacher-forced forward pass over the best hypotheses, so that active recorders see it."""
    end: int = model.config.eos_token_id
    written = [[*start, *h.tokens, *([end] if h.ended else [])] for h in best]
    with labelled(model, rows, written):
        model(source, pad_rows([ids[:-1] for ids in written], source.device))  # the last token is never read


def make_batches(
    sources: Sequence[Sequence[int]], options: DecodeConfig, device: torch.device, processes: int = 1
) -> Iterator[list[int]]:
    """Yield the indices of sentences to decode together, longest first, so that a lack of memory shows at once.

    For several processes the number of batches is a multiple of theirs, and a batch has at most `ROWS` hypotheses."""
    width = max(options.beam, options.nbest)
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    most, start = len(order), 0
    if processes > 1:
        rounds = -(-len(order) * width // (processes * ROWS))
        most = -(-len(order) // (processes * rounds))
    while start < len(order):
        size = max(1, token_budget(options, device) // ((len(sources[order[start]]) + 1) * width))
        yield order[start : start + min(size, most)]
        start += min(size, most)
