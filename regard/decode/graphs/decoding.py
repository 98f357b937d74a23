"""Translation and generation with continuous batching on a GPU: a sentence that ends frees its slot for the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import Hypothesis, length_limits, pad_rows, start_decoding
from regard.decode.generation import GenerationRequest, unique_consecutive
from regard.decode.graphs.engine import (
    Engine,
    GraphDecoding,
    Snapshot,
    count_slots,
    next_power_of_two,
    round_up,
    take_engine,
)
from regard.decode.graphs.slots import collect, unpack
from regard.decode.sampling import sample_seeds

Sample = tuple[int, int]  # the number of a sentence, and of a sample of it

# ---- translation -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def translate(
    model: Any,
    sources: Sequence[Sequence[int]],
    options: DecodeConfig,
    start: tuple[int, ...],
    progress: Callable[[int], None] = lambda done: None,
    seeds: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Return the translations of each source, best first; the sources include their special tokens.

    `seeds` are the random seeds of the sources; by default source i has `options.seed` + i."""
    before: Snapshot | None = None
    with GraphTranslation(model, sources, options, start, seeds) as job:
        while job.waiting or job.working:
            job.enter()
            after = job.launch_steps()
            if before is not None:
                progress(job.collect_finished(before))
            before = after
        return job.results()


class GraphTranslation(GraphDecoding[Sample]):
    """A decoding job whose items are sources, or samples of sources."""

    def __init__(
        self,
        model: Any,
        sources: Sequence[Sequence[int]],
        options: DecodeConfig,
        start: tuple[int, ...],
        seeds: Sequence[int] | None = None,
    ) -> None:
        self.model, self.options, self.start = model, options, start
        self.sources = dict(enumerate(sources))
        self.samples = options.nbest if options.temperature > 0 else 1  # of each sentence, each in its own slot
        own = seeds if seeds is not None else range(options.seed, options.seed + len(sources))
        self.seeds = {i: sample_seeds(seed, self.samples) for i, seed in enumerate(own)}
        lengths = torch.tensor([len(ids) for ids in sources])
        limits = length_limits(lengths, options, model.config.max_len - len(start) + 1).tolist()
        self.limits = dict(enumerate(limits))
        self.found: dict[Sample, list[Hypothesis]] = {}
        longest_first = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        engine = self._engine(len(sources) * self.samples, int(lengths.max()), max(limits))
        super().__init__(engine, ((i, j) for i in longest_first for j in range(self.samples)))

    def _engine(self, sentences: int, longest: int, limit: int) -> Engine:
        """Take an engine with as many slots as the budget of tokens allows, for these lengths."""
        k = self.options.beam if self.options.temperature == 0 else 1
        # Powers of two: training on a reward translates batches of all lengths, and each shape is captured anew.
        width, room = round_up(longest), max(64, next_power_of_two(limit))
        columns = room + len(self.start) - 1
        b = count_slots(self.model, sentences, width * k, (k, columns), self.options, width)
        return take_engine(self.model, self.options, (b, k, room, columns), width)

    def enter(self) -> None:
        """Admit waiting sentences (continuous batching): encode them together and put them into the free slots."""
        entering, slots = self.take_waiting()
        if not entering:
            return
        engine, device = self.engine, self.engine.slots.last.device
        which, rows = torch.tensor(slots, device=device), engine.rows(slots)
        self._encode_sources([self.sources[i] for i, _ in entering], which)
        limits = torch.tensor([self.limits[i] for i, _ in entering], device=device)
        engine.slots.enter(which, limits, self.start[-1], len(self.start) - 1, self.options)
        seeds = [self.seeds[i][j] for i, j in entering for _ in range(engine.k)]
        engine.set_rows(rows, seeds, [self.start] * len(rows))
        for slot, sample in zip(slots, entering, strict=True):
            self.begin(slot, sample, self.limits[sample[0]])

    def _encode_sources(self, sources: list[Sequence[int]], which: Tensor) -> None:
        """Read sources and all start tokens but the last; copy the resulting state into slots `which` (n,).

        A source with several samples, which follow each other, is read once."""
        unique, copies = unique_consecutive(sources)
        state, _ = start_decoding(self.model, pad_rows(unique, which.device), self.start, self.options)
        self.engine.state.fill_slots(which, state, torch.tensor(copies, device=which.device))

    def collect_finished(self, snapshot: Snapshot) -> int:
        """Collect the hypotheses of sentences that have stopped and free their slots; return the number of sentences."""
        snapshot.wait()
        stopped = unpack(snapshot.packed, self.engine.k)["stopped"].tolist()
        ended = [slot for slot in self.slots_in(snapshot) if stopped[slot]]
        if not ended:
            return 0
        done = [self.end(slot) for slot in ended]
        self.found.update(
            zip(done, collect(snapshot.packed, ended, self.engine.k, self.options, self.engine.slots.eos), strict=True)
        )
        return sum(number == 0 for _, number in done)

    def results(self) -> list[list[Hypothesis]]:
        """Return the hypotheses of each source, best first."""
        samples = ([h for j in range(self.samples) for h in self.found[i, j]] for i in range(len(self.sources)))
        return [sorted(found, key=lambda h: -h.score) if self.samples > 1 else found for found in samples]


