"""A language model that goes on writing, on a GPU: a row that ends makes room for the next prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.config import DecodeConfig
from regard.decode.graphed.beams import unpack
from regard.decode.graphed.engine import Job, Snapshot, engine_for, power, slots_for
from regard.decode.graphed.model import fill
from regard.decode.row import Row, distinct
from regard.decode.rules import pad
from regard.layers.cache import StepCache
from regard.layers.masks import positions_of
from regard.models.gpt import GPT


@torch.inference_mode()
def steps(model: GPT, rows: list[Row], options: DecodeConfig) -> Iterator[list[Row]]:
    """A few tokens more for every open row at a time, until all have ended; yields those that got some."""
    before: Snapshot | None = None
    with Continuation(model, rows, options) as job:
        while job.waiting or job.working:
            job.enter()
            after = job.burst()
            if before is not None:
                yield job.hear(before)
            before = after


class Continuation(Job[Row]):
    def __init__(self, model: GPT, rows: list[Row], options: DecodeConfig) -> None:
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
        different, copies = distinct(prompts)
        ids = pad([prompt[:-1] for prompt in different], which.device)
        if ids.shape[1] == 0:
            return
        cache = StepCache()
        self.model.hidden(ids, positions_of(ids), cache)
        fill(self.engine.memory, self.model, cache, which, torch.tensor(copies, device=ids.device))

    def hear(self, snapshot: Snapshot) -> list[Row]:
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
