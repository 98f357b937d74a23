"""Many sentences of any length in, translations out, on a GPU: a sentence that ends makes room for the next.

MERGED: A language model that goes on writing, on a GPU: a row that ends makes room for the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import Hypothesis, length_limits, pad_rows, start_decoding
from regard.decode.generation import GenerationRequest, unique_consecutive
from regard.decode.graphs.engine import DecodeJob, Engine, Snapshot, engine_for, power, rounded, slots_for
from regard.decode.graphs.slots import collect, unpack

Sample = tuple[int, int]  # which sentence, and which of its samples


@torch.inference_mode()
def translate(
    model: Any,
    sources: Sequence[Sequence[int]],
    options: DecodeConfig,
    start: tuple[int, ...],
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Hypothesis]]:
    """The translations of each source, best first; sources as the model reads them, special tokens included."""
    before: Snapshot | None = None
    with TranslationJob(model, sources, options, start) as job:
        while job.waiting or job.working:
            job.enter()
            after = job.burst()
            if before is not None:
                progress(job.harvest(before))
            before = after
        return job.results()


class TranslationJob(DecodeJob[Sample]):
    def __init__(
        self, model: Any, sources: Sequence[Sequence[int]], options: DecodeConfig, start: tuple[int, ...]
    ) -> None:
        self.model, self.sources, self.options, self.start = model, sources, options, start
        self.samples = options.nbest if options.temperature > 0 else 1  # of each sentence, each in its own slot
        lengths = torch.tensor([len(ids) for ids in sources])
        self.limits = length_limits(lengths, options, model.config.max_len - len(start) + 1).tolist()
        self.found: dict[Sample, list[Hypothesis]] = {}
        longest_first = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        engine = self._engine(len(sources) * self.samples, int(lengths.max()))
        super().__init__(engine, ((i, j) for i in longest_first for j in range(self.samples)))

    def _engine(self, sentences: int, longest: int) -> Engine:
        """With as many slots as the budget of tokens allows."""
        k = self.options.beam if self.options.temperature == 0 else 1
        width, room = rounded(longest), rounded(max(self.limits))
        columns = room + len(self.start) - 1
        b = slots_for(self.model, sentences, width * k, (k, columns), self.options, width)
        return engine_for(self.model, self.options, (b, k, room, columns), width)

    def enter(self) -> None:
        """Sentences that wait are read together and take the free slots."""
        entering, slots = self.next()
        if not entering:
            return
        engine, device = self.engine, self.engine.slots.last.device
        which, rows = torch.tensor(slots, device=device), engine.rows(slots)
        self._read(pad_rows([self.sources[i] for i, _ in entering], device), which)
        limits = torch.tensor([self.limits[i] for i, _ in entering], device=device)
        engine.slots.enter(which, limits, self.start[-1], len(self.start) - 1, self.options)
        seeds = [(self.options.seed + i) * self.options.nbest + j for i, j in entering for _ in range(engine.k)]
        engine.begin(rows, seeds, [self.start] * len(rows))
        for slot, sample in zip(slots, entering, strict=True):
            self.begin(slot, sample, self.limits[sample[0]])

    def _read(self, source: Tensor, which: Tensor) -> None:
        """Read the sources and the start tokens before the last, and put what they leave into the slots."""
        state, _ = start_decoding(self.model, source, self.start)
        self.engine.state.fill_slots(which, state, torch.arange(len(which), device=which.device))

    def harvest(self, snapshot: Snapshot) -> int:
        """Take what has ended; how many sentences these are."""
        snapshot.wait()
        stopped = unpack(snapshot.packed, self.engine.k)["stopped"].tolist()
        ended = [slot for slot in self.seen_by(snapshot) if stopped[slot]]
        if not ended:
            return 0
        done = [self.end(slot) for slot in ended]
        self.found.update(
            zip(done, collect(snapshot.packed, ended, self.engine.k, self.options, self.engine.slots.eos), strict=True)
        )
        return sum(number == 0 for _, number in done)

    def results(self) -> list[list[Hypothesis]]:
        samples = ([h for j in range(self.samples) for h in self.found[i, j]] for i in range(len(self.sources)))
        return [sorted(found, key=lambda h: -h.score) if self.samples > 1 else found for found in samples]


def graph_steps(model: Any, rows: list[GenerationRequest], options: DecodeConfig) -> Iterator[list[GenerationRequest]]:
    """Return an iterator over a few tokens more for every open row at a time, until all have ended; it yields those that
    got some. A model whose step cannot be captured raises `NotCapturable` here, before anything is written."""
    return _steps(GenerationJob(model, rows, options))


@torch.inference_mode()
def _steps(continuation: GenerationJob) -> Iterator[list[GenerationRequest]]:
    before: Snapshot | None = None
    with continuation as job:
        while job.waiting or job.working:
            job.enter()
            after = job.burst()
            if before is not None:
                yield job.hear(before)
            before = after


class GenerationJob(DecodeJob[GenerationRequest]):
    def __init__(self, model: Any, rows: list[GenerationRequest], options: DecodeConfig) -> None:
        self.model, self.options = model, options
        columns = max(64, power(max(len(row.prompt) + row.limit for row in rows)))  # a conversation grows
        room = min(max(64, power(max(row.limit for row in rows))), columns)
        b = slots_for(model, len(rows), columns, (1, columns), options)
        super().__init__(engine_for(model, options, (b, 1, room, columns)), rows)

    def enter(self) -> None:
        """Prompts that wait take the free slots. All but a prompt's last token are read, and that by the first step."""
        rows, slots = self.next()
        if not rows:
            return
        engine, device = self.engine, self.engine.slots.last.device
        which, prompts = torch.tensor(slots, device=device), [row.prompt for row in rows]
        self._read(prompts, which)
        last, before, limits = torch.tensor(
            [(row.prompt[-1], len(row.prompt) - 1, row.limit) for row in rows], device=device
        ).T
        engine.slots.enter(which, limits, last, before, self.options)
        engine.begin(which, [row.seed for row in rows], prompts)
        for slot, row in zip(slots, rows, strict=True):
            self.begin(slot, row, row.limit)

    def _read(self, prompts: list[list[int]], which: torch.Tensor) -> None:
        """Neighbours with the same prompt, samples of it, are read once."""
        different, copies = unique_consecutive(prompts)
        ids = pad_rows([prompt[:-1] for prompt in different], which.device)
        if ids.shape[1] == 0:
            return self.engine.state.clear_slots(which)
        _, state = self.model.read_prompt(ids)
        self.engine.state.fill_slots(which, state, torch.tensor(copies, device=ids.device))

    def hear(self, snapshot: Snapshot) -> list[GenerationRequest]:
        """Tell the rows what was written for them; those that have ended leave."""
        snapshot.wait()
        fields = unpack(snapshot.packed, 1)
        step, said, gained = fields["step"].tolist(), fields["said"][:, :, 0].numpy(), snapshot.gained.numpy()
        rows = []
        for slot in self.seen_by(snapshot):
            row = self.working[slot]
            fresh = slice(len(row.log_probs), step[slot])
            for token, log_prob in zip(said[slot, fresh].tolist(), gained[slot, fresh].tolist(), strict=True):
                row.add(token, log_prob)
                if row.end:
                    self.engine.slots.active[slot] = 0  # it may not know yet
                    self.end(slot)
                    break
            rows.append(row)
        return rows