class OpenTranslation(GraphTranslation):
    """A translation that sources are added to while it runs, and removed from."""

    def __init__(self, model: Any, options: DecodeConfig, start: tuple[int, ...], width: int, slots: int) -> None:
        """Make slots for sources of up to `width` tokens, as many as are asked for if there is memory."""
        self.model, self.options, self.start = model, options, start
        self.samples = options.nbest if options.temperature > 0 else 1
        self.sources: dict[int, Sequence[int]] = {}
        self.seeds: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        lengths = torch.arange(width + 1)
        self.limits_by_length = length_limits(lengths, options, model.config.max_len - len(start) + 1).tolist()
        self.found: dict[Sample, list[Hypothesis]] = {}
        GraphDecoding.__init__(self, self._engine(slots, width, self.limits_by_length[-1]), ())

    def add(self, number: int, ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Let a source wait for a slot, or for one for each sample; `number` identifies it in the results."""
        self.sources[number], self.seeds[number] = ids, list(seeds)
        self.limits[number] = self.limits_by_length[len(ids)]
        self.waiting.extend((number, sample) for sample in range(self.samples))

    @torch.inference_mode()
    def advance(self, before: Snapshot | None) -> tuple[dict[int, list[Hypothesis]], Snapshot | None]:
        """Admit waiting sources, launch steps, and read the snapshot before them; return what is done, and the snapshot."""
        self.enter()
        after = self.launch_steps()
        if before is not None:
            self.collect_finished(before)
        done = {}
        for number in {number for number, _ in self.found}:
            own = [self.found.get((number, sample)) for sample in range(self.samples)]
            if all(own):
                ranked = [h for found in own if found for h in found]
                done[number] = sorted(ranked, key=lambda h: -h.score) if self.samples > 1 else ranked
        for number in done:
            self.forget(number)
        return done, after

    def drop(self, numbers: Collection[int]) -> None:
        """Remove sources whose translations nobody waits for."""
        self.waiting = deque(item for item in self.waiting if item[0] not in numbers)
        for slot in [slot for slot, item in self.working.items() if item[0] in numbers]:
            self.engine.slots.active[slot] = 0
            self.end(slot)
        for number in numbers:
            self.forget(number)

    def forget(self, number: int) -> None:
        for sample in range(self.samples):
            self.found.pop((number, sample), None)
        self.sources.pop(number, None)
        self.seeds.pop(number, None)
        self.limits.pop(number, None)


# ---- generation --------------------------------------------------------------------------------------------------------


def graph_steps(model: Any, rows: list[GenerationRequest], options: DecodeConfig) -> Iterator[list[GenerationRequest]]:
    """Return an iterator that adds a few tokens at a time to the open rows and yields the rows that got some.

    A model whose step cannot be captured raises `NotCapturable` here, before any token is written."""
    return _graph_steps(GraphGeneration(model, rows, options))


@torch.inference_mode()
def _graph_steps(generation: GraphGeneration) -> Iterator[list[GenerationRequest]]:
    before: Snapshot | None = None
    with generation as job:
        while job.waiting or job.working:
            job.enter()
            after = job.launch_steps()
            if before is not None:
                yield job.deliver_tokens(before)
            before = after


class GraphGeneration(GraphDecoding[GenerationRequest]):
    """A decoding job whose items are prompts to continue."""

    def __init__(self, model: Any, rows: list[GenerationRequest], options: DecodeConfig) -> None:
        self.model, self.options = model, options
        # Powers of two: the growing prompts of a conversation fit the same engine for many turns.
        columns = max(64, next_power_of_two(max(len(row.prompt) + row.limit for row in rows)))
        room = min(max(64, next_power_of_two(max(row.limit for row in rows))), columns)
        b = count_slots(model, len(rows), columns, (1, columns), options)
        super().__init__(take_engine(model, options, (b, 1, room, columns)), rows)

    def enter(self) -> None:
        """Admit waiting prompts (continuous batching) into the free slots.

        All tokens but the last are read here, the last by the first step.
        """
        rows, slots = self.take_waiting()
        if not rows:
            return
        engine, device = self.engine, self.engine.slots.last.device
        which, prompts = torch.tensor(slots, device=device), [row.prompt for row in rows]
        self._prefill(prompts, which)
        last, before, limits = torch.tensor(
            [(row.prompt[-1], len(row.prompt) - 1, row.limit) for row in rows], device=device
        ).T
        engine.slots.enter(which, limits, last, before, self.options)
        engine.set_rows(which, [row.seed for row in rows], prompts)
        for slot, row in zip(slots, rows, strict=True):
            self.begin(slot, row, row.limit)

    def _prefill(self, prompts: list[list[int]], which: torch.Tensor) -> None:
        """Read prompts without their last tokens into slots `which` (n,); a prompt with several samples is read once."""
        unique, copies = unique_consecutive(prompts)
        ids = pad_rows([prompt[:-1] for prompt in unique], which.device)
        if ids.shape[1] == 0:
            return self.engine.state.clear_slots(which)
        _, state = self.model.prefill(ids)
        self.engine.state.fill_slots(which, state, torch.tensor(copies, device=ids.device))

    def deliver_tokens(self, snapshot: Snapshot) -> list[GenerationRequest]:
        """Add the new tokens to their requests, free the slots of those that have ended, and return the requests."""
        snapshot.wait()
        fields = unpack(snapshot.packed, 1)
        step, tokens = fields["step"].tolist(), fields["token_ids"][:, :, 0].numpy()
        log_probs = snapshot.token_log_probs.numpy()
        rows = []
        for slot in self.slots_in(snapshot):
            row = self.working[slot]
            fresh = slice(len(row.log_probs), step[slot])
            for token, log_prob in zip(tokens[slot, fresh].tolist(), log_probs[slot, fresh].tolist(), strict=True):
                row.add(token, log_prob)
                if row.end:
                    self.engine.slots.active[slot] = 0  # `on_token` may have stopped it, which the device cannot know
                    self.end(slot)
                    break
            rows.append(row)
        return rows


class OpenGeneration(GraphGeneration):
    """A generation whose requests are put into `waiting` while it runs."""

    def __init__(self, model: Any, options: DecodeConfig, columns: int, slots: int) -> None:
        """Make slots for prompts and continuations of up to `columns` tokens together."""
        self.model, self.options = model, options
        b = count_slots(model, slots, columns, (1, columns), options)
        GraphDecoding.__init__(self, take_engine(model, options, (b, 1, columns, columns)), ())

    @torch.inference_mode()
    def advance(self, before: Snapshot | None) -> Snapshot | None:
        """Admit waiting requests, launch steps, and add the tokens of the snapshot before them to their requests."""
        self.enter()
        after = self.launch_steps()
        if before is not None:
            self.deliver_tokens(before)
        return after

    def drop(self, rows: Collection[GenerationRequest]) -> None:
        """Remove requests that nobody waits for."""
        gone = {id(row) for row in rows}
        self.waiting = deque(row for row in self.waiting if id(row) not in gone)
        for slot in [slot for slot, row in self.working.items() if id(row) in gone]:
            self.engine.slots.active[slot] = 0
            self.end(slot)
